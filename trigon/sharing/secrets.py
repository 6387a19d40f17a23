"""Hides what does not belong into public: secrets in the values of options, and local folders."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

HIDDEN = "(hidden)"

_SECRET_NAME = re.compile(
    r"token(?!s|izer)|secret|passw|api_?key|access_?key|private_?key|credential|auth(?!or)|cookie", re.IGNORECASE
)
# Tokens of Hugging Face, OpenAI and Anthropic, Weights & Biases, GitHub, GitLab, AWS, Google,
# Slack, and JSON web tokens; "Bearer ..."; the user and the password in an address.
_SECRET_TEXT = re.compile(
    r"hf_[A-Za-z0-9]{8,}|\bsk-[\w-]{8,}|\b[0-9a-f]{40}\b|\bgh[pousr]_\w{8,}|\bgithub_pat_\w{8,}|\bglpat-[\w-]{8,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{12,}|\bAIza[\w-]{20,}|\bxox[abprs]-[\w-]{8,}|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]+"
    r"|(?<=Bearer )\S+|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"
)
_QUERY = re.compile(r"(://[^\s?#]+)\?[^\s#]*")
# A long text of letters and digits without a word: a key of a service that is not known here.
_RANDOM = re.compile(r"(?=[\w+/=-]*\d)(?=[\w+/=-]*[a-z])(?=[\w+/=-]*[A-Z])[\w+/=-]{24,}")


def hide(name: str, value: Any, *, free: bool = False) -> Any:
    """Return the value of an option as it may be published.

    A value whose name sounds like a secret is hidden as a whole, parts of texts that look like one
    are hidden, queries of addresses are left out, and absolute paths lose their folders.
    name: of the option, or a key inside it. free: whether the value belongs to a user's mapping,
    such as the arguments of a reward function, in which any long random text is hidden too.
    """
    last = name.rpartition(".")[2]
    is_secret = _SECRET_NAME.search(last) is not None or (free and last.lower().endswith("key"))
    if is_secret and value is not None and not isinstance(value, bool):
        return HIDDEN
    match value:
        case Mapping():
            return {str(key): hide(str(key), item, free=True) for key, item in value.items()}
        case list() | tuple():
            return [hide("", item, free=free) for item in value]
        case str():
            text = _QUERY.sub(r"\1", _SECRET_TEXT.sub(HIDDEN, value))
            text = _RANDOM.sub(HIDDEN, text) if free else text
            return short_path(text)
        case _:
            return value


def short_path(text: str) -> str:
    """Return a path without its folders if it is absolute: "/a/b.py:f" -> "b.py:f"."""
    is_path = text.startswith(("/", "~")) and "\n" not in text
    return PurePath(text).name or text if is_path else text
