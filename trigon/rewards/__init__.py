"""Reward functions: their contracts, the reward workers that run them, and shipped verifiers."""
