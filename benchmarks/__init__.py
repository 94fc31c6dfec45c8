"""What the library costs, as ratios against the same loop in bare PyTorch.

    python -m benchmarks                          every subject, one table
    python -m benchmarks step ddp --rounds 1000   some subjects, more exactly
    python -m benchmarks --json results.json      also as data
    python -m benchmarks --reference PYTHON       a column for the accelerate that this interpreter has

`interleave.py` says how the numbers come about, and why other work on the machine does not spoil them.
"""
