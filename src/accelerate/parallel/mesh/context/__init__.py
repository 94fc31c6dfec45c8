"""Context parallelism: ring attention, and operations that need whole sequences. Start with `ring`."""
