"""Tools: an environment in which the model's calls of Python functions are carried out.

A tool is a plain function with type hints and a docstring, from which the chat template's
description is made. Two parameters are not described: `images` gets the images of the conversation,
as PIL images that are opened when they are indexed, and `timeout_seconds` the time that the call
may take.
What a function raises is the reply to the model, since most errors are the model's.

The built-in tools are at the end: `crop` shows a region of an image enlarged, and `python` runs
code that a model wrote, in a sandbox of its own for each call. The sandbox is made by the code
server of this process's supervisor (system/confinement), which does not know the row of the episode
and its ground truth.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import signal
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from PIL import Image

from trigon.config.names import ObservationRole, ToolFormat
from trigon.environments.calls import MAX_CALLS, ToolCall, find_calls
from trigon.environments.conversion import are_images, to_message, to_png, without_surrogates
from trigon.environments.protocol import MAX_IMAGES, MAX_TEXT_CHARACTERS, Message, Observation, escape_markers
from trigon.environments.source import load_code
from trigon.errors import EpisodeError
from trigon.system.confinement.code_server import CodeResult, run_code
from trigon.system.confinement.sandbox import MAX_FILE_BYTES, MAX_MEMORY_BYTES
from trigon.system.image_formats import LazyImages
from trigon.system.terminal import did_you_mean, shorten
from trigon.system.user_code import CodeSource, text_of

IMAGES = "images"
TIMEOUT = "timeout_seconds"
"""The parameters of a tool that are not described to the model."""

MIN_CROP_PIXELS = 1 << 18
"""Area to which smaller regions are enlarged: 256 tokens of Qwen3-VL, 334 of Qwen2.5-VL."""

MAX_SCALE = 1000
"""Boxes are relative: from 0 to 1000 in each direction, as Qwen3-VL is trained."""

MAX_PYTHON_SECONDS = 10.0
"""Time limit of a call of `python`; less if the step may take less."""

MAX_OUTPUT_CHARACTERS = 10_000
"""How much of its output the model gets: the first and the last half."""

_NOTHING = "(no output)"
"""The reply of a tool that returns None or an empty text."""

_MAX_ERROR_CHARACTERS = 500
_TRIAL_SECONDS = 60.0
_code_server: int | None = None  # the descriptor of the server of this process's supervisor

Tool = Callable[..., Any]


@dataclass(slots=True, eq=False)
class ToolEnvironment:
    """An environment of one episode: carries out the calls of a turn.

    A turn without calls is the last one, or the action of an environment that the tools are beside.
    tools: the tools by name. environment: the user's environment; None: tools only. role: the role
    of the messages of tools. timeout_seconds: time limit of a step.
    """

    tools: Mapping[str, Tool]
    environment: Any = None
    _: KW_ONLY
    tool_format: ToolFormat
    role: ObservationRole
    timeout_seconds: float
    max_image_pixels: int
    _image_files: list[bytes | str] = field(default_factory=list)
    _reported: set[str] = field(default_factory=set)

    def reset(self, row: Mapping[str, Any]) -> Any:
        """Keep the prompt's images, and return the first observation of the environment, if any."""
        self._image_files = list(row[IMAGES].files)
        return None if self.environment is None else self.environment.reset(row)

    def step(self, action: str) -> Any:
        """Carry out the calls of a turn. Returns: a message for each, and no reward.

        Without calls, it returns what the environment returns; without an environment the episode
        is done.
        """
        calls = find_calls(action, self.tool_format)
        if not calls:
            return (None, None, True) if self.environment is None else self.environment.step(action)
        messages: list[Message] = []
        for call in calls[:MAX_CALLS]:
            share = self.timeout_seconds / (2 * min(len(calls), MAX_CALLS))
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
        close = getattr(self.environment, "close", None)
        if callable(close):
            close()

    def _carry_out(self, call: ToolCall, *, timeout_seconds: float) -> Message:
        if call.error:
            return self._error(call.error)
        if call.name not in self.tools:
            hint = f"{did_you_mean(call.name, self.tools)} (the tools are {', '.join(self.tools)})"
            return self._error(f"there is no tool {shorten(repr(call.name), _MAX_ERROR_CHARACTERS)}{hint}")
        tool = self.tools[call.name]
        try:
            arguments = _bind(tool, call, LazyImages(self._image_files), timeout_seconds)
            returned = tool(**arguments)
            if _is_json(returned):
                returned = json.dumps(returned, default=str)
            elif returned is None:
                returned = _NOTHING
            message = to_message(returned, role=self.role, max_image_pixels=self.max_image_pixels)
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
        return Message(self.role, escape_markers(without_surrogates(text)))


