"""With tensor parallelism the first rank of a replica decides, and the other ranks repeat it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.replica import LONG, TRACED_STEP, run_episodes, sample_turns

pytestmark = [pytest.mark.vllm, pytest.mark.extended]

MAX_SECONDS = 120.0
"""A call on two busy cores takes some seconds, and one that hangs half an hour."""

TURN_RULES = {"environment": {}, "tool": {"tool_format": "hermes"}}


def tokens(rows):
    return [[completion.token_ids for completion in row] for row in rows]


def assert_close(rows, expected):
    """Assert that tokens are equal, and log-probabilities up to the rounding of sums."""
    assert tokens(rows) == tokens(expected)
    for row, other in zip(rows, expected, strict=True):
        for completion, same in zip(row, other, strict=True):
            assert completion.sampling_logprobs == pytest.approx(same.sampling_logprobs, abs=1e-4)
            assert replace(completion, sampling_logprobs=(), vision=None) == replace(
                same, sampling_logprobs=(), vision=None
            )


@pytest.fixture(scope="module")
def turns(processes, tiny_model, tmp_path_factory):
    """Return what two ranks have sampled, and where their traces are."""
    traces = tmp_path_factory.mktemp("traces")
    return *processes.run(sample_turns, tiny_model("qwen2_5_vl"), traces, ranks=2), traces


@pytest.mark.long
def test_completions_are_the_bits_of_ranks_that_each_decide_the_same(turns):
    first, second, _ = turns
    assert first["sampled"] == first["each by itself"] == second["each by itself"]
    assert len({each for row in tokens(first["sampled"]) for each in row}) == 3 * 4
    assert second["sampled"] == [[], [], [], []]


@pytest.mark.parametrize("kind", ["stop", "drain"])
def test_an_interrupted_call_ends_on_both_ranks_and_a_later_one_completes_it(turns, kind):
    first, second, _ = turns
    completions = [completion for row in first[kind] for completion in row]
    if kind == "stop":
        assert any(completion.is_unfinished for completion in completions)
        assert all(len(completion.token_ids) < LONG.max_tokens for completion in completions)
    assert second[kind] == [[], [], [], []]
    assert max(first[f"{kind} seconds"], second[f"{kind} seconds"]) < MAX_SECONDS
    assert tokens(first[f"after {kind}"]) == tokens(first["uninterrupted"])


def test_an_error_in_a_listener_ends_the_call_on_both_ranks_and_not_the_engine(turns):
    first, second, _ = turns
    assert "the listener failed at prompt" in first["error"]
    assert "error" not in second
    assert max(each["seconds after an error"] for each in (first, second)) < MAX_SECONDS
    assert first["after an error"] == first["sampled"]


def test_a_request_that_all_ranks_lose_is_repeated_and_counted(turns):
    first, _, _ = turns
    assert tokens(first["after a loss"]) == tokens(first["sampled"])
    assert first["metrics"]["rollout/retried_requests"] == 1


def test_all_ranks_write_traces_of_decode_steps(turns):
    assert {path.name for path in turns[2].iterdir()} == {
        f"step_{TRACED_STEP:06d}.decode.rank_{rank}.json" for rank in range(2)
    }


@pytest.mark.long
def test_two_ranks_sample_what_one_does(turns, processes, tiny_model, tmp_path):
    [alone] = processes.run(sample_turns, tiny_model("qwen2_5_vl"), tmp_path, ranks=1)
    assert_close(turns[0]["greedy"], alone["greedy"])
    assert_close(turns[0]["sampled"], alone["sampled"])


@pytest.mark.long(cases=["tool"])
@pytest.mark.parametrize("rules", TURN_RULES)
def test_episodes_of_two_ranks_are_those_of_one_and_their_environments_exist_once(
    processes, tiny_model, tmp_path, rules
):
    folder = tiny_model("qwen2_5_vl")
    first, second = processes.run(run_episodes, folder, tmp_path, TURN_RULES[rules], ranks=2)
    [alone] = processes.run(run_episodes, folder, tmp_path, TURN_RULES[rules], ranks=1)
    for call in ("greedy", "sampled", "late", "one turn"):
        assert_close(first[call], alone[call])
        assert second[call] == [[], [], [], []]
    assert {len(completion.turns) for row in first["sampled"] for completion in row} <= {1, 2, 3}
    assert max(len(completion.turns) for row in first["sampled"] for completion in row) > 1
    assert first["num_images"] == alone["num_images"] == 4 * (2 + 3 + 2)  # one for each episode
    assert first["running"] == 0
    assert first["metrics"]["rollout/num_turns"] == alone["metrics"]["rollout/num_turns"]
    assert "rollout/num_turns" not in second["metrics"]
