"""The settings of `meshwright launch`: options, YAML files, the command line. Start with `options`."""
