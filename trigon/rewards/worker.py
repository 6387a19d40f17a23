"""The main program of a reward worker, which calls the reward function with a time limit.

Calls one after the other, in the main thread, or several at a time in an event loop if the function
is async. Does not depend on how failures are handled. Messages after those of system/child.py:

    -> {"call": "5f1c...", "requests": [reward_input, ...]}
                                          "images" and "videos" of each are paths, and "images" of
                                          each of its turns
    <- {"call": "5f1c...", "seconds": 0.1, "results": [...]}
                                          of each reward_input, in order: {"scores": {...}}, or
                                          {"error": "...", "traceback": "..."} if what the function
                                          returned for it is no score
       {"call": "5f1c...", "seconds": 0.1, "error": "...", "traceback": "..."}
                                          if the call has failed

"wrong_length": true in an error says that the function returned another number of results than
asked for, and "timed_out": true that the call was cancelled at its time limit. A worker with an
async function may end calls in any order.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trigon.errors import RewardError
from trigon.rewards import contract, functions
from trigon.rewards.contract import BLOCKED_SECONDS, IMAGES, WrongLength, limit_of_call, read_scores
from trigon.rewards.functions import LoadedFunction, load_setup, run_now
from trigon.system.confinement import kernel
from trigon.system.confinement.supervisor import Confined, begin_child
from trigon.system.frames import Frame, encode_frame, read_frames
from trigon.system.hangs import register_stacks
from trigon.system.machine import count_usable_cpus
from trigon.system.user_code import describe_error

MAX_OPEN_FILES = 1024
"""Maximum number of files and sockets that a reward function may have open."""

_STDERR = 2
_OWN_FILES = (__file__, functions.__file__, contract.__file__)

Message = dict[str, object]
Send = Callable[[Message], None]


def main(channel_fd: int, confined: Confined) -> None:
    """Serve until the channel closes."""
    with begin_child(channel_fd, confined, max_open_files=MAX_OPEN_FILES) as channel:
        register_stacks()
        _serve(channel)
    os._exit(0)  # not sys.exit, which would wait for threads that the user's code has started


def _serve(channel: socket.socket) -> None:
    frames = read_frames(channel)
    for setup in frames:
        try:
            function = load_setup(setup.content)
        except RewardError as error:
            channel.sendall(encode_frame({"load_error": str(error)}))
            return
        loaded = {"unit": function.unit, "is_async": function.is_async, "takes_images": function.takes_images}
        channel.sendall(encode_frame({"loaded": loaded}))
        calls = _Calls(function, channel, timeout_seconds=setup.content["timeout_seconds"])
        if not function.is_async:
            for frame in frames:
                calls.run(frame.content)
            return
        import asyncio  # here, since other functions do not need it

        asyncio.run(calls.run_async(frames))


class _Calls:
    """Calls the function, and sends the results."""

    def __init__(self, function: LoadedFunction, channel: socket.socket, *, timeout_seconds: float) -> None:
        self._function = function
        self._channel = channel
        self._timeout_seconds = timeout_seconds
        self._deadlines: dict[object, float] = {}  # of the running calls of an async function, by task

    def run(self, message: dict[str, Any]) -> None:
        """Call a function that is not async.

        Prints the stack at the time limit. The driver kills this process shortly after it.
        """
        reward_inputs = [_with_images(each) for each in message["requests"]]
        limit = self._limit(len(reward_inputs))
        _limit_cpu(limit)
        _print_stack_after(limit)
        begin = time.perf_counter()
        try:
            reply = _results(run_now(self._function.score(reward_inputs)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
            reply = _failure(error)
        finally:
            faulthandler.cancel_dump_traceback_later()
        self._send(message, reply, begin)

    async def run_async(self, frames: Iterator[Frame]) -> None:
        """Call an async function for each frame as soon as it arrives, until the process ends."""
        import asyncio

        loop = asyncio.get_running_loop()

        def read() -> None:
            try:
                for frame in frames:
                    loop.call_soon_threadsafe(begin, frame.content)
            finally:
                os._exit(0)  # the driver has closed the channel

        def begin(message: dict[str, Any]) -> None:
            limit = self._limit(len(message["requests"]))
            _limit_cpu(limit)
            task = loop.create_task(self._run_one(message, limit))
            self._deadlines[task] = time.monotonic() + limit  # the loop keeps weak references of tasks
            task.add_done_callback(end)
            self._watch_loop()

        def end(task: asyncio.Task[None]) -> None:
            del self._deadlines[task]
            task.result()
            self._watch_loop()

        # A thread, so that the driver can send while a call blocks the loop.
        threading.Thread(target=read, name="requests", daemon=True).start()
        await loop.create_future()  # it is never set: the process ends in read()

    async def _run_one(self, message: dict[str, Any], limit_seconds: float) -> None:
        """Make a call, which is cancelled at its time limit.

        If it does not end then, or blocks the event loop, the driver kills the process.
        """
        import asyncio

        reward_inputs = [_with_images(each) for each in message["requests"]]
        limit = asyncio.timeout(limit_seconds)
        begin = time.perf_counter()
        # CancelledError: of a task of the user's code. Nothing else cancels this one.
        try:
            async with limit:
                reply = _results(await self._function.score(reward_inputs))
            failed: BaseException = TimeoutError()  # it returned something when it was cancelled
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001 - the user's code
            reply = _failure(error)
            failed = error.__cause__ or error  # the cause is the cancellation, in the user's code
        if limit.expired():
            said = f"no score within {limit_seconds:g} s; it was cancelled"
            reply = {"error": said, "traceback": _failure(failed)["traceback"], "timed_out": True}
        self._send(message, reply, begin)

    def _send(self, message: dict[str, Any], reply: Message, begin: float) -> None:
        seconds = time.perf_counter() - begin
        self._channel.sendall(encode_frame({"call": message["call"], "seconds": seconds, **reply}))

    def _limit(self, num_completions: int) -> float:
        is_group = self._function.unit == "group"
        return limit_of_call(num_completions, is_group=is_group, timeout_seconds=self._timeout_seconds)

    def _watch_loop(self) -> None:
        """Print the stack when the event loop is blocked beyond a call's time limit."""
        faulthandler.cancel_dump_traceback_later()
        if self._deadlines:
            left = min(self._deadlines.values()) - time.monotonic()
            _print_stack_after(max(left, 0.0) + BLOCKED_SECONDS / 2)


