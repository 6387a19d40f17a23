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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal, Protocol, assert_never

from trigon.errors import RolloutError
from trigon.rollout.turns import BegunTurn, SampledTurn, TurnEngine, TurnRequest
from trigon.system.trace import DecodeTracer
from trigon.types import Prompt, Vision

_END_SECONDS = 10.0
"""How long the first rank tries, after an error, to send the message that ends the call."""


class Ranks(Protocol):
    """The ranks of a replica, as messages pass between them.

    calls: numbers the calls of generate, on each rank by itself.
    """

    calls: Iterator[int]

    def send(self, message: Message, *, seconds: float | None = None) -> None:
        """Send a message from the first rank to all others. Does not wait until they receive it.

        seconds: time limit, if the others have not received the last messages; None: none.
        Raises: TimeoutError.
        """
        ...

    def receive(self) -> Message:
        """Wait for the next message of the first rank, and return it."""
        ...


class TensorParallelRanks:
    """The ranks that share a model in vLLM, with vLLM's own message queue. Satisfies Ranks.

    Memory that the ranks of a machine share, and a socket between machines: a message takes 10
    microseconds, where one over gloo takes 200. Not public in vLLM 0.32.
    """

    def __init__(self) -> None:
        """Find the ranks of the engine that this process has started."""
        from vllm.distributed import get_tp_group

        group = get_tp_group()
        self.is_first = group.rank_in_group == 0
        self.calls: Iterator[int] = count()
        self._queue: Any = group.mq_broadcaster

    def send(self, message: Message, *, seconds: float | None = None) -> None:
        """See Ranks."""
        self._queue.enqueue(message, timeout=seconds)

    def receive(self) -> Message:
        """See Ranks."""
        message: Message = self._queue.dequeue(indefinite=True)
        return message


@dataclass(frozen=True, slots=True)
class _Submit:
    """A call of submit. request: without prompt and visions, whose indices are sent."""

    request: TurnRequest
    prompt: int
    visions: tuple[int, ...]


Call = _Submit | Literal["stop_waiting", "abort"]
Action = Literal["step", "stop", "end"]


@dataclass(frozen=True, slots=True)
class Message:
    """What the other ranks have to do next.

    number: the number of the call of generate. visions: the pixels of observations, which a rank
    adds to the ones that it has. calls: the calls since the last message. num_turns: how many turns
    are sampled after these calls. action: what follows them.
    """

    number: int
    visions: tuple[Vision, ...]
    calls: tuple[Call, ...]
    num_turns: int
    action: Action


class LeadingTurns:
    """Samples turns on all ranks of a replica, for its first rank. Satisfies TurnEngine."""

    def __init__(self, turns: TurnEngine, ranks: Ranks, prompts: Sequence[Prompt]) -> None:
        """Begin a call of generate, in which the other ranks call follow.

        turns: samples the turns of this rank. prompts: the prompts of the call, which the other
        ranks have in the same order.
        """
        self._turns = turns
        self._ranks = ranks
        self._prompts = {id(prompt): index for index, prompt in enumerate(prompts)}
        self._visions = _visions_of(prompts)  # that the other ranks have, too
        self._indices = {id(vision): index for index, vision in enumerate(self._visions)}
        self._num_sent = len(self._visions)
        self._calls: list[Call] = []  # since the last message
        self._num_turns = 0
        self._number = next(ranks.calls)

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
        visions = tuple(self._visions[self._num_sent :])
        message = Message(self._number, visions, tuple(self._calls), self._num_turns, action)
        self._num_sent = len(self._visions)
        self._calls.clear()
        self._ranks.send(message, seconds=seconds)


@contextmanager
def leading(turns: TurnEngine, ranks: Ranks, prompts: Sequence[Prompt]) -> Iterator[LeadingTurns]:
    """Lead the other ranks within this context, at whose end their calls of follow return.

    Also if it ends with an error: the other ranks then have done what this one has.
    """
    leader = LeadingTurns(turns, ranks, prompts)
    try:
        yield leader
    except BaseException:
        # If vLLM has failed, the other ranks may not receive messages any more.
        with suppress(TimeoutError):
            leader.end(seconds=_END_SECONDS)
        raise
    leader.end()


def follow(turns: TurnEngine, ranks: Ranks, prompts: Sequence[Prompt], trace: DecodeTracer) -> None:
    """Do what the first rank does, until it ends the call.

    turns: samples the turns of this rank. prompts: the prompts of the call.
    Raises: RolloutError if this rank has sampled something else than the first one; as turns.step.
    """
    number = next(ranks.calls)
    visions = _visions_of(prompts)
    num_turns = 0
    while True:
        message = ranks.receive()
        if message.number < number:  # of a call that failed on this rank
            continue
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
            case "end":
                return
            case _:
                assert_never(message.action)


def _visions_of(prompts: Sequence[Prompt]) -> list[Vision]:
    """Return the pixels of the prompts that have any, in the order of the prompts."""
    return [vision for prompt in prompts if (vision := prompt.pixels()) is not None]
