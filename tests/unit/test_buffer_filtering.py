"""Collecting a batch: online filtering, surplus groups, greedy baselines."""

from __future__ import annotations

import io
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest

from support.fake_runs import (
    FILTER,
    SAMPLING,
    SplitEngine,
    engine_of,
    latest_checkpoint,
    learned_rewards,
    lines_of,
    mixed_by_prompt,
    open_run,
    plan_of,
    prompts_of,
    record_of,
    rollouts_of,
    rows_by_step,
    surplus_settings,
    train_in,
)
from trigon.config.schema import AlgorithmConfig
from trigon.data.stream import PromptStream, mix
from trigon.data.tokens import TokenTexts
from trigon.errors import DataError, EngineError, RewardError
from trigon.loop import train
from trigon.report.console import Console
from trigon.report.reporter import Reporter
from trigon.report.run_folder import RunFolder
from trigon.rewards.load import find_reward
from trigon.rewards.pool import RewardPool
from trigon.rollout.episode_state import sample_seed


def test_filtered_groups_are_replaced_by_others_and_recorded(parts, tmp_path):
    run = train_in(tmp_path, parts, **FILTER, complete=mixed_by_prompt)
    events = record_of(run).events
    assert {event for event in events if event.startswith("learn")} == {"learn from 4"}
    assert all(len(set(rewards)) == 2 for rewards in learned_rewards(tmp_path))
    recorded = []
    for step, line in lines_of(tmp_path).items():
        names = [f"{prefix}_{step:06d}.jsonl" for prefix in ("step", "filtered")]
        rows = [row for name in names for row in rollouts_of(tmp_path).get(name, [])]
        assert line["filter/rounds"] == events.count(f"sample 4 for {step}")
        assert len(rows) == line["filter/rounds"] * 4 * SAMPLING.n  # everything that was sampled
        kinds = [row["filtered"] for row in rows]
        assert sum(line[f"filter/{kind}_fraction"] for kind in ("kept", "low", "high")) == pytest.approx(1.0)
        for kind in ("low", "high"):
            assert kinds.count(kind) / len(kinds) == pytest.approx(line[f"filter/{kind}_fraction"])
        assert kinds.count("surplus") == line["filter/dropped_groups"] * SAMPLING.n
        # group/ metrics describe everything that was sampled, filtered out or not.
        assert line["group/all_wrong_fraction"] == pytest.approx(line["filter/low_fraction"])
        recorded += rows
    assert {row["filtered"] for row in recorded} >= {"", "low", "high", "surplus"}
    assert all(row["row"]["answer"] == row["ground_truth"] for row in recorded)


@pytest.mark.parametrize(("complete", "num_warnings"), [(lambda p, v, s: "no", 1), (mixed_by_prompt, 0)])
@pytest.mark.parametrize("group_filter", [{}, FILTER | {"max_try_make_batch": 2, "filter_low": -1.0}])
def test_equal_rewards_in_the_first_step_are_warned_of_once(parts, tmp_path, complete, num_warnings, group_filter):
    stream = io.StringIO()
    with (
        RunFolder(tmp_path / "report") as folder,
        Reporter(
            folder,
            Console(stream=stream, progress=False),
            token_texts=TokenTexts(parts.processors.tokenizer),
        ) as report,
        open_run(parts, tmp_path, complete=complete, **group_filter, report=report) as run,
    ):
        train(run, None)
    printed = stream.getvalue()
    assert printed.count("ALL REWARDS ARE EQUAL") == num_warnings
    if num_warnings:
        assert "each of the 12 completions of the first step got 0.5" in printed
        assert "(a str) and the completion 'no'" in printed


def test_a_round_without_groups_counts_towards_max_rounds(parts, tmp_path):
    with (
        pytest.raises(DataError, match=r"0 of 4 groups in 3 rounds.*100% of those sampled were at or below"),
    ):
        train_in(tmp_path, parts, **(FILTER | {"max_try_make_batch": 3}), complete=lambda p, v, s: "no")
    [(name, rows)] = rollouts_of(tmp_path).items()
    assert (name, len(rows), {row["filtered"] for row in rows}) == ("filtered_000001.jsonl", 12 * SAMPLING.n, {"low"})


