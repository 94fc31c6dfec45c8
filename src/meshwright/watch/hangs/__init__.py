"""Find the rank that keeps the others waiting, and raise an error on all of them. Start with `verdict`."""
