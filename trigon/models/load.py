"""Loads Hugging Face model folders: models with their weights, tokenizers and processors.

A model is loaded completely or not at all: missing, unexpected and mismatched weights are errors.
This is the only module that calls `from_pretrained` for models, tokenizers and processors.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trigon.config.paths import local_path, nearest_path
from trigon.errors import ModelError
from trigon.models.attention import sliding_windows, use_group_attention
from trigon.models.families import ModelFamily, family_named
from trigon.models.hub import (
    IGNORED_FILES,
    modelscope_folder,
    require_config_file,
    require_weight_files,
    uses_modelscope,
)
from trigon.models.kernels import Kernel
from trigon.models.linear_attention import use_group_linear_attention
from trigon.models.routing import use_row_routing
from trigon.models.vision_encoder import use_patch_projection
from trigon.system.files import read_json_object, write_json
from trigon.system.terminal import nearest
from trigon.system.torchvision_stub import declare_operators

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".index.json")

_TIED = ("embed_tokens.weight", "lm_head.weight")

ATTENTION = "sdpa"
"""transformers' attention where group attention does not replace it.

Always passed, since a config.json may name another one, and a name with a slash is code of a hub.
"""

# Numbers of a config.json or its parts that are at least 1, and what no model is near to.
_SIZES: Mapping[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "depth"), 2_000),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads", "head_dim"), 100_000),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim"), 100_000),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 100_000),
    **dict.fromkeys(("patch_size", "temporal_patch_size", "spatial_merge_size", "num_experts"), 100_000),
    **dict.fromkeys(("hidden_size", "embed_dim", "out_hidden_size", "intermediate_size"), 10_000_000),
    **dict.fromkeys(("moe_intermediate_size", "vocab_size"), 10_000_000),
    "max_position_embeddings": 2**40,
}

# Text that pre-tokenizers split differently: spaces, newlines, contractions, numbers, accents,
# scripts, code.
_TOKENIZER_TEST_TEXT = (
    "How many  sides?\n\n\tIt's 1234.5% of caf\u00e9 \u4e09\u89d2\u5f62; x_1 = [A2, 'b'] {\\boxed{7}}"
)


@dataclass(frozen=True, slots=True, eq=False)
class Processors:
    """The tokenizer and processors of a model, with the parts of its config that they need.

    tokenizer: a Hugging Face tokenizer.
    image_processor, video_processor: Hugging Face processors; None for a family without images, or
        without videos.
    hf_config: the model's config.
    stop_token_ids: the tokens that end a completion, without duplicates.
    banned_token_ids: the tokens that are never sampled, because only a processor may insert them.
    """

    tokenizer: Any
    image_processor: Any | None
    video_processor: Any | None
    family: ModelFamily
    hf_config: Any
    stop_token_ids: tuple[int, ...]
    banned_token_ids: tuple[int, ...]


def model_folder(model_path: str) -> Path:
    """Return the local folder of a model, downloaded from the hub (hub.py) if needed.

    Args: model_path: a local folder, or a hub id.
    Raises: ModelError if it is neither a model folder nor a reachable repository.
    """
    folder = local_path(model_path)
    if folder is None or not folder.is_dir():
        folder = modelscope_folder(model_path, "model") if uses_modelscope() else _download(model_path)
    require_config_file(folder)
    return folder


def folder_without_weights(model_path: str) -> Path:
    """Return a local folder with the files of a model, downloaded if needed, but for its weights.

    A local folder is returned as it is. Raises: as model_folder.
    """
    folder = local_path(model_path)
    if folder is not None or uses_modelscope():  # its client takes no patterns of weights alone
        return model_folder(model_path)
    folder = _download(model_path, ignored=(*IGNORED_FILES, "*.safetensors"))
    return model_folder(str(folder))


def require_weights(model_path: str) -> None:
    """Raise ModelError if a model's folder has no weights; they are not read."""
    require_weight_files(model_folder(model_path))


