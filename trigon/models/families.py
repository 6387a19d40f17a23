"""What differs between the families of models that Trigon trains, in one table.

Knows, for each `model_type` of a Hugging Face config: where the parts of the network lie, which tokens stand for
images, which rule gives positions, and how a checkpoint spells a weight's name. Refuses to know how anything is
computed, and to guess: a model that is not in the table is refused, since a vision model taken for a text model would
train blind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from trigon.errors import ModelError


@dataclass(frozen=True, slots=True)
class Family:
    """The facts of one family.

    model_type: as `config.model_type` has it.
    has_vision: whether a vision tower feeds image features into the language model.
    rope: "mrope" rotates by three positions (time, height, width), "1d" by one.
    deepstack: whether the vision tower also feeds the first decoder layers, besides the embeddings.
    video: how a prompt tells the time in a video: "patches", each temporal patch is one position after the last;
    "seconds", their positions are as far apart as the seconds between them; "timestamps", each temporal patch is a
    block of its own behind its time as text. "none": no videos.
    language_path, vision_path: where the language model (without its head) and the vision tower are, seen from the
    whole model; vision_path is empty for a text family.
    checkpoint_prefixes: (beginning of a parameter's name in memory, the same in a checkpoint), first match wins.
    """

    model_type: str
    has_vision: bool
    rope: Literal["1d", "mrope"]
    deepstack: bool
    language_path: str
    vision_path: str
    checkpoint_prefixes: tuple[tuple[str, str], ...]
    video: Literal["none", "patches", "seconds", "timestamps"] = "none"

    def language_model(self, model: nn.Module) -> Any:
        """Return the decoder stack, a transformers module: embeddings, layers and final norm."""
        return model.get_submodule(self.language_path)

    def vision_tower(self, model: nn.Module) -> Any | None:
        """Return the vision tower, a transformers module, with its merger; None for a text family."""
        return model.get_submodule(self.vision_path) if self.has_vision else None

    def checkpoint_name(self, parameter_name: str) -> str:
        """Return the name under which `save_pretrained` writes a parameter of the model, and vLLM expects it."""
        for here, there in self.checkpoint_prefixes:
            if parameter_name.startswith(here):
                return there + parameter_name.removeprefix(here)
        return parameter_name

    def spatial_merge(self, hf_config: Any) -> int:
        """Return how many patches, along each side, become one image token."""
        self._require_vision()
        return int(hf_config.vision_config.spatial_merge_size)

    def image_token_id(self, hf_config: Any) -> int:
        """Return the placeholder that stands in a prompt once for every image token."""
        self._require_vision()
        return int(hf_config.image_token_id)

    def video_token_id(self, hf_config: Any) -> int:
        """Return the placeholder that stands in a prompt once for every token of a video."""
        self._require_vision()
        return int(hf_config.video_token_id)

    def media_token_ids(self, hf_config: Any) -> tuple[int, ...]:
        """Return every token that only a processor may write and no policy may sample; none for a text family."""
        if not self.has_vision:
            return ()
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


def _text_family(model_type: str) -> Family:
    return Family(
        model_type=model_type,
        has_vision=False,
        rope="1d",
        deepstack=False,
        language_path="model",
        vision_path="",
        checkpoint_prefixes=(),
    )


_FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            model_type="qwen2_5_vl",
            has_vision=True,
            rope="mrope",
            deepstack=False,
            language_path="model.language_model",
            vision_path="model.visual",
            # Published checkpoints keep the names of the family's first release.
            checkpoint_prefixes=(("model.language_model.", "model."), ("model.visual.", "visual.")),
            video="seconds",
        ),
        Family(
            model_type="qwen3_vl",
            has_vision=True,
            rope="mrope",
            deepstack=True,
            language_path="model.language_model",
            vision_path="model.visual",
            checkpoint_prefixes=(),
            video="timestamps",
        ),
        _text_family("qwen2"),
        _text_family("qwen3"),
        _text_family("llama"),
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
        raise ModelError(
            f"Models of type {model_type!r} are not supported. Supported are: {', '.join(sorted(_FAMILIES))}."
        )
    return _FAMILIES[model_type]
