"""Bounds the time and the output of Jinja templates, whose loops and products may be endless.

Templates come from configurations and model repositories, and are rendered once for every row.
Jinja's sandbox limits what a template can reach, not how long it takes.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import CO_GENERATOR
from pathlib import Path
from types import FrameType
from typing import Any

import jinja2
from jinja2 import Environment, TemplateSyntaxError

from trigon.data.template_sizes import MEASURED_CALLS, announce_operations, expected_size, text_size
from trigon.errors import ConfigError

MAX_SECONDS = 5.0
"""The longest that one rendering may take, in seconds of its thread; waiting is not counted."""

MAX_CHARACTERS = 10_000_000
"""The longest text that a rendering may write, and the longest template."""

MAX_MADE = 200_000_000
"""The characters that all operations of a rendering may make."""

MAX_NUMBER = 10_000_000
"""The largest number that may be written in a template."""

_TEMPLATE = "<template>"
"""The name of the file that Jinja compiles a text as."""

_JINJA = str(Path(jinja2.__file__).parent)

_GROWING = (str, list, tuple, dict)

# CPython 3.11 raises RuntimeError in one of two threads that set their trace functions at once.
_SETS_TRACE = threading.Lock()

announce_operations()


class TemplateFailure(Exception):
    """A template raised an error; the message is its first line. line: of the template."""

    def __init__(self, message: str, *, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


class TemplateLimitError(TemplateFailure):
    """A rendering took too long, wrote too much, or called itself without end."""


class _LimitReached(BaseException):
    """Raised while a template is rendered: Jinja catches Exception in some places."""


def check_template(source: str, where: str) -> None:
    """Raise ConfigError for a template that is too long or could fill the memory.

    Powers and large numbers are refused, since a single operation with them could. A syntax error
    is left to the compiler. where: the option or file, for errors.
    """
    if len(source) > MAX_CHARACTERS:
        raise ConfigError(f"{where} has {len(source):,} characters, more than the {MAX_CHARACTERS:,} of any template")
    try:
        tokens = list(Environment(autoescape=False).lex(source))
    except TemplateSyntaxError:
        return
    for line, kind, text in tokens:
        if kind == "operator" and text == "**":
            raise ConfigError(f"{where}: line {line} uses the operator **, which can take forever; write the result")
        if kind == "integer" and (len(text) > 30 or int(text.replace("_", ""), 0) > MAX_NUMBER):
            raise ConfigError(f"{where}: line {line} has the number {text[:30]}; {MAX_NUMBER:,} is the largest allowed")


def check_chat_template(tokenizer: Any) -> None:
    """Raise ConfigError if a Hugging Face tokenizer's chat template exceeds the limits.

    Other errors of the template depend on the messages, and are those of rows.
    """
    where = "the chat template (data.override_chat_template replaces it)"
    if isinstance(tokenizer.chat_template, str):
        check_template(tokenizer.chat_template, where)
    try:
        with bounded_rendering():
            tokenizer.apply_chat_template([{"role": "user", "content": "question"}], tokenize=False)
    except TemplateLimitError as error:
        raise ConfigError(f"{where} cannot be used: {error}") from error
    except TemplateFailure:
        return


@contextmanager
def bounded_rendering() -> Iterator[None]:
    """Raise TemplateLimitError in the context when a template takes too long or writes too much.

    Any other error is raised as TemplateFailure. For templates compiled from text, in this thread.
    A trace function sees each line of their code, the pieces of text that they yield, their
    variables, and what Jinja's functions get and return: the sizes of results before they are
    computed (see `template_sizes`).
    """
    deadline = time.thread_time() + MAX_SECONDS
    num_written = num_made = 0
    # Variables that were measured, with the entries that were: buffers of Jinja's own grow, all
    # else cannot change. They are kept, so that no other value gets their identity.
    measured: dict[int, tuple[Any, int]] = {}

    def make(size: int) -> None:
        nonlocal num_made
        num_made += size
        if size > MAX_CHARACTERS:
            raise _LimitReached(f"it makes a text or a list of more than {MAX_CHARACTERS:,} entries")
        if num_made > MAX_MADE:
            raise _LimitReached(f"its operations make more than {MAX_MADE:,} characters together")

    def measure(value: Any) -> None:
        known, num_entries = measured.get(id(value), (None, 0))
        if known is not value:
            measured[id(value)] = (value, len(value))
            make(text_size(value))
        elif type(value) is list and len(value) > num_entries:
            measured[id(value)] = (value, len(value))
            make(text_size(value[num_entries:]))

    def trace(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal num_written
        if time.thread_time() > deadline:
            raise _LimitReached(f"it takes more than {MAX_SECONDS:g} seconds; does it loop without end?")
        code = frame.f_code
        is_own = code.co_filename == _TEMPLATE
        if event == "call":
            if not is_own and not code.co_filename.startswith(_JINJA) and code.co_name != "tojson":
                return None
            if not is_own:
                frame.f_trace_lines = False
                if code.co_name in MEASURED_CALLS:
                    make(expected_size(code.co_name, frame.f_locals))
        elif event == "return":
            if is_own:
                num_written += len(value) if isinstance(value, str) else 0
            elif code.co_flags & CO_GENERATOR and isinstance(value, _GROWING):
                make(text_size(value))  # an entry of an iterator
            if num_written > MAX_CHARACTERS:
                raise _LimitReached(f"it writes more than {MAX_CHARACTERS:,} characters")
            if isinstance(value, (str, list, tuple)) and len(value) > MAX_CHARACTERS:
                make(len(value))
        if is_own:
            for variable in frame.f_locals.values():
                if type(variable) in _GROWING:
                    measure(variable)
        return trace

    previous = sys.gettrace()
    with _SETS_TRACE:
        sys.settrace(trace)
    try:
        yield
    except _LimitReached as error:
        raise TemplateLimitError(str(error)) from None
    except TemplateFailure:
        raise
    except RecursionError as error:
        raise TemplateLimitError("its macros call each other without end") from error
    except Exception as error:  # whatever a template computes
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TemplateFailure(message, line=getattr(error, "lineno", None)) from error
    finally:
        with _SETS_TRACE:
            sys.settrace(previous)
