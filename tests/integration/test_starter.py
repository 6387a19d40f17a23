"""`trigon init --tiny` as a user runs it: the folder is checked, tested and trained."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.extended


def test_the_folder_of_init_passes_the_checks_and_trains(tmp_path):
    trigon = [sys.executable, "-m", "trigon"]

    def call(*command, folder=tmp_path / "start"):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    assert "next:" in call(*trigon, "init", "start", "--tiny", folder=tmp_path)
    assert " 0 with warnings, 0 failed" in call(*trigon, "check", "run.yaml")
    call(sys.executable, "reward.py")
    call(*trigon, "train", "run.yaml", "trainer.max_steps=2")
    # What trigon push reads, to name no path as a hub id.
    local = json.loads((tmp_path / "start" / "run" / "local_sources.json").read_text())
    assert local == {name: str(tmp_path / "start" / name) for name in ("./model", "data.jsonl", "reward.py")}
    lines = (tmp_path / "start" / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line)["metrics"] for line in lines]
    rewards = [each["reward/overall"] for each in metrics if "reward/overall" in each]
    assert len(rewards) == 2
    assert all(reward > 0.1 for reward in rewards)  # after the warm start it is right in part
