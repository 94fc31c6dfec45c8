"""The settings of `accelerate launch`: options, YAML files, the command line. Start with `options`."""
