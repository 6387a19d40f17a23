"""The user's code: reward functions, environments and tools. Runs its file, or unpickles it.

The only place that does either. load_module and unpickle are called in the processes that run user
code, and nowhere else. Does not know what is asked of the code: the callers' errors say that.
"""

from __future__ import annotations

import base64
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from trigon.errors import TrigonError
from trigon.system.terminal import did_you_mean, missing_package

MAX_PICKLE_BYTES = 256 << 20
"""Maximum size of a pickled object with all that it captures; each of its processes loads it."""

_MAX_ERROR_CHARACTERS = 300
_MAX_TRACEBACK_CHARACTERS = 4000


@dataclass(frozen=True, slots=True)
class CodeSource:
    """The location of a reward function, an environment or a tool.

    name: the name of the function or the class. file: an absolute path, or "". module: a module
    that can be imported, or "". pickled: what pickle returned, or "". content: a digest of what is
    pickled, which unlike the pickle is the same in every process, or "". A tool with none of these
    is a built-in one.

    Example: CodeSource("reward function", "compute_score", file="/home/me/reward.py").
    """

    kind: Literal["reward function", "environment", "tool"]
    name: str
    file: str = ""
    module: str = ""
    pickled: str = field(default="", repr=False)
    content: str = field(default="", repr=False)

    @property
    def where(self) -> str:
        """Its description in error messages."""
        if self.pickled:
            return f"{self.kind} {self.name!r}, given in Python,"
        place = self.file or self.module
        return f"{self.kind} {self.name!r}" + (f" of {place}" if place else "")


def load_module(file: str, module: str, *, error: type[TrigonError]) -> ModuleType:
    """Run a file, or import a module where file is "", and return the module. Once each.

    The file's folder is appended to sys.path: the file can import others beside it, but a math.py
    there does not replace the standard library's.
    Args: error: of which type errors are. Raises: such an error if the code fails to run, with its
    traceback, also where the code raises one of this type.
    """
    # A name for each file: several functions may come from several files.
    spec = spec_from_file_location(f"trigon_user_code_{abs(hash(file)):x}", file) if file else None
    if file and (spec is None or spec.loader is None):
        raise error(f"{file} is not a Python file; its name must end in .py")
    try:
        return importlib.import_module(module) if spec is None else _run_file(file, spec)
    except (Exception, SystemExit) as failure:
        raise error(f"{file or module} failed to load{missing_package(failure)}:\n{_trace(failure)}") from failure


def take(module: ModuleType, name: str, *, where: str, wanted: str, error: type[TrigonError]) -> Callable[..., Any]:
    """Return what a module names, which can be called.

    Args: where: describes it in errors. wanted: what it should be, such as "function". error: as
    for load_module.
    Raises: such an error, with the nearest known name, if there is none or it cannot be called.
    """
    known = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
    if name not in vars(module):
        has = f"; it has {', '.join(known) or 'none'}"
        raise error(f"there is no {where}{did_you_mean(name, known) or has}")
    value = vars(module)[name]
    if not callable(value):
        raise error(f"{where} is a {type(value).__name__}, not a {wanted}")
    taken: Callable[..., Any] = value
    return taken


def pickle(value: object, *, where: str, instead: str, error: type[TrigonError]) -> str:
    """Return base64 of a pickle of what a program gave, for the processes that run it.

    Args: instead: what to give in place of an object that cannot be pickled. where, error: as take.
    Raises: such an error if it cannot be pickled, or has more than MAX_PICKLE_BYTES.
    """
    import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(value)
    except Exception as failure:  # what the __reduce__ of an object raises
        raise error(
            f"{where} cannot be sent to other processes ({type(failure).__name__}: {failure}). Make what cannot be "
            f"pickled inside of it, at its first call, or put it into a file, and give {instead}"
        ) from failure
    if len(pickled) > MAX_PICKLE_BYTES:
        raise error(
            f"{where} has {len(pickled) / 2**20:,.0f} MiB with the variables that it uses, and each process that runs "
            f"it loads them; at most {MAX_PICKLE_BYTES >> 20} MiB are sent. Load large objects inside of it"
        )
    return base64.b64encode(pickled).decode()


