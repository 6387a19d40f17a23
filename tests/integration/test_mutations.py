"""Each guard is broken on purpose, one edit at a time, and the tests named for it must fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from support.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.faults
in_full = pytest.mark.skipif(
    settings.get_current_profile_name() != "faults", reason="takes minutes: runs with `make test-faults`"
)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the package beside the tests, which import it from there."""
    folder = tmp_path_factory.mktemp("mutations")
    shutil.copytree(ROOT / "trigon", folder / "trigon", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests", "scripts", "docs", "examples", "pyproject.toml", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def run_tests(copied: Path, mutation: Mutation) -> subprocess.CompletedProcess[str]:
    """Run the tests of a mutation with the package in `copied`."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", str(mutation.seconds)]
    return subprocess.run(
        [*command, f"tests/{mutation.test}", "-k", mutation.names],
        cwd=copied,
        env={**os.environ, "PYTHONPATH": str(copied), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=400,
    )


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.guard)
def test_the_edit_applies_and_its_tests_exist(mutation):
    assert (ROOT / "trigon" / mutation.file).read_text(encoding="utf-8").count(mutation.old) == 1
    assert mutation.new not in ("", mutation.old)
    assert (ROOT / "tests" / mutation.test).is_file()


def test_there_are_at_least_twenty_guards():
    assert len({mutation.guard for mutation in MUTATIONS}) == len(MUTATIONS) >= 20


@in_full
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.guard)
def test_a_broken_guard_is_noticed(copied, mutation):
    file = copied / "trigon" / mutation.file
    text = file.read_text(encoding="utf-8")
    unchanged = run_tests(copied, mutation)
    assert unchanged.returncode == 0, unchanged.stdout[-2000:]
    assert " passed" in unchanged.stdout, "no test was run"
    file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        broken = run_tests(copied, mutation)
    finally:
        file.write_text(text, encoding="utf-8")
    assert broken.returncode == 1, f"the tests pass without this guard: {mutation.test} -k '{mutation.names}'"
    assert " failed" in broken.stdout or " error" in broken.stdout, broken.stdout[-2000:]
