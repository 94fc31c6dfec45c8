"""Turn settings into running processes. Only `elastic` imports torch."""
