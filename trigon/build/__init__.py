"""From a configuration to a run: the one package that knows every other."""
