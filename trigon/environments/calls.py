"""Finds the tool calls in what a model wrote, in the formats of several model families.

    hermes      <tool_call>{"name": "crop", "arguments": {...}}</tool_call>      Qwen, Hermes
    llama3_json {"name": "crop", "parameters": {...}}, several with ";" between  Llama 3.1 to 3.3
    qwen3_xml   <tool_call><function=crop><parameter=x>1</parameter></function></tool_call>
                                                                    Qwen3-Coder, Qwen3.5

What stands in `<think>...</think>` is no call. The text is that of a model: nothing raises here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, assert_never

from trigon.names import ToolFormat

MAX_CALLS = 16
"""Maximum number of calls of one turn that are carried out."""

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
_END_OF_THOUGHT = "</think>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool.

    are_texts: whether the arguments are text that still has to be read by their types, as those of
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
    """Return the calls in a text, in order, those included that cannot be read."""
    text = text.rpartition(_END_OF_THOUGHT)[2]
    match tool_format:
        case "hermes":
            return [_from_json(found.group(1)) for found in _CALL.finditer(text)]
        case "qwen3_xml":
            return [_from_xml(found.group(1)) for found in _CALL.finditer(text)]
        case "llama3_json":
            return list(_llama_calls(text.strip()))
        case _:
            assert_never(tool_format)


def _from_json(text: str) -> ToolCall:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        return _malformed(f"it is not valid JSON: {error.msg} at character {error.pos}")
    except (RecursionError, ValueError) as error:  # nested too deeply; a number with too many digits
        return _malformed(f"it cannot be read: {error}")
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


def _llama_calls(text: str) -> Iterator[ToolCall]:
    has_tag = text.startswith(_PYTHON_TAG)
    text = text.removeprefix(_PYTHON_TAG).strip()
    if not has_tag and not re.match(r'\{\s*"(?:name|type|function|parameters|arguments)"\s*:', text):
        return  # text, or JSON that is no call
    decoder = json.JSONDecoder()
    while text:
        try:
            value, end = decoder.raw_decode(text)
        except json.JSONDecodeError as error:
            yield _malformed(f"it is not valid JSON: {error.msg} at character {error.pos}")
            return
        except (RecursionError, ValueError) as error:
            yield _malformed(f"it cannot be read: {error}")
            return
        yield _from_value(value)
        text = text[end:].strip()
        if text and not text.startswith(";"):
            yield _malformed('calls are separated by ";"')
            return
        text = text.removeprefix(";").strip()


def _malformed(reason: str) -> ToolCall:
    return ToolCall("", {}, error=f"the tool call was not carried out: {reason}")
