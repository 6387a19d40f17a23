"""Verifies an exported folder against the checkpoint that it was made from.

Every tensor must equal the checkpoint's, and the names and shapes must be those of the model that
the config describes; for this, one tensor at a time is in memory. Then transformers must load the
folder with no missing and no unexpected tensor and compute finite logits, on a short input, with an
image if the model takes one; with an adapter, which peft loads, these must equal the logits of
merged weights. That needs memory for one model in the dtype of its files; weights are converted to
float32 layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trigon.checkpoint.weights import Lora, MergedWeights, Weights
from trigon.errors import CheckpointError
from trigon.models.families import ModelFamily, family_of
from trigon.models.load import ATTENTION, auto_class, family_of_folder, load_hf_config, without_progress_bars
from trigon.models.lora import load_adapter
from trigon.models.weight_files import stored_tensors
from trigon.training.state import ShardedFiles

_LOGIT_TOLERANCE = 1e-4  # in float32, where equal weights give equal logits up to the order of additions

ACTIVATION_BYTES = 2**28
"""More than the activations of the short input, and what the libraries allocate."""


def verify_tensors(weights: Weights, folder: Path) -> None:
    """Raise CheckpointError unless folder holds exactly these tensors, equal element by element."""
    written = ShardedFiles(folder)
    differing = written.tensors.keys() ^ weights.tensors.keys()
    if differing:
        raise CheckpointError(
            f"{len(differing)} tensors were not written, or are not in the checkpoint "
            f"({', '.join(sorted(differing)[:3])}); nothing was exported"
        )
    for name in written.tensors:
        tensor = written.read(name)
        if not torch.equal(tensor, weights.read(name).to(tensor.dtype)):
            raise CheckpointError(f"{name} in {folder} differs from the checkpoint; nothing was exported")


def verify_names(weights: Weights, folder: Path, *, model_class: Any = None) -> None:
    """Raise CheckpointError unless weights are those of the model that folder's config describes.

    Compares names and shapes, and reads no tensor. model_class: None: that of the policy.
    """
    config = load_hf_config(folder)
    family = family_of(config)
    with torch.device("meta"):
        model = (model_class or auto_class(family)).from_config(config)
    remaining = dict(weights.tensors)
    for parameter_name, parameter in stored_tensors(model):
        for name, part in family.checkpoint_tensors(parameter_name, parameter):
            stored = remaining.pop(name, None)
            if stored is None or stored.shape != tuple(part.shape):
                found = "is missing from" if stored is None else f"is {stored.shape}, not {tuple(part.shape)}, in"
                raise CheckpointError(f"{name} {found} the checkpoint, so it does not belong to its own config.json")
    if remaining:
        raise CheckpointError(f"the checkpoint holds {sorted(remaining)[:3]}, which its own config.json does not have")


def loading_bytes(weights: Weights, dtype: torch.dtype | None) -> int:
    """Return the memory that verify_model needs, or verify_adapter with the weights of its base.

    dtype: in which the weights are loaded; None: in their own.
    """
    sizes = [prod(tensor.shape) for tensor in weights.tensors.values()]
    loaded = sum(
        size * (dtype or tensor.dtype).itemsize for size, tensor in zip(sizes, weights.tensors.values(), strict=True)
    )
    # The largest one is also read and converted to float32.
    return loaded + 2 * max(sizes) * torch.float32.itemsize + ACTIVATION_BYTES


def verify_model(weights: Weights, folder: Path, dtype: torch.dtype, *, model_class: Any = None) -> None:
    """Raise CheckpointError unless folder loads in this dtype, as a model with these weights.

    Every parameter and buffer of the loaded model must equal the tensors of its name; so the logits
    are those of the checkpoint. They must be finite. model_class: None: that of the policy.
    """
    family = family_of_folder(folder)
    with without_progress_bars():
        exported, report = (model_class or auto_class(family)).from_pretrained(
            folder, dtype="auto", attn_implementation=ATTENTION, output_loading_info=True
        )
    problems = {kind: sorted(map(str, report[kind])) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if any(problems.values()):
        raise CheckpointError(f"the exported model does not load completely: {problems}; nothing was exported")
    if exported.dtype != dtype:
        raise CheckpointError(f"the exported model loads as {exported.dtype}, not {dtype}; nothing was exported")
    for name, parameter in stored_tensors(exported):
        if not torch.equal(parameter, _read(name, parameter, weights, family, parameter.dtype)):
            raise CheckpointError(f"transformers loads another {name} than the checkpoint's; nothing was exported")
    with _parameters(exported, lambda name, tensor: tensor.float()):
        logits = _logits(exported, _model_inputs(folder))
    if not bool(logits.isfinite().all()):
        raise CheckpointError("the exported model computes logits that are NaN or infinite; nothing was exported")


def verify_adapter(lora: Lora, folder: Path) -> None:
    """Raise CheckpointError unless peft loads all of folder, with the logits of merged weights."""
    written = ShardedFiles(folder)
    merged = MergedWeights(replace(lora, adapter=written), dtype=torch.float32)
    with without_progress_bars():
        base = auto_class(family_of_folder(lora.base_folder)).from_pretrained(
            lora.base_folder, dtype="auto", attn_implementation=ATTENTION
        )
    adapted, found = load_adapter(base, folder)
    # An adapter that learned little changes the logits by less than the tolerance, so its tensors
    # are compared too.
    if found.keys() != written.tensors.keys() or not all(
        torch.equal(tensor, written.read(name).to(tensor.dtype)) for name, tensor in found.items()
    ):
        raise CheckpointError(f"peft does not load {folder} as it was written; nothing was exported")
    inputs = _model_inputs(lora.model_config)
    with _parameters(adapted, lambda name, tensor: tensor.float()):
        actual = _logits(adapted, inputs)
    plain = adapted.unload()
    family = family_of(plain.config)
    with _parameters(plain, lambda name, tensor: _read(name, tensor, merged, family, torch.float32)):
        expected = _logits(plain, inputs)
    difference = float((actual - expected).abs().max())
    if not difference <= _LOGIT_TOLERANCE * max(1.0, float(expected.abs().max())):
        raise CheckpointError(
            f"the exported model's logits differ from the checkpoint's by {difference:.2e}; nothing was exported"
        )


def _read(name: str, tensor: Tensor, weights: Weights, family: ModelFamily, dtype: torch.dtype) -> Tensor:
    """Return the parameter of this name, of the shape of tensor, from weights, in dtype."""
    parameter = torch.empty(tensor.shape, dtype=dtype)
    for stored_name, part in family.checkpoint_tensors(name, parameter):
        part.copy_(weights.read(stored_name))
    return parameter


@contextmanager
def _parameters(model: nn.Module, read: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Let each module compute with other parameters, from the start to the end of its forward pass.

    So no more than one module's are in memory at a time. Tensors that are passed to a module with
    parameters are converted to float32, as its parameters should be.

    read: returns what to use in place of a parameter, given its name and its tensor.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    originals: dict[nn.Parameter, Tensor] = {}

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        for parameter in module.parameters(recurse=False):
            originals[parameter] = parameter.data
            parameter.data = read(names[parameter], parameter.data)
        return tuple(map(_as_float32, args)), {name: _as_float32(value) for name, value in kwargs.items()}

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = originals.pop(parameter)

    hooks = []
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(module.register_forward_hook(after, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _as_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _model_inputs(folder: Path) -> Mapping[str, Any]:
    """Return a tokenized short question, with an image if the model takes one."""
    from transformers import AutoProcessor, AutoTokenizer

    question = "What is 2 + 3?"
    if not family_of_folder(folder).has_vision:
        inputs: Mapping[str, Any] = AutoTokenizer.from_pretrained(folder)(question, return_tensors="pt")
        return inputs
    processor = AutoProcessor.from_pretrained(folder)
    content = [{"type": "image"}, {"type": "text", "text": question}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    image = (torch.arange(84 * 112 * 3) % 256).to(torch.uint8).view(84, 112, 3).numpy()  # height, width, colour
    inputs = processor(text=[text], images=[image], return_tensors="pt")
    return inputs


@torch.no_grad()
def _logits(model: Any, inputs: Mapping[str, Any]) -> Tensor:
    logits: Tensor = model.eval()(**inputs).logits.float()
    return logits
