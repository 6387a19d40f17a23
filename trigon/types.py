"""The data types that pass between modules.

    Prompt --generate--> Completion --score--> Rollout --group--> RolloutGroup
           --advantages, old and reference logprobs--> TrainGroup --pack--> MicroBatch --step-->
           Metrics

Types are immutable and complete when they are created. Every per-token list of a completion has
one entry for each token that was sampled, in order: `logprobs[t] = log p(token | all before it)`.
In a completion of one turn these are all of its tokens. This module imports nothing else of the
package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FinishReason = Literal["stop", "length", "turns", "unfinished"]
"""How a completion ended.

stop: the model, or the environment, ended it. length: it was cut at a limit of tokens. turns: it
reached the limit of turns. unfinished: it has not ended yet, and a later call of the engine may
continue it; it is not scored, and nothing is learned from it.
"""

ScoreOutcome = Literal["ok", "failed", "timeout"]
"""How scoring ended.

ok: scored. failed: the reward function raised, crashed or returned no valid scores. timeout: the
reward worker was killed at its time limit.
"""

ImageSizes = tuple[tuple[int, int], ...]
"""(width, height) of each of several images, in pixels."""

MediaKind = Literal["image", "video"]
"""The kind of media in a prompt: images or videos, never both."""


@dataclass(frozen=True, slots=True, eq=False)
class Vision:
    """The images or videos of one prompt as pixel values, the output of the processor.

    pixel_values: [patches, channels * temporal * patch * patch] float32 on the CPU; the patches of
    all images or videos, in order.
    grid_thw: [images or videos, 3] int64 on the CPU; (time, height, width) of each in patches,
    before merging. time is 1 for an image, the number of tiles for an image split into tiles of one
    size, and the number of temporal patches for a video, each of which merges two frames.
    hashes: the content hash of each image or video (of its pixel values), the key of engine caches.
    temporal_patch_seconds: seconds covered by a temporal patch of each video; empty for images.
    original_sizes: (width, height) of each image before it was processed, in a family whose image
    features depend on it (ModelFamily.tile_assembly); empty in all others.

    Example: two 56 x 56 images, patch 14: pixel_values [32, 1176], grid_thw [[1, 4, 4], [1, 4, 4]],
    two hashes.
    Example: a 56 x 56 video of 4 seconds, 8 frames: pixel_values [64, 1176], grid_thw [[4, 4, 4]],
    one hash, (1.0,).
    """

    pixel_values: Tensor
    grid_thw: Tensor
    hashes: tuple[str, ...]
    kind: MediaKind = "image"
    temporal_patch_seconds: tuple[float, ...] = ()
    original_sizes: ImageSizes = ()


@dataclass(frozen=True, slots=True)
class EncodedMedia:
    """The media of one prompt or observation as encoded files, as they are sent between processes.

    Images or videos of a prompt; images of an observation, or of all observations of a completion.
    Equal hashes are equal files, so that completions with images can be compared.
    encoded: the bytes of each file, in order; at least one. hashes: the SHA-256 of each, as hex.
    """

    encoded: tuple[bytes, ...] = field(compare=False, repr=False)
    hashes: tuple[str, ...]
    kind: MediaKind = "image"


ReadMedia = Callable[[], EncodedMedia | None]
"""Reads the images or videos of a prompt as encoded files; None for a text-only one."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One prompt, as rollout engine and trainer take it.

    prompt_id: identifies the dataset row, stable across runs: "train:17".
    token_ids: the chat-templated prompt with every media placeholder expanded.
    vision: images or videos, None for a text-only prompt. Vision is what engines need; EncodedMedia
    where prompts are sent to workers, each of which computes the pixel values.
    text: the prompt as text, with one marker per image or video.
    ground_truth: the ground truth of the row, of any type.
    row: the other columns of the row without images and videos, passed to the reward function.
    image_refs: the source of each image or video, for reports: "train:17/images/0 (figure.png)".
    read_media: reads its images or videos from the dataset again, in any thread; None where there
    is no dataset, as in workers.
    image_sizes: (width, height) of each image as the model sees it, after the processor has resized
    it; empty for videos, and in workers.
    draw: the step for which the prompt was drawn from the dataset, on which the seeds of its
    completions depend; 0 in a validation.
    """

    prompt_id: str
    token_ids: tuple[int, ...]
    vision: Vision | EncodedMedia | None
    text: str
    ground_truth: Any
    row: Mapping[str, Any]
    image_refs: tuple[str, ...]
    read_media: ReadMedia | None = None
    image_sizes: ImageSizes = ()
    draw: int = 0

    def pixels(self) -> Vision | None:
        """Return the processed media, None for a text-only prompt. They must be processed."""
        return pixels_of(self)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How completions are sampled.

    n: completions per prompt. temperature: 0 is greedy. top_p: probability mass; 1 is off.
    top_k: number of most likely tokens; -1 is off. max_tokens: maximum tokens of a completion.
    ignore_eos: continue after an end-of-sequence token, up to max_tokens.
    seed: seed of the run. The seed of each completion is a function of (seed, Prompt.draw,
    prompt_id, sample).
    one_turn: sample one turn after each prompt, also where completions have environments or tools.
    with_baseline: sample one further completion of each prompt, greedily: the baseline of ReMax
    (arXiv:2310.10505). It is the last of the prompt's completions.
    """

    n: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    ignore_eos: bool
    seed: int
    one_turn: bool = False
    with_baseline: bool = False

    @property
    def num_completions(self) -> int:
        """Number of completions that an engine returns for each prompt: n, or n + 1."""
        return self.n + self.with_baseline

    def as_greedy(self) -> SamplingParams:
        """Return the parameters with which a greedy completion is sampled, otherwise the same."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=-1)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a completion: tokens that the model observed, then tokens that it sampled.

    start, end: the half-open range of the sampled tokens in the completion's token_ids. The tokens
    between the end of the turn before (0 for the first) and start were observed: they were written
    by the chat template, a tool or an environment.
    text: the sampled tokens decoded, like Completion.text. observation: the observed tokens as
    text, with one marker for each image; "" if there are none.
    reward: what the environment gave for the turn, None without an environment.
    num_images: the number of images in the observation. image_sizes: their sizes, as in
    Prompt.image_sizes.
    """

    start: int
    end: int
    text: str
    observation: str = ""
    reward: float | None = None
    num_images: int = 0
    image_sizes: ImageSizes = ()


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts:
    """The experts that a rollout engine has used for a completion, in each decoder layer.

    prompt: [P, layers, k] int16, of the tokens of its prompt. None if it has no record of them: the
    first completion of a group has the record for all.
    completion: [R, layers, k] int16. The engine never reads the last token, which has NO_RECORD.
    """

    prompt: Tensor | None
    completion: Tensor