def unpickle(pickled: str, *, where: str, error: type[TrigonError]) -> Any:
    """Return the object of which pickle was called. Args, raises: as take."""
    import cloudpickle

    try:
        return cloudpickle.loads(base64.b64decode(pickled))
    except (Exception, SystemExit) as failure:
        raise error(
            f"{where} cannot be loaded in the process that runs it{missing_package(failure)}:\n{_trace(failure)}"
        ) from failure


def read_signature(function: Callable[..., object], *, where: str, error: type[TrigonError]) -> inspect.Signature:
    """Return the signature of a function or a class. Raises: an error if it has none."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as failure:
        raise error(f"{where} has no readable signature ({failure}); wrap it in a plain function") from failure


def check_arguments(
    function: Callable[..., object],
    kwargs: Mapping[str, Any],
    *,
    num_positional: int = 0,
    others: Sequence[str] = (),
    where: str,
    called: str,
    option: str,
    error: type[TrigonError],
) -> None:
    """Check that a function can be called with keyword arguments of the user's, without calling it.

    Args: num_positional: arguments before them. others: names of keyword arguments besides them.
    called: what is done with it, as in "it cannot be called". option: the name of kwargs. error:
    the type of errors.
    Raises: such an error, with the nearest known name, if it does not accept one of kwargs, or
    requires one that is missing.
    """
    signature = read_signature(function, where=where, error=error)
    parameters = signature.parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    accepted = named[num_positional:]
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for key in kwargs:
        if key not in accepted and not accepts_any:
            raise error(
                f"{where} does not accept {key!r} of {option}{did_you_mean(key, accepted)}; it accepts "
                f"{', '.join(accepted) or 'none'}"
            )
    try:
        signature.bind(*[None] * num_positional, **kwargs, **dict.fromkeys(others))
    except TypeError as failure:
        raise error(f"{where} cannot be {called}: {failure}; set its keyword arguments in {option}") from failure


def describe_error(error: BaseException, *, own_files: Sequence[str], own_type: type[BaseException]) -> tuple[str, str]:
    """Return an error of user code as a line with its location, and its traceback, both cut.

    The traceback is "" for an error of this package about what the user's code returned.
    Args: own_files: files of this package, whose frames before the user's code are left out.
    own_type: the type of errors that this package raises, whose line needs no type and no location.
    """
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename in own_files:
        frame = frame.tb_next
    line = " ".join(text_of(error).split())[:_MAX_ERROR_CHARACTERS]
    if not isinstance(error, own_type):
        line = f"{type(error).__name__}: {line}" if line else type(error).__name__
        where = traceback.extract_tb(frame)
        line += f" ({os.path.basename(where[-1].filename)}:{where[-1].lineno})" if where else ""
    is_ours = isinstance(error, own_type) and frame is None and error.__cause__ is None
    trace = "" if is_ours else "".join(traceback.format_exception(type(error), error, frame))
    return line, trace[-_MAX_TRACEBACK_CHARACTERS:]


def text_of(error: BaseException) -> str:
    """Return str(error); what user code raises may have a `__str__` that fails."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the user's code may raise anything
        return "its text cannot be made: its __str__() failed"


def _run_file(file: str, spec: ModuleSpec) -> ModuleType:
    if spec.name in sys.modules:
        return sys.modules[spec.name]
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look up a class's module here
    sys.path.append(str(Path(file).parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


def _trace(failure: BaseException) -> str:
    """Return the traceback of an error, without the frames that import the user's code."""
    frame = failure.__traceback__
    importing = (
        __file__,
        importlib.__file__,
        "<frozen importlib._bootstrap>",
        "<frozen importlib._bootstrap_external>",
    )
    while frame is not None and frame.tb_frame.f_code.co_filename in importing:
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(failure), failure, frame))
