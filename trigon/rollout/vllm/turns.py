"""VllmTurns: the TurnEngine protocol on a vllm.LLMEngine, for one call of VllmEngine.generate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from trigon.errors import EngineError, RolloutError, WorkerError
from trigon.models.load import Processors
from trigon.rollout.turns import BegunTurn, SampledTurn, TurnRequest
from trigon.rollout.vllm.inputs import (
    CHECK_VLLM,
    engine_input,
    recorded_experts,
    sampled_tokens,
    vllm_sampling_params,
)
from trigon.types import SamplingParams

# Finish reasons of a request that vLLM gave up for an internal reason.
_FAILED = ("abort", "error")

MAX_ATTEMPTS = 2
"""How often a request is submitted that vLLM gives up or loses."""


@dataclass(frozen=True, slots=True, eq=False)
class _Attempt:
    """A request to vLLM for one turn. number: the number of the attempt, from 1."""

    turn: TurnRequest
    number: int

    @property
    def name(self) -> str:
        """The request id in vLLM."""
        return f"{self.turn.name}.{self.number}"


class VllmTurns:
    """Samples turns with vLLM. Satisfies TurnEngine.

    A request that vLLM gives up or loses is submitted once more, with the same seed, so that the
    turn does not depend on the failure.
    """

    def __init__(
        self,
        llm_engine: Any,
        processors: Processors,
        sampling: SamplingParams,
        *,
        to_text: Callable[[Sequence[int]], str],
        records_experts: bool = False,
    ) -> None:
        """Begin without requests.

        to_text: returns tokens as SampledTurn.text.
        records_experts: vLLM returns the experts that tokens used.
        """
        self._llm_engine = llm_engine
        self._processors = processors
        self._sampling = sampling
        self._to_text = to_text
        self._records_experts = records_experts
        self._pending: dict[str, _Attempt] = {}
        self._last: tuple[TurnRequest, Any] | None = None  # (a request, what vLLM got for its tokens)
        self.num_retried = 0

    def submit(self, request: TurnRequest) -> None:
        """See TurnEngine. Raises: EngineError if placeholders do not match the images."""
        self._add(_Attempt(request, number=1))

    def is_decoding(self) -> bool:
        """See TurnEngine. Asks vLLM's scheduler, which is not public in 0.32."""
        scheduler = self._llm_engine.engine_core.engine_core.scheduler
        is_full = len(scheduler.running) >= scheduler.max_num_running_reqs
        return (is_full or not scheduler.waiting) and all(
            request.num_computed_tokens >= request.num_prompt_tokens for request in scheduler.running
        )

    def step(self) -> list[tuple[str, SampledTurn | None]]:
        """See TurnEngine.

        Raises: EngineError also if vLLM returns what is not a turn.
        """
        ended: list[tuple[str, SampledTurn | None]] = []
        if not self._llm_engine.has_unfinished_requests():
            # vLLM does not know these requests any more, and will never return them.
            lost = list(self._pending.values())
            self._pending.clear()
            ended += [(attempt.turn.name, None) for attempt in lost if not self._submit_again(attempt)]
        outputs: list[Any] = []
        if self._pending:
            with _as_rollout_errors():
                outputs = self._llm_engine.step()
        for output in outputs:
            if not output.finished:
                continue
            attempt = self._pending.pop(output.request_id)
            if output.outputs[0].finish_reason not in _FAILED:
                ended.append((attempt.turn.name, self._ended_turn(attempt.turn, output.outputs[0])))
            elif not self._submit_again(attempt):
                ended.append((attempt.turn.name, None))
        return ended

    def stop(self) -> list[tuple[str, BegunTurn]]:
        """See TurnEngine. vLLM then has no trace of the requests."""
        begun = {name: BegunTurn((), ()) for name in self._pending}
        for output in unfinished_outputs(self._llm_engine):
            turn = self._pending[output.request_id].turn
            begun[output.request_id] = self._sampled(turn, output.outputs[0])
        self.abort()
        stopped = [(attempt.turn.name, begun[name]) for name, attempt in self._pending.items()]
        self._pending.clear()
        # vLLM drops them from its batch with the next step. A later batch would otherwise have
        # another order than in a process that has not stopped anything, and so other last bits.
        with _as_rollout_errors():
            self._llm_engine.step()
        return stopped

    def stop_waiting(self) -> list[str]:
        """See TurnEngine."""
        waiting = [
            output.request_id
            for output in unfinished_outputs(self._llm_engine)
            if not output.outputs[0].token_ids and output.request_id in self._pending
        ]
        self._llm_engine.abort_request(waiting)
        return [self._pending.pop(name).turn.name for name in waiting]

    def abort(self) -> None:
        """See TurnEngine."""
        self._llm_engine.abort_request(list(self._pending))

    def _ended_turn(self, turn: TurnRequest, output: Any) -> SampledTurn:
        """Return the turn of a finished vllm.CompletionOutput.

        Raises: EngineError if it has no tokens, for an unknown finish reason, and as sampled_tokens
        and recorded_experts.
        """
        name, reason, sampled = turn.prompt.prompt_id, output.finish_reason, self._sampled(turn, output)
        if not sampled.token_ids:
            raise EngineError(f"{name}: vLLM returned a completion without tokens. {CHECK_VLLM}.")
        if reason not in ("stop", "length"):
            raise EngineError(
                f"{name}: vLLM ended a completion with {reason!r} instead of 'stop' or 'length'. {CHECK_VLLM}."
            )
        experts = self._experts(turn, output) if self._records_experts else None
        text = self._to_text(turn.begun + sampled.token_ids)
        return SampledTurn(sampled.token_ids, sampled.logprobs, text, reason, experts)

    def _sampled(self, turn: TurnRequest, output: Any) -> BegunTurn:
        """Return what a vllm.CompletionOutput has sampled of a turn. Raises: as sampled_tokens."""
        sampling = turn.sampling(self._sampling)
        return BegunTurn(*sampled_tokens(output, turn.prompt.prompt_id, sampling, self._processors))

    def _experts(self, turn: TurnRequest, output: Any) -> Tensor:
        """Return SampledTurn.routed_experts of a finished vllm.CompletionOutput."""
        return recorded_experts(
            output,
            turn.prompt.prompt_id,
            num_tokens=len(turn.token_ids) + len(output.token_ids) - 1 - turn.num_recorded,
            num_experts=self._processors.hf_config.get_text_config().num_experts,
        )

    def _submit_again(self, attempt: _Attempt) -> bool:
        if attempt.number == MAX_ATTEMPTS:
            return False
        self.num_retried += 1
        self._add(replace(attempt, number=attempt.number + 1))
        return True

    def _add(self, attempt: _Attempt) -> None:
        turn = attempt.turn
        # The completions of a prompt follow each other.
        if self._last is None or not turn.same_context(self._last[0]):
            name = turn.prompt.prompt_id
            self._last = turn, engine_input(name, turn.token_ids, turn.visions, self._processors)
        params = vllm_sampling_params(
            turn.sampling(self._sampling),
            self._processors,
            max_tokens=turn.max_tokens,
            seed=turn.seed,
            stop=turn.stop,
            num_recorded=turn.num_recorded if self._records_experts else None,
        )
        self._pending[attempt.name] = attempt
        self._llm_engine.add_request(attempt.name, self._last[1], params)


@contextmanager
def _as_rollout_errors() -> Iterator[None]:
    """Raise the errors of a step of vLLM as RolloutError, but for the watchdog's WorkerError."""
    try:
        yield
    except WorkerError:
        raise
    except Exception as error:  # of its kernels, its scheduler or its executor
        raise RolloutError(f"vLLM failed while it sampled: {type(error).__name__}: {error}") from error


def unfinished_outputs(llm_engine: Any) -> list[Any]:
    """Return the vllm.RequestOutput, so far, of each request that has not ended.

    vLLM returns outputs of unfinished requests in each step, too, which would cost as much as a
    step for many requests; this is how its own AsyncLLM makes the output of an aborted one.
    """
    from vllm.v1.engine import FinishReason

    states = llm_engine.output_processor.request_states.values()
    return [
        state.make_request_output(
            new_token_ids=[], pooling_output=None, finish_reason=FinishReason.ABORT, stop_reason=None
        )
        for state in states
    ]
