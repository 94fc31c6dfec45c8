"""Compare recordings, and find the first module that differs. Start with `comparison`."""
