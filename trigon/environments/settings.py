"""What an environment pool is made of: the user's environment or tools, and their limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trigon.config.names import BUILT_IN_TOOLS, ObservationRole, ToolFormat
from trigon.environments.source import CodeSource, find_code, pickle_code
from trigon.errors import EpisodeError
from trigon.system.confinement.options import DEFAULT, Confinement
from trigon.system.frames import encode_frame


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSettings:
    """The environment and the tools of episodes, and how they are run. Can be sent to workers.

    environment: None for tools alone. kwargs: of its constructor; JSON can represent them.
    tool_format: of the calls. timeout_seconds: of reset (with the constructor) and of each step.
    max_episodes: how many may exist at the same time, each of which is a process; later ones wait.
    max_image_pixels: maximum width * height of an image of an observation. observation_role: of the
    messages of the environment; tool_role: of those of tools. passed_variables: environment
    variables that the code gets besides those of child.ALLOWED. confinement: of all
    processes together, by the options of reward workers.
    """

    environment: CodeSource | None
    kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may have secrets
    tools: tuple[CodeSource, ...] = ()
    tool_format: ToolFormat = "hermes"
    timeout_seconds: float = 60.0
    max_episodes: int = 256
    max_image_pixels: int = 1 << 24
    observation_role: ObservationRole = "user"
    tool_role: ObservationRole = "tool"
    passed_variables: tuple[str, ...] = ()
    confinement: Confinement = DEFAULT

    @property
    def where(self) -> str:
        """The code in error messages."""
        tools = f"tools {', '.join(source.name for source in self.tools)}"
        if self.environment is None:
            return tools
        return f"{self.environment.where} with the {tools}" if self.tools else self.environment.where

    @property
    def runs_code(self) -> bool:
        """Whether code that a model wrote is run: by the built-in tool `python`."""
        return CodeSource("tool", "python") in self.tools

    @property
    def sources(self) -> tuple[CodeSource, ...]:
        """The user's code."""
        return self.tools if self.environment is None else (self.environment, *self.tools)


def find_environment(environment: str | Callable[..., Any]) -> CodeSource:
    """Return the source of worker.rollout.environment, or of a class given in Python.

    Raises: EpisodeError, with the nearest known name, if there is no such file.
    """
    return (
        find_code(environment, "environment")
        if isinstance(environment, str)
        else pickle_code(environment, "environment")
    )


def find_tools(tools: Sequence[str | Callable[..., Any]]) -> tuple[CodeSource, ...]:
    """Return the sources of worker.rollout.tools, or of functions. Raises: as find_environment."""
    return tuple(
        find_code(tool, "tool", built_in=BUILT_IN_TOOLS) if isinstance(tool, str) else pickle_code(tool, "tool")
        for tool in tools
    )


def encode_setup(settings: EnvironmentSettings, *, describe: bool) -> bytes:
    """Return the first frame for a fork server. describe: whether it returns the tools' schemas.

    Raises: EpisodeError if JSON cannot represent the keyword arguments.
    """
    memory = replace(settings.confinement, runs_code=settings.runs_code).worker_memory_bytes
    try:
        fields = {**asdict(settings), "confinement": None}  # the supervisor's
        return encode_frame({**fields, "max_memory_bytes": memory, "describe": describe})
    except (TypeError, ValueError) as error:
        raise EpisodeError(
            f"worker.rollout.environment_kwargs cannot be sent to another process: {error}; use only text, numbers, "
            "lists and dicts"
        ) from error
