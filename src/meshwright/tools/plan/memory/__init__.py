"""Compute the memory of a rank from its trace. Start with `peak`; `allocator` simulates the device's allocator."""
