"""Weights that travel between disk, host and device while something else computes. Begin with `read_ahead.py`."""
