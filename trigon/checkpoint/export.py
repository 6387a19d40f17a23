"""From a checkpoint to a folder that transformers, peft and vLLM load, proven before it is given its name.

What LoRA learned is written merged into its base model, or as an adapter. The proof reads the written folder back:
every tensor equals the checkpoint's, the model loads by the user's own road with nothing missing and nothing left over,
and on a probe (with an image if the model sees) its logits are those of a model that was built from the config and
filled with the checkpoint's tensors by name. Knows safetensors, configs and `from_pretrained`; refuses to know trainers
and engines.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from trigon import __version__
from trigon.checkpoint.store import MANIFEST, Checkpoint, CheckpointStore, is_disk_full, open_checkpoint, unsealed
from trigon.checkpoint.weights import Lora, MergedWeights, Weights, is_adapted, open_lora, open_weights
from trigon.errors import CheckpointError
from trigon.models.families import ModelFamily, family_of
from trigon.models.load import auto_class, copy_side_files, family_of_folder
from trigon.models.lora import load_adapter
from trigon.training.local import ADAPTER_CONFIG
from trigon.training.state import ShardedFiles, StoredTensor

DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}
"""What --dtype takes."""

SHARD_BYTES = 5 * 10**9
"""Files of weights hold at most this much, or one tensor."""

RECEIPT = "trigon_export.json"
"""Says which checkpoint a folder was made from; its presence lets a later export replace the folder."""

_LOGIT_TOLERANCE = 1e-4  # in float32, where equal weights give equal logits up to the order of additions


def export_checkpoint(
    path: Path,
    output: Path | None,
    *,
    dtype: str | None,
    adapter: bool = False,
    base: str | None = None,
    best: bool = False,
    warn: Callable[[str], None] = warnings.warn,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write a checkpoint's policy as a Hugging Face folder, prove it, and return the folder.

    Args: path: a checkpoint (global_step_N), its actor folder, or a run folder; of a run folder, the latest checkpoint
    is taken, or the best. output: None is huggingface_model in path, but huggingface in an actor folder, beside what
    lies there; of an adapter, lora_adapter in path.
    dtype: a key of DTYPES; None keeps the checkpoint's, bit for bit, and of merged weights the base model's.
    adapter: write what LoRA learned as peft does, instead of merging it into the base model. base: the base model, a
    folder or a hub id; None: where the run found it. warn: hears of damaged checkpoints that were passed over. say:
    hears what is being done.
    Raises: CheckpointError if there is no sound checkpoint, if an adapter or a base is named where there was no LoRA,
    if the base model is not there or another, if a weight is not finite (or would not be in dtype), if the disk is
    full, if output is a folder that no export made, or if any part of the proof fails; nothing is left behind then.
    """
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"weights cannot be written as {dtype!r}; choose one of {', '.join(DTYPES)}")
    say(f"verifying {path}")
    checkpoint = _find(path, best=best, warn=warn)
    in_place = checkpoint.actor / "huggingface"
    if output is None:
        in_actor = path.resolve() == checkpoint.actor.resolve()
        output = path / "lora_adapter" if adapter else in_place if in_actor else path / "huggingface_model"
    if not (in_place / "config.json").is_file():
        raise CheckpointError(
            f"{in_place} has no config.json: this checkpoint was saved without its model's side files"
        )
    lora = _open_lora(checkpoint, adapter=adapter, base=base)
    into_checkpoint = output.resolve() == in_place.resolve()
    if into_checkpoint and adapter:
        raise CheckpointError(f"{output} belongs to the checkpoint; name another folder for its adapter")
    if not into_checkpoint:
        _refuse_foreign(output)
    if lora is not None and lora.base_folder.resolve().is_relative_to(output.resolve()):
        raise CheckpointError(f"{output} holds the base model, which the export is made of; name another folder")

    aside = output.absolute().with_name(f".exporting_{output.name}")
    shutil.rmtree(aside, ignore_errors=True)
    wanted = DTYPES[dtype] if dtype else None
    try:
        if lora is not None and adapter:
            _write_adapter(checkpoint, lora, aside, dtype=wanted, say=say)
        else:
            weights = MergedWeights(lora, dtype=wanted) if lora is not None else open_weights(checkpoint.actor)
            _write_model(checkpoint, weights, aside, dtype=wanted, say=say)
        if into_checkpoint:
            _move_into(aside, checkpoint)
        else:
            shutil.rmtree(output, ignore_errors=True)
            os.rename(aside, output)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if is_disk_full(error):
            raise CheckpointError(f"the disk of {output} became full; make room, or choose another output") from error
        raise
    return output


def _find(path: Path, *, best: bool, warn: Callable[[str], None]) -> Checkpoint:
    if path.resolve().name == "actor" and (path.resolve().parent / MANIFEST).is_file():
        return open_checkpoint(path.resolve().parent, resumable=False)
    if (path / MANIFEST).is_file() or not any(path.glob("global_step_*")):
        return open_checkpoint(path, resumable=False)
    store = CheckpointStore(path, keep=-1, warn=warn)
    found = store.best() if best else store.latest(resumable=False)
    if found is None:
        raise CheckpointError(f"no checkpoint in {path} has a validation score; leave --best out to take the latest")
    return found


