"""LoRA: low-rank matrices that are trained instead of the weights (Hu et al., arXiv:2106.09685).

The weight W of an adapted linear layer acts as W + scaling * B @ A; only A [rank, in] and B [out,
rank] are trained. This is the only module that uses peft: it selects the layers, initializes,
disables and merges adapters, and names their tensors in files. Tensors may be sharded; where full
tensors are needed, the caller gathers them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trigon.config.schema import LoraConfig
from trigon.errors import ModelError
from trigon.models.families import ModelFamily, family_of
from trigon.types import NamedTensors

ALL_LINEAR = "all-linear"
"""As target_modules: every linear layer except the head and, in an MoE model, the MLPs."""

# In an MoE model, peft 0.21 takes modules of the first three names for experts, wherever they are,
# and rewrites the target modules. The last one has a single output, and would get an adapter with
# more weights than it has itself.
_MOE_LAYERS = ("gate_proj", "up_proj", "down_proj", "shared_expert_gate")

_ADAPTER = "default"  # peft's name of a model's only adapter, part of the names of its parameters
_PEFT_PREFIX = "base_model.model."  # of every tensor name in a file written by peft
_NAMES = re.compile(r"\s*[\w.-]+\s*(,\s*[\w.-]+\s*)*")  # has no character that is special in regular expressions


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """The adapter of one linear layer: A [rank, in], B [out, rank]."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    scaling: float


