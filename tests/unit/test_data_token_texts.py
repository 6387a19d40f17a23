"""The texts of single tokens."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from trigon.data.tokens import TokenTexts

TEXTS = ["How many?", " two  spaces\n", "<think>x</think> \\boxed{4}", "Grüße 北京 🙂!", "a\u0301 \u200b", ""]


@pytest.fixture(scope="module")
def tokenizer(tiny_vlm):
    return AutoTokenizer.from_pretrained(tiny_vlm)


@pytest.mark.parametrize("text", TEXTS)
def test_the_texts_of_tokens_are_the_text(tokenizer, text):
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    texts = TokenTexts(tokenizer)(token_ids)
    assert len(texts) == len(token_ids)
    assert "".join(texts) == tokenizer.decode(token_ids)


def test_a_special_token_has_its_own_text(tokenizer):
    token_ids = [*tokenizer("4", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert TokenTexts(tokenizer)(token_ids)[-1] == tokenizer.eos_token


def test_a_character_of_several_tokens_is_in_the_last_of_them(tokenizer):
    token_ids = tokenizer("🙂", add_special_tokens=False)["input_ids"]
    assert len(token_ids) > 1, "the tokenizer has a token for it"
    *first, last = TokenTexts(tokenizer)(token_ids)
    assert set(first) == {""}
    assert last == "🙂"


def test_an_incomplete_character_is_shown_as_such(tokenizer):
    token_ids = tokenizer("ab🙂", add_special_tokens=False)["input_ids"][:-1]
    texts = TokenTexts(tokenizer)(token_ids)
    assert "".join(texts) == "ab\ufffd"
    assert TokenTexts(tokenizer)([*token_ids, *tokenizer("cd", add_special_tokens=False)["input_ids"]])[-2:] != ["", ""]
