"""Measure the throughput of a run. Start with `meter`."""
