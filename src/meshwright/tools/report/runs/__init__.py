"""Find and read the files of logged runs. Start with `reading`."""
