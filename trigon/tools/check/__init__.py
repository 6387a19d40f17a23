"""Checks a run before it is started: configuration, machine, model, data, and reward function."""
