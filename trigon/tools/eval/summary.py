"""Summarizes rollouts: accuracy, pass@k, majority votes, scores and lengths, in all and by column.

Works on the rows of a rollouts file, so that a stored evaluation gives the same numbers again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trigon.data.rows import column_names, column_value, has_column
from trigon.errors import DataError
from trigon.report.rollouts import RolloutRow
from trigon.system.suggestions import did_you_mean
from trigon.tools.eval.answers import AnswerForm, number_answers
from trigon.tools.eval.results import Summary
from trigon.tools.eval.statistics import Difference, compare_pairs, estimate_mean, majority_at_k, pass_at_k

ACCURACY = "accuracy"
MISSING = "(none)"
"""The value of rows that lack a column."""

DATASET = "dataset"
"""A column that every row has: the name of its dataset, unless the dataset has such a column."""

MAX_VALUE_CHARACTERS = 100


@dataclass(frozen=True, slots=True)
class PromptOutcome:
    """The completions of one prompt with what is computed from them.

    accuracies: of the scored completions, in order. pass_at, majority_at: by k. num_no_answer:
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
        ks: of pass@k and maj@k. Prompts with fewer scored completions have no value for k.
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
    Raises: DataError if no row has the column.
    """
    if outcomes:
        check_columns([outcome.rows[0].row for outcome in outcomes], [column])
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
    """Return the accuracy of the first minus that of the second, over prompts scored in both."""
    others = {outcome.prompt_id: outcome for outcome in second if outcome.accuracies}
    pairs = [(each, others[each.prompt_id]) for each in first if each.accuracies and each.prompt_id in others]
    most = max((len(outcome.accuracies) for pair in pairs for outcome in pair), default=1)
    return compare_pairs([one.accuracy for one, _ in pairs], [other.accuracy for _, other in pairs], unit=1 / most)
