"""Checks that the config of a model has only features that Trigon computes exactly.

Called before a model is loaded. docs/model-families.md lists what is not supported, and why.
"""

from __future__ import annotations

from typing import Any

from trigon.errors import ModelError
from trigon.models.attention import sliding_windows
from trigon.models.families import ModelFamily

_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")  # their frequencies depend on the config alone


def require_supported(config: Any, family: ModelFamily) -> None:
    """Check a model's config. Raises: ModelError for a value that is not supported, naming it."""
    text_config = config.get_text_config()
    dropout = getattr(text_config, "attention_dropout", 0.0)
    if dropout:
        raise ModelError(
            f"The model has attention_dropout = {dropout}. Log-probabilities must be deterministic, so "
            f"set it to 0 in override_config{' under text_config' if family.has_vision else ''}."
        )
    if family.language_types:
        _require_supported_parts(config, family)
    if getattr(text_config, "enable_moe_block", None):
        raise ModelError(
            f"This {family.model_type!r} is an MoE model (enable_moe_block), whose experts, in the trainer and in the "
            "rollout engine, are not tested. Use a dense model, see docs/model-families.md."
        )
    known = {"full_attention", "sliding_attention", *(["linear_attention"] if family.linear_attention else [])}
    other_types = sorted({*(getattr(text_config, "layer_types", None) or ())} - known)
    if other_types:
        raise ModelError(
            f"The model has layers of type {', '.join(other_types)}, which are not supported for "
            f"{family.model_type!r}: completions could not share their prompt. Use another model, see "
            "docs/model-families.md."
        )
    max_length = int(text_config.max_position_embeddings)
    if not family.windows and any(
        window is not None and window < max_length for window in sliding_windows(text_config)
    ):
        raise ModelError(
            f"The model uses sliding window attention, which is not supported for {family.model_type!r}. Use a "
            "model whose config has use_sliding_window = false, or no sliding_window."
        )
    caps = ("attn_logit_softcapping", *(() if family.caps_logits else ("final_logit_softcapping",)))
    for cap in caps:
        if getattr(text_config, cap, None):
            raise ModelError(
                f"The model has {cap} = {getattr(text_config, cap)}, which is not supported for "
                f"{family.model_type!r}. Use another model, see docs/model-families.md."
            )
    if getattr(text_config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        raise ModelError("The model attends to later tokens, so it cannot sample. Use a causal language model.")
    for rope_type in _rope_types(text_config) - {*_ROPE_TYPES}:
        raise ModelError(
            f"The model's rotary embeddings are of type {rope_type!r}, whose frequencies depend on the row length. "
            "A packed row, a single sequence and vLLM would compute different values. Supported types: "
            f"{', '.join(_ROPE_TYPES)}."
        )
    if family.experts == "transposed" and _has_square_experts(text_config):
        raise ModelError(
            "The expert matrices of this model are square, and transformers would load them without transposing them. "
            "Use another moe_intermediate_size."
        )


def _require_supported_parts(config: Any, family: ModelFamily) -> None:
    """Check the language model and the vision tower of a family that combines other families."""
    text_config, vision_config = config.get_text_config(), config.vision_config
    if text_config.model_type not in family.language_types:
        raise ModelError(
            f"The language model within this {family.model_type!r} is a {text_config.model_type!r}, which is not "
            f"tested. Supported types: {', '.join(family.language_types)}."
        )
    tower = family.tile_tower or family.image_tower
    if vision_config.model_type != tower:
        raise ModelError(
            f"The vision tower of this {family.model_type!r} is a {vision_config.model_type!r}; only "
            f"{tower!r} is supported."
        )
    layer = getattr(config, "vision_feature_layer", -1)
    strategy = getattr(config, "vision_feature_select_strategy", "default")
    # Without "default" the features of a tile include one that stands for all of it, if its tower
    # has such a token.
    wanted = "full" if family.tile_assembly is not None else "default"
    if not isinstance(layer, int) or strategy != wanted or (family.image_tower and layer != -1):
        raise ModelError(
            f"This {family.model_type!r} has vision_feature_layer = {layer} and "
            f"vision_feature_select_strategy = {strategy!r}, which is not supported."
        )
    if family.tile_assembly is not None and config.vision_aspect_ratio != "anyres_max_9":  # as vLLM assumes
        raise ModelError(
            f"This {family.model_type!r} has vision_aspect_ratio = {config.vision_aspect_ratio!r}; only 'anyres_max_9' "
            "is supported."
        )
    for name, value in vision_config.to_dict().items():
        if "drop" in name and value:
            raise ModelError(
                f"The vision tower has {name} = {value}. Log-probabilities must be deterministic, so set it to 0 "
                "in override_config under vision_config."
            )


def _rope_types(text_config: Any) -> set[str]:
    """Return the types of rotary embeddings; some families have one for each type of layer."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    layered = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(part.get("rope_type", "default")) for part in layered or [parameters]}


def _has_square_experts(text_config: Any) -> bool:
    inner = text_config.moe_intermediate_size
    return text_config.hidden_size in (inner, 2 * inner)