def load_tools(sources: Sequence[CodeSource]) -> dict[str, Tool]:
    """Return the tools by name. Raises: EpisodeError for one that cannot be loaded or described."""
    tools: dict[str, Tool] = {}
    for source in sources:
        tool = load_code(source) if source.file or source.module or source.pickled else _BUILT_IN[source.name]
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
    text = shorten(" ".join(text_of(error).split()), _MAX_ERROR_CHARACTERS)
    if isinstance(error, ValueError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


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
                f"{where} has no type hint for its parameter {parameter.name!r}; types are described to the model"
            )
    if not inspect.getdoc(tool):
        raise EpisodeError(
            f"{where} has no docstring; its first line and its section `Args:` are described to the model"
        )


def _described(tool: Tool) -> list[str]:
    """Return the names of the parameters that are described to the model."""
    return [name for name in inspect.signature(tool).parameters if name not in (IMAGES, TIMEOUT)]


def _bind(tool: Tool, call: ToolCall, images: LazyImages, timeout_seconds: float) -> dict[str, Any]:
    """Return the arguments of a call. Raises: ValueError for what the model has to correct."""
    names = _described(tool)
    parameters = inspect.signature(tool).parameters
    arguments: dict[str, Any] = {}
    for name, value in call.arguments.items():
        if name not in names:
            raise ValueError(
                f"{call.name} has no argument {shorten(repr(name), _MAX_ERROR_CHARACTERS)}{did_you_mean(name, names)} "
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
    hint = typing.get_type_hints(tool).get(name)
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if type(None) in kinds and text == "null":
        return None
    if all(kind in (str, type(None)) or _is_choice_of_texts(kind) for kind in kinds):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _is_choice_of_texts(hint: Any) -> bool:
    return typing.get_origin(hint) is typing.Literal and all(isinstance(each, str) for each in typing.get_args(hint))


def _as_described(tool: Tool) -> Tool:
    """Return a function that looks like the tool, without the parameters of the engine."""
    names = _described(tool)
    hints = {name: hint for name, hint in typing.get_type_hints(tool).items() if name in names}
    signature = inspect.signature(tool)
    shown = types.FunctionType((lambda: None).__code__, tool.__globals__, tool.__name__)
    shown.__doc__ = inspect.getdoc(tool)
    shown.__annotations__ = hints
    shown.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[parameter for name, parameter in signature.parameters.items() if name in names]
    )
    return shown


def _is_json(value: object) -> bool:
    """Return whether what a tool returned becomes JSON: numbers, lists, dicts that show nothing."""
    if isinstance(value, dict):
        is_shown = bool(value) and value.keys() <= {"text", "image", "images"}
        return not is_shown and not any(isinstance(each, Image.Image) or are_images(each) for each in value.values())
    return isinstance(value, bool | int | float | list | tuple) and not are_images(value)


def crop(bbox_2d: list[float], images: list[Image.Image], img_idx: int = 0) -> Image.Image:
    """Zoom in on a region of an image, and see it enlarged.

    Args:
        bbox_2d: The region as [x1, y1, x2, y2], relative to the image: from 0 to 1000, where [0, 0] is the top left corner and [1000, 1000] the bottom right one
        img_idx: The number of the image in the conversation, starting from 0 (the results of earlier calls count)
    """  # noqa: E501, W505 - a model reads it: each line break would be one more token
    if not images:
        raise ValueError("the conversation has no image")
    if isinstance(img_idx, bool) or not isinstance(img_idx, int) or not 0 <= img_idx < len(images):
        raise ValueError(f"img_idx is {img_idx!r}; it must be from 0 to {len(images) - 1}")
    is_box = isinstance(bbox_2d, list | tuple) and len(bbox_2d) == 4
    if not is_box or not all(isinstance(each, int | float) and abs(each) < math.inf for each in bbox_2d):
        raise ValueError("bbox_2d must have four numbers: [x1, y1, x2, y2]")
    x1, y1, x2, y2 = (min(max(each, 0), MAX_SCALE) for each in bbox_2d)
    if x1 >= x2 or y1 >= y2:
        raise ValueError("the region of bbox_2d is empty: x1 < x2 and y1 < y2 must hold, from 0 to 1000")
    image = images[img_idx]
    left, right = _pixels(x1, x2, image.width)
    top, bottom = _pixels(y1, y2, image.height)
    return _enlarged(image.crop((left, top, right, bottom)))


