"""One strategy per way of spreading a model over processes."""
