"""Compare a mesh with one process: `accelerate verify-parallel`. Start with `script`, then `comparison`."""