def _pixels(start: float, end: float, side: int) -> tuple[int, int]:
    """Return the pixels that a range of 0 to 1000 touches: at least one."""
    first = min(math.floor(start * side / MAX_SCALE), side - 1)
    return first, max(math.ceil(end * side / MAX_SCALE), first + 1)


def _enlarged(image: Image.Image) -> Image.Image:
    scale = math.sqrt(MIN_CROP_PIXELS / (image.width * image.height))
    if scale <= 1:
        return image
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.BICUBIC)


def connect_code_server(server: int | None) -> None:
    """Set the descriptor of the code server for this process and all that are forked from it."""
    global _code_server
    _code_server = server


def find_obstacle() -> str:
    """Return why the tool python cannot run code here, with a remedy; "" if it can. Tries it."""
    result = _run("import ctypes, math", {}, seconds=_TRIAL_SECONDS)
    if result.ending == "impossible":
        return result.reason
    if result.ending == "exited" and result.status == 0:
        return ""
    output = result.output.decode(errors="replace").strip().rpartition("\n")[2]
    why = output or _ending_of(result, _TRIAL_SECONDS)
    return f"Python does not start there ({why}); all users must be able to read its files"


def python(code: str, images: list[Any], timeout_seconds: float) -> str:
    """Run Python code and get what it prints, and the value of its last expression. Each call starts anew. The images of the conversation are in the working folder: image_0.png, image_1.png, ...

    Args:
        code: The code to run
    """  # noqa: E501, W505 - a model reads it: each line break would be one more token
    if not isinstance(code, str):
        raise ValueError("code must be text")
    limit = min(MAX_PYTHON_SECONDS, timeout_seconds)
    files = {f"image_{number}.png": to_png(image) for number, image in enumerate(images)}
    result = _run(code.encode(errors="replace").decode(), files, seconds=limit)
    if result.ending == "impossible":
        raise RuntimeError(result.reason)
    text = result.output.decode("utf-8", errors="replace")
    parts = (_cut(text.rstrip("\n")), _ending_of(result, limit))
    return escape_markers("\n".join(part for part in parts if part) or _NOTHING)


def _run(code: str, files: dict[str, bytes], *, seconds: float) -> CodeResult:
    if _code_server is None:
        raise RuntimeError("the tool python is used by a process that has no code server")
    return run_code(_code_server, code, files, seconds=seconds)


def _ending_of(result: CodeResult, limit: float) -> str:
    """Return how the code ended, for the model; "" if its output says all."""
    if result.ending == "late":
        return f"The code took more than {limit:g} s and was ended."
    if result.ending == "output":
        return f"The code printed more than {MAX_FILE_BYTES >> 20} MiB and was ended."
    code = os.waitstatus_to_exitcode(result.status)
    if code >= 0:
        return ""
    if -code in (signal.SIGXCPU, signal.SIGKILL):
        return "The code was ended: it used too much time or memory."
    return f"The code was ended by signal {-code} ({signal.strsignal(-code)}); it may use {MAX_MEMORY_BYTES >> 30} GiB."


def _cut(text: str) -> str:
    if len(text) <= MAX_OUTPUT_CHARACTERS:
        return text
    half = MAX_OUTPUT_CHARACTERS // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half:,} characters are left out) ...\n{text[-half:]}"


_BUILT_IN: Mapping[str, Tool] = {"crop": crop, "python": python}  # config.names.BUILT_IN_TOOLS
