"""What a run with environments or tools is made of.

The driver loads their code, and tries the chat template and a first episode (find_episodes,
check_episodes); each process that samples starts processes of its own for them (open_episodes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from trigon.assemble.objects import NO_CODE, EpisodeCode
from trigon.assemble.rewards import make_confinement
from trigon.config.defaults import resolve_observation_role
from trigon.config.episode_checks import has_episodes
from trigon.config.names import ObservationRole, ToolFormat
from trigon.config.schema import Config
from trigon.data.dataset import Prompts
from trigon.data.media_processing import MediaProcessor
from trigon.data.turns import TurnTemplate, TurnTokens
from trigon.environments.calls import format_of
from trigon.environments.pool import EnvironmentPool
from trigon.environments.settings import EnvironmentSettings, find_environment, find_tools
from trigon.environments.source import CodeSource
from trigon.errors import EpisodeError, ObservationError
from trigon.models.load import Processors
from trigon.rewards.arguments import resolve_arguments
from trigon.rollout.episode_settings import EpisodeSettings, encoded_images
from trigon.rollout.episodes import find_long_opening
from trigon.system.secrets import ENVIRONMENT_ARGUMENTS
from trigon.types import EncodedMedia, Prompt, Vision

CHECKED_EPISODE = -1
"""The number of an episode that only checks its environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeOptions:
    """The options of completions of several turns, in an environment, with tools, or with both.

    environment: None with tools alone. tools: may be empty. Each is a text of the
    configuration: `file.py:Name`, `module:Name`, the name of a built-in tool, or `python:Name`.
    observation_role: of the environment's messages; tool_role: of those of tools.
    max_turn_tokens: None: no limit but that of the completion. timeout_seconds: of each reset and
    step. max_episodes: at a time in each process that hosts a rollout engine.
    """

    environment: str | None
    environment_kwargs: Mapping[str, Any]
    tools: tuple[str, ...]
    tool_format: Literal["auto", ToolFormat]
    observation_role: ObservationRole
    tool_role: ObservationRole
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
        tool_role=rollout.observation_role or "tool",
        max_turns=rollout.max_turns,
        max_turn_tokens=rollout.max_turn_tokens,
        timeout_seconds=rollout.environment_timeout_seconds,
        max_episodes=rollout.environment_workers,
    )


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeParts:
    """What episodes are made of. Can be sent to workers.

    code: the environment or the tools, with their limits. schemas: descriptions of the tools, for
    the chat template.
    """

    options: EpisodeOptions
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
    options = make_episode_options(config)
    if options is None:
        return None
    settings = EnvironmentSettings(
        environment=_find_environment(options, code),
        kwargs=resolve_arguments(options.environment_kwargs, option=ENVIRONMENT_ARGUMENTS),
        tools=code.tools or find_tools(options.tools),
        tool_format=_tool_format(options, processors),
        timeout_seconds=options.timeout_seconds,
        max_episodes=options.max_episodes,
        max_image_pixels=config.data.max_image_pixels,
        observation_role=options.observation_role,
        tool_role=options.tool_role,
        passed_variables=config.worker.reward.env,
        confinement=make_confinement(config.worker.reward),
    )
    pool = EnvironmentPool(settings, describe=bool(options.tools))
    stack.callback(pool.close)
    return EpisodeParts(options, settings, tuple(pool.schemas)), pool


def open_episodes(
    config: Config, processors: Processors, parts: EpisodeParts, pool: EnvironmentPool, images: MediaProcessor | None
) -> EpisodeSettings:
    """Return how the episodes of one rollout engine run.

    pool: in the process of the engine. images: loads the pixels of prompts and observations; None
    for a text model.
    """
    options = parts.options

    def load_pixels(media: EncodedMedia) -> Vision:
        assert images is not None, "a text model observes no images"
        return images.process_images(media, "an observation")

    return EpisodeSettings(
        environments=pool,
        template=make_turn_template(config, processors, schemas=parts.schemas),
        opens=options.opens,
        max_turns=options.max_turns,
        max_turn_tokens=options.max_turn_tokens,
        tool_format=parts.code.tool_format if options.tools else None,
        max_episodes=options.max_episodes,
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


def _find_environment(options: EpisodeOptions, code: EpisodeCode) -> CodeSource | None:
    if options.environment is None or code.environment is not None:
        return code.environment
    return find_environment(options.environment)


def _tool_format(options: EpisodeOptions, processors: Processors) -> ToolFormat:
    """Return the format of the calls of tools: that of the chat template, if it has tools."""
    if options.tool_format != "auto":
        return options.tool_format
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
    options = make_episode_options(config)
    if options is not None:
        template = make_turn_template(config, processors, schemas=schemas)
        template.check([options.observation_role], opens=options.opens)
        if options.tools and options.tool_role != options.observation_role:
            template.check([options.tool_role])


def engine_limit_images(config: Config) -> int:
    """Return how many images a sequence of the rollout engine may have; 0: any number.

    With episodes any number: observations bring more than the prompts, of which limit_images is.
    """
    return 0 if has_episodes(config) else config.worker.rollout.limit_images
