"""Scripts as users write them, run under accelerate 1.15 and under this library; see `../runner.py`."""
