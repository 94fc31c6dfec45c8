"""The public handler and plugin classes. They hold values and import torch on use only. Start with `handlers`."""
