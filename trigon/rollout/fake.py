"""A rollout engine without a model, for tests of the loop and for dry runs.

A given function returns the text of each completion. The engine satisfies the RolloutEngine
protocol exactly, errors included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

from trigon.metrics import Metrics
from trigon.rollout.episode_settings import EpisodeSettings
from trigon.rollout.episodes import Episodes
from trigon.rollout.protocol import OnGroup, Until, require_awake, require_local_weights
from trigon.rollout.turns import BegunTurn, SampledTurn, TurnRequest
from trigon.system.trace import DecodeTracer
from trigon.types import Completion, Prompt, SamplingParams, WeightsHandle

CompleteText = Callable[[Prompt, int, int], str | None]
"""(prompt, policy version, seed of the turn) -> text of the turn; None: it fails twice."""


class FakeEngine:
    """Returns the text of `complete`, cut at max_tokens. Satisfies RolloutEngine."""

    num_replicas = 1

    def __init__(
        self,
        *,
        tokenizer: Any,
        stop_token_id: int,
        complete: CompleteText,
        token_logprob: float = -1.0,
        episodes: EpisodeSettings | None = None,
        tokens_per_step: int | None = None,
        turn_by_turn: bool = True,
        tracer: DecodeTracer | None = None,
    ) -> None:
        """Create the engine.

        Args:
            stop_token_id: ends every turn that is not cut.
            complete: returns the text of a turn. The token ids of the prompt that it gets are all
                tokens before the turn.
            token_logprob: log-probability of every token.
            episodes: None: completions of one turn.
            tokens_per_step: tokens of all turns that are sampled at a time, as real engines do;
                None: all turns of one prompt at a time.
            turn_by_turn: see Episodes.
            tracer: traces the decode steps; None: no traces.
        """
        # Texts repeat, and a lookup takes a hundredth of the time of the tokenizer.
        self._encode = lru_cache(4096)(lambda text: tuple(tokenizer.encode(text, add_special_tokens=False)))
        self._decode = lru_cache(4096)(lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True))
        self._stop_token_id = stop_token_id
        self._complete_text = complete
        self._token_logprob = token_logprob
        self._tokens_per_step = tokens_per_step
        self._episodes = Episodes(
            episodes,
            tokenizer=tokenizer,
            skip_special_tokens=True,
            stop_token_ids=(stop_token_id,),
            turn_by_turn=turn_by_turn,
            tracer=tracer,
        )
        self._version: int | None = None
        self._awake = False

    @contextmanager
    def awake(self, weights: WeightsHandle, *, version: int) -> Iterator[None]:
        """See RolloutEngine. Reads all weights, as a real engine does, and discards them."""
        local = require_local_weights(weights)
        if version != self._version:
            for _ in local.read():
                pass
            self._version = version
        self._episodes.wake()
        self._awake = True
        try:
            yield
        finally:
            self._awake = False

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        until: Until | None = None,
        on_progress: Callable[[int | None], None] | None = None,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        """See RolloutEngine."""
        require_awake(self._awake)
        assert self._version is not None
        turns = _FakeTurns(self._turn, self._version, sampling, self._tokens_per_step)
        return self._episodes.run(
            turns,
            self._episodes.with_pixels(prompts),
            sampling,
            unprocessed=prompts,
            policy_version=self._version,
            on_progress=on_progress,
            on_group=on_group,
            until=until,
        )

    def _turn(self, request: TurnRequest, version: int, sampling: SamplingParams) -> SampledTurn | None:
        so_far = replace(request.prompt, token_ids=request.token_ids)
        text = self._complete_text(so_far, version, request.seed)
        if text is None:
            return None
        token_ids = (*self._encode(text), self._stop_token_id)
        kept = token_ids[: request.max_tokens]
        return SampledTurn(
            token_ids=kept,
            logprobs=(self._token_logprob if request.sampling(sampling).temperature > 0 else 0.0,) * len(kept),
            text=self._decode(request.begun + kept),
            finish_reason="stop" if len(kept) == len(token_ids) else "length",
        )

    def pop_metrics(self) -> Metrics:
        """See RolloutEngine. No request is ever submitted again."""
        return self._episodes.pop_metrics()

    def close(self) -> None:
        """See RolloutEngine."""
        self._episodes.stop()
        self._version, self._awake = None, False


class _FakeTurns:
    """Satisfies TurnEngine.

    Each step ends all turns of a prompt; with tokens_per_step, it samples this many tokens of all
    turns.
    """

    def __init__(
        self,
        sample: Callable[[TurnRequest, int, SamplingParams], SampledTurn | None],
        version: int,
        sampling: SamplingParams,
        tokens_per_step: int | None,
    ) -> None:
        self._sample, self._version, self._sampling = sample, version, sampling
        self._tokens_per_step = tokens_per_step
        self._pending: list[TurnRequest] = []
        self._turns: dict[str, SampledTurn | None] = {}  # of pending requests, by name
        self._num_sampled: dict[str, int] = {}

    def submit(self, request: TurnRequest) -> None:
        """See TurnEngine."""
        self._pending.append(request)

    def is_decoding(self) -> bool:
        """See TurnEngine."""
        return True

    def step(self) -> list[tuple[str, SampledTurn | None]]:
        """See TurnEngine."""
        if self._tokens_per_step is not None:
            return self._step_all(self._tokens_per_step)
        prompt = self._pending[0].prompt
        batch = [request for request in self._pending if request.prompt is prompt]
        self._pending = [request for request in self._pending if request.prompt is not prompt]
        return [(request.name, self._sample(request, self._version, self._sampling)) for request in batch]

    def _step_all(self, num_tokens: int) -> list[tuple[str, SampledTurn | None]]:
        ended: list[tuple[str, SampledTurn | None]] = []
        for request in self._pending:
            if request.name not in self._turns:
                self._turns[request.name] = self._sample(request, self._version, self._sampling)
                self._num_sampled[request.name] = 0
            self._num_sampled[request.name] += num_tokens
            turn = self._turns[request.name]
            if turn is None or self._num_sampled[request.name] >= len(turn.token_ids):
                ended.append((request.name, self._turns.pop(request.name)))
        names = {name for name, _ in ended}
        self._pending = [request for request in self._pending if request.name not in names]
        return ended

    def stop(self) -> list[tuple[str, BegunTurn]]:
        """See TurnEngine."""
        stopped = []
        for request in self._pending:
            turn, most = self._turns.get(request.name), self._num_sampled.get(request.name, 0)
            begun = BegunTurn((), ()) if turn is None else BegunTurn(turn.token_ids[:most], turn.logprobs[:most])
            stopped.append((request.name, begun))
        self.abort()
        return stopped

    def stop_waiting(self) -> list[str]:
        """See TurnEngine."""
        waiting = [request.name for request in self._pending if request.name not in self._turns]
        self._pending = [request for request in self._pending if request.name in self._turns]
        return waiting

    def abort(self) -> None:
        """See TurnEngine."""
        self._pending.clear()
        self._turns.clear()
