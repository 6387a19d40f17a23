"""The fork server as its pool knows it: started, told what to do, and its messages read."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trigon.environments.settings import EnvironmentSettings
from trigon.errors import EpisodeError, RewardError
from trigon.rewards.confinement.options import Confinement, check_confinement
from trigon.rewards.process import FORK_SERVER, ChildProcess, describe_exit, explain_withheld
from trigon.system.json_files import parse_json
from trigon.system.secrets import scrub
from trigon.system.signals import termination_blocked

LOAD_SECONDS = 300.0
"""Time limit for loading the user's code, with all its imports."""

_SEND_SECONDS = 30.0  # for a short line
_MAX_REASON_CHARACTERS = 500

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ended:
    """The process of an episode has ended. ending: how, in words that follow its name."""

    key: int
    ending: str


@dataclass(frozen=True, slots=True)
class Forked:
    """An episode has a process."""

    key: int


class ServerProcess:
    """A fork server. See fork_server.py for its messages.

    is_loaded: whether it has loaded the user's code. schemas: of its tools, if they were asked for.
    """

    def __init__(self, settings: EnvironmentSettings, setup: str, *, confinement: Confinement, warn: bool) -> None:
        """Start it. setup: its first line. warn: whether to log what is not confined."""
        with termination_blocked():  # until the server has its handlers
            self.process = ChildProcess(
                "environment",
                confinement=confinement,
                passed_variables=settings.passed_variables,
                module=FORK_SERVER,
            )
        self.is_loaded = False
        self.schemas: tuple[Mapping[str, Any], ...] = ()
        self._settings = settings
        self._confinement = confinement
        self._is_confined = False
        self._is_killed = False
        self._warn = warn
        self._deadline = time.monotonic() + LOAD_SECONDS
        self.tell(setup)

    @property
    def deadline(self) -> float | None:
        """When it must be replaced, unless it says something before; None: never."""
        if self.process.ended:
            return 0.0
        return None if self.is_loaded else self._deadline

    def tell(self, line: str, descriptors: Sequence[int] = ()) -> None:
        """Send a line. If it does not read it, it is to be replaced."""
        try:
            self.process.send(line, timeout_seconds=_SEND_SECONDS, descriptors=descriptors)
        except (ConnectionError, TimeoutError):
            self.process.ended = True

    def receive(self) -> list[Forked | Ended]:
        """Read its messages, and return those about episodes. Call it when the channel is readable.

        Raises: EpisodeError if the user's code cannot be loaded, or cannot be confined as it must.
        """
        events: list[Forked | Ended] = []
        for line in self.process.receive():
            try:
                events += self._handle(parse_json(line))
            except (ValueError, KeyError, TypeError, AttributeError):  # the user's code wrote to the channel
                self.process.ended = True
        return events

    def end(self) -> str:
        """Kill it with all that it has started, and return how it ended, in words after its name.

        Raises: EpisodeError if it has not loaded the code, since a new one would not either.
        """
        is_late = not self.process.ended
        code = self._kill()
        ending = self.process.exceeded or describe_exit(code)
        if self.is_loaded:
            return ending
        if is_late and code == -signal.SIGKILL and not self.process.exceeded:
            ending = f"took more than {LOAD_SECONDS:g} s and was killed"
        where = self._settings.where
        raise EpisodeError(f"{where}: its process {ending} while loading\n{scrub(self.process.tail)}")

    def close(self) -> None:
        """Kill it with all that it has started, unless it has been ended."""
        if not self._is_killed:
            self._kill()

    def _kill(self) -> int:
        self._is_killed = True
        return self.process.kill()

    def _handle(self, message: dict[str, Any]) -> list[Forked | Ended]:
        """Handle a message. Raises: ValueError, KeyError or TypeError if it is invalid."""
        if not self._is_confined:
            self._check_confinement(message)
            self._is_confined = True
        elif not self.is_loaded:
            if "load_error" in message:
                error = scrub(str(message["load_error"]))
                raise EpisodeError(explain_withheld(error, self._settings.passed_variables))
            self.schemas = tuple(message["tools"])
            self.is_loaded = bool(message["loaded"])
        elif "forked" in message:
            return [Forked(int(message["forked"]))]
        else:
            code = os.waitstatus_to_exitcode(int(message["status"]))
            reason = str(message["reason"])[:_MAX_REASON_CHARACTERS]
            return [Ended(int(message["ended"]), reason or describe_exit(code))]
        return []

    def _check_confinement(self, message: dict[str, Any]) -> None:
        """Warn of what is not confined here. Raises: EpisodeError if that is not acceptable."""
        try:
            warning = check_confinement(
                self._confinement, message["used"], str(message["obstacle"]), confined="environments and tools"
            )
        except RewardError as error:
            raise EpisodeError(str(error)) from error
        if warning and self._warn:
            _log.warning("%s", warning)
