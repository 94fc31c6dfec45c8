"""Samples: one global order, shared out so that every process sees its own part."""
