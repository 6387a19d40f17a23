"""Reward pools of a file's text, and requests for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trigon.rewards.contract import RewardRequest
from trigon.rewards.load import RewardTerm, find_reward
from trigon.rewards.pool import RewardPool


def requests(*responses: str, **changes: Any) -> list[RewardRequest]:
    """Return a request for each response. changes: fields of all of them."""
    fields: dict[str, Any] = {
        "response_length": 3,
        "ground_truth": "4",
        "prompt": "?",
        "finish_reason": "stop",
        "row": {},
    }
    return [RewardRequest(response=response, **(fields | changes)) for response in responses]


@contextmanager
def reward_pool(
    folder: Path,
    text: str = "",
    *,
    function: str = "main",
    reward: Sequence[RewardTerm] = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[RewardPool]:
    """Open a pool for a function of a file with this text, or for the terms of another reward.

    options: of RewardPool, instead of one worker, 20 seconds and any number of failures.
    """
    (folder / "reward.py").write_text(text)
    usual: dict[str, Any] = {"num_workers": 1, "timeout_seconds": 20.0, "max_failed_fraction": 1.0}
    terms = reward or find_reward(f"{folder}/reward.py:{function}", kwargs or {})
    pool = RewardPool(terms, **(usual | options))
    try:
        yield pool
    finally:
        pool.close()
