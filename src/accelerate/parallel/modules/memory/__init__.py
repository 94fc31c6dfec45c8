"""What takes less memory for the same result: chunked losses, recomputed or offloaded activations, early steps."""
