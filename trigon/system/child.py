"""Child processes for user code that may hang, crash, leak memory, or send invalid messages.

Starts them without forking this process (torch and vLLM may have threads), exchanges frames with
them, and ends each with all processes that it has started. What a child does is in the module that
ChildSpec.program names; it begins with begin_child. Its parent is the supervisor of
confinement/, which confines it and ends in the same way as it does. Knows neither completions nor
episodes.

    this process                            supervisor            child
    channel  <== frames ==>                                       channel
    control  --- when it closes, ---------> kills the child
             <-- why it killed the child ---
    output   <-- text of the user's code -------------------------stdout and stderr

The first frames on the channel:

    -> the setup                                    what to load
    <- {"used": ["landlock", ...], "obstacle": ""}  how it is confined, before user code is loaded
    <- {"loaded": {...}}                            or {"load_error": "..."}; then it exits
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trigon.errors import RewardError, TrigonError
from trigon.system.confinement.options import Confinement, check_confinement
from trigon.system.frames import Channel, Frame
from trigon.system.processes import python_command
from trigon.system.secrets import ARGUMENTS, remember, scrub, secrets_in
from trigon.system.stopping import termination_blocked
from trigon.system.terminal import sanitize

LOAD_SECONDS = 300.0
"""Time limit for loading the user's code, with all its imports."""

MAX_OUTPUT_BYTES = 1 << 16
"""Maximum output of the user's code that is logged for each message sent to the child."""

KILL_SECONDS = 30.0
"""How long the supervisor may take to end all processes of a child.

A process may hang in the kernel, for example when a network file system does not answer.
"""

MAX_LOST_STARTS = 3
"""The number of children in a row, killed from outside while they load, that is an error.

Others must have loaded before: the first child that does not load is an error by itself.
"""

GRACE_SECONDS = 0.2
"""How long a process lives after a time limit of its work, to print its stack."""

FORGED = (ValueError, KeyError, TypeError, AttributeError, OverflowError)
"""What reading a message raises that is none: user code can write to the channel of its process."""

_log = logging.getLogger(__name__)  # logs warnings, which reach stderr even if logging is not configured

_TAIL_BYTES = 4000
_MAX_LINE_CHARACTERS = 500

_MAIN = """from trigon.system.confinement.supervisor import main
def work(*arguments):
    from {module} import main
    main(*arguments)
main(sys.argv[1], int(sys.argv[2]), work)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What children of one kind have in common.

    program: the module whose function main is their code. setup: the first frame for each of them.
    where: the user's code, and confined: what it consists of, in messages. error: the type of
    errors. files: the user's, whose folders children can always read. passed_variables: environment
    variables that they get besides ALLOWED. max_frame_bytes: maximum size of a frame that a child
    may send.
    """

    program: str
    setup: bytes
    where: str
    confined: str
    error: type[TrigonError]
    confinement: Confinement
    files: Sequence[str] = ()
    passed_variables: Sequence[str] = ()
    max_frame_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Ending:
    """How a child ended.

    text: a description that follows its name. output: the last part of its output. was_killed: it
    lived until this process or the system killed it. timed_out: this process killed it.
    """

    text: str
    output: str
    was_killed: bool
    timed_out: bool


