"""From pictures to what a vision tower takes: the one pass through an image or video processor that a prompt pays for.

Knows Hugging Face processors of the Qwen kind (patches, grids, merging) and counts every call of them. Refuses to know
where a picture came from, files, rows and text.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trigon.data.videos import FRAMES_PER_PATCH, Pixels, VideoLayout
from trigon.errors import ModelError
from trigon.models.tiles import to_patches
from trigon.types import Vision

if TYPE_CHECKING:
    from PIL import Image

    from trigon.models.load import Processors


class ImageProcessor:
    """A Hugging Face image processor that counts its calls. Safe to use from several threads."""

    def __init__(self, image_processor: Any, *, spatial_merge: int) -> None:
        """Wrap image_processor for a model that merges spatial_merge x spatial_merge patches into one token.

        Raises: ModelError if processor and model disagree about that.
        """
        if image_processor.merge_size != spatial_merge:
            theirs = f"merges {image_processor.merge_size} x {image_processor.merge_size} patches"
            raise ModelError(
                f"the image processor {theirs}, the model {spatial_merge} x {spatial_merge}: mend their configs"
            )
        self._image_processor = image_processor
        self._patches_per_token = spatial_merge**2
        self._lock = threading.Lock()
        self._calls = 0

    @property
    def calls(self) -> int:
        """How often images have been processed: once for each prompt with images that got its pixels here."""
        return self._calls

    def image_tokens(self, width: int, height: int) -> int:
        """Return how many prompt tokens an image of this size takes, without touching a pixel."""
        patches: int = self._image_processor.get_number_of_image_patches(height, width)
        return patches // self._patches_per_token

    def tokens_of(self, vision: Vision) -> tuple[int, ...]:
        """Return how many prompt tokens each processed image takes."""
        return tuple((vision.grid_thw.prod(dim=1) // self._patches_per_token).tolist())

    def process(self, images: Sequence[Image.Image]) -> Vision:
        """Return upright RGB images, at least one, as one Vision, in order."""
        with self._lock:
            self._calls += 1
        # Named, because an image one or three pixels wide could pass for channels last.
        features = self._image_processor(images=list(images), return_tensors="pt", input_data_format="channels_first")
        pixel_values = features["pixel_values"].to(torch.float32).contiguous()
        grid_thw = features["image_grid_thw"].to(torch.int64)
        patches = pixel_values.split(grid_thw.prod(dim=1).tolist())
        hashes = tuple(_content_hash(part, grid) for part, grid in zip(patches, grid_thw, strict=True))
        return Vision(pixel_values=pixel_values, grid_thw=grid_thw, hashes=hashes)


class TileProcessor(ImageProcessor):
    """An image processor that makes tiles of one size, one or several of an image. Counts as ImageProcessor does."""

    def __init__(self, image_processor: Any, *, patch_size: int, patches_per_side: int, spatial_merge: int) -> None:
        """Wrap image_processor for a model whose tiles have patches_per_side x patches_per_side patches.

        Raises: ModelError if the two disagree about the size of a tile.
        """
        cropped = getattr(image_processor, "do_center_crop", False)
        size = image_processor.crop_size if cropped else image_processor.size
        side = patch_size * patches_per_side
        if (size["height"], size["width"]) != (side, side):
            raise ModelError(
                f"the image processor makes tiles of {size['width']} x {size['height']} pixels, "
                f"the model sees {side} x {side}: mend their configs"
            )
        # What such a model's processor asks of its image processor, whose own config says otherwise.
        self._options = {"crop_to_patches": True} if hasattr(image_processor, "crop_to_patches") else {}
        self._image_processor = image_processor
        self._patch_size = patch_size
        self._side = patches_per_side
        self._patches_per_token = spatial_merge**2
        self._lock = threading.Lock()
        self._calls = 0

    def image_tokens(self, width: int, height: int) -> int:
        """See ImageProcessor."""
        tiles: int = 1
        if self._options:
            tiles = self._image_processor.get_number_of_image_patches(height, width, dict(self._options))
        return tiles * self._side**2 // self._patches_per_token

    def process(self, images: Sequence[Image.Image]) -> Vision:
        """See ImageProcessor."""
        with self._lock:
            self._calls += 1
        features = self._image_processor(
            images=list(images), return_tensors="pt", input_data_format="channels_first", **self._options
        )
        tiles = features["pixel_values"].to(torch.float32)
        counts = [int(count) for count in features.get("num_patches", [1] * len(images))]
        return Vision(
            pixel_values=to_patches(tiles, self._patch_size).contiguous(),
            grid_thw=torch.tensor([(count, self._side, self._side) for count in counts]),
            hashes=tuple(_content_hash(part.contiguous(), torch.tensor(part.shape)) for part in tiles.split(counts)),
        )


class VideoProcessor:
    """A Hugging Face video processor that counts its calls. Safe to use from several threads.

    Frames keep to the pixel limits of images, each by itself. They are processed in the pairs that temporal patches
    merge, so that no more than one pair is held before it is resized.
    """

    def __init__(
        self, video_processor: Any, *, spatial_merge: int, frame_limits: tuple[int, int], counts_all: bool
    ) -> None:
        """Wrap video_processor for a model that merges spatial_merge x spatial_merge patches into one token.

        Args:
            frame_limits: least and most pixels of a frame, to which smaller ones are enlarged and larger ones reduced.
            counts_all: whether the processor's own limits are for all frames together.
        Raises: ModelError if processor and model disagree.
        """
        merge, temporal = video_processor.merge_size, video_processor.temporal_patch_size
        if (merge, temporal) != (spatial_merge, FRAMES_PER_PATCH):
            raise ModelError(
                f"the video processor merges {merge} x {merge} patches of {temporal} frames, the model {spatial_merge} "
                f"x {spatial_merge} of {FRAMES_PER_PATCH}: mend their configs"
            )
        smallest, largest = (limit * (FRAMES_PER_PATCH if counts_all else 1) for limit in frame_limits)
        self._video_processor = video_processor
        self._size = {"shortest_edge": smallest, "longest_edge": largest}
        # transformers 5.16 reads the latter two.
        self._counting = {"size": self._size, "min_pixels": smallest, "max_pixels": largest}
        self._patches_per_token = spatial_merge**2
        self._lock = threading.Lock()
        self._calls = 0

    @property
    def calls(self) -> int:
        """How often videos have been processed: once for each prompt with videos that got its pixels here."""
        return self._calls

    def patch_tokens(self, layout: VideoLayout) -> int:
        """Return how many prompt tokens a temporal patch of this video takes, without touching a pixel."""
        patches: int = self._video_processor.get_num_of_video_patches(
            FRAMES_PER_PATCH, layout.height, layout.width, self._counting
        )
        return patches // self._patches_per_token

    def tokens_of(self, vision: Vision) -> tuple[int, ...]:
        """Return how many prompt tokens each processed video takes."""
        return tuple((vision.grid_thw.prod(dim=1) // self._patches_per_token).tolist())

    def process(self, videos: Iterable[tuple[VideoLayout, Iterator[Pixels]]]) -> Vision:
        """Return videos, at least one, as one Vision, in order. Raises: what handing out their frames raises."""
        with self._lock:
            self._calls += 1
        pixel_values, grids, seconds = [], [], []
        for layout, frames in videos:
            pairs = [self._process_pair(np.stack(pair)) for pair in zip(frames, frames, strict=True)]
            assert len(pairs) == layout.num_patches
            pixel_values.append(torch.cat([patches for patches, _ in pairs]))
            _, height, width = pairs[0][1].tolist()
            grids.append((len(pairs), height, width))
            seconds.append(layout.temporal_patch_seconds)
        grid_thw = torch.tensor(grids, dtype=torch.int64)
        return Vision(
            pixel_values=torch.cat(pixel_values),
            grid_thw=grid_thw,
            hashes=tuple(
                _content_hash(part, grid, time)
                for part, grid, time in zip(pixel_values, grid_thw, seconds, strict=True)
            ),
            kind="video",
            temporal_patch_seconds=tuple(seconds),
        )

    def _process_pair(self, frames: Pixels) -> tuple[torch.Tensor, torch.Tensor]:
        """Return pixel values [patches, D] float32 and the grid [3] of two frames, [2, height, width, 3]."""
        features = self._video_processor(
            videos=[frames],
            do_sample_frames=False,
            size=self._size,
            input_data_format="channels_last",
            return_tensors="pt",
        )
        return features["pixel_values_videos"].to(torch.float32).contiguous(), features["video_grid_thw"][0]


def image_processor_of(processors: Processors) -> ImageProcessor | None:
    """Return the image processor of a model; None if it has no vision. Raises: as ImageProcessor."""
    if not processors.family.has_vision:
        return None
    family, config = processors.family, processors.hf_config
    if family.tiles:
        return TileProcessor(
            processors.image_processor,
            patch_size=family.patch_size(config),
            patches_per_side=family.patches_per_side(config),
            spatial_merge=family.spatial_merge(config),
        )
    return ImageProcessor(
        processors.image_processor, spatial_merge=processors.family.spatial_merge(processors.hf_config)
    )


def video_processor_of(processors: Processors) -> VideoProcessor | None:
    """Return the video processor of a model; None if it takes no videos. Raises: as VideoProcessor."""
    family = processors.family
    if processors.video_processor is None:
        return None
    assert processors.image_processor is not None
    size = processors.image_processor.size
    return VideoProcessor(
        processors.video_processor,
        spatial_merge=family.spatial_merge(processors.hf_config),
        frame_limits=(size["shortest_edge"], size["longest_edge"]),
        counts_all=family.video == "timestamps",
    )


def _content_hash(patches: torch.Tensor, grid: torch.Tensor, seconds: float | None = None) -> str:
    """Return the SHA-256 of shape and pixel values, and a video's pace, on which positions depend, in hexadecimal."""
    digest = hashlib.sha256(grid.numpy().tobytes())
    if seconds is not None:
        digest.update(f"{seconds!r} seconds".encode())
    digest.update(patches.numpy().data)
    return digest.hexdigest()
