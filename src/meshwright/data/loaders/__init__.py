"""Prepared data loaders. Start with `base`."""