def require_tied_head(folder: Path, config: Any) -> None:
    """Raise ModelError if the config ties the output head to the embedding, and the files do not.

    Some published models have a copy of the embedding as their head, which is accepted. Where the
    two differ, transformers and vLLM use both, against the config, and no export could be loaded.
    """
    if not getattr(config, "tie_word_embeddings", False):
        return
    parts: dict[str, tuple[str, Tensor]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with _explain_errors("model", folder), safe_open(file, framework="pt") as tensors:
            found = ((name, part) for name in tensors.keys() for part in _TIED if name.endswith(part))  # noqa: SIM118
            parts |= {part: (name, tensors.get_tensor(name)) for name, part in found}  # mapped, not read
    if len(parts) < len(_TIED):
        return
    (embedding_name, embedding), (head_name, head) = (parts[part] for part in _TIED)
    if not torch.equal(embedding, head):
        raise ModelError(
            f"The config.json in {folder} has tie_word_embeddings = true, but {head_name} is not a copy of "
            f"{embedding_name}. If the head was trained on its own, set tie_word_embeddings to false there, or "
            "worker.actor.model.override_config={tie_word_embeddings: false}; if not, remove it from the weights."
        )


@contextmanager
def _explain_errors(what: str, folder: Path) -> Iterator[None]:
    """Turn the errors of transformers for missing and damaged files into a ModelError."""
    try:
        yield
    except (OSError, ValueError, ArithmeticError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        message = " ".join(str(error).split())[:500]
        raise ModelError(
            f"The {what} in {folder} cannot be loaded: {message}. Check its files, or download the model again."
        ) from error


def _download(model_path: str, *, ignored: Sequence[str] = IGNORED_FILES) -> Path:
    from huggingface_hub import constants, snapshot_download

    try:
        return Path(snapshot_download(model_path, ignore_patterns=list(ignored)))
    except (OSError, ValueError) as error:  # the base classes of the Hub's errors
        cause = str(error).rstrip(".")
        raise ModelError(
            f"{model_path!r} is neither a folder on this machine nor a model that could be downloaded from the "
            f"Hugging Face Hub ({constants.ENDPOINT}): {cause}. Check the spelling, the network (HF_ENDPOINT names a "
            f"mirror), and for a gated model the access token{nearest_path(model_path)}"
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
    """Load the tokenizer, the processors and the config of a model, without its weights.

    Args:
        tokenizer_path: folder or hub id of the tokenizer, if it is not the model's.
        chat_template: Jinja text that replaces the tokenizer's template.
        min_pixels, max_pixels: the processor enlarges or shrinks images to this area; None for the
            model's own limits. No effect on a family whose tower does not take patches.
    Raises: ModelError if the model is not found or not supported, if files of its tokenizer or
        processors are missing or damaged, if it has no stop token or no chat template, or if
        min_pixels exceeds max_pixels.
    """
    folder = model_folder(model_path)
    family = family_of_folder(folder)
    hf_config = load_hf_config(folder, trust_remote_code=trust_remote_code)
    tokenizer = _load_tokenizer(
        folder if tokenizer_path is None else model_folder(tokenizer_path), trust_remote_code=trust_remote_code
    )
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    if tokenizer.chat_template is None:
        raise ModelError(
            f"The tokenizer of {model_path!r} has no chat template. Use an instruction-tuned model, or set "
            "data.override_chat_template."
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
    """Load a model with all its weights, in eval mode, with group attention.

    Args:
        dtype: the dtype of the weights.
        device: "meta" creates the model without loading its weights.
        override_config: values that replace values of the model's config, nested like the config.
        attention_kernel: the kernel of group attention, see kernels.py.
    Returns: a transformers PreTrainedModel.
    Raises: ModelError if the model is not found or not supported, if its files
        cannot be read, if a weight is missing, unexpected or has another shape, or if
        override_config has a key that the config does not have.
    """
    folder = model_folder(model_path)
    family = family_of_folder(folder)
    config = load_hf_config(folder, trust_remote_code=trust_remote_code, override_config=override_config)
    require_supported(config, family)
    device = torch.device(device)
    require_tied_head(folder, config)
    if device.type == "meta":
        with _explain_errors("model", folder), device:
            model = auto_class(family).from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    else:
        require_weights(model_path)
        with _explain_errors("model", folder), without_progress_bars():
            model, report = auto_class(family).from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # reported below, with missing and unexpected weights
                output_loading_info=True,
            )
        _require_complete_weights(folder, report)
    for name, parameter in model.named_parameters():
        if name.startswith(family.unused_parameters):
            parameter.requires_grad_(False)
    family.language_model(model).config.use_cache = False
    patch_model(model, family, attention_kernel)
    model.name_or_path = model_path  # as given, not the folder of the downloaded copy
    return model.to(device).eval()


def load_hf_config(
    folder: Path, *, trust_remote_code: bool = False, override_config: Mapping[str, Any] | None = None
) -> Any:
    """Return the config of the model in a folder, a transformers PreTrainedConfig.

    override_config: see load_model. Raises: ModelError for a damaged file, or an unknown key.
    """
    declare_operators()
    from transformers import AutoConfig

    _require_sizes(_read_json(folder / "config.json"), folder)
    with _explain_errors("config", folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    config._attn_implementation = ATTENTION
    config._experts_implementation = None
    _override(config, override_config or {}, where="")
    return config


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hide the progress bars of transformers. The bars of downloads are shown before."""
    from transformers.utils import logging

    were_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_shown:
            logging.enable_progress_bar()


def patch_model(model: Any, family: ModelFamily, attention_kernel: Kernel = "sdpa") -> None:
    """Replace attention, routers and patch projection of a model; its weights do not change."""
    use_group_attention(model, family, attention_kernel)
    use_group_linear_attention(model, family)
    use_row_routing(model, family)
    use_patch_projection(model, family)


def auto_class(family: ModelFamily) -> Any:
    """Return the auto class of transformers that loads the models of a family."""
    declare_operators()
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if family.has_vision else AutoModelForCausalLM


def copy_side_files(folder: Path, destination: Path) -> tuple[str, ...]:
    """Copy all files of a model folder except weights and hidden files.

    These are the config, generation config, tokenizer, chat template, processor configs and other
    files of the model. The destination is created if it does not exist.

    Returns: the relative names of the copied files, sorted.
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


def family_of_folder(folder: Path) -> ModelFamily:
    """Return the family of the model in a folder. Raises: ModelError if it is not supported."""
    # Read as JSON: the error of AutoConfig for an unknown type does not list the supported ones.
    content = _read_json(folder / "config.json")
    # Omni models have the config of their vision tower within the config of a part.
    parts = [content, *(part for part in content.values() if isinstance(part, Mapping))]
    return family_named(str(content.get("model_type", "")), with_vision=any("vision_config" in part for part in parts))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}). Download the model again.") from error


def _require_sizes(content: Mapping[str, Any], folder: Path) -> None:
    """Raise ModelError for a size in a config.json that no model has.

    Before transformers reads it, which may never end with such a number of layers.
    """
    for name, value in content.items():
        if isinstance(value, Mapping):
            _require_sizes(value, folder)
        most = _SIZES.get(name)
        sizes = value if isinstance(value, list) else [value]
        if most is not None and any(isinstance(size, int | float) and not 1 <= size <= most for size in sizes):
            raise ModelError(
                f"The config.json in {folder} has {name} = {value}, which must be at least 1 and at most {most:,}. "
                "Correct it, or download the model again."
            )


def _load_tokenizer(folder: Path, *, trust_remote_code: bool) -> Any:
    """Return the tokenizer of a folder, checked against its tokenizer.json if there is one.

    transformers 5 rebuilds some tokenizers from the class named in their config instead of from
    that file. DeepSeek-R1's distills of Llama 3 are byte-level but name the class of Llama 2:
    rebuilt, they drop all spaces without a warning.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    with _explain_errors("tokenizer", folder):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    # Without tokenizer files, transformers returns a tokenizer that has only special tokens.
    if len(set(tokenizer(_TOKENIZER_TEST_TEXT, add_special_tokens=False)["input_ids"])) < 2:
        raise ModelError(
            f"{folder} has no vocabulary for its tokenizer (tokenizer.json, or files such as vocab.json with "
            "merges.txt). Download the model again, or set worker.actor.model.tokenizer_path to a folder that has one."
        )
    if _matches_tokenizer_json(tokenizer, folder):
        return tokenizer
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if _matches_tokenizer_json(tokenizer, folder):
        return tokenizer
    raise ModelError(
        f"The tokenizer that transformers loads from {folder} does not match its tokenizer.json. Save the "
        "tokenizer again with tokenizer_class = PreTrainedTokenizerFast in tokenizer_config.json."
    )


def _matches_tokenizer_json(tokenizer: Any, folder: Path) -> bool:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return True
    from tokenizers import Tokenizer

    reference = Tokenizer.from_file(str(path))
    reference.no_truncation()
    reference.no_padding()
    expected = reference.encode(_TOKENIZER_TEST_TEXT, add_special_tokens=False).ids
    return bool(tokenizer(_TOKENIZER_TEST_TEXT, add_special_tokens=False)["input_ids"] == expected)


def _load_image_processor(folder: Path, family: ModelFamily, min_pixels: int | None, max_pixels: int | None) -> Any:
    from transformers import AutoImageProcessor

    with _explain_errors("image processor", folder):
        processor = AutoImageProcessor.from_pretrained(folder)
    if not family.takes_patches:
        return processor  # has limits of another kind
    set_pixel_limits(processor, family, min_pixels=min_pixels, max_pixels=max_pixels)
    frames = family.frames_per_image
    smallest, largest = processor.size["shortest_edge"] // frames, processor.size["longest_edge"] // frames
    if smallest > largest:
        raise ModelError(
            f"Images would be enlarged to at least {smallest} pixels and shrunk to at most {largest}: min_pixels must "
            "not exceed max_pixels. Set both, or lower min_pixels."
        )
    return processor


def set_pixel_limits(
    image_processor: Any, family: ModelFamily, *, min_pixels: int | None, max_pixels: int | None
) -> None:
    """Set the least and the most pixels of an image; None leaves a limit as it is.

    image_processor: the image processor of a family whose vision tower takes patches.
    """
    limits = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
    changes = {edge: family.frames_per_image * limit for edge, limit in limits.items() if limit is not None}
    image_processor.size = type(image_processor.size)(**{**dict(image_processor.size), **changes})


def _load_video_processor(folder: Path) -> Any:
    from transformers import AutoVideoProcessor

    with _explain_errors("video processor", folder):
        processor = AutoVideoProcessor.from_pretrained(folder)
    if hasattr(processor, "cap_pixels_per_frame"):
        processor.cap_pixels_per_frame = False  # if not set, it warns that its default will change
    return processor


def _stop_token_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    stop = _read_json(path).get("eos_token_id") if path.is_file() else None
    if stop is None:
        stop = tokenizer.eos_token_id
    if stop is None:
        raise ModelError(
            f"Neither the generation config nor the tokenizer in {folder} has a stop token. "
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


def _require_complete_weights(folder: Path, report: Mapping[str, Any]) -> None:
    mismatched = sorted(name for name, *_ in report["mismatched_keys"])
    missing = sorted(set(report["missing_keys"]) - set(mismatched))
    # Old Llama checkpoints contain the rotary frequencies, which are computed from the config.
    unexpected = sorted(name for name in report["unexpected_keys"] if not name.endswith("rotary_emb.inv_freq"))
    problems = [
        f"{len(names)} {problem} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for names, problem in ((missing, "missing"), (unexpected, "unexpected"), (mismatched, "of the wrong shape"))
        if names
    ]
    if problems:
        raise ModelError(
            f"The weights in {folder} do not fit its config.json: {'; '.join(problems)}. Download the model again."
        )


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
    if vision_config.model_type != family.tower_type:
        raise ModelError(
            f"The vision tower of this {family.model_type!r} is a {vision_config.model_type!r}; only "
            f"{family.tower_type!r} is supported."
        )
    layer = getattr(config, "vision_feature_layer", -1)
    strategy = getattr(config, "vision_feature_select_strategy", "default")
    # Without "default" the features of a tile include one that stands for all of it, if its tower
    # has such a token.
    wanted = "full" if family.tile_assembly is not None else "default"
    if not isinstance(layer, int) or strategy != wanted or not (family.tiles or layer == -1):
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


_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template.*",
)
_CHAT_TEMPLATE = "chat_template.jinja"


def write_side_files(
    source: Path,
    destination: Path,
    processors: Processors,
    *,
    sets_limits: bool = False,
    sets_chat_template: bool = False,
    tokenizer: Path | None = None,
    override_config: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Copy the files of a model folder except its weights, with what a run has changed.

    Args:
        source: the folder of the model.
        processors: the processors of the run.
        sets_limits: the image processor has other pixel limits than the model's.
        sets_chat_template: the tokenizer has another chat template than the model's.
        tokenizer: the folder of the tokenizer; None: source.
        override_config: as in load_model.
    """
    copy_side_files(source, destination)
    if override_config:
        config = load_hf_config(source, trust_remote_code=trust_remote_code, override_config=override_config)
        config.save_pretrained(destination)
    if tokenizer is not None:
        _copy_tokenizer(tokenizer, destination)
    if sets_chat_template:
        _write_chat_template(destination, processors.tokenizer.chat_template)
    family = processors.family
    if sets_limits and family.takes_patches:
        assert processors.image_processor is not None
        size = processors.image_processor.size
        limits = (int(size["shortest_edge"]), int(size["longest_edge"]))
        _write_pixel_limits(destination, limits, of_videos=family.video in ("patches", "seconds"))


def pixel_limits(processors: Processors) -> tuple[int, int] | None:
    """Return the least and the most pixels of an image; None for a model without such limits."""
    if processors.image_processor is None or not processors.family.takes_patches:
        return None
    size, frames = processors.image_processor.size, processors.family.frames_per_image
    return int(size["shortest_edge"]) // frames, int(size["longest_edge"]) // frames


def most_image_pixels(processors: Processors) -> int | None:
    """Return the most pixels of an image that a processor has resized; None if it makes tiles."""
    family, processor = processors.family, processors.image_processor
    if processor is None:
        return None
    match family.vision_input:
        case "tiles":
            return None
        case "patches":
            return int(processor.size["longest_edge"]) // family.frames_per_image
        case "images":
            return int(processor.size["longest_edge"]) ** 2
        case "pooled":
            side = family.patch_size(processors.hf_config) * family.spatial_merge(processors.hf_config)
            return int(processor.max_soft_tokens) * side**2
        case _:
            assert_never(family.vision_input)


def _copy_tokenizer(source: Path, destination: Path) -> None:
    """Replace the files of the tokenizer, and the chat template that belongs to it."""
    for file in _tokenizer_files(destination):
        file.unlink()
    for file in _tokenizer_files(source):
        shutil.copyfile(file, destination / file.name)


def _tokenizer_files(folder: Path) -> set[Path]:
    return {file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()}


def _write_chat_template(folder: Path, template: str) -> None:
    """Write a chat template in the one place that transformers and vLLM read first."""
    (folder / "chat_template.json").unlink(missing_ok=True)
    for name in ("tokenizer_config.json", "processor_config.json"):
        content = read_json_object(folder / name) if (folder / name).is_file() else {}
        if content.pop("chat_template", None) is not None:
            write_json(folder / name, content)
    (folder / _CHAT_TEMPLATE).write_text(template, encoding="utf-8")


def _write_pixel_limits(folder: Path, limits: tuple[int, int], *, of_videos: bool) -> None:
    """Write the pixel limits into the configuration of the image processor, wherever that is.

    of_videos: also into the configuration of the video processor, whose limits are the limits of a
    frame. Qwen3-VL limits all frames together, so that the limits of a frame cannot be written.
    """
    places = [("preprocessor_config.json", ""), ("processor_config.json", "image_processor")]
    if of_videos:
        places += [("video_preprocessor_config.json", ""), ("processor_config.json", "video_processor")]
    for name, key in places:
        path = folder / name
        content = read_json_object(path) if path.is_file() else {}
        section = content.get(key) if key else content
        if not isinstance(section, dict) or not section:
            continue
        section["size"] = {"shortest_edge": limits[0], "longest_edge": limits[1]}
        for limit_key, limit in zip(("min_pixels", "max_pixels"), limits, strict=True):
            if limit_key in section:  # of folders that version 4 of transformers wrote
                section[limit_key] = limit
        write_json(path, content)
