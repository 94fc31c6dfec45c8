"""The runtime of this process: its device, its process group, and collectives."""
