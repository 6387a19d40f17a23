"""Makes training runs, in processes of their own or in that of the test, and reads run folders."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path

from support.processes import descendants
from trigon.system.hangs import dump_stacks
from trigon.tools.cli.main import main as trigon

ROOT = Path(__file__).parents[2]
MEASURED = ("timing_s/", "timing_per_token_ms/", "perf/")
"""The prefixes of the only metrics that may differ between two equal runs."""


# The completions of a barely trained model are all wrong. This reward differs between them, so
# there is a gradient.
REWARD = """
REWARD_TYPE = "sequential"


def compute_score(reward_input):
    return {"overall": sum(map(ord, reward_input["response"])) % 7 / 7}
"""


def make_tiny(folder: Path) -> Path:
    """Make a tiny model after a minimal warm start, its data, and a reward function.

    The data are few: every run reads and checks each row, which takes seconds for 2,000.
    """
    command = [sys.executable, "-m", "trigon", "tiny", str(folder), "--max-updates", "6"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    keep_rows(folder / "data" / "train.parquet", 128)
    keep_rows(folder / "data" / "validation.parquet", 24)
    (folder / "reward.py").write_text(REWARD)
    return folder


def keep_rows(file: Path, num_rows: int) -> None:
    """Keep the first rows of a Parquet file."""
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.parquet.read_table(file).slice(0, num_rows), file)


NO_VALIDATION = ("data.val_files=", "trainer.val_before_train=false", "trainer.val_freq=-1")
"""Options of a run without validation."""

STEPS = 6
CONFIG = ROOT / "trigon" / "tools" / "quickstart" / "quickstart.yaml"


def start(
    made: Path,
    folder: Path,
    *overrides: str,
    steps: int = STEPS,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.Popen[str]:
    """Start a run with the model and data in `made`. It writes into `folder`, its output into
    log_of(folder). Samples with vLLM if it is installed.

    cwd: the folder in which it is started, from which a relative `made` starts.
    """
    command = [
        sys.executable,
        "-m",
        "trigon.trainer.main",
        f"config={CONFIG}",
        *overrides_of(made, folder, steps=steps),
        *overrides,
    ]
    with log_of(folder).open("a") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
            cwd=cwd,
            # A test process in the background may ignore SIGINT, which its children inherit.
            preexec_fn=restore_sigint,
        )


def make_run(made: Path, folder: Path, *overrides: str, steps: int = STEPS) -> None:
    """Make a whole run as start() and finish() do, in this process.

    A process of its own imports torch, transformers and vLLM again, which takes longer than a short
    run. It is needed where the process is killed, or its environment is tested.
    """
    log = log_of(folder)
    with log.open("a") as output, redirect_stdout(output), redirect_stderr(output):
        status = trigon(["train", f"config={CONFIG}", *overrides_of(made, folder, steps=steps), *overrides])
    assert status == 0, log.read_text()[-4000:]


def overrides_of(made: Path, folder: Path, *, steps: int) -> list[str]:
    """Return the options of a run with the model and data in `made`, which writes into `folder`."""
    return [
        f"data.train_files={made / 'data' / 'train.parquet'}",
        f"data.val_files={made / 'data' / 'validation.parquet'}",
        f"worker.actor.model.model_path={made / 'model'}",
        f"worker.reward.reward_function={made / 'reward.py'}:compute_score",
        f"trainer.save_checkpoint_path={folder}",
        f"trainer.max_steps={steps}",
        "trainer.val_freq=3",
        "trainer.save_freq=2",
        "data.rollout_batch_size=4",
        "worker.actor.global_batch_size=2",  # two updates per step, so that old log-probabilities are computed
        "algorithm.disable_kl=false",
        "algorithm.use_kl_loss=true",
        "algorithm.kl_penalty=low_var_kl",
        "worker.ref.fsdp.torch_dtype=fp32",
        "worker.rollout.n=4",
        "worker.actor.optim.lr_warmup_ratio=0",  # a schedule would depend on trainer.max_steps
        "worker.actor.optim.lr_scheduler_type=constant",
        *([] if find_spec("vllm") else ["worker.rollout.name=transformers"]),
    ]


def restore_sigint() -> None:
    """Make SIGINT end this process again. Runs in a child process before it is executed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def press_ctrl_c(process: subprocess.Popen[str]) -> None:
    """Send SIGINT to the process group of a run, as a terminal does."""
    os.killpg(process.pid, signal.SIGINT)


def log_of(folder: Path) -> Path:
    """Return the file with the output of a run."""
    return folder.parent / f"{folder.name}.log"


def assert_learned(folder: Path) -> None:
    """Assert that every step has a gradient, so that comparisons of runs are meaningful."""
    norms = [line["metrics"]["actor/grad_norm"] for line in lines(folder) if line["step"] > 0]
    assert all(norm > 1e-3 for norm in norms), norms


def finish(process: subprocess.Popen[str], folder: Path) -> None:
    """Wait for a run, and assert that it succeeded."""
    status = process.wait(timeout=300)
    assert status == 0, log_of(folder).read_text()[-4000:]


def status_of(process: subprocess.Popen[str], folder: Path, *, timeout: float = 120) -> int:
    """Return the exit status of a run that is to end soon; fail with the stacks if it does not."""
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        stacks = dump_stacks([process.pid, *descendants(process.pid)])
        process.kill()
        raise AssertionError(f"the run has not ended:\n{stacks}\n{log_of(folder).read_text()[-4000:]}") from None


def lines(folder: Path) -> list[dict]:
    """Return the lines of metrics.jsonl without the MEASURED metrics."""
    parsed = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            "step": line["step"],
            "metrics": {key: value for key, value in line["metrics"].items() if not key.startswith(MEASURED)},
        }
        for line in parsed
    ]


def comparable(found: list[dict]) -> list[dict]:
    """Return metrics without the bytes of messages, which a new process sends again."""
    return [
        {"step": line["step"], "metrics": {k: v for k, v in line["metrics"].items() if not k.startswith("moved/")}}
        for line in found
    ]


def rollouts(folder: Path) -> dict[str, str]:
    """Return the rollouts files by name."""
    return {path.name: path.read_text() for path in sorted((folder / "rollouts").iterdir())}


def stored_images(folder: Path) -> dict[str, bytes]:
    """Return the stored images of a run by name."""
    return {path.name: path.read_bytes() for path in sorted((folder / "images").iterdir())}


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a run and its child processes."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], folder: Path) -> None:
    """Wait up to 300 s for the condition, and assert that the run is still active."""
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, log_of(folder).read_text()[-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def num_lines(folder: Path) -> int:
    """Return the number of steps in metrics.jsonl so far."""
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0
