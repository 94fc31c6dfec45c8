"""The same kills for three ways to survive them: ours, torchft and torchelastic. Start with `__main__`."""
