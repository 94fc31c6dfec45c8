"""The script that `accelerate test` launches. Start with `script`."""
