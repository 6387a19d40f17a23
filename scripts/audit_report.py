#!/usr/bin/env python3
"""Prints what pip-audit found in a file of constraints, and says whether it checked all of it.

scripts/audit_report.py CONSTRAINTS REPORT      REPORT: pip-audit's output in JSON

Exit status 0: no vulnerability is known. 1: one is. 2: no report, or packages that were not
checked. Needs the standard library only.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path


def main(constraints: str, report: str) -> int:
    """Print the findings, and return the exit status."""
    names = pinned(Path(constraints))
    try:
        entries = json.loads(Path(report).read_bytes())["dependencies"]
    except (OSError, ValueError, KeyError, TypeError):
        print(f"{constraints}: pip-audit has written no report")
        return 2
    checked = {normalized(entry["name"]) for entry in entries if "vulns" in entry}
    found = [
        (entry["name"], entry["version"], vulnerability)
        for entry in entries
        for vulnerability in entry.get("vulns", ())
    ]
    for name, version, vulnerability in found:
        fixed = ", ".join(vulnerability["fix_versions"]) or "no version yet"
        aliases = " ".join([vulnerability["id"], *vulnerability.get("aliases", ())])
        print(f"{constraints}: {name} {version}: {aliases}; corrected in {fixed}")
    missing = sorted(names - checked)
    if not names or missing:
        print(f"{constraints}: {len(missing)} of {len(names)} packages were not checked: {', '.join(missing[:10])}")
        return 2
    print(f"{constraints}: {len(checked)} packages checked, {len(found)} known vulnerabilities")
    return 1 if found else 0


def pinned(path: Path) -> set[str]:
    """Return the names of the packages in a file of constraints."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return {normalized(line.partition("==")[0]) for line in lines if "==" in line and not line.startswith("#")}


def normalized(name: str) -> str:
    """Return a package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