def add_lora(model: Any, settings: LoraConfig, *, seed: int) -> None:
    """Add an adapter to each selected linear layer that is not frozen; freeze all other parameters.

    The model, a transformers model on any device ("meta" too), keeps its class and its outputs: B
    is initialized to zero, A as by peft, but from the seed alone, so that all ranks get the same.

    Adapters are in float32 or wider, since in bfloat16 most updates of LoRA would be rounded away.
    For a model in a narrower dtype, use autocast, or a sharding that gathers weights in one dtype.

    Layers that are frozen already, such as the layers of a frozen vision tower, get no adapter; if
    they are frozen afterwards, their adapters stay at zero. The head gets none, because its weight
    is used directly. In an MoE model the stacked experts are not linear layers; they, the dense
    MLPs and the gate of a shared expert get none.

    Raises: ModelError if the settings select the head, an MLP of an MoE model, or no layer; if a
        target matches no linear layer; if an exclusion matches modules, but no linear layer; or if
        it matches nothing in a model with a vision tower.
    """
    from peft import LoraConfig as PeftConfig
    from peft import TaskType, inject_adapter_in_model

    if settings.rank < 1:
        raise ModelError(f"LoRA needs a rank of at least 1, not {settings.rank}.")
    config = PeftConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=_selected_layers(model, settings),
        lora_dropout=0.0,  # log-probabilities must be deterministic
        task_type=TaskType.CAUSAL_LM,
    )
    # peft initializes A from the global generator; A is initialized again below.
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    generator = torch.Generator().manual_seed(seed)
    for _, layer in _adapted_layers(model):
        # peft would cast every input to A's dtype; autocast and sharding cast the smaller A
        # instead.
        layer.cast_input_dtype_enabled = False
        for linear in (layer.lora_A[_ADAPTER], layer.lora_B[_ADAPTER]):
            linear.to(torch.promote_types(linear.weight.dtype, torch.float32))
        lora_a = layer.lora_A[_ADAPTER].weight
        bound = layer.in_features**-0.5
        if not lora_a.is_meta:
            initial = torch.empty(lora_a.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
            lora_a.data.copy_(initial)
    model.train(model.training)  # peft creates its modules in train mode


def adapter_widths(model: Any, settings: LoraConfig) -> dict[str, int]:
    """Return the weights for each rank of the adapters that add_lora would add, by layers' names.

    The model does not change, and the rank of the settings does not matter. Raises: ModelError if
    the settings do not fit the model, as add_lora does.
    """
    layers = ((name, model.get_submodule(name)) for name in _selected_layers(model, settings))
    return {name: layer.in_features + layer.out_features for name, layer in layers}


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """Return the adapters of a model by the names of their layers; empty without LoRA."""
    return {
        name: Adapter(layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight, layer.scaling[_ADAPTER])
        for name, layer in _adapted_layers(model)
    }


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable the adapters of a model, or of the model in a policy, within this context.

    It then computes what it did before LoRA, which serves as the reference. No parameter changes.
    Raises: ModelError if there are no adapters.
    """
    layers = [layer for _, layer in _adapted_layers(model)]
    if not layers:
        raise ModelError("The model has no adapters to disable. Set worker.actor.model.lora.rank above 0.")
    were_disabled = [layer.disable_adapters for layer in layers]
    try:
        for layer in layers:
            # The public enable_adapters() of peft 0.21 also sets requires_grad of the adapters: it
            # would make the adapters of a frozen vision tower trainable, and change what FSDP
            # reduces.
            layer._disable_adapters = True
        yield
    finally:
        for layer, was_disabled in zip(layers, were_disabled, strict=True):
            layer._disable_adapters = was_disabled


def merged_weight(
    weight: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Return weight + scaling * B @ A, computed in float32 or wider and then rounded to dtype.

    Args: weight: [out, in]. lora_a: [rank, in]. lora_b: [out, rank]. All full tensors on one
    device. dtype: None for weight's.
    """
    exact = torch.promote_types(weight.dtype, torch.float32)
    return torch.addmm(weight.to(exact), lora_b.to(exact), lora_a.to(exact), alpha=scaling).to(dtype or weight.dtype)


def adapter_tensors(model: nn.Module) -> NamedTensors:
    """Iterate over the adapters' parameters by their names in peft's adapter_model.safetensors."""
    for name, adapter in adapters_of(model).items():
        yield f"{_PEFT_PREFIX}{name}.lora_A.weight", adapter.lora_a
        yield f"{_PEFT_PREFIX}{name}.lora_B.weight", adapter.lora_b


def adapter_config(model: Any, *, base_model: str) -> dict[str, object]:
    """Return the content of adapter_config.json for these adapters, as peft and vLLM read it.

    Its target_modules are the names of the layers that have adapters.

    Args: base_model: path or hub id of the weights that the adapters belong to.
    Raises: ModelError if there are no adapters.
    """
    if not adapters_of(model):
        raise ModelError(
            "The model has no adapters, so there is no adapter config. Set worker.actor.model.lora.rank above 0."
        )
    config = {
        **model.peft_config[_ADAPTER].to_dict(),
        "base_model_name_or_path": base_model,
        "inference_mode": True,  # peft loads it frozen unless is_trainable is set
    }
    return {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}


def merge_names(names: Iterable[str], family: ModelFamily) -> dict[str, tuple[str, str]]:
    """Return the names of A and B in adapter_tensors for each weight that has an adapter.

    Returns: {name of the weight in a checkpoint: (name of its A, name of its B)}.

    Example, Qwen2.5-VL: the A of "model.layers.0.mlp.up_proj.weight" is
    "base_model.model.model.language_model.layers.0.mlp.up_proj.lora_A.weight".
    Raises: ModelError if a name does not belong to an adapter tensor, or if one of A and B is
    missing.
    """
    pairs: dict[str, dict[str, str]] = {}
    for name in names:
        found = re.fullmatch(rf"{re.escape(_PEFT_PREFIX)}(.+)\.lora_([AB])\.weight", name)
        if found is None:
            raise ModelError(f"{name} is not the name of an adapter tensor. Use the names of adapter_tensors.")
        pairs.setdefault(family.checkpoint_name(f"{found[1]}.weight"), {})[found[2]] = name
    unpaired = sorted(name for pair in pairs.values() if len(pair) == 1 for name in pair.values())
    if unpaired:
        raise ModelError(
            f"{unpaired[0]} has no counterpart: its lora_A or lora_B is missing ({len(unpaired)} such tensors). "
            "Download the adapter again."
        )
    return {name: (pair["A"], pair["B"]) for name, pair in pairs.items()}


def load_adapter(model: Any, folder: Path) -> tuple[Any, Mapping[str, Tensor]]:
    """Load the adapter of a folder into a transformers model with peft; the model is modified.

    Returns: the peft model, and the adapter's tensors by their names in the folder.
    """
    from peft import PeftModel, get_peft_model_state_dict

    with torch.random.fork_rng(devices=[]):  # peft initializes adapters at random before loading them
        adapted = PeftModel.from_pretrained(model, folder)
    return adapted, get_peft_model_state_dict(adapted)


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield peft's layers by the names of the linear layers they replace. Does not import peft."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            yield name, module


def _selected_layers(model: Any, settings: LoraConfig) -> list[str]:
    """Return the names of the layers that get an adapter."""
    modules = dict(model.named_modules())
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    family = family_of(model.config)
    is_moe = family.experts != "none"
    moe_mlps = [name for name in linear if is_moe and name.endswith(_MOE_LAYERS)]
    candidates = [name for name in linear if modules[name] is not model.lm_head and name not in moe_mlps]
    targets, exclusions = settings.target_modules, settings.exclude_modules
    selected = set(candidates) if targets == ALL_LINEAR else set()
    for text, pattern in () if targets == ALL_LINEAR else _patterns(targets):
        matches = _matches(pattern, linear)
        if is_moe and (text.endswith(_MOE_LAYERS) or any(name in moe_mlps for name in matches)):
            raise ModelError(
                f"{text!r} in LoRA's target_modules matches MLPs of a {model.config.model_type!r} model, whose "
                "experts are stacked into tensors that cannot have adapters. Name attention layers, or "
                f"{ALL_LINEAR!r}, or train all weights."
            )
        if not matches:
            raise ModelError(f"No linear layer matches {text!r} in LoRA's target_modules. {_layer_names(candidates)}")
        selected.update(matches)
    for text, pattern in () if exclusions is None else _patterns(exclusions):
        matches, parents = _matches(pattern, linear), _matches(pattern, modules)
        if not parents and family.has_vision:  # a text model has no ".*visual.*", a LLaVA has another
            paths = [path.removeprefix("model.") for path in (family.vision_path, family.projector_path) if path]
            raise ModelError(
                f"{text!r} in LoRA's exclude_modules matches nothing in a {family.model_type!r} model. To exclude its "
                f"vision tower, write '.*({'|'.join(paths)}).*', or set freeze_vision_tower=true in the same section."
            )
        if parents and not matches:
            raise ModelError(
                f"{text!r} in LoRA's exclude_modules matches {parents[0]}, which is not a linear layer, so it would "
                f"exclude nothing. To exclude all layers within it, write '.*{text}.*'."
            )
        selected.difference_update(matches)
    if not selected <= set(candidates):
        raise ModelError(
            f"LoRA's target_modules, {targets!r}, select the head, whose weight is used without an adapter. "
            f"Select other layers, or {ALL_LINEAR!r}, or exclude lm_head."
        )
    trainable = [name for name in candidates if name in selected and modules[name].weight.requires_grad]
    if not trainable:
        reason = "are all frozen" if selected else f"are all excluded by exclude_modules, {exclusions!r}"
        raise ModelError(f"The layers of LoRA's target_modules, {targets!r}, {reason}. {_layer_names(candidates)}")
    return trainable


def _patterns(modules: str) -> list[tuple[str, re.Pattern[str]]]:
    """Return each part of target_modules or exclude_modules, with its pattern for module names."""
    if _NAMES.fullmatch(modules):
        names = (name.strip() for name in modules.split(","))
        return [(name, re.compile(rf"(.*\.)?{re.escape(name)}")) for name in names]
    try:
        return [(modules, re.compile(modules))]
    except re.error as error:
        raise ModelError(
            f"{modules!r} in LoRA's modules is neither names separated by commas nor a regular expression: {error}."
        ) from error


def _matches(pattern: re.Pattern[str], names: Iterable[str]) -> list[str]:
    return [name for name in names if pattern.fullmatch(name)]


def _layer_names(names: Sequence[str]) -> str:
    """Return a sentence with the distinct endings of layer names, and one full name."""
    endings = dict.fromkeys(name.rpartition(".")[2] for name in names)
    return f"There are layers named {', '.join(endings)}; a full name is {names[-1]}."
