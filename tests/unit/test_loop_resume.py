"""Stopping, dying and resuming on fake engines: the result equals that of an uninterrupted run."""

from __future__ import annotations

import errno

import pytest

from support.fake_runs import (
    changed,
    full_settings,
    latest_checkpoint,
    lines_of,
    open_run,
    record_of,
    rollouts_of,
    saved_steps,
    sometimes_right,
    train_in,
)
from trigon.checkpoint.store import CheckpointStore
from trigon.errors import DiskError
from trigon.loop import train
from trigon.system.stopping import Grace
from trigon.types import Prompt


@pytest.fixture(scope="module")
def uninterrupted(parts, tmp_path_factory):
    """Return the folder of a run of six steps."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    train_in(folder, parts, **full_settings(6))
    return folder


def test_a_stop_request_finishes_the_step_saves_and_resumes_as_if_uninterrupted(parts, tmp_path, uninterrupted):
    with open_run(parts, tmp_path, **full_settings(6)) as run:
        asked = iter([False, False, True])
        assert train(changed(run, should_stop=lambda: next(asked)), None) == 3
    assert saved_steps(tmp_path) == [2, 3]
    assert sorted(lines_of(tmp_path)) == [0, 1, 2, 3]

    with open_run(parts, tmp_path, **full_settings(6)) as run:
        assert train(run, latest_checkpoint(tmp_path)) == 6
        assert run.trainer.updates == 12
        assert record_of(run).events[0] == "awake 3"
    assert lines_of(tmp_path) == lines_of(uninterrupted)
    assert rollouts_of(tmp_path) == rollouts_of(uninterrupted)
    assert saved_steps(tmp_path) == [2, 3, 4, 6]


@pytest.mark.faults
@pytest.mark.parametrize(
    ("version", "saved"), [(3, [2, 3]), (2, [2])], ids=["the step before is saved", "a validation after a save"]
)
def test_a_step_that_cannot_be_finished_in_time_is_left(parts, tmp_path, uninterrupted, version, saved):
    grace = Grace(1e-9)  # shorter than any save

    def request(prompt: Prompt, sampling_version: int, seed: int) -> str:
        if sampling_version == version:
            grace.request(limited=True)
        return sometimes_right(prompt, sampling_version, seed)

    with open_run(parts, tmp_path, complete=request, grace=grace, **full_settings(6)) as run:
        assert train(run, None) == version
        assert run.trainer.updates == 2 * version
    assert saved_steps(tmp_path) == saved
    assert sorted(lines_of(tmp_path)) == list(range(version + 1))
    if version == 3:  # with version 2 it is the validation that is left, which a resumed run does not repeat
        resume_as_if_uninterrupted(parts, tmp_path, uninterrupted)


def resume_as_if_uninterrupted(parts, folder, uninterrupted):
    with open_run(parts, folder, **full_settings(6)) as run:
        assert train(run, latest_checkpoint(folder)) == 6
    assert lines_of(folder) == lines_of(uninterrupted)
    assert rollouts_of(folder) == rollouts_of(uninterrupted)


@pytest.mark.parametrize("ends", ["dies between two saves", "was shorter"])
def test_a_run_that_ended_early_repeats_the_lost_steps_and_continues(parts, tmp_path, uninterrupted, ends):
    def die_in_step_4(prompt: Prompt, version: int, seed: int) -> str:
        if version == 3:
            raise RuntimeError("the machine failed")
        return sometimes_right(prompt, version, seed)

    if ends == "was shorter":
        train_in(tmp_path, parts, **full_settings(4))
    else:
        with (
            open_run(parts, tmp_path, complete=die_in_step_4, **full_settings(6)) as run,
            pytest.raises(RuntimeError, match="failed"),
        ):
            train(run, None)
    resume_as_if_uninterrupted(parts, tmp_path, uninterrupted)


def test_a_finished_run_is_left_unchanged(parts, tmp_path):
    train_in(tmp_path, parts)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with open_run(parts, tmp_path) as run:
        assert train(run, latest_checkpoint(tmp_path)) == 3
        assert record_of(run).events == []
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_resuming_from_an_older_checkpoint_moves_the_later_ones_away(parts, tmp_path, uninterrupted):
    train_in(tmp_path, parts, **full_settings(4))
    store = CheckpointStore(tmp_path, keep=-1, warn=lambda text: None)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "global_step_4").rename(tmp_path / "elsewhere" / "global_step_4")
    older = latest_checkpoint(tmp_path)
    (tmp_path / "elsewhere" / "global_step_4").rename(tmp_path / "global_step_4")
    assert older.step == 2

    with open_run(parts, tmp_path, **(full_settings(6) | {"store": store})) as run:
        train(run, older)
    assert (tmp_path / "set_aside" / "global_step_4").is_dir()
    assert saved_steps(tmp_path) == [2, 4, 6]
    assert lines_of(tmp_path) == lines_of(uninterrupted)


def test_a_run_with_background_saves_ends_with_its_last_checkpoint_written(parts, tmp_path, uninterrupted):
    with open_run(parts, tmp_path, **full_settings(6)) as run:
        train(changed(run, store=CheckpointStore(tmp_path, keep=-1, background=True)), None)
        assert saved_steps(tmp_path) == saved_steps(uninterrupted)
    assert latest_checkpoint(tmp_path).step == 6
    assert latest_checkpoint(tmp_path).progress == latest_checkpoint(uninterrupted).progress


def test_failed_background_saves_are_warnings_and_the_last_one_is_an_error(parts, tmp_path):
    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with open_run(parts, tmp_path, **full_settings(6)) as run:
        messages: list[str] = []
        store = CheckpointStore(tmp_path, keep=-1, background=True, warn=messages.append)
        run = changed(run, store=store, save_state=lambda folder: fail)
        with pytest.raises(DiskError, match=r"global_step_6 could not be saved: the disk is full"):
            train(run, None)
    warnings = [message.partition(":")[0] for message in messages]
    assert warnings == [f"THE CHECKPOINT OF STEP {step} IS NOT SAVED" for step in (2, 4)]
    assert saved_steps(tmp_path) == []


def test_an_adaptive_kl_coefficient_moves_by_its_error_at_every_step(uninterrupted):
    # The KL, 0.5, is far above its target, 0.1: the error is cut at 0.2; 12 completions a step, a
    # horizon of 100.
    expected = [0.1 * (1 + 0.2 * 12 / 100) ** step for step in range(6)]
    lines = lines_of(uninterrupted)
    assert [lines[step]["actor/kl_coef"] for step in range(1, 7)] == pytest.approx(expected)
    assert latest_checkpoint(uninterrupted).progress["kl_coefficient"] == pytest.approx(0.1 * 1.024**6)
