r"""The checks of the reward function: made completions, and each ground truth against itself.

Completions are made with a given final answer, in the formats that prompts ask for. A format is
recognized by what the instructions contain: \boxed{, <answer>, "Answer:", ####, <think>. Where a
prompt asks for none of them, all formats are tried. The functions run in the reward workers of a
run, with its time limits.

What a made completion scores says something about the reward function only as far as the format
that it reads is known: where no format scores more than a wrong answer, nothing is said about
ground truths. With an environment a reward may depend on turns, which made completions do not have:
then equal scores of right and wrong ones are no problem.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from trigon.assemble.preflight import check_rewards, open_rewards, open_validation_rewards
from trigon.config.options import with_options
from trigon.config.schema import Config
from trigon.data.prompts import PromptBuilder
from trigon.errors import RewardError
from trigon.report.console import Console
from trigon.rewards.contract import RewardRequest
from trigon.rewards.pool import RewardPool
from trigon.rewards.verifiers.equivalence import extract_boxed
from trigon.rewards.verifiers.r1v import extract_answer
from trigon.rollout.collect import dummy_requests
from trigon.system.terminal import sanitize
from trigon.tools.check.dataset import MAX_EXAMPLES, RowFacts, ScannedDataset, build, first_dataset, names, share
from trigon.tools.check.model import FAIL_FRACTION
from trigon.tools.check.run import Result, Skipped
from trigon.types import Score

NUM_TRIED = 6
"""Rows with which the format is found that the reward function reads."""

MAX_SECONDS = 15.0
"""Time after which no more ground truths are scored. Their order is random, with a fixed seed."""

MIN_SCORED = 32
"""Ground truths that are scored at least, if there are as many; and at a time."""

_TOLERANCE = 0.05
"""A ground truth is right if it scores this fraction of the way from wrong to right below right."""

_SEE_REWARD = "see the check 'reward'"
_EPSILON = 1e-6
_NUM_END_TOKENS = 16  # of a prompt: <think> is up to 8 tokens where the tokenizer lacks it
_THOUGHTS = "<think>A made completion has no thoughts of its own.</think>\n"
_ANSWER_LINE = re.compile(r"\bAnswer\s*:")


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """A format of completions. template: the completion, with %s for the final answer."""

    template: str

    def write(self, answer: str) -> str:
        """Return a completion with this final answer."""
        return self.template.replace("%s", answer, 1)

    def __str__(self) -> str:
        shown = self.template.replace(_THOUGHTS, "<think>...</think> ").replace("%s", "...")
        return "the answer alone" if shown == "..." else " ".join(shown.split())


_BODIES = (
    r"\boxed{%s}",
    "<answer>%s</answer>",
    r"<answer>\boxed{%s}</answer>",
    "Answer: %s",
    r"Answer: \boxed{%s}",
    "#### %s",
    "%s",
)

FORMATS = tuple(AnswerFormat(thoughts + body) for body in _BODIES for thoughts in (_THOUGHTS, ""))
"""All formats, those with thoughts first."""


def markers_in(instructions: str) -> tuple[str, ...]:
    """Return the markers of formats that the text of a prompt contains."""
    markers = [marker for marker in (r"\boxed{", "<answer>", "####", "<think>") if marker in instructions]
    if "<answer>" not in markers and _ANSWER_LINE.search(instructions):
        markers.append("Answer:")
    return tuple(markers)


def asked_formats(instructions: str) -> tuple[AnswerFormat, ...]:
    """Return the formats of the markers in a prompt's text; none if no marker asks for an answer.

    Thoughts may come before an answer where the prompt does not ask for them: many models think.
    """
    asked = set(markers_in(instructions))
    if not asked - {"<think>"}:
        return ()
    return tuple(each for each in reversed(FORMATS) if set(markers_in(each.template)) in (asked, asked | {"<think>"}))


def final_answer(ground_truth: object) -> str:
    r"""Return a ground truth as the text of a final answer, without <answer> tags or a \boxed{}.

    Lists and mappings become JSON.
    """
    if not isinstance(ground_truth, str):
        return str(ground_truth) if isinstance(ground_truth, int | float) else json.dumps(ground_truth, default=str)
    boxed = extract_boxed(ground_truth)
    return extract_answer(ground_truth) if boxed is None else boxed


@dataclass(frozen=True, slots=True)
class Example:
    """A row for which completions are made.

    blank: the request to score its empty completion. ends_in_think: whether its prompt does, so
    that completions lack the <think> of their thoughts.
    """

    facts: RowFacts
    blank: RewardRequest
    ends_in_think: bool = False

    @property
    def answer(self) -> str:
        """The ground truth as the text of a final answer."""
        return final_answer(self.facts.ground_truth)


@dataclass(frozen=True, slots=True)
class RewardTrial:
    """Scores made completions for some rows of a run."""

    tokenizer: Any
    pool: RewardPool

    def example(self, dataset: ScannedDataset, facts: RowFacts) -> Example:
        """Return a row as an example. Builds its prompt, without pixels."""
        prompt = build(dataset, facts)
        end = self.tokenizer.decode(prompt.token_ids[-_NUM_END_TOKENS:])
        blank = replace(dummy_requests(prompt)[0], response="", response_length=0)
        return Example(facts, blank, ends_in_think=end.rstrip().endswith("<think>"))

    def score(self, completions: Sequence[tuple[Example, str]]) -> list[Score]:
        """Return the score of each completion, as it follows its prompt. Raises: RewardError."""
        requests = []
        for example, text in completions:
            response = text.removeprefix("<think>") if example.ends_in_think else text
            requests.append(replace(example.blank, response=response, response_length=self.count(text)))
        return self.pool.score(requests)

    def scores_in(self, answer_format: AnswerFormat, examples: Sequence[Example]) -> list[float]:
        """Return the scores of right completions in a format."""
        return self.overall([(each, answer_format.write(each.answer)) for each in examples])

    def overall(self, completions: Sequence[tuple[Example, str]]) -> list[float]:
        """Return the overall score of each completion."""
        return [score.overall for score in self.score(completions)]

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True, slots=True)
class Judgement:
    """What made completions say about a reward function.

    best: the format with the highest scores. right, wrong: the mean scores of a right completion in
    it, and of a wrong one.
    """

    trial: RewardTrial
    best: AnswerFormat
    right: float
    wrong: float

    @property
    def can_judge(self) -> bool:
        """Whether a right completion scores more than a wrong one."""
        return self.right > self.wrong + _EPSILON


def check_reward(
    result: Result, config: Config, builder: PromptBuilder, datasets: Sequence[ScannedDataset], stack: ExitStack
) -> Judgement | str:
    """Call the reward function on right, wrong and empty completions of a few rows.

    stack: ends the reward workers. Returns: what they say about it, or why they say nothing.
    """
    if not config.worker.reward.reward_function:
        raise Skipped("no reward function is set")
    # Each failure is a problem of the report; a run stops at too many.
    pool = open_rewards(with_options(config, {"worker.reward.max_failed_fraction": 1.0}))
    stack.callback(pool.close)
    _check_validation_reward(result, config, datasets, stack)
    style = pool.ready()
    dataset = first_dataset(datasets)
    trial = RewardTrial(builder.processors.tokenizer, pool)
    try:
        if style.unit == "group":
            check_rewards(pool, build(dataset, dataset.usable[0]))
            result.summary = "called; scores that depend on the other completions of a prompt are not judged"
            return _SEE_REWARD
        examples = [trial.example(dataset, facts) for facts in _spread(dataset.usable, NUM_TRIED)]
        asked = asked_formats(examples[0].blank.prompt)
        if _has_failures(result, trial, examples, (asked or FORMATS)[0]):
            return _SEE_REWARD
        check_rewards(pool, build(dataset, dataset.usable[0]))
        return _judge(result, config, trial, examples, asked)
    except RewardError as error:
        result.fail("reward.fails", str(error))
        return _SEE_REWARD


def _check_validation_reward(
    result: Result, config: Config, datasets: Sequence[ScannedDataset], stack: ExitStack
) -> None:
    """Call the reward function of validation, if it has its own, on a row."""
    try:
        pool = open_validation_rewards(config)
        if pool is None:
            return
        stack.callback(pool.close)
        pool.ready()
        for dataset in [each for each in datasets if each.split == "validation" and each.usable][:1]:
            check_rewards(pool, build(dataset, dataset.usable[0]))
    except RewardError as error:
        result.fail("reward.fails", f"worker.reward.val_reward_function: {error}")


def _spread(rows: Sequence[RowFacts], number: int) -> list[RowFacts]:
    """Return this many rows, or all if there are fewer, at equal distances."""
    if len(rows) <= number:
        return list(rows)
    return [rows[index * len(rows) // number] for index in range(number)]


def _wrong_answer(example: Example, examples: Sequence[Example]) -> str:
    """Return another row's ground truth, or a number that is no ground truth."""
    others = [each.answer for each in examples if each.answer.strip() not in ("", example.answer.strip())]
    return others[0] if others else "12345.678"


