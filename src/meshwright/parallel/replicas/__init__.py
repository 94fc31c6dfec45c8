"""Replicas of a model, one per process, kept equal by reducing gradients: begin with `ddp.py`."""
