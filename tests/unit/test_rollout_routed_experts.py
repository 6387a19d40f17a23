"""Records of experts: in episodes, in checkpoints, between processes, and from vLLM."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from support.rollout import make_vllm_settings
from trigon.assemble.models import check_policy
from trigon.config.options import with_options
from trigon.config.schema import Config
from trigon.data.packing import pack_rollouts
from trigon.distributed.messages import for_scoring, pack, unpack
from trigon.errors import ConfigError, EngineError
from trigon.models.load import load_processors
from trigon.rollout.episode_state import Episode
from trigon.rollout.saved import completion_state, load_completion
from trigon.rollout.turns import BegunTurn, SampledTurn
from trigon.rollout.vllm.arguments import engine_arguments
from trigon.rollout.vllm.inputs import recorded_experts
from trigon.types import NO_RECORD, Completion, Prompt, Rollout, RolloutGroup, RoutedExperts, Score

PROMPT = Prompt("train:1", (1, 2, 3), None, "", None, {}, ())


def numbered(start: int, end: int) -> Tensor:
    """Return a record whose experts are the numbers of the tokens, with one layer and k = 1."""
    return torch.arange(start, end, dtype=torch.int16)[:, None, None]


def new_episode(sample: int) -> Episode:
    return Episode(number=0, prompt_index=0, sample=sample, prompt=PROMPT, unprocessed=PROMPT, seed=0, greedy=False)


def finish(episode: Episode, turn: SampledTurn) -> Completion:
    episode.add(episode.end_turn(turn, policy_version=0))
    return episode.completion("stop", policy_version=0, end_token_id=0, error="")


def flat(part: Tensor | None) -> list[int] | None:
    return None if part is None else part.flatten().tolist()


@pytest.mark.parametrize(("sample", "first", "of_prompt"), [(0, 0, [0, 1, 2]), (1, 3, None)])
def test_the_first_sample_has_the_record_of_the_prompt(sample, first, of_prompt):
    episode = new_episode(sample)
    assert episode.request(9, ()).num_recorded == first
    completion = finish(episode, SampledTurn((7, 8), (0.0, 0.0), "", "stop", numbered(first, 4)))
    assert completion.routed_experts is not None
    assert flat(completion.routed_experts.prompt) == of_prompt
    assert flat(completion.routed_experts.completion) == [3, NO_RECORD]


def test_the_next_turn_records_from_the_last_token_of_the_turn_before():
    episode = new_episode(0)
    episode.add(episode.end_turn(SampledTurn((7, 8), (0.0, 0.0), "", "stop", numbered(0, 4)), policy_version=0))
    episode.observe(SimpleNamespace(token_ids=[9, 9], text="", media=None), None)
    assert episode.request(9, ()).num_recorded == 4
    completion = finish(episode, SampledTurn((5,), (0.0,), "", "stop", numbered(4, 7)))
    assert completion.routed_experts is not None
    assert flat(completion.routed_experts.completion) == [3, 4, 5, 6, NO_RECORD]


def test_tokens_that_are_left_out_have_no_record():
    episode = new_episode(1)
    turn = episode.end_turn(SampledTurn((7, 8, 9, 9), (0.0,) * 4, "", "stop", numbered(3, 6)), policy_version=0)
    episode.add(replace(turn, token_ids=(7,), logprobs=(0.0,)))
    assert episode.request(9, ()).num_recorded == 4
    episode.observe(SimpleNamespace(token_ids=[6], text="", media=None), None)
    completion = finish(episode, SampledTurn((5,), (0.0,), "", "stop", numbered(4, 5)))
    assert completion.routed_experts is not None
    assert flat(completion.routed_experts.completion) == [3, 4, NO_RECORD]


def test_a_turn_that_was_stopped_is_recorded_by_the_call_that_continues_it():
    episode = new_episode(0)
    episode.stop_turn(BegunTurn((7, 8), (0.0, 0.0)), policy_version=0)
    request = episode.request(9, ())
    assert (request.token_ids, request.num_recorded) == ((1, 2, 3, 7, 8), 0)
    completion = finish(episode, SampledTurn((9,), (0.0,), "", "stop", numbered(0, 5)))
    assert completion.routed_experts is not None
    assert flat(completion.routed_experts.prompt) == [0, 1, 2]
    assert flat(completion.routed_experts.completion) == [3, 4, NO_RECORD]


def some_completion(prompt: Tensor | None = None) -> Completion:
    experts = RoutedExperts(prompt, torch.tensor([[[4, 5]], [[6, 7]], [[-1, -1]]], dtype=torch.int16))
    return Completion((5, 6, 7), (0.0,) * 3, "stop", "", 0, routed_experts=experts)


@pytest.mark.parametrize("of_prompt", [None, torch.tensor([[[300, 2]]], dtype=torch.int16)])
def test_a_checkpoint_and_a_message_keep_the_records(of_prompt):
    completion = some_completion(of_prompt)
    loaded = load_completion(json.loads(json.dumps(completion_state(completion))))
    group = RolloutGroup(PROMPT, (Rollout(completion, Score(0.0, {}, "ok", "")),))
    [sent] = unpack(pack(for_scoring([group])))
    for other in (loaded, sent.rollouts[0].completion):
        assert other.routed_experts is not None
        assert flat(other.routed_experts.prompt) == flat(of_prompt)
        assert flat(other.routed_experts.completion) == [4, 5, 6, 7, -1, -1]
    assert "routed_experts" not in completion_state(replace(completion, routed_experts=None))


def test_a_row_has_the_prompts_record_once_for_its_group():
    first, second = some_completion(torch.zeros(3, 1, 2, dtype=torch.int16)), some_completion()
    other = replace(second, routed_experts=None)
    score = Score(0.0, {}, "ok", "")
    groups = [
        RolloutGroup(PROMPT, tuple(Rollout(each, score) for each in (second, first))),
        RolloutGroup(PROMPT, (Rollout(other, score),)),
    ]
    [row] = pack_rollouts(groups, max_tokens=100, positions=lambda part: torch.arange(len(part.token_ids))[None])
    assert row.packed.routed_experts is not None
    assert row.packed.routed_experts[:, 0, 0].tolist() == [0, 0, 0, 4, 6, -1, 4, 6, -1] + [-1] * 6
    [without] = pack_rollouts(
        groups[1:], max_tokens=100, positions=lambda part: torch.arange(len(part.token_ids))[None]
    )
    assert without.packed.routed_experts is None


def test_what_vllm_returns_is_checked():
    output = SimpleNamespace(routed_experts=np.array([[[250, 1]], [[2, 3]]], dtype=np.uint8))
    experts = recorded_experts(output, "train:1", num_tokens=2, num_experts=256)
    assert experts.tolist() == [[[250, 1]], [[2, 3]]]
    for changed, num_tokens, num_experts in (
        (None, 2, 256),
        (output.routed_experts, 3, 256),
        (output.routed_experts, 2, 200),
    ):
        with pytest.raises(EngineError, match=r"train:1: worker\.actor\.router_replay"):
            recorded_experts(
                SimpleNamespace(routed_experts=changed), "train:1", num_tokens=num_tokens, num_experts=num_experts
            )


def test_vllm_records_experts_on_a_gpu_only(tiny_model):
    folder = tiny_model("qwen3_moe")
    processors = load_processors(str(folder))
    arguments = engine_arguments(
        make_vllm_settings(folder, device="cuda", router_replay="R3", enable_prefix_caching=False), processors
    )
    assert arguments["enable_return_routed_experts"]
    assert arguments["enable_prefix_caching"]
    assert "enable_return_routed_experts" not in engine_arguments(make_vllm_settings(folder), processors)
    with pytest.raises(EngineError, match=r"router_replay.* on the CPU.*worker\.rollout\.name=transformers"):
        engine_arguments(make_vllm_settings(folder, router_replay="R3"), processors)
    with pytest.raises(EngineError, match="model_runner=v1"):
        engine_arguments(make_vllm_settings(folder, device="cuda", router_replay="R3", model_runner="v1"), processors)


def test_linear_attention_needs_split_prompts_for_records(tiny_model):
    folder = tiny_model("qwen3_next")
    processors = load_processors(str(folder))
    with pytest.raises(EngineError, match="enable_chunked_prefill"):
        engine_arguments(
            make_vllm_settings(folder, device="cuda", router_replay="R3", enable_chunked_prefill=False), processors
        )


@pytest.mark.parametrize("option", ["router_replay", "router_aux_loss_coef"])
def test_a_model_without_experts_is_refused(tiny_model, option):
    value = {"router_replay": "R3", "router_aux_loss_coef": 0.01}[option]
    config = with_options(Config(), {f"worker.actor.{option}": value})
    with pytest.raises(ConfigError, match=rf"worker\.actor\.{option} is .*qwen2 model has no experts"):
        check_policy(config, load_processors(str(tiny_model("qwen2"))).hf_config)
    check_policy(config, load_processors(str(tiny_model("qwen3_moe"))).hf_config)
