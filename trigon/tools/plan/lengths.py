"""The lengths of prompts and completions that a plan assumes, and where each comes from.

Prompts are measured in the dataset where its files and the model's tokenizer are on this machine,
from the headers of images alone. Everything else is given, taken from an earlier run, or assumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

from trigon.assemble.data import NO_SOURCES, open_builder, read_processors
from trigon.assemble.episodes import load_episodes
from trigon.config.options import with_options
from trigon.config.paths import is_local_dataset, is_python_object, local_path, path_exists, split_dataset
from trigon.config.schema import Config
from trigon.data.rows import UnusableRow, require_columns
from trigon.data.sources import Source, open_source
from trigon.errors import ConfigError, ModelError, TrigonError
from trigon.models.hub import hub_endpoint
from trigon.models.load import Processors
from trigon.models.sizes import GroupLengths, VisionDimensions

MAX_MEASURED_ROWS = 2000
"""Rows that are measured at most: evenly spaced in each dataset, by its share of an epoch."""

_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
"""Of a model's repository: config, tokenizer and processors, without weights."""

_TEXT_TOKENS = 128
_IMAGE_PIXELS = 512 * 512

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class LengthOptions:
    """Lengths that are known without the dataset; None: not given.

    prompt_tokens: mean of all prompts, image tokens included.
    image_tokens: tokens of each prompt's images; 0: no images.
    response_tokens: mean of all completions, sampled tokens alone.
    num_prompts: number of usable training prompts. num_val_prompts: number of validation prompts.
    keep_rate: share of groups that online filtering keeps.
    observed_tokens: mean of what a completion observes in an environment or with tools, images
        included. observed_image_tokens: tokens of these images; None: no images.
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
class Lengths:
    """What a plan knows or assumes of the data.

    prompts: measured ones, without completions, each as often as its share of an epoch asks, or one
        that stands for all.
    num_prompts: number of usable training prompts; None: unknown. num_val_prompts: likewise.
    response_tokens: mean of the tokens of a completion that are sampled.
    observed_tokens: mean of the tokens that a completion observes.
    observed_grids: grids of the images that a completion observes, in patches.
    sources: where each of them comes from, one sentence each.
    """

    prompts: tuple[GroupLengths, ...]
    num_prompts: int | None
    num_val_prompts: int | None
    response_tokens: float
    observed_tokens: float
    observed_grids: tuple[Grid, ...]
    sources: tuple[str, ...]

    @property
    def completion_tokens(self) -> int:
        """The tokens of a completion, sampled and observed, as groups have them."""
        return max(1, round(self.response_tokens)) + round(self.observed_tokens)

    @property
    def mean_prompt(self) -> float:
        """The mean tokens of a prompt."""
        return sum(prompt.prompt for prompt in self.prompts) / len(self.prompts)

    def groups(self, number: int, completions: int) -> list[GroupLengths]:
        """Return this many groups, which go through the prompts in turn."""
        observed = round(self.observed_tokens)
        chosen = (self.prompts[index % len(self.prompts)] for index in range(number))
        return [
            replace(
                prompt,
                completions=(self.completion_tokens,) * completions,
                observed=observed * completions,
                observed_grids=self.observed_grids * completions,
            )
            for prompt in chosen
        ]


def find_lengths(
    config: Config,
    vision: VisionDimensions | None,
    options: LengthOptions,
    *,
    measured: LengthOptions | None = None,
    download: bool = False,
    opened: Mapping[str, Source] = NO_SOURCES,
) -> Lengths:
    """Return the lengths of a run's prompts and completions.

    Args:
        vision: the dimensions of the vision tower; None: not known, or there is none.
        options: lengths that the user gives; they come first.
        measured: lengths of a finished run, used where nothing else is known.
        download: read the tokenizer and the datasets from the hub if they are not here.
        opened: the datasets that are Python objects, by what the configuration has for them.
    Raises: DataError or ModelError for files that are here and cannot be read. ConfigError for
    given completions that are longer than a completion may be.
    """
    data, measured = config.data, measured or LengthOptions()
    sources: list[str] = []
    prompts: tuple[GroupLengths, ...] = ()
    num_prompts, reason = None, "given"
    if options.prompt_tokens is None and options.image_tokens is None:
        folder, reason = _find_tokenizer(config, opened, download=download)
        if folder is not None:
            prompts, num_prompts, note = _measure(config, opened, folder)
            reason = "" if prompts else f"no row of {', '.join(data.train_files)} can be used"
            sources.append(f"prompts: measured in {', '.join(data.train_files)}{note}")
    if not prompts:
        prompt, source = _assume_prompt(config, vision, options, measured, reason)
        prompts, num_prompts, sources = (prompt,), None, [f"prompts: {source}"]
    if options.num_prompts is not None:
        num_prompts = options.num_prompts
        sources.append("training prompts: given")
    elif num_prompts is None and data.train_files and opened.keys() >= set(data.train_files):
        num_prompts = round(sum(weight * len(opened[spec].rows) for spec, weight in _weighted(config)))
        sources.append(f"training prompts: all rows of {', '.join(data.train_files)}, usable or not")
    elif num_prompts is None:
        sources.append(f"training prompts: unknown ({reason})")
    num_val = options.num_val_prompts
    if num_val is None and data.val_files:
        num_val = _count_rows(data.val_files, download=download, opened=opened)
        if num_val is None:
            sources.append("validation prompts: unknown, so that validation is not counted")
    observed_tokens, grids, source = _find_observations(config, vision, options)
    if source:
        sources.append(f"observations: {source}")
    response_tokens, source = _find_response_tokens(config, options, measured, observed_tokens)
    sources.append(f"completions: {source}")
    return Lengths(prompts, num_prompts, num_val, response_tokens, observed_tokens, grids, tuple(sources))


def _find_observations(
    config: Config, vision: VisionDimensions | None, options: LengthOptions
) -> tuple[float, tuple[Grid, ...], str]:
    """Return tokens and images that a completion observes, and where they come from; "" if nowhere.

    Raises: ConfigError for observations of completions that have one turn, and for given tokens
    that no completion has room for.
    """
    given, image = options.observed_tokens, options.observed_image_tokens or 0.0
    tokens, limit = max(given or 0.0, image), config.data.max_response_length
    if round(max(options.response_tokens or 0, 1)) + round(tokens) > limit:
        sampled = "" if options.response_tokens is None else f" after {options.response_tokens:,.0f} sampled ones"
        raise ConfigError(
            f"a completion has at most data.max_response_length={limit} tokens, and {tokens:,.0f} observed ones "
            f"(--observed-length){sampled} (--response-length) are given: raise data.max_response_length, or give less"
        )
    if not config.worker.rollout.has_episodes:
        if given is not None or options.observed_image_tokens is not None:
            raise ConfigError(
                "observed tokens are given, and completions have one turn: set worker.rollout.environment or "
                "worker.rollout.tools, or leave them out"
            )
        return 0.0, (), ""
    if given is None and not image:
        return 0.0, (), "counted as sampled tokens, without images (--observed-length)"
    if vision is None or not image:
        return tokens, (), "given, without images"
    note = f"given, with images of {image:,.0f} tokens, counted as one image, without their memory in an update"
    return tokens, (_square_grid(image, vision.merge),), note


def _find_response_tokens(
    config: Config, options: LengthOptions, measured: LengthOptions, observed_tokens: float
) -> tuple[float, str]:
    """Return the mean of sampled tokens, and where it comes from."""
    room, limit = "data.max_response_length", config.data.max_response_length - round(observed_tokens)
    if observed_tokens:
        room = f"what observations leave of {room}"
    if config.worker.rollout.ignore_eos:
        return float(limit), f"{room}, since worker.rollout.ignore_eos is true"
    if options.response_tokens is not None:
        return float(min(options.response_tokens, limit)), "given"  # less by a fraction, if at all
    if measured.response_tokens is not None:
        return float(min(measured.response_tokens, limit)), "the mean of the run that was measured"
    return max(1.0, limit / 2), f"assumed: half of {room} (--response-length)"


def _assume_prompt(
    config: Config, vision: VisionDimensions | None, options: LengthOptions, measured: LengthOptions, reason: str
) -> tuple[GroupLengths, str]:
    """Return one prompt that stands for all, and where its length comes from."""
    data = config.data
    image, source = 0.0, ""
    if vision is not None:
        side = round(sqrt(vision.values_per_patch / 6))  # of a patch in pixels, of three channels and two frames
        pixels = min(max(data.min_pixels or 0, _IMAGE_PIXELS), data.max_pixels or _IMAGE_PIXELS)
        image, source = pixels / (side * vision.merge) ** 2, f"one image of {pixels:,} pixels and "
        if options.image_tokens is not None:
            image, source = options.image_tokens, "given images and "
    if options.prompt_tokens is not None:
        tokens, source = options.prompt_tokens, "given (--prompt-length)"
    elif measured.prompt_tokens is not None and options.image_tokens is None:
        tokens, source = measured.prompt_tokens, "the mean of the run that was measured"
    else:
        tokens = image + _TEXT_TOKENS
        source = f"assumed: {source}{_TEXT_TOKENS} tokens of text (--prompt-length, --image-tokens); {reason}"
    length = max(1, min(round(tokens), data.max_prompt_length))
    image = min(image, length)
    grids = () if vision is None or round(image) == 0 else (_square_grid(image, vision.merge),)
    return GroupLengths(length, grids=grids), source


def _square_grid(tokens: float, merge: int) -> Grid:
    """Return the grid of an image of this many tokens, nearly square."""
    rows = max(1, round(sqrt(tokens)))
    return 1, rows * merge, max(1, round(tokens / rows)) * merge


# -- the dataset -----------------------------------------------------------------------------------


def _find_tokenizer(config: Config, opened: Mapping[str, Source], *, download: bool) -> tuple[Path | None, str]:
    """Return the folder of the tokenizer; None, and why, if prompts cannot be measured here."""
    data, model = config.data, config.worker.actor.model
    if not data.train_files:
        return None, "there are no data.train_files"
    for spec in data.train_files:
        if spec in opened:
            continue
        if is_python_object(spec):
            return None, f"{spec} was a Python object of another program"
        if not is_local_dataset(spec):
            if not download:
                return None, f"{spec} is on the hub (--download reads it)"
        elif not path_exists(split_dataset(spec)[0]):
            return None, f"{spec} is not on this machine"
    folder = processor_folder(model.tokenizer_path or model.model_path or "", download=download)
    return folder, "" if folder is not None else "the model's tokenizer is not on this machine (--download reads it)"


def _measure(config: Config, opened: Mapping[str, Source], folder: Path) -> tuple[tuple[GroupLengths, ...], int, str]:
    """Return the prompts that an epoch draws, or an even part of them, their number, and a note.

    folder: the folder of the tokenizer. A row that is drawn more than once is there more than once.
    """
    data = config.data
    paths = {"worker.actor.model.model_path": str(folder), "worker.actor.model.tokenizer_path": None}
    processors = read_processors(with_options(config, paths))
    schemas, note = _tool_schemas(config, processors)
    builder = open_builder(config, processors, schemas=schemas)
    sources = [opened.get(spec) or open_source(spec) for spec in data.train_files]
    num_rows = sum(len(source.rows) for source in sources)
    drawn = [weight * len(source.rows) for (_, weight), source in zip(_weighted(config), sources, strict=True)]
    total = sum(drawn)
    most = min(MAX_MEASURED_ROWS, max(num_rows, round(total)))
    placed: list[tuple[float, int, GroupLengths]] = []
    num_tried = 0
    for part, (source, spec) in enumerate(zip(sources, data.train_files, strict=True)):
        here = builder.with_default_image_dir(source.folder)
        require_columns(source.columns, spec, data)
        rows = len(source.rows)
        count = max(1, round(most * drawn[part] / total)) if rows else 0
        known: dict[int, GroupLengths | None] = {}
        for number in range(count):
            # Fewer than there are: evenly spaced ones. More: all in turn.
            index = number * rows // count if count < rows else number % rows
            if index not in known:
                try:
                    tokens, grids = here.measure(source.row(index), f"{source.name}:{index}")
                    known[index] = GroupLengths(tokens, grids=grids)
                except UnusableRow:
                    known[index] = None
            num_tried += 1
            if (prompt := known[index]) is not None:
                placed.append(((number + 0.5) / count, part, prompt))
    if num_rows > num_tried:
        note = f" (a sample of its {num_rows:,} rows){note}"
    # Rows of several datasets are evenly mixed, so that the first groups have some of each.
    prompts = tuple(prompt for _, _, prompt in sorted(placed, key=lambda each: each[:2]))
    return prompts, round(total * len(prompts) / max(1, num_tried)), note


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
        return episodes.schemas, ", with the descriptions of the tools"


def _weighted(config: Config) -> list[tuple[str, float]]:
    """Return each training dataset with how often an epoch goes through it."""
    files = config.data.train_files
    return list(zip(files, config.data.train_weights or (1.0,) * len(files), strict=True))


def _count_rows(specs: Sequence[str], *, download: bool, opened: Mapping[str, Source]) -> int | None:
    """Return the rows of datasets that are at hand, or None."""
    named = [spec for spec in specs if spec not in opened]
    if any(map(is_python_object, named)) or (not download and not all(map(is_local_dataset, named))):
        return None
    return sum(len((opened.get(spec) or open_source(spec)).rows) for spec in specs)


def processor_folder(model_path: str, *, download: bool) -> Path | None:
    """Return a folder with the tokenizer and processors of a model, or None if that is not at hand.

    At hand: a local folder, or the hub's cache on this machine.
    download: read them from the hub otherwise, without weights.
    Raises: ModelError if the download fails.
    """
    folder = local_path(model_path)
    if folder is not None:
        return folder if (folder / "tokenizer_config.json").is_file() else None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = Path(snapshot_download(model_path, allow_patterns=list(_SMALL_FILES), local_files_only=not download))
    except (OSError, ValueError) as error:
        if isinstance(error, LocalEntryNotFoundError) and not download:
            return None
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"the tokenizer of {model_path!r} could not be downloaded from {hub_endpoint()}: {reason}"
        ) from error
    return found if (found / "tokenizer_config.json").is_file() else None
