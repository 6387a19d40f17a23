"""benchmarks/gpu.py completes on a machine without a GPU, and its variants compute the same."""

from __future__ import annotations

import re
import runpy
import sys

import pytest
import torch

from support.gpu import BENCHMARKS

pytestmark = pytest.mark.extended

SCRIPT = BENCHMARKS / "gpu.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would use the GPU of this machine")
def test_on_a_cpu_the_available_variants_are_measured_and_agree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--tiny", "--groups", "2", "--repeats", "1", "--profile", "with sdpa"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    printed, _, profile = printed.partition("\nwith sdpa, one update:\n")
    assert "aten::mm" in profile
    rows = {line[:22].strip(): line[22:].split() for line in printed.partition("seconds")[2].splitlines()[1:]}
    assert len(rows) == 12
    measured = {name: cells for name, cells in rows.items() if cells != ["needs", "CUDA"]}
    assert measured.keys() == {"padded", "packed, sdpa", "with sdpa"}
    assert all(float(cells[-1]) < 1e-5 for cells in measured.values())
    assert all(float(cells[0]) > 0 for cells in measured.values())
    repeated, shared = (float(re.search(rf"([\d.e-]+) TFLOP {each}", printed)[1]) for each in ("repeated", "shared"))
    assert repeated > 2 * shared


def test_without_a_gpu_a_large_model_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "--tiny runs on the CPU" in capsys.readouterr().err
