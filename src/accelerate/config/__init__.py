"""What was asked for: settings, plugins and where each value came from. Imports no torch."""
