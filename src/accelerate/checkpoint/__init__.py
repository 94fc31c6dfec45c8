"""Checkpoints: plan, stage, write, commit, retain; committed whole or not there at all."""
