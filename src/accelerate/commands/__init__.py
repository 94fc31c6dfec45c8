"""The published package `accelerate.commands`."""
