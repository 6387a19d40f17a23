"""What a model family is: where the parts of its network are, and how its inputs are described.

A file of this folder defines one family, or several that differ little, under FAMILIES. This module
depends on no family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any, Literal, assert_never

import torch
from torch import Tensor, nn

from trigon.errors import ModelError
from trigon.models.families.tiny import TinyModel
from trigon.types import ImageSizes

_MEDIA_TOKENS = (
    "image_token_id",
    "video_token_id",
    *("vision_start_token_id", "vision_end_token_id"),
    *("image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id"),
    *("boi_token_id", "eoi_token_id"),
    *("audio_token_id", "boa_token_id", "eoa_token_index"),
)
"""Where a config names the tokens of images, videos and audio."""

ImageLayers = Literal["none", "sliding", "all"]
"""The layers in which the tokens of an image attend to each other in both directions: none, those
with a sliding window, or all."""

VisionInput = Literal["patches", "tiles", "images", "pooled"]
"""What a vision tower takes; see ModelFamily."""

ImageLayout = Callable[[int, int, int], Sequence[str | int]]
"""Returns what stands for an image in a prompt: runs of placeholder tokens, and texts around them.

A run is given by its number of tokens. Arguments: this number, and how many rows and columns of
runs there are. Example: two rows of three tokens, (3, "[IMG_BREAK]", 3, "[IMG_END]").
"""


_KEYS_AND_VALUES = re.compile(r"(?:^model|\.language_model)\.layers\.(\d+)\.self_attn\.[kv]_(?:proj|norm)\.")


@dataclass(frozen=True, slots=True)
class TileAssembly:
    """How tile features become the features of an image, if the image's size decides.

    num_tokens: returns the number of features of an image. Arguments: the config, the number of
        its tiles, and (width, height) of the image before it was processed.
    features: returns the features of images, [tokens, D]. Arguments: the model, the tiles of all
        images, the number of tiles of each image, and their sizes.
    An image of a single tile is not assembled, and its size not used.
    """

    num_tokens: Callable[[Any, int, tuple[int, int]], int]
    features: Callable[[Any, Tensor, Sequence[int], ImageSizes], Tensor]


@dataclass(frozen=True, slots=True)
class VisionWidths:
    """The widths of a vision tower that takes patches.

    width: of a patch. mlp: inner width of the MLPs of the blocks. out: width of an image token.
    """

    width: int
    mlp: int
    out: int


def usual_vision_widths(vision_config: Any) -> VisionWidths:
    """Return the widths of a vision tower whose config has the names of most families."""
    return VisionWidths(vision_config.hidden_size, vision_config.intermediate_size, vision_config.out_hidden_size)


@dataclass(frozen=True, slots=True)
class CountedNetwork:
    """What sizes.py needs besides the config to count the operations of a family's networks.

    normalizes_queries: whether the queries and keys of each head are normalized.
    gates_vision_mlp: whether the MLPs of the vision tower have three matrices (gated), not two.
    counts_passes: whether activation_memory.py counts the tensors of a pass, too; False where norms
    keep other tensors.
    """

    normalizes_queries: bool = False
    gates_vision_mlp: bool = False
    counts_passes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """The properties of a model family. The defaults describe a text model like Llama.

    model_type: `config.model_type` of a Hugging Face config.
    tiny: the tiny model with which the tests check the family.
    language_path, vision_path: submodule paths of the language model (without its head) and of the
        vision tower; vision_path is empty for a text family.
    checkpoint_prefixes: pairs (prefix of a parameter name in memory, the same in a checkpoint); the
        first match applies.
    rope: "mrope" for rotary embeddings of three positions (time, height, width), "1d" for one.
    deepstack: whether the vision tower also adds features to the first decoder layers.
    video: how a prompt encodes time in a video. "patches": each temporal patch is one position
        after the previous one. "seconds": positions are proportional to seconds. "timestamps": each
        temporal patch is a separate block that follows its time as text. "none": no videos.
    experts: how a checkpoint stores the experts of a layer, which in memory are two stacks,
        gate_up_proj [E, 2I, D] and down_proj [E, D, I]. "none": there are no experts. "stacked":
        these stacks. "transposed": stacks with the last two dimensions swapped. "separate": each of
        the 3E matrices by itself.
    vision_input: what the vision tower takes. "patches": patches of images of any size. "tiles":
        square tiles of one size; an image is one or several, which "time" in its grid_thw counts.
        "images": whole images, each of its own size. "pooled": the patches of an image, squares of
        which it averages into tokens.
    tower_type: `model_type` of a vision tower that takes anything but patches.
    projector_path: submodule path of the projector after such a tower.
    vision_layers: path of the blocks within the vision tower.
    image_wrap: attributes of the tokenizer for the tokens before and after an image, where chat
        templates omit them.
    image_text: what a chat template writes for an image, and the text with one placeholder by which
        the family's processor replaces it before it tokenizes; names of the tokenizer's attributes
        are in braces. None where the template writes the placeholder.
    image_layers: the layers in which the tokens of an image attend to each other in both
        directions; of the layers with a sliding window, or all.
    language_types: `model_type` of the language models that may be in a model that combines other
        families; empty for a family with a language model of its own.
    image_layout: where an image's placeholder tokens are; None: they are consecutive.
    tile_features: computes the features of tiles, [tiles, tokens, D], where get_image_features of
        transformers does not serve.
    tile_assembly: how tiles are put together, if the size of their image decides; None otherwise.
    image_parameters: names of parameters outside of tower and projector that only images use.
    in_vllm: whether vLLM has an implementation of the family. Without one it would take the one of
        transformers, to which processed images cannot be given; worker.rollout.name=transformers
        then samples.
    engine_packages: packages that vLLM's processor of the family needs besides its own.
    vision_widths: returns the widths of a tower that takes patches, given its config.
    divides_vision_heads: whether the GPUs of a model with tensor parallelism divide the attention
        heads of the tower in vLLM.
    windows: whether sliding-window attention is tested against transformers and vLLM.
    caps_logits: whether the model bounds its logits where the config has final_logit_softcapping.
    linear_attention: name of the gated delta net within a decoder layer that has one, see
        linear_attention.py; empty for a family without such layers.
    unused_weights: beginning of the names of tensors that published checkpoints have, and neither
        trainer nor engine loads; empty if there are none.
    frames_per_image: how many frames an image counts as in the pixel limits of its image processor.
    unused_parameters: beginnings of the names of parameters that are in the model and through which
        neither text nor images pass: frozen, and exported as they were loaded.
    counted: how operations and activations of the networks are counted (sizes.py); None: they are
        not, so that runs have no MFU and no estimate of activations.
    """

    model_type: str
    tiny: TinyModel
    language_path: str = "model"
    vision_path: str = ""
    checkpoint_prefixes: tuple[tuple[str, str], ...] = ()
    rope: Literal["1d", "mrope"] = "1d"
    deepstack: bool = False
    video: Literal["none", "patches", "seconds", "timestamps"] = "none"
    experts: Literal["none", "stacked", "transposed", "separate"] = "none"
    vision_input: VisionInput = "patches"
    tower_type: str = ""
    projector_path: str = ""
    vision_layers: str = "blocks"
    image_wrap: tuple[str, str] | None = None
    image_text: tuple[str, str] | None = None
    image_layers: ImageLayers = "none"
    language_types: tuple[str, ...] = ()
    image_layout: ImageLayout | None = None
    tile_features: Callable[[Any, Tensor], Tensor] | None = None
    tile_assembly: TileAssembly | None = None
    image_parameters: tuple[str, ...] = ()
    in_vllm: bool = True
    engine_packages: tuple[str, ...] = ()
    vision_widths: Callable[[Any], VisionWidths] = usual_vision_widths
    divides_vision_heads: bool = True
    windows: bool = False
    caps_logits: bool = False
    linear_attention: str = ""
    unused_weights: str = ""
    frames_per_image: int = 1
    unused_parameters: tuple[str, ...] = ()
    counted: CountedNetwork | None = None

    @property
    def has_vision(self) -> bool:
        """Whether the model has a vision tower."""
        return bool(self.vision_path)

    @property
    def tiles(self) -> bool:
        """Whether the vision tower takes tiles of one size."""
        return self.vision_input == "tiles"

    @property
    def takes_patches(self) -> bool:
        """Whether there is a vision tower that takes patches, with the grid of each image."""
        return self.has_vision and self.vision_input == "patches"

    def image_layers_of(self, hf_config: Any) -> ImageLayers:
        """Return the layers of a model in which the tokens of an image attend in both directions.

        Only the config of Gemma 4 says whether they do.
        """
        setting = getattr(hf_config.get_text_config(), "use_bidirectional_attention", None)
        return "none" if self.image_layers == "sliding" and setting != "vision" else self.image_layers

    def language_model(self, model: nn.Module) -> Any:
        """Return the decoder stack, a transformers module: embeddings, layers and final norm."""
        return model.get_submodule(self.language_path)

    def vision_tower(self, model: nn.Module) -> Any | None:
        """Return the vision tower with its merger if it contains one; None for a text family."""
        return model.get_submodule(self.vision_path) if self.has_vision else None

    def vision_parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters that only images use: tower, projector; empty for text."""
        modules = [model.get_submodule(path) for path in (self.vision_path, self.projector_path) if path]
        others = [model.get_parameter(name) for name in self.image_parameters]
        return [*(parameter for module in modules for parameter in module.parameters()), *others]

    def count_image_tokens(self, hf_config: Any, grid_thw: Tensor, sizes: ImageSizes) -> list[int]:
        """Return the number of prompt tokens of each image or video.

        Args: grid_thw, sizes: as Vision.grid_thw and Vision.original_sizes, also of several
        visions; images of a single tile need no size.
        """
        if self.tile_assembly is None:
            counts: list[int] = (grid_thw.prod(dim=1) // self.spatial_merge(hf_config) ** 2).tolist()
            return counts
        images = _tiles_and_sizes(grid_thw, sizes)
        return [self.tile_assembly.num_tokens(hf_config, *image) for image in zip(*images, strict=True)]

    def image_features(self, model: nn.Module, tiles: Tensor, grid_thw: Tensor, sizes: ImageSizes) -> Tensor:
        """Return the image features of tiles, after the projector.

        Args: tiles: [n, channels, height, width]. grid_thw, sizes: as in count_image_tokens.
        Returns: [image tokens, D].
        """
        if self.tile_assembly is not None:
            return self.tile_assembly.features(model, tiles, *_tiles_and_sizes(grid_thw, sizes))
        if self.tile_features is not None:
            return self.tile_features(model, tiles).flatten(0, 1)
        parent: Any = model.get_submodule(self.vision_path.rpartition(".")[0])
        features = parent.get_image_features(pixel_values=tiles, return_dict=True).pooler_output
        return torch.cat([*features])

    def checkpoint_name(self, parameter_name: str) -> str:
        """Return the name of a parameter in a checkpoint; names in checkpoints are unchanged."""
        for prefix, checkpoint_prefix in self.checkpoint_prefixes:
            if parameter_name.startswith(prefix):
                return checkpoint_prefix + parameter_name.removeprefix(prefix)
        return parameter_name

    def is_unused(self, name: str, hf_config: Any) -> bool:
        """Return whether neither trainer nor engine loads a tensor of a published checkpoint."""
        if self.unused_weights and name.startswith(self.unused_weights):
            return True
        text = hf_config.get_text_config()
        shared = getattr(text, "num_kv_shared_layers", 0)  # the last layers use the keys of earlier ones
        found = _KEYS_AND_VALUES.search(name) if shared else None
        return found is not None and int(found[1]) >= text.num_hidden_layers - shared

    def checkpoint_tensors(self, parameter_name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a parameter as published checkpoints store them and vLLM expects.

        The experts of a layer may yield several tensors, any other parameter yields one. The
        tensors are views of the parameter: writing to them changes it.

        Args:
            parameter_name: the name in memory, or as returned by checkpoint_name.
            parameter: the full tensor, not a shard, on any device ("meta" too).
        """
        name = self.checkpoint_name(parameter_name)
        layer, stack = name.rpartition(".")[::2]
        if self.experts == "none" or not layer.endswith(".experts"):
            yield name, parameter
            return
        match self.experts:
            case "stacked":
                yield name, parameter
            case "transposed":
                yield name, parameter.transpose(1, 2)
            case "separate":
                for expert, weight in enumerate(parameter):
                    if stack == "gate_up_proj":
                        gate, up = weight.chunk(2)
                        yield f"{layer}.{expert}.gate_proj.weight", gate
                        yield f"{layer}.{expert}.up_proj.weight", up
                    else:
                        yield f"{layer}.{expert}.{stack}.weight", weight
            case _:
                assert_never(self.experts)

    def spatial_merge(self, hf_config: Any) -> int:
        """Return the number of patches, along each side, that are merged into one image token."""
        self._require_vision()
        match self.vision_input:
            case "patches":
                return int(hf_config.vision_config.spatial_merge_size)
            case "images":
                return int(hf_config.spatial_merge_size)
            case "pooled":
                return int(hf_config.vision_config.pooling_kernel_size)
            case "tiles":
                tokens = getattr(hf_config, "mm_tokens_per_image", None)
                if tokens is not None:
                    return self.patches_per_side(hf_config) // isqrt(tokens)
                return int(getattr(hf_config, "scale_factor", 1) / getattr(hf_config, "downsample_ratio", 1.0))
            case _:
                assert_never(self.vision_input)

    def patch_size(self, hf_config: Any) -> int:
        """Return the side of a patch in pixels."""
        self._require_vision()
        return _side(hf_config.vision_config.patch_size)

    def patches_per_side(self, hf_config: Any) -> int:
        """Return the side of the smallest possible image in patches: a tile, or one image token."""
        if self.tiles:
            return _side(hf_config.vision_config.image_size) // self.patch_size(hf_config)
        return self.spatial_merge(hf_config)

    def values_per_patch(self, hf_config: Any) -> int:
        """Return the number of values in a patch, over all channels and frames."""
        vision = hf_config.vision_config
        if self.vision_input == "pooled":  # its config does not say
            return 3 * self.patch_size(hf_config) ** 2
        planes = vision.in_channels * vision.temporal_patch_size if self.takes_patches else vision.num_channels
        return int(planes) * self.patch_size(hf_config) ** 2

    def image_token_id(self, hf_config: Any) -> int:
        """Return the placeholder token of images; a prompt has one for each image token."""
        self._require_vision()
        return int(hf_config.image_token_id)

    def video_token_id(self, hf_config: Any) -> int:
        """Return the placeholder token of videos; a prompt has one for each video token."""
        self._require_vision()
        return int(hf_config.video_token_id)

    def placeholder_token_ids(self, hf_config: Any) -> tuple[int, ...]:
        """Return the tokens that vision features replace in a prompt."""
        videos = () if self.video == "none" else (self.video_token_id(hf_config),)
        return (self.image_token_id(hf_config), *videos)

    def media_token_ids(self, hf_config: Any) -> tuple[int, ...]:
        """Return the tokens that only a processor may insert and a policy must not sample.

        Empty for a text family.
        """
        if not self.has_vision:
            return ()
        tokens = (getattr(hf_config, name, None) for name in _MEDIA_TOKENS)
        return tuple(int(token) for token in tokens if token is not None)

    def _require_vision(self) -> None:
        if not self.has_vision:
            raise ModelError(
                f"A {self.model_type!r} model has no vision tower, so it cannot take images or videos. Train a "
                "vision-language model, or use a dataset without images and videos."
            )


def _tiles_and_sizes(grid_thw: Tensor, sizes: ImageSizes) -> tuple[list[int], ImageSizes]:
    """Return the number of tiles of each image, and its size; any if no size is known.

    Images without a known size have a single tile, which needs none.
    """
    num_tiles: list[int] = grid_thw[:, 0].tolist()
    return num_tiles, sizes or ((1, 1),) * len(num_tiles)


def _side(size: Any) -> int:
    """Return a size that a config may give as one number or as (height, width), which are equal."""
    return int(size[0] if isinstance(size, list | tuple) else size)


qwen_vision_family = partial(
    ModelFamily, rope="mrope", language_path="model.language_model", vision_path="model.visual"
)
"""Returns a family whose vision tower takes patches, and whose positions follow m-RoPE."""


def llava_prefixes(tower_name: str) -> tuple[tuple[str, str], ...]:
    """Return the checkpoint_prefixes of models that are published under the names of LLaVA's parts.

    tower_name: prefix of the vision tower's weights.
    """
    return (
        ("model.language_model.", "language_model.model."),
        ("model.vision_tower.", tower_name),
        ("model.multi_modal_projector.", "multi_modal_projector."),
        ("model.image_newline", "image_newline"),
        ("lm_head.", "language_model.lm_head."),
    )


llava_family = partial(
    ModelFamily,
    language_path="model.language_model",
    vision_path="model.vision_tower",
    projector_path="model.multi_modal_projector",
    vision_input="tiles",
    vision_layers="encoder.layers",
    checkpoint_prefixes=llava_prefixes("vision_tower.vision_model."),
)
"""Returns a family with LLaVA's parts: a vision tower that takes tiles, a projector, a decoder."""
