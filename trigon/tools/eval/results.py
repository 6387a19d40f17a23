r"""What evaluate() returns, how it is computed from rollouts, and how it is printed.

Works on the rows of a rollouts file, so that a stored evaluation gives the same numbers again.
Answers are found in completions for majority votes only: whether a completion is right is decided
by the reward function, which may find the answer in another way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

from trigon.data.rows import column_names, column_value, has_column
from trigon.errors import DataError
from trigon.report.console import Console
from trigon.report.rollouts import RolloutRow, to_json
from trigon.rewards.verifiers.equivalence import extract_boxed, is_same_answer
from trigon.system.terminal import did_you_mean, format_number, sanitize
from trigon.tools.eval.settings import AnswerForm
from trigon.tools.eval.statistics import Difference, Estimate, compare_pairs, estimate_mean, majority_at_k, pass_at_k

if TYPE_CHECKING:
    import pandas

_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
ACCURACY = "accuracy"
MISSING = "(none)"
"""The value of rows that lack a column."""

DATASET = "dataset"
"""A column that every row has: the name of its dataset, unless the dataset has such a column."""

MAX_VALUE_CHARACTERS = 100

MAX_VALUES_SHOWN = 20
"""Values of a column that are printed; evaluation.json has all of them."""

MIN_CUT_FRACTION = 0.05
"""Fraction of completions that are cut from which there is a hint."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of one model on some prompts.

    accuracy: the mean of accuracy_name, over all scored completions.
    accuracy_name: the score that is the accuracy: "accuracy" if the reward function returns it,
    otherwise "overall".
    parts: the mean of each score of the reward function, "overall" included.
    pass_at, majority_at: pass@k and maj@k by k; only of prompts with at least k scored completions.
    A completion is right if its accuracy is at least 1.
    no_answer: the fraction of completions without an answer, which do not vote.
    length: tokens of a completion. cut: the fraction of completions that were cut at the limit.
    max_length: tokens of the longest completion. prompt_length: tokens of a prompt, images
    included.
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

    difference: accuracy with images minus accuracy without.
    num_with_images: prompts that have images or videos. folder: a run folder with the rollouts.
    """

    summary: Summary
    difference: Difference
    num_with_images: int
    folder: Path


@dataclass(frozen=True, slots=True)
class ModelEvaluation:
    """The evaluation of one model.

    model: the text that was given. path: the folder or hub id of the weights. step: step of its
    run; 0 if it has none. folder: a run folder with the rollouts and config.yaml.
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

    difference: accuracy of model minus accuracy of baseline. adjusted_p_value: p-value adjusted for
    the number of comparisons (Holm, 1979).
    """

    model: str
    baseline: str
    difference: Difference
    adjusted_p_value: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of evaluate().

    comparisons: comparisons of each further model with the first. settings: data, reward
    function and sampling of the evaluation. output: the folder with evaluation.json.
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
        content: dict[str, Any] = to_json(asdict(self))
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


# -- answers ---------------------------------------------------------------------------------------


def extract_answer(response: str, form: AnswerForm) -> str | None:
    """Return the answer of a completion without white space around it; None if it has none."""
    match form:
        case "boxed":
            answer = extract_boxed(response)
        case "tag":
            found = _TAG.findall(response)
            answer = found[-1] if found else None
        case "line":
            found = _LINE.findall(response)
            answer = found[-1] if found else None
        case "text":
            answer = response
        case "auto":
            forms: tuple[AnswerForm, ...] = ("boxed", "tag", "line")
            return next((answer for each in forms if (answer := extract_answer(response, each)) is not None), None)
        case _:
            assert_never(form)
    return answer.strip() or None if answer is not None else None


def number_answers(responses: Sequence[str], form: AnswerForm) -> list[int | None]:
    """Return the number of each completion's answer; equal answers have equal numbers.

    Answers are equal if they differ in letter case only, or if the comparison of the shipped reward
    functions takes them for equal, as text or as mathematics: 0.5 and 1/2. Each is compared with
    the first answer of each number.
    Returns: numbers from 0 in the order of first occurrence; None for no answer.
    """
    numbers: dict[str, int] = {}
    first: list[str] = []
    result: list[int | None] = []
    for response in responses:
        answer = extract_answer(response, form)
        if answer is None:
            result.append(None)
            continue
        key = answer.casefold()
        if key not in numbers:
            same = next((number for number, other in enumerate(first) if is_same_answer(answer, other)), None)
            if same is None:
                same = len(first)
                first.append(answer)
            numbers[key] = same
        result.append(numbers[key])
    return result


@dataclass(frozen=True, slots=True)
class PromptOutcome:
    """The completions of one prompt with what is computed from them.

    accuracies: accuracies of the scored completions, in order. pass_at, majority_at: pass@k and
    maj@k by k. num_no_answer:
    scored completions without an answer.
    """

    prompt_id: str
    rows: tuple[RolloutRow, ...]
    accuracies: tuple[float, ...]
    pass_at: Mapping[int, float]
    majority_at: Mapping[int, float]
    num_no_answer: int

    @property
    def accuracy(self) -> float:
        """The mean of accuracies, of which there must be one."""
        return sum(self.accuracies) / len(self.accuracies)


def accuracy_name(rows: Sequence[RolloutRow]) -> str:
    """Return the name of the score that is the accuracy: "accuracy", or "overall" without it."""
    return ACCURACY if any(ACCURACY in row.parts for row in rows) else "overall"


def default_ks(num_samples: int) -> tuple[int, ...]:
    """Return the powers of two up to the number of completions of a prompt, and that number."""
    return tuple(sorted({*(2**power for power in range(num_samples.bit_length())), num_samples}))


def outcomes_of(
    rows: Sequence[RolloutRow], *, accuracy: str, form: AnswerForm, ks: Sequence[int]
) -> list[PromptOutcome]:
    """Return the outcome of each prompt, in the order of the rows.

    Args:
        accuracy: name of the score that is the accuracy. form: where answers are, for votes.
        ks: the k of pass@k and maj@k. Prompts with fewer scored completions have no value for k.
    """
    by_prompt: dict[str, list[RolloutRow]] = {}
    for row in rows:
        by_prompt.setdefault(row.prompt_id, []).append(row)
    return [_outcome(prompt_id, group, accuracy, form, ks) for prompt_id, group in by_prompt.items()]


def _outcome(
    prompt_id: str, rows: Sequence[RolloutRow], accuracy: str, form: AnswerForm, ks: Sequence[int]
) -> PromptOutcome:
    scored = [row for row in rows if accuracy in row.parts]
    accuracies = tuple(row.parts[accuracy] for row in scored)
    right = [float(value >= 1) for value in accuracies]
    usable = [k for k in ks if k <= len(scored)]
    answers = number_answers([row.response for row in scored], form)
    return PromptOutcome(
        prompt_id=prompt_id,
        rows=tuple(rows),
        accuracies=accuracies,
        pass_at={k: pass_at_k(len(right), int(sum(right)), k) for k in usable},
        majority_at={k: majority_at_k(answers, right, k, seed=prompt_id) for k in usable},
        num_no_answer=answers.count(None),
    )


def summarize(outcomes: Sequence[PromptOutcome], *, accuracy: str) -> Summary:
    """Return the summary of some prompts. accuracy: as for outcomes_of."""
    rows = [row for outcome in outcomes for row in outcome.rows]
    names = sorted({name for row in rows for name in row.parts})
    ks = sorted({k for outcome in outcomes for k in outcome.pass_at})
    num_scored = sum(len(outcome.accuracies) for outcome in outcomes)
    results = [row.outcome for row in rows]
    return Summary(
        num_prompts=len(outcomes),
        num_completions=len(rows),
        accuracy=estimate_mean([outcome.accuracies for outcome in outcomes]),
        accuracy_name=accuracy,
        parts={
            name: estimate_mean(
                [[row.parts[name] for row in outcome.rows if name in row.parts] for outcome in outcomes]
            )
            for name in names
        },
        pass_at={k: estimate_mean([[each.pass_at[k]] for each in outcomes if k in each.pass_at]) for k in ks},
        majority_at={
            k: estimate_mean([[each.majority_at[k]] for each in outcomes if k in each.majority_at]) for k in ks
        },
        no_answer=sum(outcome.num_no_answer for outcome in outcomes) / num_scored if num_scored else math.nan,
        length=estimate_mean([[float(row.num_tokens) for row in outcome.rows] for outcome in outcomes]),
        max_length=max((row.num_tokens for row in rows), default=0),
        cut=estimate_mean([[float(row.finish_reason == "length") for row in outcome.rows] for outcome in outcomes]),
        prompt_length=(
            sum(outcome.rows[0].num_prompt_tokens for outcome in outcomes) / len(outcomes) if outcomes else math.nan
        ),
        num_failed=results.count("failed"),
        num_timeouts=results.count("timeout"),
    )


def summarize_by(outcomes: Sequence[PromptOutcome], column: str, *, accuracy: str) -> dict[str, Summary]:
    """Return a summary for each value of a column of the dataset, the most frequent first.

    column: a name in RolloutRow.row; dots reach into structs; or DATASET.
    """
    groups: dict[str, list[PromptOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault(_value_of(outcome.rows[0], column), []).append(outcome)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return {value: summarize(group, accuracy=accuracy) for value, group in ordered}


def check_columns(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Raise DataError, with the existing columns, if one of these is in none of the rows.

    rows: RolloutRow.row or Prompt.row of each prompt.
    """
    for column in columns:
        if column != DATASET and not any(has_column(row, column) for row in rows):
            known = {name for row in rows for name in column_names(row)}
            raise DataError(
                f"the rows have no column {column!r}{did_you_mean(column, known)}; they have "
                f"{', '.join(sorted(known)) or 'none'}, and {DATASET}"
            )