def _refuse_foreign(output: Path) -> None:
    if output.exists() and not (output / RECEIPT).is_file() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"{output} exists and is no earlier export; name another folder, or remove it")


def _open_lora(checkpoint: Checkpoint, *, adapter: bool, base: str | None) -> Lora | None:
    """Return what LoRA learned, None if the checkpoint is of a run without; refuse wishes that mean nothing then."""
    if is_adapted(checkpoint.actor):
        return open_lora(checkpoint.actor, base=base)
    if adapter or base is not None:
        raise CheckpointError(
            f"{checkpoint.folder} holds all weights of a model and no adapters of LoRA; leave "
            f"{'--adapter' if adapter else '--base'} out to export them"
        )
    return None


def _write_model(
    checkpoint: Checkpoint, weights: Weights, folder: Path, *, dtype: torch.dtype | None, say: Callable[[str], None]
) -> None:
    """Write a model and prove it."""
    _check_space(folder, weights, dtype)
    copy_side_files(checkpoint.actor / "huggingface", folder)
    say(f"writing {len(weights.tensors)} tensors of step {checkpoint.step}")
    written_dtype = _write_weights(weights, folder, dtype=dtype)
    _set_config_dtype(folder / "config.json", written_dtype)
    _write_receipt(folder, checkpoint, written_dtype)
    say("proving: tensors")
    _prove_tensors(weights, folder)
    say("proving: logits")
    _prove_logits(weights, folder, written_dtype)


def _write_adapter(
    checkpoint: Checkpoint, lora: Lora, folder: Path, *, dtype: torch.dtype | None, say: Callable[[str], None]
) -> None:
    """Write what peft's users expect of an adapter, which is no more than this, and prove it."""
    _check_space(folder, lora.adapter, dtype)
    folder.mkdir(parents=True)
    say(f"writing {len(lora.adapter.tensors)} tensors of step {checkpoint.step}")
    _write_json(folder / ADAPTER_CONFIG, lora.config)
    [written_dtype] = _write_file(
        lora.adapter, list(lora.adapter.tensors), folder / "adapter_model.safetensors", dtype=dtype
    )
    _write_receipt(folder, checkpoint, written_dtype)
    say("proving: tensors")
    _prove_tensors(lora.adapter, folder)
    say("proving: logits, with peft")
    _prove_adapter(lora, folder)


def _bytes_of(tensor: StoredTensor, dtype: torch.dtype | None) -> int:
    return math.prod(tensor.shape) * (dtype or tensor.dtype).itemsize


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _check_space(folder: Path, weights: Weights, dtype: torch.dtype | None) -> None:
    needed = sum(_bytes_of(tensor, dtype) for tensor in weights.tensors.values())
    parent = folder.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise CheckpointError(f"the model needs {needed:,} bytes, but the disk of {parent} has {free:,} free")


def _write_weights(weights: Weights, folder: Path, *, dtype: torch.dtype | None) -> torch.dtype:
    """Write the weights as one or more safetensors files, one file in memory at a time, and return their dtype."""
    shards: list[list[str]] = [[]]
    filled = total = 0
    for name, stored in weights.tensors.items():
        num_bytes = _bytes_of(stored, dtype)
        if shards[-1] and filled + num_bytes > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += num_bytes
        total += num_bytes
    weight_map: dict[str, str] = {}
    dtypes: set[torch.dtype] = set()
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        dtypes |= _write_file(weights, names, folder / file, dtype=dtype)
        weight_map |= dict.fromkeys(names, file)
    if len(dtypes) != 1:
        raise CheckpointError(
            f"the checkpoint mixes {', '.join(sorted(map(_name_of, dtypes)))}, and a config names one: choose --dtype"
        )
    if len(shards) > 1:
        _write_json(
            folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )
    return dtypes.pop()


def _write_file(weights: Weights, names: Sequence[str], file: Path, *, dtype: torch.dtype | None) -> set[torch.dtype]:
    """Write these tensors, each of them finite, and return their floating-point dtypes."""
    tensors = {name: _cast(weights.read(name), dtype) for name in names}
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                f"{name} in the checkpoint holds NaN or infinity as {_name_of(tensor.dtype)}: such a model is of "
                "no use. Export an earlier checkpoint, or choose a dtype of larger range"
            )
    save_file(tensors, file, metadata={"format": "pt"})
    return {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}


def _set_config_dtype(path: Path, dtype: torch.dtype) -> None:
    """Have the config say the dtype of the weights, in every part that names one; leave the file alone if it does."""
    config = json.loads(path.read_text(encoding="utf-8"))
    before = json.dumps(config)
    if "dtype" not in config and "torch_dtype" not in config:
        config["dtype"] = _name_of(dtype)
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in ("dtype", "torch_dtype"):
            if key in part:
                part[key] = _name_of(dtype)
    if json.dumps(config) != before:
        _write_json(path, config)


