"""Trigon trains vision-language models by reinforcement learning: sample completions, score them, learn from them."""

__version__ = "0.1.0"
