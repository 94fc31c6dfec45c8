"""Compute the time of a step from the traces of its ranks. Start with `step`; `devices` holds what hardware can do."""
