"""Folders on a disk or behind an fsspec URL. Start with `store`."""
