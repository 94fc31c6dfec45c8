"""Run a script under accelerate 1.x and under this library, and say where they differ."""
