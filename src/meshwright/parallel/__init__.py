"""Parallelism strategies: how models are distributed over processes."""
