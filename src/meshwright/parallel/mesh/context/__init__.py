"""Sequences divided over processes: attention that joins them, and checks of the model. Start with `sequences`."""
