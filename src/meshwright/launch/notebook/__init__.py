"""Launch a Python function instead of a script. Start with `launcher`."""