def _results(returned: Sequence[object]) -> Message:
    """Return the reply for what a function returned for each completion."""
    results: list[Message] = []
    for value in returned:
        try:
            results.append({"scores": read_scores(value)})
        except RewardError as error:
            results.append(_failure(error))
    return {"results": results}


def _failure(error: BaseException) -> Message:
    """Return the reply for an error."""
    line, trace = describe_error(error, own_files=_OWN_FILES, own_type=RewardError)
    reply: Message = {"error": line, "traceback": trace}
    return reply | {"wrong_length": True} if isinstance(error, WrongLength) else reply


def _with_images(reward_input: dict[str, Any]) -> dict[str, Any]:
    """Return a reward_input with images in place of their paths, if it has any.

    Those of the prompt, and those in the observation of each turn.
    """
    if IMAGES not in reward_input:
        return reward_input
    from trigon.system.image_formats import LazyImages  # here: functions that look at no images need no Pillow

    turns = [{**turn, IMAGES: LazyImages(turn[IMAGES])} for turn in reward_input["turns"]]
    return {**reward_input, IMAGES: LazyImages(reward_input[IMAGES]), "turns": turns}


def _limit_cpu(timeout_seconds: float) -> None:
    """Limit the CPU time of this process to what calls that end in time can use."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    limit = int(time.process_time() + timeout_seconds * count_usable_cpus()) + 10
    resource.setrlimit(resource.RLIMIT_CPU, (kernel.at_most(hard, limit), hard))


def _print_stack_after(seconds: float) -> None:
    """Print the stack of all threads after some seconds, unless this is called again before."""
    faulthandler.dump_traceback_later(seconds, file=_STDERR)  # by a C thread, so it works for hangs in C code
