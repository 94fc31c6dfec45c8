"""Weights in host memory or on disk, and hooks that load them to the device. Start with `hooks`."""
