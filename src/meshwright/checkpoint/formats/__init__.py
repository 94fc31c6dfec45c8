"""File formats of objects and models. Start with `codec`."""
