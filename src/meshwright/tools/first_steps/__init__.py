"""The check of every run's first steps: an instrument that looks at two of them and is gone."""