def _write_receipt(folder: Path, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    _write_json(
        folder / RECEIPT,
        {
            "trigon_version": __version__,
            "checkpoint": checkpoint.folder.name,
            "step": checkpoint.step,
            "val_reward_score": checkpoint.score,
            "dtype": _name_of(dtype),
        },
    )


def _prove_tensors(weights: Weights, folder: Path) -> None:
    """Raise CheckpointError unless folder holds exactly the checkpoint's tensors, equal element by element."""
    written = ShardedFiles(folder)
    differ = written.tensors.keys() ^ weights.tensors.keys()
    if differ:
        raise CheckpointError(
            f"{len(differ)} tensors were not written, or are not the checkpoint's ({', '.join(sorted(differ)[:3])}); "
            "nothing was exported"
        )
    for name in written.tensors:
        tensor = written.read(name)
        if not torch.equal(tensor, weights.read(name).to(tensor.dtype)):
            raise CheckpointError(f"{name} in {folder} is not what the checkpoint holds; nothing was exported")


def _prove_logits(weights: Weights, folder: Path, dtype: torch.dtype) -> None:
    """Raise CheckpointError unless the folder loads whole and computes what the checkpoint's tensors compute."""
    expected = _computed_by(weights, folder, dtype)
    exported, report = auto_class(family_of_folder(folder)).from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    problems = {kind: sorted(map(str, report[kind])) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if any(problems.values()):
        raise CheckpointError(f"the exported model does not load whole: {problems}; nothing was exported")
    if exported.dtype != dtype:
        raise CheckpointError(f"the exported model loads as {exported.dtype}, not {dtype}; nothing was exported")
    _compare(_logits(exported.float(), _probe(folder)), expected)


def _prove_adapter(lora: Lora, folder: Path) -> None:
    """Raise CheckpointError unless peft loads all of the folder, and computes with it what merged weights compute."""
    written = ShardedFiles(folder)
    merged = MergedWeights(replace(lora, adapter=written), dtype=torch.float32)
    expected = _computed_by(merged, lora.model_config, torch.float32)

    base = auto_class(family_of_folder(lora.base_folder)).from_pretrained(lora.base_folder, dtype=torch.float32)
    adapted, found = load_adapter(base, folder)
    # Adapters that learned little change logits by less than the tolerance: whether they are there has to be looked up.
    if found.keys() != written.tensors.keys() or not all(
        torch.equal(tensor, written.read(name).to(tensor.dtype)) for name, tensor in found.items()
    ):
        raise CheckpointError(f"peft does not load {folder} as it was written; nothing was exported")
    _compare(_logits(adapted, _probe(lora.model_config)), expected)


def _computed_by(weights: Weights, folder: Path, dtype: torch.dtype) -> Tensor:
    """Return the logits of weights, rounded to dtype, in a model that is built from the folder's config."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    with torch.random.fork_rng(devices=[]):  # the new model's own numbers, about to be replaced, are drawn by chance
        model = auto_class(family_of_folder(folder)).from_config(config, dtype=torch.float32)
    _fill(model, weights, family_of(config), dtype)
    return _logits(model, _probe(folder))


def _compare(actual: Tensor, expected: Tensor) -> None:
    difference = float((actual - expected).abs().max())
    if not difference <= _LOGIT_TOLERANCE * max(1.0, float(expected.abs().max())):
        raise CheckpointError(
            f"the exported model's logits differ from the checkpoint's by {difference:.2e}; nothing was exported"
        )


def _probe(folder: Path) -> Mapping[str, Any]:
    """Return the inputs of a small question, made by the folder's tokenizer or processor, with an image if it takes
    one.
    """
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
    """Put the checkpoint's tensors, rounded to dtype, into a model by name: all of them, into all of its parameters."""
    left = dict(weights.tensors)
    parts = (part for here, weight in model.named_parameters() for part in family.checkpoint_tensors(here, weight))
    for name, parameter in parts:
        stored = left.pop(name, None)
        if stored is None or stored.shape != tuple(parameter.shape):
            found = "is missing from" if stored is None else f"is {stored.shape}, not {tuple(parameter.shape)}, in"
            raise CheckpointError(f"{name} {found} the checkpoint, so it does not belong to its own config.json")
        parameter.copy_(weights.read(name).to(dtype))
    if left:
        raise CheckpointError(f"the checkpoint holds {sorted(left)[:3]}, which its own config.json does not know")


@torch.no_grad()
def _logits(model: Any, probe: Mapping[str, Any]) -> Tensor:
    logits: Tensor = model.eval()(**probe).logits.float()
    return logits


def _move_into(aside: Path, checkpoint: Checkpoint) -> None:
    """Lay the exported files beside the checkpoint's side files, of which the config may now name another dtype."""
    target = checkpoint.actor / "huggingface"
    for old in (*target.glob("model*.safetensors"), *target.glob("model.safetensors.index.json")):
        old.unlink()
    config = (target / "config.json").relative_to(checkpoint.folder).as_posix()
    with unsealed(checkpoint.folder, (config,)):
        for file in sorted(aside.rglob("*")):
            if file.is_file():
                os.replace(file, target / file.relative_to(aside))
    shutil.rmtree(aside)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
