"""Tests for machines with a GPU: `make gpu-check`. They need an NVIDIA GPU, and most need vLLM.

With TRIGON_GPU_TESTS=cpu they run in small shapes on a CPU, which shows only that they run.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from support.gpu import Figures, Machine, in_own_process

_SECONDS = {"cuda": 300, "cpu": 1200}


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """Return the machine. Skips the test without a GPU."""
    import torch

    if torch.cuda.is_available():
        return Machine("cuda", torch.cuda.device_count(), tmp_path_factory.mktemp("models"))
    if os.environ.get("TRIGON_GPU_TESTS") == "cpu":
        return Machine("cpu", 0, tmp_path_factory.mktemp("models"))
    pytest.skip("torch finds no GPU, which `make gpu-check` needs; TRIGON_GPU_TESTS=cpu runs small shapes on a CPU")


@pytest.fixture
def measure(machine: Machine, record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Return a function that calls another one, in a process of its own, and checks its figures."""

    def run(function: Callable[..., Figures], *arguments: object) -> None:
        figures = in_own_process(function, machine, *arguments, seconds=_SECONDS[machine.device])
        for name, value in figures.values.items():
            record_property(name, value)
        assert figures.wrong == []

    return run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures of all tests, for a bug report."""
    for report in (each for kind in ("passed", "failed") for each in terminalreporter.getreports(kind)):
        if report.user_properties and "tests/gpu/" in report.nodeid:
            terminalreporter.write_line(f"{report.outcome} in {report.duration:.1f} s: {report.nodeid}")
            for name, value in report.user_properties:
                terminalreporter.write_line(f"    {name}: {value}")
