"""The main program of a reward worker, which runs the reward function with resource limits.

The function runs in the main thread. Does not depend on the number of workers and on how failures
are handled. The driver's side is trigon.rewards.process and trigon.rewards.pool; this process has
been started and confined by trigon.rewards.confinement.supervisor. Messages are lines of JSON:

    <- {"used": ["landlock", ...], "obstacle": ""}  how it is confined, before user code is loaded
    -> {"source": {"file": ..., "module": ..., "function": ..., "pickled": ...}, "terms": [...],
        "kwargs": {...}, "timeout_seconds": 10.0}   source: null if the reward is a sum of terms
    <- {"contract": "batch"}                        or {"load_error": "..."}; then it exits
    -> {"chunk": "5f1c...", "requests": [reward_input, ...]}
    <- {"scores": {"overall": 1.0}, "seconds": 0.1, ...}  for each reward_input, in order, or
       {"error": "...", "traceback": "...", "seconds": 0.1, ...}  if it failed for this one, or
       {"retry_singly": true, "error": ..., ...}    once, if it failed for several at once; error is
                                                    "" unless the number of results is wrong

Results also contain "chunk" and "number", their position within the chunk. "seconds" is the time in
the function; of a batch function, that of the chunk divided by the number of its completions.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import resource
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, assert_never

from trigon.errors import RewardError
from trigon.rewards.contract import (
    RewardContract,
    WrongLength,
    bind_kwargs,
    call_legacy,
    check_length,
    detect_contract,
    read_scores,
)
from trigon.rewards.load import RewardSource, RewardTerm, load_function
from trigon.rewards.weighted import weighted_sum
from trigon.system.cpus import count_usable_cpus
from trigon.system.signals import outlive_stop_signals
from trigon.system.stacks import register_stacks

MAX_FILE_BYTES = 1 << 30
"""Maximum size of a file that a reward function may write."""

MAX_OPEN_FILES = 1024
"""Maximum number of files and sockets that a reward function may have open."""

_MAX_TRACEBACK_CHARACTERS = 4000
_MAX_ERROR_CHARACTERS = 300
_STDERR = 2

RewardInput = dict[str, Any]
Result = dict[str, object]


def main(channel_fd: int, used: Sequence[str], obstacle: str) -> None:
    """Process requests until the channel closes.

    used: the mechanisms that confine this process. obstacle: why it has no namespaces, or "".
    """
    outlive_stop_signals()  # the driver, which saves first, ends this process
    _limit_resources()
    os.set_inheritable(channel_fd, False)
    for stream_of_text in (sys.stdout, sys.stderr):
        assert isinstance(stream_of_text, io.TextIOWrapper)
        stream_of_text.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    faulthandler.enable(file=_STDERR)
    register_stacks()
    with socket.socket(fileno=channel_fd) as channel, channel.makefile("rwb") as stream:
        stream.write(json.dumps({"used": list(used), "obstacle": obstacle}).encode() + b"\n")
        stream.flush()
        if setup := stream.readline():
            for message in _serve(json.loads(setup), stream):
                stream.write(json.dumps(message).encode() + b"\n")
                stream.flush()
    os._exit(0)  # not sys.exit, which would wait for threads that the user's code has started


def _serve(setup: Mapping[str, Any], lines: Iterator[bytes]) -> Iterator[Result]:
    try:
        if setup["source"] is not None:
            function, contract = _load(RewardSource(**setup["source"]), setup["kwargs"])
        else:
            terms = [
                RewardTerm(term["name"], term["weight"], RewardSource(**term["source"])) for term in setup["terms"]
            ]
            function, contract = weighted_sum([(term, *_load(term.source, {})) for term in terms])
    except RewardError as error:
        yield {"load_error": str(error)}
        return
    yield {"contract": contract}
    for line in lines:
        chunk = json.loads(line)
        results = score_chunk(chunk["requests"], function, contract, timeout_seconds=setup["timeout_seconds"])
        for number, result in enumerate(results):
            yield {**result, "chunk": chunk["chunk"], "number": number}


def _load(source: RewardSource, kwargs: Mapping[str, Any]) -> tuple[Callable[..., object], RewardContract]:
    """Return a function with its arguments bound, and its contract. Raises: RewardError."""
    function, reward_type = load_function(source)
    contract = detect_contract(function, reward_type, kwargs, where=source.where)
    return bind_kwargs(function, contract, kwargs, where=source.where), contract


def score_chunk(
    reward_inputs: list[RewardInput],
    function: Callable[..., object],
    contract: RewardContract,
    *,
    timeout_seconds: float,
) -> Iterator[Result]:
    """Yield a result for each reward_input, or one {"retry_singly": True} for all."""
    match contract:
        case "batch":
            start = time.perf_counter()
            try:
                with _time_limit(timeout_seconds):
                    returned = check_length(function(reward_inputs), len(reward_inputs))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
                if len(reward_inputs) > 1:
                    # Another error is that of one completion, which is found by scoring each alone.
                    yield {"retry_singly": True, "error": str(error) if isinstance(error, WrongLength) else ""}
                else:
                    yield {**_failure(error), "seconds": time.perf_counter() - start}
                return
            seconds = (time.perf_counter() - start) / len(reward_inputs)
            for value in returned:
                yield {**_score(_identity, value, timeout_seconds=timeout_seconds), "seconds": seconds}
        case "sequential":
            for reward_input in reward_inputs:
                yield _score(function, reward_input, timeout_seconds=timeout_seconds)
        case "legacy":
            for reward_input in reward_inputs:
                yield _score(call_legacy, function, reward_input, timeout_seconds=timeout_seconds)
        case _:
            assert_never(contract)


def _score(function: Callable[..., object], *arguments: object, timeout_seconds: float) -> Result:
    start = time.perf_counter()
    try:
        with _time_limit(timeout_seconds):
            result: Result = {"scores": read_scores(function(*arguments))}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
        result = _failure(error)
    return {**result, "seconds": time.perf_counter() - start}


def _identity(value: object) -> object:
    return value


def _failure(error: BaseException) -> Result:
    """Return the result for an error: a line with its location, and a traceback.

    The traceback omits the frames of this file.
    """
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    line = " ".join(str(error).split())[:_MAX_ERROR_CHARACTERS]
    if not isinstance(error, RewardError):  # a RewardError of this package needs no type and no location
        line = f"{type(error).__name__}: {line}" if line else type(error).__name__
        where = traceback.extract_tb(frame)
        line += f" ({os.path.basename(where[-1].filename)}:{where[-1].lineno})" if where else ""
    trace = "".join(traceback.format_exception(type(error), error, frame))
    return {"error": line, "traceback": trace[-_MAX_TRACEBACK_CHARACTERS:]}


@contextlib.contextmanager
def _time_limit(timeout_seconds: float) -> Iterator[None]:
    """Print the stack after timeout_seconds, and limit the CPU time.

    The driver kills this process shortly after timeout_seconds.
    """
    used_seconds = time.process_time()
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    limit = int(used_seconds + timeout_seconds * count_usable_cpus()) + 10
    resource.setrlimit(resource.RLIMIT_CPU, (_at_most(hard, limit), hard))
    faulthandler.dump_traceback_later(timeout_seconds, file=_STDERR)  # by a C thread, so it works for hangs in C code
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _limit_resources() -> None:
    limits = {
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (_at_most(hard, limit), _at_most(hard, limit)))
    # If memory runs out, the kernel should kill a reward worker rather than the trainer.
    with (
        contextlib.suppress(OSError),  # not on Linux, or not permitted
        open("/proc/self/oom_score_adj", "w") as file,
    ):
        file.write("1000")


def _at_most(hard_limit: int, limit: int) -> int:
    return limit if hard_limit == resource.RLIM_INFINITY else min(limit, hard_limit)
