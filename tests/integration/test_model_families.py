"""What makes a family supported: all that Trigon does with a model gives the same numbers for it.

Packed equals padded, in values and gradients; vLLM samples with the trainer's changed weights; LoRA and shards change
nothing; an export loads again, with transformers and in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from support.oracle import group_of, load_hugging_face, make_group, make_prompt, padded_logprobs, random_words
from trigon.checkpoint.export import export_checkpoint
from trigon.checkpoint.store import CheckpointStore
from trigon.data.packing import by_group, pack_rollouts
from trigon.models.families import supported_model_types
from trigon.models.load import Processors, copy_side_files, load_model, load_processors
from trigon.models.policy import Policy
from trigon.models.positions import positions_of
from trigon.rollout.protocol import RolloutEngine
from trigon.rollout.transformers import TransformersEngine
from trigon.tiny.model import TinyModelType
from trigon.training.state import save_tensors
from trigon.types import Prompt, RolloutGroup, SamplingParams

TEMPERATURE = 0.7
SAMPLING = SamplingParams(n=3, temperature=TEMPERATURE, top_p=1.0, top_k=-1, max_tokens=12, ignore_eos=True, seed=5)
TIED = (
    "qwen2_5_vl",
    "qwen3_vl_moe",
    "qwen2",
    "qwen3_moe",
    "llama",
    "gemma",
    "gemma3_text",
)  # one of each kind; the others have their own head


@dataclass(frozen=True, slots=True)
class Tried:
    """A family's tiny model: its folder, and a policy whose weights are no longer those of the folder."""

    folder: Path
    processors: Processors
    policy: Policy


