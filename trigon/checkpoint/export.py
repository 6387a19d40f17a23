"""Exports a checkpoint as a folder that transformers, peft and vLLM load, after verifying it.

What LoRA learned is written merged into its base model, or as an adapter; a critic as a token
classifier of transformers with one label, whose output at a token is the value of the state after
it. The files are written to a temporary folder, read back and verified, and only then renamed.
This module depends on neither trainers nor engines.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor, nn

from trigon import __version__
from trigon.checkpoint.store import (
    EXPORT_RECORD,
    EXPORTED,
    MANIFEST,
    Checkpoint,
    CheckpointStore,
    open_checkpoint,
    removed_on_failure,
    replacing_files,
    sync_tree,
)
from trigon.checkpoint.weights import (
    Lora,
    MergedWeights,
    Weights,
    has_adapter,
    model_shapes,
    open_lora,
    open_weights,
)
from trigon.config.names import DTYPE_ALIASES
from trigon.errors import CheckpointError, DiskError
from trigon.models.dtypes import DTYPES, dtype_named
from trigon.models.families import ModelFamily, family_of
from trigon.models.load import (
    ATTENTION,
    auto_class,
    copy_side_files,
    family_of_folder,
    without_progress_bars,
)
from trigon.models.lora import load_adapter
from trigon.models.value import HEAD_NAME
from trigon.models.weight_files import save_weights, stored_tensors
from trigon.report.run import is_run
from trigon.system.files import sync_to_disk, write_json
from trigon.system.machine import count_usable_bytes
from trigon.system.terminal import format_bytes
from trigon.system.torchvision_stub import declare_operators
from trigon.training.checkpointing import ADAPTER_CONFIG, WEIGHTS_FOLDER, is_head_alone, read_object
from trigon.training.state import ShardedFiles, StoredTensor

Part = Literal["model", "adapter", "critic"]
"""What is exported: the policy's model, its LoRA adapter for peft, or the critic."""

SHARD_BYTES = 5 * 10**9
"""A file of weights holds at most this many bytes, or one tensor."""

RUN_SETTINGS = "run_settings.json"
"""File of an actor folder with the options that evaluations of its model need, by name."""


