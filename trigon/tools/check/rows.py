"""The checks of the rows: what makes them unusable, their lengths, and one prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from trigon.config.schema import Config
from trigon.data.prompts import PromptBuilder
from trigon.data.rows import Reason, column_value
from trigon.system.terminal import sanitize
from trigon.tools.check.result import Findings, Problem
from trigon.tools.check.scanning import RowFacts, ScannedDataset
from trigon.tools.check.subject import Subject

MAX_EXAMPLES = 3
"""Rows that are named for each kind of problem."""

_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_ROWS_LOOKED_AT = 20

_ADVICE: dict[Reason, str] = {
    "encoding": "write the texts of these rows as UTF-8, or remove the rows",
    "prompt": "write a question into each row, as text or as chat messages of which the last is the user's",
    "answer": "write a ground truth into each row, or remove the rows",
    "markers": "write <image> once for each image, where it belongs in the text",
    "media_tokens": "write <image> and <video> instead",
    "image_missing": "correct the paths, or set data.image_dir to the folder that they start from",
    "image_outside": "download or move the images into one folder, and set data.image_dir to it",
    "image_unreadable": "write these files again, or remove the rows",
    "image_pixels": "shrink the images, or raise data.max_image_pixels",
    "image_shape": "crop the images, or remove the rows",
    "image_count": "raise worker.rollout.limit_images, or remove images",
    "video_missing": "correct the paths, or set data.image_dir to the folder that they start from",
    "video_outside": "download or move the videos into one folder, and set data.image_dir to it",
    "video_unreadable": "write these files again, or remove the rows",
    "video_pixels": "shrink the videos, or raise data.max_image_pixels",
    "video_shape": "crop the videos, or remove the rows",
    "mixed_media": "keep the images or the videos of a row",
    "row_size": "drop the columns that the reward function does not need",
    "vocabulary": "call resize_token_embeddings on the model, or remove these tokens from the texts",
}


def check_rows(subject: Subject) -> Findings:
    """Return which rows cannot be used, and why; overlong ones are in lengths.py."""
    config = subject.given
    datasets = subject.datasets.get()
    problems: list[Problem] = []
    for dataset in datasets:
        if dataset.error is not None:
            problems.append(Problem("dataset.unreadable", True, str(dataset.error)))
            continue
        problems += find_unusable_rows(config, dataset)
        problems += find_unnamed_images(dataset)
        problems += find_blank_images(dataset)
    rows = [row for dataset in datasets for row in dataset.rows]
    num_images = sum(len(row.image_sizes) for row in rows)
    summary = f"{len(rows):,} rows in {len(datasets)} dataset{'s' * (len(datasets) > 1)}, {num_images:,} images decoded"
    return Findings(summary, tuple(problems))


def find_unusable_rows(config: Config, dataset: ScannedDataset) -> Iterator[Problem]:
    """Yield a problem for each reason by which rows are skipped, but for their length."""
    by_reason: dict[Reason, list[RowFacts]] = {}
    for row in dataset.rows:
        if row.problem is not None and row.problem.reason != "overlong":
            by_reason.setdefault(row.problem.reason, []).append(row)
    num_bad, num_rows = sum(map(len, by_reason.values())), len(dataset.rows)
    allowed = config.data.max_bad_row_fraction
    is_fatal = num_bad > allowed * num_rows or not dataset.usable
    limit = ""
    if is_fatal:
        together = f"{num_bad} for all reasons, and " if len(by_reason) > 1 else ""
        limit = f"; {together}data.max_bad_row_fraction={allowed:g} allows {int(allowed * num_rows)}"
    for reason, rows in by_reason.items():
        message = f"{dataset.spec}: {share(len(rows), num_rows)} cannot be used ({reason}){limit}"
        limit = ""  # said once
        examples = tuple(str(row.problem) for row in rows[:MAX_EXAMPLES])
        yield Problem(f"rows.{reason}", is_fatal, message, _ADVICE[reason], examples)


def find_unnamed_images(dataset: ScannedDataset) -> Iterator[Problem]:
    """Yield a problem if no row has an image, and a column that is not read looks like images."""
    assert dataset.scanned is not None
    source, builder = dataset.scanned.source, dataset.scanned.builder
    if builder.image_processor is None or any(row.image_sizes for row in dataset.rows):
        return
    if any(row.problem is not None and "image" in row.problem.reason for row in dataset.rows):
        return
    first = [source.rows[row.index] for row in dataset.usable[:_ROWS_LOOKED_AT]]
    for column in source.columns:
        if column == builder.data.image_key or not all(_names_image(column_value(row, column)) for row in first):
            continue
        message = (
            f"{dataset.spec}: column {column!r} has images, and data.image_key is {builder.data.image_key!r}: the "
            "model would see none of them"
        )
        advice = f"set data.image_key={column}, and write <image> into the texts; or remove the column"
        yield Problem("dataset.unused_images", False, message, advice)


def _names_image(value: object) -> bool:
    if isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, str) and value.lower().endswith(_IMAGE_SUFFIXES)


def find_blank_images(dataset: ScannedDataset) -> Iterator[Problem]:
    """Yield a problem if usable rows have images of a single colour."""
    blank = [row for row in dataset.usable if row.num_blank]
    if blank:
        message = f"{dataset.spec}: {share(len(blank), len(dataset.rows))} have an image of a single colour"
        advice = "look at these images: they may have been written wrongly"
        yield Problem("rows.blank_image", False, message, advice, names(blank))


def share(number: int, total: int) -> str:
    """Return "3 of 40 rows (7.5 %)"."""
    percent = 100 * number / total
    return f"{number:,} of {total:,} rows ({f'{percent:.0f}' if percent >= 10 else f'{percent:.2g}'} %)"


def names(rows: Sequence[RowFacts]) -> tuple[str, ...]:
    """Return the names of the first few rows."""
    shown = [row.name for row in rows[:MAX_EXAMPLES]]
    return (*shown, f"and {len(rows) - MAX_EXAMPLES:,} more") if len(rows) > MAX_EXAMPLES else tuple(shown)


def check_prompt(subject: Subject) -> Findings:
    """Return the first training prompt exactly as the model sees it, with its special tokens."""
    processors = subject.processors.require()
    for dataset in subject.datasets.require():
        if dataset.scanned is not None and dataset.usable:
            break
    else:
        return Findings("no row can be used")
    facts = dataset.usable[0]
    builder = dataset.scanned.builder
    prompt = builder.inspect(dataset.scanned.source.rows[facts.index], facts.name)
    sizes = ", ".join(f"{width} x {height} pixels" for width, height in facts.image_sizes)
    images = f", {facts.media_tokens} of them for {sizes}" if facts.image_sizes else ""
    text = show_prompt(processors.tokenizer, prompt.token_ids, collapsed=processors.banned_token_ids)
    return Findings(f"{facts.name} has {facts.num_tokens} tokens{images}", text=text)


def show_prompt(tokenizer: object, token_ids: Sequence[int], *, collapsed: Sequence[int]) -> str:
    """Return tokens as text, special ones included; repetitions of those in collapsed are counted.

    Example: "<|vision_start|><|image_pad|> x 64<|vision_end|>What is it?".
    """
    pieces: list[str] = []
    pending: list[int] = []
    decode = tokenizer.decode  # type: ignore[attr-defined]
    position = 0
    while position < len(token_ids):
        token_id, end = token_ids[position], position + 1
        while token_id in collapsed and end < len(token_ids) and token_ids[end] == token_id:
            end += 1
        if end - position > 1:
            pieces += [decode(pending), f"{decode([token_id])} x {end - position}"]
            pending = []
        else:
            pending.append(token_id)
        position = end
    return sanitize("".join([*pieces, decode(pending)]), max_characters=20_000)


def check_duplicates(subject: Subject) -> Findings:
    """Return which training rows have the same text and the same images."""
    rows = [row for each in subject.datasets.require() if each.split == "training" for row in each.usable]
    by_content: dict[bytes | None, list[RowFacts]] = {}
    for row in rows:
        by_content.setdefault(row.content, []).append(row)
    repeated = [group for group in by_content.values() if len(group) > 1]
    conflicting = [group for group in repeated if len({repr(row.ground_truth) for row in group}) > 1]
    problems = []
    if same := [group for group in repeated if group not in conflicting]:
        message = (
            f"{share(sum(len(group) - 1 for group in same), len(rows))} repeat an earlier training row: the same text "
            "and the same pixels"
        )
        advice = "remove them, if they are not meant to weigh more; data.train_weights weighs datasets"
        problems.append(Problem("duplicates.prompt", False, message, advice, _groups(same)))
    if conflicting:
        number = sum(map(len, conflicting))
        message = f"{share(number, len(rows))} have the text and the images of another, and another ground truth"
        advice = "correct the ground truths, or remove all but one of the rows"
        problems.append(Problem("duplicates.conflict", False, message, advice, _groups(conflicting)))
    return Findings(f"{len(rows):,} different training prompts", tuple(problems))


def _groups(groups: Sequence[Sequence[RowFacts]]) -> tuple[str, ...]:
    return tuple(" = ".join(row.name for row in group[:4]) for group in groups[:MAX_EXAMPLES])


def check_overlap(subject: Subject) -> Findings:
    """Return which validation rows are training rows too, by their text and pixels."""
    datasets = subject.datasets.require()
    training = {row.content: row for each in datasets if each.split == "training" for row in each.usable}
    validation = [row for each in datasets if each.split == "validation" for row in each.usable]
    if not validation or not training:
        return Findings("there are not both training and validation rows")
    common = [row for row in validation if row.content in training]
    if not common:
        return Findings(f"none of {len(validation):,} validation rows is a training row")
    message = f"{share(len(common), len(validation))} of validation are training rows too: the same text and pixels"
    examples = tuple(f"{row.name} = {training[row.content].name}" for row in common[:MAX_EXAMPLES])
    advice = "remove them from one of the datasets: validation would measure what was learned by heart"
    return Findings("", (Problem("overlap.validation", False, message, advice, examples),))


CONSTANT_FRACTION = 0.9
"""The most frequent ground truth is a problem from this fraction of the rows on."""


def check_answers(subject: Subject) -> Findings:
    """Return the distribution of the ground truths, and those that are empty.

    With an environment, which may know what is right, neither is a problem.
    """
    datasets = subject.datasets.require()
    rows = [row for dataset in datasets for row in dataset.usable]
    problems: list[Problem] = []
    if empty := [row for row in rows if isinstance(row.ground_truth, str) and not row.ground_truth.strip()]:
        message = f"{share(len(empty), len(rows))} have an empty text for a ground truth"
        problems.append(Problem("answers.empty", False, message, "write them, or remove the rows", names(empty)))
    training = [row for each in datasets if each.split == "training" for row in each.usable]
    counts = Counter(_shown(row.ground_truth) for row in training)
    if not counts:
        return Findings("no training row", tuple(problems))
    answer, number = counts.most_common(1)[0]
    if number >= CONSTANT_FRACTION * len(training) and len(training) > 1:
        message = f"{share(number, len(training))} have the ground truth {answer}, which a model can learn to repeat"
        advice = "balance the dataset, or check data.answer_key"
        problems.append(Problem("answers.constant", False, message, advice))
    most = ", ".join(f"{answer} {number / len(training):.0%}" for answer, number in counts.most_common(3))
    summary = f"{len(counts):,} different ground truths in {len(training):,} training rows; most frequent: {most}"
    return Findings(summary, () if subject.given.worker.rollout.environment is not None else tuple(problems))


def _shown(ground_truth: object) -> str:
    text = sanitize(repr(ground_truth), max_characters=200)
    return text if len(text) <= 40 else f"{text[:37]}..."


def builder_of(dataset: ScannedDataset) -> PromptBuilder:
    """Return the builder of a dataset that could be opened."""
    assert dataset.scanned is not None
    return dataset.scanned.builder
