"""Tools: an environment in which the model's calls of Python functions are carried out.

A tool is a plain function with type hints and a docstring, from which the chat template's
description is made. Two parameters are not described: `images` gets the images of the conversation,
as PIL images that are opened when they are indexed, and `timeout_seconds` the time that the call
may take.
What a function raises is the reply to the model, since most errors are the model's.
"""

from __future__ import annotations

import inspect
import json
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trigon.config.names import BUILT_IN_TOOLS, ObservationRole, ToolFormat
from trigon.environments.calls import MAX_CALLS, ToolCall, find_calls
from trigon.environments.conversion import to_message, without_surrogates
from trigon.environments.protocol import MAX_IMAGES, MAX_TEXT_CHARACTERS, Message, Observation, escape_markers
from trigon.environments.source import CodeSource, load_code
from trigon.errors import EpisodeError
from trigon.system.image_formats import LazyImages
from trigon.system.terminal import did_you_mean

IMAGES = "images"
TIMEOUT = "timeout_seconds"
"""The parameters of a tool that the model is not told."""

_NOTHING = "(no output)"
"""The reply of a tool that returns None or an empty text."""

_MAX_ERROR_CHARACTERS = 500

Tool = Callable[..., Any]


class ToolEnvironment:
    """An environment of one episode: carries out the calls of a turn.

    A turn without calls is the last one, or the action of an environment that the tools are beside.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        environment: Any = None,
        *,
        tool_format: ToolFormat,
        role: ObservationRole,
        timeout_seconds: float,
        max_image_pixels: int,
    ) -> None:
        """Make it.

        Args: tools: by name. environment: of the user; None: tools only. role: of the messages of
        tools. timeout_seconds: of a step.
        """
        self._environment = environment
        self._tools = tools
        self._format = tool_format
        self._role = role
        self._timeout_seconds = timeout_seconds
        self._max_image_pixels = max_image_pixels
        self._image_files: list[bytes | str] = []
        self._reported: set[str] = set()

    def reset(self, row: Mapping[str, Any]) -> Any:
        """Keep the prompt's images, and return the first observation of the environment, if any."""
        self._image_files = list(row[IMAGES].files)
        return None if self._environment is None else self._environment.reset(row)

    def step(self, action: str) -> Any:
        """Carry out the calls of a turn. Returns: a message for each, and no reward.

        Without calls, what the environment returns; without one the episode is done.
        """
        calls = find_calls(action, self._format)
        if not calls:
            return (None, None, True) if self._environment is None else self._environment.step(action)
        messages: list[Message] = []
        for call in calls[:MAX_CALLS]:
            share = self._timeout_seconds / (2 * min(len(calls), MAX_CALLS))
            message = self._carry_out(call, timeout_seconds=share)
            if sum(len(each.images) for each in [*messages, message]) > MAX_IMAGES:
                message = self._error(f"the tools returned more than {MAX_IMAGES} images in a turn")
            if sum(len(each.text) for each in [*messages, message]) > MAX_TEXT_CHARACTERS:
                message = self._error(f"the tools returned more than {MAX_TEXT_CHARACTERS:,} characters in one turn")
            messages.append(message)
        if len(calls) > MAX_CALLS:
            messages.append(self._error(f"only the first {MAX_CALLS} of {len(calls)} calls were carried out"))
        return Observation(tuple(messages)), None, False

    def close(self) -> None:
        """Close the environment, if it can be closed."""
        close = getattr(self._environment, "close", None)
        if callable(close):
            close()

    def _carry_out(self, call: ToolCall, *, timeout_seconds: float) -> Message:
        if call.error:
            return self._error(call.error)
        if call.name not in self._tools:
            hint = f"{did_you_mean(call.name, self._tools)} (the tools are {', '.join(self._tools)})"
            return self._error(f"there is no tool {_shortened(repr(call.name))}{hint}")
        tool = self._tools[call.name]
        try:
            arguments = _bind(tool, call, LazyImages(self._image_files), timeout_seconds)
            returned = tool(**arguments)
            if isinstance(returned, bool | int | float | list | tuple) and not _has_images(returned):
                returned = json.dumps(returned, default=str)
            elif returned is None:
                returned = _NOTHING
            message = to_message(returned, role=self._role, max_image_pixels=self._max_image_pixels)
        except BaseException as error:  # noqa: BLE001 - the tool's code may raise anything
            if not isinstance(error, ValueError) and call.name not in self._reported:
                self._reported.add(call.name)  # it may be a mistake of the tool, so the log has it once
                traceback.print_exception(error)
            return self._error(describe(error))
        if not message.text.strip():  # a chat template may leave out a message without content
            message = self._text(_NOTHING)
        self._image_files += message.images
        return message

    def _error(self, text: str) -> Message:
        return self._text(f"Error: {text}")

    def _text(self, text: str) -> Message:
        return Message(self._role, escape_markers(without_surrogates(text)))


