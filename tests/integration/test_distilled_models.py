"""Models like DeepSeek-R1's distills: Qwen2 or Llama 3 with another chat template.

They have special tokens of their own. The tokenizer is byte-level, although its config names the
class of Llama 2. The chat template ends with <think>, so that a completion begins inside it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.builders import make_builder
from support.oracle import group_of, load_hugging_face, packed_logprobs, padded_logprobs
from support.rollout import make_transformers_engine
from trigon.data.prompts import PromptBuilder
from trigon.errors import ModelError
from trigon.models.load import Processors, load_model, load_processors
from trigon.models.policy import Policy
from trigon.types import LocalWeights, SamplingParams

pytestmark = pytest.mark.extended

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
    tokenizer["post_processor"] = {  # adds a BOS to every text; the chat template has one already
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


def test_decoding_the_tokens_of_a_text_returns_the_text(distilled: Path) -> None:
    tokenizer = load_processors(str(distilled)).tokenizer
    text = "How many  sides?\n\n\tIt's 12, caf\u00e9."
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_a_tokenizer_that_loads_differently_from_its_file_raises(
    distilled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_processors(str(distilled))  # sets up what transformers needs
    import transformers

    def lowercase_only(*_: object, **__: object) -> object:
        return transformers.Qwen2Tokenizer(vocab={chr(code): code for code in range(97, 123)}, merges=[])

    for name in ("AutoTokenizer", "PreTrainedTokenizerFast"):
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", lowercase_only)
    with pytest.raises(ModelError, match=r"does not match its tokenizer\.json"):
        load_processors(str(distilled))


def test_a_prompt_has_the_special_tokens_of_the_chat_template_and_one_bos(distilled: Path) -> None:
    processors = load_processors(str(distilled))
    prompt = builder_of(processors).build({"problem": "How many sides?", "answer": "3"}, "train:0")
    tokenizer = processors.tokenizer
    assert tokenizer.decode(prompt.token_ids) == f"{BOS}{USER}How many sides?{ASSISTANT}<think>\n"
    for token in (BOS, USER, ASSISTANT):
        assert prompt.token_ids.count(tokenizer.convert_tokens_to_ids(token)) == 1
    assert processors.stop_token_ids == (tokenizer.convert_tokens_to_ids(EOS),)
    assert processors.banned_token_ids == ()


def test_the_chat_template_removes_the_thinking_of_earlier_turns(distilled: Path) -> None:
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


def test_trainer_and_transformers_compute_the_sampling_logprobs(distilled: Path) -> None:
    processors = load_processors(str(distilled))
    prompt = builder_of(processors).build({"problem": "How many sides?", "answer": "3"}, "train:0")
    policy = Policy(
        load_model(str(distilled), dtype=torch.float32, device="cpu"),
        processors.family,
        temperature=1.0,
        banned_token_ids=(),
    )
    engine = make_transformers_engine(distilled, processors)
    sampling = SamplingParams(n=3, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=12, ignore_eos=True, seed=5)
    with engine.awake(LocalWeights(policy.named_weights), version=0):
        [completions] = engine.generate([prompt], sampling)
    token_ids = [completion.token_ids for completion in completions]
    with torch.no_grad():
        [logprobs] = packed_logprobs(policy, processors, [group_of(prompt, token_ids)])
        expected, _ = padded_logprobs(
            load_hugging_face(distilled, torch.float32), prompt, token_ids, temperature=1.0, banned_token_ids=()
        )
    sampled = torch.tensor([logprob for completion in completions for logprob in completion.sampling_logprobs])
    torch.testing.assert_close(torch.cat(logprobs), sampled, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.cat(logprobs), expected, atol=1e-5, rtol=0)
