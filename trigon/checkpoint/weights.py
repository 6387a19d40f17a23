"""What a checkpoint's policy consists of: weights of its own, or a base model's and what LoRA learned beside them.

Knows the layout of an actor folder, where a base model lies and what merging needs of both. Refuses to know what the
tensors are for. Only headers are read before a tensor is asked for, and no two are held together, but for the experts
of one layer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from trigon.errors import CheckpointError, ModelError
from trigon.models.families import ModelFamily, family_of
from trigon.models.load import auto_class, family_of_folder, model_folder
from trigon.models.lora import merge_names, merged_weight
from trigon.training.local import ADAPTER_CONFIG, ADAPTER_FOLDER, WEIGHTS_FOLDER
from trigon.training.state import ShardedFiles, StoredTensor

_STACKS_PER_LAYER = 2  # of experts: gate_up_proj and down_proj


class Weights(Protocol):
    """Where a model's tensors come from, by name."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """What there is, in the order in which it is to be written."""
        ...

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, on the CPU."""
        ...


@dataclass(frozen=True, slots=True)
class Lora:
    """What a run with LoRA learned, and where that belongs.

    adapter: A and B, under peft's names. config: what peft wants in adapter_config.json. base_folder: the model whose
    weights they change. model_config: the folder with that model's config, as the run had it.
    """

    adapter: Weights
    config: Mapping[str, Any]
    base_folder: Path
    model_config: Path


def is_adapted(actor: Path) -> bool:
    """Tell whether a checkpoint is of a run with LoRA: whether it holds adapters, and no weights."""
    return (actor / ADAPTER_FOLDER).is_dir()


def open_weights(actor: Path) -> Weights:
    """Return the weights of a checkpoint without adapters, by their Hugging Face names."""
    folder = actor / WEIGHTS_FOLDER
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{actor} holds no {WEIGHTS_FOLDER}/*.safetensors")
    return PublishedWeights(ShardedFiles(folder), family_of_folder(actor / "huggingface"))


def open_lora(actor: Path, *, base: str | None) -> Lora:
    """Return the adapters of a checkpoint that has some.

    base: their base model, a folder or a hub id; None: where the run found it. Raises: CheckpointError if it is not
    there.
    """
    config: dict[str, Any] = json.loads((actor / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    if base is not None:
        config["base_model_name_or_path"] = base
    try:
        base_folder = model_folder(config["base_model_name_or_path"])
    except ModelError as error:
        raise CheckpointError(
            f"the base model of the adapters in {actor} is not there: {error} If it has moved, name its folder with "
            "--base"
        ) from error
    return Lora(ShardedFiles(actor / ADAPTER_FOLDER), config, base_folder, actor / "huggingface")


class PublishedWeights:
    """A checkpoint's weights as a published model holds them, experts no longer stacked. Satisfies Weights."""

    def __init__(self, stored: Weights, family: ModelFamily) -> None:
        """stored: what a policy's saved_tensors gave."""
        self._stored = stored
        self._family = family
        self._sources: dict[str, str] = {}  # of each tensor, that of which it is a part
        tensors: dict[str, StoredTensor] = {}
        for source, whole in stored.tensors.items():
            shape_alone = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
            for name, part in family.checkpoint_tensors(source, shape_alone):
                self._sources[name] = source
                tensors[name] = StoredTensor(tuple(part.shape), whole.dtype)
        self._tensors = dict(sorted(tensors.items()))
        self._read: dict[str, dict[str, Tensor]] = {}

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """See Weights."""
        return self._tensors

    def read(self, name: str) -> Tensor:
        """See Weights. The two stacks read last stay in memory: in the order of names their experts alternate."""
        source = self._sources[name]
        if source not in self._read:
            while len(self._read) >= _STACKS_PER_LAYER:
                del self._read[next(iter(self._read))]
            self._read[source] = dict(self._family.checkpoint_tensors(source, self._stored.read(source)))
        return self._read[source][name].clone(memory_format=torch.contiguous_format)


class MergedWeights:
    """The weights of a base model with adapters merged into them, by their Hugging Face names. Satisfies Weights.

    They are those of the model that the config describes: what else a hub checkpoint may hold, such as a copy of a tied
    head, is left out.
    """

    def __init__(self, lora: Lora, *, dtype: torch.dtype | None) -> None:
        """dtype: of the weights, which are rounded once; None: each as in the base model.

        Raises: CheckpointError unless base model, adapters and config belong together.
        """
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(lora.model_config)
        family = family_of(config)
        with torch.device("meta"):
            model = auto_class(family).from_config(config)
        shapes = {
            name: tuple(part.shape)
            for here, weight in model.named_parameters()
            for name, part in family.checkpoint_tensors(here, weight)
        }
        self._base = ShardedFiles(lora.base_folder)
        self._adapter = lora.adapter
        self._pairs = merge_names(lora.adapter.tensors, family)
        self._scaling = lora.config["lora_alpha"] / lora.config["r"]
        # Some models were saved under the names that they have in memory, which a run reads as well.
        self._base_names = {family.checkpoint_name(name): name for name in self._base.tensors}

        unfit = [name for name in shapes if self._base_shape(name) != shapes[name]]
        if unfit:
            found = self._base_shape(unfit[0])
            raise CheckpointError(
                f"{lora.base_folder} is not the base model of these adapters: {unfit[0]} is "
                f"{'missing' if found is None else list(found)} there instead of {list(shapes[unfit[0]])} "
                f"({len(unfit)} of {len(shapes)} weights do not fit). Name the folder of the right one with --base"
            )
        for name, (lora_a, lora_b) in self._pairs.items():
            (rank, width), (height, inner) = (lora.adapter.tensors[half].shape for half in (lora_a, lora_b))
            if shapes.get(name) != (height, width) or not rank == inner == lora.config["r"]:
                raise CheckpointError(
                    f"{lora_a} [{rank}, {width}] and its B [{height}, {inner}] fit no weight of this model at rank "
                    f"{lora.config['r']}"
                )
        self._tensors = {
            name: StoredTensor(shape, dtype or self._base.tensors[self._base_names[name]].dtype)
            for name, shape in sorted(shapes.items())
        }

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """See Weights."""
        return self._tensors

    def read(self, name: str) -> Tensor:
        """See Weights. Merged in float32, then rounded."""
        weight = self._base.read(self._base_names[name])
        if name in self._pairs:
            lora_a, lora_b = (self._adapter.read(half) for half in self._pairs[name])
            weight = merged_weight(weight.float(), lora_a, lora_b, self._scaling)
        return weight.to(self._tensors[name].dtype)

    def _base_shape(self, name: str) -> tuple[int, ...] | None:
        stored = self._base_names.get(name)
        return None if stored is None else self._base.tensors[stored].shape
