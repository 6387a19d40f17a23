"""The features of the images and videos of a packed row, by a model's vision tower.

All images of a row are encoded together, or, with a cache, each by itself unless it is cached. With
sequence parallelism the ranks of a row encode some of its images each. A tower that is sharded over
ranks runs equally often on all of them: on empty images where a rank has fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, assert_never

import torch
from torch import Tensor, nn

from trigon.errors import ModelError
from trigon.models.attention import configured_kernel
from trigon.models.dtypes import compute_dtype
from trigon.models.families import ModelFamily
from trigon.models.features import VisionFeatureCache
from trigon.models.kernels import supports
from trigon.models.sequence_parallel import DealtImages, RowRanks, RowSlice, deal_images, send_features
from trigon.models.tiles import pad_patches, patch_positions, to_padded_images, to_tiles
from trigon.models.transfer import concatenated, to_device
from trigon.types import ImageSizes, PackedGroups, Vision


class VisionEncoder:
    """Runs the vision tower of a model.

    Args:
        cache: the cache of a frozen tower; then each image or video is encoded by itself, cached or
            not, so that its features are bit for bit the same in every row.
        all_reduce_max: returns the maximum of a number over all ranks, for the cache.
    """

    def __init__(
        self,
        model: Any,
        family: ModelFamily,
        *,
        cache: VisionFeatureCache | None = None,
        all_reduce_max: Callable[[int], int] = int,
    ) -> None:
        self._model = model
        self._family = family
        self._cache = cache
        self._all_reduce_max = all_reduce_max

    def encode_row(
        self, packed: PackedGroups, row: RowSlice, embeddings: Tensor, ranks: RowRanks | None
    ) -> tuple[Tensor, Tensor]:
        """Return the features of a row that has images, as far as this rank holds their tokens.

        Args: row: this rank's slice. embeddings: the embeddings of its tokens, for their dtype and
            device.
        Returns: [M, C], and [M] int64 on the CPU, the positions of their tokens in the slice. The
            columns are the D values of an embedding, and with deepstack as many for each of the
            first decoder layers.
        Raises: ModelError if the images do not match the placeholder tokens of the row.
        """
        tokens = self.image_tokens(packed)
        assert tokens is not None
        places = tokens.nonzero().flatten()
        if ranks is None:
            features = self._encode_all(packed.visions, embeddings.device)
            _require_features(packed, len(places), len(features))
            return features, places
        counts = self._family.count_image_tokens(self._model.config, *_grids_and_sizes(packed.visions))
        _require_features(packed, len(places), sum(counts))
        dealt = deal_images(packed.visions, places, row, ranks, counts=counts, by_hash=self._cache is not None)
        return send_features(self._encode_dealt(dealt, embeddings), dealt, ranks), dealt.places

    def image_tokens(self, packed: PackedGroups) -> Tensor | None:
        """Return which tokens of a row are placeholders: [T] bool on the CPU; None without any."""
        if not packed.visions:
            return None
        placeholders = torch.tensor(self._family.placeholder_token_ids(self._model.config))
        return torch.isin(packed.token_ids, placeholders)

    def run_without_images(self, embeddings: Tensor) -> Tensor:
        """Run the tower as often as other ranks do, and return the embeddings, with its gradient.

        The gradient is zero.
        """
        if self._cache is not None:
            self._run_dummy(self._all_reduce_max(0))
        elif self._family.has_vision:
            return embeddings + 0.0 * self._encode(*self._empty_image()).sum()
        return embeddings

    def clear_features(self) -> None:
        """Clear the cache, after the weights of the tower have changed."""
        if self._cache is not None:
            self._cache.clear()

    def _encode_dealt(self, dealt: DealtImages, embeddings: Tensor) -> Tensor:
        """Return the features of this rank's images, in the dtype of the embeddings.

        The tower of a rank without images runs as often as the towers of the other ranks.
        """
        if dealt.own:
            features = self._encode_all(dealt.own, embeddings.device)
        elif self._cache is None:
            features = self._encode(*self._empty_image())[:0]  # what is sent is empty, but its backward runs
        else:
            self._run_dummy(self._all_reduce_max(0))
            num_layers = len(self._vision_tower.deepstack_merger_list) if self._family.deepstack else 0
            features = embeddings.new_zeros(0, (1 + num_layers) * embeddings.shape[-1])
        return features.to(embeddings.dtype)

    def _encode_all(self, visions: Sequence[Vision], device: torch.device) -> Tensor:
        """Run the tower on all these images and videos; see _encode."""
        if self._cache is not None:
            return self._encode_each(visions, self._cache)
        pixel_values = concatenated([vision.pixel_values for vision in visions], device)
        return self._encode(pixel_values, *_grids_and_sizes(visions))

    def _encode(self, pixel_values: Tensor, grid_thw: Tensor, sizes: ImageSizes = ()) -> Tensor:
        """Run the vision tower on images and videos.

        Args: pixel_values: [patches, values], grid_thw: [images and videos, 3], both on the CPU.
        sizes: as Vision.original_sizes.
        Returns: [tokens, C], see encode_row.
        """
        family, tower = self._family, self._vision_tower
        match family.vision_input:
            case "patches":
                output = tower(self._tower_pixels(pixel_values), **tower_inputs(tower, grid_thw))
                features: Tensor = output.pooler_output
                return torch.cat([features, *output.deepstack_features], 1) if family.deepstack else features
            case "tiles":
                tiles = to_tiles(pixel_values, grid_thw, family.patch_size(self._model.config))
                return family.image_features(self._model, self._tower_pixels(tiles), grid_thw, sizes)
            case "images":
                images = to_padded_images(pixel_values, grid_thw, family.patch_size(self._model.config))
                return self._encode_images(self._tower_pixels(images), grid_thw)
            case "pooled":
                return self._encode_pooled(self._tower_pixels(pad_patches(pixel_values, grid_thw)), grid_thw)
            case _:
                assert_never(family.vision_input)

    def _tower_pixels(self, pixels: Tensor) -> Tensor:
        """Return pixels on the device of the vision tower and in its dtype."""
        return to_device(pixels, self._vision_tower.device).to(self._vision_tower.dtype)

    def _encode_images(self, pixels: Tensor, grid_thw: Tensor) -> Tensor:
        """Return the features of whole images, [tokens, D].

        Pixtral's tower, and the projector of Mistral 3, which merges patches; called by themselves,
        since the model's method reads sizes back from the device.
        Args: pixels: padded, as from to_padded_images. grid_thw: on the CPU.
        """
        tower = self._vision_tower
        sizes = [(rows * tower.patch_size, columns * tower.patch_size) for _, rows, columns in grid_thw.tolist()]
        starts = nn.functional.pad(grid_thw.prod(dim=1).cumsum(0), (1, 0)).int()
        # The boundaries of the images are for window attention. The tower does not know these
        # arguments, and passes them on; without them it would make a mask of all patches of a row.
        states = tower(
            pixels,
            image_sizes=sizes,
            cu_seq_lens_q=starts if _attends_by_sdpa(tower, tower.config.head_dim) else to_device(starts, tower.device),
            max_length_q=_longest(starts),
        ).last_hidden_state
        features: Tensor = self._model.get_submodule(self._family.projector_path)(states[0], sizes)
        return features

    def _encode_pooled(self, patches: Tensor, grid_thw: Tensor) -> Tensor:
        """Return the features of images whose patches are averaged, [tokens, D].

        Gemma 4's tower and projector, called by themselves, since the model's method reads sizes
        back from the device. Args: patches: padded, as from pad_patches. grid_thw: on the CPU.
        """
        positions = to_device(patch_positions(grid_thw), patches.device)
        states = self._vision_tower(pixel_values=patches, pixel_position_ids=positions).last_hidden_state
        features: Tensor = self._model.get_submodule(self._family.projector_path)(inputs_embeds=states)
        return features

    @property
    def _vision_tower(self) -> Any:
        return self._family.vision_tower(self._model)

    @torch.no_grad()
    def _encode_each(self, visions: Sequence[Vision], cache: VisionFeatureCache) -> Tensor:
        """Return the same as _encode_all; each image is encoded by itself, or looked up.

        Nothing is cached if their hashes are unknown.
        """
        grid_thw, sizes = _grids_and_sizes(visions)
        hashes = tuple(key for vision in visions for key in vision.hashes)
        parts = [
            part
            for vision in visions
            for part in torch.split(vision.pixel_values, vision.grid_thw.prod(dim=1).tolist())
        ]
        features = cache.lookup(hashes, self._vision_tower.device)
        keys = hashes or tuple(map(str, range(len(parts))))
        misses = {key: index for index, key in enumerate(keys) if key not in features}  # duplicates once
        # Before the tower runs: other ranks may have fewer images to encode.
        runs = self._all_reduce_max(len(misses))
        for key, index in misses.items():
            only = slice(index, index + 1)
            features[key] = self._encode(parts[index], grid_thw[only], sizes[only])
            if hashes:
                cache.store(key, features[key])
        self._run_dummy(runs - len(misses))
        return torch.cat([features[key] for key in keys])

    @torch.no_grad()
    def _run_dummy(self, times: int) -> None:
        """Run the tower on an empty image this many times.

        As often as the rank with most images runs it.
        """
        for _ in range(times):
            self._encode(*self._empty_image())

    def _empty_image(self) -> tuple[Tensor, Tensor]:
        side = self._family.patches_per_side(self._model.config)
        values = self._family.values_per_patch(self._model.config)
        return torch.zeros(side * side, values), torch.tensor([[1, side, side]])


def _grids_and_sizes(visions: Sequence[Vision]) -> tuple[Tensor, ImageSizes]:
    """Return Vision.grid_thw and Vision.original_sizes of all images and videos."""
    return torch.cat([vision.grid_thw for vision in visions]), tuple(
        size for vision in visions for size in vision.original_sizes
    )


def _require_features(packed: PackedGroups, num_places: int, num_features: int) -> None:
    """Raise ModelError unless each placeholder token of a row has its feature."""
    if num_places != num_features:
        count = sum(len(vision.grid_thw) for vision in packed.visions)
        raise ModelError(
            f"A packed row has {num_places} placeholder tokens, but its {count} images and videos give "
            f"{num_features} features. Build prompts and images with the same processor."
        )


def add_deepstack(hidden_states: Tensor, places: Tensor, features: Tensor) -> Tensor:
    """Add deepstack features to the hidden states of their placeholder tokens.

    In place of the method of transformers, which takes a mask, and has to read from the device how
    many tokens it selects, in the forward and in the backward of each layer.
    Args: hidden_states: [B, T, D]. places: the positions of the placeholders, [M] int64, counted
    over all rows; or the mask, [B, T] bool, of a forward that transformers makes itself.
    features: [M, D].
    """
    positions = places.flatten().nonzero().flatten() if places.dtype == torch.bool else places
    added = hidden_states.flatten(0, 1).index_add(0, positions, features.to(hidden_states))
    return added.view_as(hidden_states)


def tower_inputs(tower: Any, grid_thw: Tensor) -> dict[str, Any]:
    """Return the keyword arguments of a tower that takes patches, computed on the host.

    Without them a tower of transformers computes them on its device, and reads back from it how
    many windows there are and how long: several times in each pass, the host would wait for the
    GPU. The functions of transformers (5.16 to 5.19) that it calls are called here on the CPU, and
    their results passed to the tower, which then computes none of them.

    Args: grid_thw: [images and videos, 3] on the CPU, (time, height, width) in patches.
    """
    from transformers import vision_utils

    merge: int = tower.spatial_merge_size
    positions = vision_utils.get_vision_position_ids(grid_thw, merge)
    starts = vision_utils.get_vision_cu_seqlens(grid_thw)
    inputs = {"grid_thw": grid_thw, "position_ids": positions, "cu_seqlens": starts}
    longest = {"max_seqlen": _longest(starts)}
    if hasattr(tower, "fullatt_block_indexes"):  # Qwen2.5-VL: most layers attend within windows
        window_index, window_starts = vision_utils.get_vision_window_index(
            grid_thw, spatial_merge_size=merge, window_size=tower.window_size, patch_size=tower.patch_size
        )
        inputs |= {"window_index": window_index, "cu_window_seqlens": window_starts}
        longest["max_window_seqlen"] = _longest(window_starts)
    if hasattr(tower, "num_grid_per_side"):  # Qwen3-VL: a table of positions is interpolated
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grid_thw,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=merge,
        )
        inputs |= {"interp_indices": indices, "interp_weights": weights}
    device: torch.device = tower.device
    # sdpa splits its inputs by the lengths of the windows, and so reads them in each layer.
    by_sdpa = _attends_by_sdpa(tower, tower.blocks[0].attn.head_dim)
    read_by_host: tuple[str, ...] = ("grid_thw", "cu_seqlens", "cu_window_seqlens") if by_sdpa else ("grid_thw",)
    if hasattr(tower, "post_conv_layernorm"):  # GLM-4V: computes the positions of its table on the device
        read_by_host = ()
    return longest | {
        name: tensor if name in read_by_host else to_device(tensor, device) for name, tensor in inputs.items()
    }


def _attends_by_sdpa(tower: Any, head_dim: int) -> bool:
    kernel = configured_kernel(tower.config)
    return kernel == "sdpa" or not supports(kernel, compute_dtype(tower.device, tower.dtype), head_dim)


def _longest(starts: Tensor) -> int:
    return int(starts.diff().max())


class PatchProjection(nn.Conv3d):
    """A convolution whose inputs have exactly the size of its kernel, as one matrix product."""

    def forward(self, input: Tensor) -> Tensor:
        """Return [patches, D, 1, 1, 1] for [patches, C, T, H, W].

        Equal to the convolution up to rounding.
        """
        weight = self.weight.flatten(1)
        return torch.nn.functional.linear(input.flatten(1), weight, self.bias)[..., None, None, None]


def use_patch_projection(model: Any, family: ModelFamily) -> None:
    """Replace the convolution of a vision tower's patch embedding, if any, by a matrix product.

    Forward and backward take a fifth of the time (CPU, float32, torch 2.13: 20 against 96 ms for
    1,024 patches of 1,176 values and width 256). Weights and their names do not change.
    """
    tower = family.vision_tower(model)
    projection = getattr(getattr(tower, "patch_embed", None), "proj", None)
    # All towers that take grid_thw get their pixels one patch at a time.
    if type(projection) is nn.Conv3d and projection.kernel_size == projection.stride:
        projection.__class__ = PatchProjection
