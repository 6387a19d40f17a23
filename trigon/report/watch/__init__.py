"""Watchers: what in a run's numbers and memory means that it fails, said early."""
