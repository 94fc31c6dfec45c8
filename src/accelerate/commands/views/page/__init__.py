"""The HTML page of `accelerate report`."""
