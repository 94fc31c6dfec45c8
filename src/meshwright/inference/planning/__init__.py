"""Sizes of modules, and device maps that keep within a budget. Start with `device_map`."""