def export_checkpoint(
    path: Path,
    output: Path | None,
    *,
    dtype: str | None,
    part: Part = "model",
    base: str | None = None,
    best: bool = False,
    logits: bool = True,
    usable_bytes: int | None = None,
    warn: Callable[[str], None] = warnings.warn,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write a part of a checkpoint as a Hugging Face folder, verify it, and return the folder.

    Args:
        path: a checkpoint (global_step_N), its actor folder, or a run folder, of which the latest
            checkpoint is exported, or the best.
        output: where to write. None: huggingface_model in path; for an actor folder, its existing
            folder huggingface; for an adapter, lora_adapter in path; for a critic,
            huggingface_critic in path, or beside an actor folder.
        dtype: bf16, fp16 or fp32, or their long names. None keeps the checkpoint's dtype, bit for
            bit; for merged weights, the base model's.
        base: the base model of LoRA weights, a folder or a hub id. None: the one the run used.
        best: export the best checkpoint of a run folder instead of the latest.
        logits: also load the exported model and compute logits, if it fits into memory. Without,
            names, shapes, dtypes and values of its tensors are verified.
        usable_bytes: host memory that this may take; None: what this process can have.
        warn: called with a message for each damaged checkpoint that was skipped.
        on_progress: called with a short text at the start of each stage, and at the end with what
            was verified and what was not.
    Raises: CheckpointError if there is no undamaged checkpoint, if it does not have the part, if
    base is given for a run without LoRA, if the base model is missing or does not fit, if a critic
    has LoRA adapters or a family without a token classifier, if a weight is not finite (or would
    not be in dtype), if output exists and was not made by an export, or if verification fails;
    DiskError if the disk is full, read-only, ... No partial output is left behind.
    """
    if dtype is not None and dtype_named(dtype) is None:
        raise CheckpointError(
            f"weights cannot be written as {dtype!r}; choose one of {', '.join((*DTYPES, *DTYPE_ALIASES))}"
        )
    on_progress(f"verifying {path}")
    checkpoint = find_checkpoint(path, best=best, warn=warn)
    side_files = checkpoint.actor / "huggingface"
    if output is None:
        output = _default_output(path, checkpoint, part)
    output = output.resolve() if output.is_symlink() else output  # what a link leads to is replaced
    if not (side_files / "config.json").is_file():
        raise CheckpointError(
            f"{side_files} has no config.json: this checkpoint was saved without its model's side files"
        )
    torch_dtype = dtype_named(dtype) if dtype else None
    lora = None if part == "critic" else _open_lora(checkpoint, part=part, base=base)
    into_checkpoint = output.resolve() == side_files.resolve()
    if into_checkpoint and part != "model":
        raise CheckpointError(f"{output} belongs to the checkpoint; name another folder for its {part}")
    if not into_checkpoint:
        check_replaceable(output)
    if lora is not None and lora.base_folder.resolve().is_relative_to(output.resolve()):
        raise CheckpointError(f"{output} holds the base model, from which the export is made; name another folder")
    temporary = output.absolute().with_name(f".exporting_{output.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(_replaced(output), ignore_errors=True)
    usable = count_usable_bytes() if usable_bytes is None else usable_bytes
    failure, advice = f"the export {output} could not be written", ", or choose another output"
    with removed_on_failure(temporary, failure, advice, explained=(CheckpointError,)):
        export: _Export
        if part == "critic":
            export = _Critic(checkpoint)
        elif part == "adapter":
            assert lora is not None
            export = _Adapter(lora)
        else:
            weights = open_weights(checkpoint.actor) if lora is None else MergedWeights(lora, dtype=torch_dtype)
            export = _Export(weights, side_files)
        _check_space(temporary, export.weights, torch_dtype)
        on_progress(f"writing {len(export.weights.tensors)} tensors of step {checkpoint.step}")
        written = export.write(temporary, torch_dtype)
        write_export_record(temporary, checkpoint, written)
        on_progress("verifying tensors")
        export.verify(temporary)
        verified = f"names, shapes and values of {len(export.weights.tensors)} tensors, in {_dtype_name(written)}"
        needed = export.loading_bytes(written)
        if not logits:
            on_progress(f"verified: {verified}; not verified: {export.further}, since --no-logits was given")
        elif usable is not None and needed > usable:
            on_progress(
                f"verified: {verified}; not verified: {export.further}, which takes {format_bytes(needed)} of "
                f"memory: {format_bytes(usable)} are usable here"
            )
        else:
            on_progress(f"loading {export.loaded}, verifying logits")
            export.verify_loaded(temporary, written)
            on_progress(f"verified: {verified}; {export.further}")
        if into_checkpoint:
            _move_into_checkpoint(temporary, checkpoint)
        else:
            publish_export(temporary, output)
    return output


class _Export:
    """A model that is written with the side files of a checkpoint, and how it is verified."""

    further = "that transformers loads all of them, and that logits are finite"
    loaded = "the exported model"

    def __init__(self, weights: Weights, side_files: Path, *, model_class: Any = None) -> None:
        """model_class: the class of transformers that loads it; None: the policy's."""
        self.weights = weights
        self._side_files = side_files
        self._model_class = model_class

    def write(self, folder: Path, dtype: torch.dtype | None) -> torch.dtype:
        """Write the folder, which is made, and return the dtype of its weights."""
        copy_side_files(self._side_files, folder)
        written = write_weights(self.weights, folder, dtype=dtype)
        set_config_dtype(folder / "config.json", written)
        return written

    def verify(self, folder: Path) -> None:
        """Verify all tensors, one at a time. Raises: CheckpointError."""
        verify_tensors(self.weights, folder)
        verify_names(self.weights, folder, model_class=self._model_class)

    def loading_bytes(self, dtype: torch.dtype) -> int:
        """Return the host memory that verify_loaded takes."""
        return loading_bytes(self.weights, dtype)

    def verify_loaded(self, folder: Path, dtype: torch.dtype) -> None:
        """Load the folder and verify what comes out. Raises: CheckpointError."""
        verify_model(self.weights, folder, dtype, model_class=self._model_class)


class _Adapter(_Export):
    """A LoRA adapter in peft's format: its config and its weights only."""

    further = "that peft loads all of them, and that logits equal the logits of merged weights"
    loaded = "the base model and the adapter with peft"

    def __init__(self, lora: Lora) -> None:
        super().__init__(lora.adapter, lora.model_config)
        self._lora = lora

    def write(self, folder: Path, dtype: torch.dtype | None) -> torch.dtype:
        """See _Export."""
        folder.mkdir(parents=True)
        write_json(folder / ADAPTER_CONFIG, self._lora.config)
        names = list(self.weights.tensors)
        [written] = _write_file(self.weights, names, folder / "adapter_model.safetensors", dtype=dtype)
        return written

    def verify(self, folder: Path) -> None:
        """See _Export."""
        verify_tensors(self.weights, folder)

    def loading_bytes(self, dtype: torch.dtype) -> int:
        """See _Export. Raises: CheckpointError if the adapter does not fit its base model."""
        return loading_bytes(MergedWeights(self._lora, dtype=None), None)

    def verify_loaded(self, folder: Path, dtype: torch.dtype) -> None:
        """See _Export."""
        verify_adapter(self._lora, folder)


class _Critic(_Export):
    """A critic as a token classifier. One on the policy's trunk has the weights of the policy."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Find the critic. Raises: CheckpointError if it cannot be exported."""
        folder = checkpoint.critic
        if folder is None:
            raise CheckpointError(
                f"{checkpoint.folder} has no critic: it is not of a run with algorithm.adv_estimator=gae"
            )
        head_alone = is_head_alone(folder)
        trunk, section = (checkpoint.actor, "worker.actor") if head_alone else (folder, "worker.critic")
        if has_adapter(trunk):
            raise CheckpointError(
                f"the critic in {folder} has LoRA adapters, which are not merged; only a critic whose weights are "
                f"trained ({section}.model.lora.rank=0) can be exported"
            )
        self._class = _classifier_of(folder / "huggingface")
        from transformers import AutoModelForTokenClassification

        head = ShardedFiles(folder / WEIGHTS_FOLDER) if head_alone else None
        weights = _ClassifierWeights(open_weights(trunk), head)
        super().__init__(weights, folder / "huggingface", model_class=AutoModelForTokenClassification)

    def write(self, folder: Path, dtype: torch.dtype | None) -> torch.dtype:
        """See _Export."""
        written = super().write(folder, dtype)
        config = read_object(folder / "config.json")
        labels = {"id2label": {"0": "value"}, "label2id": {"value": 0}}
        write_json(folder / "config.json", {**config, "architectures": [self._class], **labels})
        return written


class _ClassifierWeights:
    """The weights of a critic by the names of a token classifier. Satisfies Weights."""

    def __init__(self, stored: Weights, head: Weights | None) -> None:
        """Rename the weights.

        head: the head of a shared trunk, which replaces the policy's head.
        """
        own = {name: (stored, name) for name in stored.tensors if not name.startswith("lm_head.")}
        source, prefix = (stored, "lm_head.") if head is None else (head, f"{HEAD_NAME}.")
        heads = {
            f"score.{name.removeprefix(prefix)}": (source, name) for name in source.tensors if name.startswith(prefix)
        }
        self._sources = own | heads
        self.tensors: Mapping[str, StoredTensor] = {
            name: weights.tensors[stored] for name, (weights, stored) in self._sources.items()
        }

    def read(self, name: str) -> Tensor:
        """See Weights."""
        weights, stored = self._sources[name]
        return weights.read(stored)


def _classifier_of(folder: Path) -> str:
    """Return the token classifier of a model's family. Raises: CheckpointError if there is none."""
    declare_operators()
    from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

    model_type = family_of_folder(folder).model_type
    if model_type not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES:
        raise CheckpointError(
            f"transformers has no token classifier for {model_type} models, so that this critic cannot be exported; "
            f"its weights are in {folder.parent / 'weights'}, with a head of one output"
        )
    return str(MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES[model_type])


def _default_output(path: Path, checkpoint: Checkpoint, part: Part) -> Path:
    is_actor_folder = path.resolve() == checkpoint.actor.resolve()
    if part == "adapter":
        return path / "lora_adapter"
    if part == "critic":
        return (checkpoint.folder if is_actor_folder else path) / "huggingface_critic"
    return checkpoint.actor / "huggingface" if is_actor_folder else path / EXPORTED


def find_checkpoint(path: Path, *, best: bool, warn: Callable[[str], None]) -> Checkpoint:
    """Return the checkpoint of a path; of a run folder the latest, or the best."""
    if (path / MANIFEST).is_file() or not (is_run(path) or any(path.glob("global_step_*"))):
        checkpoint = open_checkpoint(path, resumable=False)
        if best:
            raise CheckpointError(
                f"--best chooses among the checkpoints of a run folder, and {path} is one checkpoint: name the run "
                f"folder, {checkpoint.folder.parent}, or leave --best out"
            )
        return checkpoint
    store = CheckpointStore(path, keep=-1, warn=warn)
    found = store.best() if best else store.latest(resumable=False)
    if found is None and best:
        raise CheckpointError(f"no checkpoint in {path} has a validation score; leave --best out to take the latest")
    if found is None:
        raise CheckpointError(f"{path} has no checkpoint: its run has saved none (trainer.save_freq)")
    return found


def check_replaceable(output: Path) -> None:
    """Raise CheckpointError if output exists and holds anything but an earlier export."""
    is_empty_folder = output.is_dir() and not any(output.iterdir())
    if output.exists() and not (output / EXPORT_RECORD).is_file() and not is_empty_folder:
        raise CheckpointError(f"{output} exists and is not an earlier export; name another folder, or remove it")


def _open_lora(checkpoint: Checkpoint, *, part: Part, base: str | None) -> Lora | None:
    """Return the LoRA weights, or None for a run without LoRA.

    Raises: CheckpointError if an adapter is asked for, or base is given, for a run without LoRA.
    """
    if has_adapter(checkpoint.actor):
        return open_lora(checkpoint.actor, base=base)
    if part == "adapter" or base is not None:
        raise CheckpointError(
            f"{checkpoint.folder} holds all weights of a model and no LoRA adapter; leave "
            f"{'--adapter' if part == 'adapter' else '--base'} out to export them"
        )
    return None


def _num_bytes(tensor: StoredTensor, dtype: torch.dtype | None) -> int:
    return prod(tensor.shape) * (dtype or tensor.dtype).itemsize


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _check_space(folder: Path, weights: Weights, dtype: torch.dtype | None) -> None:
    needed = sum(_num_bytes(tensor, dtype) for tensor in weights.tensors.values())
    parent = folder.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise DiskError(
            f"the model needs {needed:,} bytes, but the disk of {parent} has {free:,} free; make room, or choose "
            "another output"
        )


def write_weights(weights: Weights, folder: Path, *, dtype: torch.dtype | None) -> torch.dtype:
    """Write the weights as one or more safetensors files, and return their dtype.

    One file at a time is in memory.
    """
    split = split_state_dict_into_shards_factory(
        dict(weights.tensors),
        get_storage_size=partial(_num_bytes, dtype=dtype),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=SHARD_BYTES,
    )
    dtypes: set[torch.dtype] = set()
    for file, names in split.filename_to_tensors.items():
        dtypes |= _write_file(weights, names, folder / file, dtype=dtype)
    if len(dtypes) != 1:
        raise CheckpointError(
            f"the checkpoint mixes {', '.join(sorted(map(_dtype_name, dtypes)))}, and a config names one: choose "
            "--dtype"
        )
    if split.is_sharded:
        write_json(
            folder / "model.safetensors.index.json",
            {"metadata": split.metadata, "weight_map": split.tensor_to_filename},
        )
    return dtypes.pop()


def _write_file(weights: Weights, names: Sequence[str], file: Path, *, dtype: torch.dtype | None) -> set[torch.dtype]:
    """Write these tensors and return their floating-point dtypes.

    Raises: CheckpointError if one is not finite.
    """
    tensors = {name: _cast(weights.read(name), dtype) for name in names}
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                f"{name} in the checkpoint holds NaN or infinity as {_dtype_name(tensor.dtype)}: such a model cannot "
                "be used. Export an earlier checkpoint, or choose a dtype of larger range"
            )
    save_weights(tensors, file)
    return {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}


