"""What is collected of the episodes of a call of generate, while they run."""

from __future__ import annotations

from dataclasses import dataclass, field

from trigon.data.turns import TurnTokens
from trigon.rollout.seeds import turn_seed
from trigon.rollout.turns import BegunTurn, SampledTurn, TurnRequest
from trigon.types import Completion, EncodedMedia, FinishReason, ImageSizes, Prompt, Turn, Vision


@dataclass(slots=True, eq=False)
class Episode:
    """A completion that is being sampled.

    number: for the environments. unprocessed: the prompt with files. greedy: as in TurnRequest.
    visions: of all tokens so far.
    token_ids, logprobs, turns, media: as in Completion, so far. observation: the text of the tokens
    after the last turn; num_images, image_sizes: of its images. asked: when the environment was
    asked, by time.perf_counter(). begun: an unfinished completion of one turn that goes on;
    token_ids and logprobs have its tokens.
    """

    number: int
    prompt_index: int
    sample: int
    prompt: Prompt
    unprocessed: Prompt
    seed: int
    greedy: bool
    visions: list[Vision]
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    turns: list[Turn] = field(default_factory=list)
    media: list[EncodedMedia] = field(default_factory=list)
    observation: str = ""
    num_images: int = 0
    image_sizes: ImageSizes = ()
    asked: float = 0.0
    begun: Completion | None = None

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
            self.num_images, self.image_sizes = len(tokens.media.encoded), tokens.image_sizes
            self.media.append(tokens.media)
            self.visions.append(vision)

    def request(self, max_tokens: int, stop: tuple[str, ...]) -> TurnRequest:
        """Return the request for the next turn."""
        turn = len(self.turns)
        return TurnRequest(
            name=f"{self.prompt_index}.{self.sample}.{turn}",
            prompt=self.prompt,
            token_ids=self.prompt.token_ids + self.token_ids,
            visions=tuple(self.visions),
            max_tokens=max_tokens,
            seed=turn_seed(self.seed, turn),
            stop=stop,
            begun=() if self.begun is None else self.begun.token_ids,
            greedy=self.greedy,
        )

    def add(self, turn: SampledTurn) -> None:
        """Append a turn."""
        start = len(self.token_ids) if self.begun is None else 0
        self.token_ids += turn.token_ids
        self.logprobs += turn.logprobs
        end, images = len(self.token_ids), (self.num_images, self.image_sizes)
        self.turns.append(Turn(start, end, turn.text, self.observation, None, *images))
        self.observation, self.num_images, self.image_sizes = "", 0, ()

    def unfinished(self, sampled: BegunTurn, *, policy_version: int) -> Completion:
        """Return all tokens so far, with those that were sampled of a turn that was stopped."""
        assert not self.turns, "an episode cannot go on in another call"
        token_ids = self.token_ids + sampled.token_ids
        versions = self._versions(len(token_ids), policy_version)
        return Completion(
            token_ids=token_ids,
            sampling_logprobs=self.logprobs + sampled.logprobs,
            finish_reason="unfinished",
            text="",
            policy_version=versions[-1][0],
            policy_versions=versions if len(versions) > 1 else (),
        )

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
        versions = self._versions(len(self.token_ids), policy_version)
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
            policy_versions=versions if len(versions) > 1 else (),
        )

    def _versions(self, num_tokens: int, policy_version: int) -> tuple[tuple[int, int], ...]:
        """Return Completion.version_runs of all tokens: what is not begun has policy_version."""
        runs = () if self.begun is None or not self.begun.token_ids else self.begun.version_runs
        num_new = num_tokens - sum(count for _, count in runs)
        if runs and (runs[-1][0] == policy_version or num_new == 0):
            version, count = runs[-1]
            return *runs[:-1], (version, count + num_new)
        return *runs, (policy_version, num_new)


class Groups:
    """The completions of one call of generate, as they arrive."""

    def __init__(self, num_prompts: int, num_completions: int) -> None:
        """Begin without completions. num_completions: of each prompt."""
        self._completions: list[list[Completion | None]] = [[None] * num_completions for _ in range(num_prompts)]
        self._num_pending = [num_completions] * num_prompts
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

    def has_ended(self, prompt_index: int) -> bool:
        """Return whether the prompt is finished, and no completion of it is to go on later."""
        row = self._completions[prompt_index]
        return self.is_finished(prompt_index) and not any(each is not None and each.is_unfinished for each in row)

    def is_complete(self, prompt_index: int) -> bool:
        """Return whether all completions of the prompt have ended, and none has failed."""
        return self.has_ended(prompt_index) and prompt_index not in self._failed

    def completions(self, prompt_index: int) -> list[Completion]:
        """Return the completions of a finished prompt, by sample; [] if one failed."""
        if prompt_index in self._failed:
            return []
        completions = [completion for completion in self._completions[prompt_index] if completion is not None]
        assert len(completions) == len(self._completions[prompt_index]), "the engine dropped a request"
        return completions
