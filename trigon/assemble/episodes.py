"""What a run with environments or tools is made of.

The driver loads their code, and tries the chat template and a first episode (load_episodes,
check_chat_template, try_episode); each process that samples starts processes of its own for them
(open_episodes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from trigon.assemble.options import max_completion_tokens
from trigon.assemble.preflight import NO_OBJECTS, RunObjects, make_confinement
from trigon.config.names import ToolFormat
from trigon.config.schema import Config, RolloutConfig
from trigon.data.media_processing import MediaProcessor
from trigon.data.turns import TurnTemplate, TurnTokens
from trigon.environments.calls import format_of
from trigon.environments.pool import EnvironmentPool
from trigon.environments.source import EnvironmentSettings, find_environment, find_tools
from trigon.errors import EpisodeError, ObservationError
from trigon.models.load import Processors
from trigon.rewards.load import resolve_arguments
from trigon.rollout.episode_settings import EpisodeSettings, encoded_images
from trigon.rollout.episodes import find_long_opening
from trigon.system.secrets import ENVIRONMENT_ARGUMENTS
from trigon.types import EncodedMedia, Prompt, Vision

CHECKED_EPISODE = -1
"""The number of an episode that only checks its environment."""


def load_episodes(
    config: Config, processors: Processors, stack: ExitStack, objects: RunObjects = NO_OBJECTS
) -> EnvironmentPool | None:
    """Load environment or tools in processes; None: completions have one turn.

    Args: stack: closes the pool. objects: have the environment or the tools, if these are Python
        objects.
    Raises: EpisodeError if the code cannot be loaded.
    """
    rollout = config.worker.rollout
    if not rollout.has_episodes:
        return None
    environment = objects.environment
    if environment is None and rollout.environment is not None:
        environment = find_environment(rollout.environment)
    settings = EnvironmentSettings(
        environment=environment,
        kwargs=resolve_arguments(rollout.environment_kwargs, option=ENVIRONMENT_ARGUMENTS),
        tools=objects.tools or find_tools(rollout.tools),
        tool_format=_tool_format(rollout, processors),
        timeout_seconds=rollout.environment_timeout_seconds,
        max_episodes=rollout.environment_workers,
        max_image_pixels=config.data.max_image_pixels,
        observation_role=rollout.role_of_observations,
        tool_role=rollout.role_of_tools,
        passed_variables=config.worker.reward.env,
        confinement=make_confinement(config.worker.reward),
    )
    pool = EnvironmentPool(settings, describe=bool(rollout.tools))
    stack.callback(pool.close)
    return pool


def open_episodes(
    config: Config,
    processors: Processors,
    pool: EnvironmentPool,
    images: MediaProcessor | None,
    *,
    schemas: Sequence[Mapping[str, Any]],
) -> EpisodeSettings:
    """Return how the episodes of one rollout engine run.

    pool: the environments, in the process of the engine. images: loads the pixels of prompts and
    observations; None for a text model. schemas: descriptions of the tools.
    """
    rollout = config.worker.rollout

    def load_pixels(media: EncodedMedia) -> Vision:
        assert images is not None, "a text model observes no images"
        return images.process_images(media, "an observation")

    return EpisodeSettings(
        environments=pool,
        template=make_turn_template(config, processors, schemas=schemas),
        opens=rollout.environment is not None,
        max_turns=rollout.max_turns,
        max_turn_tokens=rollout.max_turn_tokens,
        tool_format=pool.settings.tool_format if rollout.tools else None,
        max_episodes=rollout.environment_workers,
        load_pixels=load_pixels,
        load_prompts=list if images is None else images.process,
    )


def try_episode(
    config: Config,
    processors: Processors,
    pool: EnvironmentPool,
    prompt: Prompt,
) -> TurnTokens | None:
    """Begin an episode of a prompt and end it, before the models are loaded.

    Returns: the first observation, which follows the prompt; None with tools alone.
    Raises: EpisodeError if the environment cannot be made, if its reset() fails, if the model
    cannot be shown what it returns, or if that leaves no room for a turn.
    """
    if pool.settings.environment is None:
        return None
    where = pool.settings.where
    pool.start(CHECKED_EPISODE, prompt.row, encoded_images(prompt))
    while not (outcomes := pool.poll(1.0)):
        pass
    pool.stop(CHECKED_EPISODE)
    [outcome] = outcomes
    if outcome.error:
        raise EpisodeError(f"{where} fails at the reset for {prompt.prompt_id}: {outcome.error}")
    try:
        tokens = make_turn_template(config, processors, schemas=pool.schemas).opening(outcome.observation)
    except ObservationError as error:
        raise EpisodeError(f"{where} cannot begin {prompt.prompt_id}: {error}") from error
    if (problem := find_long_opening(len(tokens.token_ids), max_completion_tokens(config))) is not None:
        raise EpisodeError(f"{where} cannot begin {prompt.prompt_id}: {problem}")
    return tokens


def _tool_format(rollout: RolloutConfig, processors: Processors) -> ToolFormat:
    """Return the format of the calls of tools: by the chat template, if it has tools."""
    if rollout.tool_format != "auto":
        return rollout.tool_format
    template = processors.tokenizer.chat_template
    # Where the template has no tools, ChatTemplate describes them in the format of Hermes.
    return (format_of(template) if isinstance(template, str) else None) or "hermes"


def make_turn_template(config: Config, processors: Processors, *, schemas: Sequence[Mapping[str, Any]]) -> TurnTemplate:
    """Return what tokenizes observations.

    schemas: descriptions of the tools, as in PromptBuilder.
    """
    return TurnTemplate(processors, tools=schemas, max_image_pixels=config.data.max_image_pixels)


def check_chat_template(config: Config, processors: Processors, *, schemas: Sequence[Mapping[str, Any]] = ()) -> None:
    """Raise ConfigError for a chat template that changes earlier turns, if there are any.

    Called once for a run, since it renders many conversations. schemas: as for make_turn_template.
    """
    rollout = config.worker.rollout
    if rollout.has_episodes:
        template = make_turn_template(config, processors, schemas=schemas)
        template.check([rollout.role_of_observations], opens=rollout.environment is not None)
        if rollout.tools and rollout.role_of_tools != rollout.role_of_observations:
            template.check([rollout.role_of_tools])
