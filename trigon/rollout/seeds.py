"""Which random numbers a sampled completion gets. Knows arithmetic only."""

from __future__ import annotations

import hashlib


def sample_seed(run_seed: int, *, step: int, prompt_id: str, sample: int) -> int:
    """Return the seed of one sample: a function of these four alone, in [0, 2**63).

    A hash rather than a sum, so that no two (step, prompt, sample) share a stream by being neighbours.
    """
    words = (
        f"{run_seed}/{step}/{sample}/{prompt_id}"  # only the last may hold a slash, so two quadruples never read alike
    )
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big") >> 1
