"""Live views in the terminal. Start with `live`."""
