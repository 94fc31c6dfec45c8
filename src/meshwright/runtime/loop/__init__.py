"""State of the training loop that every process keeps: accumulation, seeds, progress lines."""
