"""Random permutations that depend on their name alone, on every machine and in every version.

NumPy guarantees that the streams of RandomState never change (NEP 19).
"""

from __future__ import annotations

import hashlib

import numpy as np


def permutation(length: int, name: str) -> list[int]:
    """Return the numbers from 0 to length - 1 in a random order that name determines."""
    # Hashed, so that the orders of consecutive seeds and epochs are independent.
    words = np.frombuffer(hashlib.sha256(name.encode()).digest(), dtype="<u4")
    order: list[int] = np.random.RandomState(words).permutation(length).tolist()
    return order
