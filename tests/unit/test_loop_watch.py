"""Watchers in the loop: what is printed, recorded and saved when one warns or stops the run."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest

from support.fake_runs import (
    INTERVALS,
    SAMPLING,
    changed,
    full_settings,
    latest_checkpoint,
    lines_of,
    open_run,
    plan_of,
    rollouts_of,
    saved_steps,
    sometimes_right,
)
from trigon.assemble.watchers import make_watch_settings
from trigon.config.plan import make_plan
from trigon.config.schema import Config
from trigon.errors import DiskError, WatchError
from trigon.loop import train
from trigon.report.console import Console
from trigon.report.hooks import Hooks
from trigon.report.watch.meter import MemoryMeter
from trigon.report.watch.watch import Watch
from trigon.system.resuming import SameCommand
from trigon.types import Prompt

pytestmark = pytest.mark.faults


def watch_of(total_steps: int = 100, meter: MemoryMeter | None = None, **watch) -> Watch:
    config = Config(trainer={"watch": watch, "max_steps": total_steps}, worker={"rollout": {"n": SAMPLING.n}})
    return Watch(make_watch_settings(config, make_plan(config, num_train_prompts=1000)), meter)


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


def test_a_warning_is_printed_once_and_its_steps_are_in_metrics_jsonl(parts, tmp_path):
    watch = watch_of(equal_reward_steps=3)
    with open_run(parts, tmp_path, complete=always_wrong_from(3), plan=plan_of(steps=8), watch=watch) as run:
        printed = warnings_of(run)
        assert train(run, None) == 8
    [warning] = printed
    assert warning.startswith("trainer.watch.equal_rewards: since step 3: all completions have the reward 0.5")
    assert [step for step, line in lines_of(tmp_path).items() if "watch/equal_rewards" in line] == [5, 6, 7, 8]
    assert saved_steps(tmp_path) == [8]


def test_a_stop_keeps_the_last_good_checkpoint_and_says_how_to_go_on(parts, tmp_path):
    intervals = replace(INTERVALS, save_every=2)
    settings = {"complete": always_wrong_from(4), "plan": plan_of(steps=20), "intervals": intervals}
    watch = watch_of(equal_rewards="stop", equal_reward_steps=3)
    with open_run(parts, tmp_path, **settings, watch=watch) as run:
        printed = warnings_of(run)
        with pytest.raises(WatchError) as caught:
            train(run, None)
    text = str(caught.value)
    assert text.startswith("trainer.watch.equal_rewards stopped the run after step 6: since step 4: all completions")
    assert f"resume from it with trainer.load_checkpoint_path={tmp_path / 'global_step_2'}" in text
    assert "set trainer.watch.equal_rewards=warn" in text
    # A checkpoint was due after step 6, and one of step 4 was saved before anything was known.
    assert saved_steps(tmp_path) == [2, 4]
    assert sorted(lines_of(tmp_path)) == [1, 2, 3, 4, 5, 6]
    assert printed == []

    # With another reward it goes on from the good checkpoint.
    with open_run(parts, tmp_path, plan=plan_of(steps=7), intervals=intervals, watch=watch_of()) as run:
        checkpoint = run.checkpoints.store.latest()
        assert checkpoint.step == 4
        assert train(run, checkpoint) == 7


def test_a_stop_without_an_earlier_checkpoint_says_so(parts, tmp_path):
    watch = watch_of(equal_rewards="stop", equal_reward_steps=2)
    with (
        open_run(parts, tmp_path, complete=always_wrong_from(1), plan=plan_of(steps=20), watch=watch) as run,
        pytest.raises(WatchError, match="There is no checkpoint from before step 1"),
    ):
        train(run, None)
    # Where a save in progress is waited for, with the watchdog's limit of a save.
    assert run.report.phases[-1] == "save_checkpoint"
    assert saved_steps(tmp_path) == []


@pytest.mark.parametrize("ends", ["last step", "stop request"])
def test_a_run_that_ends_anyway_is_warned_and_saved(parts, tmp_path, ends):
    watch = watch_of(equal_rewards="stop", equal_reward_steps=2)
    settings = {"complete": always_wrong_from(2), "plan": plan_of(steps=3 if ends == "last step" else 9)}
    asked = iter([False, False, ends == "stop request"])
    with open_run(parts, tmp_path, **settings, watch=watch, should_stop=lambda: next(asked, False)) as run:
        printed = warnings_of(run)
        assert train(run, None) == 3
    assert saved_steps(tmp_path) == [3]
    assert len(printed) == 1


@pytest.mark.faults
@pytest.mark.parametrize("split", [2, 4, 6])
def test_a_resumed_run_warns_at_the_step_of_the_uninterrupted_one(parts, tmp_path, split):
    def run_to(folder, steps: int) -> list[str]:
        settings = {**full_settings(steps), "complete": always_wrong_from(3)}
        # The plan's length is not that of the interrupted run, whose last step is validated.
        with open_run(parts, folder, **settings, watch=watch_of(equal_reward_steps=3)) as run:
            printed = warnings_of(run)
            checkpoint = run.checkpoints.store.latest() if saved_steps(folder) else None
            train(run, checkpoint)
        return [text for text in printed if "trainer.watch" in text]

    whole, parts_folder = tmp_path / "whole", tmp_path / "parts"
    expected = run_to(whole, 8)
    assert len(expected) == 1
    assert run_to(parts_folder, split) + run_to(parts_folder, 8) == expected
    assert lines_of(parts_folder)[8] == lines_of(whole)[8]
    assert rollouts_of(parts_folder)["step_000008.jsonl"] == rollouts_of(whole)["step_000008.jsonl"]


def test_a_checkpoint_of_before_there_were_watchers_is_resumed(parts, tmp_path):
    with open_run(parts, tmp_path, **full_settings(2)) as run:
        train(run, None)
    checkpoint = latest_checkpoint(tmp_path)
    old = {key: value for key, value in checkpoint.progress.items() if key != "watch"}
    assert len(old) == len(checkpoint.progress) - 1
    with open_run(parts, tmp_path, **full_settings(4), watch=watch_of()) as run:
        assert train(run, replace(checkpoint, progress=old)) == 4


# -- memory --

MORE_STEPS_THAN_LEFT = 1_000_000
"""Of memory_steps: any certain growth stops the run, however much memory this machine has left."""


@pytest.mark.faults
def test_a_leak_in_the_driver_saves_and_stops(parts, tmp_path):
    kept = []

    def leak(step, metrics):
        kept.append(random.Random(step).randbytes(16 << 20))

    with MemoryMeter() as meter:
        watch = watch_of(meter=meter, memory_steps=MORE_STEPS_THAN_LEFT)
        settings = {"plan": plan_of(steps=60), "watch": watch, "hooks": Hooks(on_step=leak)}
        settings["same_command"] = SameCommand(tmp_path, finds_last=False)
        with open_run(parts, tmp_path, **settings) as run, pytest.raises(WatchError) as caught:
            train(run, None)
    text = str(caught.value)
    assert "host memory grows by" in text
    assert "perf/memory_driver_gb by" in text
    [step] = saved_steps(tmp_path)
    named = f"the same command with trainer.load_checkpoint_path={tmp_path / f'global_step_{step}'}"
    assert f"The step was saved; {named} goes on after it" in text
    assert 13 <= step <= 20
    grown = float(text.partition("grows by ")[2].split()[0])
    assert grown == pytest.approx(16, rel=0.3)


def test_an_alarm_is_printed_before_a_save_that_fails(parts, tmp_path):
    kept = []

    def fail(folder):
        raise DiskError("the disk is full")

    with MemoryMeter() as meter:
        watch = watch_of(meter=meter, memory_steps=MORE_STEPS_THAN_LEFT)
        hooks = Hooks(on_step=lambda step, metrics: kept.append(random.Random(step).randbytes(16 << 20)))
        with open_run(parts, tmp_path, plan=plan_of(steps=60), watch=watch, hooks=hooks) as run:
            printed = warnings_of(run)
            with pytest.raises(DiskError, match="the disk is full"):
                train(changed(run, save_state=fail), None)
    assert any(text.startswith("trainer.watch.memory: since step") and "host memory grows" in text for text in printed)


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

    intervals = replace(INTERVALS, save_every=2)
    with open_run(parts, tmp_path, plan=plan_of(steps=3), intervals=intervals, watch=Recording()) as run:
        run.checkpoints.store._background = True
        run = changed(run, save_state=save)
        assert train(run, None) == 3
        assert not run.checkpoints.store.is_saving
    assert told == [False, False, True]


@pytest.mark.extended
@pytest.mark.faults
def test_the_memory_of_a_flat_run_gives_no_alarm(parts, tmp_path):
    with MemoryMeter() as meter:
        watch = watch_of(meter=meter, memory_steps=MORE_STEPS_THAN_LEFT, equal_rewards="off")
        with open_run(parts, tmp_path, plan=plan_of(steps=80), watch=watch) as run:
            printed = warnings_of(run)
            assert train(run, None) == 80
    assert printed == []
