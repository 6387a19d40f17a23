"""Runs that diverge end with an error and a good last checkpoint; runs survive faults of vLLM.

The faults are caused in torch and vLLM, from outside the package (tests/support/injected).
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from support.runs import NO_VALIDATION, lines, log_of, start
from trigon.checkpoint.store import CheckpointStore, find_checkpoints
from trigon.training.checkpointing import all_finite
from trigon.training.state import ShardedFiles

pytestmark = pytest.mark.faults

INJECTED = Path(__file__).parents[1] / "support" / "injected"
SHORT = (
    *NO_VALIDATION,
    *("trainer.save_freq=1", "trainer.save_limit=-1", "data.max_response_length=8"),
    *("worker.actor.global_batch_size=4", "algorithm.disable_kl=true"),
)
ONE = (*SHORT, "worker.rollout.name=transformers")
TWO = (*SHORT, "trainer.n_gpus_per_node=2")
COUNTS = ("rollout/retried_requests", "rollout/engine_restarts")


def run(made: Path, folder: Path, *options: str, faults=(), steps: int = 5):
    """Start a run in which these faults happen: [fault, rank, number of the call] each."""
    paths = [str(INJECTED), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"TRIGON_TEST_FAULTS": json.dumps(faults), "PYTHONPATH": os.pathsep.join(paths)}
    return start(made, folder, *options, steps=steps, environment=environment)


def finish(process, folder: Path, *, status: int = 0) -> str:
    """Wait for a run, assert its exit status, and return its output."""
    found, log = process.wait(timeout=1000), log_of(folder).read_text()
    assert found == status, log[-4000:]
    return log


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints, all values of which are finite."""
    for checkpoint in find_checkpoints(folder):
        for part in ("weights", "optimizer"):
            files = ShardedFiles(checkpoint / "actor" / part)
            assert all_finite(files.read(name) for name in files.tensors)
    latest = CheckpointStore(folder, keep=-1).latest()
    steps = [int(checkpoint.name.removeprefix("global_step_")) for checkpoint in find_checkpoints(folder)]
    assert (None if latest is None else latest.step) == (max(steps) if steps else None)
    assert not list(folder.glob(".saving_*"))
    return steps


@pytest.mark.long
def test_gradients_that_are_nan_from_one_update_on_end_the_run(made, tmp_path):
    folder = tmp_path / "run"
    log = finish(run(made, folder, *ONE, faults=[["nan gradient", 0, 3]]), folder, status=1)
    assert "Traceback" not in log
    assert log.count("is skipped, since its gradient is not finite") == 3
    assert (
        "warning: update 1 of step 3 is skipped, since its gradient is not finite (1 in a row): gradient norm nan"
        in log
    )
    assert log.count("updates skipped, not finite: 1") == 2  # steps 3 and 4; step 5 ends the run
    assert "NotFiniteError: the gradients of 3 updates in a row are not finite" in log
    assert f"The last checkpoint, {folder / 'global_step_4'}, holds finite values" in log
    assert saved_steps(folder) == [1, 2, 3, 4]


@pytest.mark.extended
@pytest.mark.long(cases=["nan weight"])
@pytest.mark.parametrize("fault", ["nan weight", "nan moment"])
def test_a_value_that_an_update_made_nan_is_not_saved_and_the_run_continues_from_the_last_good_checkpoint(
    made, tmp_path, fault
):
    folder, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    log = finish(run(made, folder, *ONE, faults=[[fault, 0, 2]], steps=3), folder, status=1)
    assert "Traceback" not in log
    assert "NotFiniteError: the weights and optimizer states after 2 updates hold nan or infinity, in 1 of " in log
    assert f"The last checkpoint, {folder / 'global_step_1'}, holds finite values" in log
    assert saved_steps(folder) == [1]
    if fault == "nan weight":
        finish(run(made, folder, *ONE, steps=3), folder)
        finish(run(made, undisturbed, *ONE, steps=3), undisturbed)
        assert lines(folder) == lines(undisturbed)


@pytest.fixture(scope="module")
def two_workers(made: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Return the metrics of an undisturbed run of two workers, each with vLLM."""
    folder = tmp_path_factory.mktemp("two") / "run"
    finish(run(made, folder, *TWO, steps=2), folder)
    return lines(folder)


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.alone
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("faults", "retried", "message"),
    [
        pytest.param([["compute", 1, 11]], 0, "RuntimeError: a kernel failed", id="compute"),
        pytest.param([["load", 1, 2], ["lose", 0, 3]], 1, "RuntimeError: no memory for a copy", id="load-lose"),
    ],
)
def test_two_workers_survive_a_failing_engine_of_one_of_them_with_the_same_numbers(
    made, two_workers, tmp_path, faults, retried, message
):
    folder = tmp_path / "run"
    finish(run(made, folder, *TWO, faults=faults, steps=2), folder)
    log = log_of(folder).read_text()
    assert log.count(f"{message}") >= 1
    assert log.count("The rollout engine is started again, and loads the trainer's weights") == 1
    assert "warning: rank 1 on " in log
    found = lines(folder)
    assert [sum(line["metrics"][key] for line in found) for key in COUNTS] == [retried, 1]
    for line, undisturbed in zip(found, two_workers, strict=True):
        for key, value in undisturbed["metrics"].items():
            if key in COUNTS or key.startswith("moved/"):  # what was sampled twice moved twice
                continue
            # A request that is submitted again is in another batch, which rounds otherwise.
            tolerance = 1e-4 if retried else 0.0
            assert math.isclose(line["metrics"][key], value, rel_tol=tolerance, abs_tol=tolerance), key


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(2400)
def test_a_weight_of_one_of_two_workers_that_is_nan_ends_the_run_with_the_last_good_checkpoint(made, tmp_path):
    folder = tmp_path / "run"
    log = finish(
        run(made, folder, *TWO, "worker.rollout.name=transformers", faults=[["nan weight", 1, 2]]), folder, status=1
    )
    assert "NotFiniteError: rank " in log
    assert "in save (copying): the weights and optimizer states after 2 updates hold nan or infinity, in 1 of " in log
    assert saved_steps(folder) == [1]
