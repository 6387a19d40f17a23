"""The text of each token of a completion, for the records of a run."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

_MAX_PENDING = 8
"""Tokens that wait for the rest of a character; UTF-8 has at most 4 bytes."""
_INCOMPLETE = "\ufffd"


class TokenTexts:
    """Decodes tokens one by one. Thread-safe.

    The texts of a completion are its decoded text, special tokens included. A character of several
    tokens is in the last of them, and the others are empty.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # A tokenizer may drop the space before its first token, so tokens are decoded after another
        # one.
        self._before: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        self._text_before = self._decode(self._before)
        self._texts: dict[int, str] = {}  # of tokens decoded alone, by id
        self._lock = Lock()

    def __call__(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token."""
        texts: list[str] = []
        pending: list[int] = []  # tokens of an incomplete character
        for token_id in token_ids:
            text = self._text_of(token_id) if not pending else self._decode_after([*pending, token_id])
            if text.endswith(_INCOMPLETE) and len(pending) < _MAX_PENDING:
                pending.append(token_id)
                texts.append("")
            else:
                pending.clear()
                texts.append(text)
        if pending:
            texts[-1] = self._decode_after(pending)
        return texts

    def _text_of(self, token_id: int) -> str:
        with self._lock:
            text = self._texts.get(token_id)
            if text is None:
                text = self._texts[token_id] = self._decode_after([token_id])
            return text

    def _decode_after(self, token_ids: list[int]) -> str:
        return self._decode([*self._before, *token_ids])[len(self._text_before) :]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
