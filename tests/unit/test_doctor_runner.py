"""Checks of a machine: each ends by itself, whatever happens in its process, and is reported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from support import doctor_checks
from support.processes import is_running, wait_until
from trigon.errors import ConfigError
from trigon.tools.doctor.catalogue import CHECKS, choose
from trigon.tools.doctor.report import as_json, console_lines, markdown, summary
from trigon.tools.doctor.result import Findings, Result, Setting
from trigon.tools.doctor.runner import Check, Limits, run_check, run_checks


def run(function, folder: Path, *, seconds: float = 60, factor: float = 1.0) -> Result:
    setting = Setting("cpu", 0, folder, factor)
    return run_check(Check("one", "what it shows", function, seconds), setting, seconds, environment=os.environ)


def test_a_check_passes_with_its_figures(tmp_path):
    result = run(doctor_checks.passes, tmp_path)
    assert (result.status, result.reason, result.last_lines) == ("pass", "", "")
    assert result.findings == Findings({"speed": "3 m/s"}, (), ("a note",), "a | table")
    assert result.seconds > 0


@pytest.mark.parametrize(
    ("function", "reason", "last_line"),
    [
        (doctor_checks.has_problems, "too slow; too old", "it printed this"),
        (
            doctor_checks.raises,
            "ValueError: a tensor is on another device",
            "ValueError: a tensor is on another device",
        ),
        (doctor_checks.is_killed, "its process was ended by SIGKILL", "before the crash"),
        (doctor_checks.exits, "its process ended with status 3 and no output", ""),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_failing_check_is_reported_with_its_reason_and_its_last_lines(tmp_path, function, reason, last_line):
    result = run(function, tmp_path)
    assert (result.status, result.reason) == ("fail", reason)
    assert result.last_lines.splitlines()[-1:] == ([last_line] if last_line else [])


@pytest.mark.extended
def test_a_check_that_hangs_is_ended_with_the_processes_that_it_started(tmp_path):
    start = time.monotonic()
    result = run(doctor_checks.hangs, tmp_path, seconds=6)
    assert (result.status, result.reason) == ("fail", "it did not end within 6 s")
    assert result.last_lines == "waiting"
    assert time.monotonic() - start < 20
    wait_until(lambda: not is_running(int((tmp_path / "pid").read_text())))  # killed, but not a child of this process


def test_a_check_that_does_not_apply_is_skipped_with_the_reason(tmp_path):
    result = run(doctor_checks.skips, tmp_path)
    assert (result.status, result.reason, result.last_lines) == ("skipped", "needs a GPU", "")


@pytest.mark.parametrize(
    ("difference", "factor", "status"),
    [(0.1, 1.0, "pass"), (0.11, 1.0, "fail"), (0.11, 2.0, "pass"), (0.1, 0.5, "fail"), (float("nan"), 1.0, "fail")],
)
def test_figures_are_compared_with_their_tolerances(tmp_path, difference, factor, status):
    result = run(partial(doctor_checks.compares, difference=difference), tmp_path, factor=factor)
    assert result.status == status
    assert list(result.findings.figures) == ["difference"]
    assert result.reason.startswith(f"difference is {difference:.3g}, accepted " if status == "fail" else "")


@pytest.mark.extended
def test_one_check_does_not_end_the_others_and_none_starts_after_the_time_of_all(tmp_path):
    checks = [
        Check("killed", "", doctor_checks.is_killed, 60),
        Check("passes", "", doctor_checks.passes, 60),
        Check("hangs", "", doctor_checks.hangs, 60),
        Check("late", "", doctor_checks.passes, 60),
    ]
    limits = Limits(total_seconds=8)
    results = list(run_checks(checks, Setting("cpu", 0, tmp_path), limits, environment=os.environ))
    assert [result.status for result in results] == ["fail", "pass", "skipped", "skipped"]
    assert "--only hangs" in results[-2].reason  # it had less than its own time
    assert "--only late" in results[-1].reason


RESULTS = [
    Result("kernels", "pass", 1.25, Findings({"error": "1e-3"}, notes=("no GPU",), text="a ``` table")),
    Result(
        "vllm", "fail", 30.0, Findings({"difference": "0.3"}, ("too large",)), "too | large", "line 1\nError: \x1b[31m"
    ),
    Result("tp2", "skipped", 0.1, Findings(), "needs two GPUs"),
]
TITLES = {"kernels": "Kernels", "vllm": "Parity", "tp2": "Two GPUs"}


def test_the_report_names_every_check_and_shows_why_one_failed():
    text = markdown(RESULTS, TITLES, heading="doctor", seconds=33.3)
    assert "1 passed, 1 failed, 1 skipped in 33 s" in text
    assert "| kernels | pass | 1.2 | Kernels | error 1e-3 |" in text
    assert "| vllm | FAIL | 30.0 | Parity | too \\| large; difference 0.3 |" in text
    assert "| tp2 | skipped | 0.1 | Two GPUs | needs two GPUs |" in text
    assert "````text\na ``` table\n````" in text
    assert "```text\nline 1\nError: \\x1b[31m\n```" in text
    assert "\x1b" not in text
    assert "kernels: no GPU" in text
    content = json.loads(as_json(RESULTS, TITLES, heading="doctor", seconds=33.3))
    assert [check["status"] for check in content["checks"]] == ["pass", "fail", "skipped"]
    assert content["checks"][1]["findings"]["figures"] == {"difference": "0.3"}


def test_the_console_shows_the_reason_before_the_figures():
    lines = console_lines(RESULTS[1], width=8).splitlines()
    assert lines[0] == "FAIL      30.0 s  vllm      too | large"
    assert lines[1].split() == ["difference", "0.3"]
    assert summary(RESULTS, 1.0).startswith("1 passed, 1 failed, 1 skipped")


def test_names_are_unique_and_an_unknown_one_is_an_error():
    names = [check.name for check in CHECKS]
    assert len(names) == len(set(names))
    assert [check.name for check in choose(["quickstart", "kernels"])] == ["kernels", "quickstart"]
    with pytest.raises(ConfigError, match="did you mean kernels"):
        choose(["kernel"])


def test_every_check_is_on_its_page():
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    named = set(re.findall(r"`([\w.-]+)`", "\n".join(re.findall(r"^\|([^|]+)\|", page, flags=re.MULTILINE))))
    assert {"vllm-..." if check.name.startswith("vllm-") else check.name for check in CHECKS} <= named


def test_listing_the_checks_imports_nothing_heavy():
    heavy = ("torch", "transformers", "vllm", "ray", "numpy")
    script = f"import sys, trigon.tools.cli.doctor; print(*(name for name in {heavy!r} if name in sys.modules))"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.split() == []
