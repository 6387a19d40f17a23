"""Where prompts whose images or videos came as files get their pixels: once in a process, however often they come by.

Knows the threads that process them, what is remembered of their work, and for how long. Refuses to know who sent the
prompts and what is done with them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from trigon.data.bad_rows import UnusableRow
from trigon.data.images import open_image
from trigon.data.videos import DEFAULT_SAMPLING, FrameSampling, open_video
from trigon.data.vision import ImageProcessor, VideoProcessor
from trigon.errors import DataError
from trigon.types import EncodedMedia, Prompt, Vision

_Hashes = tuple[str, ...]


class ProcessedImages:
    """Gives prompts their pixels, and remembers those that were used last. Safe to use from several threads."""

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
        """Prepare to process images and videos, remembering nothing yet.

        Args:
            max_image_pixels: images, and videos whose frames are above it, are refused before they are decoded.
            num_workers: threads that decode and process.
            max_bytes: of the pixel values remembered; beyond it, those used longest ago are forgotten. Where it holds
                all prompts of a step, each image is processed once a step. Prompts handed out keep theirs besides.
            video_processor: None for a model that takes no videos.
            video_sampling: which frames of a video are shown; those that prompts were laid out for.
        """
        self._image_processor = image_processor
        self._video_processor = video_processor
        self._video_sampling = video_sampling
        self._max_image_pixels = max_image_pixels
        self._max_bytes = max_bytes
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="images")
        self._lock = threading.Lock()  # held by whoever touches what follows
        self._running: dict[_Hashes, Future[Vision]] = {}
        self._remembered: OrderedDict[_Hashes, Vision] = OrderedDict()  # the one used last stands last
        self._remembered_bytes = 0

    def of(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompts with images and videos processed, in order; those without files come back as they are.

        Raises: DataError naming the prompt, if one of its files cannot be decoded.
        """
        with self._lock:
            asked = [self._ask(p.vision) if isinstance(p.vision, EncodedMedia) else None for p in prompts]
        return [
            prompt if vision is None else replace(prompt, vision=_awaited(vision, prompt.prompt_id))
            for prompt, vision in zip(prompts, asked, strict=True)
        ]

    def close(self) -> None:
        """Forget everything and wait for the threads. Cannot be used afterwards."""
        self._pool.shutdown(cancel_futures=True)
        with self._lock:
            self._remembered.clear()
            self._remembered_bytes = 0

    def _ask(self, media: EncodedMedia) -> Vision | Future[Vision]:
        """Return what is remembered of these files, or else what is being made of them. The lock is held."""
        if media.hashes in self._remembered:
            self._remembered.move_to_end(media.hashes)
            return self._remembered[media.hashes]
        if media.hashes not in self._running:
            self._running[media.hashes] = self._pool.submit(self._make, media)
        return self._running[media.hashes]

    def _make(self, media: EncodedMedia) -> Vision:
        try:
            vision = self._images(media) if media.kind == "image" else self._videos(media)
            with self._lock:
                self._remember(media.hashes, vision)
            return vision
        finally:
            with self._lock:
                del self._running[media.hashes]

    def _images(self, media: EncodedMedia) -> Vision:
        return self._image_processor.process(
            [
                open_image(file, where=f"image {index}", image_dir=None, max_pixels=self._max_image_pixels)
                for index, file in enumerate(media.encoded)
            ]
        )

    def _videos(self, media: EncodedMedia) -> Vision:
        assert self._video_processor is not None
        return self._video_processor.process(
            open_video(
                file,
                where=f"video {index}",
                image_dir=None,
                max_pixels=self._max_image_pixels,
                sampling=self._video_sampling,
            )
            for index, file in enumerate(media.encoded)
        )

    def _remember(self, hashes: _Hashes, vision: Vision) -> None:
        """Keep a result, unless it alone is beyond max_bytes, at the cost of those used longest ago."""
        if vision.pixel_values.nbytes > self._max_bytes:
            return
        self._remembered[hashes] = vision
        self._remembered_bytes += vision.pixel_values.nbytes
        while self._remembered_bytes > self._max_bytes:
            _, forgotten = self._remembered.popitem(last=False)
            self._remembered_bytes -= forgotten.pixel_values.nbytes


def _awaited(vision: Vision | Future[Vision], prompt_id: str) -> Vision:
    """Return a result once it is there; what went wrong is told of each prompt that waited for it."""
    if isinstance(vision, Vision):
        return vision
    try:
        return vision.result()
    except UnusableRow as problem:
        raise DataError(f"{prompt_id}: {problem}") from problem
