"""Plan a run without running it: memory, communication and time of each rank. Start with `plan`; `trace` is what everything is computed from."""
