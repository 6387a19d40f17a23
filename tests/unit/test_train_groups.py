"""From scored groups to what an update learns from: log-probabilities, KL in the reward,
advantages, masks.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from support.fake_runs import (
    ConstantReference,
    full_settings,
    lines_of,
    open_run,
    plan_of,
    record_of,
    rollouts_of,
    sometimes_crashing,
)
from support.oracle import group_of
from trigon.config.schema import AlgorithmConfig
from trigon.errors import RewardError
from trigon.loop import train
from trigon.metrics import values
from trigon.training.fake import FakeTrainEngine
from trigon.training.train_groups import GroupPreparation
from trigon.types import Prompt


def test_old_and_reference_logprobs_come_before_the_first_update(parts, tmp_path):
    with open_run(
        parts,
        tmp_path,
        plan=plan_of(steps=1),
        needs_old_logprobs=True,
        reference=ConstantReference(-1.5),
        should_stop=lambda: True,
    ) as run:
        train(run, None)
        assert run.report.phases[4:] == ["parity", "old", "ref", "update_actor", "save_checkpoint"]
        [[group, *_]] = record_of(run).learned
    for sequence in group.sequences:
        assert sequence.old_logprobs.tolist() == [-1.0] * len(sequence.token_ids)
        assert sequence.ref_logprobs.tolist() == [-1.5] * len(sequence.token_ids)
        assert sequence.sampling_logprobs.tolist() == [-1.0] * len(sequence.token_ids)


def test_each_completion_trains_with_the_advantage_of_its_own_reward(parts, tmp_path):
    with open_run(
        parts, tmp_path, plan=plan_of(steps=1), complete=lambda p, v, s: p.ground_truth if s % 2 else "no"
    ) as run:
        train(run, None)
        [groups] = record_of(run).learned
    rows = iter(rollouts_of(tmp_path)["step_000001.jsonl"])
    mixed = 0
    for group in groups:
        rewards = [next(rows)["reward"] for _ in group.sequences]
        for reward, sequence in zip(rewards, group.sequences, strict=True):
            advantages = set(sequence.advantages.tolist())
            assert len(advantages) == 1
            [advantage] = advantages
            if len(set(rewards)) == 1:
                assert advantage == 0.0
            else:
                mixed += 1
                assert (advantage > 0) == (reward == 1.5)
            assert sequence.loss_mask.tolist() == [1.0] * len(sequence.token_ids)
            assert sequence.old_logprobs is sequence.ref_logprobs is None  # which nothing here needs
    assert mixed > 0, "no group had both right and wrong completions, so the test shows nothing"


def test_a_completion_that_was_not_scored_neither_trains_nor_counts(parts, tmp_path):
    with open_run(parts, tmp_path, plan=plan_of(steps=1), complete=sometimes_crashing) as run:
        train(run, None)
        [groups] = record_of(run).learned
    rows = rollouts_of(tmp_path)["step_000001.jsonl"]
    failed = [row["outcome"] == "failed" for row in rows]
    assert 0 < sum(failed) < 6, "the seeds must give some failures, and not too many"
    sequences = [sequence for group in groups for sequence in group.sequences]
    for is_failed, sequence in zip(failed, sequences, strict=True):
        assert sequence.loss_mask.tolist() == [0.0 if is_failed else 1.0] * len(sequence.token_ids)
        assert not is_failed or sequence.advantages.tolist() == [0.0] * len(sequence.token_ids)

    rewards = [row["reward"] for row in rows if row["outcome"] == "ok"]
    [line] = lines_of(tmp_path).values()
    assert line["reward_function/num_failed"] == sum(failed)
    assert line["critic/score/mean"] == line["reward/overall"] == pytest.approx(sum(rewards) / len(rewards))
    assert line["critic/score/min"] == line["critic/rewards/min"] == min(rewards) == 0.5
    assert line["critic/rewards/mean"] == pytest.approx(line["critic/score/mean"])
    assert line["reward/accuracy"] == pytest.approx(sum(r == 1.5 for r in rewards) / len(rewards))


def test_a_kl_in_the_reward_is_subtracted_before_advantages(parts, tmp_path):
    changes = full_settings(1) | {
        "algorithm": AlgorithmConfig(kl_coef=0.1),
        **{"val_before_train": False, "val_freq": -1, "save_freq": -1},
    }
    with open_run(parts, tmp_path, **changes) as run:
        train(run, None)
        assert run.preparation.state()["kl_coefficient"] == 0.1
    rows = rollouts_of(tmp_path)["step_000001.jsonl"]
    [line] = lines_of(tmp_path).values()
    assert line["actor/kl_penalty"] == pytest.approx(0.5)  # -1.0 - (-1.5), of every token
    assert line["actor/kl_coef"] == pytest.approx(0.1)
    penalized = [row["reward"] - 0.1 * 0.5 * row["num_tokens"] for row in rows]
    assert line["critic/rewards/mean"] == pytest.approx(sum(penalized) / 12)
    assert line["critic/rewards/max"] == pytest.approx(max(penalized))
    assert line["critic/score/mean"] == pytest.approx(sum(row["reward"] for row in rows) / 12)


class ShortReference:
    """A reference from which completions of one token have a KL of 1 (k1), and others of 0.5."""

    def logprobs(self, groups):
        lengths = [[len(rollout.completion.token_ids) for rollout in group.rollouts] for group in groups]
        return [[torch.full((length,), -2.0 if length == 1 else -1.5) for length in row] for row in lengths]


@contextmanager
def untimed(name, *, total=None):
    yield lambda count: None


def test_the_kl_of_a_step_is_the_mean_over_its_completions_whatever_their_length():
    prompt = Prompt("test:0", (5, 6), None, "", None, {}, ())
    preparation = GroupPreparation(
        AlgorithmConfig(kl_coef=0.1, kl_type="adaptive", kl_target=0.4, kl_horizon=10),
        FakeTrainEngine(),
        reference=ShortReference(),
        critic=None,
        needs_old_logprobs=True,
        phase=untimed,
    )
    _, metrics = preparation.prepare([group_of(prompt, [(7,), (8,) * 99])])
    assert values(metrics)["actor/kl_penalty"] == 0.75  # over all tokens it would be 0.505
    # 0.75 is above the target
    assert preparation.state()["kl_coefficient"] == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))


def test_cut_completions_do_not_train_but_count_in_their_group(parts, tmp_path):
    with open_run(
        parts,
        tmp_path,
        plan=plan_of(steps=1),
        algorithm=AlgorithmConfig(disable_kl=True, overlong_filtering=True),
        complete=lambda p, v, s: "no idea at all and a few more words" if s % 2 else p.ground_truth,
    ) as run:
        train(run, None)
        [groups] = record_of(run).learned
    rows = rollouts_of(tmp_path)["step_000001.jsonl"]
    sequences = [sequence for group in groups for sequence in group.sequences]
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    for row, sequence in zip(rows, sequences, strict=True):
        assert set(sequence.loss_mask.tolist()) == {float(row["finish_reason"] == "stop")}
    mixed = [group for group in groups if len({float(s.advantages[0]) for s in group.sequences}) > 1]
    assert mixed, "the cut completions' rewards count, so some groups have different rewards"


def test_steps_whose_completions_are_all_cut_learn_nothing_and_the_run_continues(parts, tmp_path):
    """As with data.max_response_length=2 and overlong filtering."""
    with open_run(
        parts,
        tmp_path,
        plan=plan_of(steps=2),
        algorithm=AlgorithmConfig(disable_kl=True, overlong_filtering=True),
        complete=lambda p, v, s: f"no idea at all and a few more words {s}",
    ) as run:
        train(run, None)
        steps = record_of(run).learned
    sequences = [sequence for groups in steps for group in groups for sequence in group.sequences]
    assert (len(steps), {float(each.loss_mask.max()) for each in sequences}) == (2, {0.0})
    assert all(bool(torch.isfinite(each.advantages).all()) for each in sequences)
    for step in (1, 2):
        metrics = lines_of(tmp_path)[step]
        assert metrics["response_length/clip_ratio"] == 1.0
        assert None not in metrics.values(), "no metric is undefined"


def test_gdpo_refuses_a_reward_without_its_parts(parts, tmp_path):
    algorithm = AlgorithmConfig(disable_kl=True, adv_estimator="gdpo", reward_weights={"beauty": 1.0})
    with (
        open_run(parts, tmp_path, algorithm=algorithm) as run,
        pytest.raises(RewardError, match=r"lack beauty \(found: acc"),
    ):
        train(run, None)


def test_the_full_kl_comes_from_the_trainer(parts, tmp_path):
    algorithm = AlgorithmConfig(kl_penalty="full", kl_coef=0.1)
    with open_run(parts, tmp_path, plan=plan_of(steps=1), algorithm=algorithm) as run:
        train(run, None)
        assert run.report.phases[4:] == ["parity", "ref", "update_actor", "save_checkpoint"]
    assert lines_of(tmp_path)[1]["actor/kl_penalty"] == 0.0  # the fake train engine returns 0
