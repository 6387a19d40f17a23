"""Finds and loads the user's environments and tools: `file.py:Name`, `module:Name`, or a pickle.

find_code() checks names and files only, and may run anywhere. load_code() runs the user's file, and
is called in fork servers only.
"""

from __future__ import annotations

import inspect
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trigon.environments.protocol import Environment
from trigon.errors import EpisodeError
from trigon.system.terminal import did_you_mean, nearest_file
from trigon.system.user_code import check_arguments, load_module, pickle, read_signature, take, unpickle

CodeKind = Literal["environment", "tool"]

_OPTIONS = {"environment": "worker.rollout.environment", "tool": "worker.rollout.tools"}
_NAMES = {"environment": "Class", "tool": "function"}


@dataclass(frozen=True, slots=True)
class CodeSource:
    """The location of an environment or a tool.

    file: an absolute path, or "". module: that can be imported, or "". name: of the class or the
    function. pickled: base64 of a pickle, or "". A tool with none of these is a built-in one.
    """

    kind: CodeKind
    name: str
    file: str = ""
    module: str = ""
    pickled: str = field(default="", repr=False)

    @property
    def where(self) -> str:
        """Its description in error messages."""
        if self.pickled:
            return f"{self.kind} {self.name!r}, given in Python,"
        place = self.file or self.module
        return f"{self.kind} {self.name!r}" + (f" of {place}" if place else "")


def find_code(spec: str, kind: CodeKind, *, built_in: Collection[str] = ()) -> CodeSource:
    """Return the source of `file.py:Name`, `package.module:Name`, or the name of a built-in tool.

    Raises: EpisodeError, with the nearest known name, if there is no such file or built-in tool.
    """
    if spec in built_in:
        return CodeSource(kind, spec)
    option, form = _OPTIONS[kind], f"file.py:{_NAMES[kind]}"
    path, _, name = spec.rpartition(":")
    if not path:
        hint = did_you_mean(spec, built_in)
        known = f", or one of the built-in {', '.join(built_in)}" if built_in else ""
        raise EpisodeError(f"{option}={spec!r}: use {form}{known}{hint}")
    if not name.isidentifier():
        raise EpisodeError(f"{option}={spec!r}: {name!r} is not a name; use {form}")
    if not path.endswith(".py") and all(part.isidentifier() for part in path.split(".")):
        return CodeSource(kind, name, module=path)
    file = Path(path).expanduser().absolute()
    if not file.is_file():
        near = nearest_file(file, "*.py")
        hint = f"did you mean {near}?" if near else f"use {form}"
        raise EpisodeError(f"{option}={spec!r}: there is no file {file}; {hint}")
    return CodeSource(kind, name, file=str(file))


def pickle_code(value: Callable[..., Any], kind: CodeKind) -> CodeSource:
    """Return the source of a class or a function that is given in Python. Raises: EpisodeError."""
    name = getattr(value, "__name__", type(value).__name__)
    instead = f"{_OPTIONS[kind]}='file.py:{_NAMES[kind]}'"
    return CodeSource(kind, name, pickled=pickle(value, where=f"{kind} {name!r}", instead=instead, error=EpisodeError))


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
