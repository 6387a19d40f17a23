"""The passports: what a piece of data is called, and what it holds, in each room.

    Prompt --generate--> Completion --score--> Rollout --group--> RolloutGroup
           --advantages, old and reference logprobs--> TrainGroup --pack--> MicroBatch --step--> Metrics

Each type is complete when it is made; nothing is filled in later. Every per-token list is aligned with token ids: entry
t describes token t, and `logprobs[t] = log p(token_t | tokens_<t)`. This module imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length"]
"""stop: the model ended the answer itself; length: the answer reached its token limit and was cut."""

ScoreOutcome = Literal["ok", "failed", "timeout"]
"""ok: the grader answered; failed: it raised, crashed or returned nonsense; timeout: it was killed at its limit."""


MediaKind = Literal["image", "video"]
"""What a prompt shows: images or videos, never both."""


@dataclass(frozen=True, slots=True, eq=False)
class Vision:
    """The images of one prompt, or its videos, after the one pass through a processor that a step pays for.

    pixel_values: [patches, channels * temporal * patch * patch] float32, CPU; the patches of all of them, in order.
    grid_thw: [images or videos, 3] int64, CPU; (time, height, width) of each in patches, before merging. Time is 1 for
    an image; for a video it counts temporal patches, each of which merges two frames; for an image that is seen in
    tiles of one size, the tiles.
    hashes: one content hash for each (of its pixel values), by which engines key their caches.
    temporal_patch_seconds: how many seconds of each video a temporal patch covers; none for images.

    Example: two 56 x 56 images, patch 14: pixel_values [32, 1176], grid_thw [[1, 4, 4], [1, 4, 4]], two hashes.
    Example: a 56 x 56 video of 4 seconds, 8 frames: pixel_values [64, 1176], grid_thw [[4, 4, 4]], one hash, (1.0,).
    """

    pixel_values: Tensor
    grid_thw: Tensor
    hashes: tuple[str, ...]
    kind: MediaKind = "image"
    temporal_patch_seconds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class EncodedMedia:
    """The images of one prompt, or its videos, as files, before any processor: what travels between processes.

    encoded: each file's bytes, in order; at least one. hashes: the SHA-256 of each, in hexadecimal.
    """

    encoded: tuple[bytes, ...]
    hashes: tuple[str, ...]
    kind: MediaKind = "image"


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One question, ready to be fed to either engine.

    prompt_id: names the dataset row, stable across runs: "train:17".
    token_ids: the chat-templated prompt with every media placeholder expanded, as both engines receive it.
    vision: its images or videos, None for a text-only prompt: processed, as engines need them, or, where prompts travel
    and each process makes pixels itself, still as files.
    text: the prompt as a person reads it (one marker for each image or video).
    ground_truth: of the row, whatever the dataset holds.
    row: the other columns of the row, less its images and videos; handed to the reward function.
    image_refs: where each image or video came from ("train:17/images/0 (figure.png)"), for reports.
    """

    prompt_id: str
    token_ids: tuple[int, ...]
    vision: Vision | EncodedMedia | None
    text: str
    ground_truth: Any
    row: Mapping[str, Any]
    image_refs: tuple[str, ...]

    def pixels(self) -> Vision | None:
        """Return what it shows to those who need pixels, which must be there by now. None for a text-only prompt."""
        assert not isinstance(self.vision, EncodedMedia), f"{self.prompt_id}: its media are files, not processed yet"
        return self.vision


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How completions are drawn. Seeds are derived from (seed, step, prompt_id, sample) by the engine's caller.

    n: completions for each prompt. temperature: 0 is greedy. top_k: -1 is off. max_tokens: the response limit.
    ignore_eos: sample on after an end-of-sequence token, up to max_tokens.
    seed: the run's sampling seed.
    """

    n: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    ignore_eos: bool
    seed: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer as an engine sampled it.

    token_ids: R ids, the end-of-sequence token included when it was sampled; at least one.
    sampling_logprobs: R floats, log-probabilities under the very distribution sampled from (after temperature, top-p
    and top-k). 0.0 everywhere for greedy decoding.
    text: token_ids decoded, without special tokens when the reward asks so.
    policy_version: number of the optimizer step whose weights sampled it.
    """

    token_ids: tuple[int, ...]
    sampling_logprobs: tuple[float, ...]
    finish_reason: FinishReason
    text: str
    policy_version: int


