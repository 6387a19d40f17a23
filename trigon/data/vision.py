"""Images and videos as a model takes them: pixel values, and the tokens that stand for them.

Hugging Face's image and video processors make the pixel values. A chat template writes one
placeholder for each image or video, which is replaced by as many tokens as the model needs.
Every call is counted, so that tests can check that each prompt is processed once. Token counts are
computed from sizes alone. Decoding is in images.py and videos.py.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import ceil, isqrt, log, prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trigon.data.images import MAX_ASPECT_RATIO, reserve_frames
from trigon.data.videos import FRAMES_PER_PATCH, Pixels, VideoLayout
from trigon.errors import ModelError
from trigon.models.tiles import to_patches
from trigon.types import ImageSizes, MediaKind, Vision

if TYPE_CHECKING:
    from PIL import Image

    from trigon.models.load import Processors


MediaSize = tuple[int, int] | VideoLayout
"""What the number of tokens depends on: an image's (width, height), or a video's layout."""


class ImageProcessor:
    """A Hugging Face image processor that counts its calls. Safe to use from several threads."""

    def __init__(self, image_processor: Any, *, spatial_merge: int, frames_per_image: int = 1) -> None:
        """Wrap image_processor.

        spatial_merge: the model merges spatial_merge x spatial_merge patches into one token.
        frames_per_image: how many frames an image counts as in the processor's limits of pixels.
        Raises: ModelError if the processor merges another number of patches.
        """
        if image_processor.merge_size != spatial_merge:
            merge = image_processor.merge_size
            raise ModelError(
                f"the image processor merges {merge} x {merge} patches, the model {spatial_merge} x {spatial_merge}: "
                "correct preprocessor_config.json or config.json"
            )
        self._wrap(image_processor, spatial_merge)
        self._frames_per_image = frames_per_image

    def _wrap(self, image_processor: Any, spatial_merge: int) -> None:
        """Set what all image processors have."""
        self._image_processor = image_processor
        self._patches_per_token = spatial_merge**2
        self._lock = threading.Lock()
        self._calls = 0

    @property
    def calls(self) -> int:
        """For how many prompts images were processed."""
        return self._calls

    def image_tokens(self, width: int, height: int) -> int:
        """Return how many prompt tokens an image of this size takes."""
        patches: int = self._image_processor.get_number_of_image_patches(height, width)
        return patches // self._patches_per_token

    def runs(self, width: int, height: int) -> tuple[int, int, int]:
        """Return the tokens of a run of placeholders, and the rows and columns of runs of an image.

        The arguments of an ImageLayout: all tokens of an image are one run where there is none.
        """
        return self.image_tokens(width, height), 1, 1

    def processed_size(self, width: int, height: int) -> tuple[int, int]:
        """Return (width, height) to which an image of this size is resized."""
        from transformers.models.glm4v import image_processing_glm4v as of_frames
        from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as of_images

        processor, frames = self._image_processor, self._frames_per_image
        limits = {
            "factor": processor.patch_size * processor.merge_size,
            "min_pixels": processor.size["shortest_edge"],
            "max_pixels": processor.size["longest_edge"],
        }
        if frames == 1:
            rows, columns = of_images.smart_resize(height, width, **limits)
        else:
            rows, columns = of_frames.smart_resize(frames, height, width, temporal_factor=frames, **limits)
        return columns, rows

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """Return (1, rows, columns) of an image of this size, in patches, without processing it."""
        columns, rows = self.processed_size(width, height)
        return 1, rows // self._image_processor.patch_size, columns // self._image_processor.patch_size

    def tokens_of(self, vision: Vision) -> tuple[int, ...]:
        """Return how many prompt tokens each processed image takes."""
        return tuple((vision.grid_thw.prod(dim=1) // self._patches_per_token).tolist())

    def process(self, images: Iterable[Image.Image]) -> Vision:
        """Return the pixel values of upright RGB images, at least one, in order.

        They are taken and processed one by one, so that one is in memory at full size.
        """
        pixel_values, grids = [], []
        for image in images:
            pixels, grid = self._process_image(image)
            pixel_values.append(pixels.contiguous())
            grids.append(grid)
            del image  # before the next one is decoded
        with self._lock:
            self._calls += 1
        grid_thw = torch.cat(grids)
        hashes = tuple(_content_hash(part, grid) for part, grid in zip(pixel_values, grid_thw, strict=True))
        return Vision(pixel_values=_joined(pixel_values), grid_thw=grid_thw, hashes=hashes)

    def _process_image(self, image: Image.Image) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pixel values of an image, [patches, D] float32, and its grid, [1, 3] int64."""
        # Explicit, since an image that is 1 or 3 pixels wide would be taken for channels last.
        features = self._image_processor(images=[image], return_tensors="pt", input_data_format="channels_first")
        return features["pixel_values"].to(torch.float32), features["image_grid_thw"].to(torch.int64)


