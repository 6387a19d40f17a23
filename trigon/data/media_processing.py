"""Computes the pixel values of prompts that have encoded files, in threads, with a cache.

In a run with several workers, prompts are sent with their files, and each worker processes them.
Images that an environment or a tool draws are encoded files too, with any number of workers.
The cache lets the passes of a step process each image once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import TypeVar

import torch

from trigon.data.images import decoded_images
from trigon.data.media_files import MediaSource
from trigon.data.rows import UnusableRow
from trigon.data.videos import DEFAULT_SAMPLING, FrameSampling, open_video
from trigon.data.vision import ImageProcessor, VideoProcessor
from trigon.errors import DataError
from trigon.metrics import Metrics, Sum
from trigon.types import (
    Completion,
    EncodedMedia,
    Prompt,
    RolloutGroup,
    TrainGroup,
    TrainSequence,
    Vision,
    parts_of,
)

Group = TypeVar("Group", RolloutGroup, TrainGroup)
Part = TypeVar("Part", Completion, TrainSequence)
_Hashes = tuple[str, ...]


class MediaProcessor:
    """Computes the pixel values of prompts that have encoded files, in threads, with a cache."""

    def __init__(
        self,
        image_processor: ImageProcessor,
        *,
        max_image_pixels: int,
        num_workers: int,
        max_bytes: int,
        video_processor: VideoProcessor | None = None,
        video_sampling: FrameSampling = DEFAULT_SAMPLING,
    ) -> None:
        """Start with an empty cache.

        Args:
            max_image_pixels: images, and videos with frames, above it are rejected before they are
                decoded.
            num_workers: threads that decode and process.
            max_bytes: most bytes of pixel values in the cache; see start_step. If it holds all
                prompts of a step, each image is processed once per step. Pixel values in returned
                prompts do not count.
            video_processor: None for a model without videos.
            video_sampling: which frames of a video are sampled; the same as in the PromptBuilder.
        """
        self._image_processor = image_processor
        self._video_processor = video_processor
        self._video_sampling = video_sampling
        self._max_image_pixels = max_image_pixels
        self._max_bytes = max_bytes
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="images")
        self._lock = threading.Lock()  # guards the following attributes
        self._running: dict[_Hashes, Future[Vision]] = {}
        self._cache: OrderedDict[_Hashes, Vision] = OrderedDict()  # least recently used first
        self._cache_bytes = 0
        self._used: set[_Hashes] = set()  # of the cache, since start_step
        self._num_processed = 0

    def start_step(self) -> None:
        """Allow what is in the cache now to be dropped, the least recently used first.

        What is used afterwards is kept, and what does not fit is not cached. All passes of a step
        go through the same prompts in similar order: if these exceed the cache, a cache that drops
        the least recently used always drops what comes next, and never has what is asked for.
        """
        with self._lock:
            self._used.clear()

    def process(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompts with pixel values, in order.

        Prompts without encoded files are returned unchanged.
        Raises: DataError with the prompt id, if one of its files cannot be decoded.
        """
        with self._lock:
            visions = [
                self._submit(prompt.vision) if isinstance(prompt.vision, EncodedMedia) else None for prompt in prompts
            ]
        return [
            prompt if vision is None else replace(prompt, vision=_result(vision, prompt.prompt_id))
            for prompt, vision in zip(prompts, visions, strict=True)
        ]

    def process_images(self, media: EncodedMedia, name: str) -> Vision:
        """Return the pixel values of images, each of which is processed and cached by itself.

        An image that several completions observed, or that was observed in an earlier turn, is
        processed once. name: a name for errors.
        Raises: DataError if one of the files cannot be decoded.
        """
        return _together([_result(image, name) for image in self._submit_each(media)])

    def process_groups(self, groups: Sequence[Group]) -> list[Group]:
        """Return groups with the pixel values of their prompts and of their completions, in order.

        Raises: as process.
        """
        prompts = self.process([group.prompt for group in groups])
        observed = [
            (self._submit_each(part.vision), group.prompt.prompt_id)
            for group in groups
            for part in parts_of(group)[1:]
            if isinstance(part.vision, EncodedMedia)
        ]
        visions = (_together([_result(image, name) for image in images]) for images, name in observed)
        return [_with_pixels(group, prompt, visions) for group, prompt in zip(groups, prompts, strict=True)]

    def pop_metrics(self) -> Metrics:
        """Return how many images and videos have been processed since the last call."""
        with self._lock:
            num_processed, self._num_processed = self._num_processed, 0
        return {"perf/images_processed": Sum(float(num_processed))}

    def close(self) -> None:
        """Clear the cache and wait for the threads. Cannot be used afterwards."""
        self._pool.shutdown(cancel_futures=True)
        with self._lock:
            self._cache.clear()
            self._used.clear()
            self._cache_bytes = 0

    def _submit(self, media: EncodedMedia) -> Vision | Future[Vision]:
        """Return the cached result for these files, or a future of it. The lock must be held."""
        if media.hashes in self._cache:
            self._cache.move_to_end(media.hashes)
            self._used.add(media.hashes)
            return self._cache[media.hashes]
        if media.hashes not in self._running:
            self._running[media.hashes] = self._pool.submit(self._process, media)
        return self._running[media.hashes]

    def _submit_each(self, media: EncodedMedia) -> list[Vision | Future[Vision]]:
        """Return the result of each image, as _submit does."""
        images = [EncodedMedia((file,), (key,)) for file, key in zip(media.encoded, media.hashes, strict=True)]
        with self._lock:
            return [self._submit(image) for image in images]

    def _process(self, media: EncodedMedia) -> Vision:
        try:
            vision = self._process_images(media) if media.kind == "image" else self._process_videos(media)
            with self._lock:
                self._num_processed += len(media.encoded)
                self._add_to_cache(media.hashes, vision)
            return vision
        finally:
            with self._lock:
                del self._running[media.hashes]

    def _process_images(self, media: EncodedMedia) -> Vision:
        with closing(decoded_images(self._sources(media), [])) as images:
            return self._image_processor.process(images)

    def _process_videos(self, media: EncodedMedia) -> Vision:
        assert self._video_processor is not None
        return self._video_processor.process(
            open_video(source, self._video_sampling) for source in self._sources(media)
        )

    def _sources(self, media: EncodedMedia) -> Iterator[MediaSource]:
        for index, file in enumerate(media.encoded):
            yield MediaSource(file, f"{media.kind} {index}", self._max_image_pixels)

    def _add_to_cache(self, hashes: _Hashes, vision: Vision) -> None:
        """Cache a result if it fits once enough unused ones are dropped, oldest first."""
        missing = self._cache_bytes + vision.pixel_values.nbytes - self._max_bytes
        dropped = []
        for other, cached in self._cache.items():
            if missing <= 0 or other in self._used:
                break  # those used since start_step are at the end
            dropped.append(other)
            missing -= cached.pixel_values.nbytes
        if missing > 0:
            return
        for other in dropped:
            self._cache_bytes -= self._cache.pop(other).pixel_values.nbytes
        self._cache[hashes] = vision
        self._cache_bytes += vision.pixel_values.nbytes
        self._used.add(hashes)


