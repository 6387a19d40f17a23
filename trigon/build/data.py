"""Opens what prompts come from: processors, datasets, the order of training, validation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trigon.config.options import read_text_option
from trigon.config.plan import num_workers
from trigon.config.schema import Config
from trigon.data.dataset import Prompts, PromptSet, open_prompts
from trigon.data.media_processing import MediaProcessor
from trigon.data.mixture import mix
from trigon.data.prompts import PromptBuilder
from trigon.data.stream import PromptStream
from trigon.data.vision import image_processor_of, video_processor_of
from trigon.evaluate import Evaluator
from trigon.models.load import Processors, load_processors
from trigon.report.reporter import Reporter

from trigon.build.options import data_workers, model_path, validation_sampling_params, video_sampling

REMEMBERED_PIXEL_BYTES = 4 * 2**30
"""Host memory in which a worker remembers processed images, so that a step processes each of them once."""


def open_processors(config: Config) -> Processors:
    """Load tokenizer and image processor."""
    model, data = config.worker.actor.model, config.data
    return load_processors(
        model_path(config),
        tokenizer_path=model.tokenizer_path,
        trust_remote_code=model.trust_remote_code,
        chat_template=read_text_option(data.override_chat_template),
        min_pixels=data.min_pixels,
        max_pixels=data.max_pixels,
    )


def open_builder(config: Config, processors: Processors) -> PromptBuilder:
    """Return what turns rows into prompts."""
    data = config.data
    return PromptBuilder(
        processors,
        prompt_key=data.prompt_key,
        answer_key=data.answer_key,
        image_key=data.image_key,
        image_dir=None if data.image_dir is None else Path(data.image_dir),
        format_prompt=data.format_prompt,
        system_prompt=data.system_prompt,
        max_prompt_length=data.max_prompt_length,
        max_image_pixels=data.max_image_pixels,
        limit_images=config.worker.rollout.limit_images,
        process_images=num_workers(config) == 1,  # several do so themselves
        video_key=data.video_key,
        video_sampling=video_sampling(config),
    )


def scan_datasets(
    config: Config, specs: Sequence[str], weights: Sequence[float], builder: PromptBuilder, report: Reporter
) -> Prompts:
    """Open datasets as one, look at every row of each, and say what was set aside."""
    return mix([scan_dataset(config, spec, builder, report) for spec in specs], weights)


def scan_dataset(config: Config, spec: str, builder: PromptBuilder, report: Reporter) -> PromptSet:
    """Open a dataset, look at every row of it, and say what was set aside."""
    data = config.data
    with report.phase(f"look at {spec}") as advance:
        done = 0

        def on_progress(rows_done: int, rows: int) -> None:
            nonlocal done
            advance(rows_done - done)
            done = rows_done

        prompts = open_prompts(
            spec,
            builder,
            filter_overlong_prompts=data.filter_overlong_prompts,
            max_bad_row_fraction=data.max_bad_row_fraction,
            num_workers=data_workers(config),
            on_progress=on_progress,
        )
    for reason, count in prompts.num_skipped.items():
        report.warn(f"{spec}: {count} of {prompts.num_rows} rows skipped ({reason}): {prompts.examples[reason][0]}")
    return prompts


def open_stream(config: Config, prompts: Prompts) -> PromptStream:
    """Return the order in which training draws prompts."""
    data = config.data
    return PromptStream(
        prompts,
        batch_size=data.rollout_batch_size,
        seed=data.seed,
        shuffle=data.shuffle,
        prefetch=True,
        num_workers=data_workers(config),
    )


def open_evaluator(config: Config, prompts: Prompts | None, report: Reporter) -> Evaluator | None:
    """Return what validates, or None where there are no validation prompts."""
    if prompts is None:
        return None
    at_a_time = config.data.val_batch_size
    return Evaluator(
        prompts,
        validation_sampling_params(config),
        prompts_per_call=at_a_time if at_a_time > 0 else len(prompts),
        num_workers=data_workers(config),
        warn=report.warn,
    )


def open_images(config: Config, processors: Processors) -> MediaProcessor | None:
    """Return what gives a worker's prompts their pixels; None for a model without vision."""
    image_processor = image_processor_of(processors)
    if image_processor is None:
        return None
    return MediaProcessor(
        image_processor,
        max_image_pixels=config.data.max_image_pixels,
        num_workers=max(1, data_workers(config) // config.trainer.n_gpus_per_node),
        max_bytes=REMEMBERED_PIXEL_BYTES,
        video_processor=video_processor_of(processors),
        video_sampling=video_sampling(config),
    )
