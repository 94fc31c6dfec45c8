"""Settings become running processes. Every module but `elastic` imports without torch."""
