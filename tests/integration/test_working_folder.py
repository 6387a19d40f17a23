"""Runs started in a folder whose files have the names of modules."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.alone, pytest.mark.long]

CLI = "import sys; from trigon.tools.cli.main import main; sys.exit(main(sys.argv[1:]))"
FILES = ("types.py", "random.py", "json.py", "pickle.py", "socket.py", "multiprocessing.py", "enum.py", "yaml.py")
STEPS = [
    "trainer.max_steps=1",
    "trainer.val_before_train=false",
    "data.rollout_batch_size=4",
    "worker.actor.global_batch_size=4",
    "worker.rollout.n=2",
    "worker.rollout.name=transformers",
    "data.max_response_length=4",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with files that raise when they are imported, and a folder trigon/trigon."""
    (tmp_path / "trigon" / "trigon").mkdir(parents=True)
    for name in FILES:
        (tmp_path / name).write_text(f"raise RuntimeError('{name} of the working folder was imported')\n")
    return tmp_path


def run(folder: Path, *arguments: str) -> str:
    """Return the output of a command, run as its script does: not from the working folder."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "200"}
    command = [sys.executable, "-P", "-c", CLI, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_quickstart_does_not_import_from_the_working_folder(folder):
    output = run(folder, "quickstart", "--folder", "run", *STEPS)
    assert "of the working folder was imported" not in output
    assert (folder / "run" / "model" / "config.json").is_file()
    # and with Ray's workers, on the model and the data that are there now
    made = folder / "run" / "made" / "qwen2_5_vl_seed0"
    output = run(
        folder, "train", f"data.train_files={made}/data/train.parquet", f"worker.actor.model.model_path={made}/model",
        *STEPS, "worker.reward.reward_function=math", "trainer.n_gpus_per_node=2", "trainer.device=cpu",
        "data.prompt_key=problem", "trainer.save_checkpoint_path=many", "trainer.logger=console",
        "algorithm.disable_kl=true",
    )  # fmt: skip
    assert "of the working folder was imported" not in output
