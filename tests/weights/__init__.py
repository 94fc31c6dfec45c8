"""Tests of the weights that are handed over."""
