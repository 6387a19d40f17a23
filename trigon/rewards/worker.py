"""The main program of a reward worker, which runs the reward function with resource limits.

The function runs in the main thread: calls.py, or async_calls.py for async functions. Does not
depend on the number of workers and on how failures are handled. The driver's side is
trigon.rewards.process and trigon.rewards.pool; this process has been started and confined by
trigon.rewards.confinement.supervisor. Messages are lines of JSON:

    <- {"used": ["landlock", ...], "obstacle": ""}  how it is confined, before user code is loaded
    -> {"source": {"file": ..., "module": ..., "function": ..., "pickled": ...}, "terms": [...],
        "kwargs": {...}, "timeout_seconds": 10.0, "concurrency": 16}
                                                    source: null if the reward is a sum of terms
    <- {"contract": "batch", "is_async": false, "takes_images": false}
                                                    or {"load_error": "..."}; then it exits
    -> {"chunk": "5f1c...", "requests": [reward_input, ...]}
                                                    "images" and "videos" of each are paths, and
                                                    "images" of each of its turns
    <- {"scores": {"overall": 1.0}, "seconds": 0.1, ...}  for each reward_input, in order, or
       {"error": "...", "traceback": "...", "seconds": 0.1, ...}  if it failed for this one, or
       {"retry_singly": true, "error": ..., ...}    once, if it failed for several at once; error is
                                                    "" unless the number of results is wrong

A worker with an async function is sent further chunks before it has ended the first, and may end
them in any order; "timed_out": true in an error or in retry_singly says that it was cancelled at
its time limit. Results also contain "chunk" and "number", their position within the chunk.
"seconds" is the time in the function; of a batch function, that of the chunk divided by the number
of its completions.
"""

from __future__ import annotations

import faulthandler
import io
import json
import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trigon.errors import RewardError
from trigon.rewards.calls import Result, score_chunk, with_images
from trigon.rewards.confinement.supervisor import Confined
from trigon.rewards.contract import (
    IMAGES,
    LoadedFunction,
    bind_kwargs,
    construct,
    detect_contract,
    is_async,
    is_class,
    media_arguments,
)
from trigon.rewards.limits import limit_resources
from trigon.rewards.load import RewardSource, RewardTerm, load_function
from trigon.rewards.weighted import weighted_sum
from trigon.system.secrets import ARGUMENTS
from trigon.system.signals import outlive_stop_signals
from trigon.system.stacks import register_stacks

MAX_FILE_BYTES = 1 << 30
"""Maximum size of a file that a reward function may write."""

MAX_OPEN_FILES = 1024
"""Maximum number of files and sockets that a reward function may have open."""

_STDERR = 2


def main(channel_fd: int, confined: Confined) -> None:
    """Process requests until the channel closes."""
    outlive_stop_signals()  # the driver, which saves first, ends this process
    limit_resources(max_file_bytes=MAX_FILE_BYTES, max_open_files=MAX_OPEN_FILES)
    os.set_inheritable(channel_fd, False)
    for stream_of_text in (sys.stdout, sys.stderr):
        assert isinstance(stream_of_text, io.TextIOWrapper)
        stream_of_text.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    faulthandler.enable(file=_STDERR)
    register_stacks()
    with socket.socket(fileno=channel_fd) as channel, channel.makefile("rwb") as stream:

        def send(message: Result) -> None:
            stream.write(json.dumps(message).encode() + b"\n")
            stream.flush()

        send({"used": list(confined.used), "obstacle": confined.obstacle})
        if setup := stream.readline():
            _serve(json.loads(setup), stream, send)
    os._exit(0)  # not sys.exit, which would wait for threads that the user's code has started


def _serve(setup: Mapping[str, Any], lines: Iterable[bytes], send: Callable[[Result], None]) -> None:
    try:
        function = _load_setup(setup)
    except RewardError as error:
        send({"load_error": str(error)})
        return
    send({"contract": function.contract, "is_async": function.is_async, "takes_images": function.takes_images})

    def send_result(chunk_id: str, number: int, result: Result) -> None:
        send({**result, "chunk": chunk_id, "number": number})

    if function.is_async:
        from trigon.rewards.async_calls import serve  # imports asyncio, which other functions do not need

        serve(function, lines, send_result, timeout_seconds=setup["timeout_seconds"])
        return
    for line in lines:
        chunk = json.loads(line)
        requests = [with_images(each) for each in chunk["requests"]]
        results = score_chunk(requests, function, timeout_seconds=setup["timeout_seconds"])
        for number, result in enumerate(results):
            send_result(chunk["chunk"], number, result)


def _load_setup(setup: Mapping[str, Any]) -> LoadedFunction:
    """Return the function of a setup, or the sum of several. Raises: RewardError."""
    if setup["source"] is not None:
        return _load(RewardSource(**setup["source"]), setup["kwargs"])
    terms = [RewardTerm(**{**term, "source": RewardSource(**term["source"])}) for term in setup["terms"]]
    loaded = [(term, _load(term.source, term.kwargs, option=f"kwargs of {term.name!r}")) for term in terms]
    return weighted_sum(loaded, concurrency=setup["concurrency"])


def _load(source: RewardSource, kwargs: Mapping[str, Any], *, option: str = ARGUMENTS) -> LoadedFunction:
    """Return a function with its arguments bound. option: their name. Raises: RewardError."""
    loaded = load_function(source)
    function = loaded.function
    if is_class(function):  # once for each worker, so that it can load a model or open a connection
        function, kwargs = construct(function, kwargs, where=source.where, option=option), {}
    contract = detect_contract(function, loaded.reward_type, kwargs, where=source.where)
    arguments = media_arguments(function, contract, kwargs, where=source.where)
    return LoadedFunction(
        bind_kwargs(function, contract, kwargs, where=source.where, option=option),
        contract,
        is_async=is_async(function),
        takes_images=IMAGES in arguments or loaded.takes_images,
        media_arguments=arguments,
    )
