"""Evaluates models on a dataset, and reward functions on stored rollouts."""
