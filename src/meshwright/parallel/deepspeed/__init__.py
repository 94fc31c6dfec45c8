"""DeepSpeed engines as a strategy. Start with `strategy`."""
