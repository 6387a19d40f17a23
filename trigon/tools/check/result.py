"""What a check finds: problems, a summary and text. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "warning", "fail", "skipped"]

KINDS: Mapping[str, str] = {
    "configuration.invalid": "an option is unknown, invalid or missing, or options contradict each other",
    "configuration.warning": "an option has no effect, or works against another one",
    "versions.package": "a package is missing, or versions do not fit",
    "devices.missing": "there are fewer GPUs than `trainer.n_gpus_per_node`, or none for `trainer.device=cuda`",
    "devices.idle": "`trainer.n_gpus_per_node` is below the GPUs of this machine, or above its CPUs",
    "devices.used": "another process uses memory of a GPU that vLLM is to take",
    "devices.kernel": "the attention kernel, or liger-kernel, cannot run here",
    "network.loopback": "workers on this machine cannot connect to each other",
    "loggers.package": "a tracker of `trainer.logger` is not installed",
    "model.unusable": "the model, its tokenizer or its processors cannot be read, or are not supported",
    "model.context": "prompt and completion together are longer than the model's context",
    "model.kernels": "flash-linear-attention is not installed, and the model has layers that need it to be fast",
    "memory.too_little": "the run needs more memory than there is",
    "memory.tight": "the run is expected to need almost all memory",
    "template.chat": "the tokenizer has no chat template, or one that cannot be used",
    "template.generation_prompt": "the chat template does not begin the assistant's message",
    "template.format_prompt": "the format prompt uses unknown columns, or cannot be used",
    "dataset.unreadable": "a dataset cannot be found or read, has no rows, or lacks a column",
    "dataset.unused_images": "a column has images, and the configuration names another one",
    "rows.encoding": "a text of a row is not UTF-8, or has half of a surrogate pair",
    "rows.prompt": "the text of a row is missing, empty, or no text and no list of chat messages",
    "rows.answer": "the ground truth of a row is missing",
    "rows.markers": "the number of `<image>` or `<video>` markers is not that of images or videos",
    "rows.media_tokens": "a text contains a special token that stands for an image or a video",
    "rows.image_missing": "there is no such image file",
    "rows.image_outside": "an image is a URL, or its path leads out of the image folder",
    "rows.image_unreadable": "an image cannot be decoded",
    "rows.image_pixels": "an image has more pixels than `data.max_image_pixels`",
    "rows.image_shape": "an image is 200 times as long as it is wide, or more",
    "rows.image_count": "a row has more images than `worker.rollout.limit_images`",
    "rows.video_missing": "there is no such video file",
    "rows.video_outside": "a video is a URL, or its path leads out of the image folder",
    "rows.video_unreadable": "a video cannot be decoded",
    "rows.video_pixels": "a video's frames have more pixels than `data.max_image_pixels`",
    "rows.video_shape": "a video's frames are 200 times as long as they are wide, or more",
    "rows.mixed_media": "a row has images and videos",
    "rows.row_size": "the columns of a row have more text than a reward function gets",
    "rows.vocabulary": "a text has a token that was added to the tokenizer, and for which the model has no embedding",
    "rows.blank_image": "an image has a single colour",
    "lengths.overlong": "prompts are longer than `data.max_prompt_length`",
    "environment.unusable": "the environment or the tools cannot be loaded, or lack what the protocol asks for",
    "environment.fails": "the first episode fails at its reset, or the model cannot be shown what that returns",
    "duplicates.prompt": "training rows have the same text and the same images",
    "duplicates.conflict": "training rows have the same text and images, and other ground truths",
    "overlap.validation": "validation rows are training rows too",
    "answers.empty": "a ground truth is an empty text",
    "answers.constant": "nine of ten ground truths, or more, are the same",
    "answers.too_long": "a ground truth has more tokens than a completion may have",
    "reward.unusable": "the reward function cannot be loaded or called",
    "reward.fails": "the reward function hangs, crashes or returns no score for a made completion",
    "reward.constant": "right, wrong and empty completions have the same score",
    "reward.wrong": "a wrong or empty completion scores as high as the ground truth",
    "reward.format": "the reward function reads another format than the prompt asks for",
    "reward.random": "the same completion is scored differently when it is scored again",
    "reward.ground_truth": "the reward function does not give a ground truth the score of the others",
    "steps.plan": "an epoch does not fill one step, or the policy would never learn",
    "steps.warmup": "the learning rate never ends its warm-up",
    "disk.full": "the disk has no space for a checkpoint",
    "disk.checkpoints": "the disk has no space for all checkpoints that will be kept",
}
"""Every kind of problem, with what it means. Kinds are for programs, and do not change."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    kind: of KINDS. is_fatal: the run would fail, or be wasted. message: what is wrong, with the
    value. advice: what to do. examples: a few of the rows or values that it is about.
    """

    kind: str
    is_fatal: bool
    message: str
    advice: str = ""
    examples: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind


@dataclass(frozen=True, slots=True)
class Findings:
    """What a check found.

    summary: one line, shown if it passes. text: tables, shown as they are.
    """

    summary: str
    problems: tuple[Problem, ...] = ()
    text: str = ""


class CheckSkipped(Exception):
    """Raised by a check that does not apply, or lacks what another check needs. Says why."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one check. reason: why it was skipped."""

    name: str
    title: str
    status: Status
    seconds: float
    findings: Findings
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The results of all checks, in the order in which they ran."""

    results: tuple[Result, ...]
    seconds: float

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All problems."""
        return tuple(problem for result in self.results for problem in result.findings.problems)

    @property
    def would_fail(self) -> bool:
        """Whether the run would fail, or be wasted."""
        return any(problem.is_fatal for problem in self.problems)

    def result(self, name: str) -> Result:
        """Return the result of the check of this name. Raises: KeyError."""
        return {result.name: result for result in self.results}[name]


def status_of(findings: Findings) -> Status:
    """Return the status of a check that was not skipped."""
    if any(problem.is_fatal for problem in findings.problems):
        return "fail"
    return "warning" if findings.problems else "pass"
