"""Checkpoints: plan, stage, write, commit, retain. A checkpoint is committed as a whole or does not exist."""
