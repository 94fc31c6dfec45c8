"""Start, supervise and terminate the processes of this machine. See `run`."""
