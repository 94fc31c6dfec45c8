"""The members of a run under `meshwright launch --survive`: replicas that come and go. Start with `events`."""