class WholeImageProcessor(ImageProcessor):
    """An image processor that limits the longest edge of an image, and rounds sides to tokens."""

    def __init__(self, image_processor: Any, *, patch_size: int, spatial_merge: int) -> None:
        """Wrap image_processor for a model that merges spatial_merge x spatial_merge patches.

        Raises: ModelError if so small an edge is allowed that a long image would have no rows.
        """
        longest = image_processor.size["longest_edge"]
        if longest < MAX_ASPECT_RATIO:
            raise ModelError(
                f"the image processor has size.longest_edge={longest}, to which a long image cannot be reduced: set at "
                f"least {MAX_ASPECT_RATIO} in preprocessor_config.json"
            )
        self._wrap(image_processor, spatial_merge)
        self._patch_size = patch_size
        self._side = patch_size * spatial_merge  # of a token, in pixels

    def image_tokens(self, width: int, height: int) -> int:
        """See ImageProcessor."""
        return prod(self.runs(width, height))

    def runs(self, width: int, height: int) -> tuple[int, int, int]:
        """See ImageProcessor: a row of tokens is a run."""
        columns, rows = self.processed_size(width, height)
        return columns // self._side, rows // self._side, 1

    def processed_size(self, width: int, height: int) -> tuple[int, int]:
        """See ImageProcessor."""
        from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

        rows, columns = get_resize_output_image_size(
            np.broadcast_to(np.uint8(0), (height, width, 3)),
            size=self._image_processor.size["longest_edge"],
            patch_size=self._side,
            input_data_format="channels_last",
        )
        return columns, rows

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """See ImageProcessor."""
        columns, rows = self.processed_size(width, height)
        return 1, rows // self._patch_size, columns // self._patch_size

    def _process_image(self, image: Image.Image) -> tuple[torch.Tensor, torch.Tensor]:
        """See ImageProcessor."""
        features = self._image_processor(
            images=[image], patch_size=self._side, return_tensors="pt", input_data_format="channels_first"
        )
        pixels = features["pixel_values"].to(torch.float32)
        grid = [1, *(side // self._patch_size for side in pixels.shape[2:])]
        return to_patches(pixels, self._patch_size), torch.tensor([grid])


class TileProcessor(ImageProcessor):
    """An image processor that cuts an image into one or several tiles of a fixed size."""

    _keeps_sizes = False
    """Whether the features of an image depend on its size before it was processed."""

    def __init__(self, image_processor: Any, *, patch_size: int, patches_per_side: int, spatial_merge: int) -> None:
        """Wrap image_processor for a model with tiles of a fixed size.

        A tile has patches_per_side x patches_per_side patches.
        Raises: ModelError if the processor makes tiles of another size.
        """
        width, height = self._tile_size(image_processor)
        side = patch_size * patches_per_side
        if (width, height) != (side, side):
            raise ModelError(
                f"the image processor makes tiles of {width} x {height} pixels, "
                f"the model takes {side} x {side}: correct preprocessor_config.json or config.json"
            )
        if getattr(image_processor, "do_pan_and_scan", None):
            raise ModelError(
                "the image processor has do_pan_and_scan = true, by which an image becomes several with text between "
                "them, which is not supported: set it to false in preprocessor_config.json"
            )
        # The model's processor passes this option to its image processor, whose own config has
        # another value.
        self._options = {"crop_to_patches": True} if hasattr(image_processor, "crop_to_patches") else {}
        self._wrap(image_processor, spatial_merge)
        self._patch_size = patch_size
        self._side = patches_per_side

    @staticmethod
    def _tile_size(image_processor: Any) -> tuple[int, int]:
        """Return (width, height) of the tiles that the Hugging Face processor makes."""
        cropped = getattr(image_processor, "do_center_crop", False)
        size = image_processor.crop_size if cropped else image_processor.size
        return size["width"], size["height"]

    def image_tokens(self, width: int, height: int) -> int:
        """See ImageProcessor."""
        tiles: int = 1
        if self._options:
            tiles = self._image_processor.get_number_of_image_patches(height, width, dict(self._options))
        return tiles * self._side**2 // self._patches_per_token

    def processed_size(self, width: int, height: int) -> tuple[int, int]:
        """See ImageProcessor: the size that is cut into tiles, or what a centre crop leaves."""
        side = self._side * self._patch_size
        if not self._options:
            return side, side
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

        processor = self._image_processor
        limits = processor.min_patches, processor.max_patches
        columns, rows = get_optimal_tiled_canvas((height, width), (side, side), *limits)
        return columns * side, rows * side

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """Return (tiles, rows, columns) of an image of this size. See ImageProcessor."""
        tiles = self.image_tokens(width, height) * self._patches_per_token // self._side**2
        return tiles, self._side, self._side

    def process(self, images: Iterable[Image.Image]) -> Vision:
        """See ImageProcessor."""
        parts, sizes = [], []
        for image in images:
            features = self._image_processor(
                images=[image], return_tensors="pt", input_data_format="channels_first", **self._options
            )
            # [tiles, ...], or [1, tiles, ...] for Idefics 3, which nests the images of a prompt.
            parts.append(features["pixel_values"].flatten(0, -4).to(torch.float32))
            sizes.append(image.size)
            del image  # before the next one is decoded
        with self._lock:
            self._calls += 1
        tiles = _joined(parts)
        return Vision(
            pixel_values=to_patches(tiles, self._patch_size).contiguous(),
            grid_thw=torch.tensor([(len(part), self._side, self._side) for part in parts]),
            hashes=tuple(
                _content_hash(part.contiguous(), torch.tensor((*part.shape, *(size if self._keeps_sizes else ()))))
                for part, size in zip(parts, sizes, strict=True)
            ),
            original_sizes=tuple(sizes) if self._keeps_sizes else (),
        )


class SplitTileProcessor(TileProcessor):
    """A processor that cuts an image into rows and columns of tiles, and adds a view of it all."""

    def __init__(self, image_processor: Any, *, patch_size: int, patches_per_side: int, spatial_merge: int) -> None:
        """Wrap image_processor; see TileProcessor.

        Raises: ModelError if the processor makes tiles of another size, or tiles of zeros.
        """
        super().__init__(
            image_processor, patch_size=patch_size, patches_per_side=patches_per_side, spatial_merge=spatial_merge
        )
        means = image_processor.image_mean
        if not image_processor.do_normalize or all(float(255 * mean).is_integer() for mean in means):
            raise ModelError(
                f"the image processor normalizes by image_mean={means}, so that a tile of one colour can become zeros, "
                "which transformers and vLLM take for padding: correct preprocessor_config.json"
            )

    @staticmethod
    def _tile_size(image_processor: Any) -> tuple[int, int]:
        """See TileProcessor."""
        side = image_processor.max_image_size["longest_edge"]
        return side, side

    def image_tokens(self, width: int, height: int) -> int:
        """See ImageProcessor."""
        tile_tokens, rows, columns = self.runs(width, height)
        return tile_tokens * (rows * columns + 1)

    def runs(self, width: int, height: int) -> tuple[int, int, int]:
        """See ImageProcessor: each tile is a run; 0 rows and columns if the image is one tile."""
        from transformers.models.idefics3 import image_processing_pil_idefics3 as idefics3

        processor, tile = self._image_processor, self._side * self._patch_size
        rows = columns = 0
        if processor.do_image_splitting:
            # As the processor resizes an image; its get_number_of_image_patches rounds otherwise.
            if processor.do_resize:
                longest = processor.size["longest_edge"]
                height, width = idefics3._resize_output_size_rescale_to_max_len(height, width, max_len=longest)
                height, width = idefics3._resize_output_size_scale_below_upper_bound(
                    height, width, max_len=idefics3.MAX_IMAGE_SIZE
                )
            aspect_ratio = width / height
            if width >= height:
                columns = ceil(width / tile)
                rows = ceil(int(columns * tile / aspect_ratio) / tile)
            else:
                rows = ceil(height / tile)
                columns = ceil(int(rows * tile * aspect_ratio) / tile)
            if rows == columns == 1:
                rows = columns = 0
        return self._side**2 // self._patches_per_token, rows, columns

    def processed_size(self, width: int, height: int) -> tuple[int, int]:
        """See ImageProcessor: the size that is cut into tiles."""
        _, rows, columns = self.runs(width, height)
        tile = self._side * self._patch_size
        return max(columns, 1) * tile, max(rows, 1) * tile


class AssembledTileProcessor(TileProcessor):
    """A processor that resizes and pads an image to one of several shapes, and cuts it into tiles.

    The first tile shows the whole image.
    """

    _keeps_sizes = True

    def __init__(
        self,
        image_processor: Any,
        *,
        patch_size: int,
        patches_per_side: int,
        shapes: Sequence[Sequence[int]],
        count_tokens: Callable[[int, tuple[int, int]], int],
    ) -> None:
        """Wrap image_processor for a model that does not merge patches; see TileProcessor.

        shapes: (height, width) in pixels, of the model's config.
        count_tokens: returns the tokens of an image, given the number of its tiles and its size.
        Raises: ModelError if the processor makes tiles of another size, or chooses from other
        shapes.
        """
        super().__init__(image_processor, patch_size=patch_size, patches_per_side=patches_per_side, spatial_merge=1)
        self._shapes = [list(shape) for shape in shapes]
        others = [list(shape) for shape in image_processor.image_grid_pinpoints]
        if others != self._shapes:
            raise ModelError(
                f"the image processor has image_grid_pinpoints = {others}, the model {self._shapes}: correct "
                "preprocessor_config.json or config.json"
            )
        self._count_tokens = count_tokens

    def image_tokens(self, width: int, height: int) -> int:
        """See ImageProcessor."""
        tiles, _, _ = self.grid(width, height)
        return self._count_tokens(tiles, (width, height))

    def processed_size(self, width: int, height: int) -> tuple[int, int]:
        """See ImageProcessor: the size before padding."""
        from transformers.image_processing_utils import get_patch_output_size

        image = np.broadcast_to(np.uint8(0), (height, width, 3))
        rows, columns = get_patch_output_size(image, self._best_shape(width, height), "channels_last")
        return columns, rows

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """See ImageProcessor."""
        rows, columns = self._best_shape(width, height)
        tile = self._side * self._patch_size
        return 1 + (rows // tile) * (columns // tile), self._side, self._side

    def tokens_of(self, vision: Vision) -> tuple[int, ...]:
        """See ImageProcessor."""
        images = zip(vision.grid_thw[:, 0].tolist(), vision.original_sizes, strict=True)
        return tuple(self._count_tokens(tiles, size) for tiles, size in images)

    def _best_shape(self, width: int, height: int) -> tuple[int, int]:
        """Return (height, width) of the padded image, before it is cut."""
        from transformers.image_processing_utils import select_best_resolution

        best_height, best_width = select_best_resolution((height, width), self._shapes)
        return best_height, best_width


class PooledProcessor(ImageProcessor):
    """An image processor that enlarges or shrinks an image to about a number of tokens."""

    def __init__(self, image_processor: Any, *, patch_size: int, spatial_merge: int) -> None:
        """Wrap image_processor for a model that averages spatial_merge x spatial_merge patches.

        Raises: ModelError if the processor has other sizes.
        """
        found = (image_processor.patch_size, image_processor.pooling_kernel_size)
        if found != (patch_size, spatial_merge):
            raise ModelError(
                f"the image processor has patch_size, pooling_kernel_size = {found}, "
                f"the model {(patch_size, spatial_merge)}: correct preprocessor_config.json or config.json"
            )
        self._wrap(image_processor, spatial_merge)

    def image_tokens(self, width: int, height: int) -> int:
        """See ImageProcessor."""
        return prod(self.grid(width, height)) // self._patches_per_token

    def processed_size(self, width: int, height: int) -> tuple[int, int]:
        """See ImageProcessor."""
        from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

        rows, columns = get_aspect_ratio_preserving_size(
            height,
            width,
            patch_size=self._image_processor.patch_size,
            max_patches=self._image_processor.max_soft_tokens * self._patches_per_token,
            pooling_kernel_size=self._image_processor.pooling_kernel_size,
        )
        return columns, rows

    def _process_image(self, image: Image.Image) -> tuple[torch.Tensor, torch.Tensor]:
        """See ImageProcessor."""
        features = self._image_processor(images=[image], return_tensors="pt", input_data_format="channels_first")
        grid = self.grid(*image.size)
        patches = features["pixel_values"][0, : prod(grid)].to(torch.float32)  # without padding
        return patches, torch.tensor([grid])


class VideoProcessor:
    """A Hugging Face video processor that counts its calls. Safe to use from several threads.

    Each frame has the pixel limits of an image. Frames are processed in pairs, one temporal patch
    at a time, so that at most two frames are in memory at full size.
    """

    def __init__(
        self, video_processor: Any, *, spatial_merge: int, frame_limits: tuple[int, int], limits_are_total: bool
    ) -> None:
        """Wrap video_processor.

        Args:
            frame_limits: least and most pixels of a frame; frames outside them are resized.
            limits_are_total: whether the processor's own limits apply to all frames together.
        Raises: ModelError if the processor merges another number of patches or frames.
        """
        merge, temporal = video_processor.merge_size, video_processor.temporal_patch_size
        if (merge, temporal) != (spatial_merge, FRAMES_PER_PATCH):
            raise ModelError(
                f"the video processor merges {merge} x {merge} patches of {temporal} frames, the model {spatial_merge} "
                f"x {spatial_merge} of {FRAMES_PER_PATCH}: correct video_preprocessor_config.json or config.json"
            )
        smallest, largest = (limit * (FRAMES_PER_PATCH if limits_are_total else 1) for limit in frame_limits)
        self._video_processor = video_processor
        self._size = {"shortest_edge": smallest, "longest_edge": largest}
        # transformers 5.16 computes the number of patches from the latter two.
        self._count_options = {"size": self._size, "min_pixels": smallest, "max_pixels": largest}
        self._patches_per_token = spatial_merge**2
        self._lock = threading.Lock()
        self._calls = 0

    @property
    def calls(self) -> int:
        """How often process was called: once per prompt with videos."""
        return self._calls

    def patch_tokens(self, layout: VideoLayout) -> int:
        """Return how many prompt tokens a temporal patch of this video takes."""
        patches: int = self._video_processor.get_num_of_video_patches(
            FRAMES_PER_PATCH, layout.height, layout.width, self._count_options
        )
        return patches // self._patches_per_token

    def grid(self, layout: VideoLayout) -> tuple[int, int, int]:
        """Return (temporal patches, rows, columns) of a video, in patches, without decoding it."""
        rows, columns = _nearest_grid(self.patch_tokens(layout), layout.width, layout.height, self._patches_per_token)
        return layout.num_patches, rows, columns

    def tokens_of(self, vision: Vision) -> tuple[int, ...]:
        """Return how many prompt tokens each processed video takes."""
        return tuple((vision.grid_thw.prod(dim=1) // self._patches_per_token).tolist())

    def process(self, videos: Iterable[tuple[VideoLayout, Iterator[Pixels]]]) -> Vision:
        """Return the pixel values of videos, at least one, in order.

        Raises: as the frame iterators.
        """
        with self._lock:
            self._calls += 1
        pixel_values, grids, seconds = [], [], []
        for layout, frames in videos:
            with reserve_frames(layout.width, layout.height):
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
        """Return pixel values [patches, D] float32 and grid [3] of a pair of frames.

        frames: [2, height, width, 3].
        """
        features = self._video_processor(
            videos=[frames],
            do_sample_frames=False,
            size=self._size,
            input_data_format="channels_last",
            return_tensors="pt",
        )
        return features["pixel_values_videos"].to(torch.float32).contiguous(), features["video_grid_thw"][0]


def image_processor_of(processors: Processors) -> ImageProcessor | None:
    """Return the image processor of a model, or None.

    Raises: as ImageProcessor.
    """
    if not processors.family.has_vision:
        return None
    family, config = processors.family, processors.hf_config
    if family.tile_assembly is not None:
        return AssembledTileProcessor(
            processors.image_processor,
            patch_size=family.patch_size(config),
            patches_per_side=family.patches_per_side(config),
            shapes=config.image_grid_pinpoints,
            count_tokens=partial(family.tile_assembly.num_tokens, config),
        )
    if family.tiles:
        kind = TileProcessor if family.image_layout is None else SplitTileProcessor
        return kind(
            processors.image_processor,
            patch_size=family.patch_size(config),
            patches_per_side=family.patches_per_side(config),
            spatial_merge=family.spatial_merge(config),
        )
    if not family.takes_patches:
        of_images = PooledProcessor if family.vision_input == "pooled" else WholeImageProcessor
        return of_images(
            processors.image_processor,
            patch_size=family.patch_size(config),
            spatial_merge=family.spatial_merge(config),
        )
    return ImageProcessor(
        processors.image_processor,
        spatial_merge=family.spatial_merge(config),
        frames_per_image=family.frames_per_image,
    )


def video_processor_of(processors: Processors) -> VideoProcessor | None:
    """Return the video processor of a model, or None.

    Raises: as VideoProcessor.
    """
    family = processors.family
    if processors.video_processor is None:
        return None
    assert processors.image_processor is not None
    size = processors.image_processor.size
    return VideoProcessor(
        processors.video_processor,
        spatial_merge=family.spatial_merge(processors.hf_config),
        frame_limits=(size["shortest_edge"], size["longest_edge"]),
        limits_are_total=family.video == "timestamps",
    )


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
        self._image_layout = family.image_layout
        self._tokenize = tokenize

    def count(self, token_ids: Sequence[int], kind: MediaKind) -> int:
        """Return the number of placeholders of images, or of videos, in token ids."""
        placeholder = self._token_ids.get(kind)
        return 0 if placeholder is None else token_ids.count(placeholder)

    def expand(
        self, template_ids: Sequence[int], kind: MediaKind, sizes: Sequence[MediaSize]
    ) -> tuple[list[int], list[list[int]]]:
        """Return token ids with expanded placeholders, and the tokens of each image or video.

        template_ids: token ids with one placeholder for each size.
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
        ids: list[int]
        if not isinstance(size, VideoLayout):
            assert self.image_processor is not None
            placeholder = self._token_ids["image"]
            if self._image_layout is not None:
                run_tokens, rows, columns = self.image_processor.runs(*size)
                ids = []
                for part in self._image_layout(run_tokens, rows, columns):
                    ids += [placeholder] * part if isinstance(part, int) else self._tokenize(part)
                return ids
            before, after = self._image_wrap
            return [*before, *[placeholder] * self.image_processor.image_tokens(*size), *after]
        assert self.video_processor is not None
        patch = [self._token_ids["video"]] * self.video_processor.patch_tokens(size)
        if not self._has_timestamps:
            return patch * size.num_patches
        # Qwen3-VL: each temporal patch follows its time, and is between the start and end tokens of
        # an image.
        start, end = self._vision_tokens
        ids = []
        for first in range(0, len(size.seconds), FRAMES_PER_PATCH):
            middle = (size.seconds[first] + size.seconds[first + FRAMES_PER_PATCH - 1]) / 2
            ids += [*self._tokenize(f"<{middle:.1f} seconds>"), start, *patch, end]
        return ids


def media_grids(
    sizes: Sequence[MediaSize], images: ImageProcessor | None, videos: VideoProcessor | None
) -> tuple[tuple[int, int, int], ...]:
    """Return the grid of each image (width, height) or video, in patches, without processing it."""
    grids = []
    for size in sizes:
        if isinstance(size, VideoLayout):
            assert videos is not None, "a video needs a video processor"
            grids.append(videos.grid(size))
        else:
            assert images is not None, "an image needs an image processor"
            grids.append(images.grid(*size))
    return tuple(grids)


def _nearest_grid(tokens: int, width: int, height: int, patches_per_token: int) -> tuple[int, int]:
    """Return (rows, columns) in patches of the nearest grid with this number of tokens.

    Processors keep the shape of an image as far as whole tokens allow, and return the number
    of patches only.
    """
    side = isqrt(patches_per_token)
    rows = [number for number in range(1, tokens + 1) if tokens % number == 0]
    best = min(rows, key=lambda number: abs(log(number * number * width / (tokens * height))))
    return best * side, tokens // best * side


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors one after the other; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _content_hash(patches: torch.Tensor, grid: torch.Tensor, seconds: float | None = None) -> str:
    """Return the SHA-256 of grid, pixel values and (of a video) times, in hexadecimal."""
    digest = hashlib.sha256(grid.numpy().tobytes())
    if seconds is not None:
        digest.update(f"{seconds!r} seconds".encode())
    digest.update(patches.numpy().data)
    return digest.hexdigest()
