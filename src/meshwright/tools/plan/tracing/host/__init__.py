"""Stand in for what a planned script has around it: numbers, data, files, weights and devices by name."""
