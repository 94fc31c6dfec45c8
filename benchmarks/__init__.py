"""What the library and its peers cost, as ratios against the same loop in bare PyTorch; see README.md here.

python -m benchmarks                            every subject and every contender, one table
python -m benchmarks step ddp --rounds 1000     some subjects, more exactly
python -m benchmarks step --here                ours only, in this interpreter, without venvs
"""
