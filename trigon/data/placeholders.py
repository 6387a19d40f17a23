"""Replaces the placeholders of images and videos in token ids by as many as the model needs.

A chat template writes one placeholder for each image or video. The number of tokens that replace it
follows from the size of the image, or from the sizes and times of the video.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from trigon.data.videos import FRAMES_PER_PATCH, VideoLayout
from trigon.data.vision import image_processor_of, video_processor_of
from trigon.types import ImageSizes, MediaKind

if TYPE_CHECKING:
    from trigon.models.load import Processors

MediaSize = tuple[int, int] | VideoLayout
"""What the number of tokens depends on: an image's (width, height), or a video's layout."""


class Placeholders:
    """The placeholder tokens of a model's images and videos. Thread-safe.

    image_processor, video_processor: None for a model without images, or videos.
    """

    def __init__(self, processors: Processors, *, tokenize: Callable[[str], list[int]]) -> None:
        """Read the placeholders of a model.

        tokenize: returns the token ids of a text; videos may have their times written between.
        Raises: as ImageProcessor.
        """
        family, hf_config = processors.family, processors.hf_config
        self.image_processor = image_processor_of(processors)
        self.video_processor = video_processor_of(processors)
        self._token_ids: dict[MediaKind, int] = {}
        if family.has_vision:
            self._token_ids["image"] = family.image_token_id(hf_config)
        if family.video != "none":
            self._token_ids["video"] = family.video_token_id(hf_config)
            self._vision_tokens = (int(hf_config.vision_start_token_id), int(hf_config.vision_end_token_id))
        self._has_timestamps = family.video == "timestamps"
        wrap = [[getattr(processors.tokenizer, f"{name}_id")] for name in family.image_wrap or ()]
        self._image_wrap = (wrap[0], wrap[1]) if wrap else ([], [])
        self._tokenize = tokenize

    def count(self, token_ids: Sequence[int], kind: MediaKind) -> int:
        """Return the number of placeholders of images, or of videos, in token ids."""
        placeholder = self._token_ids.get(kind)
        return 0 if placeholder is None else token_ids.count(placeholder)

    def expand(
        self, template_ids: Sequence[int], kind: MediaKind, sizes: Sequence[MediaSize]
    ) -> tuple[list[int], list[list[int]]]:
        """Return token ids with expanded placeholders, and the tokens of each image or video.

        template_ids: with one placeholder for each size.
        """
        placeholder = self._token_ids.get(kind)
        expanded = [self._tokens_of(size) for size in sizes]
        remaining = iter(expanded)
        token_ids: list[int] = []
        for token_id in template_ids:
            token_ids.extend(next(remaining) if token_id == placeholder else [token_id])
        return token_ids, expanded

    def processed_sizes(self, sizes: Sequence[MediaSize]) -> ImageSizes:
        """Return (width, height) of each image after processing; nothing for videos."""
        processor = self.image_processor
        return tuple(
            processor.processed_size(*size)
            for size in sizes
            if processor is not None and not isinstance(size, VideoLayout)
        )

    def _tokens_of(self, size: MediaSize) -> list[int]:
        """Return the tokens that replace the placeholder of an image or a video."""
        if not isinstance(size, VideoLayout):
            assert self.image_processor is not None
            before, after = self._image_wrap
            return [*before, *[self._token_ids["image"]] * self.image_processor.image_tokens(*size), *after]
        assert self.video_processor is not None
        patch = [self._token_ids["video"]] * self.video_processor.patch_tokens(size)
        if not self._has_timestamps:
            return patch * size.num_patches
        # Qwen3-VL: each temporal patch follows its time, and is between the start and end tokens of
        # an image.
        start, end = self._vision_tokens
        ids: list[int] = []
        for first in range(0, len(size.seconds), FRAMES_PER_PATCH):
            middle = (size.seconds[first] + size.seconds[first + FRAMES_PER_PATCH - 1]) / 2
            ids += [*self._tokenize(f"<{middle:.1f} seconds>"), start, *patch, end]
        return ids