def set_config_dtype(path: Path, dtype: torch.dtype) -> None:
    """Set the dtype of the weights in the config and its sub-configs.

    The file is untouched if it is set already.
    """
    config = read_object(path)
    before = json.dumps(config)
    if "dtype" not in config and "torch_dtype" not in config:
        config["dtype"] = _dtype_name(dtype)
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in ("dtype", "torch_dtype"):
            if key in part:
                part[key] = _dtype_name(dtype)
    if json.dumps(config) != before:
        write_json(path, config)


def write_export_record(folder: Path, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """Write EXPORT_RECORD, with the settings of the run if the checkpoint has them."""
    settings = checkpoint.actor / RUN_SETTINGS
    write_json(
        folder / EXPORT_RECORD,
        {
            "trigon_version": __version__,
            "checkpoint": checkpoint.folder.name,
            "step": checkpoint.step,
            "val_reward_score": checkpoint.score,
            "dtype": _dtype_name(dtype),
            **({"settings": read_object(settings)} if settings.is_file() else {}),
        },
    )


def _replaced(output: Path) -> Path:
    """Return the name of an earlier export while it is removed."""
    return output.absolute().with_name(f".removing_{output.name}")


def publish_export(exported: Path, output: Path) -> None:
    """Rename a finished export to output, and remove an earlier one.

    After a crash at any moment there is a complete export at output, or none.
    """
    sync_tree(exported)
    if output.exists():
        os.rename(output, _replaced(output))
    os.rename(exported, output)
    sync_to_disk(output.absolute().parent)
    shutil.rmtree(_replaced(output), ignore_errors=True)


def _move_into_checkpoint(exported: Path, checkpoint: Checkpoint) -> None:
    """Move the exported files to the checkpoint's side files, of which the config may change.

    After a crash at any moment the checkpoint is valid. An earlier export is removed first, and
    EXPORT_RECORD is moved last, after what names the files of the weights: what was moved in part
    neither loads nor looks like an export.
    """
    target = checkpoint.actor / "huggingface"
    sync_tree(exported)
    (target / EXPORT_RECORD).unlink(missing_ok=True)
    for old in (*target.glob("model.safetensors.index.json"), *target.glob("model*.safetensors")):
        old.unlink()
    sync_to_disk(target)
    config = (target / "config.json").relative_to(checkpoint.folder).as_posix()
    last = ("model.safetensors.index.json", EXPORT_RECORD)
    files = [file for file in sorted(exported.rglob("*")) if file.is_file()]
    with replacing_files(checkpoint.folder, (config,)):
        for file in files:
            if file.name not in last:
                os.replace(file, target / file.relative_to(exported))
    for name in last:
        if (exported / name).is_file():
            sync_to_disk(target)
            os.replace(exported / name, target / name)
    sync_to_disk(target)
    shutil.rmtree(exported)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- verification ----------------------------------------------------------------------------------

# Every tensor must equal the checkpoint's, and the names and shapes must belong to the model that
# the config describes; for this, one tensor at a time is in memory. Then transformers must load the
# folder with no missing and no unexpected tensor and compute finite logits, on a short input, with
# an image if the model takes one; with an adapter, which peft loads, these must equal the logits of
# merged weights. That needs memory for one model in the dtype of its files; weights are converted
# to float32 layer by layer.

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
    """Raise CheckpointError unless weights belong to the model that folder's config describes.

    Compares names and shapes, and reads no tensor. model_class: None: the policy's class.
    """
    shapes = model_shapes(folder, model_class=model_class)
    for name, shape in shapes.items():
        stored = weights.tensors.get(name)
        if stored is None or stored.shape != shape:
            found = "is missing from" if stored is None else f"is {stored.shape}, not {shape}, in"
            raise CheckpointError(f"{name} {found} the checkpoint, so it does not belong to its own config.json")
    unknown = sorted(weights.tensors.keys() - shapes.keys())
    if unknown:
        raise CheckpointError(f"the checkpoint holds {unknown[:3]}, which its own config.json does not have")


def loading_bytes(weights: Weights, dtype: torch.dtype | None) -> int:
    """Return the memory that verify_model needs, or verify_adapter with the weights of its base.

    dtype: the dtype in which the weights are loaded; None: their own.
    """
    tensors = weights.tensors.values()
    # The largest one is also read and converted to float32.
    largest = max(_num_bytes(tensor, torch.float32) for tensor in tensors)
    return sum(_num_bytes(tensor, dtype) for tensor in tensors) + 2 * largest + ACTIVATION_BYTES


def verify_model(weights: Weights, folder: Path, dtype: torch.dtype, *, model_class: Any = None) -> None:
    """Raise CheckpointError unless folder loads in this dtype, as a model with these weights.

    Every parameter and buffer of the loaded model must equal the tensors of its name; so the logits
    are the checkpoint's. They must be finite. model_class: None: the policy's class.
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
