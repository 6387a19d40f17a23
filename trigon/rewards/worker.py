"""The main program of a reward worker: loads the reward function, and calls it with a time limit.

At load, each contract is adapted to one: `async score(list) -> list`. A function that is not async
becomes a coroutine that never waits, and is run without an event loop, so that it can start one of
its own. A weighted sum of several functions is one function of the same kind.

Calls one after the other, in the main thread, or several at a time in an event loop if the function
is async. Does not depend on how failures are handled. Messages after the ones in system/child.py:

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
import functools
import os
import resource
import socket
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from trigon.errors import RewardError
from trigon.rewards import contract as contract_module
from trigon.rewards.contract import (
    APPLIES,
    BLOCKED_SECONDS,
    IMAGE_SIZES,
    IMAGES,
    CallStyle,
    Unit,
    detect_contract,
    is_async,
    is_class,
    read_scores,
    short_repr,
)
from trigon.rewards.load import RewardTerm, decode_terms, load_function
from trigon.system.confinement import kernel
from trigon.system.confinement.supervisor import Confined, begin_child
from trigon.system.frames import Frame, encode_frame, read_frames
from trigon.system.hangs import register_stacks
from trigon.system.machine import count_usable_cpus
from trigon.system.secrets import ARGUMENTS
from trigon.system.user_code import check_arguments, describe_error, read_signature, text_of

MAX_OPEN_FILES = 1024
"""Maximum number of files and sockets that a reward function may have open."""

_STDERR = 2
_OWN_FILES = (__file__, contract_module.__file__)

Message = dict[str, object]
RewardInput = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadedFunction:
    """A reward function with its arguments bound, or a sum of several.

    score: returns what the function returns for each completion of a list, in order; with the unit
    "completion", the list has one.
    """

    score: Callable[[Sequence[RewardInput]], Coroutine[Any, Any, Sequence[object]]]
    style: CallStyle


class WrongLength(RewardError):
    """A batch function returned no list, or one of another length than its argument."""


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
            function = load_terms(decode_terms(setup.content), concurrency=setup.content["concurrency"])
        except RewardError as error:
            channel.sendall(encode_frame({"load_error": str(error)}))
            return
        channel.sendall(encode_frame({"loaded": asdict(function.style)}))
        calls = _Calls(function, channel, timeout_seconds=setup.content["timeout_seconds"])
        if not function.style.is_async:
            for frame in frames:
                calls.run(frame.content)
            return
        import asyncio  # here, since other functions do not need it

        asyncio.run(calls.run_async(frames))


def load_terms(terms: Sequence[RewardTerm], *, concurrency: int) -> LoadedFunction:
    """Return a reward function, or the weighted sum of several.

    concurrency: calls of async functions at a time, where a list of completions is scored.
    Raises: RewardError if a function cannot be loaded, fits no contract, or does not accept its
    keyword arguments.
    """
    loaded = [(term, _load(term)) for term in terms]
    return _weighted_sum(loaded, concurrency=concurrency) if terms[0].name else loaded[0][1]


def _load(term: RewardTerm) -> LoadedFunction:
    source, kwargs, where = term.source, term.kwargs, term.source.where
    option = f"kwargs of {term.name!r}" if term.name else ARGUMENTS
    function, declared, takes_images = load_function(source)
    if is_class(function):  # once for each worker, so that it can load a model or open a connection
        function, kwargs = _construct(function, kwargs, where=where, option=option), {}
    contract = declared if source.pickled else detect_contract(function, declared, kwargs, where=where)
    media: tuple[str, ...] = ()  # further arguments of the legacy contract
    if contract == "legacy":
        parameters = list(read_signature(function, where=where, error=RewardError).parameters.values())[2:]
        named = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        media = tuple(name for name in named if name in (IMAGES, IMAGE_SIZES) and name not in kwargs)
    check_arguments(
        function,
        kwargs,
        num_positional=2 if contract == "legacy" else 1,
        others=media,
        where=where,
        called=f"called by the {contract} contract",
        option=option,
        error=RewardError,
    )
    unit: Unit = "completion" if contract in ("sequential", "legacy") else "batch" if contract == "batch" else "group"
    waits = is_async(function)
    call: Callable[..., Any] = functools.partial(function, **kwargs)

    async def score(reward_inputs: Sequence[RewardInput]) -> Sequence[object]:
        if unit != "completion":
            returned = call(reward_inputs)
        elif contract == "sequential":
            returned = call(*reward_inputs)
        else:
            [one] = reward_inputs
            returned = call(one["response"], one["ground_truth"], **{name: one[name] for name in media})
        if waits:
            returned = await returned
        return [returned] if unit == "completion" else _check_length(returned, len(reward_inputs))

    return LoadedFunction(score, CallStyle(unit, waits, takes_images or IMAGES in media))


def _construct(
    function: Callable[..., object], kwargs: Mapping[str, Any], *, where: str, option: str
) -> Callable[..., object]:
    """Return an object of a class that is a reward function. Raises: RewardError."""
    check_arguments(function, kwargs, where=where, called="made", option=option, error=RewardError)
    try:
        made = function(**kwargs)
    except (Exception, SystemExit) as error:
        trace = "".join(traceback.format_exception(error))
        raise RewardError(f"{where} failed to start: {type(error).__name__}: {text_of(error)}\n{trace}") from error
    if not callable(made):
        raise RewardError(f"{where} is a class whose objects cannot be called; give it a method __call__")
    return made


def _check_length(returned: object, length: int) -> list[object] | tuple[object, ...]:
    """Return what a batch function returned for `length` completions. Raises: WrongLength."""
    if hasattr(returned, "tolist"):  # an array or a tensor of scores
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        raise WrongLength(f"returned {short_repr(returned)}, expected a list of {length} scores")
    if len(returned) != length:
        raise WrongLength(f"returned a list of {len(returned)} for {length} completions")
    return returned


def _weighted_sum(terms: Sequence[tuple[RewardTerm, LoadedFunction]], *, concurrency: int) -> LoadedFunction:
    """Return a function that sums the rewards of all terms.

    It scores one completion at a time, unless one of the functions scores a batch or a group, and
    is async if one of them is: these then run at the same time. Its parts are "overall", the
    weighted sum; by the name of each term its reward, without the weight; and its other parts with
    that name before them: "accuracy", "accuracy/steps".
    A function that returns None for a completion does not apply to it: it has no part in the sum,
    and the weights of the others are scaled so that all of them together weigh as before (APPLIES).
    """
    styles = [function.style for _, function in terms]
    units = {style.unit for style in styles}
    unit: Unit = "group" if "group" in units else "batch" if "batch" in units else "completion"
    any_async = any(style.is_async for style in styles)
    limits: list[AbstractAsyncContextManager[Any]] = [nullcontext() for _ in terms]
    if any_async and unit != "completion":
        import asyncio  # here, since other functions do not need it

        # One for each function: with one for all, a completion would wait for the other functions'
        # calls, within its time limit.
        limits = [asyncio.Semaphore(concurrency) for _ in terms]

    async def score(reward_inputs: Sequence[RewardInput]) -> Sequence[object]:
        limited = [(*each, limit) for each, limit in zip(terms, limits, strict=True)]
        if any_async:
            scores = await _gather([_scores(term, function, reward_inputs, limit) for term, function, limit in limited])
        else:
            scores = [await _scores(term, function, reward_inputs, limit) for term, function, limit in limited]
        names = [term for term, _ in terms]
        return [_sum(list(zip(names, each, strict=True))) for each in zip(*scores, strict=True)]

    takes_images = any(style.takes_images for style in styles)
    one_by_one = unit != "completion" and any(style.is_async and style.unit == "completion" for style in styles)
    return LoadedFunction(score, CallStyle(unit, any_async, takes_images, limits_completions=one_by_one))


async def _scores(
    term: RewardTerm,
    function: LoadedFunction,
    reward_inputs: Sequence[RewardInput],
    limit: AbstractAsyncContextManager[Any],
) -> list[dict[str, float] | None]:
    """Return the scores of completions by one function, None where it does not apply.

    limit: entered for each call of an async function. Raises: RewardError that names the function.
    """
    lists = [[each] for each in reward_inputs] if function.style.unit == "completion" else [reward_inputs]

    async def call(reward_inputs: Sequence[RewardInput]) -> Sequence[object]:
        async with limit:
            return await function.score(reward_inputs)

    if function.style.is_async:
        returned = await _gather([call(each) for each in lists])
    else:
        returned = [await function.score(each) for each in lists]
    try:
        return [None if value is None else read_scores(value) for values in returned for value in values]
    except RewardError as error:
        raise RewardError(f"{term.name} {error}") from error


def _sum(scores: Sequence[tuple[RewardTerm, Mapping[str, float] | None]]) -> dict[str, float]:
    """Return the weighted sum and its parts. Raises: RewardError if no function applies."""
    applied = [(term, each) for term, each in scores if each is not None]
    if not applied:
        names = " and ".join(term.name for term, _ in scores)
        raise RewardError(f"{names} returned None: no function applies to this completion; at least one must score it")
    weight = sum(abs(term.weight) for term, _ in applied)
    scale = sum(abs(term.weight) for term, _ in scores) / weight if weight and len(applied) < len(scores) else 1.0
    parts = {"overall": sum(term.weight * scale * each["overall"] for term, each in applied)}
    if len(applied) < len(scores):
        parts |= {f"{term.name}{APPLIES}": float(each is not None) for term, each in scores}
    for term, each in applied:
        parts[term.name] = each["overall"]
        parts |= {f"{term.name}/{part}": value for part, value in each.items() if part != "overall"}
    return parts


async def _gather(calls: Sequence[Awaitable[T]]) -> list[T]:
    """Return the results of calls that run at the same time. Raises: the error of the first one."""
    import asyncio

    results = await asyncio.gather(*calls, return_exceptions=True)  # all of them, so that the error is always the same
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


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
        limit = self._function.style.time_limit(len(reward_inputs), self._timeout_seconds)
        _limit_cpu(limit)
        _print_stack_after(limit)
        begin = time.perf_counter()
        try:
            reply = _results(_run_to_end(self._function.score(reward_inputs)))
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
            limit = self._function.style.time_limit(len(message["requests"]), self._timeout_seconds)
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

    def _watch_loop(self) -> None:
        """Print the stack when the event loop is blocked beyond a call's time limit."""
        faulthandler.cancel_dump_traceback_later()
        if self._deadlines:
            left = min(self._deadlines.values()) - time.monotonic()
            _print_stack_after(max(left, 0.0) + BLOCKED_SECONDS / 2)


