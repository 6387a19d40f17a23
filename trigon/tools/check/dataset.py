"""Reads all rows of a run as the run itself does, and checks what they contain.

Images are decoded once; of each row only facts are kept, and a hash of its text and pixels.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from PIL import Image

from trigon.assemble.options import count_data_threads
from trigon.config.plan import Plan, find_long_warmups, make_plan
from trigon.config.schema import Config
from trigon.data.dataset import PromptSet, Scan, scan, select_prompts
from trigon.data.prompts import PromptBuilder
from trigon.data.rows import Reason, UnusableRow, column_value
from trigon.data.stream import mix
from trigon.errors import DataError
from trigon.models.load import Processors
from trigon.report.console import Console
from trigon.system.image_formats import image_suffixes
from trigon.system.terminal import sanitize, shorten
from trigon.tools.check.run import Result, Skipped
from trigon.types import Prompt

Split = Literal["training", "validation"]

MAX_EXAMPLES = 3
"""Rows that are named for each kind of problem."""

CONSTANT_FRACTION = 0.9
"""The most frequent ground truth is a problem from this fraction of the rows on."""

_SEARCHED_ROWS = 20

ADVICE: dict[Reason, str] = {
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
"""What to do about the rows of each reason; see check_lengths for those that are too long."""


@dataclass(slots=True, eq=False)
class RowFacts:
    """What the checks need of a row.

    num_tokens: tokens of its prompt, 0 if it is unusable for another reason than its length.
    media_tokens: tokens for its images or videos among them. image_sizes: (width, height) of
    each decoded image. num_blank: images of one colour. content: a hash of text and pixels; None if
    the row is unusable.
    """

    name: str
    index: int
    ground_truth: Any
    num_tokens: int = 0
    media_tokens: int = 0
    image_sizes: tuple[tuple[int, int], ...] = ()
    num_blank: int = 0
    content: bytes | None = None
    problem: UnusableRow | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ScannedDataset:
    """A dataset with all of its rows."""

    split: Split
    spec: str
    scanned: Scan
    rows: Sequence[RowFacts]

    @property
    def usable(self) -> list[RowFacts]:
        """The rows that the run uses."""
        return [row for row in self.rows if row.problem is None]


def check_rows(result: Result, config: Config, builder: PromptBuilder, console: Console) -> list[ScannedDataset]:
    """Scan the datasets of training and validation, and report the rows that cannot be used.

    Returns: the datasets that could be opened. Rows that are too long are reported by model.py.
    """
    files: list[tuple[Split, str]] = [("validation", each) for each in config.data.val_files]
    if not config.trainer.val_only:
        files = [*(("training", each) for each in config.data.train_files), *files]
    if not files:
        raise Skipped("no dataset is set")
    datasets: list[ScannedDataset] = []
    for split, spec in files:
        try:
            scanned, rows = _scan(config, builder, spec, console)
        except DataError as error:
            result.fail("dataset.unreadable", str(error))
            continue
        dataset = ScannedDataset(split, spec, scanned, rows)
        datasets.append(dataset)
        _find_unusable_rows(result, config, dataset)
        _find_unnamed_images(result, dataset)
        if blank := [row for row in dataset.usable if row.num_blank]:
            message = f"{spec}: {share(len(blank), len(rows))} have an image of a single colour"
            advice = "look at these images: they may have been written wrongly"
            result.warn("rows.blank_image", message, advice, names(blank))
    num_rows = sum(len(dataset.rows) for dataset in datasets)
    num_images = sum(len(row.image_sizes) for dataset in datasets for row in dataset.rows)
    result.summary = f"{num_rows:,} rows in {len(files)} dataset{'s' * (len(files) > 1)}, {num_images:,} images decoded"
    return datasets


def _scan(config: Config, builder: PromptBuilder, spec: str, console: Console) -> tuple[Scan, list[RowFacts]]:
    found: dict[str, RowFacts] = {}

    def check_row(builder: PromptBuilder, row: Mapping[str, Any], name: str) -> int:
        found[name] = facts = RowFacts(name, int(name.rpartition(":")[2]), column_value(row, builder.data.answer_key))
        return _inspect_row(builder, row, facts)

    with console.progress(f"scan {spec}", None) as advance:
        scanned = scan(
            spec,
            builder,
            num_workers=count_data_threads(config),
            on_progress=lambda num_more, num_rows: advance(num_more),
            check_row=check_row,
        )
    for index, row in enumerate(scanned.rows):
        name = f"{scanned.source.name}:{index}"
        if name not in found:  # it could not be read
            found[name] = RowFacts(name, index, None, problem=row.problem)
    return scanned, sorted(found.values(), key=lambda row: row.index)


def _inspect_row(builder: PromptBuilder, row: Mapping[str, Any], facts: RowFacts) -> int:
    """Return the number of tokens of a row's prompt, and fill in its facts.

    Raises: UnusableRow.
    """
    digest = hashlib.blake2b(digest_size=16)

    def on_image(image: Image.Image) -> None:
        facts.image_sizes += (image.size,)
        facts.num_blank += all(lowest == highest for lowest, highest in image.getextrema())  # type: ignore[misc]
        digest.update(b"%d x %d" % image.size)
        digest.update(image.tobytes())

    try:
        tokens = builder.inspect(row, facts.name, on_image)
    except UnusableRow as problem:
        facts.problem = problem
        facts.num_tokens, facts.media_tokens = problem.num_tokens, problem.media_tokens
        raise
    facts.num_tokens, facts.media_tokens = len(tokens.token_ids), sum(tokens.media_tokens)
    # Videos are compared by the names of their files, not by pixels.
    for part in (tokens.text, repr(column_value(row, builder.data.video_key))):
        digest.update(part.encode("utf-8", "backslashreplace"))
    facts.content = digest.digest()
    return facts.num_tokens


def _find_unusable_rows(result: Result, config: Config, dataset: ScannedDataset) -> None:
    """Report each reason by which rows are skipped, but for their length."""
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
        examples = [str(row.problem) for row in rows[:MAX_EXAMPLES]]
        result.add(is_fatal, f"rows.{reason}", message, ADVICE[reason], examples)


def _find_unnamed_images(result: Result, dataset: ScannedDataset) -> None:
    """Report a column that looks like images and is not read, if no row has an image."""
    source, builder = dataset.scanned.source, dataset.scanned.builder
    if builder.image_processor is None or any(row.image_sizes for row in dataset.rows):
        return
    if any(row.problem is not None and "image" in row.problem.reason for row in dataset.rows):
        return
    first = [source.rows[row.index] for row in dataset.usable[:_SEARCHED_ROWS]]
    for column in source.columns:
        if column == builder.data.image_key or not all(_names_image(column_value(row, column)) for row in first):
            continue
        message = (
            f"{dataset.spec}: column {column!r} has images, and data.image_key is {builder.data.image_key!r}: the "
            "model would see none of them"
        )
        advice = f"set data.image_key={column}, and write <image> into the texts; or remove the column"
        result.warn("dataset.unused_images", message, advice)


def _names_image(value: object) -> bool:
    if isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, str) and value.lower().endswith(image_suffixes())


def share(number: int, total: int) -> str:
    """Return "3 of 40 rows (7.5 %)"."""
    percent = 100 * number / total
    return f"{number:,} of {total:,} rows ({f'{percent:.0f}' if percent >= 10 else f'{percent:.2g}'} %)"


def names(rows: Sequence[RowFacts]) -> list[str]:
    """Return the names of the first few rows."""
    shown = [row.name for row in rows[:MAX_EXAMPLES]]
    return [*shown, f"and {len(rows) - MAX_EXAMPLES:,} more"] if len(rows) > MAX_EXAMPLES else shown


def first_dataset(datasets: Sequence[ScannedDataset]) -> ScannedDataset:
    """Return the first dataset with usable rows. Raises: Skipped if there is none."""
    for dataset in datasets:
        if dataset.usable:
            return dataset
    raise Skipped("no row can be used, see the check 'rows'")


def build(dataset: ScannedDataset, facts: RowFacts) -> Prompt:
    """Return the prompt of a usable row, without pixels."""
    return dataset.scanned.builder.build(dataset.scanned.source.rows[facts.index], facts.name)


def show_tokens(processors: Processors, token_ids: Sequence[int]) -> str:
    """Return tokens as text, special ones included; repeated placeholders are counted.

    Example: "<|vision_start|><|image_pad|> x 64<|vision_end|>What is it?".
    """
    decode = processors.tokenizer.decode
    pieces: list[str] = []
    pending: list[int] = []
    for token_id, repeated in groupby(token_ids):
        count = len(list(repeated))
        if token_id in processors.banned_token_ids and count > 1:
            pieces += [decode(pending), f"{decode([token_id])} x {count}"]
            pending = []
        else:
            pending += [token_id] * count
    return sanitize("".join([*pieces, decode(pending)]), max_characters=20_000)


def check_duplicates(result: Result, datasets: Sequence[ScannedDataset]) -> None:
    """Report training rows with the same text and the same images."""
    rows = _rows_of(datasets, "training")
    by_content: dict[bytes | None, list[RowFacts]] = {}
    for row in rows:
        by_content.setdefault(row.content, []).append(row)
    repeated = [group for group in by_content.values() if len(group) > 1]
    conflicting = [group for group in repeated if len({repr(row.ground_truth) for row in group}) > 1]
    if same := [group for group in repeated if group not in conflicting]:
        result.warn(
            "duplicates.prompt",
            f"{share(sum(len(group) - 1 for group in same), len(rows))} repeat an earlier training row: the same text "
            "and the same pixels",
            "remove them, if they are not meant to weigh more; data.train_weights weighs datasets",
            _groups(same),
        )
    if conflicting:
        result.warn(
            "duplicates.conflict",
            f"{share(sum(map(len, conflicting)), len(rows))} have the text and the images of another, and another "
            "ground truth",
            "correct the ground truths, or remove all but one of the rows",
            _groups(conflicting),
        )
    result.summary = f"{len(rows):,} different training prompts"


def _groups(groups: Sequence[Sequence[RowFacts]]) -> list[str]:
    return [" = ".join(row.name for row in group[:4]) for group in groups[:MAX_EXAMPLES]]


def _rows_of(datasets: Sequence[ScannedDataset], split: Split) -> list[RowFacts]:
    return [row for dataset in datasets if dataset.split == split for row in dataset.usable]


def check_overlap(result: Result, datasets: Sequence[ScannedDataset]) -> None:
    """Report validation rows that are training rows too, by their text and pixels."""
    training = {row.content: row for row in _rows_of(datasets, "training")}
    validation = _rows_of(datasets, "validation")
    common = [row for row in validation if row.content in training]
    result.summary = f"none of {len(validation):,} validation rows is a training row"
    if not validation or not training:
        result.summary = "there are not both training and validation rows"
    if common:
        message = f"{share(len(common), len(validation))} of validation are training rows too: the same text and pixels"
        advice = "remove them from one of the datasets: validation would measure what was learned by heart"
        examples = [f"{row.name} = {training[row.content].name}" for row in common[:MAX_EXAMPLES]]
        result.warn("overlap.validation", message, advice, examples)


def check_answers(result: Result, config: Config, datasets: Sequence[ScannedDataset]) -> None:
    """Show the distribution of the ground truths, and report those that are empty.

    With an environment, which may know what is right, nothing is a problem.
    """
    has_environment = config.worker.rollout.environment is not None
    rows = [row for dataset in datasets for row in dataset.usable]
    empty = [row for row in rows if isinstance(row.ground_truth, str) and not row.ground_truth.strip()]
    if empty and not has_environment:
        message = f"{share(len(empty), len(rows))} have an empty text for a ground truth"
        result.warn("answers.empty", message, "write them, or remove the rows", names(empty))
    training = _rows_of(datasets, "training")
    counts = Counter(_shown(row.ground_truth) for row in training)
    if not counts:
        result.summary = "no training row"
        return
    answer, number = counts.most_common(1)[0]
    if number >= CONSTANT_FRACTION * len(training) and len(training) > 1 and not has_environment:
        message = f"{share(number, len(training))} have the ground truth {answer}, which a model can learn to repeat"
        result.warn("answers.constant", message, "balance the dataset, or check data.answer_key")
    most = ", ".join(f"{answer} {number / len(training):.0%}" for answer, number in counts.most_common(3))
    result.summary = (
        f"{len(counts):,} different ground truths in {len(training):,} training rows; most frequent: {most}"
    )


def _shown(ground_truth: object) -> str:
    text = sanitize(repr(ground_truth), max_characters=200)
    return shorten(text, 40)


def check_steps(
    result: Result, config: Config, datasets: Sequence[ScannedDataset], *, knows_lengths: bool, last_step: int
) -> Plan:
    """Make the plan of the run over the usable training rows.

    knows_lengths: the rows were read with the tokenizer of the run. last_step: the step after which
    the run resumes; 0: it starts from the beginning.
    """
    if config.trainer.val_only:
        raise Skipped("trainer.val_only takes no steps")
    prompts = [_select(dataset) for dataset in datasets if dataset.split == "training"]
    if len(prompts) < max(1, len(config.data.train_files)):
        raise Skipped("see the check 'rows'")
    num_prompts = mix(prompts, config.data.train_weights).prompts_per_epoch
    plan = make_plan(config, num_train_prompts=num_prompts)
    for text in find_long_warmups(config, plan):
        result.warn("steps.warmup", text)
    if last_step >= plan.total_steps:
        result.warn(
            "steps.complete",
            f"the run resumes after step {last_step}, and has {plan.total_steps:,} steps: it would make none",
            "raise trainer.max_steps or trainer.total_epochs to continue it, or set another trainer.experiment_name",
        )
    unknown = "" if knows_lengths else ", if none of the prompts is too long"
    result.summary = (
        f"{plan.num_train_prompts:,} prompts, {plan.total_steps:,} steps of {plan.prompts_per_step} prompts and "
        f"{plan.sequences_per_step} completions, {plan.total_updates:,} updates{unknown}"
    )
    return plan


def _select(dataset: ScannedDataset) -> PromptSet:
    """Return the usable prompts of a dataset. Raises: Skipped if the run would not use it."""
    try:
        return select_prompts(dataset.scanned)
    except DataError as error:
        raise Skipped("see the checks 'rows' and 'lengths'") from error
