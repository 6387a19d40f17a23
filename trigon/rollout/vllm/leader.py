"""The first rank of a replica decides what is sampled, and the other ranks repeat it.

With tensor parallelism each rank of a replica has a vLLM engine with a part of the model, and all
of them have to get the same requests before the same forward pass. What the requests are depends on
environments and on interruptions, of which the first rank alone knows.

    first rank:   submit  submit  |  step    submit  |  step    |  step    |  end
    messages                      v                  v          v          v
    other ranks:  submit  submit     step    submit     step       step       end

A message has the calls since the last message, and is sent before what needs all ranks. Prompts,
which all ranks have, are sent as their indices; the pixels of an observation are sent once.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, Protocol, assert_never

import torch
import torch.distributed as dist

from trigon.errors import RolloutError
from trigon.rollout.turns import BegunTurn, SampledTurn, TurnEngine, TurnRequest
from trigon.system.trace import DecodeTrace
from trigon.types import Prompt, Vision

MAX_SILENT_SECONDS = 60.0
"""How long the other ranks wait for a message while environments answer.

Half an hour, the time limit of torch's process groups, would end the call.
"""

_END_SECONDS = 10.0
"""How long the first rank tries, after an error, to send the message that ends the call."""

_FRAME_BYTES = 1024
_LENGTH_BYTES = 8


class Ranks(Protocol):
    """The ranks of a replica, as messages pass between them."""

    def send(self, message: bytes, *, seconds: float | None = None) -> None:
        """Send a message from the first rank to all others.

        seconds: time limit; None: that of the process group.
        Raises: RuntimeError if another rank has died, or does not receive the message in time.
        """
        ...

    def receive(self) -> bytes:
        """Return the next message of the first rank. Raises: RuntimeError if it has died."""
        ...


class TensorParallelRanks:
    """The ranks that share a model in vLLM. Satisfies Ranks."""

    def __init__(self) -> None:
        """Find the ranks of the engine that this process has started. Not public in vLLM 0.32."""
        from vllm.distributed import get_tp_group

        group = get_tp_group()
        self._group, self._first = group.cpu_group, group.ranks[0]
        self.is_first = group.rank_in_group == 0

    def send(self, message: bytes, *, seconds: float | None = None) -> None:
        """See Ranks. A short message is one broadcast, a longer one two."""
        length = len(message).to_bytes(_LENGTH_BYTES, "little")
        inline = message if len(message) <= _FRAME_BYTES - _LENGTH_BYTES else b""
        self._broadcast((length + inline).ljust(_FRAME_BYTES, b"\0"), seconds)
        if len(inline) < len(message):
            self._broadcast(message, seconds)

    def receive(self) -> bytes:
        """See Ranks."""
        frame = self._receive(_FRAME_BYTES)
        length = int.from_bytes(frame[:_LENGTH_BYTES], "little")
        if length <= _FRAME_BYTES - _LENGTH_BYTES:
            return frame[_LENGTH_BYTES : _LENGTH_BYTES + length]
        return self._receive(length)

    def _broadcast(self, content: bytes, seconds: float | None) -> None:
        buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        work = dist.broadcast(buffer, src=self._first, group=self._group, async_op=True)
        assert work is not None, "this rank is in the group"
        if seconds is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=seconds))

    def _receive(self, num_bytes: int) -> bytes:
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        dist.broadcast(buffer, src=self._first, group=self._group)
        return buffer.numpy().tobytes()


@dataclass(frozen=True, slots=True)
class _Submit:
    """A call of submit. request: without prompt and visions, of which the indices are sent."""

    request: TurnRequest
    prompt: int
    visions: tuple[int, ...]


Call = _Submit | Literal["stop_waiting", "abort"]
Action = Literal["step", "stop", "wait", "end"]


@dataclass(frozen=True, slots=True)
class _Message:
    """What the other ranks have to do next.

    visions: the pixels of observations, to be added to those that a rank has. calls: since the last
    message. num_turns: how many turns are sampled after these calls. action: what follows them.
    """

    visions: tuple[Vision, ...]
    calls: tuple[Call, ...]
    num_turns: int
    action: Action


class LeadingTurns:
    """Samples turns on all ranks of a replica, for its first rank. Satisfies TurnEngine."""

    def __init__(self, turns: TurnEngine, ranks: Ranks, prompts: Sequence[Prompt]) -> None:
        """Begin a call of generate, in which the other ranks call follow.

        turns: of this rank. prompts: of the call, which the other ranks have in the same order.
        """
        self._turns = turns
        self._ranks = ranks
        self._prompts = {id(prompt): index for index, prompt in enumerate(prompts)}
        self._visions = _visions_of(prompts)  # that the other ranks have, too
        self._indices = {id(vision): index for index, vision in enumerate(self._visions)}
        self._num_sent = len(self._visions)
        self._calls: list[Call] = []  # since the last message
        self._num_turns = 0
        self._sent_at = time.monotonic()

    def submit(self, request: TurnRequest) -> None:
        """See TurnEngine."""
        self._turns.submit(request)
        visions = tuple(map(self._index_of, request.visions))
        absent: Any = None
        stripped = replace(request, prompt=absent, visions=())
        self._calls.append(_Submit(stripped, self._prompts[id(request.prompt)], visions))
        self._num_turns += 1

    def is_decoding(self) -> bool:
        """See TurnEngine."""
        return self._turns.is_decoding()

    def step(self) -> list[tuple[str, SampledTurn | None]]:
        """See TurnEngine."""
        self._send("step")
        ended = self._turns.step()
        self._num_turns -= len(ended)
        return ended

    def stop(self) -> list[tuple[str, BegunTurn]]:
        """See TurnEngine."""
        self._send("stop")
        self._num_turns = 0
        return self._turns.stop()

    def stop_waiting(self) -> list[str]:
        """See TurnEngine."""
        names = self._turns.stop_waiting()
        self._calls.append("stop_waiting")
        self._num_turns -= len(names)
        return names

    def abort(self) -> None:
        """See TurnEngine."""
        self._turns.abort()
        self._calls.append("abort")

    def keep_in_touch(self, on_progress: Callable[[int | None], None] | None) -> Callable[[int | None], None]:
        """Return an on_progress that also sends a message after MAX_SILENT_SECONDS without one."""

        def report(num_finished: int | None) -> None:
            if time.monotonic() - self._sent_at > MAX_SILENT_SECONDS:
                self._send("wait")
            if on_progress is not None:
                on_progress(num_finished)

        return report

    def end(self, *, seconds: float | None = None) -> None:
        """End the call on the other ranks. seconds: see Ranks.send."""
        self._send("end", seconds=seconds)

    def _index_of(self, vision: Vision) -> int:
        """Return the index of pixels that the other ranks have, or get with the next message."""
        if id(vision) not in self._indices:
            self._indices[id(vision)] = len(self._visions)
            self._visions.append(vision)
        return self._indices[id(vision)]

    def _send(self, action: Action, *, seconds: float | None = None) -> None:
        message = _Message(tuple(self._visions[self._num_sent :]), tuple(self._calls), self._num_turns, action)
        self._num_sent = len(self._visions)
        self._calls.clear()
        self._ranks.send(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL), seconds=seconds)
        self._sent_at = time.monotonic()


@contextmanager
def leading(turns: TurnEngine, ranks: Ranks, prompts: Sequence[Prompt]) -> Iterator[LeadingTurns]:
    """Lead the other ranks within this context, at whose end their calls of follow return.

    Also if it ends with an error: the other ranks then have done what this one has.
    """
    leader = LeadingTurns(turns, ranks, prompts)
    try:
        yield leader
    except BaseException:
        # If vLLM has failed, the other ranks may not receive messages any more: its error counts.
        with suppress(RuntimeError):
            leader.end(seconds=_END_SECONDS)
        raise
    leader.end()


def follow(turns: TurnEngine, ranks: Ranks, prompts: Sequence[Prompt], trace: DecodeTrace) -> None:
    """Do what the first rank does, until it ends the call.

    turns: of this rank. prompts: those of the call.
    Raises: RolloutError if this rank has sampled something else than the first one; as turns.step.
    """
    visions = _visions_of(prompts)
    num_turns = 0
    while True:
        message: _Message = pickle.loads(ranks.receive())
        visions += message.visions
        for call in message.calls:
            match call:
                case _Submit(request, prompt, indices):
                    own = tuple(visions[index] for index in indices)
                    turns.submit(replace(request, prompt=prompts[prompt], visions=own))
                    num_turns += 1
                case "stop_waiting":
                    num_turns -= len(turns.stop_waiting())
                case "abort":
                    turns.abort()
                case _:
                    assert_never(call)
        if num_turns != message.num_turns and message.action != "end":
            raise RolloutError(
                f"The ranks of a replica have sampled different tokens: this one samples {num_turns} turns, and the "
                f"first one {message.num_turns}."
            )
        match message.action:
            case "step":
                with trace.engine_step(turns.is_decoding):
                    num_turns -= len(turns.step())
            case "stop":
                turns.stop()
                num_turns = 0
            case "wait":
                pass
            case "end":
                return
            case _:
                assert_never(message.action)


def _visions_of(prompts: Sequence[Prompt]) -> list[Vision]:
    """Return the pixels of the prompts that have any, in the order of the prompts."""
    return [vision for prompt in prompts if (vision := prompt.pixels()) is not None]
