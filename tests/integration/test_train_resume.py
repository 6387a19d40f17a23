"""A run that is killed and started again has the numbers of an uninterrupted one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.runs import (
    STEPS,
    assert_learned,
    finish,
    kill,
    lines,
    log_of,
    make_run,
    num_lines,
    press_ctrl_c,
    rollouts,
    start,
    stored_images,
    wait_for,
)


@pytest.fixture(scope="module")
def uninterrupted(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    make_run(made, folder, "trainer.save_limit=-1")
    assert [line["step"] for line in lines(folder)] == list(range(STEPS + 1))
    assert_learned(folder)
    return folder


@pytest.mark.long
def test_the_output_of_a_run_is_its_own(made, tmp_path):
    folder = tmp_path / "run"
    finish(start(made, folder, steps=2), folder)
    log = log_of(folder).read_text()
    assert log.startswith("trigon ")
    assert f"run folder: {folder}" in log
    foreign = [word for word in ("Loading weights", "Generating train", "Triton", "NUMA", "PIL", "it/s") if word in log]
    assert foreign == []


@pytest.mark.long
@pytest.mark.faults
def test_a_run_killed_three_times_equals_an_uninterrupted_one(made, uninterrupted, tmp_path):
    folder = tmp_path / "run"
    process = start(made, folder)
    wait_for(lambda: num_lines(folder) >= 2, process, folder)  # after step 1, before the first checkpoint
    kill(process)
    process = start(made, folder)
    wait_for(lambda: any(folder.glob(".saving_global_step_2")) or num_lines(folder) >= 3, process, folder)
    kill(process)  # during or shortly after the first save
    process = start(made, folder)
    wait_for(lambda: num_lines(folder) >= 6, process, folder)  # after step 5, which has no checkpoint
    kill(process)
    make_run(made, folder)
    assert lines(folder) == lines(uninterrupted)
    assert rollouts(folder) == rollouts(uninterrupted)
    assert stored_images(folder) == stored_images(uninterrupted)


@pytest.mark.long
def test_starting_a_finished_run_again_changes_nothing(made, uninterrupted):
    before = (uninterrupted / "metrics.jsonl").read_bytes()
    make_run(made, uninterrupted)
    assert (uninterrupted / "metrics.jsonl").read_bytes() == before


@pytest.mark.extended
def test_ctrl_c_and_sigterm_save_the_current_step_and_the_next_run_resumes_after_it(made, uninterrupted, tmp_path):
    folder = tmp_path / "run"
    process = start(made, folder, "trainer.save_freq=-1")
    wait_for(lambda: num_lines(folder) >= 2, process, folder)
    press_ctrl_c(process)
    assert process.wait(timeout=120) == 130
    step = saved_step(folder)
    assert 1 <= step < STEPS
    log = log_of(folder).read_text()
    assert "Ctrl-C: finishing and saving the current step; press Ctrl-C again to stop at once" in log
    assert f"the same command resumes after step {step}" in log
    assert "Traceback" not in log

    process = start(made, folder, "trainer.save_freq=-1")
    wait_for(lambda: num_lines(folder) >= step + 2, process, folder)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 143
    assert f"resuming after step {step} " in log_of(folder).read_text()
    assert saved_step(folder) > step
    assert lines(folder) == lines(uninterrupted)[: saved_step(folder) + 1]


def saved_step(folder: Path) -> int:
    """Return the step of the last checkpoint."""
    return max(int(path.name.removeprefix("global_step_")) for path in folder.glob("global_step_*"))


@pytest.mark.long
def test_a_second_ctrl_c_stops_at_once(made, tmp_path):
    folder = tmp_path / "run"
    # A step of minutes, so that the run can only end in the middle of one.
    sizes = ("data.rollout_batch_size=100", "worker.rollout.n=256")
    process = start(made, folder, *sizes, "trainer.val_before_train=false")
    wait_for(lambda: "gen  " in log_of(folder).read_text(), process, folder)
    press_ctrl_c(process)
    wait_for(lambda: "press Ctrl-C again" in log_of(folder).read_text(), process, folder)
    press_ctrl_c(process)
    assert process.wait(timeout=20) == 130
    log = log_of(folder).read_text()
    assert "stopped at once" in log
    assert "Traceback" not in log
    assert list(folder.glob("global_step_*")) == []


@pytest.mark.extended
def test_ctrl_c_before_the_first_step_ends_the_run(made, tmp_path):
    folder = tmp_path / "run"
    process = start(made, folder)
    wait_for(lambda: (folder / "run.lock").exists(), process, folder)
    press_ctrl_c(process)
    assert process.wait(timeout=20) == 130
    assert "interrupted" in log_of(folder).read_text()
    assert list(folder.glob("global_step_*")) == []


@pytest.mark.extended
def test_val_only_needs_no_training_files_and_records_the_numbers_of_the_checkpoint(made, uninterrupted, tmp_path):
    folder = tmp_path / "run"
    make_run(
        made,
        folder,
        "trainer.val_only=true",
        "data.train_files=",
        "trainer.logger=[console,file,tensorboard]",
        f"trainer.load_checkpoint_path={uninterrupted / f'global_step_{STEPS}'}",
    )
    [line] = lines(folder)
    expected = lines(uninterrupted)[STEPS]["metrics"]
    assert line["step"] == STEPS
    assert line["metrics"] == {key: value for key, value in expected.items() if key.startswith("val")}
    assert list((folder / "tensorboard").rglob("events.*"))
    log = log_of(folder).read_text()
    assert f"validating the weights of step {STEPS} from " in log
    assert "trainer.val_only=false" in log
    assert "max_steps" not in log
    assert "optimizer" not in log
    assert list(folder.glob("global_step_*")) == []


@pytest.mark.long
def test_the_export_of_a_run_without_steps_is_of_the_loaded_checkpoint(made, uninterrupted, tmp_path):
    loaded = uninterrupted / f"global_step_{STEPS}"
    config = tmp_path / "config.yaml"
    config.write_text((uninterrupted / "config.yaml").read_text())
    overrides = [f"trainer.save_checkpoint_path={tmp_path / 'run'}", f"trainer.load_checkpoint_path={loaded}"]
    script = (
        "from pathlib import Path; from trigon.tools.cli.train import train; "
        "from trigon.config.load import load_config; "
        f"train(load_config(Path({str(config)!r}), {overrides!r}), export_to=Path({str(tmp_path / 'model')!r}))"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=300)
    assert json.loads((tmp_path / "model" / "trigon_export.json").read_text())["step"] == STEPS