NO_RECORD = -1
"""In place of an expert, for all of a token: the engine has not recorded those that it used."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion, as sampled by the rollout engine: one turn, or the turns of an episode.

        token_ids        a  a  a  o  o  o  b  b       a, b: sampled; o: observed
        turns            (0, 3)            (6, 8)
        sampled tokens   a  a  a           b  b       S = 5

    token_ids: R ids, at least one; the end-of-sequence token is included if it was sampled. The
    first may be observed, the last is sampled.
    sampling_logprobs: S floats, one for each sampled token: its log-probability under the
    distribution sampled from, after temperature, top-p and top-k. All 0.0 for greedy decoding.
    text: the sampled tokens decoded, without special tokens if worker.reward.skip_special_tokens;
    several turns are joined by line breaks. A turn that has not ended has the text "".
    policy_version: the policy version of the weights that sampled the completion: the number of
    steps that had updated them. If several versions sampled it, the last of them. Records have the
    step instead (report/reporter.py), which differs after trainer.critic_warmup.
    replica: index of the engine replica that sampled it; see RolloutEngine.num_replicas.
    turns: the turns in order, at least one. If none are given, all tokens are one turn.
    vision: the images of the observations, in the order of their placeholder tokens.
    error: one line with the reason if the environment failed, else "". Such a completion is not
    scored, and nothing is learned from it.
    policy_versions: (policy version, number of tokens) of consecutive sampled tokens, S tokens in
    all, if they were sampled under several versions; () if all are of policy_version. See
    version_runs.
    routed_experts: None without worker.actor.router_replay.

    An unfinished completion has the turns so far, the last of which may not have ended, without an
    observation after it. It may have no tokens.
    """

    token_ids: tuple[int, ...]
    sampling_logprobs: tuple[float, ...]
    finish_reason: FinishReason
    text: str
    policy_version: int
    replica: int = 0
    turns: tuple[Turn, ...] = ()
    vision: Vision | EncodedMedia | None = None
    error: str = ""
    policy_versions: tuple[tuple[int, int], ...] = ()
    routed_experts: RoutedExperts | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.turns:
            object.__setattr__(self, "turns", (Turn(0, len(self.token_ids), self.text),))

    @property
    def is_unfinished(self) -> bool:
        """Whether it has not ended yet."""
        return self.finish_reason == "unfinished"

    @property
    def version_runs(self) -> tuple[tuple[int, int], ...]:
        """(policy version, number of tokens) of consecutive sampled tokens, S in all."""
        return self.policy_versions or ((self.policy_version, self.num_sampled),)

    @property
    def has_turns(self) -> bool:
        """Whether it is more than one turn without observation and reward."""
        return self.num_sampled < len(self.token_ids) or any(turn.reward is not None for turn in self.turns)

    @property
    def sampled(self) -> tuple[tuple[int, int], ...]:
        """The half-open ranges of token_ids that were sampled, one for each turn."""
        return tuple((turn.start, turn.end) for turn in self.turns)

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """The S sampled tokens."""
        return tuple(token for turn in self.turns for token in self.token_ids[turn.start : turn.end])

    @property
    def num_sampled(self) -> int:
        """S, the number of sampled tokens."""
        return sum(turn.end - turn.start for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Score:
    """The scores of one completion.

    overall: the reward. parts: all scores that the reward function returned, including "overall".
    outcome: anything but "ok" means that scoring failed. Then overall is 0.0, parts is empty, and
    the rollout is excluded from the statistics of its group and from the loss.
    error: one line with the reason, empty if outcome is "ok".
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
    """A prompt with its n scored completions. n is the same for all groups of a step.

    baseline: the greedy completion of the prompt, None without SamplingParams.with_baseline. Its
    reward is the baseline of the others; nothing is learned from its tokens.
    """

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    baseline: Rollout | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TrainSequence:
    """One completion of R tokens, S of them sampled, with the inputs of the loss.

    Tensors are float32 [S] on the CPU: observed tokens have no loss.

    sampled: the half-open ranges of token_ids that were sampled, in order; if none are given, all.
    vision: as in Completion.
    loss_mask: 1 for trainable tokens, 0 for others. advantages: the advantage of each token.
    sampling_logprobs: log-probabilities that the rollout engine computed.
    old_logprobs: log-probabilities that the trainer computed before the update. None if the policy
    has not changed since sampling; the loss then uses the current log-probabilities, detached.
    ref_logprobs: log-probabilities under the reference policy. None if no term of the loss needs
    them.
    values: the critic's values before the update, one for the state before each token. returns: the
    targets of these values. Both are None without a critic.
    routed_experts: as in Completion.
    """

    token_ids: tuple[int, ...]
    loss_mask: Tensor
    advantages: Tensor
    sampling_logprobs: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    sampled: tuple[tuple[int, int], ...] = ()
    vision: Vision | EncodedMedia | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    routed_experts: RoutedExperts | None = None

    def __post_init__(self) -> None:
        if not self.sampled:
            object.__setattr__(self, "sampled", ((0, len(self.token_ids)),))


def pixels_of(part: Prompt | Completion | TrainSequence) -> Vision | None:
    """Return the processed media of a prompt, or of what a completion observed.

    None without media. They must be processed.
    """
    name = part.prompt_id if isinstance(part, Prompt) else "a completion"
    assert not isinstance(part.vision, EncodedMedia), f"{name}: its media are not processed yet"
    return part.vision


@dataclass(frozen=True, slots=True, eq=False)
class TrainGroup:
    """A prompt with the training data of its completions."""

    prompt: Prompt
    sequences: tuple[TrainSequence, ...]


def parts_of(group: RolloutGroup | TrainGroup) -> tuple[Prompt | Completion | TrainSequence, ...]:
    """Return the prompt of a group and its completions, each of which may have media.

    Without the baseline, from which nothing is learned.
    """
    if isinstance(group, RolloutGroup):
        return group.prompt, *(rollout.completion for rollout in group.rollouts)
    return group.prompt, *group.sequences


def has_media(group: RolloutGroup | TrainGroup) -> bool:
    """Return whether the prompt of a group or one of its completions has images or videos."""
    return any(part.vision is not None for part in parts_of(group))


@dataclass(frozen=True, slots=True)
class GroupSpan:
    """The position of one group in a packed row, as half-open token ranges.

    prompt: (start, end). completions: (start, end) of each, contiguous, directly after the prompt.
    sampled: for each completion, the ranges of its sampled tokens; if none are given, all of them.
    repeats_prompt: whether another row, or this one, has the prompt already with other completions.

    Example: a prompt of 3 tokens with completions of 2 and 4 at the start of the row, of which the
    second observed its middle two tokens:
    GroupSpan(prompt=(0, 3), completions=((3, 5), (5, 9)), sampled=(((3, 5),), ((5, 6), (8, 9)))).
    """

    prompt: tuple[int, int]
    completions: tuple[tuple[int, int], ...]
    sampled: tuple[tuple[tuple[int, int], ...], ...] = ()
    repeats_prompt: bool = False

    def __post_init__(self) -> None:
        if not self.sampled:
            object.__setattr__(self, "sampled", tuple((span,) for span in self.completions))


@dataclass(frozen=True, slots=True, eq=False)
class PackedGroups:
    """Groups concatenated to one row without padding, the input of the policy's forward pass.

    All tensors are on the CPU: the policy copies what it needs to its device.

        row     [ p p p | a a | b b b b ][ q q | c c c ]
        spans     prompt  completions     prompt completion

    token_ids: [T] int64. position_ids: [3, T] int64 for m-RoPE models, [1, T] for others; the
    positions of each completion continue those of its prompt.
    spans: one per group, in row order. S is the number of sampled tokens of the row; every [S]
    tensor of a micro-batch lists them in row order.
    visions: the images or videos of each prompt, and the images of each completion, that has any,
    in row order. They are concatenated when the row is computed, so that memory holds a second copy
    of one row's pixels at a time.
    routed_experts: [T, layers, k] int16, the experts that the rollout engine has used for each
    token; NO_RECORD for tokens without a record. None if no token has one.
    """

    token_ids: Tensor
    position_ids: Tensor
    spans: tuple[GroupSpan, ...]
    visions: tuple[Vision, ...] = ()
    routed_experts: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """A packed row with the inputs of the loss for its S sampled tokens, in row order.

    num_sequences: number of completions. sequence_index: [S] int64, the completion of each token
    (0 .. num_sequences - 1, in row order). trainable: int64, the tokens whose loss_mask is not 0.
    owners: (group, index within the group) of each completion, in row order.
    All other tensors are float32 [S], as in TrainSequence.
    """

    packed: PackedGroups
    owners: tuple[tuple[int, int], ...]
    num_sequences: int
    sequence_index: Tensor
    trainable: Tensor
    loss_mask: Tensor
    advantages: Tensor
    sampling_logprobs: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    values: Tensor | None = None
    returns: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """The policy's output for the S sampled tokens of a packed row. All [S] float32.

    logprobs: log-probability of the token, with gradient.
    entropy: entropy of the next-token distribution, in nats; with gradient only if requested.
    kl: exact KL of the next-token distribution from a second policy's, in nats, with gradient; None
    without a second policy.
    router_probabilities: [E], the sum over tokens and MoE layers of the probability of each expert,
    with gradient; each prompt counts once. None unless requested.
    """

    logprobs: Tensor
    entropy: Tensor
    kl: Tensor | None
    router_probabilities: Tensor | None = None


NamedTensors = Iterator[tuple[str, "Tensor"]]
"""Weights as (Hugging Face checkpoint name, tensor), one at a time."""


class WeightsHandle:
    """A policy's weights, as a train engine provides them to a rollout engine.

    A subclass says where the weights are: LocalWeights, or distributed.engines.WorkerWeights. A
    rollout engine accepts one of them and raises EngineError for the other.
    """

    __slots__ = ()


class ReadWeights(Protocol):
    """Reads the weights of a LocalWeights."""

    def __call__(self, dtype: torch.dtype | None = None) -> NamedTensors:
        """Return a new iterator over all tensors, for one sync.

        A train engine may free memory once the iterator is exhausted. In a sharded policy all ranks
        must iterate together.

        dtype: the dtype of the parameters into which the tensors are loaded; wider tensors are
            rounded to it before they are gathered. None: the tensors keep their own dtype.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class LocalWeights(WeightsHandle):
    """Weights in this process."""

    read: ReadWeights


class Phase(Protocol):
    """Marks a phase of a step, to show its progress and measure its wall-clock time."""

    def __call__(self, name: str, *, total: int | None = None) -> AbstractContextManager[Callable[[int | None], None]]:
        """Return a context that yields advance(k), to be called when k more of total are done.

        k: 0 if something was done that does not count; None while the caller only waits.
        """
        ...
