"""The checks that make whole training runs: the quickstart, and runs on two GPUs.

Each starts `trigon quickstart` as a user does, and reads the metrics that it writes.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
from pathlib import Path
from statistics import mean

from trigon.system.child_python import python_command
from trigon.tools.doctor.result import CheckSkipped, Findings, Setting, Tolerances, require_packages

TRIGON = "from trigon.tools.cli.main import main; sys.exit(main(sys.argv[1:]))"

MIN_REWARD_RISE = 0.1
"""From the first to the last quarter of the steps; the shipped curves rise by 0.3 to 0.4."""
BFLOAT16_PARITY, FLOAT32_PARITY = 0.05, 1e-3
"""Mean |log-probability difference| of engine and trainer, in nats, at the worst step."""

BFLOAT16 = ("worker.rollout.dtype=bf16", "worker.actor.fsdp.mp_param_dtype=bf16")
WITHOUT_VALIDATION = ("trainer.val_freq=-1", "trainer.val_before_train=false", "trainer.val_generations_to_log=0")


def check_quickstart(setting: Setting) -> Findings:
    """Train the quickstart's model in bfloat16, and require that its reward rises."""
    steps = 40 if setting.device == "cuda" else 20
    run = run_quickstart(setting, "quickstart", steps, *BFLOAT16)
    rewards = [step["reward/overall"] for step in run]
    quarter = max(1, len(rewards) // 4)
    first, last = mean(rewards[:quarter]), mean(rewards[-quarter:])
    compared = Tolerances(setting)
    compared.figures["steps"] = str(len(run))
    compared.figures["reward"] = f"{first:.2f} -> {last:.2f}"
    compared.at_least("rise of the reward", last - first, MIN_REWARD_RISE)
    compared.at_most("mean log-prob difference", worst_parity(run), BFLOAT16_PARITY)
    compared.figures |= speed(run)
    return compared.findings()


def check_float32(setting: Setting) -> Findings:
    """Make three steps of the quickstart in float32, where engine and trainer agree closely."""
    run = run_quickstart(setting, "float32", 3)
    compared = Tolerances(setting)
    compared.at_most("mean log-prob difference", worst_parity(run), FLOAT32_PARITY)
    compared.figures |= speed(run)
    return compared.findings()


def check_two_workers(setting: Setting, *, shards: int, tensor_parallel_size: int) -> Findings:
    """Make three steps with two Ray workers.

    Args:
        shards: workers that share a copy of the trainer's weights, 1 or 2.
        tensor_parallel_size: workers that share a copy of vLLM's, 1 or 2.
    Raises: CheckSkipped with one GPU, without Ray, and for tensor parallelism without vLLM.
    """
    if setting.device == "cuda" and setting.num_gpus < 2:
        raise CheckSkipped("needs two GPUs, this machine has one")
    require_packages("ray", *(["vllm"] if tensor_parallel_size > 1 else []))
    run = run_quickstart(
        setting,
        f"shards{shards}_tp{tensor_parallel_size}",
        3,
        *BFLOAT16,
        "trainer.n_gpus_per_node=2",
        f"worker.actor.fsdp.fsdp_size={shards}",
        f"worker.rollout.tensor_parallel_size={tensor_parallel_size}",
    )
    compared = Tolerances(setting)
    compared.at_most("mean log-prob difference", worst_parity(run), BFLOAT16_PARITY)
    compared.figures |= speed(run)
    return compared.findings()


def run_quickstart(setting: Setting, name: str, steps: int, *overrides: str) -> list[dict[str, float]]:
    """Train for a number of steps, without validation, and return the metrics of each.

    name: of the run's folder. The model and the data are made by the first run.
    Raises: RuntimeError if the run fails; it has printed why.
    """
    folder = setting.folder / "quickstart"
    run = folder / name
    engine = "vllm" if importlib.util.find_spec("vllm") is not None else "transformers"
    arguments = [
        "quickstart",
        f"--folder={folder}",
        f"trainer.device={setting.device}",
        f"trainer.max_steps={steps}",
        f"trainer.save_checkpoint_path={run}",
        f"worker.rollout.name={engine}",
        "trainer.find_last_checkpoint=false",
        *WITHOUT_VALIDATION,
        *overrides,
    ]
    status = subprocess.run(python_command(TRIGON, *arguments), check=False).returncode
    if status:
        raise RuntimeError(f"`{shlex.join(['trigon', *arguments])}` ended with status {status}; see the lines above")
    return read_steps(run)


def read_steps(run: Path) -> list[dict[str, float]]:
    """Return the metrics of each step of a run folder."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line["metrics"] for line in map(json.loads, lines) if line["step"] > 0]


def worst_parity(run: list[dict[str, float]]) -> float:
    """Return the largest mean |log-probability difference| of all steps."""
    return max(step["parity/logprobs_diff_mean"] for step in run)


def speed(run: list[dict[str, float]]) -> dict[str, str]:
    """Return the seconds of a step and its phases, without the first, which compiles kernels."""
    steps = run[1:] or run
    names = {"step": "timing_s/step", "sampling": "timing_s/gen", "update": "timing_s/update_actor"}
    return {f"seconds of {name}": f"{mean(step[key] for step in steps):.2f}" for name, key in names.items()}