def changed_policy(folder: Path, processors: Processors) -> Policy:
    """Every tensor differs from the folder's by so much that one which does not arrive somewhere is seen there."""
    model = load_model(str(folder), dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return Policy(model, processors.family, temperature=TEMPERATURE, banned_token_ids=processors.banned_token_ids)


@pytest.fixture(scope="module", params=supported_model_types())
def tried(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Tried:
    folder = tiny_model(request.param, tie_word_embeddings=request.param in TIED)
    processors = load_processors(str(folder))
    return Tried(folder, processors, changed_policy(folder, processors))


def test_every_family_has_a_tiny_model() -> None:
    assert set(get_args(TinyModelType)) == set(supported_model_types())


def make_prompts(processors: Processors) -> list[Prompt]:
    """Short text and long, the latter beyond the tiny models' windows; one image, and two of unlike shape."""
    short = make_prompt(processors, [], seed=0)
    words = random_words(40, torch.Generator().manual_seed(1))
    prompts = [short, replace(short, prompt_id="test:long", token_ids=tuple(words))]
    if processors.family.has_vision:
        prompts += [make_prompt(processors, grids, seed=2 + len(grids)) for grids in ([(8, 6)], [(6, 10), (4, 4)])]
    return prompts


def make_groups(processors: Processors) -> list[RolloutGroup]:
    return [
        make_group(prompt, lengths, seed=10 + number)
        for number, (prompt, lengths) in enumerate(
            zip(make_prompts(processors), ([2, 9], [4, 4, 4], [3, 7, 7, 1, 5], [6]), strict=False)
        )
    ]


def packed_logprobs(policy: Policy, processors: Processors, groups: Sequence[RolloutGroup]) -> Tensor:
    """Return log-probabilities of all completions' tokens, one after another, scored in one row."""
    positions = positions_of(processors.family, processors.hf_config)
    rows = pack_rollouts(groups, max_tokens=1_000_000, positions=positions)
    scored = by_group(rows, [policy(row.packed).logprobs for row in rows])
    return torch.cat([values for group in scored for values in group])


def oracle_logprobs(model: Any, processors: Processors, groups: Sequence[RolloutGroup]) -> Tensor:
    """Return the same from transformers' own padded forward."""
    return torch.cat(
        [
            padded_logprobs(
                model,
                group.prompt,
                [rollout.completion.token_ids for rollout in group.rollouts],
                temperature=TEMPERATURE,
                banned_token_ids=processors.banned_token_ids,
            )[0]
            for group in groups
        ]
    )


def weighted(logprobs: Tensor) -> Tensor:
    """Weigh every token differently, so that a gradient in the wrong place shows."""
    return torch.randn(len(logprobs), generator=torch.Generator().manual_seed(0)) @ logprobs


def test_packed_equals_padded(tried: Tried) -> None:
    groups = make_groups(tried.processors)
    oracle = load_hugging_face(tried.folder, torch.float32)
    oracle.load_state_dict(tried.policy.model.state_dict())
    expected = oracle_logprobs(oracle, tried.processors, groups)
    weighted(expected).backward()

    tried.policy.zero_grad()
    logprobs = packed_logprobs(tried.policy, tried.processors, groups)
    weighted(logprobs).backward()

    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    theirs = {name: weight.grad for name, weight in oracle.named_parameters() if weight.grad is not None}
    ours = {name: weight.grad for name, weight in tried.policy.model.named_parameters() if weight.grad is not None}
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        # That of a key's bias is nothing but rounding, since it shifts all logits of a token alike.
        assert (ours[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7, name


@pytest.mark.parametrize("engine_name", ["vllm", "transformers"])
def test_the_engine_samples_with_the_trainers_changed_weights(tried: Tried, engine_name: str) -> None:
    prompts = make_prompts(tried.processors)
    before = Policy(
        load_model(str(tried.folder), dtype=torch.float32, device="cpu"),
        tried.processors.family,
        temperature=TEMPERATURE,
        banned_token_ids=tried.processors.banned_token_ids,
    )
    engine = open_engine(engine_name, tried.folder, tried.processors)
    try:
        for version, policy in enumerate((before, tried.policy, before)):
            with engine.awake(policy.named_weights(), version=version):
                answers = engine.generate(prompts, SAMPLING, step=1)
            assert disagreement(policy, tried.processors, prompts, answers) <= 1e-4
    finally:
        engine.close()
    assert disagreement(tried.policy, tried.processors, prompts, answers) > 0.1


def open_engine(name: str, folder: Path, processors: Processors) -> RolloutEngine:
    common: dict[str, Any] = {
        "model_path": str(folder),
        "processors": processors,
        "device": "cpu",
        "dtype": torch.float32,
        "max_model_len": 256,
        "trust_remote_code": False,
        "override_config": {},
        "skip_special_tokens": True,
    }
    if name == "transformers":
        return TransformersEngine(**common)
    pytest.importorskip("vllm")
    from trigon.rollout.vllm import VllmEngine

    return VllmEngine(
        **common,
        max_num_batched_tokens=1024,
        gpu_memory_utilization=0.5,
        enforce_eager=True,
        enable_chunked_prefill=False,
        enable_prefix_caching=True,
        limit_images=2,
        seed=0,
        disable_log_stats=True,
    )


@torch.no_grad()
def disagreement(policy: Policy, processors: Processors, prompts: Sequence[Prompt], answers: Any) -> float:
    """Return the largest |log-probability difference| between the engine's samples and the policy."""
    groups = [
        group_of(prompt, [completion.token_ids for completion in row])
        for prompt, row in zip(prompts, answers, strict=True)
    ]
    sampled = [logprob for row in answers for completion in row for logprob in completion.sampling_logprobs]
    return float((packed_logprobs(policy, processors, groups) - torch.tensor(sampled)).abs().max())


def test_an_export_loads_with_transformers_and_computes_the_same(tried: Tried, tmp_path: Path) -> None:
    def write(actor: Path) -> None:
        save_tensors(dict(tried.policy.saved_tensors()), actor / "weights", group=None)
        copy_side_files(tried.folder, actor / "huggingface")

    CheckpointStore(tmp_path, keep=-1).save(1, write=write, progress={}, score=None)
    folder = export_checkpoint(tmp_path, None, dtype=None)
    groups = make_groups(tried.processors)
    exported = load_hugging_face(folder, torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(
            oracle_logprobs(exported, tried.processors, groups),
            packed_logprobs(tried.policy, tried.processors, groups),
            atol=1e-5,
            rtol=0,
        )
    # Every later run, vLLM's included, takes its names and shapes from such a folder.
    published = {name: tensor.shape for name, tensor in stored(tried.folder)}
    assert {name: tensor.shape for name, tensor in stored(folder)} == published


def stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors.torch import load_file

    yield from load_file(folder / "model.safetensors").items()
