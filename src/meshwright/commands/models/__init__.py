"""Verbs about the files of a model: its memory, its shards."""
