"""Images and videos as a model takes them: pixel values, and the tokens that stand for them.

Hugging Face's image and video processors make the pixel values. A chat template writes one
placeholder for each image or video, which is replaced by as many tokens as the model needs. Token
counts are computed from sizes alone. Decoding is in images.py and videos.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from math import ceil, prod
from typing import TYPE_CHECKING, Any, assert_never

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
    """The Hugging Face image processor of a model. Safe to use from several threads.

    This class itself is for models that take the patches of images of any size.
    """

    _merging = "merge_size"
    """The attribute of the processor with the side, in patches, of what becomes a token."""

    def __init__(self, processors: Processors) -> None:
        """Read the sizes of a model.

        Raises: ModelError if its image processor makes other pixel values than the model takes.
        """
        self._family, self._config = processors.family, processors.hf_config
        self._image_processor: Any = processors.image_processor
        self._patch_size = self._family.patch_size(self._config)
        # The side of a token, or of a tile, in patches and in pixels.
        self._patches = self._family.patches_per_side(self._config)
        self._pixels = self._patches * self._patch_size
        self._check()

    def _check(self) -> None:
        """Raise ModelError if the processor makes other pixel values than the model takes."""
        found = (self._image_processor.patch_size, getattr(self._image_processor, self._merging))
        if found != (self._patch_size, self._patches):
            raise ModelError(
                f"the image processor has patch_size, {self._merging} = {found}, the model "
                f"{(self._patch_size, self._patches)}: correct preprocessor_config.json or config.json"
            )

    def processed_size(self, width: int, height: int) -> tuple[int, int]:
        """Return (width, height) to which an image of this size is resized."""
        size = self._image_processor.size
        return _resized(width, height, side=self._pixels, size=size, num_frames=self._family.frames_per_image)

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """Return (tiles, rows, columns) of an image of this size in patches, as Vision.grid_thw."""
        columns, rows = self.processed_size(width, height)
        return 1, rows // self._patch_size, columns // self._patch_size

    def image_tokens(self, width: int, height: int) -> int:
        """Return how many prompt tokens an image of this size takes."""
        grid = torch.tensor([self.grid(width, height)])
        [count] = self._family.count_image_tokens(self._config, grid, ((width, height),))
        return count

    def runs(self, width: int, height: int) -> tuple[int, int, int]:
        """Return the tokens of a run of placeholders, and the rows and columns of runs of an image.

        The arguments of an ImageLayout: all tokens of an image are one run where there is none.
        """
        return self.image_tokens(width, height), 1, 1

    def tokens_of(self, vision: Vision) -> tuple[int, ...]:
        """Return how many prompt tokens each processed image takes."""
        return tuple(self._family.count_image_tokens(self._config, vision.grid_thw, vision.original_sizes))

    def process(self, images: Iterable[Image.Image]) -> Vision:
        """Return the pixel values of upright RGB images, at least one, in order.

        They are taken and processed one by one, so that one is in memory at full size.
        """
        pixel_values, grids, sizes = [], [], []
        for image in images:
            pixels, grid = self._process_image(image)
            pixel_values.append(pixels.to(torch.float32).contiguous())
            grids.append(grid)
            sizes.append(image.size)
            del image  # before the next one is decoded
        grid_thw = torch.tensor(grids)
        if self._family.tile_assembly is None:  # otherwise the features of an image depend on its size
            sizes = []
        facts = map(str, sizes) if sizes else repeat("")
        return Vision(
            pixel_values=_joined(pixel_values),
            grid_thw=grid_thw,
            hashes=tuple(map(_content_hash, pixel_values, grid_thw, facts)),
            original_sizes=tuple(sizes),
        )

    def _process_image(self, image: Image.Image) -> tuple[torch.Tensor, Sequence[int]]:
        """Return the pixel values of an image, [patches, D], and its grid."""
        features = self._features(image)
        return features["pixel_values"], features["image_grid_thw"][0].tolist()

    def _features(self, image: Image.Image, **options: Any) -> Any:
        """Return what the Hugging Face processor makes of an image."""
        # Explicit, since an image that is 1 or 3 pixels wide would be taken for channels last.
        return self._image_processor(images=[image], return_tensors="pt", input_data_format="channels_first", **options)


class WholeImageProcessor(ImageProcessor):
    """An image processor that limits the longest edge of an image, and rounds sides to tokens."""

    def _check(self) -> None:
        """Raise ModelError if so small an edge is allowed that a long image would have no rows."""
        longest = self._image_processor.size["longest_edge"]
        if longest < MAX_ASPECT_RATIO:
            raise ModelError(
                f"the image processor has size.longest_edge={longest}, to which a long image cannot be reduced: set at "
                f"least {MAX_ASPECT_RATIO} in preprocessor_config.json"
            )

    def runs(self, width: int, height: int) -> tuple[int, int, int]:
        """See ImageProcessor: a row of tokens is a run."""
        columns, rows = self.processed_size(width, height)
        return columns // self._pixels, rows // self._pixels, 1

    def processed_size(self, width: int, height: int) -> tuple[int, int]:
        """See ImageProcessor."""
        from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

        rows, columns = get_resize_output_image_size(
            np.broadcast_to(np.uint8(0), (height, width, 3)),
            size=self._image_processor.size["longest_edge"],
            patch_size=self._pixels,
            input_data_format="channels_last",
        )
        return columns, rows

    def _process_image(self, image: Image.Image) -> tuple[torch.Tensor, Sequence[int]]:
        """See ImageProcessor."""
        pixels = self._features(image, patch_size=self._pixels)["pixel_values"]
        grid = [1, *(side // self._patch_size for side in pixels.shape[2:])]
        return to_patches(pixels, self._patch_size), grid


class TileProcessor(ImageProcessor):
    """An image processor that cuts an image into one or several tiles of a fixed size.

    Of several, one more shows the whole image.
    """

    def _check(self) -> None:
        """Raise ModelError if the processor makes tiles of another size."""
        width, height = self._tile_size()
        if (width, height) != (self._pixels, self._pixels):
            raise ModelError(
                f"the image processor makes tiles of {width} x {height} pixels, "
                f"the model takes {self._pixels} x {self._pixels}: correct preprocessor_config.json or config.json"
            )
        if getattr(self._image_processor, "do_pan_and_scan", None):
            raise ModelError(
                "the image processor has do_pan_and_scan = true, by which an image becomes several with text between "
                "them, which is not supported: set it to false in preprocessor_config.json"
            )
        # The model's processor passes this option to its image processor, whose own config has
        # another value.
        self._options = {"crop_to_patches": True} if hasattr(self._image_processor, "crop_to_patches") else {}

    def _tile_size(self) -> tuple[int, int]:
        """Return (width, height) of the tiles that the Hugging Face processor makes."""
        cropped = getattr(self._image_processor, "do_center_crop", False)
        size = self._image_processor.crop_size if cropped else self._image_processor.size
        return size["width"], size["height"]

    def processed_size(self, width: int, height: int) -> tuple[int, int]:
        """See ImageProcessor: the size that is cut into tiles, or what a centre crop leaves."""
        if not self._options:
            return self._pixels, self._pixels
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

        limits = self._image_processor.min_patches, self._image_processor.max_patches
        columns, rows = get_optimal_tiled_canvas((height, width), (self._pixels, self._pixels), *limits)
        return columns * self._pixels, rows * self._pixels

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """See ImageProcessor."""
        columns, rows = self.processed_size(width, height)
        tiles = (columns // self._pixels) * (rows // self._pixels)
        return tiles + (tiles > 1), self._patches, self._patches

    def _process_image(self, image: Image.Image) -> tuple[torch.Tensor, Sequence[int]]:
        """See ImageProcessor."""
        # [tiles, ...], or [1, tiles, ...] for Idefics 3, which nests the images of a prompt.
        tiles = self._features(image, **self._options)["pixel_values"].flatten(0, -4)
        return to_patches(tiles, self._patch_size), [len(tiles), self._patches, self._patches]


class SplitTileProcessor(TileProcessor):
    """A processor that cuts an image into rows and columns of tiles, and adds a view of it all."""

    def _check(self) -> None:
        """Raise ModelError if the processor makes tiles of another size, or tiles of zeros."""
        super()._check()
        means = self._image_processor.image_mean
        if not self._image_processor.do_normalize or all(float(255 * mean).is_integer() for mean in means):
            raise ModelError(
                f"the image processor normalizes by image_mean={means}, so that a tile of one colour can become zeros, "
                "which transformers and vLLM take for padding: correct preprocessor_config.json"
            )

    def _tile_size(self) -> tuple[int, int]:
        """See TileProcessor."""
        side = self._image_processor.max_image_size["longest_edge"]
        return side, side

    def runs(self, width: int, height: int) -> tuple[int, int, int]:
        """See ImageProcessor: each tile is a run; 0 rows and columns if the image is one tile."""
        from transformers.models.idefics3 import image_processing_pil_idefics3 as idefics3

        processor, tile = self._image_processor, self._pixels
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
        return self._patches**2 // self._family.spatial_merge(self._config) ** 2, rows, columns

    def processed_size(self, width: int, height: int) -> tuple[int, int]:
        """See ImageProcessor: the size that is cut into tiles."""
        _, rows, columns = self.runs(width, height)
        return max(columns, 1) * self._pixels, max(rows, 1) * self._pixels


class AssembledTileProcessor(TileProcessor):
    """A processor that resizes and pads an image to one of several shapes, and cuts it into tiles.

    The first tile shows the whole image.
    """

    def _check(self) -> None:
        """Raise ModelError if the processor makes other tiles, or chooses from other shapes."""
        super()._check()
        self._shapes = [list(shape) for shape in self._config.image_grid_pinpoints]  # (height, width) in pixels
        others = [list(shape) for shape in self._image_processor.image_grid_pinpoints]
        if others != self._shapes:
            raise ModelError(
                f"the image processor has image_grid_pinpoints = {others}, the model {self._shapes}: correct "
                "preprocessor_config.json or config.json"
            )

    def processed_size(self, width: int, height: int) -> tuple[int, int]:
        """See ImageProcessor: the size before padding."""
        from transformers.image_processing_utils import get_patch_output_size

        image = np.broadcast_to(np.uint8(0), (height, width, 3))
        rows, columns = get_patch_output_size(image, self._best_shape(width, height), "channels_last")
        return columns, rows

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """See ImageProcessor."""
        rows, columns = self._best_shape(width, height)
        return 1 + (rows // self._pixels) * (columns // self._pixels), self._patches, self._patches

    def _best_shape(self, width: int, height: int) -> tuple[int, int]:
        """Return (height, width) of the padded image, before it is cut."""
        from transformers.image_processing_utils import select_best_resolution

        best_height, best_width = select_best_resolution((height, width), self._shapes)
        return best_height, best_width


class PooledProcessor(ImageProcessor):
    """An image processor that enlarges or shrinks an image to about a number of tokens.

    The model averages squares of patches.
    """

    _merging = "pooling_kernel_size"

    def processed_size(self, width: int, height: int) -> tuple[int, int]:
        """See ImageProcessor."""
        from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

        rows, columns = get_aspect_ratio_preserving_size(
            height,
            width,
            patch_size=self._patch_size,
            max_patches=self._image_processor.max_soft_tokens * self._patches**2,
            pooling_kernel_size=self._patches,
        )
        return columns, rows

    def _process_image(self, image: Image.Image) -> tuple[torch.Tensor, Sequence[int]]:
        """See ImageProcessor."""
        grid = self.grid(*image.size)
        return self._features(image)["pixel_values"][0, : prod(grid)], grid  # without padding


class VideoProcessor:
    """The Hugging Face video processor of a model. Safe to use from several threads.

    Each frame has the pixel limits of an image. Frames are processed in pairs, one temporal patch
    at a time, so that at most two frames are in memory at full size.
    """

    def __init__(self, processors: Processors) -> None:
        """Read the sizes of a model.

        Raises: ModelError if its processor merges another number of patches or frames.
        """
        family, hf_config = processors.family, processors.hf_config
        images, videos = processors.image_processor, processors.video_processor
        assert images is not None
        assert videos is not None
        self._video_processor = videos
        self._merge, self._patch_size = family.spatial_merge(hf_config), family.patch_size(hf_config)
        merge, temporal = videos.merge_size, videos.temporal_patch_size
        if (merge, temporal) != (self._merge, FRAMES_PER_PATCH):
            raise ModelError(
                f"the video processor merges {merge} x {merge} patches of {temporal} frames, the model {self._merge} "
                f"x {self._merge} of {FRAMES_PER_PATCH}: correct video_preprocessor_config.json or config.json"
            )
        # The limits of Qwen3-VL's processor apply to all of its frames together.
        self._num_frames = FRAMES_PER_PATCH if family.video == "timestamps" else 1
        self._size = {edge: self._num_frames * images.size[edge] for edge in ("shortest_edge", "longest_edge")}

    def grid(self, layout: VideoLayout) -> tuple[int, int, int]:
        """Return (temporal patches, rows, columns) of a video, in patches, without decoding it."""
        side = self._merge * self._patch_size
        columns, rows = _resized(layout.width, layout.height, side=side, size=self._size, num_frames=self._num_frames)
        return layout.num_patches, rows // self._patch_size, columns // self._patch_size

    def patch_tokens(self, layout: VideoLayout) -> int:
        """Return how many prompt tokens a temporal patch of this video takes."""
        _, rows, columns = self.grid(layout)
        return rows * columns // self._merge**2

    def tokens_of(self, vision: Vision) -> tuple[int, ...]:
        """Return how many prompt tokens each processed video takes."""
        return tuple((vision.grid_thw.prod(dim=1) // self._merge**2).tolist())

    def process(self, videos: Iterable[tuple[VideoLayout, Iterator[Pixels]]]) -> Vision:
        """Return the pixel values of videos, at least one, in order.

        Raises: as the frame iterators.
        """
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
            hashes=tuple(map(_content_hash, pixel_values, grid_thw, (f"{each!r} seconds" for each in seconds))),
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
    """Return the image processor of a model, or None. Raises: as ImageProcessor."""
    family = processors.family
    if not family.has_vision:
        return None
    match family.vision_input:
        case "patches":
            return ImageProcessor(processors)
        case "images":
            return WholeImageProcessor(processors)
        case "pooled":
            return PooledProcessor(processors)
        case "tiles" if family.tile_assembly is not None:
            return AssembledTileProcessor(processors)
        case "tiles":
            return TileProcessor(processors) if family.image_layout is None else SplitTileProcessor(processors)
        case _:
            assert_never(family.vision_input)


def video_processor_of(processors: Processors) -> VideoProcessor | None:
    """Return the video processor of a model, or None. Raises: as VideoProcessor."""
    return None if processors.video_processor is None else VideoProcessor(processors)


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

    def grids(self, sizes: Sequence[MediaSize]) -> tuple[tuple[int, int, int], ...]:
        """Return the grid of each image or video, in patches, without processing it."""
        return tuple(map(self._grid_of, sizes))

    def _grid_of(self, size: MediaSize) -> tuple[int, int, int]:
        if isinstance(size, VideoLayout):
            assert self.video_processor is not None
            return self.video_processor.grid(size)
        assert self.image_processor is not None
        return self.image_processor.grid(*size)

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


def _resized(width: int, height: int, *, side: int, size: Mapping[str, int], num_frames: int) -> tuple[int, int]:
    """Return (width, height) to which the processors of Qwen and GLM resize an image or a frame.

    side: of a token, in pixels. size: the limits of pixels, of num_frames of such frames together.
    """
    from transformers.models.glm4v import image_processing_glm4v as of_frames
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as of_images

    limits = {"factor": side, "min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    if num_frames == 1:
        rows, columns = of_images.smart_resize(height, width, **limits)
    else:
        rows, columns = of_frames.smart_resize(num_frames, height, width, temporal_factor=num_frames, **limits)
    return columns, rows


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors one after the other; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _content_hash(patches: torch.Tensor, grid: torch.Tensor, facts: str) -> str:
    """Return the SHA-256 of grid, pixel values and further facts, in hexadecimal."""
    digest = hashlib.sha256(grid.numpy().tobytes() + facts.encode())
    digest.update(patches.numpy().data)
    return digest.hexdigest()
