"""Reinforcement learning for vision-language models: sample completions, score them, update."""

__version__ = "0.1.0"
