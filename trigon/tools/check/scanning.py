"""Scans all datasets of a run as the run itself does.

What the checks need of each row is kept; images are decoded once, and only their hashes are kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from PIL import Image

from trigon.assemble.options import count_data_threads
from trigon.config.plan import Plan, make_plan
from trigon.config.schema import Config
from trigon.data.dataset import PromptSet, Scan, scan, select_prompts
from trigon.data.prompts import PromptBuilder
from trigon.data.rows import UnusableRow, column_value
from trigon.data.stream import mix
from trigon.errors import DataError
from trigon.tools.check.result import CheckSkipped
from trigon.tools.check.subject import Progress

Split = Literal["training", "validation"]


@dataclass(slots=True, eq=False)
class RowFacts:
    """What the checks need of a row.

    num_tokens: of its prompt, 0 if unusable for another reason than its length. media_tokens: of
    these, for its images or videos. image_sizes: (width, height) of each decoded image.
    num_blank: images of one colour. content: a hash of text and pixels; None if it is unusable.
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
    """A dataset with all of its rows. error: why it cannot be used at all; then it has no rows."""

    split: Split
    spec: str
    scanned: Scan | None
    rows: Sequence[RowFacts]
    error: DataError | None

    @property
    def usable(self) -> list[RowFacts]:
        """The rows that the run uses."""
        return [row for row in self.rows if row.problem is None]


def scan_datasets(config: Config, builder: PromptBuilder, progress: Progress) -> list[ScannedDataset]:
    """Scan the datasets of training, then those of validation."""
    specs: list[tuple[Split, str]] = [("validation", spec) for spec in config.data.val_files]
    if not config.trainer.val_only:
        specs = [*(("training", spec) for spec in config.data.train_files), *specs]
    if not specs:
        raise CheckSkipped("no dataset is set")
    return [_scan(config, builder, split, spec, progress) for split, spec in specs]


def _scan(config: Config, builder: PromptBuilder, split: Split, spec: str, progress: Progress) -> ScannedDataset:
    found: dict[str, RowFacts] = {}

    def check_row(builder: PromptBuilder, row: Mapping[str, Any], name: str) -> int:
        found[name] = facts = RowFacts(name, int(name.rpartition(":")[2]), column_value(row, builder.data.answer_key))
        return inspect_row(builder, row, facts)

    with progress(f"scan {spec}", None) as advance:
        done = 0

        def on_progress(rows_done: int, num_rows: int) -> None:
            nonlocal done
            advance(rows_done - done)
            done = rows_done

        threads = count_data_threads(config)
        try:
            scanned = scan(spec, builder, num_workers=threads, on_progress=on_progress, check_row=check_row)
        except DataError as error:
            return ScannedDataset(split, spec, None, (), error)
    for index, row in enumerate(scanned.rows):
        name = f"{scanned.source.name}:{index}"
        if name not in found:  # it could not be read
            found[name] = RowFacts(name, index, None, problem=row.problem)
    return ScannedDataset(split, spec, scanned, sorted(found.values(), key=lambda row: row.index), None)


def inspect_row(builder: PromptBuilder, row: Mapping[str, Any], facts: RowFacts) -> int:
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
    digest.update(tokens.text.encode("utf-8", "backslashreplace"))
    digest.update(repr(_videos(row, builder)).encode("utf-8", "backslashreplace"))
    facts.content = digest.digest()
    return facts.num_tokens


def _videos(row: Mapping[str, Any], builder: PromptBuilder) -> Any:
    """Return the videos of a row as it has them: files are compared by name, not by pixels."""
    return column_value(row, builder.data.video_key)


def make_plan_of(config: Config, datasets: Sequence[ScannedDataset]) -> Plan:
    """Return the plan of the run over the usable training rows.

    Raises: ConfigError as make_plan; CheckSkipped if a dataset cannot be used.
    """
    training = [each for each in datasets if each.split == "training"]
    if config.trainer.val_only:
        return make_plan(config, num_train_prompts=0)
    prompts = [select(each) for each in training]
    if not prompts:
        raise CheckSkipped("there is no training dataset")
    return make_plan(config, num_train_prompts=mix(prompts, config.data.train_weights).prompts_per_epoch)


def select(dataset: ScannedDataset) -> PromptSet:
    """Return the usable prompts of a dataset. Raises: CheckSkipped if the run would not use it."""
    if dataset.scanned is None:
        raise CheckSkipped("see the check 'rows'")
    try:
        return select_prompts(dataset.scanned)
    except DataError as error:
        raise CheckSkipped("see the checks 'rows' and 'lengths'") from error
