"""Whole runs of the quickstart in bfloat16, in float32 and with two workers, and the benchmark."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from statistics import mean

import pytest

from support.gpu import BENCHMARKS, Machine

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

MIN_REWARD_RISE = 0.1
"""From the first to the last quarter of the steps; the shipped curves rise by 0.3 to 0.4."""
BFLOAT16_PARITY, FLOAT32_PARITY = 0.05, 1e-3
"""Mean |log-probability difference| of engine and trainer, in nats, at the worst step."""
BFLOAT16 = ("worker.rollout.dtype=bf16", "worker.actor.fsdp.mp_param_dtype=bf16")
VARIANTS = ("padded", "packed, varlen", "+ shared prompts", "+ chunked log-probs", "no recomputation", "with sdpa")
"""Few of the benchmark's: each takes several updates, and some others compile for minutes."""
MAY_NOT_FIT = ("padded", "no recomputation")
"""These may need more memory than a GPU has, and no run needs them."""


@pytest.fixture
def quickstart(machine: Machine, record_property, tmp_path):
    """Return a function that trains for a number of steps, and returns the metrics of each.

    It starts `trigon quickstart` as a user does. The model and the data are made by the first run.
    """

    def run(steps: int, *overrides: str) -> list[dict[str, float]]:
        engine = "transformers" if importlib.util.find_spec("vllm") is None else "vllm"
        arguments = [
            "quickstart", f"--folder={machine.folder / 'quickstart'}", f"trainer.device={machine.device}",
            f"trainer.max_steps={steps}", f"trainer.save_checkpoint_path={tmp_path}", f"worker.rollout.name={engine}",
            "trainer.val_freq=-1", "trainer.val_before_train=false", "trainer.val_generations_to_log=0", *overrides,
        ]  # fmt: skip
        subprocess.run([sys.executable, "-m", "trigon", *arguments], check=True)
        lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        made = [line["metrics"] for line in lines if line["step"] > 0]
        assert len(made) == steps
        for key in ("timing_s/step", "timing_s/gen", "timing_s/update_actor"):  # the first compiles kernels
            record_property(key, f"{mean(step[key] for step in made[1:]):.2f}")
        record_property("parity", f"{worst_parity(made):.2g}")
        return made

    return run


def worst_parity(steps: list[dict[str, float]]) -> float:
    return max(step["parity/logprobs_diff_mean"] for step in steps)


def test_the_reward_of_the_quickstart_rises_in_bfloat16(machine, quickstart, record_property):
    steps = quickstart(40 if machine.on_gpu else 20, *BFLOAT16)
    rewards = [step["reward/overall"] for step in steps]
    quarter = len(rewards) // 4
    first, last = mean(rewards[:quarter]), mean(rewards[-quarter:])
    record_property("reward", f"{first:.2f} -> {last:.2f}")
    assert last - first >= MIN_REWARD_RISE
    assert worst_parity(steps) <= BFLOAT16_PARITY


def test_engine_and_trainer_agree_closely_in_float32(quickstart):
    assert worst_parity(quickstart(3)) <= FLOAT32_PARITY


@pytest.mark.parametrize(("shards", "tensor_parallel"), [(2, 1), (1, 2), (2, 2)], ids=["fsdp2", "tp2", "fsdp2-tp2"])
def test_two_workers(machine, quickstart, shards, tensor_parallel):
    if machine.on_gpu and machine.num_gpus < 2:
        pytest.skip("needs two GPUs")
    if tensor_parallel > 1:
        pytest.importorskip("vllm")
    options = (f"worker.actor.fsdp.fsdp_size={shards}", f"worker.rollout.tensor_parallel_size={tensor_parallel}")
    assert worst_parity(quickstart(3, *BFLOAT16, "trainer.n_gpus_per_node=2", *options)) <= BFLOAT16_PARITY


def test_the_variants_of_the_benchmark_compute_the_same(machine, record_property):
    size = ["--groups", "8", "--repeats", "2"] if machine.on_gpu else ["--tiny", "--groups", "2", "--repeats", "1"]
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *size, "--variants", *VARIANTS]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    rows = {line[:22].strip(): line[22:] for line in printed.splitlines()}
    measured = 0
    for name in VARIANTS:
        row = rows[name]
        record_property(name, " ".join(row.split()))
        assert "out of memory" not in row or name in MAY_NOT_FIT
        if row.split()[0].replace(".", "").isdigit():
            measured += 1
            assert float(row.split()[-1]) < (0.05 if machine.on_gpu else 1e-4), name
    assert measured