def load_tools(sources: Sequence[CodeSource]) -> dict[str, Tool]:
    """Return the tools by name. Raises: EpisodeError for one that cannot be loaded or described."""
    tools: dict[str, Tool] = {}
    for source in sources:
        tool = _built_in(source.name) if not (source.file or source.module or source.pickled) else load_code(source)
        name = getattr(tool, "__name__", source.name)
        if name in tools:
            raise EpisodeError(f"worker.rollout.tools has two tools named {name!r}; rename one of the functions")
        _check(tool, source.where)
        tools[name] = tool
    return tools


def describe_tools(tools: Mapping[str, Tool]) -> list[dict[str, Any]]:
    """Return the JSON schemas of tools, as chat templates take them.

    Imports transformers, which takes seconds. Raises: EpisodeError.
    """
    from transformers.utils import get_json_schema

    schemas = []
    for name, tool in tools.items():
        try:
            schemas.append(get_json_schema(_as_described(tool)))
        except Exception as error:  # its two exceptions have no common class, and hints may fail to resolve
            raise EpisodeError(
                f"tool {name!r} cannot be described to the model: {' '.join(str(error).split())}; give each of its "
                "parameters a type hint, and its docstring a section `Args:` with a line for each"
            ) from error
    return schemas


def describe(error: BaseException) -> str:
    """Return an error of a tool in one line, for the model."""
    text = _shortened(" ".join(str(error).split()))
    if isinstance(error, ValueError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _built_in(name: str) -> Tool:
    # Imported here: `crop` needs Pillow, and users who name none of them need neither.
    match name:
        case "crop":
            from trigon.environments.crop import crop

            return crop
        case "python":
            from trigon.environments.python_tool import python

            return python
        case _:
            raise EpisodeError(f"there is no built-in tool {name!r}; they are {', '.join(BUILT_IN_TOOLS)}")


def _check(tool: Tool, where: str) -> None:
    if inspect.iscoroutinefunction(tool):
        raise EpisodeError(f"{where} is async; make it a plain function, which may call asyncio.run")
    if not inspect.isfunction(tool):
        raise EpisodeError(f"{where} is a {type(tool).__name__}; tools are functions, with type hints and a docstring")
    for parameter in inspect.signature(tool).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise EpisodeError(f"{where} has the parameter {parameter}; models give arguments by name, so name each")
        if parameter.annotation is parameter.empty and parameter.name not in (IMAGES, TIMEOUT):
            raise EpisodeError(
                f"{where} has no type hint for its parameter {parameter.name!r}; the model is told types"
            )
    if not inspect.getdoc(tool):
        raise EpisodeError(f"{where} has no docstring; its first line and its section `Args:` are told to the model")


def _described(tool: Tool) -> list[str]:
    """Return the names of the parameters that the model is told."""
    return [name for name in inspect.signature(tool).parameters if name not in (IMAGES, TIMEOUT)]


def _bind(tool: Tool, call: ToolCall, images: LazyImages, timeout_seconds: float) -> dict[str, Any]:
    """Return the arguments of a call. Raises: ValueError for what the model has to correct."""
    names = _described(tool)
    parameters = inspect.signature(tool).parameters
    arguments: dict[str, Any] = {}
    for name, value in call.arguments.items():
        if name not in names:
            raise ValueError(
                f"{call.name} has no argument {_shortened(repr(name))}{did_you_mean(name, names)} "
                f"(it has {', '.join(names) or 'none'})"
            )
        arguments[name] = _read(tool, name, value) if call.are_texts else value
    if missing := [
        name for name in names if name not in arguments and parameters[name].default is inspect.Parameter.empty
    ]:
        raise ValueError(f"{call.name} needs {', '.join(missing)}")
    hidden = {IMAGES: images, TIMEOUT: timeout_seconds}
    return arguments | {name: value for name, value in hidden.items() if name in parameters}


def _read(tool: Tool, name: str, text: str) -> Any:
    """Return an argument that was written as text: text for a parameter of text, otherwise JSON."""
    if _hints(tool).get(name) is str:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _hints(tool: Tool) -> dict[str, Any]:
    return typing.get_type_hints(tool)


def _as_described(tool: Tool) -> Tool:
    """Return a function that looks like the tool, without the parameters of the engine."""
    names = _described(tool)
    hints = {name: hint for name, hint in _hints(tool).items() if name in names}
    signature = inspect.signature(tool)
    shown = types.FunctionType((lambda: None).__code__, tool.__globals__, tool.__name__)
    shown.__doc__ = inspect.getdoc(tool)
    shown.__annotations__ = hints
    shown.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[parameter for name, parameter in signature.parameters.items() if name in names]
    )
    return shown


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_ERROR_CHARACTERS else f"{text[: _MAX_ERROR_CHARACTERS - 3]}..."


def _has_images(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(hasattr(each, "getbands") for each in value)
