"""Runs with several workers (Ray, FSDP2, vLLM) have the numbers of one, also after a resume."""

from __future__ import annotations

import json
import math
import secrets
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from support.clusters import MARK, kill_worker, marked, two_ray_nodes
from support.runs import (
    NO_VALIDATION,
    assert_learned,
    comparable,
    finish,
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

STEPS = 4
# Metrics that depend on the packing, which differs between numbers of workers, and one that engines
# with tensor parallelism do not have: they are not started again.
LAYOUT_KEYS = ("actor/micro_batches", "actor/packed_tokens", "actor/packing_fill", "moved/", "rollout/engine_restarts")


def train(
    made: Path, folder: Path, *overrides: str, steps: int = STEPS, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a run without validation."""
    return start(made, folder, *NO_VALIDATION, *overrides, steps=steps, environment=environment)


@pytest.fixture(scope="module")
def one_worker(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one_worker") / "run"
    make_run(made, folder, *NO_VALIDATION, steps=STEPS)
    assert_learned(folder)
    return folder


@pytest.fixture(scope="module")
def two_workers(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an uninterrupted run of two workers, with all its checkpoints."""
    folder = tmp_path_factory.mktemp("two_workers") / "run"
    make_run(made, folder, *NO_VALIDATION, "trainer.n_gpus_per_node=2", "trainer.save_limit=-1", steps=STEPS)
    return folder


def assert_close(actual: list[dict], expected: list[dict], *, tolerance: float) -> None:
    """Assert that the metrics of two runs are equal within a relative and absolute tolerance."""
    assert [line["step"] for line in actual] == [line["step"] for line in expected]
    different = {
        (line["step"], key): (line["metrics"].get(key), value)
        for line, other in zip(actual, expected, strict=True)
        for key, value in other["metrics"].items()
        if not key.startswith(LAYOUT_KEYS)
        and not math.isclose(line["metrics"].get(key, math.nan), value, rel_tol=tolerance, abs_tol=tolerance)
    }
    assert different == {}


def from_step(folder: Path, step: int, destination: Path) -> Path:
    """Return a copy of a run folder, as if the run had been killed after saving this step."""
    shutil.copytree(folder, destination)
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(destination / f"global_step_{later}", ignore_errors=True)
    return destination


def test_two_workers_have_the_numbers_of_one(one_worker, two_workers):
    assert_close(lines(two_workers), lines(one_worker), tolerance=1e-5)
    assert rollouts(two_workers).keys() == rollouts(one_worker).keys()
    assert len(stored_images(one_worker)) > 1
    assert stored_images(two_workers) == stored_images(one_worker)
    for values, expected in zip(token_values(two_workers), token_values(one_worker), strict=True):
        assert values == pytest.approx(expected, abs=1e-4)
    # Three times four small drawings and some hundred tokens, but no pixels (677 kB each time) and
    # no weights (3 MB).
    moved = [line["metrics"]["moved/sent_bytes"] for line in lines(two_workers)[1:3]]
    assert all(0 < sent < 30_000 for sent in moved), moved
    # Four prompts with an image each; sampled, scored by two models, learned from twice.
    assert sum(images_processed(two_workers)) <= 1.25 * 4 * STEPS
    assert max(images_processed(two_workers)) <= 6


def token_values(folder: Path) -> list[list[float]]:
    """Return what the trainer computed of the recorded tokens of the first step."""
    rows = [json.loads(line) for line in rollouts(folder)["step_000001.jsonl"].splitlines()]
    recorded = [row["tokens"] for row in rows if row["tokens"] is not None]
    assert recorded
    return [each[name] for each in recorded for name in ("old_logprobs", "entropy", "advantages")]


def images_processed(folder: Path) -> list[float]:
    """Return how many images the workers processed in each step."""
    parsed = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["metrics"]["perf/images_processed"] for line in parsed]


@pytest.mark.alone
@pytest.mark.long
def test_workers_that_compute_rows_together_have_the_numbers_of_those_that_do_not(made, two_workers, tmp_path):
    folder = tmp_path / "run"
    options = ("trainer.n_gpus_per_node=2", "worker.actor.ulysses_sequence_parallel_size=2")
    make_run(made, folder, *NO_VALIDATION, *options, steps=2)
    # The workers of a row count it once.
    rows, separate = (
        [line["metrics"]["actor/micro_batches"] for line in lines(each)] for each in (folder, two_workers)
    )
    assert all(together < apart for together, apart in zip(rows, separate[:2], strict=True))
    assert_close(lines(folder), lines(two_workers)[:2], tolerance=1e-5)
    for values, expected in zip(token_values(folder), token_values(two_workers), strict=True):
        assert values == pytest.approx(expected, abs=1e-4)


@pytest.mark.long
def test_one_worker_resumes_from_a_checkpoint_of_two(made, two_workers, tmp_path):
    folder = from_step(two_workers, 2, tmp_path / "run")
    make_run(made, folder, *NO_VALIDATION, steps=STEPS)
    assert "resuming after step 2" in log_of(folder).read_text()
    assert_close(lines(folder), lines(two_workers), tolerance=1e-5)


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.vllm
def test_four_workers_with_tensor_parallelism_and_two_copies_resume_from_a_checkpoint_of_two(
    made, two_workers, tmp_path
):
    folder = from_step(two_workers, 2, tmp_path / "run")
    sizes = ("trainer.n_gpus_per_node=4", "worker.rollout.tensor_parallel_size=2", "worker.actor.fsdp.fsdp_size=2")
    make_run(made, folder, *NO_VALIDATION, *sizes, steps=STEPS)
    assert_close(lines(folder), lines(two_workers), tolerance=1e-4)


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.vllm
def test_runs_with_tensor_parallelism_share_no_memory_and_leave_none_behind(made, tmp_path):
    def segments() -> set[str]:
        return {path.name for path in Path("/dev/shm").iterdir() if "cpushm" in path.name or "psm_" in path.name}

    options = ("trainer.n_gpus_per_node=2", "worker.rollout.tensor_parallel_size=2", "trainer.save_freq=-1")
    before = segments()
    folders = [tmp_path / "first", tmp_path / "beside it", tmp_path / "afterwards"]
    together = [train(made, folder, *options, steps=1) for folder in folders[:2]]
    for process, folder in zip(together, folders[:2], strict=True):
        finish(process, folder)
    make_run(made, folders[2], *NO_VALIDATION, *options, steps=1)
    assert lines(folders[0]) == lines(folders[1]) == lines(folders[2])
    assert segments() == before


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.faults
@pytest.mark.timeout(1200)  # starts two workers five times
def test_a_killed_worker_ends_the_run_in_any_phase_and_the_next_run_resumes_exactly(made, two_workers, tmp_path):
    folder = tmp_path / "run"
    for num_steps, (method, phase) in enumerate(
        [("generate", "rollout"), ("logprobs", "logprobs"), ("step", "update"), ("write_state", "save (writing)")]
    ):
        mark = secrets.token_hex(8)
        # Each run is killed one step later than the one before; the first in its first step.
        process = train(
            made,
            folder,
            "trainer.n_gpus_per_node=2",
            "trainer.save_freq=1",
            environment={MARK: mark},
        )
        kill_worker(process, folder, mark, method=method, after=num_steps)
        kill_time = time.monotonic()
        assert process.wait(timeout=60) == 1
        log = log_of(folder).read_text()
        assert "WorkerError: rank " in log
        assert f"in {phase}: the process died" in log
        assert "the same command continues from the last checkpoint" in log
        while time.monotonic() - kill_time < 60 and marked(mark):
            time.sleep(0.1)
        assert marked(mark) == {}
    make_run(made, folder, *NO_VALIDATION, "trainer.n_gpus_per_node=2", "trainer.save_freq=1", steps=STEPS)
    assert comparable(lines(folder)) == comparable(lines(two_workers))
    assert rollouts(folder) == rollouts(two_workers)


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.faults
def test_ctrl_c_reaches_the_driver_alone_and_a_second_one_ends_all_processes(made, tmp_path):
    folder, mark = tmp_path / "run", secrets.token_hex(8)
    options = ("trainer.n_gpus_per_node=2", "trainer.save_freq=-1")
    process = train(made, folder, *options, environment={MARK: mark})
    wait_for(lambda: num_lines(folder) >= 1, process, folder)
    press_ctrl_c(process)
    assert process.wait(timeout=120) == 130
    assert len(list(folder.glob("global_step_*"))) == 1
    assert "Traceback" not in log_of(folder).read_text()

    process = train(made, folder, *options, steps=1000, environment={MARK: mark})
    wait_for(lambda: num_lines(folder) >= 4, process, folder)
    press_ctrl_c(process)
    wait_for(lambda: log_of(folder).read_text().count("press Ctrl-C again") == 2, process, folder)
    press_ctrl_c(process)
    assert process.wait(timeout=30) == 130
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and marked(mark):
        time.sleep(0.1)
    assert marked(mark) == {}


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.vllm
def test_a_cluster_of_two_nodes_has_the_numbers_of_one_worker(made, one_worker, tmp_path):
    folder = tmp_path / "run"
    sizes = ("trainer.nnodes=2", "worker.rollout.tensor_parallel_size=2")
    with two_ray_nodes(tmp_path) as nodes:
        finish(train(made, folder, *sizes, steps=2, environment=nodes), folder)
    assert_close(lines(folder), lines(one_worker)[:2], tolerance=1e-5)
    # Both ranks of a replica need the pixels to sample; for training, either of them has them.
    assert images_processed(folder) == [8.0, 8.0]
