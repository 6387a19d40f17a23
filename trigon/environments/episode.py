"""The child in which episodes run: a fork server that loads the user's code, and a fork for each.

A fork makes an environment, and steps it. Frames on its connection, each answered by one, unless it
says "quiet":

    -> {"do": "reset", "row": {...}, "quiet": false}, with the prompt's images as files
    -> {"do": "step", "action": "..."}
    <- {"messages": [{"role": ..., "text": ..., "num_images": 1}] or null, "reward": 1.0 or null,
        "done": false}, with images as files
    <- {"error": "...", "traceback": "..."}     the episode has failed

When the connection closes, or after an error, the episode is over, and the environment's close() is
called.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import random
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from PIL import Image

from trigon.environments.conversion import to_observation, to_png, to_step
from trigon.environments.source import check_environment, load_code
from trigon.environments.tools import (
    IMAGES,
    ToolEnvironment,
    connect_code_server,
    describe_tools,
    find_obstacle,
    load_tools,
    python,
)
from trigon.errors import EpisodeError
from trigon.system.confinement.supervisor import Confined, begin_child
from trigon.system.fork_server import ForkServer, Work, call_in_a_fork
from trigon.system.frames import encode_frame, read_frames
from trigon.system.image_formats import LazyImages
from trigon.system.user_code import CodeSource, describe_error

MAX_OPEN_FILES = 4096
"""Maximum number of files and sockets that an episode may have open."""

_STDERR = 2


def main(channel_fd: int, confined: Confined) -> None:
    """Serve until the channel closes."""
    connect_code_server(confined.code_server)
    with begin_child(channel_fd, confined, max_open_files=MAX_OPEN_FILES) as channel:
        ForkServer(channel).serve(_load)
    os._exit(0)  # not sys.exit, which would wait for threads that the user's code has started


def _load(setup: dict[str, Any]) -> tuple[dict[str, Any], Work]:
    """Load the user's code. Returns: the schemas of its tools, and what runs an episode.

    Raises: EpisodeError if it cannot be loaded.
    """
    make_environment: Callable[[], Any] | None = None
    if setup["environment"] is not None:
        source = CodeSource(**setup["environment"])
        made, kwargs = load_code(source), setup["kwargs"]
        check_environment(made, kwargs, where=source.where)
        make_environment = partial(made, **kwargs)
    tools = load_tools([CodeSource(**each) for each in setup["tools"]])
    if tools.get("python") is python and (obstacle := find_obstacle()):
        raise EpisodeError(
            f"the tool python cannot be confined on this system: {obstacle}; see docs/agents.md, or leave it "
            "out of worker.rollout.tools"
        )
    schemas: list[dict[str, Any]] = []
    if setup["describe"]:
        describe = partial(describe_tools, tools)
        schemas = call_in_a_fork(describe, wanted="the tools cannot be described to the model", error=EpisodeError)

    def make() -> Any:
        environment = None if make_environment is None else make_environment()
        if not tools:
            return environment
        return ToolEnvironment(
            tools,
            environment,
            tool_format=setup["tool_format"],
            role=setup["tool_role"],
            timeout_seconds=setup["timeout_seconds"],
            max_image_pixels=setup["max_image_pixels"],
        )

    Image.open(io.BytesIO(to_png(Image.new("RGB", (1, 1))))).load()  # or each fork imports Pillow's plugins
    return {"tools": schemas}, partial(_run, make, setup)


def _run(make: Callable[[], Any], setup: dict[str, Any], connection: socket.socket) -> None:
    """Run one episode, until the connection closes. make: returns the user's environment."""
    _seed()
    environment: Any = None
    for frame in read_frames(connection):
        name = frame.content["do"]
        try:
            with _stack_at(setup["timeout_seconds"]):
                if name == "reset":
                    environment = make()
                    returned = environment.reset(frame.content["row"] | {IMAGES: LazyImages(frame.files)})
                else:
                    returned = environment.step(frame.content["action"])
                reply = _make_reply(name, returned, setup)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
            line, trace = describe_error(error, own_files=(__file__,), own_type=_WrongReturn)
            trace = "" if isinstance(error, _WrongReturn) else trace  # it has no frames of the user's
            _send(connection, encode_frame({"error": line, "traceback": trace}))
            break
        if not frame.content.get("quiet"):
            _send(connection, reply)
    close = getattr(environment, "close", None)
    if callable(close):
        close()


class _WrongReturn(Exception):
    """The environment returned something that is no observation, reward or end."""


def _make_reply(name: str, returned: object, setup: dict[str, Any]) -> bytes:
    """Return the frame with what reset or step returned. Raises: _WrongReturn if it is wrong."""
    try:
        value, reward, done = (returned, None, False) if name == "reset" else to_step(returned)
        observation = to_observation(value, role=setup["observation_role"], max_image_pixels=setup["max_image_pixels"])
    except ValueError as error:
        raise _WrongReturn(f"{name} {error}") from None
    messages = () if observation is None else observation.messages
    described = [{"role": each.role, "text": each.text, "num_images": len(each.images)} for each in messages]
    content = {"messages": None if observation is None else described, "reward": reward, "done": done}
    return encode_frame(content, [image for message in messages for image in message.images])


def _seed() -> None:
    """Seed the generators that many environments use, the same for each episode.

    They would be seeded from the system's otherwise, and differ from run to run.
    """
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)


def _send(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it was stopped meanwhile
        connection.sendall(data)


@contextlib.contextmanager
def _stack_at(seconds: float) -> Iterator[None]:
    """Print the stack after some seconds, shortly after which this process is killed."""
    faulthandler.dump_traceback_later(seconds, file=_STDERR)  # by a C thread, so it works for hangs in C code
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
