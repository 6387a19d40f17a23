"""What differs between the families of models that Trigon trains, in one table.

Knows, for each `model_type` of a Hugging Face config: where the parts of the network lie, which tokens stand for
images, which rule gives positions, and how a checkpoint spells its weights. Refuses to know how anything is computed,
and to guess: a model that is not in the table is refused, since a vision model taken for a text model would train
blind. docs/model-families.md says how to add a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, assert_never

import torch
from torch import Tensor, nn

from trigon.errors import ModelError
from trigon.suggestions import nearest


@dataclass(frozen=True, slots=True)
class Family:
    """The facts of one family.

    model_type: as `config.model_type` has it.
    has_vision: whether a vision tower feeds image features into the language model.
    rope: "mrope" rotates by three positions (time, height, width), "1d" by one.
    deepstack: whether the vision tower also feeds the first decoder layers, besides the embeddings.
    language_path, vision_path: where the language model (without its head) and the vision tower are, seen from the
    whole model; vision_path is empty for a text family.
    checkpoint_prefixes: (beginning of a parameter's name in memory, the same in a checkpoint), first match wins.
    video: how a prompt tells the time in a video: "patches", each temporal patch is one position after the last;
    "seconds", their positions are as far apart as the seconds between them; "timestamps", each temporal patch is a
    block of its own behind its time as text. "none": no videos.
    language_path, vision_path: where the language model (without its head) and the vision tower are, seen from the
    whole model; vision_path is empty for a text family.
    checkpoint_prefixes: (beginning of a parameter's name in memory, the same in a checkpoint), first match wins.
    experts: how a checkpoint holds the experts of a layer, which in memory are two stacks, gate_up_proj [E, 2I, D] and
    down_proj [E, D, I]. "none": there are none. "apart": each of the 3E matrices by itself. "transposed": as stacks
    with their last two dimensions swapped.
    tiles: whether the vision tower sees square tiles of one size, each as a whole, instead of patches of images of any
    size. An image is then one or several tiles, and in its grid_thw time counts these.
    tile_tower: the `model_type` of such a tower. projector_path: where that which follows it is.
    vision_layers: where a tower's blocks are, seen from it.
    image_wrap: which attributes of the tokenizer are the tokens around an image that chat templates leave out.
    windows: whether attention that a sliding window cuts off was seen to agree with transformers' and vLLM's.
    """

    model_type: str
    has_vision: bool
    rope: Literal["1d", "mrope"]
    deepstack: bool
    language_path: str
    vision_path: str
    checkpoint_prefixes: tuple[tuple[str, str], ...]
    video: Literal["none", "patches", "seconds", "timestamps"] = "none"
    experts: Literal["none", "apart", "transposed"] = "none"
    tiles: bool = False
    tile_tower: str = ""
    projector_path: str = ""
    vision_layers: str = "blocks"
    image_wrap: tuple[str, str] | None = None
    windows: bool = False

    def language_model(self, model: nn.Module) -> Any:
        """Return the decoder stack, a transformers module: embeddings, layers and final norm."""
        return model.get_submodule(self.language_path)

    def vision_tower(self, model: nn.Module) -> Any | None:
        """Return the vision tower, a transformers module, with its merger if that is in it; None for a text family."""
        return model.get_submodule(self.vision_path) if self.has_vision else None

    def vision_modules(self, model: nn.Module) -> list[nn.Module]:
        """Return all that only images pass through: the tower, and the projector behind it; none for a text family."""
        return [model.get_submodule(path) for path in (self.vision_path, self.projector_path) if path]

    def image_features(self, model: nn.Module, tiles: Tensor) -> Tensor:
        """Return what the language model sees of tiles, [n, channels, height, width]: [image tokens, D]."""
        seen: Any = model.get_submodule(self.vision_path.rpartition(".")[0])
        features = seen.get_image_features(pixel_values=tiles, return_dict=True).pooler_output
        return torch.cat([*features])

    def checkpoint_name(self, parameter_name: str) -> str:
        """Return what a parameter of the model is called in a checkpoint, where such names stay as they are."""
        for here, there in self.checkpoint_prefixes:
            if parameter_name.startswith(here):
                return there + parameter_name.removeprefix(here)
        return parameter_name

    def checkpoint_tensors(self, parameter_name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield what published checkpoints hold of a parameter, and vLLM expects: a tensor, or many of stacked experts.

        parameter_name: in memory or as checkpoint_name gives it. parameter: whole, on any device ("meta" too). The
        tensors are views of it, so that writing into them fills it.
        """
        name = self.checkpoint_name(parameter_name)
        layer, stack = name.rpartition(".")[::2]
        if self.experts == "none" or not layer.endswith(".experts"):
            yield name, parameter
            return
        match self.experts:
            case "transposed":
                yield name, parameter.transpose(1, 2)
            case "apart":
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
        """Return how many patches, along each side, become one image token."""
        self._require_vision()
        if self.tiles:
            return round(1 / getattr(hf_config, "downsample_ratio", 1.0))
        return int(hf_config.vision_config.spatial_merge_size)

    def patch_size(self, hf_config: Any) -> int:
        """Return how many pixels a side of a patch has."""
        self._require_vision()
        return _side(hf_config.vision_config.patch_size)

    def patches_per_side(self, hf_config: Any) -> int:
        """Return how many patches a side of the smallest image has: of a tile, or of what becomes one token."""
        if self.tiles:
            return _side(hf_config.vision_config.image_size) // self.patch_size(hf_config)
        return self.spatial_merge(hf_config)

    def values_per_patch(self, hf_config: Any) -> int:
        """Return how many pixel values a patch has, of all colours and, where images are doubled in time, of both."""
        vision = hf_config.vision_config
        planes = vision.num_channels if self.tiles else vision.in_channels * vision.temporal_patch_size
        return int(planes) * self.patch_size(hf_config) ** 2

    def image_token_id(self, hf_config: Any) -> int:
        """Return the placeholder that stands in a prompt once for every image token."""
        self._require_vision()
        return int(hf_config.image_token_id)

    def video_token_id(self, hf_config: Any) -> int:
        """Return the placeholder that stands in a prompt once for every token of a video."""
        self._require_vision()
        return int(hf_config.video_token_id)

    def placeholder_token_ids(self, hf_config: Any) -> tuple[int, ...]:
        """Return every token that stands in a prompt for features of the vision tower."""
        videos = () if self.video == "none" else (self.video_token_id(hf_config),)
        return (self.image_token_id(hf_config), *videos)

    def media_token_ids(self, hf_config: Any) -> tuple[int, ...]:
        """Return every token that only a processor may write and no policy may sample; none for a text family."""
        if not self.has_vision:
            return ()
        if self.tiles:
            return (int(hf_config.image_token_id),)
        return (
            int(hf_config.image_token_id),
            int(hf_config.video_token_id),
            int(hf_config.vision_start_token_id),
            int(hf_config.vision_end_token_id),
        )

    def _require_vision(self) -> None:
        if not self.has_vision:
            raise ModelError(
                f"A {self.model_type!r} model has no vision tower, so it cannot take images or videos. Train a "
                "vision-language model, or a dataset of text alone."
            )


def _side(size: Any) -> int:
    """Return a length that a config may give for height and width."""
    return int(size[0] if isinstance(size, list | tuple) else size)


def _text_family(model_type: str, *, experts: Literal["none", "apart"] = "none", windows: bool = False) -> Family:
    return Family(
        model_type=model_type,
        has_vision=False,
        rope="1d",
        deepstack=False,
        language_path="model",
        vision_path="",
        checkpoint_prefixes=(),
        experts=experts,
        windows=windows,
    )


def _qwen_vision_family(
    model_type: str,
    *,
    video: Literal["patches", "seconds", "timestamps"],
    deepstack: bool = False,
    checkpoint_prefixes: tuple[tuple[str, str], ...] = (),
    experts: Literal["none", "transposed"] = "none",
) -> Family:
    return Family(
        model_type=model_type,
        has_vision=True,
        rope="mrope",
        deepstack=deepstack,
        language_path="model.language_model",
        vision_path="model.visual",
        checkpoint_prefixes=checkpoint_prefixes,
        video=video,
        experts=experts,
    )


def _tile_family(
    model_type: str, *, tile_tower: str, tower_name: str, vision_layers: str, image_wrap: tuple[str, str] | None = None
) -> Family:
    return Family(
        model_type=model_type,
        has_vision=True,
        rope="1d",
        deepstack=False,
        language_path="model.language_model",
        vision_path="model.vision_tower",
        checkpoint_prefixes=(
            ("model.language_model.", "language_model.model."),
            ("model.vision_tower.", tower_name),
            ("model.multi_modal_projector.", "multi_modal_projector."),
            ("lm_head.", "language_model.lm_head."),
        ),
        tiles=True,
        tile_tower=tile_tower,
        projector_path="model.multi_modal_projector",
        vision_layers=vision_layers,
        image_wrap=image_wrap,
    )


# Published checkpoints of the first two generations keep the names of the first release.
_QWEN2_VL_NAMES = (("model.language_model.", "model."), ("model.visual.", "visual."))


_FAMILIES = {
    family.model_type: family
    for family in (
        _qwen_vision_family("qwen2_vl", video="patches", checkpoint_prefixes=_QWEN2_VL_NAMES),
        _qwen_vision_family("qwen2_5_vl", video="seconds", checkpoint_prefixes=_QWEN2_VL_NAMES),
        _qwen_vision_family("qwen3_vl", video="timestamps", deepstack=True),
        _qwen_vision_family("qwen3_vl_moe", video="timestamps", deepstack=True, experts="transposed"),
        _tile_family(
            "internvl",
            tile_tower="internvl_vision",
            tower_name="vision_tower.",
            vision_layers="encoder.layer",
            image_wrap=("start_image_token", "end_image_token"),
        ),
        _tile_family(
            "llava",
            tile_tower="clip_vision_model",
            tower_name="vision_tower.vision_model.",
            vision_layers="encoder.layers",
        ),
        _text_family("qwen2"),
        _text_family("qwen2_moe", experts="apart"),
        _text_family("qwen3"),
        _text_family("qwen3_moe", experts="apart"),
        _text_family("llama"),
        _text_family("mistral", windows=True),
        _text_family("gemma"),
        _text_family("gemma3_text", windows=True),
    )
}


def family_of(hf_config: Any) -> Family:
    """Return the family of a Hugging Face config.

    Raises: ModelError for a family that is not supported, naming those that are.
    """
    return family_named(str(getattr(hf_config, "model_type", "")))


def family_named(model_type: str) -> Family:
    """Return the family with this `model_type`. Raises: ModelError as family_of does."""
    if model_type not in _FAMILIES:
        near = nearest(model_type, _FAMILIES, cutoff=0.7)
        hint = f" The nearest is {near!r}." if near else ""
        raise ModelError(
            f"Models of type {model_type!r} are not supported.{hint} Supported are: "
            f"{', '.join(supported_model_types())}. How to add one: docs/model-families.md."
        )
    return _FAMILIES[model_type]


def supported_model_types() -> tuple[str, ...]:
    """Return every `model_type` in the table, sorted."""
    return tuple(sorted(_FAMILIES))
