"""The memory of a model without a script: a training program is made around it, and traced."""
