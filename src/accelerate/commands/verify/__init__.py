"""Verbs that run a script several times and compare the results."""
