"""Runs episodes, each in a process of its own, and never waits for one of them.

A failure costs the episode that caused it, never the run or another episode. A thread of the pool
communicates with the processes. So time limits hold, and episodes continue, while the caller
samples.

    caller   --- start, step, stop -->   pool's thread   --- "fork", "stop" -->   fork server
             <-- poll: outcomes ------                   <-- "ended" -------        |  |  |
                                                         <== frames =========>    episodes
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from trigon.environments.calls import find_calls
from trigon.environments.protocol import (
    MAX_IMAGES,
    MAX_TEXT_CHARACTERS,
    Message,
    Observation,
    Outcome,
    check_observation,
    read_reward,
)
from trigon.environments.source import EnvironmentSettings, encode_setup
from trigon.errors import EpisodeError
from trigon.system.child import (
    FORGED,
    GRACE_SECONDS,
    KILL_SECONDS,
    Children,
    ChildSpec,
    describe_exit,
    explain_withheld,
)
from trigon.system.files import OmittedColumns, dump_columns
from trigon.system.frames import Channel, Frame, encode_frame
from trigon.system.secrets import scrub

CLOSE_SECONDS = 2.0
"""How long an environment's close() may take."""

MAX_SERVER_DEATHS = 3
"""The run stops when the fork server has died this often without an outcome in between."""

_MAX_TRACEBACKS = 5  # of failed episodes, in the log
_MAX_REASON_CHARACTERS = 500
_MAX_ERROR_CHARACTERS = 1000
_MAX_TRACEBACK_CHARACTERS = 10_000
_PROCESSES_PER_EPISODE = 16

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Episode:
    """An episode, with the channel to its process once it was given to the fork server.

    number: the caller's number. key: the fork server's key; numbers may be used again, keys are
    not.
    unsent: frames that its process has not been sent. unforked: frames that were sent to it, as
    long as it may not have been forked; another fork server then gets them. owed: the call whose
    outcome the caller waits for; "": none. deadline: when the outcome must have come or, with
    is_ending, when the process must have ended. error: why the episode has failed, in one line; ""
    if it has not.
    """

    number: int
    key: int
    unsent: bytes
    unforked: bytes = b""
    owed: Literal["", "reset", "step"] = ""
    deadline: float | None = None
    is_ending: bool = False
    error: str = ""
    channel: Channel | None = None


