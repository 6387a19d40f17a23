"""Brings a Hugging Face folder into memory: processors without weights, or the model with every one of them.

Knows folders, configs, tokenizers and `from_pretrained`, here and nowhere else. Refuses half a model: a missing,
left-over or misshapen weight, dropout, attention that is not full, or an unknown family is an error before anything is
computed. Knows nothing of training.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trigon.config.paths import local_path
from trigon.errors import ModelError
from trigon.models.attention import use_group_attention, windows_of
from trigon.models.families import Family, family_named
from trigon.models.hub import UNREAD, modelscope_folder, uses_modelscope
from trigon.models.kernels import Kernel
from trigon.models.patches import project_patches_by_product
from trigon.suggestions import nearest
from trigon.torchvision_stub import declare_operators

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".index.json")


# What pre-tokenizers treat in different ways: spaces, newlines, contractions, numbers, accents, scripts, code.
_SPELLING_TEST = "How many  sides?\n\n\tIt's 1234.5% of caf\u00e9 \u4e09\u89d2\u5f62; x_1 = [A2, 'b'] {\\boxed{7}}"

_KNOWN_WITHIN = ("llama", "qwen2", "qwen3")  # language models of vision models that are put together of parts
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # whose frequencies are functions of the config alone


@dataclass(frozen=True, slots=True, eq=False)
class Processors:
    """What turns text and images into a model's inputs, and what its config says about them.

    tokenizer: a Hugging Face tokenizer. image_processor, video_processor: Hugging Face processors, None for a family
    that takes no images, or no videos.
    hf_config: the model's config. stop_token_ids: the tokens that end an answer, none twice.
    banned_token_ids: the tokens that may never be sampled, since only a processor may write them.
    """

    tokenizer: Any
    image_processor: Any | None
    video_processor: Any | None
    family: Family
    hf_config: Any
    stop_token_ids: tuple[int, ...]
    banned_token_ids: tuple[int, ...]


def model_folder(model_path: str) -> Path:
    """Return the local folder of a model: the folder itself, or a copy of the hub's (hub.py), downloaded when needed.

    Raises: ModelError if it is neither a model folder nor a reachable repository.
    """
    folder = local_path(model_path)
    if folder is None or not folder.is_dir():
        folder = modelscope_folder(model_path, "model") if uses_modelscope() else _download(model_path)
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} holds no config.json, so it is no Hugging Face model. Point to a folder that `save_pretrained` "
            "or `trigon export` wrote."
        )
    return folder


def _download(model_path: str) -> Path:
    from huggingface_hub import constants, snapshot_download

    try:
        return Path(snapshot_download(model_path, ignore_patterns=list(UNREAD)))
    except (
        OSError,
        ValueError,
    ) as error:  # all of the Hub's errors about names, networks and permissions are one of these
        raise ModelError(
            f"{model_path!r} is neither a folder on this machine nor a model that the Hugging Face Hub "
            f"({constants.ENDPOINT}) would give: {error}. Check the spelling, the network, and for a gated model the "
            "access token."
        ) from error


def load_processors(
    model_path: str,
    *,
    tokenizer_path: str | None = None,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
) -> Processors:
    """Load everything of a model but its weights.

    tokenizer_path: where the tokenizer lies, when elsewhere. chat_template: the Jinja text itself, replacing the
    tokenizer's own. min_pixels, max_pixels: the area to which the processor enlarges or shrinks an image; the model's
    own limits when None. Of no effect on a model that sees tiles of one size.
    Raises: ModelError if the model is not found or not supported, if no token ends an answer, if there is no chat
    template, or if min_pixels exceeds max_pixels.
    """
    folder = model_folder(model_path)
    family = family_of_folder(folder)
    declare_operators()
    hf_config = _load_config(folder, trust_remote_code=trust_remote_code)
    tokenizer = _load_tokenizer(
        folder if tokenizer_path is None else model_folder(tokenizer_path), trust_remote_code=trust_remote_code
    )
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    if tokenizer.chat_template is None:
        raise ModelError(
            f"The tokenizer of {model_path!r} has no chat template. Train an instruction-tuned model, or give a "
            "template of your own."
        )
    return Processors(
        tokenizer=tokenizer,
        image_processor=_load_image_processor(folder, family, min_pixels, max_pixels) if family.has_vision else None,
        video_processor=_load_video_processor(folder) if family.video != "none" else None,
        family=family,
        hf_config=hf_config,
        stop_token_ids=_stop_token_ids(folder, tokenizer),
        banned_token_ids=family.media_token_ids(hf_config),
    )


def load_model(
    model_path: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    trust_remote_code: bool = False,
    override_config: Mapping[str, Any] | None = None,
    attention_kernel: Kernel = "sdpa",
) -> Any:
    """Load the whole model, in eval mode, with group attention in place of its own, by this kernel.

    device: "meta" makes the model without its weights, for somebody else to fill in.
    override_config: values of the model's config to replace, nested as the config is.
    Returns: a transformers PreTrainedModel.
    Raises: ModelError if the model is not found or not supported, if a weight is missing, left over or of the wrong
    shape, if it has dropout, layers without full attention or rotary positions that depend on a row's length, or if
    override_config names something that the config does not have.
    """
    folder = model_folder(model_path)
    family = family_of_folder(folder)
    declare_operators()
    config = _load_config(folder, trust_remote_code=trust_remote_code)
    _override(config, override_config or {}, where="")
    _refuse_unsupported(config, family)
    device = torch.device(device)
    if device.type == "meta":
        with device:
            model = auto_class(family).from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    else:
        model, report = auto_class(family).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,  # reported below, in our words, with the rest
            output_loading_info=True,
        )
        _refuse_half_loaded(folder, report)
    family.language_model(model).config.use_cache = False
    patch_model(model, family, attention_kernel)
    model.name_or_path = model_path  # as it was given, not where the Hub's copy lies
    return model.to(device).eval()


def patch_model(model: Any, family: Family, attention_kernel: Kernel = "sdpa") -> None:
    """Let a transformers model compute as the policy needs it to; weights and their names stay."""
    use_group_attention(model, family, attention_kernel)
    project_patches_by_product(model, family)


def auto_class(family: Family) -> Any:
    """Return what transformers calls the class that opens a family's models."""
    declare_operators()
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if family.has_vision else AutoModelForCausalLM