def _value_of(row: RolloutRow, column: str) -> str:
    """Return the value of a column of the dataset as text."""
    if column == DATASET and column not in row.row:
        return row.prompt_id.rpartition(":")[0]
    value = column_value(row.row, column)
    return MISSING if value is None else str(value)[:MAX_VALUE_CHARACTERS]


def compare_outcomes(first: Sequence[PromptOutcome], second: Sequence[PromptOutcome]) -> Difference:
    """Return the accuracy of the first minus the second's, over prompts scored in both."""
    others = {outcome.prompt_id: outcome for outcome in second if outcome.accuracies}
    pairs = [(each, others[each.prompt_id]) for each in first if each.accuracies and each.prompt_id in others]
    most = max((len(outcome.accuracies) for pair in pairs for outcome in pair), default=1)
    return compare_pairs([one.accuracy for one, _ in pairs], [other.accuracy for _, other in pairs], unit=1 / most)


# -- tables ---------------------------------------------------------------------------------------


def show(evaluation: Evaluation, console: Console) -> None:
    """Print the tables of an evaluation."""
    models = evaluation.models
    names = [short_name(each.model) for each in models]
    settings = evaluation.settings
    console.print(
        f"\ndata: {', '.join(settings['data'])}   reward: {settings['reward_function']}   n {settings['n']}, "
        f"temperature {settings['temperature']:g}, top_p {settings['top_p']:g}, at most {settings['max_tokens']} "
        f"tokens, seed {settings['seed']}"
    )
    rows = summary_rows([each.summary for each in models])
    console.table("Evaluation, with 95 % intervals by prompt", ("", *names), rows)
    for column in models[0].by:
        show_column(column, models, names, console)
    for each in models:
        if each.blind is not None:
            show_blind(each, console)
    if evaluation.comparisons:
        comparisons = [
            (
                short_name(each.model),
                show_difference(each.difference),
                show_p_value(each.adjusted_p_value),
                f"{each.difference.num_better:,}",
                f"{each.difference.num_worse:,}",
                f"{each.difference.num_prompts:,}",
            )
            for each in evaluation.comparisons
        ]
        console.table(
            f"Accuracy minus that of {names[0]}, paired by prompt (permutation test)",
            ("", "difference", "p", "better", "worse", "prompts"),
            comparisons,
        )
    for line in remarks(evaluation):
        console.print(line)
    console.print(f"rollouts: {' '.join(str(each.folder) for each in models)}   (trigon view FOLDER)")
    console.print(f"results:  {evaluation.output / 'evaluation.json'}")


