"""Plan a run without running it: memory, communication and time of each rank. Start with `trace` and `plan`."""
