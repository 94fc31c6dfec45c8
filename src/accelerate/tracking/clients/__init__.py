"""One file per tracking client, loaded on use."""