class Child:
    """A running child process.

    loaded: what it said when it had loaded the user's code; None before. has_ended: whether it has
    exited, or has sent something invalid, so that the caller should end it.
    """

    def __init__(self, name: str, spec: ChildSpec) -> None:
        """Start a child. name: prefix of its output in the log."""
        self.name = name
        self.loaded: dict[str, Any] | None = None
        self.load_deadline = time.monotonic() + LOAD_SECONDS
        self.has_ended = False
        self.lacks = ""
        self._spec = spec
        self._is_confined = False
        own_end, child_end = socket.socketpair()
        self._control, child_control = socket.socketpair()
        with child_end, child_control, termination_blocked():  # until the child has its handlers
            self._process = subprocess.Popen(
                python_command(_MAIN.format(module=spec.program), spec.confinement.to_json(), str(child_end.fileno())),
                bufsize=0,
                env=child_environment(os.environ, spec.passed_variables),
                pass_fds=(child_end.fileno(),),
                start_new_session=True,
                stdin=child_control.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        assert self._process.stdout is not None
        self.output = self._process.stdout
        os.set_blocking(self.output.fileno(), False)
        self.channel = Channel(own_end, max_bytes=spec.max_frame_bytes)
        self._line = b""
        self._tail = b""
        self._bytes_to_show = MAX_OUTPUT_BYTES

    @property
    def pid(self) -> int:
        """The process id of the supervisor, which is also the id of its process group."""
        return self._process.pid

    def receive(self) -> list[Frame]:
        """Return the frames that have arrived, without the frames of the start.

        Call it when something has arrived. Raises: an error of the spec's type if the user's code
        cannot be loaded, or confined as it must be.
        """
        try:
            frames = self.channel.receive()
            received = [frame for frame in frames if not self._is_of_the_start(frame.content)]
        except FORGED:  # the user's code has written to the channel
            self.has_ended = True
            return []
        self.has_ended = self.has_ended or not self.channel.is_open
        return received

    def forget_output(self) -> None:
        """Count its output from now on: for the limit of what is logged, and for its last part."""
        self._tail = b""
        self._bytes_to_show = MAX_OUTPUT_BYTES

    def log_output(self) -> bool:
        """Log the child's available output. Returns: False once the child has closed its output."""
        text = self.output.read(1 << 16)
        self._log_text(text or b"")
        return text != b""

    def kill(self) -> Ending:
        """Kill the child and all that it has started."""
        self._control.shutdown(socket.SHUT_WR)
        self._control.settimeout(KILL_SECONDS)
        exceeded = ""
        try:
            exceeded = self._control.recv(1000).decode(errors="replace")  # nothing when it ends
        except TimeoutError:
            os.killpg(self._process.pid, signal.SIGKILL)  # until wait(), its process id cannot be reused
        code = self._process.wait()
        self._log_text(self.output.read(1 << 16) or b"")  # at most the capacity of a pipe
        self._log_text(b"\n" if self._line else b"")
        self._control.close()
        self.output.close()
        self.channel.close()
        was_killed = code == -signal.SIGKILL and not exceeded  # any other code: it had exited before
        return Ending(
            exceeded or describe_exit(code),
            scrub(self._tail.decode(errors="replace")),
            was_killed,
            timed_out=was_killed and not self.has_ended,
        )

    def _is_of_the_start(self, content: dict[str, Any]) -> bool:
        """Handle a message of the start; return False for all later ones."""
        spec = self._spec
        if not self._is_confined:
            self.lacks = check_confinement(
                spec.confinement,
                content["used"],
                str(content["obstacle"]),
                confined=spec.confined,
                error=spec.error,
            )
            self._is_confined = True
        elif self.loaded is None:
            if "load_error" in content:
                raise spec.error(explain_withheld(scrub(str(content["load_error"])), spec.passed_variables))
            self.loaded = dict(content["loaded"])
        else:
            return False
        return True

    def _log_text(self, text: bytes) -> None:
        self._tail = (self._tail + text)[-_TAIL_BYTES:]
        *lines, self._line = (self._line + text[: max(self._bytes_to_show, 0)]).split(b"\n")
        for line in lines:
            _log.warning("[%s] %s", self.name, sanitize_line(line))
        if 0 <= self._bytes_to_show < len(text):
            _log.warning("[%s] ... more than %d bytes printed; the rest is not logged", self.name, MAX_OUTPUT_BYTES)
        self._bytes_to_show -= len(text)


class Children:
    """The running children of one kind, in the order of their starts, and other channels.

    Used by one thread at a time, except for wake(). Does not decide when a child is started.
    """

    def __init__(self, spec: ChildSpec) -> None:
        """Start none yet. Raises: RewardError if one of the passed variables is not set."""
        check_passed_variables(spec.passed_variables)
        warn_of_withheld_variables(spec.files, spec.passed_variables)
        readable = [str(Path(file).parent) for file in spec.files]
        self._spec = replace(spec, confinement=spec.confinement.with_readable(readable))
        self._children: list[Child] = []
        self._lost_starts: int | None = None  # in a row; None: none has loaded yet
        self._lacks = ""
        self._selector = selectors.DefaultSelector()
        self._wake_sender, self._wake_receiver = socket.socketpair()  # ends a select() of the pool's thread
        for end in (self._wake_sender, self._wake_receiver):
            end.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)

    def __iter__(self) -> Iterator[Child]:
        return iter(list(self._children))

    def start(self, name: str) -> Child:
        """Start a child, which loads the user's code."""
        child = Child(name, self._spec)
        self._children.append(child)
        self.watch(child.channel, child)
        self._selector.register(child.output, selectors.EVENT_READ, (child, None))
        self.send(child.channel, self._spec.setup)
        return child

    def watch(self, channel: Channel, owner: object) -> None:
        """Let wait() return an owner when something has arrived at a channel."""
        self._selector.register(channel.connection, selectors.EVENT_READ, (owner, channel))

    def forget(self, channel: Channel) -> None:
        """Undo watch(), if it was not undone before."""
        if channel.connection in self._selector.get_map():
            self._selector.unregister(channel.connection)

    def send(self, channel: Channel, frame: bytes, *given: socket.socket) -> None:
        """Send a frame by a channel that is watched; wait() sends what it does not take now."""
        channel.send(frame, *given)
        self._select(channel)

    def wait(self, timeout_seconds: float | None) -> list[object]:
        """Wait for wake(), the timeout or frames; return the children and owners that have some.

        Output of children is logged, and what send() has left is sent.
        """
        owners: list[object] = []
        for key, mask in self._selector.select(timeout_seconds):
            if key.fileobj is self._wake_receiver:
                self._wake_receiver.recv(4096)
                continue
            owner, channel = key.data
            if channel is None:
                if not owner.log_output():
                    self._selector.unregister(key.fileobj)
                continue
            if mask & selectors.EVENT_WRITE:
                channel.flush()
                self._select(channel)
            if mask & selectors.EVENT_READ:
                owners.append(owner)
        return owners

    def receive(self, child: Child) -> list[Frame]:
        """Return what a child has sent, as Child.receive; log what of it is not confined, once."""
        was_loaded = child.loaded is not None
        frames = child.receive()
        if child.loaded is not None and not was_loaded:
            self._lost_starts = 0
        if child.lacks and child.lacks != self._lacks:
            self._lacks = child.lacks
            _log.warning("%s", child.lacks)
        return frames

    def wake(self) -> None:
        """End the current or next wait(). May be called in any thread."""
        with contextlib.suppress(BlockingIOError):  # the buffer is full, so select() will return
            self._wake_sender.send(b"!")

    def end(self, child: Child) -> Ending:
        """Kill a child with all that it has started, and return how it ended.

        Raises: an error of the spec's type if it has not loaded the user's code, since another one
        would not either, unless it was killed from outside and others have loaded it before.
        """
        ending = self._kill(child)
        if child.loaded is None:
            if ending.was_killed and not ending.timed_out and self._lost_starts is not None:
                self._lost_starts += 1
                if self._lost_starts < MAX_LOST_STARTS:
                    return ending
            text = f"took more than {LOAD_SECONDS:g} s and was killed" if ending.timed_out else ending.text
            raise self._spec.error(f"{self._spec.where}: its process {text} while loading\n{ending.output}")
        return ending

    def close(self) -> None:
        """Kill all children with all that they have started. No more can be started."""
        for child in self:
            self._kill(child)
        self._selector.close()
        self._wake_sender.close()
        self._wake_receiver.close()

    def _kill(self, child: Child) -> Ending:
        self._children.remove(child)
        self.forget(child.channel)
        if child.output in self._selector.get_map():
            self._selector.unregister(child.output)
        return child.kill()

    def _select(self, channel: Channel) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.has_unsent else 0)
        if channel.connection in self._selector.get_map():
            key = self._selector.get_key(channel.connection)
            if key.events != events:
                self._selector.modify(channel.connection, events, key.data)


