"""Pipeline parallelism: split a model into stages and run a schedule. Start with `strategy`."""
