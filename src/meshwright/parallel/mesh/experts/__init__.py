"""Expert parallelism: which modules hold experts, how tokens reach them. Start with `spreading`."""
