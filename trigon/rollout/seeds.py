"""The random seed of each sampled completion."""

from __future__ import annotations

import hashlib


def sample_seed(run_seed: int, *, step: int, prompt_id: str, sample: int) -> int:
    """Return the seed of one completion: a function of the arguments alone, in [0, 2**63).

    A hash, not a sum, so that neighbouring steps, prompts and samples never share a seed.
    """
    # Only prompt_id can contain a slash, and it comes last, so different arguments give different
    # keys.
    key = f"{run_seed}/{step}/{sample}/{prompt_id}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn of a completion, in [0, 2**63).

    seed: of the completion (sample_seed), which is also that of its first turn. turn: from 0.
    """
    if turn == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/turn {turn}".encode()).digest()[:8], "big") >> 1
