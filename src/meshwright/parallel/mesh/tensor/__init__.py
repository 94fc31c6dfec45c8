"""Tensor parallelism: plans, and gradients that a plan leaves partial. Start with `plans`."""
