"""Record what a process computes in a few steps. Start with `recorder`; `data` is what it writes."""
