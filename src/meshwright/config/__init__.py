"""Settings, plugins and the origin of each value. Imports no torch."""
