"""Run a script as one rank of a world, without devices and without numbers, and record it. Start with `script`."""
