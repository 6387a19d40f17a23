"""Calls an async reward function for several chunks at a time, in an event loop.

Runs in reward workers. Each call has its own time limit, after which it is cancelled. A call that
does not end when it is cancelled, or that blocks the event loop, is found by the driver, which
kills the process. Does not depend on how many calls the driver lets run at a time.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, assert_never

from trigon.rewards.calls import (
    BLOCKED_SECONDS,
    Result,
    RewardInput,
    failure,
    failure_of_list,
    limit_cpu,
    print_stack_after,
    results_of_list,
    with_images,
)
from trigon.rewards.contract import LoadedFunction, call_legacy, check_length, limit_of_call

SendResult = Callable[[str, int, Result], None]
"""Sends a result of a chunk: the chunk's id, the result's number, and the result."""


def serve(function: LoadedFunction, lines: Iterable[bytes], send: SendResult, *, timeout_seconds: float) -> None:
    """Score the chunks of lines, each as soon as its line arrives, until the process ends."""
    asyncio.run(_Calls(function, send, timeout_seconds).serve(lines))


class _Calls:
    """The calls that run now."""

    def __init__(self, function: LoadedFunction, send: SendResult, timeout_seconds: float) -> None:
        self._function = function
        self._send = send
        self._timeout_seconds = timeout_seconds
        self._deadlines: dict[asyncio.Task[None], float] = {}  # of the running calls; the loop keeps weak references

    async def serve(self, lines: Iterable[bytes]) -> None:
        loop = asyncio.get_running_loop()

        def read() -> None:
            try:
                for line in lines:
                    loop.call_soon_threadsafe(self._start, json.loads(line))
            finally:
                os._exit(0)  # the driver has closed the channel

        # A thread, so that the driver can send while a call blocks the loop.
        threading.Thread(target=read, name="requests", daemon=True).start()
        await loop.create_future()  # it is never set: the process ends in read()

    def _start(self, chunk: dict[str, Any]) -> None:
        limit = self._limit(chunk["requests"])
        limit_cpu(limit)
        requests = [with_images(each) for each in chunk["requests"]]
        task = asyncio.get_running_loop().create_task(self._score(chunk["chunk"], requests))
        self._deadlines[task] = time.monotonic() + limit
        task.add_done_callback(self._end)
        self._watch()

    def _end(self, task: asyncio.Task[None]) -> None:
        del self._deadlines[task]
        task.result()
        self._watch()

    def _watch(self) -> None:
        """Print the stack when the loop is blocked beyond a call's time limit."""
        faulthandler.cancel_dump_traceback_later()
        if self._deadlines:
            left = min(self._deadlines.values()) - time.monotonic()
            print_stack_after(max(left, 0.0) + BLOCKED_SECONDS / 2)

    async def _score(self, chunk_id: str, reward_inputs: list[RewardInput]) -> None:
        for number, result in enumerate(await self._results(reward_inputs)):
            self._send(chunk_id, number, result)

    async def _results(self, reward_inputs: list[RewardInput]) -> list[Result]:
        """Return a result for each reward_input, or one {"retry_singly": True} for all."""
        number, start = len(reward_inputs), time.perf_counter()
        limit = asyncio.timeout(self._limit(reward_inputs))
        # CancelledError: of a task of the user's code. Nothing else cancels this one.
        try:
            async with limit:
                returned = check_length(await self._call(reward_inputs), number)
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001 - the user's code
            seconds = time.perf_counter() - start
            if limit.expired():
                return list(self._timeout(error, number, seconds))
            return list(failure_of_list(error, self._function.contract, number, seconds=seconds))
        seconds = time.perf_counter() - start
        if limit.expired():  # it returned something when it was cancelled
            return list(self._timeout(TimeoutError(), number, seconds))
        return list(results_of_list(returned, seconds=seconds))

    async def _call(self, reward_inputs: list[RewardInput]) -> object:
        """Return what the function returns for a chunk, as a list."""
        match self._function.contract:
            case "batch" | "group":
                return await self._function.call(reward_inputs)
            case "sequential":
                [reward_input] = reward_inputs
                return [await self._function.call(reward_input)]
            case "legacy":
                [reward_input] = reward_inputs
                return [await call_legacy(self._function, reward_input)]
            case _:
                assert_never(self._function.contract)

    def _limit(self, reward_inputs: list[RewardInput]) -> float:
        return limit_of_call(self._function.contract, len(reward_inputs), self._timeout_seconds)

    def _timeout(self, error: BaseException, number: int, seconds: float) -> Iterator[Result]:
        if number > 1 and self._function.contract != "group":
            yield {"retry_singly": True, "error": "", "timed_out": True}
            return
        where = failure(error.__cause__ or error)["traceback"]  # the cause is the cancellation, in the user's code
        limit = limit_of_call(self._function.contract, number, self._timeout_seconds)
        message = f"no score within {limit:g} s; it was cancelled"
        yield from [{"error": message, "traceback": where, "seconds": seconds / number, "timed_out": True}] * number
