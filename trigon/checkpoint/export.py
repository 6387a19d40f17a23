"""Exports a checkpoint as a folder that transformers, peft and vLLM load, after verifying it.

What LoRA learned is written merged into its base model, or as an adapter. The files are written to
a temporary folder, read back and verified (export_verification.py), and only then renamed. This
module depends on neither trainers nor engines.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trigon import __version__
from trigon.checkpoint.export_verification import (
    loading_bytes,
    verify_adapter,
    verify_model,
    verify_names,
    verify_tensors,
)
from trigon.checkpoint.manifest import EXPORTED, MANIFEST, replacing_files, sync_tree
from trigon.checkpoint.store import Checkpoint, CheckpointStore, open_checkpoint
from trigon.checkpoint.weights import Lora, MergedWeights, Weights, has_adapter, open_lora, open_weights
from trigon.config.names import DTYPE_ALIASES
from trigon.errors import CheckpointError, DiskError
from trigon.models.dtypes import DTYPES, dtype_named
from trigon.models.load import copy_side_files
from trigon.models.weight_files import save_weights
from trigon.system.disk import describe_fault, fault_number, sync_to_disk
from trigon.system.host_memory import count_usable_bytes
from trigon.system.json_files import write_json
from trigon.training.checkpointing import ADAPTER_CONFIG, read_object
from trigon.training.state import StoredTensor

SHARD_BYTES = 5 * 10**9
"""A file of weights holds at most this many bytes, or one tensor."""

EXPORT_RECORD = "trigon_export.json"
"""Names the exported checkpoint; later exports may replace a folder that has this file."""

RUN_SETTINGS = "run_settings.json"
"""File of an actor folder with the options that evaluations of its model need, by name."""


def export_checkpoint(
    path: Path,
    output: Path | None,
    *,
    dtype: str | None,
    adapter: bool = False,
    base: str | None = None,
    best: bool = False,
    logits: bool = True,
    usable_bytes: int | None = None,
    warn: Callable[[str], None] = warnings.warn,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write a checkpoint's policy as a Hugging Face folder, verify it, and return the folder.

    Args:
        path: a checkpoint (global_step_N), its actor folder, or a run folder, of which the latest
            checkpoint is exported, or the best.
        output: where to write. None: huggingface_model in path; for an actor folder, its existing
            folder huggingface; for an adapter, lora_adapter in path.
        dtype: bf16, fp16 or fp32, or their long names. None keeps the checkpoint's dtype, bit for
            bit; for merged weights, the base model's.
        adapter: write the LoRA weights in peft's format, instead of merging them into the base
            model.
        base: the base model, a folder or a hub id. None: the one the run used.
        best: export the best checkpoint of a run folder instead of the latest.
        logits: also load the exported model and compute logits, if it fits into memory. Without,
            names, shapes, dtypes and values of its tensors are verified.
        usable_bytes: host memory that this may take; None: what this process can have.
        warn: called with a message for each damaged checkpoint that was skipped.
        on_progress: called with a short text at the start of each stage, and at the end with what
            was verified and what was not.
    Raises: CheckpointError if there is no undamaged checkpoint, if adapter or base is given for a
    run without LoRA, if the base model is missing or does not fit, if a weight is not finite (or
    would not be in dtype), if output exists and was not made by an export, or if verification
    fails; DiskError if the disk is full, read-only, ... No partial output is left behind.
    """
    if dtype is not None and dtype_named(dtype) is None:
        raise CheckpointError(
            f"weights cannot be written as {dtype!r}; choose one of {', '.join((*DTYPES, *DTYPE_ALIASES))}"
        )
    on_progress(f"verifying {path}")
    checkpoint = find_checkpoint(path, best=best, warn=warn)
    side_files = checkpoint.actor / "huggingface"
    if output is None:
        is_actor_folder = path.resolve() == checkpoint.actor.resolve()
        output = path / "lora_adapter" if adapter else side_files if is_actor_folder else path / EXPORTED
    output = output.resolve() if output.is_symlink() else output  # what a link leads to is replaced
    if not (side_files / "config.json").is_file():
        raise CheckpointError(
            f"{side_files} has no config.json: this checkpoint was saved without its model's side files"
        )
    lora = _open_lora(checkpoint, adapter=adapter, base=base)
    into_checkpoint = output.resolve() == side_files.resolve()
    if into_checkpoint and adapter:
        raise CheckpointError(f"{output} belongs to the checkpoint; name another folder for its adapter")
    if not into_checkpoint:
        check_replaceable(output)
    if lora is not None and lora.base_folder.resolve().is_relative_to(output.resolve()):
        raise CheckpointError(f"{output} holds the base model, from which the export is made; name another folder")

    verification = _Verification(logits, count_usable_bytes() if usable_bytes is None else usable_bytes)
    temporary = output.absolute().with_name(f".exporting_{output.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(_replaced(output), ignore_errors=True)
    torch_dtype = dtype_named(dtype) if dtype else None
    try:
        if lora is not None and adapter:
            _write_adapter(
                checkpoint, lora, temporary, dtype=torch_dtype, verification=verification, on_progress=on_progress
            )
        else:
            weights = MergedWeights(lora, dtype=torch_dtype) if lora is not None else open_weights(checkpoint.actor)
            _write_model(
                checkpoint, weights, temporary, dtype=torch_dtype, verification=verification, on_progress=on_progress
            )
        if into_checkpoint:
            _move_into_checkpoint(temporary, checkpoint)
        else:
            publish_export(temporary, output)
    except BaseException as error:
        fault = None if isinstance(error, CheckpointError) else fault_number(error)
        description = "" if fault is None else describe_fault(error, temporary)
        shutil.rmtree(temporary, ignore_errors=True)
        if fault is not None:
            raise DiskError(
                f"the export {output} could not be written: {description}, or choose another output"
            ) from error
        raise
    return output


@dataclass(frozen=True, slots=True)
class _Verification:
    """How much is verified. logits, usable_bytes: see export_checkpoint; None: unknown."""

    logits: bool
    usable_bytes: int | None

    def why_not_loaded(self, needed_bytes: int) -> str:
        """Return why the exported model is not loaded, as the end of a sentence; "" if it is."""
        if not self.logits:
            return "since --no-logits was given"
        if self.usable_bytes is not None and needed_bytes > self.usable_bytes:
            needed, usable = (number / 2**30 for number in (needed_bytes, self.usable_bytes))
            return f"which takes {needed:.1f} GiB of memory: {usable:.1f} GiB are usable here"
        return ""

    def finish(
        self,
        verified: str,
        further: str,
        *,
        loading: str,
        verify_loaded: Callable[[], None],
        needed_bytes: int,
        on_progress: Callable[[str], None],
    ) -> None:
        """Verify what needs the exported model to be loaded, unless it is not, and report it all.

        verified: what was verified before. further: what loading it verifies. loading: the message
        of the progress. needed_bytes: of host memory, for loading it.
        """
        reason = self.why_not_loaded(needed_bytes)
        if reason:
            on_progress(f"verified: {verified}; not verified: {further}, {reason}")
            return
        on_progress(loading)
        verify_loaded()
        on_progress(f"verified: {verified}; {further}")


def find_checkpoint(path: Path, *, best: bool, warn: Callable[[str], None]) -> Checkpoint:
    """Return the checkpoint of a path; of a run folder the latest, or the best."""
    if (path / MANIFEST).is_file() or not any(path.glob("global_step_*")):
        return open_checkpoint(path, resumable=False)
    store = CheckpointStore(path, keep=-1, warn=warn)
    found = store.best() if best else store.latest(resumable=False)
    if found is None:
        raise CheckpointError(f"no checkpoint in {path} has a validation score; leave --best out to take the latest")
    return found


def check_replaceable(output: Path) -> None:
    """Raise CheckpointError if output exists and holds anything but an earlier export."""
    is_empty_folder = output.is_dir() and not any(output.iterdir())
    if output.exists() and not (output / EXPORT_RECORD).is_file() and not is_empty_folder:
        raise CheckpointError(f"{output} exists and is not an earlier export; name another folder, or remove it")


def _open_lora(checkpoint: Checkpoint, *, adapter: bool, base: str | None) -> Lora | None:
    """Return the LoRA weights, or None for a run without LoRA.

    Raises: CheckpointError if adapter or base is given for a run without LoRA.
    """
    if has_adapter(checkpoint.actor):
        return open_lora(checkpoint.actor, base=base)
    if adapter or base is not None:
        raise CheckpointError(
            f"{checkpoint.folder} holds all weights of a model and no LoRA adapter; leave "
            f"{'--adapter' if adapter else '--base'} out to export them"
        )
    return None


def _write_model(
    checkpoint: Checkpoint,
    weights: Weights,
    folder: Path,
    *,
    dtype: torch.dtype | None,
    verification: _Verification,
    on_progress: Callable[[str], None],
) -> None:
    """Write a model and verify it."""
    _check_space(folder, weights, dtype)
    copy_side_files(checkpoint.actor / "huggingface", folder)
    on_progress(f"writing {len(weights.tensors)} tensors of step {checkpoint.step}")
    written_dtype = write_weights(weights, folder, dtype=dtype)
    set_config_dtype(folder / "config.json", written_dtype)
    write_export_record(folder, checkpoint, written_dtype)
    on_progress("verifying tensors")
    verify_tensors(weights, folder)
    verify_names(weights, folder)
    verified = f"names, shapes and values of {len(weights.tensors)} tensors, in {_dtype_name(written_dtype)}"
    verification.finish(
        verified,
        "that transformers loads all of them, and that logits are finite",
        loading="loading the exported model, verifying logits",
        verify_loaded=lambda: verify_model(weights, folder, written_dtype),
        needed_bytes=loading_bytes(weights, written_dtype),
        on_progress=on_progress,
    )


def _write_adapter(
    checkpoint: Checkpoint,
    lora: Lora,
    folder: Path,
    *,
    dtype: torch.dtype | None,
    verification: _Verification,
    on_progress: Callable[[str], None],
) -> None:
    """Write an adapter in peft's format, its config and its weights only, and verify it."""
    _check_space(folder, lora.adapter, dtype)
    folder.mkdir(parents=True)
    on_progress(f"writing {len(lora.adapter.tensors)} tensors of step {checkpoint.step}")
    _write_json(folder / ADAPTER_CONFIG, lora.config)
    [written_dtype] = _write_file(
        lora.adapter, list(lora.adapter.tensors), folder / "adapter_model.safetensors", dtype=dtype
    )
    write_export_record(folder, checkpoint, written_dtype)
    on_progress("verifying tensors")
    verify_tensors(lora.adapter, folder)
    base = MergedWeights(lora, dtype=None)  # compares shapes
    verified = f"names, shapes and values of {len(lora.adapter.tensors)} tensors, in {_dtype_name(written_dtype)}"
    verification.finish(
        verified,
        "that peft loads all of them, and that logits are those of merged weights",
        loading="loading the base model and the adapter with peft, verifying logits",
        verify_loaded=lambda: verify_adapter(lora, folder),
        needed_bytes=loading_bytes(base, None),
        on_progress=on_progress,
    )


def _num_bytes(tensor: StoredTensor, dtype: torch.dtype | None) -> int:
    return math.prod(tensor.shape) * (dtype or tensor.dtype).itemsize


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
    shards: list[list[str]] = [[]]
    shard_bytes = total_bytes = 0
    for name, stored in weights.tensors.items():
        num_bytes = _num_bytes(stored, dtype)
        if shards[-1] and shard_bytes + num_bytes > SHARD_BYTES:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += num_bytes
        total_bytes += num_bytes
    weight_map: dict[str, str] = {}
    dtypes: set[torch.dtype] = set()
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        dtypes |= _write_file(weights, names, folder / file, dtype=dtype)
        weight_map |= dict.fromkeys(names, file)
    if len(dtypes) != 1:
        raise CheckpointError(
            f"the checkpoint mixes {', '.join(sorted(map(_dtype_name, dtypes)))}, and a config names one: choose "
            "--dtype"
        )
    if len(shards) > 1:
        _write_json(
            folder / "model.safetensors.index.json",
            {"metadata": {"total_size": total_bytes}, "weight_map": weight_map},
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
        _write_json(path, config)


def write_export_record(folder: Path, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """Write EXPORT_RECORD, with the settings of the run if the checkpoint has them."""
    settings = checkpoint.actor / RUN_SETTINGS
    _write_json(
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


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_json(path, content, ensure_ascii=False)
