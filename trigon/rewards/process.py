"""A child process for user code that may hang, crash, leak memory, or send invalid messages.

Starts it without forking this process (torch and vLLM may have threads), exchanges lines of JSON
with it, and ends it with all processes that it has started. Does not depend on completions and
scores. The code of the child is in trigon.rewards.worker; its parent is
trigon.rewards.confinement.supervisor, which confines it and ends in the same way as it does.

    this process                            supervisor            child
    channel  <== lines of JSON ==>                                channel
    control  --- when it closes, ---------> kills the child
             <-- why it killed the child ---
    output   <-- text of the user's code -------------------------stdout and stderr
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from trigon.errors import RewardError
from trigon.rewards.confinement.options import Confinement
from trigon.rewards.environment import child_environment, named_variables, withheld_variable
from trigon.system.child_python import python_command
from trigon.system.secrets import ARGUMENTS, remember, secrets_in
from trigon.system.terminal import sanitize

MAX_LINE_BYTES = 1 << 20
"""Maximum length of a line that a child may send."""

MAX_OUTPUT_BYTES = 1 << 16
"""Maximum output of the user's code that is logged for each message sent to the child."""

_log = logging.getLogger(__name__)  # logs warnings, which reach stderr even if logging is not configured

_TAIL_BYTES = 4000
_MAX_LINE_CHARACTERS = 500

KILL_SECONDS = 30.0
"""How long the supervisor may take to end all processes of a child.

A process may hang in the kernel, for example when a network file system does not answer.
"""

REWARD_WORKER = "trigon.rewards.worker"
FORK_SERVER = "trigon.environments.fork_server"
"""Modules whose function main is the code of a child."""

_MAIN = """from trigon.rewards.confinement.supervisor import main
def work(*arguments):
    from {module} import main
    main(*arguments)
main(sys.argv[1], int(sys.argv[2]), work)
"""


class ChildProcess:
    """A running child process. It sets its own resource limits before it runs user code.

    ended: whether no more lines can be received, because the child has exited or has sent an
    invalid message. The caller should then kill it. exceeded: after kill(), which of the limits of
    its processes together it exceeded, in words that follow its name; "" if none.
    """

    def __init__(
        self,
        name: str,
        *,
        confinement: Confinement,
        passed_variables: Sequence[str] = (),
        module: str = REWARD_WORKER,
    ) -> None:
        """Start a child.

        name: prefix of its output in the log. passed_variables: as in child_environment.
        module: the module whose function main is its code.
        """
        self.name = name
        self.ended = False
        self.exceeded = ""
        self.channel, child_channel = socket.socketpair()
        self._control, child_control = socket.socketpair()
        with child_channel, child_control:
            self._process = subprocess.Popen(
                python_command(_MAIN.format(module=module), confinement.to_json(), str(child_channel.fileno())),
                bufsize=0,
                env=child_environment(os.environ, passed_variables),
                pass_fds=(child_channel.fileno(),),
                start_new_session=True,
                stdin=child_control.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        assert self._process.stdout is not None
        self.output = self._process.stdout
        os.set_blocking(self.output.fileno(), False)
        self._received = b""
        self._line = b""
        self._tail = b""
        self._bytes_to_show = MAX_OUTPUT_BYTES

    @property
    def pid(self) -> int:
        """The process id of the supervisor, which is also the id of its process group."""
        return self._process.pid

    @property
    def tail(self) -> str:
        """The last part of its output since the last send()."""
        return self._tail.decode(errors="replace")

    def send(self, line: str, *, timeout_seconds: float, descriptors: Sequence[int] = ()) -> None:
        """Send one line, and reset the count of its output.

        descriptors: of open files that are sent with it.
        Raises: TimeoutError if the child does not read it; ConnectionError if it has exited.
        """
        self._tail = b""
        self._bytes_to_show = MAX_OUTPUT_BYTES
        self.channel.settimeout(timeout_seconds)
        message = line.encode() + b"\n"
        sent = socket.send_fds(self.channel, [message], descriptors) if descriptors else 0
        self.channel.sendall(message[sent:])

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
        """Kill the child and all that it has started; return its exit code, or minus its signal.

        -SIGKILL means that it was alive until now, or that the system or the supervisor had killed
        it; any other code means that it had exited before.
        """
        self._control.shutdown(socket.SHUT_WR)
        self._control.settimeout(KILL_SECONDS)
        try:
            self.exceeded = self._control.recv(1000).decode(errors="replace")  # nothing when it ends
        except TimeoutError:
            os.killpg(self._process.pid, signal.SIGKILL)  # until wait(), its process id cannot be reused
        code = self._process.wait()
        self._log_text(self.output.read(1 << 16) or b"")  # at most the capacity of a pipe
        self._log_text(b"\n" if self._line else b"")
        for stream in (self._control, self.output, self.channel):
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


def check_passed_variables(names: Sequence[str]) -> None:
    """Raise RewardError if one of the variables of worker.reward.env is not set.

    Values that look like secrets, by the rule for arguments, are removed from text from now on.
    """
    for name in names:
        if name not in os.environ:
            raise RewardError(f"worker.reward.env names {name}, which is not set; export it, or leave it out")
        remember(secrets_in(ARGUMENTS, {name: os.environ[name]}))


def warn_of_withheld_variables(files: Iterable[str], passed_variables: Sequence[str]) -> None:
    """Warn of variables that are set, that a function's file names, and that it will not get.

    A function that has a default for such a variable would otherwise use that without a word.
    """
    for file in files:
        try:
            source = Path(file).read_text(encoding="utf-8", errors="replace")
        except OSError:  # the worker, which loads it, says so
            continue
        if names := named_variables(source, os.environ, passed_variables):
            _log.warning(
                "%s names environment variables that reward workers do not get: %s; worker.reward.env=[%s] passes them",
                file,
                ", ".join(names),
                ",".join(names),
            )


def explain_withheld(error: str, passed_variables: Sequence[str]) -> str:
    """Return the error, with a hint if it names an environment variable that was withheld."""
    name = withheld_variable(error, os.environ, passed_variables)
    if name is None:
        return error
    return (
        f"{error.rstrip()} (reward workers get only some environment variables, and others are withheld; "
        f"worker.reward.env=[{name}] passes {name})"
    )


def describe_exit(code: int) -> str:
    """Describe the exit of a process that was not killed here. code: as from ChildProcess.kill."""
    if code == -signal.SIGKILL:
        return "was killed by the system, perhaps because memory ran out"
    return f"exited with code {code}" if code >= 0 else f"died of signal {-code} ({signal.strsignal(-code)})"


def sanitize_line(line: bytes) -> str:
    """Return a line truncated, with control and text-direction characters shown as text."""
    return sanitize(line.decode(errors="replace").rstrip("\r"), max_characters=_MAX_LINE_CHARACTERS)
