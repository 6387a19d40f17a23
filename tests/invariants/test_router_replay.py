"""Router replay: the trainer computes with the experts that the rollout engine has recorded.

A padded forward of transformers whose routers are forced to the same experts is the truth. Where
nothing is forced, replaying what the engine chose changes nothing but rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.engines import make_engine, make_rollouts, to_train, with_loss
from support.episodes import Answer, LocalEnvironments, Observed, drawing, make_settings
from support.oracle import (
    concatenated,
    group_of,
    load_hugging_face,
    make_group,
    make_prompt,
    pack_groups,
    packed_logprobs,
    padded_logprobs,
)
from support.rollout import make_transformers_engine
from trigon.data.turns import TurnTemplate
from trigon.metrics import values
from trigon.models.families import family_named
from trigon.models.load import Processors, load_model, load_processors
from trigon.models.policy import Policy
from trigon.models.routing import ExpertRecorder, routers_of
from trigon.types import NO_RECORD, Completion, LocalWeights, RolloutGroup, RoutedExperts, SamplingParams

pytestmark = pytest.mark.extended

MOE = ["qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "qwen3_5_moe", "qwen3_next"]
SAMPLING = SamplingParams(n=4, temperature=0.7, top_p=1.0, top_k=-1, max_tokens=24, ignore_eos=True, seed=5)
TinyModel = Callable[..., Path]


def open_policy(folder: Path, processors: Processors, dtype: torch.dtype = torch.float32) -> Policy:
    model = load_model(str(folder), dtype=dtype, device="cpu")
    return Policy(model, processors.family, temperature=0.7, banned_token_ids=processors.banned_token_ids)


def with_experts(group: RolloutGroup, experts: Sequence[RoutedExperts]) -> RolloutGroup:
    rollouts = tuple(
        replace(rollout, completion=replace(rollout.completion, routed_experts=each))
        for rollout, each in zip(group.rollouts, experts, strict=True)
    )
    return replace(group, rollouts=rollouts)


def random_experts(group: RolloutGroup, config: Any, seed: int) -> list[RoutedExperts]:
    """Return experts as an engine would record them, chosen at random."""
    generator = torch.Generator().manual_seed(seed)

    def choose(num_tokens: int) -> Tensor:
        scores = torch.rand(num_tokens, config.num_hidden_layers, config.num_experts, generator=generator)
        return scores.topk(config.num_experts_per_tok).indices.short()

    experts = []
    for index, rollout in enumerate(group.rollouts):
        own = choose(len(rollout.completion.token_ids))
        own[-1] = NO_RECORD
        experts.append(RoutedExperts(choose(len(group.prompt.token_ids)) if index == 0 else None, own))
    return experts


def forced_logprobs(oracle: Any, processors: Processors, group: RolloutGroup) -> Tensor:
    """Return log-probabilities of transformers' padded forward with the recorded experts."""
    records = [rollout.completion.routed_experts for rollout in group.rollouts]
    assert records[0] is not None
    assert records[0].prompt is not None
    lengths = [len(rollout.completion.token_ids) for rollout in group.rollouts]
    rows = [torch.cat([records[0].prompt, each.completion]) for each in records if each is not None]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=NO_RECORD).long()
    assert padded.shape[1] == len(group.prompt.token_ids) + max(lengths)

    def force(number: int, router: Any, inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits, _, own = outputs
        recorded = padded[:, :, number].flatten(0, 1)
        experts = torch.where(recorded == NO_RECORD, own, recorded)
        weights = logits.softmax(-1).gather(1, experts)
        if getattr(router, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, experts

    routers = routers_of(oracle, family_named(oracle.config.model_type))
    hooks = [router.register_forward_hook(partial(force, number)) for number, router in routers.items()]
    logprobs, _ = padded_logprobs(
        oracle,
        group.prompt,
        [rollout.completion.token_ids for rollout in group.rollouts],
        temperature=0.7,
        banned_token_ids=processors.banned_token_ids,
    )
    for hook in hooks:
        hook.remove()
    return logprobs


@pytest.mark.parametrize("model_type", MOE)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_packed_rows_use_the_recorded_experts_as_a_padded_forward_would(
    tiny_model: TinyModel, model_type: str, checkpointing: bool
) -> None:
    folder = tiny_model(model_type)
    processors = load_processors(str(folder))
    policy, oracle = open_policy(folder, processors), load_hugging_face(folder, torch.float32)
    config = oracle.config.get_text_config()
    images = [(8, 6)] if processors.family.has_vision else []
    groups = [
        make_group(make_prompt(processors, images, seed=1), [5, 9, 1], seed=2),
        make_group(make_prompt(processors, [], seed=3), [4, 7], seed=4),
    ]
    groups = [with_experts(group, random_experts(group, config, seed)) for seed, group in enumerate(groups)]
    weights = torch.randn(26, generator=torch.Generator().manual_seed(0))
    expected = torch.cat([forced_logprobs(oracle, processors, group) for group in groups])
    (weights @ expected).backward()

    if checkpointing:
        policy.enable_gradient_checkpointing()
    with torch.no_grad():
        own = concatenated(packed_logprobs(policy, processors, groups))
    policy.replays_routing = True
    for max_tokens in (1_000_000, 30):  # groups are split over rows, which repeat their prompts
        policy.zero_grad()
        logprobs = concatenated(packed_logprobs(policy, processors, groups, max_tokens=max_tokens))
        (weights @ logprobs).backward()
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
        gradients = {name: part.grad for name, part in policy.model.named_parameters()}
        for name, part in oracle.named_parameters():
            if part.grad is not None:
                gradient = gradients[name]
                assert gradient is not None
                assert (gradient - part.grad).norm() <= 1e-5 * part.grad.norm() + 1e-7, name
    assert float((own - expected.detach()).abs().max()) > 0.01  # other experts give other log-probabilities
    with torch.no_grad(), policy.own_routing():
        torch.testing.assert_close(concatenated(packed_logprobs(policy, processors, groups)), own)


def sample(
    folder: Path, processors: Processors, prompts: Sequence[Any], *, dtype: torch.dtype = torch.float32
) -> list[RolloutGroup]:
    engine = make_transformers_engine(folder, processors, dtype=dtype, records_experts=True)
    policy = open_policy(folder, processors, dtype)
    try:
        with engine.awake(LocalWeights(policy.named_weights), version=0):
            rows = engine.generate(prompts, SAMPLING)
    finally:
        engine.close()
    return [
        replace(
            made := group_of(prompt, [completion.token_ids for completion in row]),
            rollouts=tuple(
                replace(rollout, completion=completion) for rollout, completion in zip(made.rollouts, row, strict=True)
            ),
        )
        for prompt, row in zip(prompts, rows, strict=True)
    ]


@pytest.mark.parametrize("model_type", MOE)
def test_without_rounding_the_engine_records_what_the_trainer_would_choose(
    tiny_model: TinyModel, model_type: str
) -> None:
    folder = tiny_model(model_type)
    processors = load_processors(str(folder))
    images = [[(8, 6)], []] if processors.family.has_vision else [[], []]
    groups = sample(
        folder, processors, [make_prompt(processors, grids, seed=seed) for seed, grids in enumerate(images)]
    )
    for group in groups:
        first, *others = [rollout.completion.routed_experts for rollout in group.rollouts]
        assert first is not None
        assert first.prompt is not None
        assert len(first.prompt) == len(group.prompt.token_ids)
        assert all(each is not None and each.prompt is None and len(each.completion) == 24 for each in others)
    [row] = pack_groups(processors, groups)
    assert row.packed.routed_experts is not None
    is_missing = (row.packed.routed_experts == NO_RECORD).all(-1).all(-1)
    ends = [end - 1 for span in row.packed.spans for _, end in span.completions]
    assert is_missing.nonzero().flatten().tolist() == ends

    policy = open_policy(folder, processors)
    with torch.no_grad():
        own = concatenated(packed_logprobs(policy, processors, groups))
        policy.replays_routing = True
        replayed = concatenated(packed_logprobs(policy, processors, groups))
    sampled = torch.tensor(
        [value for group in groups for each in group.rollouts for value in each.completion.sampling_logprobs]
    )
    torch.testing.assert_close(replayed, own, atol=1e-5, rtol=0)
    torch.testing.assert_close(replayed, sampled, atol=1e-4, rtol=0)


def test_in_bfloat16_replay_removes_the_mismatch_of_experts(tiny_model: TinyModel) -> None:
    folder = tiny_model("qwen3_moe")
    processors = load_processors(str(folder))
    prompts = [make_prompt(processors, [], seed=seed, words_before=30) for seed in range(12)]
    groups = sample(folder, processors, prompts, dtype=torch.bfloat16)
    sampled = torch.tensor(
        [value for group in groups for each in group.rollouts for value in each.completion.sampling_logprobs]
    )
    policy = open_policy(folder, processors, torch.bfloat16)
    with torch.no_grad():
        own = (concatenated(packed_logprobs(policy, processors, groups)) - sampled).abs()
        policy.replays_routing = True
        replayed = (concatenated(packed_logprobs(policy, processors, groups)) - sampled).abs()
    print(f"without: mean {own.mean():.5f}, max {own.max():.4f}; with: {replayed.mean():.5f}, {replayed.max():.4f}")
    assert replayed.mean() < own.mean()
    assert replayed.max() < own.max()


def answer(row: Any, actions: Sequence[str]) -> Answer:
    images = (drawing(31 + len(actions), 112, 112),) if row["sees"] else ()
    return Answer(0, Observed(f"Turn {len(actions)} of 3.", images), 0.25, len(actions) == 3)


@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_episodes_record_the_experts_of_prompt_observations_and_turns(tiny_model: TinyModel, model_type: str) -> None:
    folder = tiny_model(model_type)
    processors = replace(load_processors(str(folder)), stop_token_ids=tuple(range(0, 1000, 10)))
    template = TurnTemplate(processors, max_image_pixels=1_000_000)
    settings = make_settings(LocalEnvironments(answer), processors, template=template, max_turns=4)
    engine = make_transformers_engine(folder, processors, max_model_len=1024, records_experts=True, episodes=settings)
    policy = open_policy(folder, processors)
    prompt = replace(make_prompt(processors, [], seed=1), row={"sees": True})
    try:
        with engine.awake(LocalWeights(policy.named_weights), version=0):
            [row] = engine.generate([prompt], replace(SAMPLING, n=2, max_tokens=500, ignore_eos=False))
    finally:
        engine.close()
    assert max(len(completion.turns) for completion in row) > 1
    for index, completion in enumerate(row):
        assert_recorded(completion, index, len(prompt.token_ids))


def assert_recorded(completion: Completion, index: int, prompt_length: int) -> None:
    experts = completion.routed_experts
    assert experts is not None
    assert (experts.prompt is None) == (index > 0)
    if experts.prompt is not None:
        assert len(experts.prompt) == prompt_length
        assert bool((experts.prompt != NO_RECORD).all())
    assert len(experts.completion) == len(completion.token_ids)
    is_missing = (experts.completion == NO_RECORD).all(-1).all(-1)
    assert is_missing.nonzero().flatten().tolist() == [len(completion.token_ids) - 1]


def test_a_recorder_reads_what_the_routers_chose(tiny_model: TinyModel) -> None:
    folder = tiny_model("qwen3_moe")
    oracle = load_hugging_face(folder, torch.float32)
    recorder = ExpertRecorder(oracle, family_named("qwen3_moe"))
    with torch.no_grad():
        output = oracle(input_ids=torch.tensor([[5, 6, 7]]), output_router_logits=True)
    experts = recorder.take()
    assert experts.shape == (3, 2, 2)
    assert experts.dtype == torch.int16
    assert bool((experts[:, 0] == 0).all())  # a dense layer
    [logits] = output.router_logits
    assert experts[:, 1].tolist() == logits.topk(2).indices.tolist()


def test_an_update_reports_the_fraction_of_the_tokens_whose_experts_are_recorded(tiny_model: TinyModel) -> None:
    folder = tiny_model("qwen3_moe")
    engine = make_engine(folder, config=with_loss(router_replay="R3"))
    config = load_processors(str(folder)).hf_config
    group = make_rollouts(folder)[0]
    prompt, lengths = len(group.prompt.token_ids), [len(each.completion.token_ids) for each in group.rollouts]
    recorded = with_experts(group, random_experts(group, config, seed=0))
    metrics = values(engine.step(to_train([recorded])))
    # All tokens of the prompt, and all of each completion but its last.
    expected = (prompt + sum(lengths) - len(lengths)) / (prompt + sum(lengths))
    assert metrics["actor/router_replay_fraction"] == pytest.approx(expected)
