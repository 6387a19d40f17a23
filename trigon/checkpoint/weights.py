"""Reads the weights of a checkpoint's policy: its own, or a base model's and a LoRA adapter's.

Only file headers are read until a tensor is requested. One tensor is in memory at a time, except
for MoE models, where the experts of one layer are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from trigon.config.paths import path_exists
from trigon.errors import CheckpointError, ModelError
from trigon.models.families import ModelFamily, family_of
from trigon.models.load import auto_class, family_of_folder, load_hf_config, model_folder
from trigon.models.lora import merge_names, merged_weight
from trigon.models.weight_files import stored_tensors
from trigon.report.run import RunRecord
from trigon.training.checkpointing import ADAPTER_CONFIG, ADAPTER_FOLDER, WEIGHTS_FOLDER, read_object
from trigon.training.state import ShardedFiles, StoredTensor

_STACKS_PER_LAYER = 2  # of experts: gate_up_proj and down_proj


class Weights(Protocol):
    """The tensors of a model, read by name."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Shape and dtype of each tensor, in the order in which they are written."""
        ...

    def read(self, name: str) -> Tensor:
        """Return a complete tensor, on the CPU."""
        ...


@dataclass(frozen=True, slots=True)
class Lora:
    """The LoRA weights of a run, and the model they adapt.

    adapter: the A and B matrices, under peft's names. config: the content of peft's
    adapter_config.json. base_folder: the base model. model_config: the folder with the base model's
    config as the run loaded it.
    """

    adapter: Weights
    config: Mapping[str, Any]
    base_folder: Path
    model_config: Path


def has_adapter(actor: Path) -> bool:
    """Return whether a checkpoint holds a LoRA adapter, and so no other weights."""
    return (actor / ADAPTER_FOLDER).is_dir()


def open_weights(actor: Path) -> Weights:
    """Return the weights of a checkpoint without an adapter, by their Hugging Face names."""
    folder = actor / WEIGHTS_FOLDER
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{actor} holds no {WEIGHTS_FOLDER}/*.safetensors")
    return PublishedWeights(ShardedFiles(folder), family_of_folder(actor / "huggingface"))


def open_lora(actor: Path, *, base: str | None) -> Lora:
    """Return the LoRA weights of a checkpoint that has an adapter.

    base: the base model, a folder or a hub id; None: the one the run used, also if its relative
    path is of another folder. Raises: CheckpointError if it does not exist.
    """
    config = read_object(actor / ADAPTER_CONFIG, r=int, base_model_name_or_path=str)
    used = config["base_model_name_or_path"]
    if base is None and not path_exists(used):
        base = (RunRecord(actor.resolve().parents[1]).local_sources() or {}).get(used)
    if base is not None:
        config["base_model_name_or_path"] = base
    try:
        base_folder = model_folder(config["base_model_name_or_path"])
    except ModelError as error:
        raise CheckpointError(
            f"the base model of the adapter in {actor} is missing: {error} If it has moved, name its folder with --base"
        ) from error
    return Lora(ShardedFiles(actor / ADAPTER_FOLDER), config, base_folder, actor / "huggingface")


class PublishedWeights:
    """A checkpoint's weights under published names, one tensor per expert. Satisfies Weights."""

    def __init__(self, stored: Weights, family: ModelFamily) -> None:
        """Convert names and shapes. stored: the tensors of a policy's saved_tensors."""
        self._stored = stored
        self._family = family
        self._sources: dict[str, str] = {}  # of each tensor, the stored tensor that contains it
        tensors: dict[str, StoredTensor] = {}
        for source, tensor in stored.tensors.items():
            meta_tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, part in family.checkpoint_tensors(source, meta_tensor):
                self._sources[name] = source
                tensors[name] = StoredTensor(tuple(part.shape), tensor.dtype)
        self.tensors: Mapping[str, StoredTensor] = dict(sorted(tensors.items()))
        self._cache: dict[str, dict[str, Tensor]] = {}

    def read(self, name: str) -> Tensor:
        """See Weights.

        The two stacks of experts read last are cached, since their experts alternate in the order
        of names.
        """
        source = self._sources[name]
        if source not in self._cache:
            while len(self._cache) >= _STACKS_PER_LAYER:
                del self._cache[next(iter(self._cache))]
            self._cache[source] = dict(self._family.checkpoint_tensors(source, self._stored.read(source)))
        return self._cache[source][name].clone(memory_format=torch.contiguous_format)


def model_shapes(folder: Path, *, model_class: Any = None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that a folder's config describes, by their published names.

    model_class: the class of transformers; None: the policy's class.
    """
    config = load_hf_config(folder)
    family = family_of(config)
    with torch.device("meta"):
        model = (model_class or auto_class(family)).from_config(config)
    return {
        name: tuple(part.shape)
        for parameter_name, weight in stored_tensors(model)
        for name, part in family.checkpoint_tensors(parameter_name, weight)
    }


class MergedWeights:
    """The weights of a base model with a LoRA adapter merged into them. Satisfies Weights.

    They are the weights of the model that the config describes, by their Hugging Face names.
    Additional tensors of a hub checkpoint, such as a copy of a tied head, are left out.
    """

    def __init__(self, lora: Lora, *, dtype: torch.dtype | None) -> None:
        """Compare the shapes of base model, adapter and config; no tensor is read.

        dtype: the dtype of the merged weights, which are rounded once; None: each as in the base
        model.
        Raises: CheckpointError if the shapes do not fit together.
        """
        shapes = model_shapes(lora.model_config)
        family = family_of_folder(lora.model_config)
        self._base = ShardedFiles(lora.base_folder)
        self._adapter = lora.adapter
        self._pairs = merge_names(lora.adapter.tensors, family)
        self._scaling = lora.config["lora_alpha"] / lora.config["r"]
        # Some base models were saved under the names of their modules, which a run can load too.
        self._base_names = {family.checkpoint_name(name): name for name in self._base.tensors}

        mismatched = [name for name in shapes if self._base_shape(name) != shapes[name]]
        if mismatched:
            found = self._base_shape(mismatched[0])
            raise CheckpointError(
                f"{lora.base_folder} is not the base model of this adapter: {mismatched[0]} is "
                f"{'missing' if found is None else list(found)} there instead of {list(shapes[mismatched[0]])} "
                f"({len(mismatched)} of {len(shapes)} weights do not fit). Name the folder of the right one with "
                "--base"
            )
        for name, (lora_a, lora_b) in self._pairs.items():
            (rank, width), (height, inner) = (lora.adapter.tensors[half].shape for half in (lora_a, lora_b))
            if shapes.get(name) != (height, width) or not rank == inner == lora.config["r"]:
                raise CheckpointError(
                    f"{lora_a} [{rank}, {width}] and its B [{height}, {inner}] fit no weight of this model at rank "
                    f"{lora.config['r']}"
                )
        self.tensors: Mapping[str, StoredTensor] = {
            name: StoredTensor(shape, dtype or self._base.tensors[self._base_names[name]].dtype)
            for name, shape in sorted(shapes.items())
        }

    def read(self, name: str) -> Tensor:
        """See Weights. Merged in float32, then rounded."""
        weight = self._base.read(self._base_names[name])
        if name in self._pairs:
            lora_a, lora_b = (self._adapter.read(half) for half in self._pairs[name])
            weight = merged_weight(weight.float(), lora_a, lora_b, self._scaling)
        return weight.to(self.tensors[name].dtype)

    def _base_shape(self, name: str) -> tuple[int, ...] | None:
        stored = self._base_names.get(name)
        return None if stored is None else self._base.tensors[stored].shape
