"""Checks of the model's files without its weights, of templates, and of environments and tools.

The code of an environment or of tools runs in the processes of a run, with its time limits and its
confinement. An episode is begun; no step is taken, since only a model can show what follows it.
"""

from __future__ import annotations

import copy
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from trigon.assemble.data import open_builder, read_processors
from trigon.assemble.episodes import check_chat_template, load_episodes, try_episode
from trigon.assemble.memory import size_of_model
from trigon.assemble.models import check_policy, require_same_tokens
from trigon.assemble.options import max_completion_tokens
from trigon.config.options import with_options
from trigon.config.paths import local_path
from trigon.config.schema import MAX_TOKENS, Config
from trigon.data.prompts import PromptBuilder
from trigon.data.templates import TemplateFailure, render_chat
from trigon.data.vision import ImageProcessor, image_processor_of
from trigon.environments.pool import EnvironmentPool
from trigon.errors import ConfigError, ModelError, TrigonError
from trigon.models.linear_attention import has_fast_kernels
from trigon.models.load import (
    Processors,
    folder_without_weights,
    load_processors,
    pixel_limits,
    require_weights,
    set_pixel_limits,
)
from trigon.models.sizes import ModelSize
from trigon.system.terminal import shorten
from trigon.tools.check.dataset import RowFacts, ScannedDataset, build, first_dataset, share, show_tokens
from trigon.tools.check.run import Missing, Result, Skipped
from trigon.tools.quickstart.model import make_tiny

_ANSWER = "An answer of the assistant."
_ONE_TURN = "none: completions have one turn"

WARN_FRACTION = 0.05
"""The least fraction of rows lost to their length that is a warning."""

FAIL_FRACTION = 0.20
"""The least fraction of rows lost to their length that is a failure."""

_NUM_BARS = 8
_BAR_CHARACTERS = 40


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A model without its weights.

    config: the configuration of the run with the local folder of the model. size: None if the
    model is not supported.
    """

    config: Config
    processors: Processors
    size: ModelSize | None

    def require_size(self) -> ModelSize:
        """Return the number of weights. Raises: Skipped if it is not known."""
        if self.size is None:
            raise Skipped("see the check 'model'")
        return self.size


def check_model(result: Result, config: Config, *, on_gpus: bool = False) -> Model | Missing:
    """Read config, tokenizer and processors. A model of a hub is downloaded without its weights.

    on_gpus: the machine has GPUs, for which some models need further packages.
    """
    model = config.worker.actor.model
    if not model.model_path:
        raise Skipped("no model is set")
    paths = {
        "worker.actor.model.model_path": model.model_path,
        "worker.actor.model.tokenizer_path": model.tokenizer_path,
        "worker.critic.model.model_path": config.critic_model_path,
    }
    local = with_options(config, {key: str(folder_without_weights(path)) for key, path in paths.items() if path})
    try:
        processors = read_processors(local)
    except ModelError as error:
        result.fail("template.chat" if "chat template" in str(error) else "model.unusable", str(error))
        return Missing("see the check 'model'")
    for path in filter(None, (model.model_path, config.critic_model_path)):
        if local_path(path) is not None:
            try:
                require_weights(path)
            except ModelError as error:
                result.fail("model.unusable", str(error))
    if processors.family.linear_attention and on_gpus and not has_fast_kernels():
        result.warn(
            "model.kernels",
            f"{processors.family.model_type} has layers of linear attention, and flash-linear-attention, whose kernels "
            "compute them on a GPU, is not installed: the functions of torch that replace it are many times slower",
            "run pip install flash-linear-attention",
        )
    try:
        require_same_tokens(local, processors)
        check_policy(local, processors.hf_config)
        size = size_of_model(local)
    except (ModelError, ConfigError) as error:
        result.fail("model.unusable", str(error))
        return Model(local, processors, None)
    limit = getattr(processors.hf_config.get_text_config(), "max_position_embeddings", None)
    longest = config.context_length
    if limit is not None and longest > limit:
        result.fail(
            "model.context",
            f"prompt and completion have up to {longest:,} tokens together, and the model's context has {limit:,} "
            "(max_position_embeddings)",
            "lower data.max_prompt_length, data.max_response_length or worker.rollout.max_model_len",
        )
    weights = size.all.weights
    number = f"{weights:,}" if weights < 10_000_000 else f"{weights / 1e9:.2f} billion"
    result.summary = f"{size.model_type}, {number} weights, {len(processors.tokenizer):,} tokens; no weights were read"
    return Model(local, processors, size)


def check_code(result: Result, model: Model, stack: ExitStack) -> EnvironmentPool | None:
    """Load the environment or the tools. stack: ends their processes."""
    pool = load_episodes(model.config, model.processors, stack)
    if pool is None:
        result.summary = _ONE_TURN
        return None
    pool.ready()
    rollout = model.config.worker.rollout
    turns = f"at most {rollout.max_turns} turns, in messages of the role {rollout.role_of_observations}"
    tools = f"{', '.join(rollout.tools)}, called in the format {pool.settings.tool_format}"
    result.summary = f"{tools if pool.settings.environment is None else rollout.environment}; {turns}"
    return pool


def check_templates(result: Result, model: Model, tools: EnvironmentPool | None) -> PromptBuilder | Missing:
    """Try the chat template and the format prompt, also on conversations if there are episodes.

    tools: tools whose descriptions are a part of the prompts.
    """
    config, processors = model.config, model.processors
    schemas = () if tools is None else tools.schemas
    builder = None
    try:
        builder = open_builder(config, processors, process_images=False, schemas=schemas)
        check_chat_template(config, processors, schemas=schemas)
    except TrigonError as error:
        result.fail("template.format_prompt" if "data.format_prompt" in str(error) else "template.chat", str(error))
        return Missing("see the check 'template'") if builder is None else builder
    if (header := find_missing_header(processors.tokenizer)) is not None:
        result.fail(
            "template.generation_prompt",
            "the chat template does not begin the assistant's message where add_generation_prompt is true: "
            f"{header!r} stands between a question and its answer, and the model would have to write it",
            "end the template with {% if add_generation_prompt %}...{% endif %} (data.override_chat_template)",
        )
    chat = "its own" if config.data.override_chat_template is None else "data.override_chat_template"
    question = " ".join((config.data.format_prompt or "none").split())
    result.summary = f"chat template: {chat}; format prompt: {shorten(question, 60)}"
    return builder


def open_stand_in(config: Config) -> PromptBuilder | Missing:
    """Return what reads the rows if the model cannot be read, because a hub is out of reach say.

    Rows, images and rewards can still be checked, with a tiny model's tokenizer; no length can.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="trigon-") as folder:
            processors = load_processors(str(make_tiny(Path(folder))))
        unlimited = with_options(config, {"data.max_prompt_length": MAX_TOKENS})
        return open_builder(unlimited, processors, process_images=False)
    except TrigonError as error:
        return Missing(str(error))


