"""Launches on several machines: batch systems, host files, addresses, checks before the start. See `preflight`."""