def summary_rows(summaries: Sequence[Summary]) -> list[tuple[str, ...]]:
    """Return the rows of the table of results, one column for each summary."""
    first = summaries[0]
    name = "accuracy" if first.accuracy_name == "accuracy" else f"accuracy (score {first.accuracy_name!r})"
    rows: list[tuple[str, ...]] = [(name, *(show_estimate(each.accuracy) for each in summaries))]
    if max(first.pass_at, default=1) > 1:
        rows += [(f"pass@{k}", *(show_estimate(each.pass_at.get(k)) for each in summaries)) for k in first.pass_at]
        rows += [
            (f"maj@{k}", *(show_estimate(each.majority_at.get(k)) for each in summaries))
            for k in first.majority_at
            if k > 1
        ]
    for part in dict.fromkeys(part for each in summaries for part in each.parts):
        if part != first.accuracy_name:
            rows.append((f"score {part}", *(show_estimate(each.parts.get(part)) for each in summaries)))
    rows += [
        ("tokens", *(f"{show_estimate(each.length)} max {each.max_length:,}" for each in summaries)),
        ("cut at the limit", *(f"{each.cut.value:.1%}" for each in summaries)),
        ("prompts / completions", *(f"{each.num_prompts:,} / {each.num_completions:,}" for each in summaries)),
    ]
    if any(each.num_failed or each.num_timeouts for each in summaries):
        rows.append(("not scored", *(f"{each.num_failed} failed, {each.num_timeouts} timed out" for each in summaries)))
    return rows


