"""Other machines: batch systems, host files, addresses, checks before the start. Start with `preflight`."""
