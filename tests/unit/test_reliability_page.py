"""Every test that the page on reliability names exists, and is one of `make test-faults`."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.faults

TESTS = Path(__file__).parents[1]
RELIABILITY = TESTS.parent / "docs" / "reliability.md"


def named_tests() -> list[tuple[str, str]]:
    """Return the (file, function) that the page names; "": all of the file."""
    return sorted(set(re.findall(r"`tests/([\w/]+\.py)(?:::(\w+))?`", RELIABILITY.read_text(encoding="utf-8"))))


@cache
def fault_tests_in(file: str) -> dict[str, bool]:
    """Return the tests of a file -> whether they, or the whole file, are marked as faults."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    of_file = any(
        isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark" and has_fault_mark(node.value)
        for node in tree.body
    )
    return {
        node.name: of_file or any(map(has_fault_mark, node.decorator_list))
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def has_fault_mark(node: ast.expr) -> bool:
    return "pytest.mark.faults" in ast.unparse(node)


@pytest.mark.parametrize(("file", "name"), named_tests())
def test_a_named_test_exists_and_is_marked_as_a_fault(file, name):
    tests = fault_tests_in(file)
    assert tests[name] if name else tests and all(tests.values())


def test_every_row_of_a_fault_names_a_test():
    rows = [line for line in RELIABILITY.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    faults = [row for row in rows if not row.startswith(("| fault |", "| measured |")) and row.count(" | ") == 3]
    assert len(faults) >= 25
    assert [row for row in faults if "`tests/" not in row] == []
    results = [row.rstrip(" |").rpartition(" | ")[2] for row in faults]
    assert [result for result in results if not result or result.replace("_", "").isupper()] == []
