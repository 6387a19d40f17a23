"""Calls a reward function for the completions of a chunk, and makes a result of each.

Runs in reward workers, in the main thread. async_calls.py does the same for async functions. Does
not depend on how results are sent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, assert_never

from trigon.errors import RewardError
from trigon.rewards.contract import (
    IMAGES,
    LoadedFunction,
    RewardContract,
    WrongLength,
    call_legacy,
    check_length,
    limit_of_call,
    read_scores,
)
from trigon.rewards.limits import at_most
from trigon.system.cpus import count_usable_cpus

RewardInput = dict[str, Any]

Result = dict[str, object]
"""A line to the driver, see trigon.rewards.worker."""

BLOCKED_SECONDS = 1.0
"""How long the driver waits for an async function after its time limit, before it kills the worker.

The call is cancelled at the limit, but others may keep the event loop busy.
"""

_MAX_TRACEBACK_CHARACTERS = 4000
_MAX_ERROR_CHARACTERS = 300
_STDERR = 2
_OWN_FILES = (__file__, *(str(Path(__file__).with_name(name)) for name in ("async_calls.py", "contract.py")))


def score_chunk(
    reward_inputs: list[RewardInput], function: LoadedFunction, *, timeout_seconds: float
) -> Iterator[Result]:
    """Yield a result for each reward_input, or one {"retry_singly": True} for all."""
    match function.contract:
        case "batch" | "group":
            start = time.perf_counter()
            try:
                with _time_limit(limit_of_call(function.contract, len(reward_inputs), timeout_seconds)):
                    returned = check_length(function.call(reward_inputs), len(reward_inputs))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
                seconds = time.perf_counter() - start
                yield from failure_of_list(error, function.contract, len(reward_inputs), seconds=seconds)
                return
            yield from results_of_list(returned, seconds=time.perf_counter() - start)
        case "sequential":
            for reward_input in reward_inputs:
                yield _score(function.call, reward_input, timeout_seconds=timeout_seconds)
        case "legacy":
            for reward_input in reward_inputs:
                yield _score(call_legacy, function, reward_input, timeout_seconds=timeout_seconds)
        case _:
            assert_never(function.contract)


def results_of_list(returned: Sequence[object], *, seconds: float) -> Iterator[Result]:
    """Yield the result of each value that a function returned for a list. seconds: of its call."""
    for value in returned:
        try:
            result: Result = {"scores": read_scores(value)}
        except RewardError as error:
            result = failure(error)
        yield {**result, "seconds": seconds / len(returned)}


def failure_of_list(
    error: BaseException, contract: RewardContract, num_completions: int, *, seconds: float
) -> Iterator[Result]:
    """Yield the results for a list whose scoring raised an error: of a group, one for each."""
    if contract == "group":
        yield from [{**failure(error), "seconds": seconds / num_completions}] * num_completions
    elif num_completions > 1:
        # Another error is that of one completion, which is found by scoring each alone.
        yield {"retry_singly": True, "error": str(error) if isinstance(error, WrongLength) else ""}
    else:
        yield {**failure(error), "seconds": seconds}


def failure(error: BaseException) -> Result:
    """Return the result for an error: a line with its location, and a traceback.

    The traceback omits the frames of this package's calls.
    """
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename in _OWN_FILES:
        frame = frame.tb_next
    line = " ".join(str(error).split())[:_MAX_ERROR_CHARACTERS]
    if not isinstance(error, RewardError):  # a RewardError of this package needs no type and no location
        line = f"{type(error).__name__}: {line}" if line else type(error).__name__
        where = traceback.extract_tb(frame)
        line += f" ({os.path.basename(where[-1].filename)}:{where[-1].lineno})" if where else ""
    trace = "".join(traceback.format_exception(type(error), error, frame))
    return {"error": line, "traceback": trace[-_MAX_TRACEBACK_CHARACTERS:]}


def with_images(reward_input: RewardInput) -> RewardInput:
    """Return a reward_input with images in place of their paths, if it has any.

    Those of the prompt, and those in the observation of each turn.
    """
    if IMAGES not in reward_input:
        return reward_input
    from trigon.system.images import LazyImages  # here: functions that look at no images need no Pillow

    turns = [{**turn, IMAGES: LazyImages(turn[IMAGES])} for turn in reward_input["turns"]]
    return {**reward_input, IMAGES: LazyImages(reward_input[IMAGES]), "turns": turns}


def limit_cpu(timeout_seconds: float) -> None:
    """Limit the CPU time of this process to what calls that end in time can use."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    limit = int(time.process_time() + timeout_seconds * count_usable_cpus()) + 10
    resource.setrlimit(resource.RLIMIT_CPU, (at_most(hard, limit), hard))


def print_stack_after(seconds: float) -> None:
    """Print the stack of all threads after so many seconds, unless this is called again before."""
    faulthandler.dump_traceback_later(seconds, file=_STDERR)  # by a C thread, so it works for hangs in C code


def _score(function: Callable[..., object], *arguments: object, timeout_seconds: float) -> Result:
    start = time.perf_counter()
    try:
        with _time_limit(timeout_seconds):
            result: Result = {"scores": read_scores(function(*arguments))}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
        result = failure(error)
    return {**result, "seconds": time.perf_counter() - start}


@contextlib.contextmanager
def _time_limit(timeout_seconds: float) -> Iterator[None]:
    """Print the stack after timeout_seconds, and limit the CPU time.

    The driver kills this process shortly after timeout_seconds.
    """
    limit_cpu(timeout_seconds)
    print_stack_after(timeout_seconds)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
