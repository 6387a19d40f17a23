"""Each guard is broken on purpose, one edit at a time, and the tests named for it must fail."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from support.mutations import MUTATIONS

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the package beside the tests, which import it from there."""
    folder = tmp_path_factory.mktemp("mutations")
    shutil.copytree(ROOT / "trigon", folder / "trigon", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests", "scripts", "docs", "examples", "pyproject.toml", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    return folder


class Ended(NamedTuple):
    """How tests ended. status: of pytest, or minus the number of the signal that ended it."""

    status: int
    output: str


@pytest.fixture(scope="module")
def run_tests(copied: Path) -> Iterator[Callable[[str, str, int], Ended]]:
    """Return a function that runs tests of a file with the package in `copied`.

    Called with the file, an expression of `pytest -k`, and seconds: a test that takes longer ends
    the run with status 1, since an exception in its thread might be handled by the code under test.
    """
    server = subprocess.Popen(
        [sys.executable, "-m", "support.forked_tests"],
        cwd=copied,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(copied), str(ROOT / "tests")]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_ADDOPTS": "",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def run(test: str, names: str, seconds: int) -> Ended:
        limit = ["--timeout", str(seconds), "--timeout-method", "thread"]
        imported = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # the libraries are before pytest begins
        arguments = ["-q", "-x", "-p", "no:cacheprovider", *imported, *limit, f"tests/{test}", "-k", names]
        output = copied / "output.txt"
        output.unlink(missing_ok=True)
        print(json.dumps([arguments, str(output), 400]), file=server.stdin, flush=True)
        status = server.stdout.readline()
        assert status, "the process that runs the tests has ended"
        return Ended(int(status), output.read_text(encoding="utf-8", errors="replace"))

    with server:
        yield run
        server.stdin.close()


@pytest.fixture(scope="module")
def unchanged(run_tests: Callable[[str, str, int], Ended]) -> Callable[[str], Ended]:
    """Return a function that runs the tests of all mutations in a test file, with no edit, once."""

    @cache
    def run(test: str) -> Ended:
        mutations = [mutation for mutation in MUTATIONS if mutation.test == test]
        return run_tests(test, " or ".join(f"({mutation.names})" for mutation in mutations), 90)

    return run


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.guard)
def test_the_edit_applies_and_its_tests_exist(mutation):
    assert (ROOT / "trigon" / mutation.file).read_text(encoding="utf-8").count(mutation.old) == 1
    assert mutation.new not in ("", mutation.old)
    assert (ROOT / "tests" / mutation.test).is_file()


def test_there_are_at_least_twenty_guards():
    assert len({mutation.guard for mutation in MUTATIONS}) == len(MUTATIONS) >= 20


@pytest.mark.long
@pytest.mark.faults
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.guard)
def test_a_broken_guard_is_noticed(copied, run_tests, unchanged, mutation):
    file = copied / "trigon" / mutation.file
    text = file.read_text(encoding="utf-8")
    assert unchanged(mutation.test).status == 0, unchanged(mutation.test).output[-2000:]
    file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        broken = run_tests(mutation.test, mutation.names, mutation.seconds)
    finally:
        file.write_text(text, encoding="utf-8")
    assert broken.status == 1, (
        f"tests/{mutation.test} -k '{mutation.names}' ends with status {broken.status}: {broken.output[-2000:]}"
    )
    assert any(word in broken.output for word in (" failed", " error", "Timeout")), broken.output[-2000:]
