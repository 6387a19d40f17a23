"""Runs episodes, each in a process of its own, and never waits for one of them.

A failure costs the episode that caused it, never the run or another episode. A thread of the pool
communicates with the processes. So time limits hold, and episodes go on, while the caller samples.

    caller   --- start, step, stop -->   pool's thread   --- "fork", "stop" -->   fork server
             <-- poll: outcomes ------                   <-- "ended" -------        |  |  |
                                                         <== frames =========>    episodes
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trigon.environments.calls import find_calls
from trigon.environments.frames import encode_frame
from trigon.environments.protocol import Outcome
from trigon.environments.replies import max_reply_bytes, read_reply
from trigon.environments.running import RunningEpisode
from trigon.environments.server import Ended, ServerProcess
from trigon.environments.settings import EnvironmentSettings, encode_setup
from trigon.errors import EpisodeError
from trigon.rewards.process import (
    KILL_SECONDS,
    check_passed_variables,
    explain_withheld,
    warn_of_withheld_variables,
)
from trigon.system.json_files import dump_columns
from trigon.system.secrets import scrub

CLOSE_SECONDS = 2.0
"""How long an environment's close() may take."""

MAX_SERVER_DEATHS = 3
"""The run stops when the fork server has died so many times without an outcome in between."""

_GRACE_SECONDS = 0.2  # how long a process lives after its time limit, to print its stack
_MAX_TRACEBACKS = 5  # of failed episodes, in the log
_PROCESSES_PER_EPISODE = 16

_log = logging.getLogger(__name__)


