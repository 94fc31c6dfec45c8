"""Train models whose repeated blocks are kept on the host, with two of them on the device. Begin with `strategy.py`."""
