"""The members of a run under `accelerate launch --survive`: replicas that come and go. Start with `events`."""