def test_a_step_with_too_few_groups_learns_from_those_it_has(parts, tmp_path):
    group_filter = FILTER | {"max_try_make_batch": 1}
    run = train_in(tmp_path, parts, plan=plan_of(steps=2), **group_filter, complete=mixed_by_prompt)
    learned = [len(groups) for groups in record_of(run).learned]
    assert 0 < min(learned) < 4
    assert [line["filter/groups"] for line in lines_of(tmp_path).values()] == learned


def test_groups_that_pass_are_counted_once_where_a_batch_ahead_had_too_few(parts, tmp_path):
    rollout = engine_of(parts, SplitEngine, mixed_by_prompt)
    settings = FILTER | {"max_try_make_batch": 1, "max_staleness": 1, "hybrid_engine": False, "rollout": rollout}
    train_in(tmp_path, parts, plan=plan_of(steps=3), **settings)
    lines = lines_of(tmp_path)
    assert max(line["filter/rounds"] for line in lines.values()) > 1, "no batch ahead had too few"
    for step, rows in rows_by_step(tmp_path).items():
        num_passed = len(rows) / SAMPLING.n + lines[step]["filter/dropped_groups"]
        assert lines[step]["filter/groups"] == num_passed


@pytest.mark.parametrize("num_failing", [3, 4])
def test_a_round_of_few_prompts_may_fail_but_not_as_many_as_a_step_learns_from(parts, tmp_path, num_failing):
    with open_run(parts, tmp_path / "other") as run:
        failing = {prompt.ground_truth for prompt in prompts_of(run).take(1 + num_failing)[1:]}

    def complete(prompt, version, seed):
        return None if prompt.ground_truth in failing else "no"

    one_at_a_time = FILTER | {"filter_low": -1.0, "mini_rollout_batch_size": 1, "max_try_make_batch": 0}
    settings = one_at_a_time | {"plan": plan_of(steps=1), "complete": complete}
    if num_failing == 4:
        with pytest.raises(EngineError, match="any of 4 prompts"):
            train_in(tmp_path, parts, **settings)
        return
    train_in(tmp_path, parts, **settings)
    assert len(rows_by_step(tmp_path)[1]) == 4 * SAMPLING.n
    assert lines_of(tmp_path)[1]["rollout/num_skipped"] == 3


def test_an_unknown_filter_key_is_named_with_the_nearest(parts, tmp_path):
    with pytest.raises(RewardError, match=r"filter_key=acuracy.*only accuracy, overall; did you mean accuracy"):
        train_in(tmp_path, parts, **(FILTER | {"filter_key": "acuracy"}))


def test_a_step_that_crosses_an_epoch_samples_its_prompts_again_under_new_ids(parts, tmp_path):
    # About half of the 10 prompts pass the filter, so a step of 8 draws some of them twice.
    train_in(tmp_path, parts, plan=plan_of(steps=1, per_step=8, per_update=8), **FILTER, complete=mixed_by_prompt)
    names = [row["prompt_id"] for row in rollouts_of(tmp_path)["step_000001.jsonl"][::3]]
    assert len(set(names)) == len(names) == 8
    assert any("#2" in name for name in names)


def test_filter_bounds_equal_the_numbers_that_a_reward_function_returns(parts, tmp_path):
    # 0.1 cannot be represented in float32.
    (tmp_path / "tenth.py").write_text("def main(answer: dict):\n    return {'overall': 0.1}\n")
    terms = find_reward(f"{tmp_path / 'tenth.py'}:main", {})
    group_filter = FILTER | {"filter_key": "overall", "filter_low": 0.1, "max_try_make_batch": 1}
    with (
        closing(RewardPool(terms, num_workers=1, timeout_seconds=10, max_failed_fraction=0.5)) as rewards,
        pytest.raises(DataError, match="100% of those sampled were at or below"),
    ):
        train_in(tmp_path / "run", parts, **group_filter, rewards=rewards)


