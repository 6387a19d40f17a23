"""The check of prompt lengths: how many rows are lost to data.max_prompt_length, and what helps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

from trigon.config.schema import Config
from trigon.data.vision import ImageProcessor, image_processor_of
from trigon.models.load import Processors, set_pixel_limits
from trigon.models.side_files import pixel_limits
from trigon.tools.check.dataset import RowFacts, ScannedDataset, share
from trigon.tools.check.model import Model
from trigon.tools.check.result import Result

WARN_FRACTION = 0.05
"""The least fraction of rows lost to their length that is a warning."""

FAIL_FRACTION = 0.20
"""The least fraction of rows lost to their length that is a failure."""

_NUM_BARS = 8
_BAR_CHARACTERS = 40


def check_lengths(result: Result, model: Model, datasets: Sequence[ScannedDataset]) -> None:
    """Show the lengths of prompts, text and images apart, and report the rows that are too long."""
    config = model.config
    limit = config.data.max_prompt_length
    rows: list[RowFacts] = []
    for dataset in datasets:
        counted = [row for row in dataset.rows if row.num_tokens]
        rows += counted
        lost = [row for row in counted if row.problem is not None]
        fraction = len(lost) / max(1, len(dataset.rows))
        refuses = bool(lost) and not config.data.filter_overlong_prompts
        if fraction < WARN_FRACTION and not refuses:
            continue
        media = sum(row.media_tokens for row in lost) / sum(row.num_tokens for row in lost)
        message = (
            f"{dataset.spec}: {share(len(lost), len(dataset.rows))} have more than data.max_prompt_length={limit} "
            f"tokens{', and data.filter_overlong_prompts is false' * refuses}; of their tokens, {media:.0%} are for "
            "images or videos"
        )
        examples = [str(row.problem) for row in lost[:2]]
        is_fatal = refuses or fraction >= FAIL_FRACTION
        result.add(is_fatal, "lengths.overlong", message, advise(config, model.processors, counted), examples)
    if not rows:
        result.summary = "no prompt could be counted"
        return
    num_lost = sum(row.problem is not None for row in rows)
    median = sorted(row.num_tokens for row in rows)[len(rows) // 2]
    most = max(row.num_tokens for row in rows)
    result.summary = (
        f"median {median}, largest {most} of data.max_prompt_length={limit} tokens; "
        f"{share(num_lost, len(rows)) if num_lost else 'none is'} too long"
    )
    result.text = histogram(rows, limit)


def advise(config: Config, processors: Processors, rows: Sequence[RowFacts]) -> str:
    """Return which option to change, and to what, so that the prompts of all rows fit.

    max_pixels is named first if images have most of the tokens of the prompts that are too long.
    """
    longest = max(row.num_tokens for row in rows)
    by_length = f"raise data.max_prompt_length to {longest}, which needs more memory"
    lost = [row for row in rows if row.problem is not None]
    pixels = find_max_pixels(config, processors, lost)
    if pixels is None:
        return by_length
    by_pixels = f"lower data.max_pixels to {pixels}, which shows less detail"
    if config.data.min_pixels is not None and config.data.min_pixels > pixels:
        by_pixels = f"lower data.max_pixels and data.min_pixels to {pixels}, which shows less detail"
    media = sum(row.media_tokens for row in lost)
    first, second = (
        (by_pixels, by_length) if media > sum(row.num_tokens for row in lost) / 2 else (by_length, by_pixels)
    )
    return f"{first}; or {second}. With either, all of them fit"


def find_max_pixels(config: Config, processors: Processors, lost: Sequence[RowFacts]) -> int | None:
    """Return the largest data.max_pixels with which the rows that are too long fit.

    None if no value helps: the text alone is too long, or the model has no such limit.
    """
    if not processors.family.takes_patches:
        return None
    texts = {row.name: row.num_tokens - row.media_tokens for row in lost}
    limit = config.data.max_prompt_length
    if not all(row.image_sizes and texts[row.name] < limit for row in lost):
        return None
    side = processors.family.patch_size(processors.hf_config) * processors.family.spatial_merge(processors.hf_config)

    def fits(num_tokens: int) -> bool:
        count = token_counter(processors, max_pixels=num_tokens * side**2)
        return all(texts[row.name] + sum(map(count, row.image_sizes)) <= limit for row in lost)

    least, most = 1, limit  # in tokens of an image; an image of more could not fit
    if not fits(least):
        return None
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least * side**2


def token_counter(processors: Processors, *, max_pixels: int) -> Callable[[tuple[int, int]], int]:
    """Return a function that counts the tokens of an image of a size, with another max_pixels."""
    assert processors.image_processor is not None
    changed = copy.deepcopy(processors.image_processor)
    limits = pixel_limits(processors)
    assert limits is not None
    smallest = max_pixels if limits[0] >= max_pixels else None
    set_pixel_limits(changed, processors.family, min_pixels=smallest, max_pixels=max_pixels)
    processor = image_processor_of(replace(processors, image_processor=changed))
    assert isinstance(processor, ImageProcessor)
    counted: dict[tuple[int, int], int] = {}

    def count(size: tuple[int, int]) -> int:
        if size not in counted:
            counted[size] = processor.image_tokens(*size)
        return counted[size]

    return count


def histogram(rows: Sequence[RowFacts], limit: int) -> str:
    """Return the lengths of prompts as bars: = for text tokens, # for those of images and videos.

    A bar's length is the number of its rows, its parts are the shares of their tokens.
    """
    lines = [f"{'tokens of a prompt':>20}  {'text':>8}  {'images':>8}  {'together':>8}"]
    text = sorted(row.num_tokens - row.media_tokens for row in rows)
    media, total = sorted(row.media_tokens for row in rows), sorted(row.num_tokens for row in rows)
    for name, fraction in (("smallest", 0.0), ("median", 0.5), ("9 of 10 below", 0.9), ("largest", 1.0)):
        values = [numbers[min(len(rows) - 1, int(fraction * len(rows)))] for numbers in (text, media, total)]
        lines.append(f"{name:>20}  " + "  ".join(f"{value:>8,}" for value in values))
    width = _bucket_width(total[-1])
    buckets: dict[int, list[RowFacts]] = {}
    for row in rows:
        buckets.setdefault(row.num_tokens // width, []).append(row)
    most = max(map(len, buckets.values()))
    for number in range(min(buckets), max(buckets) + 1):
        inside = buckets.get(number, [])
        length = -(-_BAR_CHARACTERS * len(inside) // most)
        tokens = sum(row.num_tokens for row in inside)
        marks = round(length * sum(row.media_tokens for row in inside) / max(1, tokens))
        start, end = number * width, (number + 1) * width - 1
        above = "  > limit" if start > limit else ""
        lines.append(f"{start:>9,} to {end:>7,}  {'=' * (length - marks)}{'#' * marks} {len(inside):,}{above}")
    lines.append(f"= text, # images and videos; the limit is data.max_prompt_length={limit}")
    return "\n".join(lines)


def _bucket_width(largest: int) -> int:
    """Return a width of 1, 2 or 5 times a power of ten, so that there are few buckets."""
    width = 1
    while True:
        for factor in (1, 2, 5):
            if largest // (width * factor) < _NUM_BARS:
                return width * factor
        width *= 10
