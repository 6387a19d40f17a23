"""What a run with environments or tools is made of: their options, and the tokens between turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trigon.config.defaults import resolve_observation_role
from trigon.config.episode_checks import has_episodes
from trigon.config.schema import Config
from trigon.data.turns import TurnTemplate
from trigon.models.load import Processors
from trigon.names import ObservationRole, ToolFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeOptions:
    """The options of completions of several turns, in an environment or with tools.

    environment: None with tools. tools: empty with an environment. Each is a text of the
    configuration: `file.py:Name`, `module:Name`, the name of a built-in tool, or `python:Name`.
    observation_role: of all messages with observations. max_turn_tokens: None: no limit but that of
    the completion. timeout_seconds: of each reset and step. max_episodes: at a time in each process
    that hosts a rollout engine.
    """

    environment: str | None
    environment_kwargs: Mapping[str, Any]
    tools: tuple[str, ...]
    tool_format: Literal["auto", ToolFormat]
    observation_role: ObservationRole
    max_turns: int
    max_turn_tokens: int | None
    timeout_seconds: float
    max_episodes: int

    @property
    def opens(self) -> bool:
        """Whether a first observation follows the prompt, which has no generation prompt then."""
        return self.environment is not None


def make_episode_options(config: Config) -> EpisodeOptions | None:
    """Return the options of episodes; None: completions have one turn."""
    rollout = config.worker.rollout
    if not has_episodes(config):
        return None
    return EpisodeOptions(
        environment=rollout.environment,
        environment_kwargs=rollout.environment_kwargs,
        tools=rollout.tools,
        tool_format=rollout.tool_format,
        observation_role=resolve_observation_role(config),
        max_turns=rollout.max_turns,
        max_turn_tokens=rollout.max_turn_tokens,
        timeout_seconds=rollout.environment_timeout_seconds,
        max_episodes=rollout.environment_workers,
    )


def open_turn_template(
    config: Config, options: EpisodeOptions, processors: Processors, *, schemas: Sequence[Mapping[str, Any]] = ()
) -> TurnTemplate:
    """Return what tokenizes observations, after checking that the chat template can be used.

    schemas: of the tools; PromptBuilder gets the same.
    Raises: ConfigError for a chat template that changes earlier turns.
    """
    template = TurnTemplate(processors, tools=schemas, max_image_pixels=config.data.max_image_pixels)
    template.check([options.observation_role], opens=options.opens)
    return template


def engine_limit_images(config: Config) -> int:
    """Return how many images a sequence of the rollout engine may have; 0: any number.

    With episodes any number: observations bring more than the prompts, of which limit_images is.
    """
    return 0 if has_episodes(config) else config.worker.rollout.limit_images
