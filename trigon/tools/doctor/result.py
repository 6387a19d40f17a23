"""What a check is given, and what it returns. Imports nothing heavy."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Device = Literal["cpu", "cuda"]
Status = Literal["pass", "fail", "skipped"]


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and how a check runs.

    device: on "cpu" a check uses small shapes.
    num_gpus: that torch finds; 0 on the CPU.
    folder: for files, shared by all checks of one call, so that models are made once.
    tolerance_factor: every tolerance is multiplied by it.
    """

    device: Device
    num_gpus: int
    folder: Path
    tolerance_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Findings:
    """What a check found.

    figures: measured values by name, with their units, in the order in which they are shown.
    problems: what is wrong; the check fails if there is any.
    notes: what a user should know, without failing.
    text: tables and other text, shown as it is.
    """

    figures: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    text: str = ""


class CheckSkipped(Exception):
    """Raised by a check that does not apply to this machine. The message is the reason."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one check.

    problems: why it failed; reason: why it was skipped. last_lines: of the output of a failed
    check's process.
    """

    name: str
    status: Status
    seconds: float
    findings: Findings
    reason: str = ""
    last_lines: str = ""


def require_packages(*modules: str) -> None:
    """Raise CheckSkipped unless these modules are installed. They are not imported."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise CheckSkipped(f"needs {' and '.join(missing)}, not installed here; `trigon doctor` names the command")


class Tolerances:
    """Collects figures and compares them with their tolerances."""

    def __init__(self, setting: Setting) -> None:
        self._factor = setting.tolerance_factor
        self.figures: dict[str, str] = {}
        self.problems: list[str] = []

    def at_most(self, name: str, value: float, tolerance: float) -> None:
        """Record a figure; it is a problem if it exceeds the tolerance, or is not a number."""
        limit = tolerance * self._factor
        self.figures[name] = f"{value:.2g}"
        if not value <= limit:
            self.problems.append(f"{name} is {value:.3g}, accepted {limit:.3g}")

    def at_least(self, name: str, value: float, minimum: float) -> None:
        """Record a figure; it is a problem if it is below the minimum, or is not a number.

        The minimum shows that a comparison detects what it should; no factor applies.
        """
        self.figures[name] = f"{value:.2g}"
        if not value >= minimum:
            self.problems.append(f"{name} is {value:.3g}, expected at least {minimum:.3g}")

    def findings(self, *, notes: tuple[str, ...] = (), text: str = "") -> Findings:
        """Return what was recorded."""
        return Findings(self.figures, tuple(self.problems), notes, text)


def bytes_text(num_bytes: float) -> str:
    """Return bytes as text: "12.3 GiB", below 1 GiB "12.3 MiB"."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