def _judge(
    result: Result,
    config: Config,
    trial: RewardTrial,
    examples: Sequence[Example],
    asked: Sequence[AnswerFormat],
) -> Judgement | str:
    """Score completions in all formats, and report problems. Returns: as check_reward.

    asked: the formats that the prompt asks for. Raises: RewardError.
    """
    right = {each: trial.scores_in(each, examples) for each in FORMATS}
    means = {each: _mean(scores) for each, scores in right.items()}
    best = max(FORMATS, key=means.__getitem__)
    best_asked = max(asked, key=means.__getitem__, default=None)
    if best_asked is not None and means[best_asked] >= means[best] - _EPSILON:
        best = best_asked
    wrong_texts = [(each, best.write(_wrong_answer(each, examples))) for each in examples]
    wrong, empty = trial.overall(wrong_texts), trial.overall([(each, "") for each in examples])
    judgement = Judgement(trial, best, means[best], _mean(wrong))
    pairs = list(zip(right[best], trial.scores_in(best, examples), strict=True))
    is_random = any(abs(one - other) > _EPSILON for one, other in pairs)
    if is_random:
        differences = "; ".join(f"{one:.3g} and then {other:.3g}" for one, other in pairs)
        message = f"the same completions have other scores when they are scored again: {differences}"
        result.warn("reward.random", message, "seed what is random in it, unless the noise is meant")
    if config.worker.rollout.environment is not None and not judgement.can_judge:
        result.summary = "called; made completions have no turns, and what it gives for turns is not judged"
        return _SEE_REWARD
    rows = (
        (right[best][0], "right", best.write(examples[0].answer)),
        (wrong[0], "wrong", wrong_texts[0][1]),
        (empty[0], "empty", ""),
    )
    result.text = "\n".join(
        f"{score:>8.3g}  {name}: {sanitize(' '.join(text.split()), max_characters=90)}" for score, name, text in rows
    )
    if is_random:
        return "the scores are random, see the check 'reward'"
    _compare_scores(result, judgement, means, best_asked, wrong, empty, examples)
    _try_thoughts_twice(result, judgement, examples)
    if not judgement.can_judge:
        result.summary = "cannot be judged: no made completion scores more than a wrong one, in any known format"
        return "cannot be judged: no known format of an answer scores more than a wrong one"
    result.summary = f"right {judgement.right:.3g}, wrong {judgement.wrong:.3g}; it reads {best}"
    return judgement


