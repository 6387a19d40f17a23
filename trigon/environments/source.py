"""Finds and loads the user's environments and tools: `file.py:Name`, `module:Name`, or a pickle.

find_environment() and find_tools() only read names, and may run anywhere; so may encode_setup(),
which makes what a fork server gets: the code and its limits. load_code() runs the user's file, and
is called in fork servers only.
"""

from __future__ import annotations

import inspect
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from trigon.config.names import ObservationRole, ToolFormat
from trigon.environments.protocol import Environment
from trigon.errors import EpisodeError
from trigon.system.confinement.options import DEFAULT, Confinement
from trigon.system.frames import encode_frame
from trigon.system.terminal import did_you_mean
from trigon.system.user_code import (
    CodeSource,
    check_arguments,
    load_module,
    pickle,
    read_signature,
    take,
    unpickle,
)

CodeKind = Literal["environment", "tool"]

_OPTIONS = {"environment": "worker.rollout.environment", "tool": "worker.rollout.tools"}
_NAMES = {"environment": "Class", "tool": "function"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSettings:
    """The environment and the tools of episodes, and how they are run. Can be sent to workers.

    environment: None for tools alone. kwargs: arguments of its constructor; JSON can represent
    them.
    tool_format: the format of calls. timeout_seconds: time limit of reset (with the constructor)
    and of each step.
    max_episodes: how many may exist at the same time, each of which is a process; later ones wait.
    max_image_pixels: maximum width * height of an image of an observation. observation_role: the
    role of the environment's messages; tool_role: the role of the tools' messages.
    passed_variables: environment variables that the code gets besides child.ALLOWED. confinement:
    how all processes together are confined, by the options of reward workers.
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

    Raises: EpisodeError if it cannot be pickled. Whether the text has this form, and whether there
    is such a file, config/checks.py has checked.
    """
    return _find(environment, "environment")


def find_tools(tools: Sequence[str | Callable[..., Any]]) -> tuple[CodeSource, ...]:
    """Return the sources of worker.rollout.tools, or of functions. Raises: as find_environment."""
    return tuple(_find(tool, "tool") for tool in tools)


def _find(code: str | Callable[..., Any], kind: CodeKind) -> CodeSource:
    if not isinstance(code, str):
        name = getattr(code, "__name__", type(code).__name__)
        instead = f"{_OPTIONS[kind]}='file.py:{_NAMES[kind]}'"
        pickled = pickle(code, where=f"{kind} {name!r}", instead=instead, error=EpisodeError)
        return CodeSource(kind, name, pickled=pickled)
    place, _, name = code.rpartition(":")
    if not place.endswith(".py") and all(part.isidentifier() for part in place.split(".") if place):
        return CodeSource(kind, name, module=place)  # without a place, a built-in tool
    return CodeSource(kind, name, file=str(Path(place).expanduser().absolute()))


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


def load_code(source: CodeSource) -> Any:
    """Run the source's file, and return what it names; see system/user_code.py.

    Raises: EpisodeError if the file fails to run, or has no such name.
    """
    if source.pickled:
        return unpickle(source.pickled, where=source.where, error=EpisodeError)
    if source.file and not Path(source.file).is_file():
        raise EpisodeError(
            f"there is no file {source.file} on {socket.gethostname()}: with workers on several machines, "
            f"{_OPTIONS[source.kind]} has the same absolute path on all of them"
        )
    module = load_module(source.file, source.module, error=EpisodeError)
    wanted = _NAMES[source.kind].lower()
    return take(module, source.name, where=source.where, wanted=wanted, error=EpisodeError)


def check_environment(made: Any, kwargs: Mapping[str, Any], *, where: str) -> None:
    """Check what makes environments, usually a class, without calling it.

    Raises: EpisodeError if a class lacks a method of the protocol, one does not take its argument,
    or it does not accept one of kwargs.
    """
    if isinstance(made, type):
        methods = [name for name in dir(made) if not name.startswith("_") and callable(getattr(made, name))]
        for name, argument in (("reset", "row"), ("step", "action")):
            if name not in methods or getattr(made, name) is getattr(Environment, name):
                hint = did_you_mean(name, methods)
                raise EpisodeError(f"{where} has no method {name}(self, {argument}){hint}")
            _check_method(getattr(made, name), name, argument, where)
    option = "worker.rollout.environment_kwargs"
    check_arguments(made, kwargs, where=where, called="made", option=option, error=EpisodeError)


def _check_method(method: Any, name: str, argument: str, where: str) -> None:
    if inspect.iscoroutinefunction(method):
        raise EpisodeError(f"{name} of {where} is async; make it a plain method, which may call asyncio.run")
    signature = read_signature(method, where=f"{name} of {where}", error=EpisodeError)
    try:
        signature.bind(None, None)  # self, and its argument
    except TypeError as error:
        raise EpisodeError(
            f"{name} of {where} takes {signature}, and is called with one argument: {name}(self, {argument}) ({error})"
        ) from error