class EnvironmentPool:
    """The episodes of an engine. May be used by any thread."""

    def __init__(self, settings: EnvironmentSettings, *, describe: bool = False) -> None:
        """Start the fork server, which loads the user's code; ready() waits for it.

        describe: make the descriptions of tools (schemas), which takes seconds.
        Raises: EpisodeError if JSON cannot represent the keyword arguments; RewardError if one of
        passed_variables is not set.
        """
        self.settings = settings
        self._is_tools = settings.environment is None
        setup = encode_setup(settings, describe=describe)
        confinement = settings.confinement
        max_processes = max(confinement.max_processes, _PROCESSES_PER_EPISODE * settings.max_episodes)
        spec = ChildSpec(
            program="trigon.environments.episode",
            setup=setup,
            where=settings.where,
            confined="environments and tools",
            error=EpisodeError,
            confinement=replace(confinement, max_processes=max_processes, runs_code=settings.runs_code),
            files=[source.file for source in settings.sources if source.file],
            passed_variables=settings.passed_variables,
        )
        self._children = Children(spec)  # with one child, the fork server
        self._changed = threading.Condition()  # its lock guards all that follows
        self._episodes: dict[int, _Episode] = {}  # of the caller, by number
        self._waiting: deque[_Episode] = deque()  # for a process
        self._alive: dict[int, _Episode] = {}  # with a process, by key; stopped ones until that has ended
        self._touched: list[_Episode] = []  # by the caller, for the thread
        self._outcomes: deque[Outcome] = deque()
        self._num_polling = 0
        self._num_keys = 0
        self._num_beyond_limit = 0
        self._num_deaths = 0
        self._num_tracebacks = 0
        self._omitted = OmittedColumns("the environment", expected=("images",))
        self._fatal_error = ""
        self._is_closed = False
        self._server = self._children.start("environment")
        self._thread = threading.Thread(target=self._run, name="environments", daemon=True)
        self._thread.start()

    def ready(self) -> None:
        """Wait until the code has been loaded.

        Raises: EpisodeError if it cannot be loaded, or does not follow the protocol.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._server.loaded is not None or self._fatal_error)
            self._check()

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """The descriptions of the tools, for chat templates; waits for them. Raises: as ready."""
        self.ready()
        with self._changed:
            return tuple((self._server.loaded or {})["tools"])

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The process id below which all processes of the pool are."""
        return (self._server.pid,)

    def start(self, episode: int, row: Mapping[str, Any], images: Sequence[bytes] = ()) -> None:
        """Start an episode: its outcome is the first observation.

        Args: episode: a number that no running episode has. row: the columns of the dataset's row;
        columns that JSON cannot represent are left out. images: the prompt's images as files.
        Raises: EpisodeError if the pool has failed.
        """
        with self._changed:
            self._check()
            if episode in self._episodes:
                raise ValueError(f"episode {episode} is running; stop it before its number is used again")
            self._num_keys += 1
            # Tools get images only: what they run, a model wrote, and rows have the ground truth.
            columns, omitted = ("{}", ()) if self._is_tools else dump_columns(row)
            self._omitted.warn(omitted)
            opening = encode_frame({"do": "reset", "quiet": self._is_tools}, images, row=columns)
            found = self._episodes[episode] = _Episode(episode, self._num_keys, opening)
            if self._is_tools:  # a process is forked for the first turn with a call
                self._add(Outcome(episode, None, None, done=False))
            else:
                found.owed = "reset"
                self._waiting.append(found)
                self._children.wake()

    def step(self, episode: int, action: str) -> None:
        """Carry out an action; its outcome comes from poll. Raises: EpisodeError; ValueError."""
        with self._changed:
            self._check()
            found = self._episodes[episode]
            if found.owed:
                raise ValueError(f"episode {episode} has no outcome of its {found.owed} yet")
            if found.error:
                self._add(Outcome(episode, None, None, True, found.error))
                return
            if self._is_tools and not find_calls(action, self.settings.tool_format):
                self._add(Outcome(episode, None, None, done=True))
                return
            found.owed = "step"
            # Half a character, which a tokenizer may leave, cannot be encoded.
            text = action.encode("utf-8", errors="replace").decode()
            if found.is_ending:  # its process has died, and "ended" will say how
                return
            found.unsent += encode_frame({"do": "step", "action": text})
            (self._waiting if found.channel is None else self._touched).append(found)
            self._children.wake()

    def poll(self, timeout_seconds: float) -> list[Outcome]:
        """Return the outcomes since the last call, in order of arrival.

        Waits at most timeout_seconds for the first. Raises: EpisodeError if the pool has failed.
        """
        with self._changed:
            if not self._outcomes and timeout_seconds > 0 and not self._fatal_error:
                self._num_polling += 1
                self._children.wake()  # see _may_fork
                self._changed.wait_for(lambda: self._outcomes or self._fatal_error, timeout_seconds)
                self._num_polling -= 1
            if not self._outcomes:
                self._check()
            outcomes = list(self._outcomes)
            self._outcomes.clear()
            return outcomes

    def stop(self, episode: int) -> None:
        """End an episode, and call its environment's close(). It will have no further outcome."""
        with self._changed:
            found = self._episodes.pop(episode)
            self._outcomes = deque(each for each in self._outcomes if each.episode != episode)
            found.owed = ""
            if found in self._waiting:
                self._waiting.remove(found)
            if found.channel is not None:
                found.is_ending = True
                self._touched.append(found)
                self._children.wake()

    def close(self) -> None:
        """End all episodes, as stop() does, and all processes. The pool is then unusable."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._fatal_error = self._fatal_error or "the environment pool is closed"
            self._changed.notify_all()
            self._children.wake()
        self._thread.join()
        for found in self._alive.values():
            self._disconnect(found)
        self._alive.clear()
        self._children.close()

    def _check(self) -> None:
        if self._fatal_error:
            raise EpisodeError(self._fatal_error)

    def _add(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._changed.notify_all()

    # The rest runs in the thread of the pool.

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    if self._is_closed:
                        break
                    self._send_touched()
                    self._fork_waiting()
                    deadline = min(self._deadlines(), default=None)
                now = time.monotonic()
                received = self._children.wait(None if deadline is None else max(0.0, deadline - now))
                with self._changed:
                    if self._is_closed:
                        break
                    for owner in received:
                        self._receive_of(owner)
                    # `now` was read before select(): what arrived in time counts if read late.
                    self._end_late(now)
            self._end_all()
        except BaseException as error:  # noqa: BLE001 - the caller waits, so it must get every error
            with self._changed:
                is_expected = isinstance(error, EpisodeError)
                self._fatal_error = str(error) if is_expected else f"{type(error).__name__}: {error}"
                self._changed.notify_all()
            if not is_expected:
                _log.exception("the thread of the environment pool failed")

    def _end_all(self) -> None:
        """End all episodes, and wait until their environments are closed, for CLOSE_SECONDS."""
        with self._changed:
            self._send_touched()
            for found in self._alive.values():
                found.owed = ""
                if not found.is_ending:
                    self._end(found, seconds=CLOSE_SECONDS)
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._alive and not self._server.has_ended and (left := deadline - time.monotonic()) > 0:
            for owner in self._children.wait(left):
                with self._changed:
                    self._receive_of(owner)

    def _deadlines(self) -> Iterator[float]:
        yield from (found.deadline for found in self._alive.values() if found.deadline is not None)
        if self._server.has_ended:
            yield 0.0
        elif self._server.loaded is None:
            yield self._server.load_deadline

    def _send_touched(self) -> None:
        for found in self._touched:
            if found.key not in self._alive or found.channel is None:
                continue  # its process has ended meanwhile, which _handle_end handles
            if found.is_ending:
                self._end(found, seconds=CLOSE_SECONDS)
            else:
                self._send(found, found.channel)
        self._touched.clear()

    def _send(self, found: _Episode, channel: Channel) -> None:
        found.deadline = self._reply_deadline()
        self._children.send(channel, found.unsent)
        found.unsent = b""

    def _reply_deadline(self) -> float:
        """Return when an outcome must have come that a process begins to make now."""
        return time.monotonic() + self.settings.timeout_seconds + GRACE_SECONDS

    def _fork_waiting(self) -> None:
        while self._server.loaded is not None and not self._server.has_ended and self._waiting and self._may_fork():
            found = self._waiting.popleft()
            try:
                own_end, child_end = socket.socketpair()
            except OSError as error:
                raise EpisodeError(
                    f"no connection for one more episode ({error.strerror}), and {len(self._alive)} are running; raise "
                    "the limit of open files (ulimit -n), or lower worker.rollout.environment_workers"
                ) from error
            found.channel = Channel(own_end, max_bytes=max_reply_bytes(self.settings.max_image_pixels))
            self._alive[found.key] = found
            self._children.watch(found.channel, found)
            self._tell_server({"fork": found.key}, child_end)
            found.unforked = found.unsent
            self._send(found, found.channel)

    def _tell_server(self, message: Mapping[str, Any], *given: socket.socket) -> None:
        self._server.forget_output()
        self._children.send(self._server.channel, encode_frame(message), *given)

    def _may_fork(self) -> bool:
        """Return whether one more episode may have a process.

        The limit is exceeded when the caller waits, and nothing will come from those that have one:
        it may want to start all episodes before it steps any.
        """
        if len(self._alive) < self.settings.max_episodes + self._num_beyond_limit:
            return True
        will_come = self._outcomes or any(found.owed or found.is_ending for found in self._alive.values())
        if self._num_polling and not will_come:
            self._num_beyond_limit += self.settings.max_episodes
            return True
        return False

    def _receive_of(self, owner: object) -> None:
        """Handle what the fork server, or the process of an episode, has sent."""
        if isinstance(owner, _Episode):
            self._receive(owner)
            return
        for frame in self._children.receive(self._server):
            try:
                self._handle_message(frame.content)
            except FORGED:  # the user's code wrote to the channel
                self._server.has_ended = True
        self._changed.notify_all()  # it may have loaded the code

    def _handle_message(self, message: Mapping[str, Any]) -> None:
        """Handle a message of the fork server. Raises: one of FORGED if it is none."""
        if "forked" in message:
            if found := self._alive.get(int(message["forked"])):
                self._note_forked(found)
            return
        code = os.waitstatus_to_exitcode(int(message["status"]))
        reason = str(message["reason"])[:_MAX_REASON_CHARACTERS] or describe_exit(code)
        # Unless it has replied before, the episode has failed.
        if found := self._alive.pop(int(message["ended"]), None):
            if found.channel is not None and found.owed:
                self._receive(found)
            self._fail(found, f"its process {reason}")
            self._disconnect(found)
            if not self._waiting and len(self._alive) <= self.settings.max_episodes:
                self._num_beyond_limit = 0

    def _note_forked(self, found: _Episode) -> None:
        """Begin the time of an episode that was forked, and of the ones that still wait for that.

        The server forks one after the other, which takes long if its memory is large.
        """
        for each in (found, *(each for each in self._alive.values() if each.unforked)):
            if each.owed and not each.is_ending:
                each.deadline = self._reply_deadline()
        found.unforked = b""

    def _receive(self, found: _Episode) -> None:
        """Handle what the process of an episode has sent."""
        channel = found.channel
        if channel is None or (found.is_ending and not found.owed):  # it was stopped meanwhile
            return
        try:
            for frame in channel.receive():
                if not found.owed:
                    raise ValueError("a reply that was not asked for")
                if error := frame.content.get("error"):
                    line = " ".join(scrub(str(error)).split())[:_MAX_ERROR_CHARACTERS]
                    self._fail(found, explain_withheld(line, self.settings.passed_variables))
                    self._log_traceback(scrub(str(frame.content.get("traceback", "")))[-_MAX_TRACEBACK_CHARACTERS:])
                else:
                    self._add(read_reply(found.number, frame, max_image_pixels=self.settings.max_image_pixels))
                found.owed, found.deadline, found.unforked = "", None, b""
                self._num_deaths = 0
        except ValueError as error:  # the user's code has written to the connection
            self._fail(found, f"its process sent what is no reply: {error}")
            self._end(found, seconds=0.0)
            return
        if not channel.is_open and not found.is_ending:
            self._children.forget(channel)
            self._end(found, seconds=GRACE_SECONDS)  # "ended" says how

    def _end(self, found: _Episode, *, seconds: float) -> None:
        """Let the fork server kill the process of an episode, unless it ends in this time."""
        found.is_ending = True
        found.deadline = time.monotonic() + seconds + KILL_SECONDS
        if not found.owed:
            self._disconnect(found)
        self._tell_server({"stop": found.key, "seconds": seconds})

    def _disconnect(self, found: _Episode) -> None:
        if found.channel is not None:
            self._children.forget(found.channel)
            found.channel.close()
            found.channel = None

    def _fail(self, found: _Episode, error: str) -> None:
        """Mark an episode as failed.

        A caller that does not wait gets the error at its next step.
        """
        found.error = found.error or error
        if found.owed:
            found.owed = ""
            self._add(Outcome(found.number, None, None, True, found.error))

    def _log_traceback(self, trace: str) -> None:
        if trace and self._num_tracebacks < _MAX_TRACEBACKS:
            self._num_tracebacks += 1
            last = "; later ones are not logged" if self._num_tracebacks == _MAX_TRACEBACKS else ""
            _log.warning("%s failed in an episode%s:\n%s", self.settings.where, last, trace.rstrip())

    def _end_late(self, now: float) -> None:
        """End episodes whose time is over, and replace a fork server that has died."""
        for found in list(self._alive.values()):
            if found.deadline is None or found.deadline > now:
                continue
            if found.is_ending:
                self._server.has_ended = True  # it should have ended the process long ago
            else:
                seconds = self.settings.timeout_seconds
                self._fail(found, f"no result of {found.owed} within {seconds:g} s; its process was killed")
                self._end(found, seconds=0.0)
        is_late = self._server.loaded is None and self._server.load_deadline <= now
        if is_late or self._server.has_ended:
            self._replace_server()

    def _replace_server(self) -> None:
        """Start a new fork server. Raises: EpisodeError if that would not help."""
        ending = self._children.end(self._server)
        self._num_deaths += 1
        lost, waiting = [], []
        for found in self._alive.values():
            self._disconnect(found)
            if found.unforked and found.owed:
                found.unsent, found.unforked = found.unforked, b""
                found.deadline, found.is_ending = None, False
                waiting.append(found)
            else:
                lost.append(found)
                self._fail(found, f"the fork server of its process {ending.text}")
        self._alive.clear()
        self._waiting.extendleft(reversed(waiting))
        where = self.settings.where
        if self._num_deaths >= MAX_SERVER_DEATHS:
            raise EpisodeError(
                f"{where}: its fork server died {self._num_deaths} times in a row; the last one {ending.text}\n"
                f"{ending.output}"
            )
        _log.warning(
            "the fork server of %s %s; %d episodes are lost, and it is started again", where, ending.text, len(lost)
        )
        self._server = self._children.start("environment")


def max_reply_bytes(max_image_pixels: int) -> int:
    """Return the maximum size of a reply: escaped text, and images that do not compress."""
    return 12 * MAX_TEXT_CHARACTERS + MAX_IMAGES * (4 * max_image_pixels + (1 << 16))


def read_reply(episode: int, frame: Frame, *, max_image_pixels: int) -> Outcome:
    """Return the outcome that a reply without an error reports.

    The reply may be forged, since the user's code runs in the process that sends it.
    Raises: ValueError if it is not a reply.
    """
    try:
        observation = _read_observation(frame.content["messages"], frame.files)
        reward, done = frame.content["reward"], frame.content["done"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"an invalid reply: {type(error).__name__}: {error}") from None
    if observation is not None:
        check_observation(observation, max_image_pixels=max_image_pixels)
    if not isinstance(done, bool):
        raise ValueError("an invalid reply: done is not true or false")
    return Outcome(episode, observation, None if reward is None else read_reward(reward), done)


def _read_observation(messages: Any, files: tuple[bytes, ...]) -> Observation | None:
    if messages is None:
        return None
    read: list[Message] = []
    start = 0
    for message in messages:
        end = start + message["num_images"]
        if not isinstance(message["text"], str) or not start <= end <= len(files):
            raise ValueError("an invalid reply: a message without its text or its images")
        read.append(Message(message["role"], message["text"], files[start:end]))
        start = end
    return Observation(tuple(read))
