"""Start, supervise and end the processes of this machine. Start with `run`."""
