"""The process of one episode: a fork of the fork server, which makes an environment and steps it.

Frames on its connection, each answered by one, unless it says "quiet":

    -> {"do": "reset", "row": {...}, "quiet": false}, with the prompt's images as files
    -> {"do": "step", "action": "..."}
    <- {"messages": [{"role": ..., "text": ..., "num_images": 1}] or null, "reward": 1.0 or null,
        "done": false}, with images as files
    <- {"error": "...", "traceback": "..."}     the episode has failed

When the connection closes, the episode is over, and the environment's close() is called.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from trigon.config.names import ObservationRole
from trigon.environments.conversion import to_observation, to_step
from trigon.environments.frames import MAX_FRAME_BYTES, Frame, FrameReader, encode_frame
from trigon.environments.protocol import Observation
from trigon.environments.tools import IMAGES
from trigon.system.images import LazyImages

_MAX_ERROR_CHARACTERS = 300
_MAX_TRACEBACK_CHARACTERS = 4000
_STDERR = 2


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """What an episode is held to. Fields as in EnvironmentSettings."""

    timeout_seconds: float
    observation_role: ObservationRole
    max_image_pixels: int


def run_episode(connection: socket.socket, make: Callable[[], Any], limits: EpisodeLimits) -> None:
    """Run one episode, until the connection closes. make: returns the user's environment."""
    _seed()
    environment: Any = None
    for frame in _frames(connection):
        try:
            with _stack_at(limits.timeout_seconds):
                if frame.content["do"] == "reset":
                    environment = make()
                    value = environment.reset(frame.content["row"] | {IMAGES: LazyImages(frame.files)})
                    name, reward, done = "reset", None, False
                else:
                    name = "step"
                    value, reward, done = _described(name, to_step, environment.step(frame.content["action"]))
                observation = _described(
                    name,
                    to_observation,
                    value,
                    role=limits.observation_role,
                    max_image_pixels=limits.max_image_pixels,
                )
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
            _send(connection, encode_frame(_failure(error)))
            return
        if not frame.content.get("quiet"):
            _send(connection, _encode(observation, reward, done))
    close = getattr(environment, "close", None)
    if callable(close):
        close()


class _WrongReturn(Exception):
    """The environment returned something that is no observation, reward or end."""


def _described(name: str, convert: Callable[..., Any], value: object, **options: Any) -> Any:
    try:
        return convert(value, **options)
    except ValueError as error:
        raise _WrongReturn(f"{name} {error}") from None


def _seed() -> None:
    """Seed the generators that many environments use, the same for each episode.

    They would be seeded from the system's otherwise, and differ from run to run.
    """
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)


def _frames(connection: socket.socket) -> Iterator[Frame]:
    reader = FrameReader(max_bytes=MAX_FRAME_BYTES)
    # It ends with ConnectionResetError if the other side had not read all when it closed.
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(1 << 18):
            yield from reader.feed(data)


def _send(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it was stopped meanwhile
        connection.sendall(data)


def _encode(observation: Observation | None, reward: float | None, done: bool) -> bytes:
    messages = () if observation is None else observation.messages
    content = {
        "messages": None
        if observation is None
        else [{"role": each.role, "text": each.text, "num_images": len(each.images)} for each in messages],
        "reward": reward,
        "done": done,
    }
    return encode_frame(content, [image for message in messages for image in message.images])


def _failure(error: BaseException) -> dict[str, str]:
    """Return an error of the user's code: a line with its location, and a traceback."""
    line = " ".join(str(error).split())[:_MAX_ERROR_CHARACTERS]
    if isinstance(error, _WrongReturn):
        return {"error": line, "traceback": ""}
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    line = f"{type(error).__name__}: {line}" if line else type(error).__name__
    where = traceback.extract_tb(frame)
    line += f" ({os.path.basename(where[-1].filename)}:{where[-1].lineno})" if where else ""
    trace = "".join(traceback.format_exception(type(error), error, frame))
    return {"error": line, "traceback": trace[-_MAX_TRACEBACK_CHARACTERS:]}


@contextlib.contextmanager
def _stack_at(seconds: float) -> Iterator[None]:
    """Print the stack after some seconds, shortly after which this process is killed."""
    faulthandler.dump_traceback_later(seconds, file=_STDERR)  # by a C thread, so it works for hangs in C code
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
