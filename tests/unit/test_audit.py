"""The audit of dependencies never passes without having checked every package."""

from __future__ import annotations

import json

import pytest

import audit_report

pytestmark = pytest.mark.faults

PINS = "# Versions.\nfoo==1.0\nBar_baz==2.0 ; python_version < '3.12'\n"
FOO = {"name": "foo", "version": "1.0", "vulns": []}
BAR = {"name": "bar-baz", "version": "2.0", "vulns": []}
VULNERABLE = {**BAR, "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2.1"]}]}


@pytest.mark.parametrize(
    ("dependencies", "status", "line"),
    [
        ([FOO, BAR], 0, "2 packages checked, 0 known vulnerabilities"),
        ([FOO, VULNERABLE], 1, "bar-baz 2.0: PYSEC-1 CVE-1; corrected in 2.1"),
        ([FOO], 2, "1 of 2 packages were not checked: bar-baz"),
        # What pip-audit 2.10 writes, with status 0, where the service does not know the packages.
        ([{"name": "foo", "skip_reason": "not found"}, BAR], 2, "1 of 2 packages were not checked: foo"),
        ([], 2, "2 of 2 packages were not checked: bar-baz, foo"),
        (None, 2, "pip-audit has written no report"),
    ],
)
def test_status_0_needs_an_answer_for_every_package(tmp_path, capsys, dependencies, status, line):
    constraints, report = tmp_path / "cpu.txt", tmp_path / "report.json"
    constraints.write_text(PINS)
    report.write_text("" if dependencies is None else json.dumps({"dependencies": dependencies}))
    assert audit_report.main(str(constraints), str(report)) == status
    assert line in capsys.readouterr().out
