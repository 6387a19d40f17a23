"""Runs whose samplers are other workers than their learners: numbers, resume, killed workers."""

from __future__ import annotations

import json
import secrets
from collections import Counter
from pathlib import Path

import pytest
from safetensors import safe_open

from support.clusters import MARK, kill_worker, two_ray_nodes
from support.runs import NO_VALIDATION, assert_learned, finish, lines, log_of, make_run, rollouts, start

pytestmark = pytest.mark.vllm

SEPARATE = ("worker.hybrid_engine=false", "worker.rollout.n_gpus_per_node=2")
OF_POOLS = ("moved/", "staleness/", "rollout/engine_restarts")
"""Prefixes of metrics that depend on the pools, or on a kill, and not on what is learned."""


def learned(folder: Path) -> list[dict]:
    """Return the metrics of each step without those of pools."""
    return [
        {
            "step": line["step"],
            "metrics": {key: value for key, value in line["metrics"].items() if not key.startswith(OF_POOLS)},
        }
        for line in lines(folder)
    ]


def count_weight_bytes(folder: Path) -> int:
    """Return the bytes of the tensors of a model folder."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            total += sum(tensors.get_tensor(name).nbytes for name in tensors.keys())  # noqa: SIM118
    return total


@pytest.mark.alone
@pytest.mark.long
def test_separate_pools_have_the_numbers_of_shared_workers_also_when_samplers_are_killed(made, tmp_path):
    shared, separate, mark = tmp_path / "shared", tmp_path / "separate", secrets.token_hex(8)
    options = ("trainer.n_gpus_per_node=2", "trainer.save_freq=-1")
    make_run(made, shared, *NO_VALIDATION, *options, steps=3)
    assert_learned(shared)
    traced = "trainer.profile_steps=[1]"
    process = start(made, separate, *NO_VALIDATION, *options, *SEPARATE, traced, steps=3, environment={MARK: mark})
    kill_worker(process, separate, mark, method="generate", after=1)  # the other replica samples its prompts
    finish(process, separate)
    assert learned(separate) == learned(shared)
    assert rollouts(separate) == rollouts(shared)
    metrics = [line["metrics"] for line in lines(separate)]
    assert [each["rollout/engine_restarts"] for each in metrics] == [0, 0, 1]
    assert [each["staleness/max"] for each in metrics] == [0, 0, 0]
    assert {each["moved/weights_sent_bytes"] for each in metrics} == {count_weight_bytes(made / "model")}
    log = log_of(separate).read_text()
    assert "the process died" in log
    assert "is replaced, and the run continues" in log
    of_samplers = {f"step_000001.decode.sampler_{replica}.rank_0.json" for replica in range(2)}
    of_learners = {f"step_000001.rank_{rank}.json" for rank in range(2)}
    assert {path.name for path in (separate / "profile").iterdir()} == of_samplers | of_learners


@pytest.mark.alone
@pytest.mark.long
def test_transformers_samples_on_workers_of_its_own_with_the_same_numbers(made, tmp_path):
    shared, separate, all_the_time = (tmp_path / name for name in ("shared", "separate", "all the time"))
    options = ("worker.rollout.name=transformers", "trainer.save_freq=-1")
    pools = (*options, "worker.hybrid_engine=false")
    make_run(made, shared, *NO_VALIDATION, *options, steps=3)
    make_run(made, separate, *NO_VALIDATION, *pools, steps=3)
    assert learned(separate) == learned(shared)
    finish(
        start(
            made,
            all_the_time,
            *NO_VALIDATION,
            *pools,
            "algorithm.max_staleness=4",
            "worker.rollout.partial=continue",
            steps=3,
        ),
        all_the_time,
    )
    parity = [line["metrics"]["parity/logprobs_diff_max"] for line in lines(all_the_time)]
    assert len(parity) == 3
    assert max(parity) < 1e-5


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.faults
def test_a_run_that_samples_ahead_resumes_exactly_whoever_is_killed(made, tmp_path):
    whole, killed, mark = tmp_path / "whole", tmp_path / "killed", secrets.token_hex(8)
    options = (*SEPARATE, "algorithm.max_staleness=1")
    make_run(made, whole, *NO_VALIDATION, *options, steps=4)
    assert_learned(whole)
    assert [line["metrics"]["staleness/max"] for line in lines(whole)] == [0, 1, 1, 1]

    process = start(made, killed, *NO_VALIDATION, *options, steps=4, environment={MARK: mark})
    kill_worker(process, killed, mark, method="step", after=2)  # the learner, after the checkpoint of step 2
    assert process.wait(timeout=120) == 1
    assert "in update: the process died" in log_of(killed).read_text()

    process = start(made, killed, *NO_VALIDATION, *options, steps=4, environment={MARK: mark})
    kill_worker(process, killed, mark, method="generate", after=2)  # a sampler, while the learner works
    finish(process, killed)
    assert "resuming after step 2" in log_of(killed).read_text()
    assert learned(killed) == learned(whole)
    assert rollouts(killed) == rollouts(whole)


@pytest.mark.alone
@pytest.mark.long
def test_pools_on_two_nodes_with_tensor_parallelism_learn(made, tmp_path):
    folder = tmp_path / "run"
    with two_ray_nodes(tmp_path, num_cpus=2) as environment:
        options = ("worker.hybrid_engine=false", "trainer.n_gpus_per_node=2", "trainer.save_freq=-1")
        samplers = ("worker.rollout.n_gpus_per_node=2", "worker.rollout.tensor_parallel_size=2")
        finish(start(made, folder, *NO_VALIDATION, *options, *samplers, steps=2, environment=environment), folder)
    assert_learned(folder)
    assert "4 workers" in log_of(folder).read_text()


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_samplers_that_work_all_the_time_go_on_with_new_weights_and_lose_no_prompt(made, tmp_path):
    folder, mark = tmp_path / "run", secrets.token_hex(8)
    options = (
        "worker.hybrid_engine=false",
        "algorithm.max_staleness=4",
        "worker.rollout.partial=continue",
        "worker.rollout.n=2",
        "data.max_response_length=320",  # of a model that ends after about 100 tokens
    )
    process = start(made, folder, *NO_VALIDATION, *options, steps=8, environment={MARK: mark})
    kill_worker(process, folder, mark, method="generate", after=3)  # the only sampler
    finish(process, folder)
    assert_learned(folder)
    metrics = [line["metrics"] for line in lines(folder)]
    assert sum(each["rollout/engine_restarts"] for each in metrics) == 1
    assert max(each["rollout/carried_tokens"] for each in metrics) > 0
    assert 1 <= max(each["staleness/max"] for each in metrics) <= 4
    assert max(each["parity/logprobs_diff_max"] for each in metrics) < 1e-3
    assert all("mismatch/corrected_fraction" in each for each in metrics)
    rows = [json.loads(line) for text in rollouts(folder).values() for line in text.splitlines()]
    assert any(row["policy_versions"] for row in rows)
    learned_from = [row["prompt_id"] for row in rows]
    assert len(learned_from) == 8 * 4 * 2
    assert set(Counter(learned_from).values()) == {2}  # each prompt with its two completions, once
