"""The parts of a checkpoint: models, optimizers, generators, positions. Start with `states`."""
