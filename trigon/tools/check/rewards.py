"""The checks of the reward function: made completions, and each ground truth against itself.

The functions run in the reward workers of a run, with its time limits. What a made completion
scores says something about the reward function only as far as the format that it reads is known:
where no format scores more than a wrong answer, nothing is said about ground truths. With an
environment a reward may depend on turns, which made completions do not have: then equal scores of
right and wrong ones are no problem.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trigon.errors import RewardError
from trigon.rewards.contract import RewardRequest
from trigon.rewards.pool import RewardPool
from trigon.rollout.collect import dummy_requests
from trigon.system.terminal import sanitize
from trigon.tools.check.completions import FORMATS, AnswerFormat, asked_formats, final_answer
from trigon.tools.check.lengths import FAIL_FRACTION
from trigon.tools.check.result import CheckSkipped, Findings, Problem
from trigon.tools.check.rows import MAX_EXAMPLES, builder_of, names, share
from trigon.tools.check.scanning import RowFacts, ScannedDataset
from trigon.tools.check.subject import Subject
from trigon.types import Prompt, Score

NUM_TRIED = 6
"""Rows with which the format is found that the reward function reads."""

MAX_SECONDS = 15.0
"""Time after which no more ground truths are scored. Their order is random, with a fixed seed."""

MIN_SCORED = 32
"""Ground truths that are scored at least, if there are as many; and at a time."""

_TOLERANCE = 0.05
"""A ground truth is right if it scores this fraction of the way from wrong to right below right."""

_EPSILON = 1e-6
_NUM_END_TOKENS = 16  # of a prompt: <think> is up to 8 tokens where the tokenizer lacks it


@dataclass(frozen=True, slots=True)
class Example:
    """A row for which completions are made.

    blank: the request of its empty completion. ends_in_think: whether its prompt does, so that
    completions lack the <think> of their thoughts.
    """

    facts: RowFacts
    blank: RewardRequest
    ends_in_think: bool = False

    @property
    def answer(self) -> str:
        """The ground truth as the text of a final answer."""
        return final_answer(self.facts.ground_truth)

    def request(self, completion: str, num_tokens: int) -> RewardRequest:
        """Return the request to score a completion, as it follows the prompt."""
        completion = completion.removeprefix("<think>") if self.ends_in_think else completion
        return replace(self.blank, response=completion, response_length=num_tokens)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What made completions say about a reward function.

    best: the format with the highest scores. right, wrong: the mean scores of a right completion in
    it, and of a wrong one.
    """

    best: AnswerFormat
    right: float
    wrong: float

    @property
    def can_judge(self) -> bool:
        """Whether the score of a right completion is higher."""
        return self.right > self.wrong + _EPSILON


class RewardTrial:
    """Scores made completions for some rows of a run."""

    def __init__(self, subject: Subject, pool: RewardPool) -> None:
        self._pool = pool
        self._tokenizer = subject.readers.require()[1].tokenizer

    def example(self, dataset: ScannedDataset, facts: RowFacts) -> Example:
        """Return a row as an example. Builds its prompt, without pixels."""
        prompt = build(dataset, facts)
        end = self._tokenizer.decode(prompt.token_ids[-_NUM_END_TOKENS:])
        blank = replace(dummy_requests(prompt)[0], response="", response_length=0)
        return Example(facts, blank, ends_in_think=end.rstrip().endswith("<think>"))

    def score(self, completions: Sequence[tuple[Example, str]]) -> list[Score]:
        """Return the score of each completion. Raises: RewardError as RewardPool.score."""
        return self._pool.score([example.request(text, self.count(text)) for example, text in completions])

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True, slots=True)
class Judged:
    """What is known of a reward function. judgement: None if it cannot be called.

    text: a table, or why there is no judgement.
    """

    trial: RewardTrial | None
    judgement: Judgement | None
    problems: tuple[Problem, ...]
    text: str = ""


def check_reward(subject: Subject) -> Findings:
    """Return how the reward function scores right, wrong and empty completions of a few rows."""
    judged = subject.judged.get()
    judgement = judged.judgement
    problems = (*judged.problems, *check_validation_reward(subject))
    if judgement is None:
        return Findings(judged.text, problems)
    summary = f"right {judgement.right:.3g}, wrong {judgement.wrong:.3g}; it reads {judgement.best}"
    if not judgement.can_judge:
        summary = "cannot be judged: no made completion scores more than a wrong one, in any known format"
    return Findings(summary, problems, judged.text)


