"""LoRA: small matrices that learn beside frozen weights (Hu et al., arXiv:2106.09685).

The weight W of an adapted linear layer acts as W + scaling * B @ A, of which only A [rank, in] and B [out, rank] train.
Knows peft, here and nowhere else: which layers get adapters, how these begin, are turned off and merged, and what they
are called on disk. Refuses to know policies, ranks and files: tensors may be sharded, and whoever needs them whole
gathers them.
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

from trigon.errors import ModelError
from trigon.models.families import Family, family_of
from trigon.types import NamedTensors

ALL_LINEAR = "all-linear"
"""As target_modules: every linear layer but the head; of a model with experts, those outside its MLPs."""

# In a model with experts, peft 0.21 takes these names for theirs wherever they are, and rewrites what is asked of it.
_NAMES_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")

_ADAPTER = "default"  # peft's name for the only adapter of a model; it stands in the names of parameters
_PEFT_PREFIX = "base_model.model."  # begins every name in a file that peft wrote
_NAMES = re.compile(r"\s*[\w.-]+\s*(,\s*[\w.-]+\s*)*")  # no character that only regular expressions need


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """How adapters are made.

    rank: at least 1. alpha: scaling is alpha / rank.
    target_modules, exclude_modules: ALL_LINEAR (as a target), the ends of module names ("q_proj", "mlp.down_proj") as a
    tuple or separated by commas, or a regular expression that the whole name of a module has to match. Names are those
    of the model in memory: "model.language_model.layers.0.self_attn.q_proj".
    """

    rank: int
    alpha: int
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...] | None


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """What learns beside one linear layer: A [rank, in], B [out, rank]."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    scaling: float


