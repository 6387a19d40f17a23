"""Tiny models and generated data for the quickstart and the tests."""
