"""What a run with environments or tools is made of.

The driver loads their code, and tries the chat template and a first episode (find_episodes,
check_episodes); each process that samples starts processes of its own for them (open_episodes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from trigon.assemble.preflight import NO_CODE, EpisodeCode, make_confinement
from trigon.config.names import ToolFormat
from trigon.config.schema import Config, RolloutConfig
from trigon.data.media_processing import MediaProcessor
from trigon.data.stream import Prompts
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
from trigon.system.user_code import CodeSource
from trigon.types import EncodedMedia, Prompt, Vision

CHECKED_EPISODE = -1
"""The number of an episode that only checks its environment."""


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeParts:
    """What episodes are made of. Can be sent to workers.

    rollout: the section with environment or tools. code: these, with their limits. schemas:
    descriptions of the tools, for the chat template.
    """

    rollout: RolloutConfig
    code: EnvironmentSettings
    schemas: tuple[Mapping[str, Any], ...]


def find_episodes(
    config: Config, processors: Processors, stack: ExitStack, code: EpisodeCode = NO_CODE
) -> tuple[EpisodeParts, EnvironmentPool] | None:
    """Load environment or tools in processes, and try the chat template; None: one turn.

    Args, Returns: as load_episodes. Raises: as load_episodes and check_chat_template.
    """
    episodes = load_episodes(config, processors, stack, code)
    if episodes is not None:
        check_chat_template(config, processors, schemas=episodes[0].schemas)
    return episodes


def load_episodes(
    config: Config, processors: Processors, stack: ExitStack, code: EpisodeCode = NO_CODE
) -> tuple[EpisodeParts, EnvironmentPool] | None:
    """Load environment or tools in processes; None: completions have one turn.

    Args: stack: closes the pool. code: the environment or the tools, if they are Python objects.
    Returns: what a run with one worker uses itself, and one with several sends to them.
    Raises: EpisodeError if the code cannot be loaded.
    """
    rollout = config.worker.rollout
    if not rollout.has_episodes:
        return None
    settings = EnvironmentSettings(
        environment=_find_environment(rollout, code),
        kwargs=resolve_arguments(rollout.environment_kwargs, option=ENVIRONMENT_ARGUMENTS),
        tools=code.tools or find_tools(rollout.tools),
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
    return EpisodeParts(rollout, settings, tuple(pool.schemas)), pool


def open_episodes(
    config: Config, processors: Processors, parts: EpisodeParts, pool: EnvironmentPool, images: MediaProcessor | None
) -> EpisodeSettings:
    """Return how the episodes of one rollout engine run.

    pool: in the process of the engine. images: loads the pixels of prompts and observations; None
    for a text model.
    """
    rollout = parts.rollout

    def load_pixels(media: EncodedMedia) -> Vision:
        assert images is not None, "a text model observes no images"
        return images.process_images(media, "an observation")

    return EpisodeSettings(
        environments=pool,
        template=make_turn_template(config, processors, schemas=parts.schemas),
        opens=rollout.environment is not None,
        max_turns=rollout.max_turns,
        max_turn_tokens=rollout.max_turn_tokens,
        tool_format=parts.code.tool_format if rollout.tools else None,
        max_episodes=rollout.environment_workers,
        load_pixels=load_pixels,
        load_prompts=list if images is None else images.process,
    )


def check_episodes(
    config: Config,
    processors: Processors,
    parts: EpisodeParts,
    pool: EnvironmentPool,
    prompts: Prompts | Sequence[Prompt] | None,
    *,
    max_tokens: int,
) -> TurnTokens | None:
    """Begin an episode of the first prompt and end it, before the models are loaded.

    max_tokens: most tokens of a completion.
    Returns: the first observation, which follows the prompt; None with tools alone.
    Raises: EpisodeError as first_observation, or if the observation leaves no room for a turn.
    """
    if parts.code.environment is None:
        return None
    assert prompts is not None, "val_only needs val_files"
    prompt = prompts[0]
    tokens = first_observation(config, processors, parts, pool, prompt)
    if (problem := find_long_opening(len(tokens.token_ids), max_tokens)) is not None:
        raise EpisodeError(f"{parts.code.where} cannot begin {prompt.prompt_id}: {problem}")
    return tokens


def first_observation(
    config: Config, processors: Processors, parts: EpisodeParts, pool: EnvironmentPool, prompt: Prompt
) -> TurnTokens:
    """Begin an episode of a prompt in its environment, and return what follows the prompt.

    Raises: EpisodeError if the environment cannot be made, if its reset() fails, or if the model
    cannot be shown what it returns.
    """
    pool.start(CHECKED_EPISODE, prompt.row, encoded_images(prompt))
    while not (outcomes := pool.poll(1.0)):
        pass
    pool.stop(CHECKED_EPISODE)
    [outcome] = outcomes
    if outcome.error:
        raise EpisodeError(f"{parts.code.where} fails at the reset for {prompt.prompt_id}: {outcome.error}")
    try:
        return make_turn_template(config, processors, schemas=parts.schemas).opening(outcome.observation)
    except ObservationError as error:
        raise EpisodeError(f"{parts.code.where} cannot begin {prompt.prompt_id}: {error}") from error


def _find_environment(rollout: RolloutConfig, code: EpisodeCode) -> CodeSource | None:
    if rollout.environment is None or code.environment is not None:
        return code.environment
    return find_environment(rollout.environment)


def _tool_format(rollout: RolloutConfig, processors: Processors) -> ToolFormat:
    """Return the format of the calls of tools: by the chat template, if it has tools."""
    if rollout.tool_format != "auto":
        return rollout.tool_format
    template = processors.tokenizer.chat_template
    # Where the template has no tools, ChatTemplate describes them in the format of Hermes.
    return (format_of(template) if isinstance(template, str) else None) or "hermes"


def make_turn_template(
    config: Config, processors: Processors, *, schemas: Sequence[Mapping[str, Any]] = ()
) -> TurnTemplate:
    """Return what tokenizes observations. schemas: of the tools; PromptBuilder gets the same."""
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
