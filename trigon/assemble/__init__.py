"""Builds a training run from a configuration. The one package that imports all others."""
