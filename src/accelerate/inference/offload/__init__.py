"""Weights on the host or on disk, and hooks that bring them to the device. Start with `hooks`."""
