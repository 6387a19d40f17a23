"""The lengths of prompts and completions that a plan assumes, and where each comes from.

Prompts are measured in the dataset where its files and the model's tokenizer are on this machine,
from the headers of images alone. Everything else is given, taken from an earlier run, or assumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from trigon.assemble.data import NO_SOURCES, open_builder
from trigon.assemble.episodes import load_episodes
from trigon.config.paths import (
    DATASET_SUFFIXES,
    is_python_object,
    local_path,
    path_exists,
    read_template,
    split_dataset,
)
from trigon.config.schema import Config
from trigon.data.rows import UnusableRow, require_columns
from trigon.data.sources import Source, open_source
from trigon.errors import ConfigError, TrigonError
from trigon.models.dimensions import Dimensions, dimensions_of
from trigon.models.flops import GroupLengths
from trigon.models.load import Processors, load_processors
from trigon.tools.plan.model import processor_folder

MAX_MEASURED_ROWS = 2000
"""Rows of a dataset that are measured, evenly spaced if it has more."""

MIXED_PROMPTS = 5000
"""Prompts, at least, that stand for several datasets of which an epoch draws unequal parts."""

_TEXT_TOKENS = 128
_IMAGE_PIXELS = 512 * 512

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class LengthOptions:
    """Lengths that are known without the dataset; None: not given.

    prompt_tokens: mean of all prompts, image tokens included. image_tokens: of each prompt's
    images; 0: none. response_tokens: mean of all completions, sampled tokens alone.
    num_prompts: usable training prompts. num_val_prompts: validation prompts.
    keep_rate: share of groups that online filtering keeps.
    observed_tokens: that a completion observes in an environment or with tools, in the mean, those
    of images included. observed_image_tokens: of these images; None: they have none.
    """

    prompt_tokens: float | None = None
    image_tokens: float | None = None
    response_tokens: float | None = None
    num_prompts: int | None = None
    num_val_prompts: int | None = None
    keep_rate: float | None = None
    observed_tokens: float | None = None
    observed_image_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class PromptLengths:
    """A prompt: tokens, image tokens included, and the grids of its images or videos in patches."""

    tokens: int
    grids: tuple[Grid, ...] = ()


@dataclass(frozen=True, slots=True)
class Lengths:
    """What a plan knows or assumes of the data.

    prompts: measured ones, each as often as its share of an epoch asks, or one that stands for
    all. num_prompts: usable training prompts; None:
    unknown. num_val_prompts: likewise, for validation.
    response_tokens: that are sampled of a completion, in the mean. longest_response: of a step.
    sources: (what, where it comes from), for people.
    observed_tokens: of a completion, in the mean. observed_grids: of its images, in patches.
    """

    prompts: tuple[PromptLengths, ...]
    num_prompts: int | None
    num_val_prompts: int | None
    response_tokens: float
    longest_response: int
    sources: tuple[tuple[str, str], ...]
    observed_tokens: float = 0.0
    observed_grids: tuple[Grid, ...] = ()

    @property
    def completion_tokens(self) -> float:
        """The mean tokens of a completion, sampled and observed."""
        return self.response_tokens + self.observed_tokens

    @property
    def mean_prompt(self) -> float:
        """The mean tokens of a prompt."""
        return sum(prompt.tokens for prompt in self.prompts) / len(self.prompts)

    @property
    def mean_image_patches(self) -> float:
        """The mean patches of the images and videos of a prompt."""
        patches = sum(time * rows * columns for prompt in self.prompts for time, rows, columns in prompt.grids)
        return patches / len(self.prompts)

    def groups(self, number: int, completions: int) -> list[GroupLengths]:
        """Return so many groups, which go through the prompts in turn."""
        response, observed = max(1, round(self.response_tokens)), round(self.observed_tokens)
        chosen = [self.prompts[index % len(self.prompts)] for index in range(number)]
        return [
            GroupLengths(
                prompt.tokens,
                (response + observed,) * completions,
                prompt.grids,
                observed * completions,
                self.observed_grids * completions,
            )
            for prompt in chosen
        ]


def find_lengths(
    config: Config,
    hf_config: Any,
    options: LengthOptions,
    *,
    observed: LengthOptions | None = None,
    download: bool = False,
    opened: Mapping[str, Source] = NO_SOURCES,
) -> Lengths:
    """Return the lengths of a run's prompts and completions.

    Args:
        hf_config: the model's config.
        options: lengths that the user gives; they come first.
        observed: those of the run that calibrates the plan, used where nothing else is known.
        download: read the tokenizer and the datasets from the hub if they are not here.
        opened: the datasets that are Python objects, by what the configuration has for them.
    Raises: DataError or ModelError for files that are here and cannot be read. ConfigError for
    given completions that are longer than a completion may be.
    """
    observed = observed or LengthOptions()
    sources: list[tuple[str, str]] = []
    measured = None
    if options.prompt_tokens is None and options.image_tokens is None:
        measured, reason = _measure(config, download=download, opened=opened)
    else:
        reason = "given"
    if measured is not None:
        prompts, num_prompts, num_rows, note = measured
        part = "" if num_rows <= MAX_MEASURED_ROWS else f" (a sample of its {num_rows:,} rows)"
        sources.append(("prompts", f"measured in {', '.join(config.data.train_files)}{part}{note}"))
    else:
        prompt, source = _assumed_prompt(config, dimensions_of(hf_config), options, observed, reason)
        prompts, num_prompts = [prompt], None
        sources.append(("prompts", source))
    if options.num_prompts is not None:
        num_prompts = options.num_prompts
        sources.append(("training prompts", "given"))
    elif num_prompts is None and config.data.train_files and opened.keys() >= set(config.data.train_files):
        num_prompts = _count_drawn_rows(config, opened)
        sources.append(("training prompts", f"all rows of {', '.join(config.data.train_files)}, usable or not"))
    elif num_prompts is None:
        sources.append(("training prompts", f"unknown ({reason})"))
    num_val = options.num_val_prompts
    if num_val is None and config.data.val_files:
        num_val = _count_rows(config.data.val_files, download=download, opened=opened)
        if num_val is None:
            sources.append(("validation prompts", "unknown, so that validation is not counted"))
    observed_tokens, observed_grids, source = _observations(config, dimensions_of(hf_config), options)
    if source:
        sources.append(("observations", source))
    limit = config.data.max_response_length - round(observed_tokens)
    response, longest, source = _response_tokens(config, options, observed, limit)
    sources.append(("completions", source))
    return Lengths(
        tuple(prompts), num_prompts, num_val, response, longest, tuple(sources), observed_tokens, observed_grids
    )


def _observations(
    config: Config, dimensions: Dimensions | None, options: LengthOptions
) -> tuple[float, tuple[Grid, ...], str]:
    """Return tokens and images that a completion observes, and where they come from; "" if nowhere.

    Raises: ConfigError for observations of completions that have one turn, and for given tokens
    that no completion has room for.
    """
    given, image = options.observed_tokens, options.observed_image_tokens or 0.0
    if given is None and image:
        given = image
    _check_room(config, options.response_tokens, max(given or 0.0, image))
    if not config.worker.rollout.has_episodes:
        if given is not None or options.observed_image_tokens is not None:
            raise ConfigError(
                "observed tokens are given, and completions have one turn: set worker.rollout.environment or "
                "worker.rollout.tools, or leave them out"
            )
        return 0.0, (), ""
    uncounted = "the time of environments and tools is not counted"
    if given is None:
        return 0.0, (), f"counted as sampled tokens, without images (--observed-length); {uncounted}"
    tokens = max(given, image)
    grids: tuple[Grid, ...] = ()
    images = "without images"
    if dimensions is not None and dimensions.vision is not None and image:
        grids = (_square_grid(image, dimensions.vision.merge),)
        images = f"with images of {image:,.0f} tokens, counted as one image"
    return tokens, grids, f"given, {images}; {uncounted}, nor the memory of their images in an update"


def _check_room(config: Config, response: float | None, observed: float) -> None:
    """Raise ConfigError if the given tokens of a completion are more than it may have.

    response: sampled ones; None: not given, of which there is one at least.
    """
    limit = config.data.max_response_length
    if round(max(response or 0, 1)) + round(observed) <= limit:
        return
    if response is None:
        has = f"a completion observes {observed:,.0f} tokens (--observed-length), which leaves none to sample"
    else:
        has = f"a completion has {response:,.0f} sampled tokens (--response-length)"
        has += f" and {observed:,.0f} observed ones (--observed-length)" if observed else ""
    raise ConfigError(
        f"{has}, but at most data.max_response_length={limit} tokens: raise data.max_response_length, or give less"
    )


def _response_tokens(
    config: Config, options: LengthOptions, observed: LengthOptions, limit: int
) -> tuple[float, int, str]:
    """Return the mean, the longest of a step, and where they come from.

    limit: most sampled tokens of a completion; see _check_room for those that are given.
    """
    room = "data.max_response_length"
    if limit < config.data.max_response_length:
        room = f"what observations leave of {room}"
    if config.worker.rollout.ignore_eos:
        return float(limit), limit, f"{room}, since worker.rollout.ignore_eos is true"
    if options.response_tokens is not None:
        mean, source = min(options.response_tokens, limit), "given"  # less by a fraction, if at all
    elif observed.response_tokens is not None:
        mean, source = min(observed.response_tokens, limit), "the mean of the run that calibrates"
    else:
        mean, source = max(1, limit / 2), f"assumed: half of {room} (--response-length)"
    return float(mean), limit, f"{source}; the longest of a step has data.max_response_length"


def _assumed_prompt(
    config: Config, dimensions: Dimensions | None, options: LengthOptions, observed: LengthOptions, reason: str
) -> tuple[PromptLengths, str]:
    """Return one prompt that stands for all, and where its length comes from."""
    vision = None if dimensions is None else dimensions.vision
    data = config.data
    image, source = 0.0, ""
    if vision is not None:
        side = _patch_side(vision.values_per_patch)
        pixels = min(max(data.min_pixels or 0, _IMAGE_PIXELS), data.max_pixels or _IMAGE_PIXELS)
        image, source = pixels / (side * vision.merge) ** 2, f"one image of {pixels:,} pixels"
        if options.image_tokens is not None:
            image, source = options.image_tokens, "given"
    if options.prompt_tokens is not None:
        tokens, source = options.prompt_tokens, "given (--prompt-length)"
        image = min(image, tokens)
    elif observed.prompt_tokens is not None and options.image_tokens is None:
        tokens, source = observed.prompt_tokens, "the mean of the run that calibrates"
        image = min(image, tokens)
    else:
        tokens = image + _TEXT_TOKENS
        source = f"{source + ' and ' if source else ''}{_TEXT_TOKENS} tokens of text"
        source = f"assumed: {source} (--prompt-length, --image-tokens); {reason}"
    tokens = max(1, min(round(tokens), data.max_prompt_length))
    grids: tuple[Grid, ...] = ()
    if vision is not None and round(image) > 0:
        grids = (_square_grid(min(image, tokens), vision.merge),)
    return PromptLengths(tokens, grids), source


def _square_grid(tokens: float, merge: int) -> Grid:
    """Return the grid of an image of so many tokens, nearly square."""
    rows = max(1, round(sqrt(tokens)))
    columns = max(1, round(tokens / rows))
    return 1, rows * merge, columns * merge


def _patch_side(values_per_patch: int) -> int:
    """Return the side of a patch in pixels: of three channels and two frames."""
    return round(sqrt(values_per_patch / 6))


def _measure(
    config: Config, *, download: bool, opened: Mapping[str, Source]
) -> tuple[tuple[list[PromptLengths], int, int, str] | None, str]:
    """Return (prompts, usable prompts of an epoch, rows, a note), or None and why not."""
    data, model = config.data, config.worker.actor.model
    if not data.train_files:
        return None, "there are no data.train_files"
    named = [spec for spec in data.train_files if spec not in opened]
    objects = [spec for spec in named if is_python_object(spec)]
    if objects:
        return None, f"{objects[0]} was a Python object of another program"
    remote = [spec for spec in named if not _is_local(spec)]
    if remote and not download:
        return None, f"{remote[0]} is on the hub (--download reads it)"
    missing = [spec for spec in named if _is_local(spec) and not path_exists(split_dataset(spec)[0])]
    if missing:
        return None, f"{missing[0]} is not on this machine"
    assert model.model_path is not None
    folder = processor_folder(model.tokenizer_path or model.model_path, download=download)
    if folder is None:
        return None, "the model's tokenizer is not on this machine (--download reads it)"
    processors = load_processors(
        str(folder),
        trust_remote_code=model.trust_remote_code,
        chat_template=read_template(data.override_chat_template),
        min_pixels=data.min_pixels,
        max_pixels=data.max_pixels,
    )
    schemas, note = _tool_schemas(config, processors)
    builder = open_builder(config, processors, schemas=schemas)
    parts: list[tuple[list[PromptLengths], float]] = []
    num_rows = 0
    for spec, weight in zip(data.train_files, _weights(config), strict=True):
        source = opened.get(spec) or open_source(spec)
        here = builder.with_default_image_dir(source.folder)
        require_columns(source.columns, spec, data)
        rows = len(source.rows)
        chosen = range(rows) if rows <= MAX_MEASURED_ROWS else _evenly_spaced(rows, MAX_MEASURED_ROWS)
        usable = []
        for index in chosen:
            try:
                usable.append(PromptLengths(*here.measure(source.row(index), f"{source.name}:{index}")))
            except UnusableRow:
                continue
        parts.append((usable, weight * rows * len(usable) / len(chosen)))
        num_rows += rows
    prompts = mix_prompts(parts)
    if not prompts:
        return None, f"no row of {', '.join(data.train_files)} can be used"
    return (prompts, round(sum(drawn for _, drawn in parts)), num_rows, note), ""


def _tool_schemas(config: Config, processors: Processors) -> tuple[Sequence[Mapping[str, Any]], str]:
    """Return the descriptions of the tools, which are a part of prompts, and a note on them."""
    tools = config.worker.rollout.tools
    if not tools:
        return (), ""
    if objects := [each for each in tools if is_python_object(each)]:
        return (), f", without the descriptions of the tools: {objects[0]} was a Python object of another program"
    with ExitStack() as stack:
        try:
            episodes = load_episodes(config, processors, stack)
        except TrigonError as error:  # a plan may be made where the tools do not run
            return (), f", without the descriptions of the tools: {str(error).splitlines()[0]}"
        assert episodes is not None
        return episodes[0].schemas, ", with the descriptions of the tools"


def mix_prompts(parts: Sequence[tuple[Sequence[PromptLengths], float]]) -> list[PromptLengths]:
    """Return prompts of several datasets, each with its share, evenly mixed.

    A single dataset, or several whose prompts are all drawn equally often, are returned with each
    prompt once; otherwise prompts are repeated or left out, so that the shares hold to 1 in 10,000.
    parts: of each dataset, its measured prompts, and how many of its prompts an epoch draws.
    """
    parts = [(prompts, drawn) for prompts, drawn in parts if prompts]
    rates = [drawn / len(prompts) for prompts, drawn in parts]
    counts = [len(prompts) for prompts, _ in parts]
    if rates and max(rates) > min(rates) * (1 + 1e-9):
        number = max(MIXED_PROMPTS, sum(counts))
        total = sum(drawn for _, drawn in parts)
        counts = [max(1, round(number * drawn / total)) for _, drawn in parts]
    placed = []
    for part, ((prompts, _), count) in enumerate(zip(parts, counts, strict=True)):
        for number in range(count):
            # Fewer than there are: evenly spaced ones. More: all in turn.
            index = number * len(prompts) // count if count < len(prompts) else number % len(prompts)
            placed.append(((number + 0.5) / count, part, prompts[index]))
    return [prompt for _, _, prompt in sorted(placed, key=lambda each: each[:2])]


def _evenly_spaced(rows: int, number: int) -> Sequence[int]:
    return [index * rows // number for index in range(number)]


def _weights(config: Config) -> tuple[float, ...]:
    """Return how often an epoch goes through each training dataset."""
    return tuple(config.data.train_weights) or (1.0,) * len(config.data.train_files)


def _count_drawn_rows(config: Config, opened: Mapping[str, Source]) -> int:
    """Return the rows of an epoch, usable or not, of training datasets that are all opened."""
    drawn = zip(config.data.train_files, _weights(config), strict=True)
    return round(sum(weight * len(opened[spec].rows) for spec, weight in drawn))


def _count_rows(specs: Sequence[str], *, download: bool, opened: Mapping[str, Source]) -> int | None:
    """Return the rows of datasets that are at hand, or None."""
    named = [spec for spec in specs if spec not in opened]
    if any(map(is_python_object, named)) or (not download and not all(map(_is_local, named))):
        return None
    return sum(len((opened.get(spec) or open_source(spec)).rows) for spec in specs)


def _is_local(spec: str) -> bool:
    path: Path | None = local_path(split_dataset(spec)[0], suffixes=DATASET_SUFFIXES)
    return path is not None
