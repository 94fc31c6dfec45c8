"""Readers of files and messages that others may have written, under random and damaged input.

`python -m tests.fuzzing` runs every target of `targets.py`, `python -m tests.fuzzing table --inputs 10000000` one.
With `--atheris`, where that fuzzer is installed, inputs are guided by what they cover.
"""
