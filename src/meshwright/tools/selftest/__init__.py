"""The script that `meshwright test` launches. Start with `script`."""
