"""Reward functions as objects: pickled, so that reward workers can have them, and compared by code.

Functions of notebooks and scripts (`__main__`), lambdas and closures are pickled with their code,
and with the variables that they use. Functions of modules that can be imported are pickled as
their name, and imported again in the workers.

By the digest of a reward function's code, a resumed run notices another function. The digest of a
file covers its source, and the source of modules beside it that it imports. The digest of a Python
function or object covers its source, or the source of its class, and not what it uses. Neither
covers what the function reads when it is called, or installed packages. A shipped function is
identified by its name.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trigon.errors import RewardError
from trigon.rewards.contract import detect_contract, short_repr, unwrap
from trigon.rewards.load import (
    RewardTerm,
    check_reward_images,
    find_reward,
    find_source,
    spec_name,
    unique_name,
)
from trigon.system.user_code import CodeSource, pickle

_MAX_MODULES = 1000

RewardFunction = Callable[..., Any]
"""A reward function by one of the contracts of trigon.rewards.contract.

A function of a single argument whose name and annotation say nothing scores one completion.
"""

Reward = str | RewardFunction | Sequence[RewardFunction | str | tuple[RewardFunction | str, float] | Mapping[str, Any]]
"""`file.py:function` or a shipped name, a function, or several of them, with weights (default: 1).

One of several may also be a mapping {"function", "name", "weight", "kwargs"}, as in YAML.
"""


def reward_terms(reward: Reward, *, kwargs: Mapping[str, Any]) -> tuple[RewardTerm, ...]:
    """Return what RewardPool takes for a reward that is text, a function, or several of them.

    kwargs: worker.reward.reward_function_kwargs, for a single function.
    Raises: RewardError if a function cannot be pickled, naming the object that cannot, if it fits
    no contract, if a weight is not a finite number, or if several have kwargs together.
    """
    if isinstance(reward, str):
        return find_reward(reward, kwargs)
    if callable(reward):
        return (RewardTerm("", 1.0, _pickled(reward, kwargs), kwargs),)
    if not isinstance(reward, Sequence) or not reward:
        raise RewardError(
            f"reward is {short_repr(reward)}; give a function, a list of (function, weight), or file.py:function"
        )
    if kwargs:
        raise RewardError(
            f"worker.reward.reward_function_kwargs are arguments of a single reward function, and there are "
            f"{len(reward)}; give each its own"
        )
    terms: list[RewardTerm] = []
    for entry in reward:
        function, weight, term_kwargs, name = _read_entry(entry)
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not math.isfinite(weight):
            raise RewardError(f"reward has {short_repr(weight)} as the weight of {name_of(function)!r}; it is a number")
        source = find_source(function) if isinstance(function, str) else _pickled(function, term_kwargs)
        name = unique_name(name or name_of(function), [term.name for term in terms])
        terms.append(RewardTerm(name, float(weight), source, term_kwargs))
    return tuple(terms)


def _read_entry(entry: object) -> tuple[RewardFunction | str, Any, Mapping[str, Any], str]:
    """Return function, weight, keyword arguments and name of one of several; "" without a name."""
    known: dict[str, Any] = {"function": None, "weight": 1, "kwargs": {}, "name": ""}
    if isinstance(entry, Mapping) and entry.keys() <= known.keys():
        function, weight, kwargs, name = (known | dict(entry)).values()
    else:
        function, weight = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, 1)
        kwargs, name = {}, ""
    is_function = isinstance(function, str) or callable(function)
    if not is_function or not isinstance(kwargs, Mapping) or re.fullmatch(r"\w*", str(name)) is None:
        raise RewardError(
            f"reward has {short_repr(entry)}; each entry is a function, (function, weight), or a dict of function, "
            "weight, kwargs and name, a word. A function may be the text file.py:function"
        )
    return function, weight, kwargs, str(name)


def describe_reward(reward: Reward) -> str:
    """Return a reward as text for the configuration of the run. Its weights are not checked."""
    if isinstance(reward, str) or not isinstance(reward, Sequence):
        return name_of(reward)
    entries = [_read_entry(each) for each in reward]
    return " + ".join(f"{weight} * {name or name_of(function)}" for function, weight, _, name in entries)


def name_of(function: RewardFunction | str) -> str:
    """Return the name of a reward function: letters, digits and _."""
    if isinstance(function, str):
        return spec_name(function)
    named = unwrap(function)
    name = getattr(named, "__name__", type(named).__name__)
    return re.sub(r"\W+", "_", name).strip("_") or "reward"


def _pickled(function: RewardFunction, kwargs: Mapping[str, Any]) -> CodeSource:
    name = name_of(function)
    # Only for the errors: the pickle is not there yet.
    where = f"reward function {name!r}"
    takes_images = check_reward_images(_declared(function, "REWARD_IMAGES") or False, where=where)
    reward_type = _declared(function, "REWARD_TYPE")
    contract = detect_contract(function, reward_type, kwargs, where=where, single="sequential")
    given = function, contract, takes_images
    pickled = pickle(given, where=where, instead="reward='file.py:function'", error=RewardError)
    return CodeSource("reward function", name, pickled=pickled, content=function_digest(function))


def _declared(function: RewardFunction, name: str) -> object:
    """Return what a function, or its module, declares by a name; None if it does not."""
    given = unwrap(function)
    code = inspect.getattr_static(given, "__call__", None) if isinstance(given, type) else given
    return getattr(given, name, getattr(code, "__globals__", {}).get(name))


def code_digest(terms: Sequence[RewardTerm]) -> str:
    """Return a digest of a reward's code, of several with names and weights.

    "" if it cannot be compared. Raises: as source_digest.
    """
    if not terms[0].name:
        return source_digest(terms[0].source)
    parts = [(term.name, term.weight, source_digest(term.source)) for term in terms]
    return _digest(repr(parts).encode()) if all(digest for _, _, digest in parts) else ""


def source_digest(source: CodeSource) -> str:
    """Return a digest of a function's code; "" if it cannot be compared.

    Comments and spaces in a file do not count. Raises: OSError if the file cannot be read.
    """
    if source.pickled:
        return source.content
    if source.module:
        return _digest(source.module.encode())
    modules = sorted(_local_modules(Path(source.file)).items())
    parts = [part for name, text in modules for part in (name.encode(), _without_comments(text))]
    return _digest(b"".join(map(_framed, [source.name.encode(), *parts])))


def function_digest(function: object) -> str:
    """Return a digest of the source of a Python function, or of an object's class.

    "" if there is no source, as for code that was typed into Python's own prompt.
    """
    function = unwrap(function)
    code: Any = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
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
