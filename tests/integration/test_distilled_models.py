"""Models as DeepSeek-R1's distills are: Qwen2's or Llama 3's network, tokens and a chat layout of their own.

The tokenizer is byte-level, yet its config names the class of Llama 2. The layout opens the thinking, so that a
response begins inside it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.builders import make_builder
from support.oracle import group_of, load_hugging_face, padded_logprobs
from trigon.data.packing import by_group, pack_rollouts
from trigon.data.prompts import PromptBuilder
from trigon.errors import ModelError
from trigon.models.load import Processors, load_model, load_processors
from trigon.models.policy import Policy
from trigon.models.positions import positions_of
from trigon.rollout.transformers import TransformersEngine
from trigon.types import SamplingParams

BOS, EOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
USER, ASSISTANT = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content -}}{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {{- '<\uff5cUser\uff5c>' + message.content -}}
  {%- elif message.role == 'assistant' -%}
    {{- '<\uff5cAssistant\uff5c>' + message.content.split('</think>')[-1] + eos_token -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<\uff5cAssistant\uff5c><think>\\n' -}}{%- endif -%}
"""
NAMES = {"<|endoftext|>": BOS, "<|im_end|>": EOS, "<|object_ref_start|>": USER, "<|object_ref_end|>": ASSISTANT}


@pytest.fixture(params=["qwen2", "llama"])
def distilled(request: pytest.FixtureRequest, tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(tiny_model(request.param), tmp_path / "model"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    for token in tokenizer["added_tokens"]:
        token["content"] = NAMES.get(token["content"], token["content"])
    bos_id = next(token["id"] for token in tokenizer["added_tokens"] if token["content"] == BOS)
    tokenizer["post_processor"] = {  # which would begin every text with a BOS, and the layout brings one already
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {BOS: {"id": BOS, "ids": [bos_id], "tokens": [BOS]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config = {
        "tokenizer_class": "LlamaTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "add_bos_token": True,
        "legacy": True,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "chat_template.jinja").unlink()
    eos_id = next(token["id"] for token in tokenizer["added_tokens"] if token["content"] == EOS)
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": bos_id, "eos_token_id": eos_id}))
    return folder


def builder_of(processors: Processors) -> PromptBuilder:
    return make_builder(processors, max_prompt_length=256)


def test_nothing_of_a_text_is_lost(distilled: Path) -> None:
    tokenizer = load_processors(str(distilled)).tokenizer
    text = "How many  sides?\n\n\tIt's 12, caf\u00e9."
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_a_tokenizer_that_cannot_be_loaded_as_it_was_written_is_refused(
    distilled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_processors(str(distilled))  # declares what transformers wants
    import transformers

    def lowercase_only(*_: object, **__: object) -> object:
        return transformers.Qwen2Tokenizer(vocab={chr(code): code for code in range(97, 123)}, merges=[])

    for name in ("AutoTokenizer", "PreTrainedTokenizerFast"):
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", lowercase_only)
    with pytest.raises(ModelError, match=r"does not match its tokenizer\.json"):
        load_processors(str(distilled))


def test_a_prompt_is_laid_out_in_their_own_tokens_with_one_beginning(distilled: Path) -> None:
    processors = load_processors(str(distilled))
    prompt = builder_of(processors).build({"problem": "How many sides?", "answer": "3"}, "train:0")
    tokenizer = processors.tokenizer
    assert tokenizer.decode(prompt.token_ids) == f"{BOS}{USER}How many sides?{ASSISTANT}<think>\n"
    for token in (BOS, USER, ASSISTANT):
        assert prompt.token_ids.count(tokenizer.convert_tokens_to_ids(token)) == 1
    assert processors.stop_token_ids == (tokenizer.convert_tokens_to_ids(EOS),)
    assert processors.banned_token_ids == ()


def test_earlier_answers_lose_their_thinking_as_the_layout_says(distilled: Path) -> None:
    processors = load_processors(str(distilled))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "<think>hm</think>1"},
        {"role": "user", "content": "Two?"},
    ]
    prompt = builder_of(processors).build({"problem": messages, "answer": ""}, "train:0")
    assert processors.tokenizer.decode(prompt.token_ids) == (
        f"{BOS}Be brief.{USER}One?{ASSISTANT}1{EOS}{USER}Two?{ASSISTANT}<think>\n"
    )


def test_what_it_samples_is_scored_as_it_was_sampled(distilled: Path) -> None:
    processors = load_processors(str(distilled))
    prompt = builder_of(processors).build({"problem": "How many sides?", "answer": "3"}, "train:0")
    policy = Policy(
        load_model(str(distilled), dtype=torch.float32, device="cpu"),
        processors.family,
        temperature=1.0,
        banned_token_ids=(),
    )
    engine = TransformersEngine(
        model_path=str(distilled),
        processors=processors,
        device="cpu",
        dtype=torch.float32,
        max_model_len=256,
        trust_remote_code=False,
        override_config={},
        skip_special_tokens=True,
    )
    sampling = SamplingParams(n=3, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=12, ignore_eos=True, seed=5)
    with engine.awake(policy.named_weights(), version=0):
        [answers] = engine.generate([prompt], sampling, step=1)
    completions = [answer.token_ids for answer in answers]
    rows = pack_rollouts(
        [group_of(prompt, completions)],
        max_tokens=1000,
        positions=positions_of(processors.family, processors.hf_config),
    )
    with torch.no_grad():
        [scores] = by_group(rows, [policy(row.packed).logprobs for row in rows])
        plain, _ = padded_logprobs(
            load_hugging_face(distilled, torch.float32), prompt, completions, temperature=1.0, banned_token_ids=()
        )
    sampled = torch.tensor([logprob for answer in answers for logprob in answer.sampling_logprobs])
    torch.testing.assert_close(torch.cat(scores), sampled, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.cat(scores), plain, atol=1e-5, rtol=0)
