"""The memory of passes of a model of 40 M parameters: by arithmetic, and measured on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from support.engines import make_engine
from support.memory import measure

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from shared import SHORT, VOCABULARY, make_folder

pytestmark = pytest.mark.long

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model"), vocabulary=VOCABULARY, shape=SHORT)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize(("dtype", "compute_dtype"), [(FLOAT32, None), (FLOAT32, BFLOAT16), (BFLOAT16, None)], ids=str)
def test_the_arithmetic_of_a_pass_agrees_with_its_measured_peak(model, dtype, compute_dtype, checkpointing):
    engine = make_engine(model, dtype=dtype, compute_dtype=compute_dtype, checkpointing=checkpointing)
    assert 35e6 < engine.sizes().parameters < 45e6
    peaks = measure(engine, checkpointing=checkpointing, compute_dtype=compute_dtype)
    assert peaks.update_counted.total == pytest.approx(peaks.update, rel=0.15), peaks.update_counted
    assert peaks.score_counted.total == pytest.approx(peaks.score, rel=0.15), peaks.score_counted
