"""Stage, write, agree and commit. Start with `engine`."""
