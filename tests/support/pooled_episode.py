"""Plays episodes through an EnvironmentPool, in processes as in a run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from trigon.environments.pool import EnvironmentPool
from trigon.environments.protocol import Outcome
from trigon.environments.source import EnvironmentSettings, find_environment


def play_in_pool(
    environment: str, kwargs: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], actions: Sequence[str]
) -> list[list[Outcome]]:
    """Return the outcomes of an episode for each row, at the same time, with the same actions."""
    pool = EnvironmentPool(EnvironmentSettings(environment=find_environment(environment), kwargs=kwargs))
    try:
        pool.ready()
        outcomes: list[list[Outcome]] = [[] for _ in rows]
        for number, row in enumerate(rows):
            pool.start(number, row)
        deadline = time.monotonic() + 100
        running = set(range(len(rows)))
        while running:
            assert time.monotonic() < deadline, outcomes
            for outcome in pool.poll(1.0):
                played = outcomes[outcome.episode]
                played.append(outcome)
                if outcome.done or len(played) > len(actions):
                    running.discard(outcome.episode)
                    pool.stop(outcome.episode)
                else:
                    pool.step(outcome.episode, actions[len(played) - 1])
        return outcomes
    finally:
        pool.close()