def _with_pixels(group: Group, prompt: Prompt, visions: Iterator[Vision]) -> Group:
    """Return a group with the pixel values of its prompt, and of its completions' images."""

    def load(part: Part) -> Part:
        return replace(part, vision=next(visions)) if isinstance(part.vision, EncodedMedia) else part

    if isinstance(group, RolloutGroup):
        rollouts = tuple(replace(each, completion=load(each.completion)) for each in group.rollouts)
        return replace(group, prompt=prompt, rollouts=rollouts)
    return replace(group, prompt=prompt, sequences=tuple(map(load, group.sequences)))


def _together(images: Sequence[Vision]) -> Vision:
    """Return images as one Vision."""
    if len(images) == 1:
        return images[0]
    return Vision(
        torch.cat([image.pixel_values for image in images]),
        torch.cat([image.grid_thw for image in images]),
        tuple(key for image in images for key in image.hashes),
        original_sizes=tuple(size for image in images for size in image.original_sizes),
    )


def _result(vision: Vision | Future[Vision], prompt_id: str) -> Vision:
    """Wait for a result. An error is raised for each prompt that waits for it, with its id."""
    if isinstance(vision, Vision):
        return vision
    try:
        return vision.result()
    except UnusableRow as problem:
        raise DataError(f"{prompt_id}: {problem}") from problem