def check_validation_reward(subject: Subject) -> Iterator[Problem]:
    """Call the reward function of validation, if it has its own, on a row; yield what is wrong."""
    try:
        pool = subject.val_rewards.get()
        if pool is None:
            return
        pool.ready()
        rows = [
            (each, each.usable[0]) for each in subject.datasets.require() if each.split == "validation" and each.usable
        ]
        for dataset, first in rows[:1]:
            pool.check(dummy_requests(build(dataset, first)), described=f"a dummy completion of {first.name}")
    except RewardError as error:
        yield Problem("reward.fails", True, f"worker.reward.val_reward_function: {error}")


def judge_reward(subject: Subject) -> Judged:
    """Load the reward function, call it on made completions, and find the format that it reads."""
    try:
        pool = subject.rewards.get()
        pool.ready()
    except RewardError as error:
        return Judged(None, None, (Problem("reward.unusable", True, str(error)),))
    trial = RewardTrial(subject, pool)
    dataset = first_dataset(subject.datasets.require())
    if pool.scores_groups():
        try:
            first = spread(dataset.usable, 1)[0]
            pool.check(dummy_requests(build(dataset, first)), described=f"a dummy completion of {first.name}")
        except RewardError as error:
            return Judged(None, None, (Problem("reward.fails", True, str(error)),))
        return Judged(None, None, (), "called; scores that depend on the other completions of a prompt are not judged")
    examples = [trial.example(dataset, facts) for facts in spread(dataset.usable, NUM_TRIED)]
    asked = asked_formats(examples[0].blank.prompt)
    try:
        if problems := list(call_with_each(trial, examples, (asked or FORMATS)[0])):
            return Judged(None, None, tuple(problems))
        first = examples[0].facts
        pool.check(dummy_requests(build(dataset, first)), described=f"a dummy completion of {first.name}")
        judgement, problems, text = judge(trial, examples, asked)
    except RewardError as error:
        return Judged(None, None, (Problem("reward.fails", True, str(error)),))
    if subject.given.worker.rollout.environment is not None and not judgement.can_judge:
        random_scores = tuple(problem for problem in problems if problem.kind == "reward.random")
        text = "called; made completions have no turns, and what it gives for the turns of an episode is not judged"
        return Judged(None, None, random_scores, text)
    return Judged(trial, judgement, tuple(problems), text)


def call_with_each(trial: RewardTrial, examples: Sequence[Example], answer_format: AnswerFormat) -> Iterator[Problem]:
    """Score a right, a wrong and an empty completion alone; yield a problem for each failure."""
    first = examples[0]
    made = {
        "a right": answer_format.write(first.answer),
        "a wrong": answer_format.write(wrong_answer(first, examples)),
        "an empty": "",
    }
    for name, text in made.items():
        score = trial.score([(first, text)])[0]
        if score.outcome != "ok":
            message = f"the reward function has no score for {name} completion of {first.facts.name}: {score.error}"
            advice = "return a score for any text that a model may write"
            yield Problem("reward.fails", True, message, advice, (repr(text),))


def first_dataset(datasets: Sequence[ScannedDataset]) -> ScannedDataset:
    """Return the first dataset with usable rows. Raises: CheckSkipped if there is none."""
    for dataset in datasets:
        if dataset.usable:
            return dataset
    raise CheckSkipped("no row can be used, see the check 'rows'")


def build(dataset: ScannedDataset, facts: RowFacts) -> Prompt:
    """Return the prompt of a usable row."""
    assert dataset.scanned is not None
    return builder_of(dataset).build(dataset.scanned.source.rows[facts.index], facts.name)


