"""Reward functions worth shipping, each a module with a compute_score of the sequential contract."""
