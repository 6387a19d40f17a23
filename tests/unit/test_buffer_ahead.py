"""Batches sampled one step ahead, on fake engines: versions, resuming, failures."""

from __future__ import annotations

import pytest

from support.fake_runs import (
    SplitEngine,
    StoppingReference,
    engine_of,
    full_settings,
    latest_checkpoint,
    lines_of,
    open_run,
    plan_of,
    rollouts_of,
    saved_steps,
    sometimes_right,
    train_in,
)
from trigon.errors import LostSamplersError, RewardError
from trigon.loop import train
from trigon.rollout.episodes import newest_draw
from trigon.rollout.sampling_call import PoolClock
from trigon.system.stopping import Grace


class FailingEngine(SplitEngine):
    """In one step it fails as `failure`, once."""

    failure: tuple[int, Exception] | None = None

    def generate(self, prompts, sampling, *, until=None, on_progress=None, on_group=None):
        if self.failure is not None and self.failure[0] == newest_draw(prompts):
            error, self.failure = self.failure[1], None
            raise error
        return super().generate(prompts, sampling, on_progress=on_progress, on_group=on_group)


def ahead(parts, *, complete=sometimes_right, failure=None):
    """Return the settings of a run that samples one step ahead."""
    rollout = engine_of(parts, FailingEngine, complete)
    rollout.failure = failure
    return {"rollout": rollout, "max_staleness": 1, "hybrid_engine": False}


@pytest.fixture(scope="module")
def uninterrupted(parts, tmp_path_factory):
    """Return the folder of a run of six steps, which samples one step ahead."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    train_in(folder, parts, **full_settings(6), **ahead(parts))
    return folder


def prompts_by_file(folder):
    return {name: [row["prompt_id"] for row in rows] for name, rows in rollouts_of(folder).items()}


def versions_of(folder):
    return [
        {row["policy_version"] for row in rows} for name, rows in rollouts_of(folder).items() if name.startswith("step")
    ]


def test_a_batch_is_sampled_with_the_weights_before_the_step_that_is_made_meanwhile(uninterrupted):
    assert versions_of(uninterrupted) == [{0}, {0}, {1}, {2}, {3}, {4}]
    lines = lines_of(uninterrupted)
    assert [lines[step]["staleness/mean"] for step in range(1, 7)] == [0, 1, 1, 1, 1, 1]
    assert [lines[step]["staleness/max"] for step in (1, 2)] == [0, 1]
    assert lines[2]["staleness/fraction_age_1"] == 1
    validated = rollouts_of(uninterrupted)["validation_000004.jsonl"]
    assert {row["policy_version"] for row in validated} == {4}


def test_a_batch_ahead_draws_the_prompts_that_a_batch_in_line_draws(parts, tmp_path, uninterrupted):
    train_in(tmp_path, parts, **full_settings(6))
    assert prompts_by_file(tmp_path) == prompts_by_file(uninterrupted)
    epochs = [[line.get("data/epoch") for line in lines_of(folder).values()] for folder in (tmp_path, uninterrupted)]
    assert epochs[0] == epochs[1]


@pytest.mark.parametrize("stopped_after", [1, 3])
def test_a_run_that_resumes_has_the_same_batches_as_one_without_a_stop(parts, tmp_path, uninterrupted, stopped_after):
    train_in(tmp_path, parts, stop_after=stopped_after, **full_settings(6), **ahead(parts))
    assert len(latest_checkpoint(tmp_path).progress["buffer"]["ready"]) == 4
    train_in(tmp_path, parts, resumes=True, **full_settings(6), **ahead(parts))
    assert lines_of(tmp_path) == lines_of(uninterrupted)
    assert rollouts_of(tmp_path) == rollouts_of(uninterrupted)


def test_a_step_that_is_left_saves_the_batch_that_it_was_to_learn_from(parts, tmp_path, uninterrupted):
    grace, settings = Grace(1e-9), full_settings(6)  # shorter than any save
    settings |= {"reference": StoppingReference(settings["reference"], grace), "grace": grace}
    with open_run(parts, tmp_path, **settings, **ahead(parts)) as run:
        assert train(run, None) == 3
    assert saved_steps(tmp_path) == [2, 3]
    train_in(tmp_path, parts, resumes=True, **full_settings(6), **ahead(parts))
    assert lines_of(tmp_path) == lines_of(uninterrupted)
    assert rollouts_of(tmp_path) == rollouts_of(uninterrupted)


def test_a_step_is_recorded_and_saved_before_the_error_of_the_batch_ahead_ends_the_run(parts, tmp_path):
    settings = {"plan": plan_of(steps=6), "save_freq": 2}
    with pytest.raises(RewardError, match="as asked"):
        train_in(tmp_path, parts, **settings, **ahead(parts, failure=(3, RewardError("as asked"))))
    assert sorted(lines_of(tmp_path)) == [1, 2]
    assert saved_steps(tmp_path) == [2]
    assert latest_checkpoint(tmp_path).progress["buffer"]["ready"] == []
    train_in(tmp_path, parts, resumes=True, **settings, **ahead(parts))
    assert versions_of(tmp_path) == [{0}, {0}, {2}, {2}, {3}, {4}]


def test_a_batch_whose_samplers_were_lost_is_sampled_again_with_the_newest_weights(parts, tmp_path, uninterrupted):
    failure = (4, LostSamplersError("all are lost"))
    train_in(tmp_path, parts, **full_settings(6), **ahead(parts, failure=failure))
    assert versions_of(tmp_path) == [{0}, {0}, {1}, {3}, {3}, {4}]
    assert prompts_by_file(tmp_path) == prompts_by_file(uninterrupted)


def test_groups_ahead_are_learned_from_by_a_run_with_smaller_steps(parts, tmp_path):
    train_in(tmp_path, parts, stop_after=1, **full_settings(6), **ahead(parts))
    settings = full_settings(4) | {"plan": plan_of(steps=4, per_step=2, per_update=2)}
    train_in(tmp_path, parts, resumes=True, **settings, **ahead(parts))
    # Of the four groups of version 0 two are too old for the third step, which samples them again.
    assert versions_of(tmp_path) == [{0}, {0}, {2}, {2}]
    assert [len(rows) for name, rows in rollouts_of(tmp_path).items() if name.startswith("step")] == [12, 6, 6, 6]


def test_idle_times_are_those_without_sampling_and_those_of_waiting():
    now = [0.0]
    clock = PoolClock(lambda: now[0])
    with clock.sampling():
        now[0] = 6.0
        with clock.waiting():
            now[0] = 8.0
        values = {name: metric.value for name, metric in clock.pop_metrics().items()}
        assert values["perf/samplers_idle_seconds"] == 0
        assert values["perf/learners_idle_seconds"] == 2
        assert values["perf/learners_idle_fraction"] == 0.25
        now[0] = 9.0
    now[0] = 12.0
    values = {name: metric.value for name, metric in clock.pop_metrics().items()}
    assert values["perf/samplers_idle_seconds"] == 3
    assert values["perf/samplers_idle_fraction"] == 0.75
    assert values["perf/learners_idle_seconds"] == 0