def spread(rows: Sequence[RowFacts], number: int) -> list[RowFacts]:
    """Return this many rows, or all if there are fewer, at equal distances."""
    if len(rows) <= number:
        return list(rows)
    return [rows[index * len(rows) // number] for index in range(number)]


def wrong_answer(example: Example, examples: Sequence[Example]) -> str:
    """Return another row's ground truth, or a number that is no ground truth."""
    others = [each.answer for each in examples if each.answer.strip() not in ("", example.answer.strip())]
    return others[0] if others else "12345.678"


def judge(
    trial: RewardTrial, examples: Sequence[Example], asked: Sequence[AnswerFormat]
) -> tuple[Judgement, list[Problem], str]:
    """Return what made completions in all formats score, problems, and a table.

    asked: the formats that the prompt asks for. Raises: RewardError.
    """
    right = {each: _overall(trial.score([(e, each.write(e.answer)) for e in examples])) for each in FORMATS}
    means = {each: sum(scores) / len(scores) for each, scores in right.items()}
    best_asked = max(asked, key=means.__getitem__, default=None)
    best = max(FORMATS, key=means.__getitem__)
    if best_asked is not None and means[best_asked] >= means[best] - _EPSILON:
        best = best_asked
    wrong_texts = [(each, best.write(wrong_answer(each, examples))) for each in examples]
    wrong = _overall(trial.score(wrong_texts))
    empty = _overall(trial.score([(each, "") for each in examples]))
    again = _overall(trial.score([(each, best.write(each.answer)) for each in examples]))
    judgement = Judgement(best, means[best], sum(wrong) / len(wrong))
    first = examples[0]
    rows = [("right", right[best][0], best.write(first.answer)), ("wrong", wrong[0], wrong_texts[0][1])]
    table = "\n".join(
        f"{score:>8.3g}  {name}: {sanitize(' '.join(text.split()), max_characters=90)}"
        for name, score, text in (*rows, ("empty", empty[0], ""))
    )
    if any(abs(one - other) > _EPSILON for one, other in zip(right[best], again, strict=True)):
        differences = [f"{one:.3g} and then {other:.3g}" for one, other in zip(right[best], again, strict=True)]
        message = f"the same completions have other scores when they are scored again: {'; '.join(differences)}"
        advice = "seed what is random in it, unless the noise is meant"
        return judgement, [Problem("reward.random", False, message, advice)], table
    problems = list(_find_problems(judgement, means, best_asked, wrong, empty, examples))
    problems += _thoughts_twice(trial, examples, judgement)
    return judgement, problems, table


def _find_problems(
    judgement: Judgement,
    means: Mapping[AnswerFormat, float],
    best_asked: AnswerFormat | None,
    wrong: Sequence[float],
    empty: Sequence[float],
    examples: Sequence[Example],
) -> Iterator[Problem]:
    scores = {round(score, 6) for score in (*means.values(), *wrong, *empty)}
    is_text = all(isinstance(each.facts.ground_truth, str | int | float) for each in examples)
    if len(scores) == 1:
        score = scores.pop()
        if score > 0 or is_text:
            message = (
                f"{len(FORMATS) + 2} made completions of a row, right ones in {len(FORMATS)} formats, a wrong and an "
                f"empty one, all score {score:.3g}"
            )
            advice = "make it tell right from wrong; if it reads another format than these, nothing is wrong"
            yield Problem("reward.constant", score > 0, message, advice)
        return
    for name, others in (("a wrong", wrong), ("an empty", empty)):
        mean = sum(others) / len(others)
        if mean < judgement.right - _EPSILON or not is_text:
            continue
        is_certain = mean > judgement.right + _EPSILON or name == "an empty"
        message = f"{name} completion scores {mean:.3g}, and a right one {judgement.right:.3g} ({judgement.best})"
        advice = "correct the reward function: this is what would be learned"
        if not is_certain:
            advice = "make it tell right from wrong; if it reads a format that was not tried, nothing is wrong"
        yield Problem("reward.wrong", is_certain, message, advice)
    if best_asked is not None and means[best_asked] < judgement.right - _EPSILON:
        message = (
            f"the prompt asks for {best_asked}, where a ground truth scores {means[best_asked]:.3g}, and the reward "
            f"function reads {judgement.best}, where it scores {judgement.right:.3g}"
        )
        advice = "give both the same format (data.format_prompt, worker.reward.reward_function)"
        yield Problem("reward.format", False, message, advice)


def _thoughts_twice(trial: RewardTrial, examples: Sequence[Example], judgement: Judgement) -> Iterator[Problem]:
    """Yield a problem if completions score more with a <think> after that of the prompt."""
    if not examples[0].ends_in_think:
        return
    alone = [replace(each, ends_in_think=False) for each in examples]
    means = [
        sum(scores) / len(scores)
        for each in FORMATS
        if (scores := _overall(trial.score([(e, each.write(e.answer)) for e in alone])))
    ]
    if max(means) > judgement.right + _EPSILON:
        message = (
            f"the prompt ends in <think>, so completions begin after it; a right one scores {judgement.right:.3g}, and "
            f"{max(means):.3g} with a <think> of its own, which the reward function wants first"
        )
        advice = "let the reward function take </think> without <think>, or use a chat template that does not end in it"
        yield Problem("reward.format", True, message, advice)


def check_ground_truths(subject: Subject) -> Findings:
    """Return which ground truths do not have the score of the others against themselves."""
    judged = subject.judged.require()
    if judged.trial is None or judged.judgement is None:
        raise CheckSkipped("see the check 'reward'")
    if any(problem.kind == "reward.random" for problem in judged.problems):
        raise CheckSkipped("the scores are random, see the check 'reward'")
    if not judged.judgement.can_judge:
        raise CheckSkipped("cannot be judged: no known format of an answer scores more than a wrong one")
    datasets = [dataset for dataset in subject.datasets.require() if dataset.usable]
    return score_ground_truths(subject, judged.trial, datasets, judged.judgement)


def score_ground_truths(
    subject: Subject, trial: RewardTrial, datasets: Sequence[ScannedDataset], judgement: Judgement
) -> Findings:
    """Score each ground truth against itself, as many as fit into MAX_SECONDS."""
    config = subject.given
    all_rows = [(dataset, row) for dataset in datasets for row in dataset.usable]
    random.Random(0).shuffle(all_rows)
    examples: list[Example] = []
    scores: list[Score] = []
    start = time.monotonic()
    with subject.progress("score ground truths", len(all_rows)) as advance:
        while len(scores) < len(all_rows):
            if len(scores) >= MIN_SCORED and time.monotonic() - start > MAX_SECONDS:
                break
            part = [trial.example(*each) for each in all_rows[len(scores) : len(scores) + MIN_SCORED]]
            try:
                scores += trial.score([(each, judgement.best.write(each.answer)) for each in part])
            except RewardError as error:
                return Findings("", (Problem("reward.fails", True, str(error)),))
            examples += part
            advance(len(part))
    number = len(scores)
    judged = sorted(zip(examples, scores, strict=True), key=lambda each: each[0].facts.index)
    problems: list[Problem] = []
    failed = [(example.facts, score) for example, score in judged if score.outcome != "ok"]
    if failed:
        message = f"the reward function has no score for the ground truths of {share(len(failed), number)}"
        is_fatal = len(failed) > config.worker.reward.max_failed_fraction * number
        shown = tuple(f"{row.name}: {row.ground_truth!r}: {score.error}" for row, score in failed[:MAX_EXAMPLES])
        advice = "correct these rows, or make it return a score for them"
        problems.append(Problem("reward.fails", is_fatal, message, advice, shown))
    scored = [(example, score.overall) for example, score in judged if score.outcome == "ok"]
    highest = max((overall for _, overall in scored), default=judgement.right)
    least = highest - _TOLERANCE * (highest - judgement.wrong)
    low = [(each.facts, overall) for each, overall in scored if overall < least and each.answer.strip()]
    if low:
        message = (
            f"{share(len(low), number)} have a ground truth that does not score {highest:.3g} against itself, written "
            f"as {judgement.best}: the model could not be right"
        )
        advice = "correct these ground truths, or what the reward function compares"
        shown = tuple(f"{row.name}: {row.ground_truth!r} scores {overall:.3g}" for row, overall in low[:MAX_EXAMPLES])
        problems.append(Problem("reward.ground_truth", len(low) >= FAIL_FRACTION * number, message, advice, shown))
    limit = config.data.max_response_length
    if long := [each.facts for each, _ in judged if trial.count(each.answer) > limit]:
        message = f"{share(len(long), number)} have a ground truth of more than data.max_response_length={limit} tokens"
        problems.append(Problem("answers.too_long", False, message, "raise data.max_response_length", names(long)))
    sampled = "" if number == len(all_rows) else f" (of {len(all_rows):,}, chosen at random)"
    return Findings(f"{number:,} ground truths{sampled} score {highest:.3g} against themselves", tuple(problems))


def _overall(scores: Sequence[Score]) -> list[float]:
    return [score.overall for score in scores]
