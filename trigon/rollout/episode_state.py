"""What is collected of the episodes of a call of generate, while they run."""

from __future__ import annotations

from dataclasses import dataclass, field

from trigon.data.turns import TurnTokens
from trigon.rollout.seeds import turn_seed
from trigon.rollout.turns import SampledTurn, TurnRequest
from trigon.types import Completion, EncodedMedia, FinishReason, Prompt, Turn, Vision


@dataclass(slots=True, eq=False)
class Episode:
    """A completion that is being sampled.

    number: for the environments. unprocessed: the prompt with files. visions: of all tokens so far.
    token_ids, logprobs, turns, media: as in Completion, so far. observation: the text of the tokens
    after the last turn, and num_images how many they have. asked: when the environment was asked,
    by time.perf_counter().
    """

    number: int
    prompt_index: int
    sample: int
    prompt: Prompt
    unprocessed: Prompt
    seed: int
    visions: list[Vision]
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    turns: list[Turn] = field(default_factory=list)
    media: list[EncodedMedia] = field(default_factory=list)
    observation: str = ""
    num_images: int = 0
    asked: float = 0.0

    @property
    def order(self) -> tuple[int, int]:
        """By which the turns of several episodes are submitted."""
        return self.prompt_index, self.sample

    def observe(self, tokens: TurnTokens, vision: Vision | None) -> None:
        """Append an observation. vision: the pixel values of its images."""
        self.token_ids += tuple(tokens.token_ids)
        self.observation = tokens.text
        if tokens.media is not None:
            assert vision is not None
            self.num_images = len(tokens.media.encoded)
            self.media.append(tokens.media)
            self.visions.append(vision)

    def request(self, max_tokens: int) -> TurnRequest:
        """Return the request for the next turn."""
        turn = len(self.turns)
        return TurnRequest(
            name=f"{self.prompt_index}.{self.sample}.{turn}",
            prompt=self.prompt,
            token_ids=self.prompt.token_ids + self.token_ids,
            visions=tuple(self.visions),
            max_tokens=max_tokens,
            seed=turn_seed(self.seed, turn),
        )

    def add(self, turn: SampledTurn) -> None:
        """Append a turn."""
        start = len(self.token_ids)
        self.token_ids += turn.token_ids
        self.logprobs += turn.logprobs
        self.turns.append(Turn(start, len(self.token_ids), turn.text, self.observation, num_images=self.num_images))
        self.observation, self.num_images = "", 0

    def completion(self, reason: FinishReason, *, policy_version: int, end_token_id: int, error: str) -> Completion:
        """Return all turns, at the end of the episode.

        Args:
            end_token_id: the only token if there are no turns, which needs an error.
            error: why it failed, in one line; "" if it did not.
        """
        if not self.turns:
            assert error
            self.add(SampledTurn((end_token_id,), (0.0,), "", "stop"))
        media = self.media
        return Completion(
            token_ids=self.token_ids,
            sampling_logprobs=self.logprobs,
            finish_reason=reason,
            text="\n".join(turn.text for turn in self.turns),
            policy_version=policy_version,
            turns=tuple(self.turns),
            vision=EncodedMedia(
                tuple(file for each in media for file in each.encoded),
                tuple(key for each in media for key in each.hashes),
            )
            if media
            else None,
            error=error,
        )


class Groups:
    """The completions of one call of generate, as they arrive."""

    def __init__(self, num_prompts: int, n: int) -> None:
        self._completions: list[list[Completion | None]] = [[None] * n for _ in range(num_prompts)]
        self._num_pending = [n] * num_prompts
        self._failed: set[int] = set()  # prompt indices

    def add(self, prompt_index: int, sample: int, completion: Completion | None) -> None:
        """Store a completion; None if the engine failed to sample it."""
        if completion is None:
            self._failed.add(prompt_index)
        self._completions[prompt_index][sample] = completion
        self._num_pending[prompt_index] -= 1

    def is_finished(self, prompt_index: int) -> bool:
        """Return whether no completion of the prompt is pending."""
        return self._num_pending[prompt_index] == 0

    def completions(self, prompt_index: int) -> list[Completion]:
        """Return the completions of a finished prompt, by sample; [] if one failed."""
        if prompt_index in self._failed:
            return []
        completions = [completion for completion in self._completions[prompt_index] if completion is not None]
        assert len(completions) == len(self._completions[prompt_index]), "the engine dropped a request"
        return completions
