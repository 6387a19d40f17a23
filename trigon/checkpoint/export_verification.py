"""Verifies an exported folder against the checkpoint that it was made from.

Every tensor must equal the checkpoint's; transformers (for an adapter, peft) must load the folder
with no missing and no unexpected tensor; and on a short input, with an image if the model takes
one, its logits must equal those of a model built from the config and filled with the checkpoint's
tensors by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trigon.checkpoint.weights import Lora, MergedWeights, Weights
from trigon.errors import CheckpointError
from trigon.models.families import ModelFamily, family_of
from trigon.models.load import auto_class, family_of_folder, without_progress_bars
from trigon.models.lora import load_adapter
from trigon.training.state import ShardedFiles

_LOGIT_TOLERANCE = 1e-4  # in float32, where equal weights give equal logits up to the order of additions


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


def verify_logits(weights: Weights, folder: Path, dtype: torch.dtype) -> None:
    """Raise CheckpointError unless folder loads in this dtype with the logits of weights."""
    expected = _logits_of_weights(weights, folder, dtype)
    with without_progress_bars():
        exported, report = auto_class(family_of_folder(folder)).from_pretrained(
            folder, dtype="auto", output_loading_info=True
        )
    problems = {kind: sorted(map(str, report[kind])) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if any(problems.values()):
        raise CheckpointError(f"the exported model does not load completely: {problems}; nothing was exported")
    if exported.dtype != dtype:
        raise CheckpointError(f"the exported model loads as {exported.dtype}, not {dtype}; nothing was exported")
    _compare(_logits(exported.float(), _model_inputs(folder)), expected)


def verify_adapter(lora: Lora, folder: Path) -> None:
    """Raise CheckpointError unless peft loads all of folder, with the logits of merged weights."""
    written = ShardedFiles(folder)
    merged = MergedWeights(replace(lora, adapter=written), dtype=torch.float32)
    expected = _logits_of_weights(merged, lora.model_config, torch.float32)

    base = auto_class(family_of_folder(lora.base_folder)).from_pretrained(lora.base_folder, dtype=torch.float32)
    adapted, found = load_adapter(base, folder)
    # An adapter that learned little changes the logits by less than the tolerance, so its tensors
    # are compared too.
    if found.keys() != written.tensors.keys() or not all(
        torch.equal(tensor, written.read(name).to(tensor.dtype)) for name, tensor in found.items()
    ):
        raise CheckpointError(f"peft does not load {folder} as it was written; nothing was exported")
    _compare(_logits(adapted, _model_inputs(lora.model_config)), expected)


def _logits_of_weights(weights: Weights, folder: Path, dtype: torch.dtype) -> Tensor:
    """Return the logits of weights, rounded to dtype, in a float32 model.

    The model is built from the folder's config.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    with torch.random.fork_rng(devices=[]):  # the new model's random weights are replaced below
        model = auto_class(family_of_folder(folder)).from_config(config, dtype=torch.float32)
    _fill(model, weights, family_of(config), dtype)
    return _logits(model, _model_inputs(folder))


def _compare(actual: Tensor, expected: Tensor) -> None:
    difference = float((actual - expected).abs().max())
    if not difference <= _LOGIT_TOLERANCE * max(1.0, float(expected.abs().max())):
        raise CheckpointError(
            f"the exported model's logits differ from the checkpoint's by {difference:.2e}; nothing was exported"
        )


def _model_inputs(folder: Path) -> Mapping[str, Any]:
    """Return a tokenized short question, with an image if the model takes one."""
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer

    question = "What is 2 + 3?"
    if not family_of(AutoConfig.from_pretrained(folder)).has_vision:
        inputs: Mapping[str, Any] = AutoTokenizer.from_pretrained(folder)(question, return_tensors="pt")
        return inputs
    processor = AutoProcessor.from_pretrained(folder)
    content = [{"type": "image"}, {"type": "text", "text": question}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    image = (torch.arange(84 * 112 * 3) % 256).to(torch.uint8).view(84, 112, 3).numpy()  # height, width, colour
    inputs = processor(text=[text], images=[image], return_tensors="pt")
    return inputs


@torch.no_grad()
def _fill(model: nn.Module, weights: Weights, family: ModelFamily, dtype: torch.dtype) -> None:
    """Copy all tensors, rounded to dtype, into all parameters of a model by name."""
    remaining = dict(weights.tensors)
    named = (pair for name, weight in model.named_parameters() for pair in family.checkpoint_tensors(name, weight))
    for name, parameter in named:
        stored = remaining.pop(name, None)
        if stored is None or stored.shape != tuple(parameter.shape):
            found = "is missing from" if stored is None else f"is {stored.shape}, not {tuple(parameter.shape)}, in"
            raise CheckpointError(f"{name} {found} the checkpoint, so it does not belong to its own config.json")
        parameter.copy_(weights.read(name).to(dtype))
    if remaining:
        raise CheckpointError(f"the checkpoint holds {sorted(remaining)[:3]}, which its own config.json does not have")


@torch.no_grad()
def _logits(model: Any, inputs: Mapping[str, Any]) -> Tensor:
    logits: Tensor = model.eval()(**inputs).logits.float()
    return logits
