"""Batch sizes that fit and keep the global batch: `Accelerator.fit_batch_size`. Start with `search`."""
