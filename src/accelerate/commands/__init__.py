"""The `accelerate` command: one file per verb."""