def _has_failures(result: Result, trial: RewardTrial, examples: Sequence[Example], answer_format: AnswerFormat) -> bool:
    """Score a right, a wrong and an empty completion alone; report those without a score."""
    first = examples[0]
    made = {
        "a right": answer_format.write(first.answer),
        "a wrong": answer_format.write(_wrong_answer(first, examples)),
        "an empty": "",
    }
    has_failures = False
    for name, text in made.items():
        score = trial.score([(first, text)])[0]
        if score.outcome != "ok":
            has_failures = True
            message = f"the reward function has no score for {name} completion of {first.facts.name}: {score.error}"
            result.fail("reward.fails", message, "return a score for any text that a model may write", [repr(text)])
    return has_failures


def _mean(scores: Sequence[float]) -> float:
    return sum(scores) / len(scores)


def _compare_scores(
    result: Result,
    judgement: Judgement,
    means: Mapping[AnswerFormat, float],
    best_asked: AnswerFormat | None,
    wrong: Sequence[float],
    empty: Sequence[float],
    examples: Sequence[Example],
) -> None:
    """Report scores that would teach the model the wrong thing."""
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
            result.add(score > 0, "reward.constant", message, advice)
        return
    for name, others in (("a wrong", wrong), ("an empty", empty)):
        mean = _mean(others)
        if mean < judgement.right - _EPSILON or not is_text:
            continue
        is_certain = mean > judgement.right + _EPSILON or name == "an empty"
        message = f"{name} completion scores {mean:.3g}, and a right one {judgement.right:.3g} ({judgement.best})"
        advice = "correct the reward function: this is what would be learned"
        if not is_certain:
            advice = "make it tell right from wrong; if it reads a format that was not tried, nothing is wrong"
        result.add(is_certain, "reward.wrong", message, advice)
    if best_asked is not None and means[best_asked] < judgement.right - _EPSILON:
        result.warn(
            "reward.format",
            f"the prompt asks for {best_asked}, where a ground truth scores {means[best_asked]:.3g}, and the reward "
            f"function reads {judgement.best}, where it scores {judgement.right:.3g}",
            "give both the same format (data.format_prompt, worker.reward.reward_function)",
        )


