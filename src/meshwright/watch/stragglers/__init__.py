"""Find slow ranks from summaries of their steps. Start with `detection`."""
