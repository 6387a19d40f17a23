"""The tests that every supported model family passes.

Packed equals padded, in values and gradients. Both rollout engines sample with the trainer's
changed weights. An export loads with transformers and computes the same.
scripts/families_table.py makes a table of the differences that these tests record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.models import policy_of
from support.oracle import (
    concatenated,
    group_of,
    has_no_gradient,
    load_hugging_face,
    make_group,
    make_prompt,
    packed_logprobs,
    padded_logprobs,
    random_words,
)
from support.rollout import make_transformers_engine, make_vllm_engine
from trigon.checkpoint.export import export_checkpoint
from trigon.checkpoint.store import CheckpointStore
from trigon.errors import ConfigError, EngineError
from trigon.models.families import family_named, supported_model_types
from trigon.models.load import Processors, auto_class, copy_side_files, load_hf_config, load_processors
from trigon.models.policy import Policy
from trigon.models.weight_files import save_weights
from trigon.rollout.protocol import RolloutEngine
from trigon.training.state import save_tensors
from trigon.types import LocalWeights, Prompt, RolloutGroup, SamplingParams

TEMPERATURE = 0.7
SAMPLING = SamplingParams(n=3, temperature=TEMPERATURE, top_p=1.0, top_k=-1, max_tokens=12, ignore_eos=True, seed=5)
TIED = (
    "qwen2_5_vl",
    "qwen3_vl_moe",
    "qwen3_next",
    "qwen2",
    "qwen3_moe",
    "llama",
    "gemma",
    "gemma3_text",
    "gemma3",
    "gemma4",
)  # one of each kind; the others are not tied


Record = Callable[[str, object], None]
"""The type of pytest's fixture record_property."""


@dataclass(frozen=True, slots=True)
class FamilyModel:
    """A family's tiny model: its folder, and a policy whose weights differ from the folder's."""

    folder: Path
    processors: Processors
    policy: Policy


def changed_policy(folder: Path) -> Policy:
    """Return a policy of which every tensor differs from the folder's, to detect a stale one."""
    policy, generator = policy_of(folder, temperature=TEMPERATURE), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return policy


