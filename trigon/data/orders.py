"""Random orders that depend on their name alone, for ever and on any machine.

NumPy has promised never to change the streams of RandomState (NEP 19).
"""

from __future__ import annotations

import hashlib

import numpy as np


def permuted(length: int, name: str) -> list[int]:
    """Return the numbers from 0 to length - 1 in an order drawn for this name."""
    # Hashed, so that neighbouring seeds and epochs have nothing to do with each other.
    words = np.frombuffer(hashlib.sha256(name.encode()).digest(), dtype="<u4")
    order: list[int] = np.random.RandomState(words).permutation(length).tolist()
    return order
