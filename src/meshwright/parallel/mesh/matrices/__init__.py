"""Optimizers that need whole matrices, as Muon, on sharded parameters. Start with `stepping`."""
