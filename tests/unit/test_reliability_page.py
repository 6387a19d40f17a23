"""Every test that the page on reliability names exists."""

import ast
from functools import cache
from pathlib import Path

import pytest

from support.tiers import RELIABILITY, named_faults

TESTS = Path(__file__).parents[1]


@cache
def functions_in(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize(("file", "name"), named_faults())
def test_a_named_test_exists(file, name):
    assert name in functions_in(file) if name else functions_in(file)


def test_every_row_of_a_fault_names_a_test():
    rows = [line for line in RELIABILITY.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    faults = [row for row in rows if not row.startswith(("| fault |", "| measured |")) and row.count(" | ") == 3]
    assert len(faults) >= 25
    assert [row for row in faults if "`tests/" not in row] == []
    results = [row.rstrip(" |").rpartition(" | ")[2] for row in faults]
    assert [result for result in results if not result or result.replace("_", "").isupper()] == []
