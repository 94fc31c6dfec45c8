"""Run a function or a script on the nodes of a Ray cluster: one actor per rank. Only functions import ray."""
