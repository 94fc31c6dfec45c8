"""The HTML page of `meshwright report`."""
