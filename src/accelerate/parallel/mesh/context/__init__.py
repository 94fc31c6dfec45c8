"""Context parallelism: ring attention, and checks of the model. Start with `ring`."""