@dataclass(frozen=True, slots=True)
class Score:
    """What one answer is worth.

    overall: the reward. parts: every number the reward function returned, "overall" among them.
    outcome: anything but "ok" means that the grader, not the answer, failed; overall is then 0.0, parts is empty, and
    the rollout is left out of its group's statistics and of the loss. error: one line saying why, empty when ok.
    """

    overall: float
    parts: Mapping[str, float]
    outcome: ScoreOutcome
    error: str


@dataclass(frozen=True, slots=True)
class Rollout:
    """A completion with its score."""

    completion: Completion
    score: Score


@dataclass(frozen=True, slots=True, eq=False)
class RolloutGroup:
    """A prompt with its n scored completions: the unit in which everything travels. All groups of a step share n."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TrainSequence:
    """One completion as the loss sees it. R is the number of its tokens; every tensor is float32 [R] on the CPU.

    loss_mask: 1 where the token trains, 0 where not.
    advantages: A_t of each token.
    sampling_logprobs: by the rollout engine.
    old_logprobs: by the trainer before the update, or None when the policy cannot have changed since sampling, so that
    the loss takes the current log-probabilities, detached, instead.
    ref_logprobs: by the reference policy, or None when no term of the loss needs them.
    """

    token_ids: tuple[int, ...]
    loss_mask: Tensor
    advantages: Tensor
    sampling_logprobs: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class TrainGroup:
    """A prompt with its completions as the loss sees them."""

    prompt: Prompt
    sequences: tuple[TrainSequence, ...]


@dataclass(frozen=True, slots=True)
class GroupSpan:
    """Where one group lies in a packed row: half-open token ranges.

    prompt: (start, end). completions: one (start, end) each, contiguous, right after the prompt.

    Example: a prompt of 3 tokens with completions of 2 and 4 at the start of the row:
    GroupSpan(prompt=(0, 3), completions=((3, 5), (5, 9))).
    """

    prompt: tuple[int, int]
    completions: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class PackedGroups:
    """Groups laid end to end in one row without padding: what the policy's forward takes.

        row     [ p p p | a a | b b b b ][ q q | c c c ]
        spans     prompt  completions     prompt completion

    token_ids: [T] int64. position_ids: [3, T] int64 for m-RoPE models, [1, T] otherwise; completions continue their
    prompt's positions. spans: one for each group, in row order. Responses are counted along the row: S is the total
    number of completion tokens, and every [S] tensor of a micro-batch lists them in row order.
    pixel_values, grid_thw: the groups' Vision concatenated ([patches, D] and [images and videos, 3]), or None when no
    group has one. They stay on the CPU until the policy looks at them.
    vision_hashes: the content hash of each image or video; empty: not known, so that nothing can be remembered of them.
    """

    token_ids: Tensor
    position_ids: Tensor
    spans: tuple[GroupSpan, ...]
    pixel_values: Tensor | None
    grid_thw: Tensor | None
    vision_hashes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """A packed row with what the loss needs of each of its S completion tokens (float32 [S], row order).

    sequence_index: [S] int64, the completion (0 .. num_sequences - 1, row order) to which a token belongs.
    old_logprobs, ref_logprobs: None as in TrainSequence.
    """

    packed: PackedGroups
    num_sequences: int
    sequence_index: Tensor
    loss_mask: Tensor
    advantages: Tensor
    sampling_logprobs: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """What the policy says of each of the S completion tokens of a packed row. All [S] float32.

    logprobs carry gradient; entropy (of the whole distribution, in nats) carries it only when asked for. kl: of the
    whole distribution from another one, with gradient; None where there is no other.
    """

    logprobs: Tensor
    entropy: Tensor
    kl: Tensor | None


NamedTensors = Iterator[tuple[str, "Tensor"]]
"""Weights as (Hugging Face checkpoint name, tensor), one at a time."""


class WeightsHandle:
    """A policy's weights, as a train engine offers them to a rollout engine.

    A subclass says where the weights are: LocalWeights, or distributed.engines.WorkerWeights. A
    rollout engine accepts one of them and raises EngineError for the other.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class LocalWeights(WeightsHandle):
    """Weights in this process.

    read: returns a new iterator over all tensors, for one sync. A train engine may free memory once
    the iterator is exhausted. In a sharded policy all ranks must iterate together.
    """

    read: Callable[[], NamedTensors]


class Phase(Protocol):
    """Announces a stretch of work: shows its progress and adds its wall-clock time to the step's timings."""

    def __call__(self, name: str, *, total: int | None = None) -> AbstractContextManager[Callable[[int], None]]:
        """Return a context that yields advance(k), to be called as k more of total are done."""
        ...
