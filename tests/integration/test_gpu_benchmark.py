"""benchmarks/gpu.py runs to its end where there is no GPU, and its rows compute the same."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="it takes the GPU that is here")
def test_the_gpu_table_of_a_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--tiny", "--groups", "2", "--repeats", "1"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    rows = {line[:22].strip(): line[22:].split() for line in printed.partition("seconds")[2].splitlines()[1:]}
    assert len(rows) == 11
    measured = {name: cells for name, cells in rows.items() if cells != ["needs", "CUDA"]}
    assert measured.keys() == {"padded", "packed, sdpa", "sdpa instead"}
    assert all(float(cells[-1]) < 1e-5 for cells in measured.values())
    assert all(float(cells[0]) > 0 for cells in measured.values())
    credited, honest = (float(re.search(rf"([\d.e-]+) TFLOP {each}", printed)[1]) for each in ("credited", "honest"))
    assert credited > 2 * honest


def test_without_a_gpu_a_large_model_is_refused(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "--tiny runs on the CPU" in capsys.readouterr().err