def describe_exit(code: int) -> str:
    """Describe the exit of a process that was not killed here.

    code: as os.waitstatus_to_exitcode returns it.
    """
    if code == -signal.SIGKILL:
        return "was killed by the system, perhaps because memory ran out"
    return f"exited with code {code}" if code >= 0 else f"died of signal {-code} ({signal.strsignal(-code)})"


def sanitize_line(line: bytes) -> str:
    """Return a line truncated, with control and text-direction characters shown as text."""
    return sanitize(line.decode(errors="replace").rstrip("\r"), max_characters=_MAX_LINE_CHARACTERS)


_GROUPS = (
    # the user, the language, and where files are
    "HOME USER LOGNAME SHELL PWD HOSTNAME TERM COLUMNS LINES TZ LANG LANGUAGE LOCALE_ARCHIVE TMPDIR TEMP TMP "
    "XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME XDG_RUNTIME_DIR",
    # programs and libraries
    "PATH LD_LIBRARY_PATH LD_PRELOAD DYLD_LIBRARY_PATH DYLD_FALLBACK_LIBRARY_PATH VIRTUAL_ENV CONDA_PREFIX "
    "CONDA_DEFAULT_ENV CUDA_HOME CUDA_PATH ROCM_PATH JAVA_HOME NODE_PATH TESSDATA_PREFIX",
    # Python
    "PYTHONPATH PYTHONHOME PYTHONNOUSERSITE PYTHONUSERBASE PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX "
    "PYTHONUNBUFFERED PYTHONWARNINGS PYTHONUTF8 PYTHONIOENCODING PYTHONMALLOC PYTHONSAFEPATH PYTHONFAULTHANDLER",
    # caches and settings of libraries
    "HF_HOME HF_HUB_CACHE HF_ASSETS_CACHE HF_DATASETS_CACHE HF_MODULES_CACHE HF_HUB_OFFLINE HF_DATASETS_OFFLINE "
    "TRANSFORMERS_OFFLINE HUGGINGFACE_HUB_CACHE TRANSFORMERS_CACHE HF_HUB_DISABLE_TELEMETRY HF_HUB_DISABLE_XET "
    "HF_HUB_DISABLE_PROGRESS_BARS HF_HUB_ENABLE_HF_TRANSFER HF_HUB_DOWNLOAD_TIMEOUT MODELSCOPE_CACHE TORCH_HOME "
    "TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR NUMBA_CACHE_DIR NLTK_DATA SPACY_DATA TIKTOKEN_CACHE_DIR "
    "MPLCONFIGDIR MPLBACKEND TOKENIZERS_PARALLELISM TQDM_DISABLE",
    # certificates and proxies
    "SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE "
    "HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy",
    # the addresses of services that a function may call, without which it would call others
    "HF_ENDPOINT OPENAI_BASE_URL OPENAI_API_BASE ANTHROPIC_BASE_URL AZURE_OPENAI_ENDPOINT OLLAMA_HOST",
)
ALLOWED = frozenset(" ".join(_GROUPS).split())
"""Variables that children get, unless the value is a URL with a user or a password."""

