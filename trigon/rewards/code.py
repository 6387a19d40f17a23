"""Digests of a reward function's code, by which a resumed run notices that it is another one.

Of a file: its source, and that of the modules beside it that it imports. Of a Python function or
object: its source, or that of its class, and not what it uses. Of neither: what it reads when it is
called, and installed packages. Of shipped functions the name says which one it is.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trigon.rewards.load import RewardSource, RewardTerm

_MAX_MODULES = 1000


def code_digest(reward: RewardSource | Sequence[RewardTerm]) -> str:
    """Return a digest of a reward's code; "" if it cannot be compared.

    Of a file, comments and spaces do not count. Raises: OSError if the file cannot be read.
    """
    if isinstance(reward, RewardSource):
        if reward.pickled:
            return reward.content
        if reward.module:
            return _digest(reward.module.encode())
        modules = sorted(_local_modules(Path(reward.file)).items())
        parts = [part for name, source in modules for part in (name.encode(), _without_comments(source))]
        return _digest(b"".join(map(_framed, [reward.function.encode(), *parts])))
    terms = [(term.name, term.weight, code_digest(term.source)) for term in reward]
    return _digest(repr(terms).encode()) if all(digest for _, _, digest in terms) else ""


def function_digest(function: object) -> str:
    """Return a digest of the source of a Python function, or of an object's class.

    "" if there is no source, as of what was typed into Python's own prompt.
    """
    while isinstance(function, functools.partial):
        function = function.func
    has_source = inspect.isroutine(function) or inspect.isclass(function)
    code: Any = function if has_source else type(function)
    try:
        return _digest(_without_comments(textwrap.dedent(inspect.getsource(code)).encode("utf-8", "backslashreplace")))
    except (OSError, TypeError):
        return ""


def _local_modules(file: Path) -> dict[str, bytes]:
    """Return the sources of a file and of the modules beside it that it imports, by relative path.

    Found in the source alone: nothing is run. A file that is no Python has no imports.
    """
    sources: dict[str, bytes] = {}
    pending = [file]
    while pending and len(sources) < _MAX_MODULES:
        path = pending.pop()
        name = "" if path == file else path.relative_to(file.parent).as_posix()
        if name not in sources:
            sources[name] = path.read_bytes()
            pending += _imported_files(path, sources[name], file.parent)
    return sources


def _imported_files(path: Path, source: bytes, root: Path) -> Iterator[Path]:
    """Yield the files below root that a module imports."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                modules, folder = [alias.name for alias in names], root
            case ast.ImportFrom(module=module, names=names, level=level):
                modules = [f"{module}.{alias.name}" if module else alias.name for alias in names]
                folder = path.parents[level - 1] if 0 < level <= len(path.parents) else root
            case _:
                continue
        if folder != root and root not in folder.parents:
            continue
        for module in modules:
            parts = module.split(".")
            if parts[0] in sys.stdlib_module_names:
                continue
            for length in range(1, len(parts) + 1):
                place = folder.joinpath(*parts[:length])
                yield from (each for each in (place.with_suffix(".py"), place / "__init__.py") if each.is_file())


def _without_comments(source: bytes) -> bytes:
    """Return a source without comments and spaces; as it is if it is no Python."""
    try:
        return ast.unparse(ast.parse(source)).encode("utf-8", "backslashreplace")
    except (SyntaxError, ValueError, RecursionError):
        return source


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _framed(content: bytes) -> bytes:
    """Return content with its length before it, so that joined parts cannot be confused."""
    return b"%d:" % len(content) + content
