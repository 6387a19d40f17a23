"""What a rollout engine samples at a time: one turn of a completion.

An engine gets all tokens before the turn and returns those that it samples after them. Which turns
a completion has is decided in episodes.py, which uses every engine through TurnEngine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from trigon.types import Prompt, SamplingParams, Vision


@dataclass(frozen=True, slots=True, eq=False)
class TurnRequest:
    """A request for one turn.

    name: unique in a call of generate. prompt: the prompt of the completion. token_ids: all tokens
    before the turn, including the prompt; see same_context.
    visions: the images or videos whose placeholders are in token_ids, in order: those of the
    prompt, then those of the observations.
    max_tokens: most tokens of the turn. seed: the seed with which it is sampled.
    stop: texts at which the turn ends, with the token that completes one of them. The tokens of
    begun complete none of them.
    begun: the tokens of the turn that an earlier call has sampled, which are the last of token_ids.
    SampledTurn.text begins with them; its other fields, and max_tokens, do not include them.
    greedy: sample the most probable tokens, as SamplingParams.as_greedy says.
    num_recorded: the number of first tokens of token_ids whose experts are known or not needed.
    """

    name: str
    prompt: Prompt
    token_ids: tuple[int, ...]
    visions: tuple[Vision, ...]
    max_tokens: int
    seed: int
    stop: tuple[str, ...] = ()
    begun: tuple[int, ...] = ()
    greedy: bool = False
    num_recorded: int = 0

    def sampling(self, of_call: SamplingParams) -> SamplingParams:
        """Return how the turn is sampled in a call of generate with these parameters."""
        return of_call.as_greedy() if self.greedy else of_call

    def same_context(self, other: TurnRequest) -> bool:
        """Return whether both are for turns of completions of one prompt, after the same tokens."""
        return (
            self.prompt is other.prompt
            and self.max_tokens == other.max_tokens
            and self.stop == other.stop
            and self.token_ids == other.token_ids
            and [vision.hashes for vision in self.visions] == [vision.hashes for vision in other.visions]
        )


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """The sampled tokens of a turn.

    token_ids: at least one; the end-of-sequence token is included if it was sampled. logprobs: one
    for each, as Completion.sampling_logprobs; 0.0 if the turn is greedy. text: the tokens decoded.
    finish_reason: stop: with an end-of-sequence token, or at one of TurnRequest.stop; length: cut
    at max_tokens.
    routed_experts: [tokens, layers, k] int16, the experts used in each decoder layer, of all tokens
    before the last sampled one without the first TurnRequest.num_recorded. None if the engine does
    not record them.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: Literal["stop", "length"]
    routed_experts: Tensor | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class BegunTurn:
    """The tokens that were sampled of a turn that was stopped; perhaps none. As in SampledTurn."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class TurnEngine(Protocol):
    """Samples turns for one call of generate, any number at a time."""

    def submit(self, request: TurnRequest) -> None:
        """Begin to sample a turn. May be called while other turns are sampled."""
        ...

    def is_decoding(self) -> bool:
        """Return whether the next step computes no prompts, as far as the engine knows."""
        ...

    def step(self) -> list[tuple[str, SampledTurn | None]]:
        """Sample further tokens; return the turns that have ended, by the name of the request.

        None for a turn that the engine failed to sample twice. To be called only while turns that
        were submitted have not ended; it may return none.
        Raises: RolloutError if the engine fails.
        """
        ...

    def stop(self) -> list[tuple[str, BegunTurn]]:
        """Drop all turns that have not ended; return what was sampled of each, by its request.

        Raises: EngineError if the engine cannot.
        """
        ...

    def stop_waiting(self) -> list[str]:
        """Drop all turns of which nothing is sampled yet, and return their requests.

        Raises: EngineError if the engine cannot.
        """
        ...

    def abort(self) -> None:
        """Drop all turns that have not ended."""
        ...
