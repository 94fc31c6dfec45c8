"""The process, its process group and its device mesh. Start with `runtime`."""
