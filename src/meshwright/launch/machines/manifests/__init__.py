"""Jobs of clusters for the settings of a launch: manifests of Kubernetes, tasks of SkyPilot."""
