"""Opens the sources of prompts: processors, datasets, the order of training, validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from trigon.assemble.options import (
    PIXEL_CACHE_BYTES,
    count_data_threads,
    count_image_threads,
    make_validation_sampling_params,
    model_path,
)
from trigon.config.paths import read_template
from trigon.config.schema import Config
from trigon.data.dataset import PromptSet, scan, select_prompts
from trigon.data.media_processing import MediaProcessor
from trigon.data.prompts import PromptBuilder
from trigon.data.sources import Source
from trigon.data.stream import Prompts, PromptStream, mix
from trigon.data.videos import FrameSampling
from trigon.data.vision import image_processor_of, video_processor_of
from trigon.errors import DataError
from trigon.models.load import Processors, load_processors, require_weights
from trigon.report.reporter import Reporter
from trigon.rollout.collect import Evaluator
from trigon.system.machine import count_usable_cpus

NO_SOURCES: Mapping[str, Source] = MappingProxyType({})


def open_processors(config: Config) -> Processors:
    """Load the tokenizer and the image processor, after checking that the model has weights."""
    require_weights(model_path(config))
    return read_processors(config)


def read_processors(config: Config) -> Processors:
    """Load the tokenizer and the image processor."""
    model, data = config.worker.actor.model, config.data
    return load_processors(
        model_path(config),
        tokenizer_path=model.tokenizer_path,
        trust_remote_code=model.trust_remote_code,
        chat_template=read_template(data.override_chat_template),
        min_pixels=data.min_pixels,
        max_pixels=data.max_pixels,
    )


def open_builder(
    config: Config,
    processors: Processors,
    *,
    process_images: bool | None = None,
    schemas: Sequence[Mapping[str, Any]] = (),
) -> PromptBuilder:
    """Return the builder that makes prompts from dataset rows.

    With one worker it also processes their images; with several, and with environments or tools,
    the process of each engine does (see open_images).
    process_images: whether it processes them; None: as above. schemas: descriptions of
    worker.rollout.tools.
    """
    if process_images is None:
        process_images = not (config.has_workers or config.worker.rollout.has_episodes)
    return PromptBuilder(
        processors,
        config.data,
        limit_images=config.worker.rollout.limit_images,
        process_images=process_images,
        tools=schemas,
        generation_prompt=config.worker.rollout.environment is None,
    )


def scan_datasets(
    config: Config,
    specs: Sequence[str],
    weights: Sequence[float],
    builder: PromptBuilder,
    report: Reporter,
    *,
    max_rows: int | None = None,
    opened: Mapping[str, Source] = NO_SOURCES,
) -> Prompts:
    """Open several datasets as one, check each row, and warn about the rows that are skipped.

    These are written into the run folder, also if there are too many.
    weights: how often an epoch goes through each dataset; empty: once.
    opened: the datasets that were given as Python objects, by spec.
    max_rows: most rows of each dataset, from its beginning; None: all.
    Raises: DataError.
    """
    return mix([_scan(config, spec, builder, report, opened.get(spec), max_rows) for spec in specs], weights)


def _scan(
    config: Config, spec: str, builder: PromptBuilder, report: Reporter, source: Source | None, max_rows: int | None
) -> PromptSet:
    with report.phase(f"scan {spec}") as advance:

        def on_progress(num_more: int, num_rows: int) -> None:
            advance.set_total(num_rows)
            advance(num_more)

        scanned = scan(
            spec,
            builder,
            num_workers=count_data_threads(config),
            on_progress=on_progress,
            source=source,
            max_rows=max_rows,
        )
    path = report.skipped_rows(spec, scanned.skipped)
    listing = f"all skipped rows are listed in {path}" if scanned.skipped else ""
    try:
        prompts = select_prompts(scanned)
    except DataError as error:
        raise DataError(f"{error}\n  {listing}" if listing else str(error)) from error
    for reason, count in prompts.num_skipped.items():
        report.warn(f"{spec}: {count} of {prompts.num_rows} rows skipped ({reason}): {prompts.examples[reason][0]}")
    if listing:
        report.warn(f"{spec}: {listing}")
    return prompts


def open_stream(config: Config, prompts: Prompts) -> PromptStream:
    """Return the stream that draws training prompts in order."""
    data = config.data
    return PromptStream(
        prompts,
        batch_size=config.prompts_per_step_of(prompts.prompts_per_epoch),
        seed=data.seed,
        shuffle=data.shuffle,
        prefetch=True,
        num_workers=count_data_threads(config),
    )


def open_evaluator(config: Config, prompts: Prompts | None, report: Reporter) -> Evaluator | None:
    """Return the evaluator of the validation prompts, or None if there are none."""
    if prompts is None:
        return None
    batch_size = config.data.val_batch_size
    return Evaluator(
        prompts,
        make_validation_sampling_params(config),
        prompts_per_call=batch_size if batch_size > 0 else len(prompts),
        num_workers=count_data_threads(config),
        warn=report.warn,
    )


def open_images(config: Config, processors: Processors) -> MediaProcessor | None:
    """Return the processor and cache of a worker's images, or None for a model without vision."""
    image_processor = image_processor_of(processors)
    if image_processor is None:
        return None
    return MediaProcessor(
        image_processor,
        max_image_pixels=config.data.max_image_pixels,
        num_workers=count_image_threads(config, usable_cpus=count_usable_cpus()),
        max_bytes=PIXEL_CACHE_BYTES,
        video_processor=video_processor_of(processors),
        video_sampling=FrameSampling(fps=config.data.video_fps, max_frames=config.data.max_video_frames),
    )
