"""Less memory for the same result: chunked losses, recomputed or offloaded activations, tiles, early steps."""
