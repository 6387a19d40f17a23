"""Finds the tool calls in what a model wrote, in the formats of several model families.

    hermes      <tool_call>{"name": "crop", "arguments": {...}}</tool_call>      Qwen, Hermes
    llama3_json {"name": "crop", "parameters": {...}}, several with ";" between  Llama 3.1 to 3.3
    qwen3_xml   <tool_call><function=crop><parameter=x>1</parameter></function></tool_call>
                                                                    Qwen3-Coder, Qwen3.5

What stands in `<think>...</think>` is no call. A turn ends with its calls: the first one, and the
calls that follow it with nothing but space between. What comes after is no call either, such as a
reply that the model invented. A model wrote the text: nothing raises here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, assert_never

from trigon.config.names import ToolFormat

MAX_CALLS = 16
"""Maximum number of calls of one turn that are carried out."""

_REPLY = "<tool_response>"
"""With which the chat templates of these formats begin the reply to a call."""

_CALL = re.compile(rf"<tool_call>(.*?)(?:</tool_call>|(?={_REPLY})|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
_SEPARATOR = re.compile(r"\s*;\s*")
_THOUGHT, _END_OF_THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool.

    are_texts: whether the arguments are text that still has to be read by their types, as in
    qwen3_xml. error: why the call cannot be read, for the model; name and arguments are then empty.
    """

    name: str
    arguments: dict[str, Any]
    are_texts: bool = False
    error: str = ""


def format_of(chat_template: str) -> ToolFormat | None:
    """Return the format that a chat template asks a model for, or None if it is none of these."""
    if "<tool_call>" in chat_template:
        return "qwen3_xml" if "<function=" in chat_template else "hermes"
    is_llama = "python_tag" in chat_template or ('"parameters":' in chat_template and '"name":' in chat_template)
    return "llama3_json" if is_llama else None


def find_calls(text: str, tool_format: ToolFormat) -> list[ToolCall]:
    """Return the calls in a turn, in order, those included that cannot be read."""
    return [call for call, _ in _find(text, tool_format)]


def end_of_calls(text: str, tool_format: ToolFormat) -> int | None:
    """Return where the turn ends that has this text, after its last call; None without a call."""
    found = _find(text, tool_format)
    return found[-1][1] if found else None


def invented_replies(tool_format: ToolFormat) -> tuple[str, ...]:
    """Return texts with which a model begins a reply of its own to a call.

    An engine stops at them. They begin with the end of the call, since a thought may have the rest.
    """
    if tool_format == "llama3_json":
        return ()  # its replies are messages of a role, before which the model ends its turn
    return tuple(f"</tool_call>{space}{_REPLY}" for space in ("", "\n", "\n\n", " "))


def _find(text: str, tool_format: ToolFormat) -> list[tuple[ToolCall, int]]:
    """Return the calls of a turn, each with its end in the text."""
    text = _without_thoughts(text)
    match tool_format:
        case "hermes":
            return list(_tagged_calls(text, _from_json))
        case "qwen3_xml":
            return list(_tagged_calls(text, _from_xml))
        case "llama3_json":
            return list(_llama_calls(text))
        case _:
            assert_never(tool_format)


def _without_thoughts(text: str) -> str:
    """Return a text of the same length with closed thoughts replaced.

    The beginning of the first one may have been written by the chat template.
    """
    parts = []
    position = start = 0
    if 0 <= text.find(_THOUGHT) < text.find(_END_OF_THOUGHT):
        start = text.find(_THOUGHT)
    while start >= 0 and (end := text.find(_END_OF_THOUGHT, start)) >= 0:
        end += len(_END_OF_THOUGHT)
        parts += [text[position:start], "\0" * (end - start)]
        position, start = end, text.find(_THOUGHT, end)
    return "".join([*parts, text[position:]])


def _tagged_calls(text: str, read: Callable[[str], ToolCall]) -> Iterator[tuple[ToolCall, int]]:
    end = None
    for found in _CALL.finditer(text):
        if end is not None and text[end : found.start()].strip():
            return
        end = found.end()
        yield read(found.group(1)), end


def _from_json(text: str) -> ToolCall:
    try:
        value = json.loads(text)
    except (RecursionError, ValueError) as error:
        return _no_json(error)
    return _from_value(value)


def _from_value(value: object) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _malformed('it must be a JSON object with "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON in JSON, as in OpenAI's interface
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return _malformed(f"the arguments of {value['name']!r} are not valid JSON")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return _malformed(f"the arguments of {value['name']!r} must be a JSON object")
    return ToolCall(value["name"], arguments)


def _from_xml(text: str) -> ToolCall:
    function = _FUNCTION.match(text)
    if function is None:
        return _malformed("it must have the form <function=name><parameter=name>value</parameter></function>")
    arguments: dict[str, Any] = {}
    for parameter in _PARAMETER.finditer(function.group(2)):
        value = parameter.group(2)  # the template writes a line break before and after each value
        arguments[parameter.group(1).strip()] = value.removeprefix("\n").removesuffix("\n")
    return ToolCall(function.group(1).strip(), arguments, are_texts=True)


def _llama_calls(text: str) -> Iterator[tuple[ToolCall, int]]:
    start = re.match(r"[\0\s]*", text)
    assert start is not None
    position = start.end()
    if text.startswith(_PYTHON_TAG, position):
        position += len(_PYTHON_TAG)
    elif not re.compile(r'\{\s*"(?:name|type|function|parameters|arguments)"\s*:').match(text, position):
        return  # text, or JSON that is no call
    decoder = json.JSONDecoder()
    separator = re.compile(r"\s*").match(text, position)
    while separator is not None and separator.end() < len(text):
        position = separator.end()
        try:
            value, position = decoder.raw_decode(text, position)
        except (RecursionError, ValueError) as error:
            yield _no_json(error), len(text)
            return
        yield _from_value(value), position
        separator = _SEPARATOR.match(text, position)
        if text[position:].lstrip().startswith("{"):
            yield _malformed('calls are separated by ";"'), len(text)


def _no_json(error: RecursionError | ValueError) -> ToolCall:
    if isinstance(error, json.JSONDecodeError):
        return _malformed(f"it is not valid JSON: {error.msg} at character {error.pos}")
    return _malformed(f"it cannot be read: {error}")  # nested too deeply; a number with too many digits


def _malformed(reason: str) -> ToolCall:
    return ToolCall("", {}, error=f"the tool call was not carried out: {reason}")
