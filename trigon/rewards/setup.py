"""What reward workers are told first: the reward function, its arguments and its time limit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trigon.errors import RewardError
from trigon.rewards.arguments import resolve_arguments
from trigon.rewards.load import RewardSource, RewardTerm, find_source
from trigon.system.secrets import ARGUMENTS, mask


@dataclass(frozen=True, slots=True)
class RewardSetup:
    """message: the first line for a worker, see trigon.rewards.worker.

    name, where: the reward in messages, short and in full. files: of the functions that have one.
    """

    message: str
    name: str
    where: str
    files: tuple[str, ...]


def make_setup(
    reward: str | RewardSource | Sequence[RewardTerm],
    kwargs: Mapping[str, Any],
    *,
    timeout_seconds: float,
    concurrency: int,
) -> RewardSetup:
    """Return the setup of a reward. Args: as of RewardPool.

    Raises: RewardError if there is no such file, if a variable of `env:NAME` in kwargs is not set,
    or if JSON cannot represent kwargs.
    """
    source = find_source(reward) if isinstance(reward, str) else reward
    setup: dict[str, Any] = {
        "source": None,
        "terms": [],
        "timeout_seconds": timeout_seconds,
        "concurrency": concurrency,
    }
    if isinstance(source, RewardSource):
        sources = [source]
        setup["source"] = asdict(source)
        where = source.where
        name = Path(source.file).name if source.file else source.function if source.pickled else source.module
        name = name.rpartition("trigon.rewards.verifiers.")[2]  # a shipped one
    else:
        sources = [term.source for term in source]
        setup["terms"] = [{**asdict(term), "kwargs": resolve_arguments(term.kwargs, term.name)} for term in source]
        name = " + ".join(term.name for term in source)
        where = f"the sum of the reward functions {', '.join(repr(term.name) for term in source)}"
        if kwargs:
            raise RewardError(
                "worker.reward.reward_function_kwargs are arguments of a single reward function, and there are "
                f"{len(source)}; give each its own"
            )
    try:
        message = json.dumps({**setup, "kwargs": resolve_arguments(kwargs)})
    except (TypeError, ValueError) as error:
        given = dict(kwargs) if isinstance(source, RewardSource) else {term.name: dict(term.kwargs) for term in source}
        raise RewardError(
            f"{ARGUMENTS}={mask(ARGUMENTS, given)!r} cannot be sent to another process: {error}; use only text, "
            "numbers, lists and dicts"
        ) from error
    return RewardSetup(message, name, where, tuple(each.file for each in sources if each.file))