def copy_side_files(folder: Path, destination: Path) -> tuple[str, ...]:
    """Copy every file of a model folder that is not a weight, unchanged, and return their relative names, sorted.

    These are the config, generation config, tokenizer, chat template, processor and whatever else came with the model.
    Hidden files stay behind. The destination is made if missing.
    """
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file()
        and not path.name.endswith(_WEIGHT_SUFFIXES)
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    for name in names:
        (destination / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, destination / name)
    return tuple(names)


def family_of_folder(folder: Path) -> Family:
    """Return the family of the model in a folder. Raises: ModelError if it is not supported."""
    # Read as plain JSON: AutoConfig's own complaint about an unknown type does not say which are supported.
    return family_named(str(_read_json(folder / "config.json").get("model_type", "")))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}). Fetch the model again.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, not a JSON object. Fetch the model again.")
    return content


def _load_config(folder: Path, *, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)


def _load_tokenizer(folder: Path, *, trust_remote_code: bool) -> Any:
    """Return a folder's tokenizer, which spells as its tokenizer.json does if there is one.

    transformers 5 rebuilds some tokenizers from their class's name instead of that file, and DeepSeek-R1's distills of
    Llama 3, byte-level as they are, name the class of Llama 2: rebuilt, they lose every space in silence.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if _spells_as_written(tokenizer, folder):
        return tokenizer
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if _spells_as_written(tokenizer, folder):
        return tokenizer
    raise ModelError(
        f"transformers loads a tokenizer from {folder} that does not spell as its tokenizer.json says. Save the "
        "tokenizer again with tokenizer_class = PreTrainedTokenizerFast in tokenizer_config.json."
    )


def _spells_as_written(tokenizer: Any, folder: Path) -> bool:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return True
    from tokenizers import Tokenizer

    written = Tokenizer.from_file(str(path))
    written.no_truncation()
    written.no_padding()
    expected = written.encode(_SPELLING_TEST, add_special_tokens=False).ids
    return bool(tokenizer(_SPELLING_TEST, add_special_tokens=False)["input_ids"] == expected)


def _load_image_processor(folder: Path, family: Family, min_pixels: int | None, max_pixels: int | None) -> Any:
    from transformers import AutoImageProcessor

    if family.tiles:
        return AutoImageProcessor.from_pretrained(folder)  # what it makes of an image is as large as a tile, always
    limits = {"min_pixels": min_pixels, "max_pixels": max_pixels}
    # Given at loading, both become the `size` of the processor; given at each call, they are deprecated.
    processor = AutoImageProcessor.from_pretrained(
        folder, **{name: value for name, value in limits.items() if value is not None}
    )
    smallest, largest = processor.size["shortest_edge"], processor.size["longest_edge"]
    if smallest > largest:
        raise ModelError(
            f"Images would be enlarged to at least {smallest} pixels and shrunk to at most {largest}: min_pixels must "
            "not exceed max_pixels. Set both, or lower min_pixels."
        )
    return processor


def _load_video_processor(folder: Path) -> Any:
    from transformers import AutoVideoProcessor

    processor = AutoVideoProcessor.from_pretrained(folder)
    if hasattr(processor, "cap_pixels_per_frame"):
        processor.cap_pixels_per_frame = False  # each frame's limits are ours; unset, it warns that this will change
    return processor


def _stop_token_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    stop = _read_json(path).get("eos_token_id") if path.is_file() else None
    if stop is None:
        stop = tokenizer.eos_token_id
    if stop is None:
        raise ModelError(
            f"Neither the generation config nor the tokenizer in {folder} says which token ends an answer. "
            "Add eos_token_id to its generation_config.json."
        )
    return tuple(dict.fromkeys(int(token) for token in (stop if isinstance(stop, list) else [stop])))


def _override(config: Any, overrides: Mapping[str, Any], *, where: str) -> None:
    for key, value in overrides.items():
        if not hasattr(config, key):
            near = nearest(key, config.to_dict())
            hint = f" Did you mean {where}{near}?" if near else ""
            raise ModelError(
                f"override_config sets {where}{key}, which a {config.model_type!r} config does not have.{hint}"
            )
        if isinstance(value, Mapping) and hasattr(getattr(config, key), "to_dict"):
            _override(getattr(config, key), value, where=f"{where}{key}.")
        else:
            setattr(config, key, value)


def _refuse_unsupported(config: Any, family: Family) -> None:
    text_config = config.get_text_config()
    dropout = getattr(text_config, "attention_dropout", 0.0)
    if dropout:
        raise ModelError(
            f"The model has attention_dropout = {dropout}. Log-probabilities must not be drawn by chance, so "
            f"set it to 0 in override_config{' under text_config' if family.has_vision else ''}."
        )
    if family.tiles:
        _refuse_unknown_parts(config, family)
    strange = sorted({*(getattr(text_config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"})
    if strange:
        raise ModelError(
            f"The model has layers of {', '.join(strange)}. Completions share their prompt's keys and values, which "
            "only attention keeps. Choose another model; docs/model-families.md says which."
        )
    longest = int(text_config.max_position_embeddings)
    if not family.windows and any(window is not None and window < longest for window in windows_of(text_config)):
        raise ModelError(
            f"The model uses sliding window attention, which is not supported for {family.model_type!r}. Choose one "
            "whose config has use_sliding_window = false, or no sliding_window."
        )
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(text_config, cap, None):
            raise ModelError(
                f"The model has {cap} = {getattr(text_config, cap)}, by which neither group attention nor the head "
                "bounds logits. Choose another model; docs/model-families.md says which."
            )
    if getattr(text_config, "use_bidirectional_attention", None):
        raise ModelError("The model attends to later tokens, so it cannot sample. Choose a causal language model.")
    for rope_type in _rope_types(text_config) - {*_ROPE_TYPES}:
        raise ModelError(
            f"The model's rotary positions are of type {rope_type!r}, with frequencies that depend on a row's length. "
            "A packed row, a single sequence and vLLM would each compute something else. Supported are: "
            f"{', '.join(_ROPE_TYPES)}."
        )
    if family.experts == "transposed" and _has_square_experts(text_config):
        raise ModelError(
            "The experts of this model are square, and transformers would load them without transposing them, in "
            "silence. Choose another moe_intermediate_size."
        )


def _refuse_unknown_parts(config: Any, family: Family) -> None:
    """Refuse a vision model that is put together of parts of which one is not known."""
    text_config, vision_config = config.get_text_config(), config.vision_config
    if text_config.model_type not in _KNOWN_WITHIN:
        raise ModelError(
            f"The language model within this {family.model_type!r} is a {text_config.model_type!r}, which it was never "
            f"tested with. Choose one that has within it: {', '.join(_KNOWN_WITHIN)}."
        )
    if vision_config.model_type != family.tile_tower:
        raise ModelError(
            f"The vision tower of this {family.model_type!r} is a {vision_config.model_type!r}; known is only "
            f"{family.tile_tower!r}."
        )
    if not isinstance(config.vision_feature_layer, int) or config.vision_feature_select_strategy != "default":
        raise ModelError(
            f"This {family.model_type!r} takes features from vision_feature_layer = {config.vision_feature_layer} by "
            f"vision_feature_select_strategy = {config.vision_feature_select_strategy!r}, which is not supported."
        )
    for name, value in vision_config.to_dict().items():
        if "drop" in name and value:
            raise ModelError(
                f"The vision tower has {name} = {value}. Log-probabilities must not be drawn by chance, so set it to 0 "
                "in override_config under vision_config."
            )


def _rope_types(text_config: Any) -> set[str]:
    """Return the kinds of rotary positions; some families have one for each type of layer."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    layered = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(part.get("rope_type", "default")) for part in layered or [parameters]}


def _has_square_experts(text_config: Any) -> bool:
    inner = text_config.moe_intermediate_size
    return text_config.hidden_size in (inner, 2 * inner)


def _refuse_half_loaded(folder: Path, report: Mapping[str, Any]) -> None:
    misshapen = sorted(name for name, *_ in report["mismatched_keys"])
    missing = sorted(set(report["missing_keys"]) - set(misshapen))
    # Old Llama checkpoints carry the rotary frequencies, which are computed from the config.
    unexpected = sorted(name for name in report["unexpected_keys"] if not name.endswith("rotary_emb.inv_freq"))
    complaints = [
        f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for names, what in ((missing, "missing"), (unexpected, "left over"), (misshapen, "of the wrong shape"))
        if names
    ]
    if complaints:
        raise ModelError(
            f"The weights in {folder} do not fit its config.json: {'; '.join(complaints)}. Fetch the model again."
        )