@pytest.fixture(scope="module", params=supported_model_types())
def family_model(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> FamilyModel:
    folder = tiny_model(request.param, tie_word_embeddings=request.param in TIED)
    processors = load_processors(str(folder))
    return FamilyModel(folder, processors, changed_policy(folder))


def make_prompts(processors: Processors) -> list[Prompt]:
    """Return a short prompt, one longer than attention windows, and two with images."""
    short = make_prompt(processors, [], seed=0)
    words = random_words(40, torch.Generator().manual_seed(1))
    prompts = [short, replace(short, prompt_id="test:long", token_ids=tuple(words))]
    if processors.family.has_vision:
        prompts += [make_prompt(processors, grids, seed=2 + len(grids)) for grids in ([(8, 6)], [(6, 10), (4, 4)])]
    if processors.family.tile_assembly is not None:
        prompts.append(make_prompt(processors, [(16, 12)], seed=5))  # so large that its features are reduced
    return prompts


def make_groups(processors: Processors) -> list[RolloutGroup]:
    return [
        make_group(prompt, lengths, seed=10 + number)
        for number, (prompt, lengths) in enumerate(
            zip(make_prompts(processors), ([2, 9], [4, 4, 4], [3, 7, 7, 1, 5], [6], [3]), strict=False)
        )
    ]


def oracle_logprobs(model: Any, processors: Processors, groups: Sequence[RolloutGroup]) -> Tensor:
    """Return the same, computed by transformers' own padded forward pass."""
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


def relative_error(gradients: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference relative to the norm, over all tensors together."""
    difference = sum(float((gradients[name] - gradient).norm() ** 2) for name, gradient in expected.items())
    return float((difference / sum(float(gradient.norm() ** 2) for gradient in expected.values())) ** 0.5)


def weighted(logprobs: Tensor) -> Tensor:
    """Return a sum with a different weight for each token, to detect a misplaced gradient."""
    return torch.randn(len(logprobs), generator=torch.Generator().manual_seed(0)) @ logprobs


@pytest.mark.extended(but=["qwen2_5_vl"])
def test_packed_equals_padded(family_model: FamilyModel, record_property: Record) -> None:
    groups = make_groups(family_model.processors)
    oracle = load_hugging_face(family_model.folder, torch.float32)
    oracle.load_state_dict(family_model.policy.model.state_dict())
    expected = oracle_logprobs(oracle, family_model.processors, groups)
    weighted(expected).backward()

    family_model.policy.zero_grad()
    logprobs = concatenated(packed_logprobs(family_model.policy, family_model.processors, groups))
    weighted(logprobs).backward()

    record_property("packed", float((logprobs - expected).detach().abs().max()))
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    expected_gradients = {name: weight.grad for name, weight in oracle.named_parameters() if weight.grad is not None}
    gradients = {
        name: weight.grad for name, weight in family_model.policy.model.named_parameters() if weight.grad is not None
    }
    assert gradients.keys() == expected_gradients.keys()
    record_property("gradients", relative_error(gradients, expected_gradients))
    for name, gradient in expected_gradients.items():
        if has_no_gradient(name):
            assert max(gradients[name].norm(), gradient.norm()) < 1e-6, name
            continue
        # The gradient of a key's bias is rounding only, since it shifts all attention logits of a
        # token alike.
        assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7, name


@pytest.mark.extended(but=["qwen2_5_vl-transformers"])
@pytest.mark.parametrize("engine_name", [pytest.param("vllm", marks=pytest.mark.vllm), "transformers"])
def test_the_rollout_engine_samples_with_the_trainers_changed_weights(
    family_model: FamilyModel, engine_name: str, record_property: Record
) -> None:
    family = family_model.processors.family
    if engine_name == "vllm" and family.linear_attention:
        pytest.skip("on a CPU vLLM computes it in bfloat16, with heads of 128: see the test below")
    if engine_name == "vllm" and not (family.in_vllm and family.image_layers == "none"):
        with pytest.raises((ConfigError, EngineError), match=r"worker\.rollout\.name.*transformers"):
            open_engine(engine_name, family_model.folder, family_model.processors)
        return
    prompts = make_prompts(family_model.processors)
    before = policy_of(family_model.folder, temperature=TEMPERATURE)
    engine = open_engine(engine_name, family_model.folder, family_model.processors)
    differences = []
    try:
        for version, policy in enumerate((before, family_model.policy, before)):
            with engine.awake(LocalWeights(policy.named_weights), version=version):
                completions = engine.generate(prompts, SAMPLING)
            differences.append(max_difference(policy, family_model.processors, prompts, completions))
            assert differences[-1] <= 1e-4
    finally:
        engine.close()
    record_property(engine_name, max(differences))
    assert max_difference(family_model.policy, family_model.processors, prompts, completions) > 0.1


def open_engine(name: str, folder: Path, processors: Processors) -> RolloutEngine:
    if name == "transformers":
        return make_transformers_engine(folder, processors)
    return make_vllm_engine(folder, processors, limit_images=2)


@torch.no_grad()
def max_difference(policy: Policy, processors: Processors, prompts: Sequence[Prompt], completions: Any) -> float:
    """Return the largest |log-probability difference| between the engine and the policy."""
    groups = [
        group_of(prompt, [completion.token_ids for completion in row])
        for prompt, row in zip(prompts, completions, strict=True)
    ]
    sampled = [logprob for row in completions for completion in row for logprob in completion.sampling_logprobs]
    return float((concatenated(packed_logprobs(policy, processors, groups)) - torch.tensor(sampled)).abs().max())


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def wide(
    request: pytest.FixtureRequest, tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return the folder of a tiny model with linear attention, with heads of 128.

    On a CPU vLLM computes linear attention in bfloat16 and with heads of 128 only.
    """
    tiny, folder = tiny_model(request.param), tmp_path_factory.mktemp("wide")
    copy_side_files(tiny, folder)
    family, config = family_named(request.param), load_hf_config(tiny)
    for name, value in (("key_head_dim", 128), ("value_head_dim", 128), ("num_key_heads", 1), ("num_value_heads", 2)):
        setattr(config.get_text_config(), f"linear_{name}", value)
    config.save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto_class(family).from_config(config, dtype=torch.float32)
    assert family.tiny.initialize is not None
    family.tiny.initialize(model)
    tensors = {
        name: tensor.detach().contiguous()
        for parameter_name, parameter in model.named_parameters()
        for name, tensor in family.checkpoint_tensors(parameter_name, parameter)
    }
    save_weights(tensors, folder / "model.safetensors")
    return folder


def rounded(policy: Policy, folder: Path) -> Policy:
    """Return a policy with the same weights that computes in bfloat16."""
    copy = policy_of(folder, dtype=torch.bfloat16, temperature=TEMPERATURE)
    copy.load_named_weights(dict(policy.named_weights()))
    return copy


@pytest.mark.vllm
@pytest.mark.long
def test_vllm_samples_with_the_changed_weights_of_linear_attention(wide: Path) -> None:
    """They differ from float32 by no more than twice as much as the trainer in bfloat16 does."""
    processors = load_processors(str(wide))
    prompts = make_prompts(processors)
    before, after = policy_of(wide, temperature=TEMPERATURE), changed_policy(wide)
    engine = make_vllm_engine(wide, processors, limit_images=2, dtype="bf16", weight_check_freq=1)
    try:
        for version, policy in enumerate((before, after, before)):
            with engine.awake(LocalWeights(policy.named_weights), version=version):
                completions = engine.generate(prompts, replace(SAMPLING, max_tokens=8))
            groups = [
                group_of(prompt, [completion.token_ids for completion in row])
                for prompt, row in zip(prompts, completions, strict=True)
            ]
            with torch.no_grad():
                exact, own = (
                    concatenated(packed_logprobs(each, processors, groups)) for each in (policy, rounded(policy, wide))
                )
            assert max_difference(policy, processors, prompts, completions) <= 2 * float((own - exact).abs().max())
    finally:
        engine.close()
    assert max_difference(after, processors, prompts, completions) > 0.1


@pytest.mark.extended(but=["qwen2_5_vl"])
def test_an_export_loads_with_transformers_and_computes_the_same(family_model: FamilyModel, tmp_path: Path) -> None:
    def write(actor: Path) -> None:
        save_tensors(dict(family_model.policy.saved_tensors()), actor / "weights", group=None)
        copy_side_files(family_model.folder, actor / "huggingface")

    CheckpointStore(tmp_path, keep=-1).save(1, write=write, progress={}, score=None)
    folder = export_checkpoint(tmp_path, None, dtype=None)
    groups = make_groups(family_model.processors)
    exported = load_hugging_face(folder, torch.float32)
    with torch.no_grad():
        actual = oracle_logprobs(exported, family_model.processors, groups)
        expected = concatenated(packed_logprobs(family_model.policy, family_model.processors, groups))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    # Later runs, and vLLM, take names and shapes from such a folder.
    published = {name: tensor.shape for name, tensor in stored(family_model.folder)}
    assert {name: tensor.shape for name, tensor in stored(folder)} == published


def stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors.torch import load_file

    yield from load_file(folder / "model.safetensors").items()
