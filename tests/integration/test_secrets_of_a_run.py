"""Secrets in options reach the reward workers, and no file, output, tracker or process list."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from support.runs import CONFIG, overrides_of
from trigon.system.secrets import MASKED

pytestmark = [pytest.mark.extended, pytest.mark.faults]

IN_FILE = "judge-key-in-the-file-77"
IN_VARIABLE = "judge-key-in-a-variable-88"
KWARGS = "worker.reward.reward_function_kwargs"

# Proves that it has both keys by the score, and prints one; now and then it has one in an error.
REWARD = f"""
REWARD_TYPE = "sequential"
num_calls = 0

def compute_score(reward_input, judge, api_key):
    global num_calls
    num_calls += 1
    print("asking with", judge["api_key"], api_key)
    assert (judge["api_key"], api_key) == ({IN_FILE!r}, {IN_VARIABLE!r})
    if num_calls > 4 and num_calls % 3 == 0:  # not the dummy completions before training
        raise ValueError(f"401: the key {{api_key}} is not valid")
    return {{"overall": sum(map(ord, reward_input["response"])) % 7 / 7}}
"""

# Takes the place of the library, and records every call.
TRACKER = """
import json, os, types
def _record(call, /, *args, **kwargs):
    with open(os.environ["TRACKER_CALLS"], "a") as file:
        file.write(json.dumps([call, args, kwargs], default=repr) + "\\n")
Settings = lambda **kwargs: types.SimpleNamespace(mode="offline", **kwargs)
def init(**kwargs):
    _record("init", **kwargs)
    run = types.SimpleNamespace(settings=Settings(), dir="here", url="here")
    run.log = lambda *args, **kwargs: _record("log", *args, **kwargs)
    run.finish = lambda: None
    return run
Table = lambda **kwargs: kwargs
Image = lambda *args, **kwargs: "image"
"""


def run(made: Path, folder: Path, *arguments: str, environment: dict[str, str]) -> tuple[int, str, set[str]]:
    """Return the exit status of a run, its output, and the arguments of all its processes."""
    command = [sys.executable, "-m", "trigon", "train", *arguments]
    output = folder.parent / "output.txt"
    commands: set[str] = set()
    with output.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **environment})
        try:
            deadline = time.monotonic() + 600
            while process.poll() is None:
                assert time.monotonic() < deadline, output.read_text()
                commands |= command_lines()
                time.sleep(0.2)
        finally:
            process.terminate()
            process.wait(timeout=120)
    return process.returncode, output.read_text(), commands


def command_lines() -> set[str]:
    """Return the arguments of every process of this machine."""
    lines = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.add(path.read_bytes().decode(errors="replace"))
        except OSError:  # it has ended
            continue
    return lines


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [1, 2], ids=["one worker", "two workers"])
def test_no_file_line_tracker_or_process_of_a_run_has_a_key_that_its_reward_function_has(made, tmp_path, num_workers):
    folder, calls = tmp_path / "run", tmp_path / "calls.jsonl"
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "wandb.py").write_text(TRACKER)
    values = yaml.safe_load(CONFIG.read_text())
    kwargs = {"judge": {"api_key": IN_FILE}, "api_key": "env:JUDGE_KEY"}
    values.setdefault("worker", {}).setdefault("reward", {})["reward_function_kwargs"] = kwargs
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(values))
    config.chmod(0o600)
    overrides = [
        *overrides_of(made, folder, steps=2),
        f"worker.reward.reward_function={tmp_path / 'reward.py'}:compute_score",
        "worker.reward.max_failed_fraction=1",
        "trainer.logger=[console,file,tensorboard,wandb]",
        "trainer.val_generations_to_log=2",
        f"trainer.n_gpus_per_node={num_workers}",
    ]
    paths = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}", "TRACKER_CALLS": str(calls)}

    status, output, _ = run(made, folder, str(config), *overrides, environment=paths)
    assert status == 1
    assert f"{KWARGS}.api_key is env:JUDGE_KEY, but the environment variable JUDGE_KEY is not set" in output
    assert "loading the model" not in output

    environment = {**paths, "JUDGE_KEY": IN_VARIABLE}
    status, output, commands = run(made, folder, str(config), *overrides, environment=environment)
    assert status == 0, output[-4000:]
    written = {path: path.read_bytes() for path in [*folder.rglob("*"), calls] if path.is_file()}
    rollouts = b"".join(content for path, content in written.items() if path.parent.name == "rollouts")
    assert f"401: the key {MASKED} is not valid".encode() in rollouts  # the reward function had the keys
    assert f"asking with {MASKED} {MASKED}" in output
    assert any("tfevents" in path.name for path in written)
    assert b'"api_key": "env:JUDGE_KEY"' in written[calls]
    for key in (IN_FILE, IN_VARIABLE):
        assert [path for path, content in written.items() if key.encode() in content] == []
        assert key not in output
        assert [line for line in commands if key in line] == []
    own = yaml.safe_load((folder / "config.yaml").read_text())
    assert own["worker"]["reward"]["reward_function_kwargs"] == {
        "judge": {"api_key": MASKED},
        "api_key": "env:JUDGE_KEY",
    }

    # The run's own configuration: the key is asked for, and with it the run continues.
    status, output, _ = run(made, folder, str(folder / "config.yaml"), environment=environment)
    assert status == 2
    assert f"{KWARGS}.judge.api_key" in output
    assert f"{KWARGS}.judge.api_key=env:NAME" in output
    given = [str(folder / "config.yaml"), f"{KWARGS}.judge.api_key=env:OTHER_KEY", "trainer.max_steps=3"]
    given.append(f"trainer.accept_changes={KWARGS}")  # another variable is another value
    environment["OTHER_KEY"] = IN_FILE
    status, output, commands = run(made, folder, *given, environment=environment)
    assert status == 0, output[-4000:]
    assert "resuming after step 2" in output
    assert IN_FILE not in output
    assert [line for line in commands if IN_FILE in line or IN_VARIABLE in line] == []