def _run_to_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits. Raises: what it raises."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("a function that is not async has waited")


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

    These are the images of the prompt, and of the observation of each turn.
    """
    if IMAGES not in reward_input:
        return reward_input
    from trigon.system.image_formats import LazyImages  # here: functions that look at no images need no Pillow

    turns = [{**turn, IMAGES: LazyImages(turn[IMAGES])} for turn in reward_input["turns"]]
    return {**reward_input, IMAGES: LazyImages(reward_input[IMAGES]), "turns": turns}


def _limit_cpu(timeout_seconds: float) -> None:
    """Limit the CPU time of this process to what calls that end in time can use.

    A lower limit than the last one would end calls of an async function that may still use that.
    """
    last, hard = resource.getrlimit(resource.RLIMIT_CPU)
    limit = int(time.process_time() + timeout_seconds * count_usable_cpus()) + 10
    if last != resource.RLIM_INFINITY:
        limit = max(limit, last)
    resource.setrlimit(resource.RLIMIT_CPU, (kernel.at_most(hard, limit), hard))


def _print_stack_after(seconds: float) -> None:
    """Print the stack of all threads after some seconds, unless this is called again before."""
    faulthandler.dump_traceback_later(seconds, file=_STDERR)  # by a C thread, so it works for hangs in C code