def show_column(column: str, models: Sequence[ModelEvaluation], names: Sequence[str], console: Console) -> None:
    """Print the accuracy for each value of a column."""
    first, *others = [each.by[column] for each in models]
    rows = [
        (
            value,
            f"{summary.num_prompts:,}",
            show_estimate(summary.accuracy),
            *(show_estimate(other[value].accuracy if value in other else None) for other in others),
        )
        for value, summary in list(first.items())[:MAX_VALUES_SHOWN]
    ]
    title = f"Accuracy by {column}"
    if len(first) > MAX_VALUES_SHOWN:
        title += f" ({MAX_VALUES_SHOWN} of {len(first)} values; evaluation.json has all)"
    console.table(title, (column, "prompts", *names), rows)


def show_blind(model: ModelEvaluation, console: Console) -> None:
    """Print what the images are worth."""
    blind = model.blind
    assert blind is not None
    difference = blind.difference
    console.table(
        "Does it need the images?",
        ("", short_name(model.model)),
        [
            ("accuracy with images", show_estimate(model.summary.accuracy)),
            ("accuracy with blank images", show_estimate(blind.summary.accuracy)),
            ("difference, paired by prompt", show_difference(difference)),
            ("p (permutation test)", show_p_value(difference.p_value)),
        ],
    )
    if blind.num_with_images < model.summary.num_prompts:
        console.print(f"{blind.num_with_images:,} of {model.summary.num_prompts:,} prompts have images or videos.")
    if difference.low > 0:
        accuracy = model.summary.accuracy.value
        if accuracy > 0 and blind.summary.accuracy.value >= 0:
            lost = f"{difference.value / accuracy:.0%} of its accuracy is lost"
        else:  # a reward that can be negative has no such share
            lost = f"its accuracy is lower by {difference.value:.4f}"
        console.print(f"It needs them: {lost} without the images.")
    elif difference.high < 0:
        console.print("It is better without the images: look at the rollouts.")
    else:
        console.print(
            "Not shown: the interval of the difference contains 0. Either the answers do not depend on the images, or "
            "there are too few prompts to tell."
        )


def remarks(evaluation: Evaluation) -> list[str]:
    """Return what a reader of the numbers has to know, one line each."""
    lines = []
    for each in evaluation.models:
        name = short_name(each.model)
        if each.skipped:
            counts = ", ".join(f"{count} {reason}" for reason, count in each.skipped.items())
            lines.append(f"{name}: {sum(each.skipped.values())} of {each.num_rows} rows are not in it ({counts})")
        if each.num_not_sampled:
            lines.append(f"{name}: {each.num_not_sampled} prompts are not in it, since they could not be sampled")
        if each.summary.cut.value >= MIN_CUT_FRACTION:
            lines.append(
                f"{name}: {each.summary.cut.value:.0%} of the completions were cut at "
                f"{evaluation.settings['max_tokens']} tokens; raise --max-tokens"
            )
        if max(each.summary.majority_at, default=1) > 1 and each.summary.no_answer >= MIN_CUT_FRACTION:
            lines.append(
                f"{name}: {each.summary.no_answer:.0%} of the completions have no answer by --answers "
                f"{evaluation.settings['answers']}, and do not vote in maj@k"
            )
    return lines


def short_name(model: str) -> str:
    """Return a model's name for a column of a table: the last two parts of a path."""
    return "/".join(Path(model).parts[-2:])


def show_estimate(estimate: Estimate | None) -> str:
    """Return a mean with its interval as text, 0.4635 [0.3944, 0.5341]; empty for None."""
    if estimate is None:
        return ""
    value, low, high = (
        f"{number:.4f}" if abs(number) < 10 else format_number(number)
        for number in (estimate.value, estimate.low, estimate.high)
    )
    return f"{value} [{low}, {high}]"


def show_difference(difference: Difference) -> str:
    """Return a difference with its sign and interval as text."""
    return f"{difference.value:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]"


def show_p_value(p_value: float) -> str:
    """Return a p-value as text."""
    return "< 0.0001" if p_value < 1e-4 else f"{p_value:.4f}"
