"""Watchers in the loop: what is printed, recorded and saved when one warns or stops the run."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest

from support.fake_runs import (
    changed,
    full_settings,
    lines_of,
    open_run,
    plan_of,
    rollouts_of,
    saved_steps,
    sometimes_right,
)
from trigon.checkpoint.store import VALIDATED_BY
from trigon.config.schema import WatchConfig
from trigon.errors import DiskError, WatchError
from trigon.loop import Hooks, restore, train
from trigon.report.console import Console
from trigon.report.memory_growth import MemoryGrowth, MemoryMeter
from trigon.report.watch import RULES, Watch
from trigon.types import Prompt

pytestmark = pytest.mark.faults


def watch_of(level="warn", *, steps: int = 3, meter: MemoryMeter | None = None, ignore=()) -> Watch:
    """Return rules of this many steps, and a watch of memory that any certain growth stops."""
    memory = None if meter is None else MemoryGrowth(100, steps_to_stop=1_000_000)
    rules = [replace(rule, steps=steps) for rule in RULES if rule.name == "equal_rewards"]
    return Watch(WatchConfig(level=level, ignore=ignore), memory=memory, meter=meter, rules=rules)


def always_wrong_from(step: int):
    """Complete as usual, and from this step on always wrongly: all rewards are equal."""

    def complete(prompt: Prompt, version: int, seed: int) -> str:
        return "no idea" if version + 1 >= step else sometimes_right(prompt, version, seed)

    return complete


def warnings_of(run) -> list[str]:
    """Return the warnings that a run prints from now on; they are added to the list."""
    printed: list[str] = []

    class Recording(Console):
        def warn(self, text: str) -> None:
            printed.append(text)

    run.report._console.__class__ = Recording
    return printed


def test_a_stop_keeps_the_last_good_checkpoint_and_says_describe_continuation(parts, tmp_path):
    intervals = {"save_freq": 2}
    settings = {"complete": always_wrong_from(4), "plan": plan_of(steps=20), **intervals}
    watch = watch_of("stop")
    with open_run(parts, tmp_path, **settings, watch=watch) as run:
        printed = warnings_of(run)
        with pytest.raises(WatchError) as caught:
            train(run, None)
    text = str(caught.value)
    assert "equal_rewards stopped the run after step 6: since step 4: group/equal_rewards_fraction is 1" in text
    assert f"trainer.load_checkpoint_path={tmp_path / 'global_step_2'}" in text
    assert "trainer.watch.ignore=equal_rewards" in text
    # A checkpoint was due after step 6, and one of step 4 was saved before anything was known.
    assert saved_steps(tmp_path) == [2, 4]
    assert sorted(lines_of(tmp_path)) == [1, 2, 3, 4, 5, 6]
    assert printed == []

    # With another reward it continues from the good checkpoint.
    with open_run(parts, tmp_path, plan=plan_of(steps=7), **intervals, watch=watch_of()) as run:
        checkpoint = run.checkpoints.store.latest()
        assert checkpoint.step == 4
        assert train(run, checkpoint) == 7


@pytest.mark.parametrize("ends", ["last step", "stop request"])
def test_a_run_that_ends_anyway_is_warned_and_saved(parts, tmp_path, ends):
    watch = watch_of("stop", steps=2)
    settings = {"complete": always_wrong_from(2), "plan": plan_of(steps=3 if ends == "last step" else 9)}
    asked = iter([False, False, ends == "stop request"])
    with open_run(parts, tmp_path, **settings, watch=watch, should_stop=lambda: next(asked, False)) as run:
        printed = warnings_of(run)
        assert train(run, None) == 3
    assert saved_steps(tmp_path) == [3]
    assert len(printed) == 1


@pytest.mark.extended
@pytest.mark.faults
def test_a_resumed_run_warns_at_the_step_of_the_uninterrupted_one(parts, tmp_path):
    def run_to(folder, steps: int) -> list[str]:
        settings = {**full_settings(steps), "complete": always_wrong_from(3)}
        # The plan's length is not that of the interrupted run, whose last step is validated.
        with open_run(parts, folder, **settings, watch=watch_of()) as run:
            printed = warnings_of(run)
            checkpoint = run.checkpoints.store.latest() if saved_steps(folder) else None
            train(run, checkpoint)
        return [text for text in printed if "trainer.watch" in text]

    whole = tmp_path / "whole"
    expected = run_to(whole, 8)
    [warning] = expected
    assert "equal_rewards: since step 3: group/equal_rewards_fraction is 1" in warning
    assert [step for step, line in lines_of(whole).items() if "watch/equal_rewards" in line] == [5, 6, 7, 8]
    for split in (2, 4):
        folder = tmp_path / str(split)
        assert run_to(folder, split) + run_to(folder, 8) == expected
        assert lines_of(folder)[8] == lines_of(whole)[8]
        assert rollouts_of(folder)["step_000008.jsonl"] == rollouts_of(whole)["step_000008.jsonl"]


def test_validations_with_other_data_or_rewards_are_not_compared_after_a_resume(parts, tmp_path):
    def restored(validated_by, *, trains=False):
        with open_run(parts, tmp_path, **full_settings(2), watch=watch_of()) as run:
            run = replace(run, checkpoints=replace(run.checkpoints, made_from={VALIDATED_BY: validated_by}))
            if trains:
                train(run, None)
            else:
                restore(run, run.checkpoints.store.latest())
            return run.watch.state()

    trained = restored("a", trains=True)
    assert trained["best"] is not None
    assert restored("a") == trained
    assert restored("b")["best"] is None
    assert "val/reward_score" not in restored("b")["series"]


# -- memory --


@pytest.mark.extended
@pytest.mark.faults
@pytest.mark.parametrize("save_fails", [False, True])
def test_a_leak_in_the_driver_saves_and_stops(parts, tmp_path, save_fails):
    kept = []

    def leak(step, metrics):
        kept.append(random.Random(step).randbytes(16 << 20))

    def fail(folder):
        raise DiskError("the disk is full")

    with MemoryMeter() as meter:
        settings = {"plan": plan_of(steps=60), "watch": watch_of(meter=meter), "hooks": Hooks(on_step=leak)}
        settings |= {"save_state": fail} if save_fails else {}
        with open_run(parts, tmp_path, **settings) as run:
            printed = warnings_of(run)
            with pytest.raises(DiskError if save_fails else WatchError) as caught:
                train(run, None)
    text = "".join(printed) if save_fails else str(caught.value)
    assert "host memory grows by" in text
    assert "perf/memory_driver_gb by" in text
    if not save_fails:
        [step] = saved_steps(tmp_path)
        assert 13 <= step <= 20
        grown = float(text.partition("grows by ")[2].split()[0])
        assert grown == pytest.approx(16, rel=0.3)


def test_a_step_that_begins_beside_a_save_in_progress_is_told(parts, tmp_path):
    told, go_on = [], threading.Event()

    class Recording(Watch):
        def begin_step(self, *, saving):
            told.append(saving)
            if len(told) == 3:
                go_on.set()

    def save(folder):
        def finish():
            assert go_on.wait(30)
            (folder / "weights").write_text("x")

        return finish

    intervals = {"save_freq": 2}
    with open_run(parts, tmp_path, plan=plan_of(steps=3), **intervals, watch=Recording()) as run:
        run.checkpoints.store._background = True
        run = changed(run, save_state=save)
        assert train(run, None) == 3
        assert not run.checkpoints.store.is_saving
    assert told == [False, False, True]