class EnvironmentPool:
    """The episodes of an engine. May be used by any thread."""

    def __init__(self, settings: EnvironmentSettings, *, describe: bool = False) -> None:
        """Start the fork server, which loads the user's code; ready() waits for it.

        describe: make the descriptions of tools (schemas), which takes seconds.
        Raises: EpisodeError if JSON cannot represent the keyword arguments; RewardError if one of
        passed_variables is not set.
        """
        self._settings = settings
        self._is_tools = settings.environment is None
        self._setup = encode_setup(settings, describe=describe)
        check_passed_variables(settings.passed_variables)
        files = [source.file for source in settings.sources if source.file]
        warn_of_withheld_variables(files, settings.passed_variables)
        self._confinement = settings.confinement.with_readable(str(Path(file).parent) for file in files)
        self._confinement = self._confinement.with_processes(_PROCESSES_PER_EPISODE * settings.max_episodes)
        self._confinement = replace(self._confinement, runs_code=settings.runs_code)
        self._changed = threading.Condition()  # its lock guards all that follows
        self._episodes: dict[int, RunningEpisode] = {}  # of the caller, by number
        self._waiting: deque[RunningEpisode] = deque()  # for a process
        self._alive: dict[int, RunningEpisode] = {}  # with a process, by key; stopped ones until that has ended
        self._touched: list[RunningEpisode] = []  # by the caller, for the thread
        self._outcomes: deque[Outcome] = deque()
        self._num_polling = 0
        self._num_keys = 0
        self._num_beyond_limit = 0
        self._num_servers = 0
        self._num_deaths = 0
        self._num_tracebacks = 0
        self._omitted_columns: set[str] = set()
        self._fatal_error = ""
        self._is_closed = False
        self._selector = selectors.DefaultSelector()
        self._wake_sender, self._wake_receiver = socket.socketpair()  # ends a select() of the pool's thread
        for end in (self._wake_sender, self._wake_receiver):
            end.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._start_server()
        self._thread = threading.Thread(target=self._run, name="environments", daemon=True)
        self._thread.start()

    def ready(self) -> None:
        """Wait until the code has been loaded.

        Raises: EpisodeError if it cannot be loaded, or does not follow the protocol.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._server.is_loaded or self._fatal_error)
            self._check()

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """The descriptions of the tools, for chat templates; waits for them. Raises: as ready."""
        self.ready()
        return self._server.schemas

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The process id below which all processes of the pool are."""
        return (self._server.process.pid,)

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
            found = RunningEpisode(
                episode, self._num_keys, max_reply_bytes=max_reply_bytes(self._settings.max_image_pixels)
            )
            self._episodes[episode] = found
            # Tools get images only: what they run, a model wrote, and rows have the ground truth.
            columns, omitted = ("{}", ()) if self._is_tools else dump_columns(row)
            self._warn_omitted(omitted)
            found.opening = encode_frame({"do": "reset", "quiet": self._is_tools}, images, row=columns)
            if self._is_tools:  # a process is forked for the first turn with a call
                self._add(Outcome(episode, None, None, done=False))
            else:
                found.owed = "reset"
                self._waiting.append(found)
                self._wake()

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
            if self._is_tools and not find_calls(action, self._settings.tool_format):
                self._add(Outcome(episode, None, None, done=True))
                return
            found.owed = "step"
            # Half a character, which a tokenizer may leave, cannot be encoded.
            text = action.encode("utf-8", errors="replace").decode()
            frame = encode_frame({"do": "step", "action": text})
            if found.is_ending:  # its process has died, and "ended" will say how
                return
            if found.connection is None:
                found.opening += frame
                self._waiting.append(found)
            else:
                found.opening = frame
                self._touched.append(found)
            self._wake()

    def poll(self, timeout_seconds: float) -> list[Outcome]:
        """Return the outcomes since the last call, in order of arrival.

        Waits at most timeout_seconds for the first. Raises: EpisodeError if the pool has failed.
        """
        with self._changed:
            if not self._outcomes and timeout_seconds > 0 and not self._fatal_error:
                self._num_polling += 1
                self._wake()  # see _may_fork
                self._changed.wait_for(lambda: self._outcomes or self._fatal_error, timeout_seconds)
                self._num_polling -= 1
            if not self._outcomes:
                self._check()
            outcomes = list(self._outcomes)
            self._outcomes.clear()
            return outcomes

    def stop(self, episode: int) -> None:
        """End an episode. Its environment's close() is called; outcomes that it owes never come."""
        with self._changed:
            found = self._episodes.pop(episode)
            self._outcomes = deque(each for each in self._outcomes if each.episode != episode)
            found.owed = ""
            if found in self._waiting:
                self._waiting.remove(found)
            if found.connection is not None:
                found.is_ending = True
                self._touched.append(found)
                self._wake()

    def close(self) -> None:
        """End all episodes and processes. The pool is then unusable."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._fatal_error = self._fatal_error or "the environment pool is closed"
            self._changed.notify_all()
            self._wake()
        self._thread.join()
        self._server.close()
        for found in self._alive.values():
            self._disconnect(found)
        self._alive.clear()
        self._selector.close()
        self._wake_sender.close()
        self._wake_receiver.close()

    def _check(self) -> None:
        if self._fatal_error:
            raise EpisodeError(self._fatal_error)

    def _add(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._changed.notify_all()

    def _wake(self) -> None:
        """End the current or next select() of the pool's thread."""
        with contextlib.suppress(BlockingIOError):  # the buffer is full, so select() will return
            self._wake_sender.send(b"!")

    def _warn_omitted(self, columns: Sequence[str]) -> None:
        for column in set(columns) - self._omitted_columns - {"images"}:
            self._omitted_columns.add(column)
            _log.warning(
                "column %r of the dataset has values that JSON cannot represent; the environment gets its rows "
                "without this column",
                column,
            )

    # The rest runs in the thread of the pool, except for the first _start_server.

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    if self._is_closed:
                        return
                    self._send_touched()
                    self._fork_waiting()
                    deadline = min(self._deadlines(), default=None)
                now = time.monotonic()
                events = self._selector.select(None if deadline is None else max(0.0, deadline - now))
                with self._changed:
                    if self._is_closed:
                        return
                    for key, mask in events:
                        self._handle(key, mask)
                    # `now` was read before select(): what arrived in time counts if read late.
                    self._end_late(now)
        except BaseException as error:  # noqa: BLE001 - the caller waits, so it must get every error
            with self._changed:
                is_expected = isinstance(error, EpisodeError)
                self._fatal_error = str(error) if is_expected else f"{type(error).__name__}: {error}"
                self._changed.notify_all()
            if not is_expected:
                _log.exception("the thread of the environment pool failed")

    def _start_server(self) -> None:
        is_first = not self._num_servers
        self._num_servers += 1
        self._server = ServerProcess(self._settings, self._setup, confinement=self._confinement, warn=is_first)
        self._selector.register(self._server.process.channel, selectors.EVENT_READ)
        self._selector.register(self._server.process.output, selectors.EVENT_READ)

    def _deadlines(self) -> list[float]:
        deadlines = [found.deadline for found in self._alive.values()]
        return [each for each in (*deadlines, self._server.deadline) if each is not None]

    def _send_touched(self) -> None:
        for found in self._touched:
            if found.key not in self._alive or found.connection is None:
                continue  # its process has ended meanwhile, which _server_said handles
            if found.is_ending:
                self._end(found, seconds=CLOSE_SECONDS)
            else:
                found.deadline = time.monotonic() + self._settings.timeout_seconds + _GRACE_SECONDS
                found.send(found.opening)
                found.opening = b""
                self._select_for(found)
        self._touched.clear()

    def _fork_waiting(self) -> None:
        while self._server.is_loaded and not self._server.process.ended and self._waiting and self._may_fork():
            found = self._waiting.popleft()
            try:
                found.connection, child_end = socket.socketpair()
            except OSError as error:
                raise EpisodeError(
                    f"no connection for one more episode ({error.strerror}), and {len(self._alive)} are running; raise "
                    "the limit of open files (ulimit -n), or lower worker.rollout.environment_workers"
                ) from error
            with child_end:
                found.connection.setblocking(False)
                self._alive[found.key] = found
                self._server.tell(f'{{"fork": {found.key}}}', [child_end.fileno()])
            found.deadline = time.monotonic() + self._settings.timeout_seconds + _GRACE_SECONDS
            found.send(found.opening)
            found.opening, found.again = b"", found.opening
            self._selector.register(found.connection, selectors.EVENT_READ, found)
            self._select_for(found)

    def _may_fork(self) -> bool:
        """Return whether one more episode may have a process.

        The limit is exceeded when the caller waits, and nothing will come from those that have one:
        it may want to start all episodes before it steps any.
        """
        if len(self._alive) < self._settings.max_episodes + self._num_beyond_limit:
            return True
        will_come = self._outcomes or any(found.owed or found.is_ending for found in self._alive.values())
        if self._num_polling and not will_come:
            self._num_beyond_limit += self._settings.max_episodes
            return True
        return False

    def _select_for(self, found: RunningEpisode) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if found.has_unsent else 0)
        assert found.connection is not None
        if found.connection in self._selector.get_map():
            self._selector.modify(found.connection, events, found)

    def _handle(self, key: selectors.SelectorKey, mask: int) -> None:
        if key.fileobj is self._wake_receiver:
            self._wake_receiver.recv(4096)
        elif key.fileobj is self._server.process.output:
            if not self._server.process.log_output():
                self._selector.unregister(self._server.process.output)
        elif key.fileobj is self._server.process.channel:
            for event in self._server.receive():
                if isinstance(event, Ended):
                    self._handle_end(event)
                elif found := self._alive.get(event.key):
                    found.again = b""
            self._changed.notify_all()  # it may have loaded the code
        elif isinstance(key.data, RunningEpisode) and key.data.connection is key.fileobj:
            if mask & selectors.EVENT_WRITE:
                key.data.flush()
                self._select_for(key.data)
            if mask & selectors.EVENT_READ:
                self._receive(key.data)
        # Otherwise it was closed while an earlier event was handled.

    def _receive(self, found: RunningEpisode) -> None:
        """Handle what the process of an episode has sent."""
        try:
            frames, is_open = found.receive()
            for frame in frames:
                outcome, trace = read_reply(found.number, frame, max_image_pixels=self._settings.max_image_pixels)
                if not found.owed:
                    raise ValueError("a reply that was not asked for")
                found.owed, found.deadline, found.again = "", None, b""
                self._num_deaths = 0
                if outcome.error:
                    found.error = explain_withheld(outcome.error, self._settings.passed_variables)
                    outcome = Outcome(found.number, None, None, True, found.error)
                    self._log_traceback(found, trace)
                self._add(outcome)
        except ValueError as error:  # the user's code has written to the connection
            self._fail(found, f"its process sent what is no reply: {error}")
            self._end(found, seconds=0.0)
            return
        connection = found.connection
        if not is_open and connection is not None and connection in self._selector.get_map():
            self._selector.unregister(connection)
            self._end(found, seconds=_GRACE_SECONDS)  # "ended" says how

    def _end(self, found: RunningEpisode, *, seconds: float) -> None:
        """Let the fork server kill the process of an episode, unless it ends in this time."""
        found.is_ending = True
        found.deadline = time.monotonic() + seconds + KILL_SECONDS
        if found.connection is not None and not found.owed:
            self._disconnect(found)
        self._server.tell(f'{{"stop": {found.key}, "seconds": {seconds}}}')

    def _disconnect(self, found: RunningEpisode) -> None:
        if found.connection is None:
            return
        if found.connection in self._selector.get_map():
            self._selector.unregister(found.connection)
        found.connection.close()
        found.connection = None

    def _fail(self, found: RunningEpisode, error: str) -> None:
        """Let an episode fail. A caller that waits for nothing gets the error at its next step."""
        found.error = found.error or error
        if found.owed:
            found.owed = ""
            self._add(Outcome(found.number, None, None, True, found.error))

    def _log_traceback(self, found: RunningEpisode, trace: str) -> None:
        if trace and self._num_tracebacks < _MAX_TRACEBACKS:
            self._num_tracebacks += 1
            last = "; later ones are not logged" if self._num_tracebacks == _MAX_TRACEBACKS else ""
            _log.warning("%s failed in an episode%s:\n%s", self._settings.where, last, trace.rstrip())

    def _handle_end(self, ended: Ended) -> None:
        """Let an episode fail whose process has ended, unless it has replied before."""
        found = self._alive.pop(ended.key, None)
        if found is None:
            return
        if found.connection is not None and found.owed:
            self._receive(found)
        self._fail(found, f"its process {ended.ending}")
        self._disconnect(found)
        if not self._waiting and len(self._alive) <= self._settings.max_episodes:
            self._num_beyond_limit = 0

    def _end_late(self, now: float) -> None:
        """End episodes whose time is over, and replace a fork server that has died."""
        for found in list(self._alive.values()):
            if found.deadline is None or found.deadline > now:
                continue
            if found.is_ending:
                self._server.process.ended = True  # it should have ended the process long ago
            else:
                seconds = self._settings.timeout_seconds
                self._fail(found, f"no result of {found.owed} within {seconds:g} s; its process was killed")
                self._end(found, seconds=0.0)
        if self._server.deadline is not None and self._server.deadline <= now:
            self._replace_server()

    def _replace_server(self) -> None:
        """Start a new fork server. Raises: EpisodeError if that would not help."""
        process = self._server.process
        for stream in (process.channel, process.output):
            if stream in self._selector.get_map():
                self._selector.unregister(stream)
        ending = self._server.end()
        self._num_deaths += 1
        lost, waiting = [], []
        for found in self._alive.values():
            self._disconnect(found)
            if found.again and found.owed:
                found.wait_again()
                waiting.append(found)
            else:
                lost.append(found)
                self._fail(found, f"the fork server of its process {ending}")
        self._alive.clear()
        self._waiting.extendleft(reversed(waiting))
        where = self._settings.where
        if self._num_deaths >= MAX_SERVER_DEATHS:
            raise EpisodeError(
                f"{where}: its fork server died {self._num_deaths} times in a row; the last one {ending}\n"
                f"{scrub(process.tail)}"
            )
        _log.warning("the fork server of %s %s; %d episodes are lost, and it is started anew", where, ending, len(lost))
        self._start_server()
