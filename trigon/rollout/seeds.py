"""The random seed of each sampled completion."""

from __future__ import annotations

import hashlib


def sample_seed(run_seed: int, *, draw: int, prompt_id: str, sample: int) -> int:
    """Return the seed of one completion: a function of the arguments alone, in [0, 2**63).

    A hash, not a sum, so that neighbouring draws, prompts and samples never share a seed.
    """
    # Only prompt_id can contain a slash, and it comes last, so different arguments give different
    # keys.
    key = f"{run_seed}/{draw}/{sample}/{prompt_id}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1


def turn_seed(seed: int, turn: int, *, num_begun: int = 0) -> int:
    """Return the seed of a turn of a completion, in [0, 2**63).

    Args:
        seed: seed of the completion (sample_seed), which is also the seed of its first turn.
        turn: number of the turn, from 0.
        num_begun: tokens of the turn that an earlier call has sampled. The rest has a seed of its
            own, since the same seed would draw the same random numbers again.
    """
    if turn == 0 and num_begun == 0:
        return seed
    key = f"{seed}/turn {turn}" + (f"/after {num_begun}" if num_begun else "")
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1
