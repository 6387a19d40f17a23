"""Suggests the known name nearest to a misspelled one, for error messages.

Imports only the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name most similar to a name, or None if none is similar enough.

    Failing that, a known name that the name starts with: "sequence" gives "seq".
    cutoff: the least similarity in [0, 1], as in `difflib.get_close_matches`.
    """
    names = list(known)
    similar = get_close_matches(name, names, n=1, cutoff=cutoff)
    return similar[0] if similar else next((other for other in names if other and name.startswith(other)), None)


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return "; did you mean grpo?" with the nearest known name, or "" if there is none."""
    suggestion = nearest(name, known, cutoff=cutoff)
    return f"; did you mean {suggestion}?" if suggestion else ""


def nearest_file(path: Path, pattern: str = "*") -> str | None:
    """Return the name of a path's folder that is most similar to the path's own, or None."""
    names = sorted(entry.name for entry in path.parent.glob(pattern)) if path.parent.is_dir() else []
    return nearest(path.name, names)


def nearest_key(key: str, known: Iterable[str]) -> str:
    """Return the dotted key most similar to a key, by its full name and its last part together.

    Example: "lr" gives "worker.actor.optim.lr".
    """

    def similarity(other: str) -> float:
        full = SequenceMatcher(None, key, other).ratio()
        last_part = SequenceMatcher(None, key.rpartition(".")[2], other.rpartition(".")[2]).ratio()
        return full + last_part

    return max(known, key=similarity)


def missing_package(error: BaseException) -> str:
    """Return the hint to install the package that an import did not find, or ""."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    package = error.name.partition(".")[0]
    return f" (it imports {package!r}, which is not installed; install it with pip, or remove the import)"
