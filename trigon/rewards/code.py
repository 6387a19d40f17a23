"""Digests of a reward function's code, by which a resumed run notices that it is another one.

Of a file: its source, and that of the modules beside it that it imports. Of a Python function: its
bytecode, its defaults, and the variables and functions that it uses. Of neither: what it reads when
it is called, and installed packages. Of shipped functions the name says which one it is.
"""

from __future__ import annotations

import ast
import copyreg
import functools
import hashlib
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from trigon.rewards.load import RewardSource, RewardTerm

PYTHON = f"py{sys.version_info.major}.{sys.version_info.minor}:"
"""Begins digests that are comparable within one version of Python only."""

_MAX_MODULES = 1000
_MAX_DEPTH = 100


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
    if not all(digest for _, _, digest in terms):
        return ""
    kind = PYTHON if any(digest.startswith(PYTHON) for _, _, digest in terms) else ""
    return kind + _digest(repr(terms).encode())


def is_comparable(first: str, second: str) -> bool:
    """Return whether two digests tell if the code is the same: both are known, and of one kind."""
    kinds = {digest.rpartition(":")[0] for digest in (first, second)}
    return bool(first and second) and len(kinds) == 1


def function_digest(function: object) -> str:
    """Return a digest of a Python function, with the plain values and functions that it uses.

    Numbers, texts, lists, dicts, sets, arrays, functions and classes are compared by content; of
    other objects what pickle keeps of them is. "" if they cannot be read.
    """
    content = _Content()
    try:
        content.add(function)
    except Exception:  # noqa: BLE001 - objects of the user may raise anything, for example in repr
        return ""
    return PYTHON + content.digest.hexdigest()[:32]


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


class _Content:
    """Adds the content of values to a digest.

    An object that comes again, also inside of itself, is named by the number of its first time.
    """

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self._seen: dict[int, tuple[int, object]] = {}  # by id: its number, and the object, which keeps the id in use

    def add(self, value: Any, depth: int = 0) -> None:
        """Add a value, and everything that it consists of."""
        self._write(f"{type(value).__module__}.{type(value).__qualname__}".encode())
        if isinstance(value, bool | int | float | complex | str | bytes | None):
            self._write(repr(value).encode("utf-8", "backslashreplace"))
            return
        if not isinstance(value, tuple | CodeType):  # constants, which may be one object or several equal ones
            is_new = id(value) not in self._seen
            number, _ = self._seen.setdefault(id(value), (len(self._seen), value))
            self._write(b"object %d" % number)
            if not is_new or depth > _MAX_DEPTH:
                return
        for part in self._parts(value):
            self.add(part, depth + 1)

    def _write(self, content: bytes) -> None:
        self.digest.update(_framed(content))

    def _parts(self, value: Any) -> Sequence[Any]:
        """Return what a value consists of, as far as it can be compared."""
        match value:
            case list() | tuple():
                return [len(value), *value]
            case set() | frozenset():
                return sorted(repr(item) for item in value)
            case Mapping():
                return [each for key in sorted(value, key=repr) for each in (key, value[key])]
            case CodeType():
                counts = (value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags)
                names = (value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars)
                return [value.co_code, counts, names, value.co_consts]
            case FunctionType() if _is_of_user(value.__module__):
                variables = {name: value.__globals__[name] for name in _names_in(value) & value.__globals__.keys()}
                return [value.__code__, value.__defaults__, value.__kwdefaults__, _captured(value), variables]
            case type() if _is_of_user(value.__module__):
                routines = {name: each for name, each in vars(value).items() if inspect.isroutine(each)}
                return [value.__qualname__, value.__bases__, routines]
            case FunctionType() | type():
                return [value.__module__, value.__qualname__]
            case MethodType():
                return [value.__func__, value.__self__]
            case staticmethod() | classmethod():
                return [value.__func__]
            case functools.partial():
                return [value.func, value.args, value.keywords]
            case ModuleType():
                return [value.__name__]
            case _:
                return _reduced(value)


def _reduced(value: Any) -> list[Any]:
    """Return what pickle would keep of an object, and nothing if it cannot be pickled."""
    reduce = copyreg.dispatch_table.get(type(value))
    try:
        reduced: Any = value.__reduce_ex__(2) if reduce is None else reduce(value)
    # Whatever the __reduce__ of an object raises; cloudpickle can pickle more than pickle.
    except Exception:  # noqa: BLE001
        return []
    return [reduced] if isinstance(reduced, str) else list(reduced[:3])


def _is_of_user(module: str | None) -> bool:
    """Return whether a module is the user's own, neither of Python nor installed."""
    if module is None or module == "__main__":  # its file may be that of a notebook's kernel
        return True
    if module.partition(".")[0] in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or not {"site-packages", "dist-packages"} & set(Path(file).parts)


def _names_in(function: FunctionType) -> set[str]:
    """Return the names that a function and those inside of it use, global variables among them."""
    names: set[str] = set()
    pending = [function.__code__]
    while pending:
        code = pending.pop()
        names |= set(code.co_names)
        pending += [each for each in code.co_consts if isinstance(each, CodeType)]
    return names


def _captured(function: FunctionType) -> list[Any]:
    """Return the values of the variables of a closure, in the order of their names."""
    values: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # it has no value yet
            values.append("")
    return values


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _framed(content: bytes) -> bytes:
    """Return content with its length before it, so that joined parts cannot be confused."""
    return b"%d:" % len(content) + content