def add_lora(model: Any, settings: LoraSettings, *, seed: int) -> None:
    """Put an adapter beside each linear layer that is chosen and not frozen yet, and freeze everything else.

    The model, a transformers one on any device ("meta" too), keeps its class and computes what it did, since B begins
    as zero. A begins as peft has it, drawn from seed alone: the same on every rank. Both are in float32 at least, since
    in bfloat16 most of LoRA's steps would be rounded away; where the model's dtype is narrower, compute under autocast
    or under a sharding that gathers weights in one dtype. Layers that were frozen before, such as a vision tower that
    is not to learn, get no adapter; freezing them afterwards keeps theirs at zero. Only linear layers are chosen, and
    never the head, whose weight is read directly. Experts are stacked and no linear layers: they stay as they are, and
    so do the dense MLPs beside them.
    Raises: ModelError if the settings choose the head, an MLP beside experts, or nothing, or have a name or an
    exclusion that fits no layer.
    """
    from peft import LoraConfig, TaskType, inject_adapter_in_model

    if settings.rank < 1:
        raise ModelError(f"LoRA needs a rank of at least 1, not {settings.rank}.")
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=_chosen(model, settings),
        lora_dropout=0.0,  # log-probabilities must not be drawn by chance
        task_type=TaskType.CAUSAL_LM,
    )
    # peft draws A from the global generator, before it is drawn again below.
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    generator = torch.Generator().manual_seed(seed)
    for _, layer in _adapted_layers(model):
        # peft would copy every input into A's dtype; autocast and sharding bring the small A to the input's instead.
        layer.cast_input_dtype_enabled = False
        for half in (layer.lora_A[_ADAPTER], layer.lora_B[_ADAPTER]):
            half.to(torch.promote_types(half.weight.dtype, torch.float32))
        start = layer.lora_A[_ADAPTER].weight
        bound = layer.in_features**-0.5
        if not start.is_meta:
            drawn = torch.empty(start.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
            start.data.copy_(drawn)
    model.train(model.training)  # peft's modules are made in train mode


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """Return the adapters of a model by the names of their layers; none if it has no LoRA."""
    return {
        name: Adapter(layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight, layer.scaling[_ADAPTER])
        for name, layer in _adapted_layers(model)
    }


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Make the model, or a policy around it, compute without its adapters, as before LoRA: the reference.

    Touches no parameter, sharded or not. Raises: ModelError if there are no adapters.
    """
    layers = [layer for _, layer in _adapted_layers(model)]
    if not layers:
        raise ModelError("The model has no adapters to turn off. Set worker.actor.model.lora.rank above 0.")
    before = [layer.disable_adapters for layer in layers]
    try:
        for layer in layers:
            # peft 0.21 turns adapters off in public by enable_adapters(), which sets requires_grad on their weights as
            # well: it would make those of a frozen vision tower trainable, and swap what FSDP reduces in mid-run.
            layer._disable_adapters = True
        yield
    finally:
        for layer, off in zip(layers, before, strict=True):
            layer._disable_adapters = off


def merged_weight(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float) -> Tensor:
    """Return weight + scaling * B @ A, computed in float32, in weight's dtype. All whole, and on one device."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return torch.addmm(weight.to(wide), lora_b.to(wide), lora_a.to(wide), alpha=scaling).to(weight.dtype)


def adapter_tensors(model: nn.Module) -> NamedTensors:
    """Iterate over the adapters' live parameters, under the names that peft gives them in adapter_model.safetensors."""
    for name, adapter in adapters_of(model).items():
        yield f"{_PEFT_PREFIX}{name}.lora_A.weight", adapter.lora_a
        yield f"{_PEFT_PREFIX}{name}.lora_B.weight", adapter.lora_b


def adapter_config(model: Any, *, base_model: str) -> dict[str, object]:
    """Return what belongs into the adapter_config.json beside adapter_tensors, for peft and vLLM.

    base_model: where the weights below the adapters are found. target_modules are those that the model has, whatever
    the settings were. Raises: ModelError if there are no adapters.
    """
    if not adapters_of(model):
        raise ModelError("The model has no adapters to describe. Set worker.actor.model.lora.rank above 0.")
    config = {
        **model.peft_config[_ADAPTER].to_dict(),
        "base_model_name_or_path": base_model,
        "inference_mode": True,  # whoever loads it does not train it, unless told to
    }
    return {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}


def merge_names(names: Iterable[str], family: Family) -> dict[str, tuple[str, str]]:
    """Return, for each weight of a checkpoint that has an adapter, the names of its A and B among adapter_tensors'.

    Example, Qwen2.5-VL: "model.layers.0.mlp.up_proj.weight" has A
    "base_model.model.model.language_model.layers.0.mlp.up_proj.lora_A.weight".
    Raises: ModelError if a name is not an adapter's, or comes without its other half.
    """
    halves: dict[str, dict[str, str]] = {}
    for name in names:
        found = re.fullmatch(rf"{re.escape(_PEFT_PREFIX)}(.+)\.lora_([AB])\.weight", name)
        if found is None:
            raise ModelError(f"{name} is not the name of an adapter's weight. Give what adapter_tensors named.")
        halves.setdefault(family.checkpoint_name(f"{found[1]}.weight"), {})[found[2]] = name
    single = sorted(name for pair in halves.values() if len(pair) == 1 for name in pair.values())
    if single:
        raise ModelError(f"{single[0]} lacks its other half ({len(single)} such weights). Fetch the adapter again.")
    return {name: (pair["A"], pair["B"]) for name, pair in halves.items()}


def load_adapter(model: Any, folder: Path) -> tuple[Any, Mapping[str, Tensor]]:
    """Return a transformers model with the adapter in a folder as peft loads it, and the adapter's tensors by name.

    The names are those in the folder; the model is changed.
    """
    from peft import PeftModel, get_peft_model_state_dict

    with torch.random.fork_rng(devices=[]):  # adapters are drawn by chance, and then replaced
        adapted = PeftModel.from_pretrained(model, folder)
    return adapted, get_peft_model_state_dict(adapted)


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield peft's layers, each in the place of the linear layer that it holds. Does not import peft."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            yield name, module


def _chosen(model: Any, settings: LoraSettings) -> list[str]:
    """Return the names of the layers that get an adapter."""
    modules = dict(model.named_modules())
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    has_experts = family_of(model.config).experts != "none"
    beside_experts = [name for name in linear if has_experts and name.endswith(_NAMES_OF_EXPERTS)]
    inner = [name for name in linear if modules[name] is not model.lm_head and name not in beside_experts]
    targets, exclusions = settings.target_modules, settings.exclude_modules
    chosen = set(inner) if targets == ALL_LINEAR else set()
    for written, pattern in () if targets == ALL_LINEAR else _patterns(targets):
        fitting = _fitting(pattern, linear)
        if has_experts and (written.endswith(_NAMES_OF_EXPERTS) or any(name in beside_experts for name in fitting)):
            raise ModelError(
                f"{written!r}, of LoRA's target_modules, fits MLPs of a {model.config.model_type!r} model, whose "
                "experts are stacked into tensors that get no adapters. Name layers of the attention, or "
                f"{ALL_LINEAR!r}, or train all weights."
            )
        if not fitting:
            raise ModelError(f"No linear layer fits {written!r}, of LoRA's target_modules. {_known(inner)}")
        chosen.update(fitting)
    for written, pattern in () if exclusions is None else _patterns(exclusions):
        fitting, holders = _fitting(pattern, linear), _fitting(pattern, modules)
        # That nothing at all fits is fine: a model for text alone has no ".*visual.*".
        if holders and not fitting:
            raise ModelError(
                f"{written!r}, of LoRA's exclude_modules, fits {holders[0]}, which is no linear layer, so it would "
                f"exclude nothing. To exclude all that is in it, write '.*{written}.*'."
            )
        chosen.difference_update(fitting)
    if not chosen <= set(inner):
        raise ModelError(
            f"LoRA's target_modules, {targets!r}, choose the head, which log-probabilities read without an adapter. "
            f"Choose other layers, or {ALL_LINEAR!r}, or exclude lm_head."
        )
    trainable = [name for name in inner if name in chosen and modules[name].weight.requires_grad]
    if not trainable:
        why = "are all frozen" if chosen else f"are all excluded by exclude_modules, {exclusions!r}"
        raise ModelError(f"The layers of LoRA's target_modules, {targets!r}, {why}. {_known(inner)}")
    return trainable


def _patterns(wish: str | tuple[str, ...]) -> list[tuple[str, re.Pattern[str]]]:
    """Return what the whole name of a module has to match: for each part of a wish, as written and as a pattern."""
    if isinstance(wish, str) and _NAMES.fullmatch(wish):
        wish = tuple(name.strip() for name in wish.split(","))
    if isinstance(wish, tuple):
        return [(name, re.compile(rf"(.*\.)?{re.escape(name)}")) for name in wish]
    try:
        return [(wish, re.compile(wish))]
    except re.error as error:
        raise ModelError(
            f"{wish!r}, of LoRA's modules, is neither names separated by commas nor a regular expression: {error}."
        ) from error


def _fitting(pattern: re.Pattern[str], names: Iterable[str]) -> list[str]:
    return [name for name in names if pattern.fullmatch(name)]


def _known(names: Sequence[str]) -> str:
    """Return a sentence that tells layers by their endings, and one in full."""
    endings = dict.fromkeys(name.rpartition(".")[2] for name in names)
    return f"There are layers named {', '.join(endings)}; one in full is {names[-1]}."
