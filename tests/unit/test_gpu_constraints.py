"""The check of constraints/gpu.txt on a few invented packages; .ci/run runs the real one."""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement

from gpu_constraints import Package, compare, marker_environment, needed_packages


def package(version: str, *requires: str, url: str = "") -> Package:
    return Package(version, url, tuple(map(Requirement, requires)))


PACKAGES = {
    "a": package("1.0", 'old; python_version < "3.12"', 'new; python_version >= "3.12"', "b[fast]>=2"),
    "b": package("2.0", 'kernels; extra == "fast"', 'docs; extra == "docs"', 'c; sys_platform == "win32"'),
    "kernels": package("0.1+cu130", "b"),
    "old": package("1.0"),
    "unused": package("1.0"),
}


@pytest.mark.parametrize(
    ("wanted", "python", "needed", "missing"),
    [
        (["a"], "3.11", {"a", "b", "kernels", "old"}, []),
        (["a"], "3.12", {"a", "b", "kernels"}, ["new"]),
        (["b"], "3.12", {"b"}, []),
        (["b", "b[fast,docs]"], "3.12", {"b", "kernels"}, ["docs"]),
    ],
)
def test_markers_are_those_of_the_given_python_and_extras_those_that_are_requested(
    wanted: list[str], python: str, needed: set[str], missing: list[str]
) -> None:
    assert needed_packages(wanted, PACKAGES, marker_environment(python)) == (needed, missing)


def test_unpinned_different_and_unneeded_packages_are_reported() -> None:
    resolved = {"3.12": {"a": PACKAGES["a"], "b": PACKAGES["b"], "kernels": PACKAGES["kernels"]}}
    assert compare({"a": "1.0", "b": "2.0", "kernels": "0.1"}, resolved) == []  # +cu130 is the same version
    assert compare({"a": "1.1", "kernels": "0.1", "unused": "1.0"}, resolved) == [
        "Python 3.12 would install a 1.0, the file has 1.1",
        "Python 3.12 would install b 2.0, which the file does not pin",
        "no Python needs unused, which the file pins",
    ]
