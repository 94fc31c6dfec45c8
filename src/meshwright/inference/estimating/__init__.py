"""Estimate the memory of a model from its definition. Start with `estimate`."""
