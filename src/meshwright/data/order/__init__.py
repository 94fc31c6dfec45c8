"""The global order of samples, the shard of each rank, and positions in the order. Start with `orders`."""
