"""What a program gives a run as Python objects, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trigon.data.sources import Source
from trigon.environments.settings import find_environment, find_tools
from trigon.environments.source import CodeSource
from trigon.report.delivery import Hooks
from trigon.rewards.load import RewardSource, RewardTerm


@dataclass(frozen=True, slots=True)
class EpisodeCode:
    """An environment or tools that are Python objects. None, and empty: those of the options."""

    environment: CodeSource | None = None
    tools: tuple[CodeSource, ...] = ()


NO_CODE = EpisodeCode()


def make_episode_code(
    environment: str | Callable[..., Any] | None, tools: Sequence[str | Callable[..., Any]] | None
) -> EpisodeCode:
    """Return what a program gives as the environment or the tools, of which texts are options.

    Raises: EpisodeError for what cannot be sent to other processes, and a tool that is not there.
    """
    return EpisodeCode(
        environment=None if environment is None or isinstance(environment, str) else find_environment(environment),
        tools=() if tools is None else find_tools(tools),
    )


@dataclass(frozen=True, slots=True)
class RunObjects:
    """What a run is given besides its configuration.

    sources: opened datasets, by their texts in data.train_files and data.val_files. reward: None:
    worker.reward.reward_function is a file or a shipped name. val_reward: the same for
    worker.reward.val_reward_function. hooks: functions that it calls. code: of the episodes.
    """

    sources: Mapping[str, Source] = field(default_factory=dict)
    reward: RewardSource | Sequence[RewardTerm] | None = None
    val_reward: RewardSource | Sequence[RewardTerm] | None = None
    hooks: Hooks = field(default_factory=Hooks)
    code: EpisodeCode = NO_CODE


NO_OBJECTS = RunObjects()


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended.

    folder: of the run. step: the last one that was made, here or before a resume. stopped: it ended
    before its last step, because should_stop said so. checkpoint: of that step; None before the
    first. exported: the Hugging Face model, if one was to be written.
    """

    folder: Path
    step: int
    stopped: bool
    checkpoint: Path | None
    exported: Path | None
