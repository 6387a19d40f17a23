"""The state of the episodes of a call of generate, what is collected of them, and their seeds.

An episode that has not ended when a call stops keeps its state for the next one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional

from trigon.data.turns import TurnTokens
from trigon.environments.protocol import Outcome
from trigon.rollout.turns import BegunTurn, SampledTurn, TurnRequest
from trigon.types import (
    NO_RECORD,
    Completion,
    EncodedMedia,
    FinishReason,
    ImageSizes,
    Prompt,
    RoutedExperts,
    Turn,
    Vision,
)

_NO_TOKENS = BegunTurn((), ())

VersionRuns = tuple[tuple[int, int], ...]
"""(policy version, number of tokens) of consecutive sampled tokens."""


@dataclass(slots=True, eq=False)
class Episode:
    """A completion that is being sampled.

        token_ids      o  o  a  a  a  o  o |
        turns                (2, 5)        |
        observation                 "..."  |
        begun                              | b  b        of a turn that an earlier call has begun

    number: identifies the episode for its environment. prompt: the prompt with pixel values.
    unprocessed: the same prompt with files. seed: the seed of the completion (sample_seed). greedy:
    as in TurnRequest.
    token_ids, logprobs, turns, media: as in Completion, for the observations so far and the turns
    that have ended. observed: the pixel values of media, one for each observation with images.
    observation: the text of the tokens after the last turn. num_images, image_sizes: the number and
    the sizes of its images.
    begun: the tokens of the next turn that earlier calls have sampled.
    versions: the policy versions of all sampled tokens, including the tokens of begun.
    experts: SampledTurn.routed_experts of the turns, for consecutive tokens. They begin with the
    prompt for the first completion of a prompt, and after the prompt for the others.
    asked: the time at which the environment was asked, by time.perf_counter(); None if that was
    before the call.
    is_waiting: whether the environment has been asked, and its answer has not been applied.
    outcome: the answer, once it is received, until it is applied.
    """

    number: int
    prompt_index: int
    sample: int
    prompt: Prompt
    unprocessed: Prompt
    seed: int
    greedy: bool
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    turns: list[Turn] = field(default_factory=list)
    media: list[EncodedMedia] = field(default_factory=list)
    observed: list[Vision] = field(default_factory=list)
    observation: str = ""
    num_images: int = 0
    image_sizes: ImageSizes = ()
    begun: BegunTurn = _NO_TOKENS
    versions: VersionRuns = ()
    experts: list[Tensor] = field(default_factory=list)
    asked: float | None = None
    is_waiting: bool = False
    outcome: Outcome | None = None

    @property
    def order(self) -> tuple[int, int]:
        """The order in which the turns of several episodes are submitted."""
        return self.prompt_index, self.sample

    # -- between calls --

    def begin_with(self, completion: Completion) -> None:
        """Begin with the tokens of an unfinished completion of one turn."""
        self.begun = BegunTurn(completion.token_ids, completion.sampling_logprobs)
        self.versions = completion.version_runs if completion.token_ids else ()

    def leave(self) -> None:
        """Wait for the next call. Pixel values, which may take gigabytes, are dropped."""
        self.prompt = self.unprocessed
        self.observed.clear()
        self.asked = None

    def enter(self, prompt_index: int, prompt: Prompt, unprocessed: Prompt) -> None:
        """Continue in another call, which processes the observed images again.

        Args: as the fields.
        """
        self.prompt_index, self.prompt, self.unprocessed = prompt_index, prompt, unprocessed

    def unfinished(self, *, policy_version: int) -> Completion:
        """Return all turns so far, with what was sampled of the next one.

        An observation after which nothing has been sampled is left out. policy_version: the policy
        version of the completion if nothing has been sampled at all.
        """
        turns, media = list(self.turns), self.media
        if self.begun.token_ids:
            token_ids = self.token_ids + self.begun.token_ids
            turns.append(self._turn(len(self.token_ids), len(token_ids), text=""))
        else:
            token_ids = self.token_ids[: turns[-1].end if turns else 0]
            media = media[:-1] if self.num_images else media
        return Completion(
            token_ids=token_ids,
            sampling_logprobs=self.logprobs + self.begun.logprobs,
            finish_reason="unfinished",
            text="\n".join(turn.text for turn in turns),
            policy_version=self.versions[-1][0] if self.versions else policy_version,
            turns=tuple(turns),
            vision=_join(media),
            policy_versions=self.versions if len(self.versions) > 1 else (),
        )

    # -- while it is sampled --

    def pop_outcome(self) -> Outcome:
        """Return the answer of the environment, which is to be applied now."""
        outcome, self.outcome, self.is_waiting = self.outcome, None, False
        assert outcome is not None
        return outcome

    def observe(self, tokens: TurnTokens, vision: Vision | None) -> None:
        """Append an observation. vision: the pixel values of its images."""
        self.token_ids += tuple(tokens.token_ids)
        self.observation = tokens.text
        if tokens.media is not None:
            assert vision is not None
            self.num_images, self.image_sizes = len(tokens.media.encoded), tokens.image_sizes
            self.media.append(tokens.media)
            self.observed.append(vision)

    def request(self, max_tokens: int, stop: tuple[str, ...]) -> TurnRequest:
        """Return the request for the next turn. max_tokens: most tokens to sample after begun."""
        turn = len(self.turns)
        of_prompt = self.prompt.pixels()
        return TurnRequest(
            name=f"{self.prompt_index}.{self.sample}.{turn}",
            prompt=self.prompt,
            token_ids=self.prompt.token_ids + self.token_ids + self.begun.token_ids,
            visions=(*([] if of_prompt is None else [of_prompt]), *self.observed),
            max_tokens=max_tokens,
            seed=turn_seed(self.seed, turn, num_begun=len(self.begun.token_ids)),
            stop=stop,
            begun=self.begun.token_ids,
            greedy=self.greedy,
            num_recorded=self._num_recorded,
        )

    def stop_turn(self, sampled: BegunTurn, *, policy_version: int) -> None:
        """Keep the tokens of a turn that was stopped."""
        self._note_version(policy_version, len(sampled.token_ids))
        self.begun = BegunTurn(self.begun.token_ids + sampled.token_ids, self.begun.logprobs + sampled.logprobs)

    def end_turn(self, turn: SampledTurn, *, policy_version: int) -> SampledTurn:
        """Return the whole turn that ended with these tokens; add() then appends it."""
        self._note_version(policy_version, len(turn.token_ids))
        begun, self.begun = self.begun, _NO_TOKENS
        return replace(turn, token_ids=begun.token_ids + turn.token_ids, logprobs=begun.logprobs + turn.logprobs)

    def add(self, turn: SampledTurn) -> None:
        """Append a turn that end_turn has returned, perhaps without its last tokens."""
        start = len(self.token_ids)
        self.token_ids += turn.token_ids
        self.logprobs += turn.logprobs
        self.versions = _first(self.versions, len(self.logprobs))
        if turn.routed_experts is not None:
            # Tokens that were left out have no record.
            num_more = len(self.prompt.token_ids) + len(self.token_ids) - self._num_recorded
            self.experts.append(turn.routed_experts[:num_more])
        self.turns.append(self._turn(start, len(self.token_ids), text=turn.text))
        self.observation, self.num_images, self.image_sizes = "", 0, ()

    def completion(self, reason: FinishReason, *, policy_version: int, end_token_id: int, error: str) -> Completion:
        """Return all turns, at the end of the episode.

        Args:
            end_token_id: the only token if there are no turns, which needs an error.
            error: why it failed, in one line; "" if it did not.
        """
        if not self.turns:
            assert error
            self.add(self.end_turn(SampledTurn((end_token_id,), (0.0,), "", "stop"), policy_version=policy_version))
        return Completion(
            token_ids=self.token_ids,
            sampling_logprobs=self.logprobs,
            finish_reason=reason,
            text="\n".join(turn.text for turn in self.turns),
            policy_version=self.versions[-1][0],
            turns=tuple(self.turns),
            vision=_join(self.media),
            error=error,
            policy_versions=self.versions if len(self.versions) > 1 else (),
            routed_experts=self._routed_experts(),
        )

    @property
    def _first_recorded(self) -> int:
        """The first token whose experts are recorded. One record of the prompt is enough."""
        return 0 if self.sample == 0 else len(self.prompt.token_ids)

    @property
    def _num_recorded(self) -> int:
        """How many of the first tokens have a record, or need none: see TurnRequest."""
        return self._first_recorded + sum(map(len, self.experts))

    def _routed_experts(self) -> RoutedExperts | None:
        if not self.experts:
            return None
        of_prompt = len(self.prompt.token_ids) - self._first_recorded
        known = torch.cat(self.experts)
        missing = of_prompt + len(self.token_ids) - len(known)
        experts = functional.pad(known, (0, 0, 0, 0, 0, missing), value=NO_RECORD)
        return RoutedExperts(experts[:of_prompt] if self.sample == 0 else None, experts[of_prompt:])

    def _turn(self, start: int, end: int, *, text: str) -> Turn:
        """Return a turn after the last observation."""
        return Turn(start, end, text, self.observation, None, self.num_images, self.image_sizes)

    def _note_version(self, policy_version: int, count: int) -> None:
        """Note the policy version of the tokens that were sampled after begun."""
        if not count:
            return
        runs = self.versions
        if runs and runs[-1][0] == policy_version:
            runs, count = runs[:-1], runs[-1][1] + count
        self.versions = (*runs, (policy_version, count))


def _first(runs: VersionRuns, num_tokens: int) -> VersionRuns:
    """Return the versions of the first tokens."""
    kept: list[tuple[int, int]] = []
    for version, count in runs:
        if num_tokens > 0:
            kept.append((version, min(count, num_tokens)))
        num_tokens -= count
    return tuple(kept)


def _join(media: Sequence[EncodedMedia]) -> EncodedMedia | None:
    """Return the images of all observations together."""
    if not media:
        return None
    return EncodedMedia(
        tuple(file for each in media for file in each.encoded), tuple(key for each in media for key in each.hashes)
    )


class Groups:
    """The completions of one call of generate, as they arrive."""

    def __init__(self, num_prompts: int, num_completions: int) -> None:
        """Begin without completions. num_completions: the number of completions of each prompt."""
        self._rows: list[dict[int, Completion | None]] = [{} for _ in range(num_prompts)]  # by sample
        self._num_completions = num_completions

    def add(self, prompt_index: int, sample: int, completion: Completion | None) -> None:
        """Store a completion; None if the engine failed to sample it."""
        self._rows[prompt_index][sample] = completion

    def is_finished(self, prompt_index: int) -> bool:
        """Return whether no completion of the prompt is pending."""
        return len(self._rows[prompt_index]) == self._num_completions

    def has_ended(self, prompt_index: int) -> bool:
        """Return whether the prompt is finished, and no completion of it continues later."""
        row = self._rows[prompt_index].values()
        return self.is_finished(prompt_index) and not any(each is not None and each.is_unfinished for each in row)

    def has_failed(self, prompt_index: int) -> bool:
        """Return whether the engine failed to sample a completion of the prompt."""
        return any(completion is None for completion in self._rows[prompt_index].values())

    def is_complete(self, prompt_index: int) -> bool:
        """Return whether all completions of the prompt have ended, and none has failed."""
        return self.has_ended(prompt_index) and not self.has_failed(prompt_index)

    def completions(self, prompt_index: int) -> list[Completion]:
        """Return the completions of a finished prompt, by sample; [] if one failed."""
        assert self.is_finished(prompt_index), "the engine dropped a request"
        row = [self._rows[prompt_index][sample] for sample in range(self._num_completions)]
        completions = [completion for completion in row if completion is not None]
        return completions if len(completions) == len(row) else []


def sample_seed(run_seed: int, *, draw: int, prompt_id: str, sample: int) -> int:
    """Return the seed of one completion: a function of the arguments alone, in [0, 2**63).

    A hash, not a sum, so that neighbouring draws, prompts and samples never share a seed.
    """
    # Only prompt_id can contain a slash, and it comes last, so different arguments give different
    # keys.
    key = f"{run_seed}/{draw}/{sample}/{prompt_id}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1


def turn_seed(seed: int, turn: int, *, num_begun: int = 0) -> int:
    """Return the seed of a turn of a completion, in [0, 2**63).

    Args:
        seed: seed of the completion (sample_seed), which is also the seed of its first turn.
        turn: number of the turn, from 0.
        num_begun: tokens of the turn that an earlier call has sampled. The rest has a seed of its
            own, since the same seed would draw the same random numbers again.
    """
    if turn == 0 and num_begun == 0:
        return seed
    key = f"{seed}/turn {turn}" + (f"/after {num_begun}" if num_begun else "")
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1
