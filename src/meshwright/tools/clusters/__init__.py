"""Clusters that start a launch: manifests of Kubernetes, tasks of SkyPilot, actors of Ray."""
