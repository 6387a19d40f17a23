"""What runs in a reward worker: the user's function, in the main thread, behind limits.

Knows how to live and die (limits, lifeline, where a hang is) and how to call a function of each contract. Refuses to
know how many workers there are and who is to blame. The other end is trigon.rewards.process; a conversation, by lines:

    -> {"file": ..., "module": ..., "function": ..., "kwargs": {...}, "timeout_seconds": 10.0}
    <- {"contract": "batch"}                                     or {"load_error": "..."}, and it exits
    -> [answer, answer, ...]
    <- {"parts": {"overall": 1.0}}                               for each answer, in order;
       {"error": "ValueError: ...", "traceback": "..."}          where the function failed for one;
       {"singly": true}                                          once, where it failed for several at once
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import io
import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, assert_never

from trigon.errors import RewardError
from trigon.rewards.contract import RewardContract, bind, contract_of, parts_of
from trigon.rewards.load import RewardSource, load

MAX_MEMORY_BYTES = 16 << 30
"""Address space of one worker: enough to import large libraries, too little to take the machine down."""

MAX_FILE_BYTES = 1 << 30
"""Longest file that a reward function may write."""

MAX_OPEN_FILES = 1024
"""Files and sockets that a reward function may hold open."""

_MAX_TRACEBACK_CHARACTERS = 4000
_MAX_ERROR_CHARACTERS = 300
_STDERR = 2

Answer = dict[str, Any]
Reply = dict[str, object]


def main(channel_fd: int) -> None:
    """Serve until the channel closes."""
    _die_with_parent()
    _limit_resources()
    os.set_inheritable(channel_fd, False)
    for stream_of_text in (sys.stdout, sys.stderr):
        assert isinstance(stream_of_text, io.TextIOWrapper)
        stream_of_text.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    faulthandler.enable(file=_STDERR)
    with socket.socket(fileno=channel_fd) as channel, channel.makefile("rwb") as stream:
        if greeting := stream.readline():
            for reply in _serve(json.loads(greeting), stream):
                stream.write(json.dumps(reply).encode() + b"\n")
                stream.flush()
    os._exit(0)  # A thread that the user's code left behind must not keep the process.


def _serve(greeting: Mapping[str, Any], requests: Iterator[bytes]) -> Iterator[Reply]:
    source = RewardSource(file=greeting["file"], module=greeting["module"], function=greeting["function"])
    try:
        function, reward_type = load(source)
        contract = contract_of(function, reward_type, greeting["kwargs"], where=source.where)
        function = bind(function, contract, greeting["kwargs"], where=source.where)
    except RewardError as error:
        yield {"load_error": str(error)}
        return
    yield {"contract": contract}
    for request in requests:
        chunk = json.loads(request)
        replies = replies_to(chunk["answers"], function, contract, timeout_seconds=greeting["timeout_seconds"])
        for number, reply in enumerate(replies):
            yield {**reply, "chunk": chunk["chunk"], "number": number}


def replies_to(
    answers: list[Answer], function: Callable[..., object], contract: RewardContract, *, timeout_seconds: float
) -> Iterator[Reply]:
    """Yield a reply for each answer, as soon as there is one; or one {"singly": true} for all."""
    match contract:
        case "batch":
            try:
                with _watched(timeout_seconds):
                    returned = _of_length(len(answers), function(answers))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
                yield {"singly": True} if len(answers) > 1 else _failure(error)
                return
            for one in returned:
                yield _reply(_itself, one, timeout_seconds=timeout_seconds)
        case "sequential":
            for answer in answers:
                yield _reply(function, answer, timeout_seconds=timeout_seconds)
        case "legacy":
            for answer in answers:
                yield _reply(_legacy, function, answer, timeout_seconds=timeout_seconds)
        case _:
            assert_never(contract)


def _reply(score: Callable[..., object], *arguments: object, timeout_seconds: float) -> Reply:
    try:
        with _watched(timeout_seconds):
            return {"parts": parts_of(score(*arguments))}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
        return _failure(error)


def _itself(reply: object) -> object:
    return reply


def _legacy(function: Callable[..., object], answer: Answer) -> object:
    returned = function(answer["response"], answer["ground_truth"])
    return returned if isinstance(returned, Mapping) else {"overall": returned}


def _of_length(length: int, returned: object) -> list[object] | tuple[object, ...]:
    if not isinstance(returned, list | tuple):
        raise RewardError(f"returned {repr(returned)[:80]} where a list of {length} dicts is due")
    if len(returned) != length:
        raise RewardError(f"returned {len(returned)} replies to {length} answers")
    return returned


def _failure(error: BaseException) -> Reply:
    """Say in one line what went wrong and where; and at length, for a person, without the frames of this file."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    line = " ".join(str(error).split())[:_MAX_ERROR_CHARACTERS]
    if not isinstance(error, RewardError):  # ours speak for themselves
        line = f"{type(error).__name__}: {line}" if line else type(error).__name__
        where = traceback.extract_tb(frame)
        line += f" ({os.path.basename(where[-1].filename)}:{where[-1].lineno})" if where else ""
    trace = "".join(traceback.format_exception(type(error), error, frame))
    return {"error": line, "traceback": trace[-_MAX_TRACEBACK_CHARACTERS:]}


@contextlib.contextmanager
def _watched(timeout_seconds: float) -> Iterator[None]:
    """Print where the code is when its time is up; the parent then kills this process. Bound its processor time too."""
    spent = time.process_time()
    cores = os.cpu_count() or 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (_at_most(hard, int(spent + timeout_seconds * cores) + 10), hard))
    faulthandler.dump_traceback_later(timeout_seconds, file=_STDERR)  # by a C thread: sees hangs inside C code, too
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _die_with_parent() -> None:
    """Have the kernel kill this process group when the parent is gone, however the parent went.

    The parent never writes to our stdin, so all that can happen to it is the parent's end closing. It takes a signal,
    since code that hangs while it holds the interpreter lock reads no pipe; and not PR_SET_PDEATHSIG, which comes when
    the *thread* ends that started us.
    """
    lifeline = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    if hasattr(fcntl, "F_SETSIG"):  # Linux; elsewhere SIGIO comes, which ends a process, too
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _limit_resources() -> None:
    limits = {
        resource.RLIMIT_AS: MAX_MEMORY_BYTES,
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, wanted in limits.items():
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (_at_most(hard, wanted), _at_most(hard, wanted)))
    # Where memory runs out, let the kernel take a grader rather than the trainer.
    with (
        contextlib.suppress(OSError),
        open("/proc/self/oom_score_adj", "w") as file,
    ):  # not on Linux, or not ours to set
        file.write("1000")


def _at_most(hard_limit: int, wanted: int) -> int:
    return wanted if hard_limit == resource.RLIM_INFINITY else min(wanted, hard_limit)
