"""Renders Jinja templates in a child process that has limits on time and memory.

Templates come from configurations and model repositories, and are rendered once for each row.
Jinja's sandbox limits what a template can reach, but not how long it runs or how much it makes: a
single product can fill the memory. The limits of the operating system bound every operation.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal

from jinja2 import StrictUndefined, Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trigon.errors import ConfigError
from trigon.system.child import child_environment
from trigon.system.processes import python_command

MAX_SECONDS = 5.0
"""The longest that one rendering may take, in seconds of CPU time."""

MAX_BYTES = 2**29
"""The memory of the child process, with everything that a rendering makes."""

MAX_CHARACTERS = 10_000_000
"""The longest text that a rendering may write."""

Dialect = Literal["plain", "chat"]
"""What a template may use.

plain: Jinja itself; an unknown variable is an error. chat: what transformers gives to chat
templates.
"""

_SERVE = "from trigon.data.templates import serve; serve()"

_date: str | None = None  # that templates write, in ISO format; None: the present one


class TemplateFailure(Exception):
    """A template raised an error; the message is its first line. line: the line of the template."""

    def __init__(self, message: str, *, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


class TemplateLimitError(TemplateFailure):
    """A rendering took too long or too much memory, wrote too much, or called itself endlessly."""


def write_date(date: str | None) -> None:
    """Let chat templates of this process write a date, in ISO format; None: the present one.

    The prompts of a run would otherwise change at midnight, and when it is resumed.
    """
    global _date
    _date = date


def written_date() -> str | None:
    """Return what write_date was last called with."""
    return _date


def render(source: str, dialect: Dialect, values: Mapping[str, Any]) -> str:
    """Return what a template writes. values: values of its variables, of types that JSON has.

    Raises: TemplateFailure.
    """
    text: str = _child.ask({"source": source, "dialect": dialect, "values": values, "date": _date})
    return text


def variables_of(source: str) -> set[str]:
    """Return the variables that a template uses and does not set. Raises: TemplateFailure."""
    return set(_child.ask({"source": source}))


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    generation_prompt: bool = False,
) -> str:
    """Return messages as the chat template of a Hugging Face tokenizer writes them.

    The text is the same as from `tokenizer.apply_chat_template`.
    Raises: TemplateFailure.
    """
    try:
        source = tokenizer.get_chat_template(tools=tools)
    except ValueError as error:
        raise TemplateFailure(str(error).splitlines()[0]) from error
    values = {
        "messages": messages,
        "tools": tools,
        "documents": None,
        "add_generation_prompt": generation_prompt,
        **tokenizer.special_tokens_map,
    }
    return render(source, "chat", values)


def check_chat_template(tokenizer: Any) -> None:
    """Raise ConfigError if a Hugging Face tokenizer's chat template is none, or exceeds the limits.

    Other errors of the template depend on the messages, and are errors of rows.
    """
    try:
        render_chat(tokenizer, [{"role": "user", "content": "question"}])
    except TemplateFailure as error:
        if error.line is None and not isinstance(error, TemplateLimitError):
            return
        line = "" if error.line is None else f" in line {error.line}"
        raise ConfigError(
            f"the chat template (data.override_chat_template replaces it) cannot be used: {error}{line}"
        ) from error


class _Child:
    """The child process, which is started when it is needed. Thread-safe."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Return the child's answer. Raises: TemplateFailure."""
        request = {"seconds": MAX_SECONDS, **request}
        line = json.dumps(request, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass") + b"\n"
        with self._lock:
            answered = self._exchange(line)
            if isinstance(answered, int) and answered != -signal.SIGPROF:
                answered = self._exchange(line)  # somebody else may have ended the process
        if isinstance(answered, int):
            if answered == -signal.SIGPROF:
                raise TemplateLimitError(f"it takes more than {MAX_SECONDS:g} seconds; does it loop without end?")
            raise TemplateLimitError(f"its process has ended with status {answered}")
        answer = json.loads(answered.decode("utf-8", "surrogatepass"))
        if "limit" in answer:
            raise TemplateLimitError(answer["limit"])
        if "error" in answer:
            raise TemplateFailure(answer["error"], line=answer["line"])
        return answer["result"]

    def _exchange(self, line: bytes) -> bytes | int:
        """Return the child's line in reply to one, or its exit status if it has ended."""
        if self._process is None:
            self._process = subprocess.Popen(
                python_command(_SERVE),
                env=child_environment(os.environ),  # without the secrets of this one
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # so that Ctrl-C does not end it while a run is stopped
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
            if (answer := self._process.stdout.readline()).endswith(b"\n"):
                return answer
        except BrokenPipeError:
            pass
        except BaseException:  # such as Ctrl-C: the answer would be taken for that to the next line
            self._process.kill()
            self.close()
            raise
        return self.close()

    def close(self) -> int:
        """End the child process, and return its exit status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        try:
            process.communicate()
        except OSError:  # what was not written to a process that has ended
            process.wait()
        return process.returncode


_child = _Child()
_of_parent: _Child | None = None  # in a forked process, which must neither use nor close its pipes


def _close() -> None:
    _child.close()


def _forget() -> None:
    global _child, _of_parent
    _child, _of_parent = _Child(), _child


atexit.register(_close)
os.register_at_fork(after_in_child=_forget)  # the child belongs to the process that started it


def serve() -> None:
    """Render templates for the parent process until it closes standard input."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        request = json.loads(line.decode("utf-8", "surrogatepass"))
        write_date(request.get("date"))
        # The kernel ends the process at this time, within an operation too.
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        answer = _answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        try:
            sys.stdout.buffer.write(answer + b"\n")
            sys.stdout.buffer.flush()
        except BrokenPipeError:  # the parent process has ended meanwhile
            os._exit(0)


def _answer(request: Mapping[str, Any]) -> bytes:
    answer: dict[str, Any]
    try:
        result: Any
        if "values" in request:
            result = _compile(request["source"], request["dialect"]).render(request["values"])
            if len(result) > MAX_CHARACTERS:
                return json.dumps({"limit": f"it writes more than {MAX_CHARACTERS:,} characters"}).encode()
        else:
            result = sorted(meta.find_undeclared_variables(_plain().parse(request["source"])))
        return json.dumps({"result": result}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except MemoryError:
        answer = {"limit": f"it takes more than {MAX_BYTES // 2**20} MiB of memory"}
    except RecursionError:
        answer = {"limit": "its macros call each other without end"}
    except Exception as error:  # noqa: BLE001 - whatever a template computes
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        answer = {"error": message, "line": getattr(error, "lineno", None)}
    return json.dumps(answer).encode()


@lru_cache(maxsize=16)
def _compile(source: str, dialect: Dialect) -> Template:
    return (_plain() if dialect == "plain" else _chat()).from_string(source)


def _plain() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(undefined=StrictUndefined)


def _chat() -> ImmutableSandboxedEnvironment:
    """Return the environment that transformers has for chat templates (chat_template_utils.py)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


class _Generation(Extension):
    """The block `{% generation %}`, which marks what the assistant wrote; it is text here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_call"), [], [], body).set_lineno(line)

    def _call(self, caller: Macro) -> str:
        return str(caller())


def _to_json(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(format: str) -> str:
    return (datetime.now() if _date is None else datetime.fromisoformat(_date)).strftime(format)
