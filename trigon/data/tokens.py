"""Between text and tokens: special tokens in a row's text, and the text of each sampled token.

A row cannot write a role: the special tokens in a dataset's text are tokenized as text. A chat
template writes special tokens such as `<|im_start|>`. Where a row's own text contains one, it is
replaced by a private character before the template is rendered; afterwards the text around it, up
to the template's own special tokens, is tokenized as text:

    rendered    <|im_start|>user\\nHello X system<|im_end|>\\n      X for <|im_start|>
    tokenized   <|im_start|> | user\\nHello <|im_start|> system | <|im_end|>\\n
                special        text                              special

Added tokens of the form `<|...|>` count as special, whatever their flag says: in DeepSeek-R1's
distilled models, the tokens of roles are not flagged. `<think>` and the like are not special.

Rows without special tokens are tokenized as a whole, by the tokenizer itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

_CONTROL_TOKEN = re.compile(r"<[|\uff5c].+[|\uff5c]>")  # the second is DeepSeek's full-width bar

_PRIVATE_USE_AREAS = (0xF0000, 0x100000)
_AREA_LENGTH = 0xFFFE

_MAX_PENDING = 8
"""Tokens that wait for the rest of a character; UTF-8 has at most 4 bytes."""
_INCOMPLETE = "\ufffd"


@dataclass(frozen=True, slots=True, eq=False)
class MaskedTokens:
    """The special tokens of one row's text, each represented by a private character.

    characters: the private character of each special token.
    """

    _owner: SpecialTokens
    characters: dict[str, str]

    def mask(self, text: str) -> str:
        """Return a text with characters instead of special tokens."""
        return self._owner.any_token.sub(lambda match: self.characters[match.group()], text)

    def unmask(self, text: str) -> str:
        """Return a text with special tokens instead of their characters."""
        return text.translate({ord(character): token for token, character in self.characters.items()})

    def tokenize(self, rendered: str) -> list[int]:
        """Return the token ids of a rendered template; characters become tokens of text."""
        any_character = re.compile(f"[{''.join(self.characters.values())}]")
        ids: list[int] = []
        start = 0
        boundaries = [match.span() for match in self._owner.any_special_token.finditer(rendered)]
        ends = [begin for begin, _ in boundaries] + [len(rendered)]
        for begin, end in zip([0, *(end for _, end in boundaries)], ends, strict=True):
            if any_character.search(rendered, begin, end):
                ids += self._owner.tokenize(rendered[start:begin])
                ids += self._owner.tokenize_as_text(self.unmask(rendered[begin:end]))
                start = end
        return ids + self._owner.tokenize(rendered[start:])


class SpecialTokens:
    """The special tokens of a tokenizer, and its two ways to tokenize them. Thread-safe.

    any_special_token: matches all of them; any_token: those that are masked in a dataset's text.
    tokenize: returns the token ids of a text, special tokens included.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tokenize: Callable[[str], list[int]],
        ignore: Collection[str],
        also: Collection[str] = (),
    ) -> None:
        """Read the special tokens of a Hugging Face tokenizer.

        ignore: special tokens that are not masked. also: other texts that are masked.
        """
        added = tokenizer.added_tokens_decoder.values()
        tokens = {str(token) for token in added if token.special or _CONTROL_TOKEN.fullmatch(str(token))}
        self.any_special_token = _any_of(tokens)
        self.any_token = _any_of((tokens - set(ignore)) | set(also))
        self.tokenize = tokenize
        self._tokenizer = tokenizer
        self._backend: Any = None
        if getattr(tokenizer, "is_fast", False):
            # A copy: the setting is the tokenizer's own, and other threads use it.
            from tokenizers import Tokenizer

            content = json.loads(tokenizer.backend_tokenizer.to_str())
            for token in content["added_tokens"]:
                token["special"] = token["content"] in tokens
            self._backend = Tokenizer.from_str(json.dumps(content))
            self._backend.no_truncation()
            self._backend.no_padding()
            self._backend.encode_special_tokens = True

    def find(self, texts: Sequence[str]) -> MaskedTokens | None:
        """Return the special tokens in a row's texts, or None if there are none.

        Their characters are in none of the texts.
        """
        found = sorted({token for text in texts for token in self.any_token.findall(text)})
        if not found:
            return None
        used = {ord(character) for text in texts for character in text if ord(character) >= _PRIVATE_USE_AREAS[0]}
        free = (start + offset for start in _PRIVATE_USE_AREAS for offset in range(_AREA_LENGTH))
        unused = (code for code in free if code not in used)
        return MaskedTokens(self, {token: chr(next(unused)) for token in found})

    def tokenize_as_text(self, text: str) -> list[int]:
        """Return the token ids of a text in which special tokens are ordinary text."""
        if self._backend is not None:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        return list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def _any_of(tokens: Collection[str]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


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
