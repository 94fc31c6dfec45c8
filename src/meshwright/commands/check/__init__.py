"""`meshwright check`: look for mistakes in a script, or in what it is made of."""
