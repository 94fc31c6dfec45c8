"""The `meshwright` command: one file per verb."""
