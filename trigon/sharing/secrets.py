"""Hides what does not belong into public: secrets in the values of options, and local folders."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

HIDDEN = "(hidden)"

_SECRET_NAME = re.compile(
    r"token(?!s|izer)|secret|passw|passphrase|pwd|bearer|api_?key|access_?key|private_?key|credential|auth(?!or)|cookie",
    re.IGNORECASE,
)
# Tokens of Hugging Face, OpenAI and Anthropic, Weights & Biases, GitHub, GitLab, AWS, Google,
# Slack, and JSON web tokens; the user, the password or both in an address.
_SECRET_TEXT = re.compile(
    r"hf_[A-Za-z0-9]{8,}|\bsk-[\w-]{8,}|\b[0-9a-f]{40}\b|\bgh[pousr]_\w{8,}|\bgithub_pat_\w{8,}|\bglpat-[\w-]{8,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{12,}|\bAIza[\w-]{20,}|\bxox[abprs]-[\w-]{8,}|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]+"
    r"|(?<=://)[^/\s]+(?=@)"
)
# "Authorization: Basic dXNlcjpwYXNz", and the schemes alone before what is no word.
_HEADER = re.compile(
    r"""(\bauthorization["']?\s*[:=]\s*["']?(?:(?:bearer|basic|token|digest|apikey)\s+)?|\b(?-i:Bearer)\s+"""
    r"""|\b(?:bearer|basic)\s+(?=\S*[\d=]))[^\s"']+""",
    re.IGNORECASE,
)
_QUERY = re.compile(r"(://[^\s?#]+)\?[^\s#]*")
# A long text of letters and digits without a word: a key of a service that is not known here.
_RANDOM = re.compile(r"(?=[\w+/=-]*\d)(?=[\w+/=-]*[a-z])(?=[\w+/=-]*[A-Z])[\w+/=-]{24,}")

ARGUMENTS = "worker.reward.reward_function_kwargs"
"""The option with values that only the user's reward function knows."""
# What is published of texts in ARGUMENTS: words such as boxed or exact_match, and under keys that
# end in model the name of one.
_WORD = re.compile(r"(?=.{1,24}$)[A-Za-z]+(?:[_-][A-Za-z]+)*")
_MODEL_KEY = re.compile(r"(?:^|_)model(?:_name|_id)?$", re.IGNORECASE)
_MODEL_NAME = re.compile(r"(?=.{1,96}$)[A-Za-z][\w.:-]*(?:/[\w.-]+)?")


def hide(name: str, value: Any, *, free: bool = False) -> Any:
    """Return the value of an option as it may be published.

    A value whose name sounds like a secret is hidden as a whole, parts of texts that look like one
    are hidden, queries of addresses are left out, and absolute paths lose their folders.
    Of the arguments of a reward function only numbers, booleans, words and the names of models are
    published, since no pattern knows all secrets.
    name: of the option, or a key inside it. free: whether the value belongs to a user's mapping,
    in which any long random text is hidden too.
    """
    if name == ARGUMENTS:
        return _hide_argument("", value)
    if _is_secret(name.rpartition(".")[2], free=free) and value is not None and not isinstance(value, bool):
        return HIDDEN
    match value:
        case Mapping():
            return {_hide_text(str(key)): hide(str(key), item, free=True) for key, item in value.items()}
        case list() | tuple():
            return [hide("", item, free=free) for item in value]
        case str():
            text = _hide_text(value)
            text = _RANDOM.sub(HIDDEN, text) if free else text
            return short_path(text)
        case _:
            return value


def _hide_argument(key: str, value: Any) -> Any:
    """Return a value within ARGUMENTS as it may be published. key: the nearest one, or empty."""
    if _is_secret(key, free=True) and value is not None and not isinstance(value, bool):
        return HIDDEN
    match value:
        case bool() | int() | float() | None:
            return value
        case Mapping():
            return {_hide_text(str(name)): _hide_argument(str(name), item) for name, item in value.items()}
        case list() | tuple():
            return [_hide_argument(key, item) for item in value]
        case str() if _WORD.fullmatch(value):
            return value
        case str() if _MODEL_KEY.search(key) and _MODEL_NAME.fullmatch(value) and not _RANDOM.search(value):
            return _hide_text(value)
        case _:
            return HIDDEN


def _is_secret(key: str, *, free: bool) -> bool:
    return _SECRET_NAME.search(key) is not None or (free and key.lower().endswith("key"))


def _hide_text(text: str) -> str:
    """Return a text without the parts that look like secrets, and without queries of addresses."""
    text = _HEADER.sub(rf"\1{HIDDEN}", _SECRET_TEXT.sub(HIDDEN, text))
    return _QUERY.sub(r"\1", text)


def short_path(text: str) -> str:
    """Return a path without its folders if it is absolute: "/a/b.py:f" -> "b.py:f"."""
    is_path = text.startswith(("/", "~")) and "\n" not in text
    return PurePath(text).name or text if is_path else text
