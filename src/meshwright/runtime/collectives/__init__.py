"""Collectives over nested containers, and a record of the newest ones. Start with `operations`."""
