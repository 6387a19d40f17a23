"""`trigon check` finds what would go wrong in a run, before it is started.

`trigon doctor` finds what does not work on a machine: it shows versions and devices, and makes two
tiny steps of training.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from trigon import __version__
from trigon.assemble.start import StopSignals
from trigon.config.load import split_arguments
from trigon.errors import ConfigError
from trigon.system.processes import python_command
from trigon.tools.check.run import Report, Result, as_json, check_run, console_lines, count_statuses
from trigon.tools.cli.parser import ArgumentParser

EXIT_WOULD_FAIL = 1
"""Exit status if the run would fail, or be wasted."""

TRAINING_SECONDS = 600.0
"""Time limit of the two steps; on a GPU vLLM compiles the model first."""

LAST_LINES = 40
"""Lines of a failed training's output that are shown."""

_TRIGON = "from trigon.tools.cli.main import main; sys.exit(main(sys.argv[1:]))"
_PARITY = "parity/logprobs_diff_mean"


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit status; see trigon.tools.cli.main."""
    parser = ArgumentParser(
        prog="trigon check",
        description="Check a run before it is started: configuration, machine, model files, every row with its "
        "images, and the reward function. No weights are loaded. Exit status 1 if the run would fail.",
        epilog="All checks, with their thresholds: docs/check.md",
        examples=[
            ("trigon check run.yaml", "all checks"),
            ("trigon check run.yaml data.max_pixels=802816", "with another option"),
            ("trigon check run.yaml --json", "for programs"),
        ],
    )
    parser.add_argument("arguments", nargs="*", metavar="RUN.yaml key=value", help="as for trigon train")
    parser.add_argument("--json", action="store_true", help="print the report as JSON, and nothing else")
    chosen = parser.parse_args(arguments)
    if not chosen.arguments:
        parser.error("no run is given; write trigon check RUN.yaml, or key=value")
    try:
        path, overrides = split_arguments(chosen.arguments)
    except ConfigError as error:
        parser.error(str(error))
    if path is not None and not path.is_file():
        parser.error(f"there is no file {path}")
    from trigon.data.images import ignore_pillow_warnings  # imports Pillow

    ignore_pillow_warnings()
    report = check_run(
        path,
        overrides,
        has_cluster=bool(os.environ.get("RAY_ADDRESS")),
        on_result=None if chosen.json else lambda result: print(console_lines(result), flush=True),
    )
    verdict = "the run would fail" if report.would_fail else "the run can start"
    print(as_json(report) if chosen.json else f"\n{count_statuses(report)}: {verdict}\n", end="")
    return EXIT_WOULD_FAIL if report.would_fail else 0


def doctor(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit status: 1 if a check failed."""
    parser = ArgumentParser(
        prog="trigon doctor",
        description="Show versions, GPUs, memory and disk of this machine, and make two steps of training with a tiny "
        "model on its device: sample, score, update, and sync the weights. Exit status 1 if something does not work.",
        epilog="The parity and kernel tests for GPUs are in a clone: make gpu-check.",
        examples=[
            ("trigon doctor", "everything, in a minute or two"),
            ("trigon doctor --versions", "versions and devices only, in seconds"),
            ("trigon doctor | tee doctor.txt", "for a bug report"),
        ],
    )
    parser.add_argument("--versions", action="store_true", help="do not train")
    chosen = parser.parse_args(arguments)
    from trigon.tools.check.environment import check_machine

    print(f"trigon {__version__}", flush=True)
    report = Report(lambda result: print(console_lines(result), flush=True))
    report.run("machine", "machine", check_machine, Path.cwd())
    if not chosen.versions:
        with StopSignals().handled():  # so that the processes of the training end with this one
            report.run("training", "training", check_training)
    print(f"\n{count_statuses(report)}")
    return int(report.would_fail)


def check_training(result: Result, *, seconds: float = TRAINING_SECONDS) -> None:
    """Train the quickstart's model for two steps, in a process of its own.

    The second step samples with the weights that the first one has updated, and the trainer scores
    what was sampled: weights that did not arrive are found. seconds: the time limit.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    engine = "transformers" if importlib.util.find_spec("vllm") is None else "vllm"
    with tempfile.TemporaryDirectory(prefix="trigon-") as folder:
        options = [
            f"--folder={folder}",
            f"trainer.device={'cuda' if on_gpu else 'cpu'}",
            f"worker.rollout.name={engine}",
            *(["worker.rollout.dtype=bf16", "worker.actor.fsdp.mp_param_dtype=bf16"] if on_gpu else []),
            *("trainer.max_steps=2", "trainer.val_freq=-1", "trainer.val_before_train=false"),
            "trainer.val_generations_to_log=0",
        ]
        reason, output = _run([*python_command(_TRIGON, "quickstart", *options)], seconds)
        if reason:
            result.fail("training", f"two steps with {engine} failed: {reason}", "report it with the lines below")
            result.text = "\n".join(output.splitlines()[-LAST_LINES:])
            return
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [line["metrics"] for line in map(json.loads, lines) if line["step"] > 0]
    device, took = torch.cuda.get_device_name() if on_gpu else "the CPU", steps[-1]["timing_s/step"]
    result.summary = (
        f"two steps with {engine} on {device}; the second took {took:.2f} s, and log-probabilities of engine and "
        f"trainer differ by {max(step[_PARITY] for step in steps):.2g} on average"
    )


def _run(command: Sequence[str], seconds: float) -> tuple[str, str]:
    """Run a command, and return why it failed, or "", and its output. Ends all of its processes."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _end(process)
        return f"it did not end within {seconds:.0f} s", process.communicate()[0]
    finally:
        _end(process)
    return f"its process ended with status {process.returncode}" if process.returncode else "", output


def _end(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)  # the group outlives its first process
    except ProcessLookupError:
        return
    process.wait()
