"""Run several processes by torchelastic: all together, or with replacements of single ones. Start with `run`."""
