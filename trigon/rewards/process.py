"""A child process for user code that may hang, crash, leak memory, or send invalid messages.

Starts it without forking this process (torch and vLLM may have threads), limits its environment,
exchanges lines of JSON with it, and kills it with all processes that it has started. Does not
depend on completions and scores. The code of the child is in trigon.rewards.worker.

    parent                                  child (own session, own process group)
    channel  <== lines of JSON ==>          channel
    stdin    --- never written --->         when it closes, the kernel kills the group
    stdout   <-- text of the user's code -- stdout and stderr
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence

from trigon.child_python import python_command
from trigon.errors import RewardError
from trigon.terminal import sanitize

MAX_LINE_BYTES = 1 << 20
"""Maximum length of a line that a child may send."""

MAX_OUTPUT_BYTES = 1 << 16
"""Maximum output of the user's code that is logged for each message sent to the child."""

_log = logging.getLogger(__name__)  # logs warnings, which reach stderr even if logging is not configured

_TAIL_BYTES = 4000
_MAX_LINE_CHARACTERS = 500

_MAIN = "from trigon.rewards.worker import main; main(int(sys.argv[1]))"

_SECRET_WORDS = {"APIKEY", "AUTH", "KEY", "KEYS", "PASSWD", "PASSWORD", "SECRET", "SECRETS", "TOKEN", "TOKENS"}
_SECRET_WORDS |= {"CREDENTIAL", "CREDENTIALS"}
_SECRET_PREFIXES = ("AWS_", "AZURE_", "WANDB_", "SWANLAB_", "MLFLOW_TRACKING_")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{2,}")
_URL_WITH_PASSWORD = re.compile(r"://[^/@\s]+:[^/@\s]+@")


class ChildProcess:
    """A running child process. It sets its own resource limits before it runs user code.

    ended: whether no more lines can be received, because the child has exited or has sent an
    invalid message. The caller should then kill it.
    """

    def __init__(self, name: str, *, passed_variables: Sequence[str] = ()) -> None:
        """Start a child.

        name: prefix of its output in the log. passed_variables: as in child_environment.
        """
        self.name = name
        self.ended = False
        self.channel, child_channel = socket.socketpair()
        with child_channel:
            self._process = subprocess.Popen(
                python_command(_MAIN, str(child_channel.fileno())),
                bufsize=0,
                env=child_environment(os.environ, passed_variables),
                pass_fds=(child_channel.fileno(),),
                start_new_session=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin
        self.output = self._process.stdout
        os.set_blocking(self.output.fileno(), False)
        self._received = b""
        self._line = b""
        self._tail = b""
        self._bytes_to_show = MAX_OUTPUT_BYTES

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its process group."""
        return self._process.pid

    @property
    def tail(self) -> str:
        """The last part of its output since the last send()."""
        return self._tail.decode(errors="replace")

    def send(self, line: str, *, timeout_seconds: float) -> None:
        """Send one line, and reset the count of its output.

        Raises: TimeoutError if the child does not read it; ConnectionError if it has exited.
        """
        self._tail = b""
        self._bytes_to_show = MAX_OUTPUT_BYTES
        self.channel.settimeout(timeout_seconds)
        self.channel.sendall(line.encode() + b"\n")

    def receive(self) -> list[bytes]:
        """Return the complete lines that have arrived. Call it when the channel is readable."""
        try:
            data = self.channel.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        *lines, self._received = (self._received + data).split(b"\n")
        self.ended = not data or len(self._received) > MAX_LINE_BYTES
        return lines

    def log_output(self) -> bool:
        """Log the child's available output. Returns: False once the child has closed its output."""
        text = self.output.read(1 << 16)
        self._log_text(text or b"")
        return text != b""

    def kill(self) -> int:
        """Kill the child and its process group, and return its exit code, or minus its signal.

        -SIGKILL means that it was alive until now, or that the system had killed it; any other code
        means that it had exited before.
        """
        # Until wait(), its process id cannot be reused, and its own exit code is preserved.
        os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self._log_text(self.output.read(1 << 16) or b"")  # at most the capacity of a pipe
        self._log_text(b"\n" if self._line else b"")
        for stream in (self._stdin, self.output, self.channel):
            stream.close()
        self.ended = True
        return code

    def _log_text(self, text: bytes) -> None:
        self._tail = (self._tail + text)[-_TAIL_BYTES:]
        *lines, self._line = (self._line + text[: max(self._bytes_to_show, 0)]).split(b"\n")
        for line in lines:
            _log.warning("[%s] %s", self.name, sanitize_line(line))
        if 0 <= self._bytes_to_show < len(text):
            _log.warning("[%s] ... more than %d bytes printed; the rest is not logged", self.name, MAX_OUTPUT_BYTES)
        self._bytes_to_show -= len(text)


def child_environment(environment: Mapping[str, str], passed_variables: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment without variables that look like tokens, keys or passwords.

    It also sets a fixed hash seed, so that sets iterate in the same order in every child, limits
    numeric libraries to one thread, and hides the GPUs, whose memory the model needs.
    passed_variables: names of variables that are passed unchanged, whatever their names are.
    """
    kept = {name: value for name, value in environment.items() if not _is_secret(name, value)}
    fixed = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return kept | fixed | {name: environment[name] for name in passed_variables if name in environment}


def check_passed_variables(names: Sequence[str]) -> None:
    """Raise RewardError if one of the variables of worker.reward.env is not set."""
    for name in names:
        if name not in os.environ:
            raise RewardError(f"worker.reward.env names {name}, which is not set; export it, or leave it out")


def withheld_variable(error: str, passed_variables: Sequence[str]) -> str | None:
    """Return the variable that an error of a child names and that was withheld from it, if any.

    That is one that is set here and was removed, or one of a KeyError that looks like a secret.
    """
    for match in _NAME.finditer(error):
        name = match.group()
        if name in passed_variables:
            continue
        is_removed = name in os.environ and _is_secret(name, os.environ[name])
        if is_removed or (f"KeyError: '{name}'" in error and _is_secret(name, "")):
            return name
    return None


def _is_secret(name: str, value: str) -> bool:
    return bool(
        _SECRET_WORDS & set(name.upper().split("_"))
        or name.upper().startswith(_SECRET_PREFIXES)
        or _URL_WITH_PASSWORD.search(value)
    )


def describe_exit(code: int) -> str:
    """Describe the exit of a process that was not killed here. code: as from ChildProcess.kill."""
    if code == -signal.SIGKILL:
        return "was killed by the system, perhaps because memory ran out"
    return f"exited with code {code}" if code >= 0 else f"died of signal {-code} ({signal.strsignal(-code)})"


def sanitize_line(line: bytes) -> str:
    """Return a line truncated, with control and text-direction characters shown as text."""
    return sanitize(line.decode(errors="replace").rstrip("\r"), max_characters=_MAX_LINE_CHARACTERS)
