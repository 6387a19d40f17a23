"""Oversampling: steps that stop early, and the completions that they leave to the next one."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace

import pytest

from support.fake_runs import (
    SAMPLING,
    SplitEngine,
    check_ages,
    engine_of,
    full_settings,
    latest_checkpoint,
    lines_of,
    open_run,
    plan_of,
    prompts_of,
    record_of,
    rollouts_of,
    rows_by_step,
    train_in,
)
from trigon.errors import EngineError
from trigon.loop import train
from trigon.metrics import values
from trigon.rollout.episodes import newest_draw
from trigon.rollout.fake import FakeEngine
from trigon.rollout.parity import ended_in_step
from trigon.rollout.protocol import Work
from trigon.rollout.statistics import describe_carried, describe_staleness
from trigon.types import Completion, Prompt, Rollout, RolloutGroup, Score


def prompt(number):
    return Prompt(f"train:{number}", (1, 2, 3), None, "?", str(number), {}, ())


def test_ages_are_weighted_by_tokens():
    def group(*runs):
        count = sum(tokens for _, tokens in runs)
        completion = Completion((1,) * count, (0.0,) * count, "stop", "", runs[-1][0], policy_versions=runs)
        return RolloutGroup(prompt(0), (Rollout(completion, Score(0.0, {}, "ok", "")),))

    # Step 6 samples with version 5: ages 5, 3, 0 and 1 of 1, 2, 3 and 4 tokens.
    metrics = values(describe_staleness([group((0, 1), (2, 2), (5, 3)), group((4, 4))], version=5))
    assert metrics == {
        "staleness/mean": pytest.approx((5 * 1 + 3 * 2 + 1 * 4) / 10),
        "staleness/max": 5.0,
        "staleness/fraction_age_0": pytest.approx(0.3),
        "staleness/fraction_age_1": pytest.approx(0.4),
        "staleness/fraction_age_2": 0.0,
        "staleness/fraction_age_3_or_more": pytest.approx(0.3),
    }
    unfinished = Completion((1, 2), (0.0, 0.0), "unfinished", "", 3)
    carried = [Work(prompt(0), (unfinished, unfinished), 1), Work(prompt(1), (), 2)]
    assert values(describe_carried(carried)) == {
        "rollout/carried_groups": 2.0,
        "rollout/carried_tokens": 4.0,
    }


def test_completions_that_an_earlier_step_ended_are_not_of_this_one():
    """Nor with the same version, as while only a critic learns."""
    ended = Completion((5,), (-0.125,), "stop", "five", 0)
    unfinished = replace(ended, finish_reason="unfinished")
    longer = replace(ended, token_ids=(5, 6), sampling_logprobs=(-1.0, -1.0))

    def group(number, *completions):
        return RolloutGroup(prompt(number), tuple(Rollout(each, Score(0.0, {}, "ok", "")) for each in completions))

    carried = [Work(prompt(1), (ended, unfinished), 1), Work(prompt(2), (), 1)]
    groups = [group(1, ended, longer), group(2, ended, ended), group(3, ended, ended)]
    assert [[each.completion for each in found.rollouts] for found in ended_in_step(groups, carried)] == [
        [longer],
        [ended, ended],
        [ended, ended],
    ]


# -- runs --

SETTINGS = {"oversampling": 0.5, "max_carried_steps": 2}


def long_tailed(so_far, version, seed):
    """Complete some prompts in a few tokens, and others in many more than a step waits for."""
    if int(so_far.ground_truth) % 3 == 0:
        return "no idea " * 12
    return so_far.ground_truth if seed % 2 else "no idea"


def oversampling_settings(steps, **settings):
    changes = full_settings(steps) | {"complete": long_tailed, "tokens_per_step": 3}
    return changes | SETTINGS | settings | {"sampling": replace(SAMPLING, max_tokens=40)}


@pytest.fixture(scope="module")
def uninterrupted(parts, tmp_path_factory):
    """Return the folder of a run of eight steps, and what happened in it."""
    folder = tmp_path_factory.mktemp("oversampling")
    return folder, record_of(train_in(folder, parts, **oversampling_settings(8))).events


def test_a_step_learns_from_as_many_groups_as_without_and_every_completion_has_ended(uninterrupted):
    folder, events = uninterrupted
    assert {event for event in events if event.startswith("learn")} == {"learn from 2"}  # two updates a step
    assert next(event for event in events if "until" in event) == "sample 6 for 1 until 4"
    assert all(len(rows) == 4 * SAMPLING.n for rows in rows_by_step(folder).values())
    check_ages(folder, SETTINGS["max_carried_steps"])
    lines = [line for step, line in lines_of(folder).items() if step]
    assert max(line["staleness/max"] for line in lines) == SETTINGS["max_carried_steps"]
    assert sum(line["rollout/carried_tokens"] for line in lines) > 0
    several = [row for rows in rows_by_step(folder).values() for row in rows if row["policy_versions"]]
    assert several
    assert all(row["policy_version"] == row["policy_versions"][-1][0] for row in several)


def test_a_resumed_run_continues_with_the_tokens_of_the_saved_one(parts, tmp_path, uninterrupted):
    train_in(tmp_path, parts, stop_after=3, **oversampling_settings(8))
    assert latest_checkpoint(tmp_path).progress["buffer"]["work"]
    train_in(tmp_path, parts, resumes=True, **oversampling_settings(8))
    assert lines_of(tmp_path) == lines_of(uninterrupted[0])
    assert rollouts_of(tmp_path) == rollouts_of(uninterrupted[0])


def test_a_run_without_oversampling_samples_again_what_was_carried(parts, tmp_path):
    train_in(tmp_path, parts, stop_after=2, **oversampling_settings(8))
    carried = [each["prompt_id"] for each in latest_checkpoint(tmp_path).progress["buffer"]["work"]]
    settings = full_settings(4) | {"sampling": oversampling_settings(4)["sampling"]}
    train_in(tmp_path, parts, resumes=True, **settings)
    rows = [row for step in (3, 4) for row in rows_by_step(tmp_path)[step]]
    assert all(not row["policy_versions"] for row in rows)
    assert set(carried) <= {row["prompt_id"] for row in rows}


def test_groups_kept_from_the_last_step_may_suffice(parts, tmp_path):
    """With as many prompts again, a step in which all end at once leaves a whole batch."""
    settings = oversampling_settings(3, oversampling=1.0)
    settings |= {"complete": lambda so_far, version, seed: so_far.ground_truth, "tokens_per_step": 100}
    events = record_of(train_in(tmp_path, parts, **settings)).events
    events = [event for event in events if event.startswith(("sample 8", "sample 4"))]
    assert events == ["sample 8 for 1 until 4", "sample 4 for 3"]  # 3 is the last step
    assert [rows[0]["policy_version"] for rows in rows_by_step(tmp_path).values()] == [0, 0, 2]


def test_a_batch_ahead_is_counted_once(parts, tmp_path):
    """What one step leaves is carried once, and metrics.jsonl has the counts of the call."""
    work = []

    class Ahead(SplitEngine):
        """Records how often each prompt was begun before."""

        def generate(self, prompts, sampling, *, until=None, on_progress=None, on_group=None):
            if until is not None:
                begun = {prompt.prompt_id for prompt, row in zip(prompts, until.begun, strict=True) if row}
                work.append((newest_draw(prompts), begun, until.num_required))
            return super().generate(prompts, sampling, until=until, on_progress=on_progress, on_group=on_group)

    rollout = engine_of(parts, Ahead, long_tailed, tokens_per_step=3)
    settings = oversampling_settings(6, rollout=rollout, max_staleness=1, hybrid_engine=False, max_carried_steps=2)
    with open_run(parts, tmp_path, **settings) as run:
        train(run, None)
    assert any(begun for _, begun, _ in work)
    for (_, before, _), (step, begun, num_required) in itertools.pairwise(work):
        if step < 6:  # the last step waits for all; a group that was begun in one step only is not waited for
            assert num_required <= len(begun & before)
    metrics = [json.loads(line)["metrics"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for line in metrics[1:]:  # of the steps, after the validation
        assert {"data/epoch", "rollout/num_skipped", "rollout/carried_groups"} <= line.keys()
    assert all("perf/sampling_seconds" in line for line in metrics[2:])


def test_the_last_steps_leave_nothing(parts, uninterrupted, tmp_path):
    """Each prompt that is drawn is learned from once."""
    folder, _ = uninterrupted
    last = lines_of(folder)[8]
    assert (last["rollout/carried_groups"], last["response_length/max"]) == (0, 40)
    learned = [row["prompt_id"] for rows in rows_by_step(folder).values() for row in rows[:: SAMPLING.n]]
    assert latest_checkpoint(folder).progress["buffer"]["ready"] == []
    # A run that is continued with fewer steps has more groups than it needs. It waits for all.
    with open_run(parts, tmp_path, **oversampling_settings(1)) as run:
        drawn = Counter(each.prompt_id.partition("#")[0] for each in prompts_of(run).take(8 * 4))
        assert Counter(name.partition("#")[0] for name in learned) == drawn
        carried = [Work(prompts_of(run).rebuild(f"train:{number}"), (), 1) for number in range(6)]
        batch, state = batch_of(run, carried, step=1)
    assert [group.prompt for group in batch.groups] == [each.prompt for each in carried[:4]]
    assert (len(state["ready"]), state["work"]) == (2, [])


def batch_of(run, work, *, step):
    """Return the batch of a step that begins with this work, and what the step leaves."""
    buffer = run.buffer
    buffer._found.unfinished = list(work)
    return buffer.next(step, run.trainer.weights(), version=0), buffer.state(made=True)["buffer"]


def test_tokens_of_a_carried_group_that_failed_are_not_subtracted(parts, tmp_path):
    settings = oversampling_settings(8) | {
        "complete": lambda so_far, v, seed: None if "12" in so_far.text else "no idea",
        "plan": plan_of(steps=8, per_step=1, per_update=1),
    }
    with open_run(parts, tmp_path, **settings) as run:
        failing, other = prompts_of(run).rebuild("train:2"), prompts_of(run).rebuild("train:5")
        begun = Completion((1,) * 30, (0.0,) * 30, "unfinished", "", 0)
        batch, _ = batch_of(run, [Work(each, (begun,) * SAMPLING.n, 1) for each in (failing, other)], step=2)
    [group] = batch.groups
    assert group.prompt.prompt_id == other.prompt_id
    after = sum(rollout.completion.num_sampled for rollout in group.rollouts)
    assert batch.num_sampled_tokens == after - 30 * SAMPLING.n > 0


def test_a_step_with_no_complete_group_is_an_error_of_the_engine(parts, tmp_path):
    class NoneComplete(FakeEngine):
        """The groups of one replica failed, and the others had none to complete."""

        def generate(self, prompts, sampling, **options):
            if newest_draw(prompts) == 0:  # a validation
                return super().generate(prompts, sampling, **options)
            unfinished = [Completion((), (), "unfinished", "", 0)] * sampling.n
            return [[] if index % 2 else unfinished for index in range(len(prompts))]

    fake = engine_of(parts, NoneComplete, long_tailed)
    with pytest.raises(EngineError, match="completed none of"):
        train_in(tmp_path, parts, **oversampling_settings(8), rollout=fake)


def test_a_step_whose_last_groups_fail_learns_from_the_others(parts, tmp_path):
    class LastFail(FakeEngine):
        """Two replicas: one ends three groups and fails to sample one, the other fails later."""

        def generate(self, prompts, sampling, *, until=None, **options):
            if sampling.one_turn:
                return super().generate(prompts, sampling, **options)
            if len(prompts) < 6:
                return [[] for _ in prompts]
            rows = super().generate(prompts[:3], sampling, **options)
            begun = Completion((5,), (-1.0,), "unfinished", "", 0)
            return [*rows, [], *[[begun] * sampling.n for _ in prompts[4:]]]

    fake = engine_of(parts, LastFail, lambda *_: "no idea")
    with open_run(parts, tmp_path, **oversampling_settings(8), rollout=fake) as run:
        batch = run.buffer.next(1, run.trainer.weights(), version=0)
    assert len(batch.groups) == 3
    assert values(batch.metrics)["rollout/num_skipped"] == 3