def _try_thoughts_twice(result: Result, judgement: Judgement, examples: Sequence[Example]) -> None:
    """Report if completions score more with a <think> after that of the prompt."""
    if not examples[0].ends_in_think:
        return
    alone = [replace(each, ends_in_think=False) for each in examples]
    best = max(_mean(judgement.trial.scores_in(each, alone)) for each in FORMATS)
    if best > judgement.right + _EPSILON:
        result.fail(
            "reward.format",
            f"the prompt ends in <think>, so completions begin after it; a right one scores {judgement.right:.3g}, and "
            f"{best:.3g} with a <think> of its own, which the reward function wants first",
            "let the reward function take </think> without <think>, or use a chat template that does not end in it",
        )


def check_ground_truths(
    result: Result,
    config: Config,
    judgement: Judgement | str,
    datasets: Sequence[ScannedDataset],
    console: Console,
) -> None:
    """Score each ground truth against itself, as many as fit into MAX_SECONDS."""
    if isinstance(judgement, str):
        raise Skipped(judgement)
    trial = judgement.trial
    all_rows = [(dataset, row) for dataset in datasets for row in dataset.usable]
    random.Random(0).shuffle(all_rows)
    examples: list[Example] = []
    scores: list[Score] = []
    start = time.monotonic()
    with console.progress("score ground truths", len(all_rows)) as advance:
        while len(scores) < len(all_rows):
            if len(scores) >= MIN_SCORED and time.monotonic() - start > MAX_SECONDS:
                break
            part = [trial.example(*each) for each in all_rows[len(scores) : len(scores) + MIN_SCORED]]
            scores += trial.score([(each, judgement.best.write(each.answer)) for each in part])
            examples += part
            advance(len(part))
    number = len(scores)
    judged = sorted(zip(examples, scores, strict=True), key=lambda each: each[0].facts.index)
    if failed := [(example.facts, score) for example, score in judged if score.outcome != "ok"]:
        message = f"the reward function has no score for the ground truths of {share(len(failed), number)}"
        is_fatal = len(failed) > config.worker.reward.max_failed_fraction * number
        shown = [f"{row.name}: {row.ground_truth!r}: {score.error}" for row, score in failed[:MAX_EXAMPLES]]
        advice = "correct these rows, or make it return a score for them"
        result.add(is_fatal, "reward.fails", message, advice, shown)
    scored = [(example, score.overall) for example, score in judged if score.outcome == "ok"]
    highest = max((overall for _, overall in scored), default=judgement.right)
    least = highest - _TOLERANCE * (highest - judgement.wrong)
    if low := [(each.facts, overall) for each, overall in scored if overall < least and each.answer.strip()]:
        message = (
            f"{share(len(low), number)} have a ground truth that does not score {highest:.3g} against itself, written "
            f"as {judgement.best}: the model could not be right"
        )
        advice = "correct these ground truths, or what the reward function compares"
        shown = [f"{row.name}: {row.ground_truth!r} scores {overall:.3g}" for row, overall in low[:MAX_EXAMPLES]]
        result.add(len(low) >= FAIL_FRACTION * number, "reward.ground_truth", message, advice, shown)
    limit = config.data.max_response_length
    if long := [each.facts for each, _ in judged if trial.count(each.answer) > limit]:
        message = f"{share(len(long), number)} have a ground truth of more than data.max_response_length={limit} tokens"
        result.warn("answers.too_long", message, "raise data.max_response_length", names(long))
    sampled = "" if number == len(all_rows) else f" (of {len(all_rows):,}, chosen at random)"
    result.summary = f"{number:,} ground truths{sampled} score {highest:.3g} against themselves"
