"""Refuses text that is far too long before anything is computed from it.

Tokenizing takes about 230 bytes of memory for each character, so a prompt's characters are counted
first. No text of a language has so many characters per token as the limit allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trigon.data.bad_rows import UnusableRow
from trigon.errors import ConfigError
from trigon.types import MediaKind

CHARACTERS_PER_TOKEN = 64
"""Times max_prompt_length, the characters that a prompt may have, besides FURTHER_CHARACTERS."""

FURTHER_CHARACTERS = 65_536

MAX_ROW_CHARACTERS = 2**24
"""The characters of a row's ground truth and other columns, which reward functions get."""

MAX_OBSERVATION_CHARACTERS = 2**20
"""The characters of an observation, which is tokenized before its tokens can be counted."""


def check_prompt_text(texts: Sequence[str], name: str, *, max_prompt_length: int) -> None:
    """Raise UnusableRow if texts of a prompt are far too long for its tokens, or have no UTF-8.

    name: of the row, for the error. Its num_tokens is the number of bytes, which is no less than
    that of tokens.
    """
    num_characters = sum(map(len, texts))
    limit = CHARACTERS_PER_TOKEN * max_prompt_length + FURTHER_CHARACTERS
    if num_characters > limit:
        num_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        raise UnusableRow(
            "overlong",
            f"{name}: {num_characters:,} characters of text, which are not counted in tokens: more than {limit:,}, for "
            f"max_prompt_length={max_prompt_length}",
            num_tokens=num_bytes,
        )
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = rf"\u{ord(text[error.start]):04x}"
            raise UnusableRow(
                "encoding", f"{name}: the text has {half}, half of a surrogate pair, which no model can read; remove it"
            ) from error


def check_prompt_tokens(
    num_tokens: int, media: Sequence[Sequence[int]], kind: MediaKind, name: str, *, max_prompt_length: int
) -> None:
    """Raise UnusableRow if a prompt has more than max_prompt_length tokens.

    media: the tokens of each of its images or videos, included in num_tokens.
    """
    if num_tokens > max_prompt_length:
        media_tokens = sum(map(len, media))
        share = f" ({media_tokens} of them for {kind}s)" if media else ""
        message = f"{name}: {num_tokens} tokens{share}, more than max_prompt_length={max_prompt_length}"
        raise UnusableRow("overlong", message, num_tokens=num_tokens, media_tokens=media_tokens)


def check_option_text(text: str, option: str, *, max_prompt_length: int) -> None:
    """Raise ConfigError if the text of an option, which every prompt has, is too long for it."""
    limit = CHARACTERS_PER_TOKEN * max_prompt_length + FURTHER_CHARACTERS
    if len(text) > limit:
        raise ConfigError(
            f"{option} has {len(text):,} characters, and every prompt has it; more than {limit:,} do not fit into "
            f"data.max_prompt_length={max_prompt_length}"
        )


def check_row_size(row: Mapping[str, Any], name: str) -> None:
    """Raise UnusableRow if a row, without its media, is larger than a reward function gets."""
    num_characters = _count(row)
    if num_characters > MAX_ROW_CHARACTERS:
        raise UnusableRow(
            "row_size",
            f"{name}: its columns have {num_characters:,} characters without images and videos, more than the "
            f"{MAX_ROW_CHARACTERS:,} that are passed to a reward function; drop columns that it does not need",
        )


def _count(value: Any) -> int:
    """Return the characters of all texts in a value, and 8 for each number."""
    match value:
        case str():
            return len(value)
        case bytes():
            return 0  # which are not passed on
        case Mapping():
            return sum(len(str(key)) + _count(item) for key, item in value.items())
        case list() | tuple():
            return sum(map(_count, value))
        case _:
            return 8
