"""One module per tracking client, imported on use."""
