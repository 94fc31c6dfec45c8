"""Search for the fastest way to spread a run that fits on its devices."""