def find_missing_header(tokenizer: Any) -> str | None:
    """Return what a chat template writes before an answer, but not at the end of a prompt, if so.

    Templates without a header of the assistant need no generation prompt: None.
    """
    question = [{"role": "user", "content": "A question."}]
    answered = [*question, {"role": "assistant", "content": _ANSWER}]

    try:
        plain, prompt = render_chat(tokenizer, question), render_chat(tokenizer, question, generation_prompt=True)
        conversation = render_chat(tokenizer, answered)
    except TemplateFailure:  # it needs other messages; errors with those of a row are that row's
        return None
    if prompt != plain or _ANSWER not in conversation or not conversation.startswith(prompt.rstrip()):
        return None
    return conversation[len(prompt.rstrip()) :].partition(_ANSWER)[0].strip() or None


def check_prompt(result: Result, model: Model, datasets: Sequence[ScannedDataset]) -> None:
    """Show the first training prompt exactly as the model sees it, with its special tokens."""
    dataset = first_dataset(datasets)
    facts, scanned = dataset.usable[0], dataset.scanned
    prompt = scanned.builder.inspect(scanned.source.rows[facts.index], facts.name)
    sizes = ", ".join(f"{width} x {height} pixels" for width, height in facts.image_sizes)
    images = f", {facts.media_tokens} of them for {sizes}" if facts.image_sizes else ""
    result.summary = f"{facts.name} has {facts.num_tokens} tokens{images}"
    result.text = show_tokens(model.processors, prompt.token_ids)


def check_episode(
    result: Result, model: Model, episodes: EnvironmentPool | None, datasets: Sequence[ScannedDataset]
) -> None:
    """Begin an episode of the first row, and show what follows the prompt as the model sees it."""
    if episodes is None:
        result.summary = _ONE_TURN
        return
    dataset = first_dataset(datasets)
    facts = dataset.usable[0]
    limit = max_completion_tokens(model.config)
    tokens = try_episode(model.config, model.processors, episodes, build(dataset, facts))
    if tokens is None:
        result.summary = "tools: the first turn follows the prompt"
        return
    images = f" with {len(tokens.media.encoded)} images" if tokens.media is not None else ""
    result.summary = (
        f"the first observation for {facts.name} has {len(tokens.token_ids)} tokens{images}, of a completion's at most "
        f"{limit}"
    )
    result.text = show_tokens(model.processors, tokens.token_ids)


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

    def is_too_large(num_tokens: int) -> bool:
        count = token_counter(processors, max_pixels=num_tokens * side**2)
        return any(texts[row.name] + sum(count(*size) for size in row.image_sizes) > limit for row in lost)

    # In tokens of an image; an image of more could not fit.
    return bisect_left(range(1, limit + 1), True, key=is_too_large) * side**2 or None


def token_counter(processors: Processors, *, max_pixels: int) -> Callable[[int, int], int]:
    """Return a function that counts the tokens of an image of a size, with another max_pixels."""
    limits, changed = pixel_limits(processors), copy.deepcopy(processors.image_processor)
    assert limits is not None
    set_pixel_limits(changed, processors.family, min_pixels=min(limits[0], max_pixels), max_pixels=max_pixels)
    processor = image_processor_of(replace(processors, image_processor=changed))
    assert isinstance(processor, ImageProcessor)
    return cache(processor.image_tokens)


def histogram(rows: Sequence[RowFacts], limit: int) -> str:
    """Return the lengths of prompts as bars: = for text tokens, # for tokens of images and videos.

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
