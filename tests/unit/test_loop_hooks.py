"""Functions of the user that the loop calls: when, with what, and what an error in one does."""

import errno
import json

import pytest

from support.fake_runs import SAMPLING, lines_of, open_run, rollouts_of, saved_steps
from trigon.checkpoint.store import CheckpointStore
from trigon.errors import ConfigError, DiskError
from trigon.loop import train
from trigon.report.delivery import Hooks


def test_hooks_get_the_groups_before_the_update_and_the_metrics_after_the_checkpoint(parts, tmp_path):
    calls = []

    def on_rollouts(groups):
        scored = [rollout.score.outcome for group in groups for rollout in group.rollouts]
        calls.append(("rollouts", len(groups), len(scored), len(run.trainer.record.learned)))
        assert {len(group.rollouts) for group in groups} == {SAMPLING.n}

    def on_step(step, metrics):
        saved = (tmp_path / f"global_step_{step}").is_dir()
        calls.append(("step", step, saved))
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert json.loads(lines[-1]) == {"step": step, "metrics": dict(sorted(metrics.items()))}

    intervals = {"val_before_train": True}
    with open_run(parts, tmp_path, hooks=Hooks(on_step, on_rollouts), **intervals) as run:
        train(run, None)
    per_step = 4 * SAMPLING.n
    assert [call for call in calls if call[0] == "rollouts"] == [("rollouts", 4, per_step, done) for done in (0, 1, 2)]
    steps = [call for call in calls if call[0] == "step"]
    assert [step for _, step, _ in steps] == [0, 1, 2, 3]
    assert steps[-1] == ("step", 3, True)
    assert [kind for kind, *_ in calls] == ["step", *("rollouts", "step") * 3]


def test_an_error_in_a_hook_ends_the_run_with_its_traceback_and_what_was_written_stays(parts, tmp_path):
    def on_step(step, metrics):
        raise LookupError("my own check")

    def on_rollouts(groups):
        raise LookupError("suspicious rewards")

    with open_run(parts, tmp_path / "step", hooks=Hooks(on_step=on_step)) as run:
        with pytest.raises(LookupError, match="my own check") as caught:
            train(run, None)
        assert caught.traceback[-1].name == "on_step"
    assert list(lines_of(tmp_path / "step")) == [1]
    with open_run(parts, tmp_path / "rollouts", hooks=Hooks(on_rollouts=on_rollouts)) as run:
        with pytest.raises(LookupError, match="suspicious rewards"):
            train(run, None)
        assert run.trainer.record.learned == []
    assert list(rollouts_of(tmp_path / "rollouts")) == ["step_000001.jsonl"]
    hooks = Hooks(on_step=lambda step, metrics: "sotp")
    with open_run(parts, tmp_path / "misspelt", hooks=hooks) as run, pytest.raises(ValueError, match="'sotp'"):
        train(run, None)


def test_a_hook_that_cannot_be_called_is_refused_as_it_is_given():
    for given, problem in (
        ({"on_step": 3}, r"on_step is 3; give a function that is called as on_step\(step, metrics\)"),
        ({"on_step": lambda metrics: None}, r"on_step takes \(metrics\), but is called as on_step\(step, metrics\)"),
        ({"on_rollouts": lambda: None}, r"on_rollouts takes \(\), but is called as on_rollouts\(groups\)"),
    ):
        with pytest.raises(ConfigError, match=problem):
            Hooks(**given)
    Hooks(on_step=print, on_rollouts=[].append)  # whose signatures Python may not know


@pytest.mark.parametrize(("answer", "last", "saved"), [("stop", 2, [2]), ("save", 3, [2, 3]), (True, 3, [3])])
def test_on_step_can_save_and_stop(parts, tmp_path, answer, last, saved):
    hooks = Hooks(on_step=lambda step, metrics: answer if step == 2 else None)
    with open_run(parts, tmp_path, hooks=hooks, save_freq=0) as run:
        assert train(run, None) == last
    assert saved_steps(tmp_path) == saved


@pytest.mark.parametrize("background", [False, True])
def test_a_step_after_which_on_step_stops_is_saved_also_if_its_save_has_failed(parts, tmp_path, background):
    def save_state(folder):
        attempts.append(folder)
        if len(attempts) <= num_failures:
            raise OSError(errno.ENOSPC, "No space left on device")
        return run.trainer.save_state(folder, model_only=False)

    def finish_later(folder):
        return lambda: save_state(folder)()

    hooks = Hooks(on_step=lambda step, metrics: "stop" if step == 2 else None)
    for num_failures, folder in ((1, tmp_path / "once"), (2, tmp_path / "twice")):
        attempts = []
        store = CheckpointStore(folder, keep=-1, background=background, warn=lambda text: None)
        saving = {"store": store, "save_state": finish_later if background else save_state}
        with open_run(parts, folder, hooks=hooks, save_freq=2, **saving) as run:
            if num_failures == 1:
                assert train(run, None) == 2
                assert saved_steps(folder) == [2]
            else:
                with pytest.raises(DiskError, match="the disk is full"):
                    train(run, None)
                assert saved_steps(folder) == []
