"""What evaluate() returns, as data types, and how they are written as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trigon.system.terminal import sanitize
from trigon.tools.eval.statistics import Difference, Estimate

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of one model on some prompts.

    accuracy: the mean of accuracy_name, over all scored completions.
    accuracy_name: the score that is the accuracy: "accuracy" if the reward function returns it,
    otherwise "overall".
    parts: the mean of each score of the reward function, "overall" included.
    pass_at, majority_at: by k; only of prompts with at least k scored completions. A completion is
    right if its accuracy is at least 1.
    no_answer: the fraction of completions without an answer, which do not vote.
    length: tokens of a completion. cut: the fraction of completions that were cut at the limit.
    max_length: of the longest completion. prompt_length: tokens of a prompt, images included.
    num_failed, num_timeouts: completions that the reward function did not score; in no mean.
    """

    num_prompts: int
    num_completions: int
    accuracy: Estimate
    accuracy_name: str
    parts: Mapping[str, Estimate]
    pass_at: Mapping[int, Estimate]
    majority_at: Mapping[int, Estimate]
    no_answer: float
    length: Estimate
    max_length: int
    cut: Estimate
    prompt_length: float
    num_failed: int
    num_timeouts: int


@dataclass(frozen=True, slots=True)
class Blind:
    """The same prompts with images of one colour.

    difference: of the accuracy with images minus that without.
    num_with_images: prompts that have images or videos. folder: a run folder with the rollouts.
    """

    summary: Summary
    difference: Difference
    num_with_images: int
    folder: Path


@dataclass(frozen=True, slots=True)
class ModelEvaluation:
    """The evaluation of one model.

    model: as it was given. path: the folder or hub id of the weights. step: of its run; 0 if it is
    none. folder: a run folder with the rollouts and config.yaml.
    by: column -> value -> summary of the prompts with that value.
    num_rows: rows of the data. skipped: rows that could not be used, by reason.
    num_not_sampled: prompts that could be used, and have no completions.
    """

    model: str
    path: str
    step: int
    folder: Path
    summary: Summary
    by: Mapping[str, Mapping[str, Summary]]
    blind: Blind | None
    num_rows: int
    skipped: Mapping[str, int]
    num_not_sampled: int

    def __repr__(self) -> str:
        summary, accuracy = self.summary, self.summary.accuracy
        interval = f"{accuracy.value:.4f} [{accuracy.low:.4f}, {accuracy.high:.4f}]"
        counts = f"{summary.num_prompts:,} prompts, {summary.num_completions:,} completions"
        return f"{sanitize(self.model, max_characters=200)}: {summary.accuracy_name} {interval}, {counts}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two models on the prompts that both have.

    difference: accuracy of model minus that of baseline. adjusted_p_value: for the number of
    comparisons (Holm, 1979).
    """

    model: str
    baseline: str
    difference: Difference
    adjusted_p_value: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of evaluate().

    comparisons: of each further model with the first. settings: what the models were evaluated
    with: data, reward function, sampling. output: the folder with evaluation.json.
    """

    models: tuple[ModelEvaluation, ...]
    comparisons: tuple[Comparison, ...]
    settings: Mapping[str, Any]
    output: Path

    def __repr__(self) -> str:
        return "\n".join(["Evaluation", *(f"  {each!r}" for each in self.models), f"  in {self.output}"])

    def to_pandas(self) -> pandas.DataFrame:
        """Return a table with a row for each model, and a column for each number."""
        import pandas

        return pandas.DataFrame([_row(each) for each in self.models]).set_index("model")

    def to_json(self) -> dict[str, Any]:
        """Return the content of evaluation.json; numbers that are not finite are null."""
        content: dict[str, Any] = to_plain(self)
        return content


def _row(model: ModelEvaluation) -> dict[str, Any]:
    summary = model.summary
    return {
        "model": model.model,
        "step": model.step,
        "accuracy": summary.accuracy.value,
        "accuracy_low": summary.accuracy.low,
        "accuracy_high": summary.accuracy.high,
        **{f"pass@{k}": estimate.value for k, estimate in summary.pass_at.items()},
        **{f"maj@{k}": estimate.value for k, estimate in summary.majority_at.items()},
        **{f"parts.{name}": estimate.value for name, estimate in summary.parts.items()},
        **({} if model.blind is None else {"blind_accuracy": model.blind.summary.accuracy.value}),
        "length": summary.length.value,
        "cut": summary.cut.value,
        "num_prompts": summary.num_prompts,
        "num_completions": summary.num_completions,
    }


def to_plain(value: Any) -> Any:
    """Return a result as mappings, lists, texts and numbers, with null for nan and infinity."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: to_plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, float):
        return value if isfinite(value) else None
    return str(value) if isinstance(value, Path) else value