@pytest.mark.faults
@pytest.mark.parametrize("change", ["other n", "unfiltered", "other data"])
def test_a_saved_surplus_is_dropped_if_the_resumed_run_cannot_use_it(parts, tmp_path, change):
    train_in(tmp_path, parts, stop_after=1, **surplus_settings(6))
    assert latest_checkpoint(tmp_path).progress["buffer"]["ready"] != []
    settings = surplus_settings(2)
    with ExitStack() as stack:
        if change == "other n":
            settings |= {"sampling": replace(SAMPLING, n=2), "plan": plan_of(steps=2, per_update=2)}
        elif change == "unfiltered":
            settings |= {"online_filtering": False}
        else:
            options = {"batch_size": 4, "seed": 3, "shuffle": True, "prefetch": False, "num_workers": 1}
            stream = PromptStream(mix(parts.prompts.parts, [2]), **options)
            settings |= {"prompts": stack.enter_context(closing(stream))}
        run = train_in(tmp_path, parts, resumes=True, **settings)
    assert {row["policy_version"] for row in rows_by_step(tmp_path)[2]} == {1}
    sizes = {len(group.sequences) for groups in record_of(run).learned for group in groups}
    assert sizes == {2 if change == "other n" else SAMPLING.n}


def test_a_surplus_is_used_in_the_next_step_also_after_an_interruption(parts, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train_in(whole, parts, **surplus_settings(6))
    ages = [step - 1 - row["policy_version"] for step, rows in rows_by_step(whole).items() for row in rows]
    assert set(ages) == {0, 1}, "no group was kept, so the test shows nothing"
    train_in(cut, parts, stop_after=4, **surplus_settings(6))
    assert latest_checkpoint(cut).progress["buffer"]["ready"] != []
    train_in(cut, parts, resumes=True, **surplus_settings(6))
    assert rollouts_of(cut) == rollouts_of(whole)
    assert lines_of(cut) == lines_of(whole)


def test_a_step_that_has_all_its_groups_from_the_one_before_reports_their_rewards(parts, tmp_path):
    kept = FILTER | {"filter_low": -1.0, "filter_high": 2.0, "mini_rollout_batch_size": 8, "filter_surplus": "keep"}
    run = train_in(tmp_path, parts, plan=plan_of(steps=2), **kept)
    assert not [event for event in record_of(run).events if event.endswith("for 2")]  # nothing is drawn
    for step, rows in rows_by_step(tmp_path).items():
        line = lines_of(tmp_path)[step]
        assert line["rollout/num_skipped"] == 0
        if step == 2:
            rewards = [row["reward"] for row in rows]
            assert line["reward/overall"] == pytest.approx(sum(rewards) / len(rewards))


REMAX = AlgorithmConfig(disable_kl=True, adv_estimator="remax")


def test_remax_compares_with_a_greedy_completion(parts, tmp_path):
    run = train_in(tmp_path, parts, plan=plan_of(steps=1), algorithm=REMAX, complete=mixed_by_prompt)
    assert record_of(run).events[:3] == ["awake 0", "sample 4 for 1", "asleep"]
    [groups] = record_of(run).learned
    # The fake engine's greedy completion uses the seed of its one sample; every reward is 0.5 or
    # 1.5.
    for group, rewards in zip(groups, learned_rewards(tmp_path), strict=True):
        firsts = [float(sequence.advantages[0]) for sequence in group.sequences]
        baselines = {reward - first for reward, first in zip(rewards, firsts, strict=True)}
        assert len(baselines) == 1
        assert baselines <= {0.5, 1.5}


def test_a_completion_without_a_baseline_does_not_train(parts, tmp_path):
    drawn = []

    def complete(prompt, version, seed):
        """Let the greedy completion of the second prompt crash the reward function."""
        if prompt.prompt_id not in drawn:
            drawn.append(prompt.prompt_id)
        is_greedy = seed == sample_seed(SAMPLING.seed, draw=1, prompt_id=prompt.prompt_id, sample=SAMPLING.n)
        return "crash" if is_greedy and drawn.index(prompt.prompt_id) == 1 else mixed_by_prompt(prompt, version, seed)

    [groups] = record_of(train_in(tmp_path, parts, plan=plan_of(steps=1), algorithm=REMAX, complete=complete)).learned
    trains = [{float(sequence.loss_mask[0]) for sequence in group.sequences} for group in groups]
    assert trains == [{1.0}, {0.0}, {1.0}, {1.0}]
    assert lines_of(tmp_path)[1]["reward_function/num_missing_baselines"] == 1.0