_ALLOWED_PREFIXES = ("LC_", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "NUMEXPR_", "MALLOC_")
_FIXED = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
_URL_WITH_USER = re.compile(r"://[^/?#@\s]+@")
_PROXY_WITH_USER = re.compile(r"^[^/?#@\s]+@")  # the scheme of a proxy may be left out
_SECRET_ENDINGS = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{2,}")
_LITERAL = re.compile(r"""["']([A-Za-z_][A-Za-z0-9_]*)["']""")


def child_environment(environment: Mapping[str, str], passed_variables: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables of an environment that children get.

    It also sets a fixed hash seed, so that sets iterate in the same order in every child, limits
    numeric libraries to one thread, and hides the GPUs, whose memory the model needs.
    passed_variables: names of variables that are passed unchanged, besides the allowed ones.
    """
    kept = {name: value for name, value in environment.items() if _is_allowed(name, value)}
    return kept | _FIXED | {name: environment[name] for name in passed_variables if name in environment}


def check_passed_variables(names: Sequence[str]) -> None:
    """Raise RewardError if one of the variables of worker.reward.env is not set.

    Values that look like secrets, by the rule for arguments, are removed from text from now on.
    """
    for name in names:
        if name not in os.environ:
            raise RewardError(f"worker.reward.env names {name}, which is not set; export it, or leave it out")
        remember(secrets_in(ARGUMENTS, {name: os.environ[name]}))


def warn_of_withheld_variables(files: Iterable[str], passed_variables: Sequence[str]) -> None:
    """Warn of variables that are set, that a file of the user's names, and that it will not get.

    A function that has a default for such a variable would otherwise use that without a word.
    """
    for file in files:
        try:
            source = Path(file).read_text(encoding="utf-8", errors="replace")
        except OSError:  # the child, which loads it, says so
            continue
        literals = dict.fromkeys(match.group(1) for match in _LITERAL.finditer(source))
        kept = child_environment(os.environ, passed_variables)
        names = [name for name in literals if name.isupper() and name in os.environ and name not in kept]
        if names:
            _log.warning(
                "%s names environment variables that reward workers do not get: %s; worker.reward.env=[%s] passes them",
                file,
                ", ".join(names),
                ",".join(names),
            )


def explain_withheld(error: str, passed_variables: Sequence[str]) -> str:
    """Return the error of a child, with a hint if it names a variable that was withheld from it.

    That is one of the environment, or one of a KeyError that is not set and looks like a secret.
    """
    for match in _NAME.finditer(error):
        name = match.group()
        if name in passed_variables or name in _FIXED:
            continue
        is_key = f"KeyError: '{name}'" in error
        is_withheld = name in os.environ and not _is_allowed(name, os.environ[name]) and ("_" in name or is_key)
        if is_withheld or (is_key and name not in os.environ and name.endswith(_SECRET_ENDINGS)):
            return (
                f"{error.rstrip()} (reward workers get only some environment variables, and others are withheld; "
                f"worker.reward.env=[{name}] passes {name})"
            )
    return error


def _is_allowed(name: str, value: str) -> bool:
    if name not in ALLOWED and not name.startswith(_ALLOWED_PREFIXES):
        return False
    is_proxy = name.lower().endswith("_proxy")
    return not _URL_WITH_USER.search(value) and not (is_proxy and _PROXY_WITH_USER.search(value))
