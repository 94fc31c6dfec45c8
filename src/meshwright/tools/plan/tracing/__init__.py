"""Run a script as one rank of a world, without devices, on fake tensors, and record it. Start with `script`."""
