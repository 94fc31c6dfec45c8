"""The global order of samples, the part of each rank, and positions in it. Start with `orders`."""
