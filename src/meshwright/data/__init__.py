"""Data: one global order of samples, sharded over processes."""
