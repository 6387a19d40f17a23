"""From a checkpoint to a Hugging Face folder that transformers and vLLM load, proven before it is given its name.

The proof reads the written folder back: every tensor equals the checkpoint's, the model loads by the user's own road
with nothing missing and nothing left over, and on a probe (with an image if the model sees) its logits are those of a
model that was built from the config and filled with the checkpoint's tensors by name. Knows safetensors, configs and
`from_pretrained`; refuses to know trainers and engines.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from trigon import __version__
from trigon.checkpoint.store import MANIFEST, Checkpoint, CheckpointStore, is_disk_full, open_checkpoint, unsealed
from trigon.errors import CheckpointError
from trigon.models.families import Family, family_of
from trigon.models.load import copy_side_files
from trigon.torchvision_stub import declare_operators

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


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a safetensors file, not read yet."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


def export_checkpoint(
    path: Path,
    output: Path | None,
    *,
    dtype: str | None,
    best: bool = False,
    warn: Callable[[str], None] = warnings.warn,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write a checkpoint's policy as a Hugging Face folder, prove it, and return the folder.

    Args: path: a checkpoint (global_step_N), its actor folder, or a run folder; of a run folder, the latest checkpoint
    is taken, or the best. output: None is huggingface_model in path, but huggingface in an actor folder, beside what
    lies there.
    dtype: a key of DTYPES; None keeps the checkpoint's, bit for bit. warn: hears of damaged checkpoints that were
    passed over. say: hears what is being done.
    Raises: CheckpointError if there is no sound checkpoint, if a weight is not finite (or would not be in dtype), if
    the disk is full, if output is a folder that no export made, or if any part of the proof fails; nothing is left
    behind then.
    """
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"weights cannot be written as {dtype!r}; choose one of {', '.join(DTYPES)}")
    say(f"verifying {path}")
    checkpoint = _find(path, best=best, warn=warn)
    in_place = checkpoint.actor / "huggingface"
    if output is None:
        output = in_place if path.resolve() == checkpoint.actor.resolve() else path / "huggingface_model"
    if not (in_place / "config.json").is_file():
        raise CheckpointError(
            f"{in_place} has no config.json: this checkpoint was saved without its model's side files"
        )
    if output.resolve() != in_place.resolve():
        _refuse_foreign(output)
    stored = _stored_tensors(checkpoint.actor)
    _check_space(output, stored, dtype)

    aside = output.absolute().with_name(f".exporting_{output.name}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        copy_side_files(in_place, aside)
        say(f"writing {len(stored)} tensors of step {checkpoint.step}")
        written_dtype = _write_weights(stored, aside, dtype=DTYPES[dtype] if dtype else None)
        _set_config_dtype(aside / "config.json", written_dtype)
        _write_receipt(aside, checkpoint, written_dtype)
        say("proving: tensors")
        _prove_tensors(stored, aside)
        say("proving: logits")
        _prove_logits(stored, aside, written_dtype)
        if output.resolve() == in_place.resolve():
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


def _stored_tensors(actor: Path) -> dict[str, _Stored]:
    """Return every weight of a checkpoint by its Hugging Face name, sorted, without reading it."""
    stored: dict[str, _Stored] = {}
    for file in sorted(actor.glob("weights*.safetensors")):
        for name, tensor in _all_tensors(file):
            assert name not in stored, f"{name} is in two files of {actor}"
            stored[name] = _Stored(file, tuple(tensor.shape), tensor.dtype)
    if not stored:
        raise CheckpointError(f"{actor} holds no weights*.safetensors")
    return dict(sorted(stored.items()))


def _all_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118  (it is no mapping)
            yield name, opened.get_tensor(name)


def _read(stored: _Stored, name: str) -> Tensor:
    with safe_open(stored.file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
        return tensor


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _check_space(output: Path, stored: Mapping[str, _Stored], dtype: str | None) -> None:
    itemsize = DTYPES[dtype].itemsize if dtype else None
    needed = sum(torch.Size(entry.shape).numel() * (itemsize or entry.dtype.itemsize) for entry in stored.values())
    parent = output.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise CheckpointError(f"the model needs {needed:,} bytes, but the disk of {output} has {free:,} free")


def _write_weights(stored: Mapping[str, _Stored], folder: Path, *, dtype: torch.dtype | None) -> torch.dtype:
    """Write the weights as one or more safetensors files, one file in memory at a time, and return their dtype."""
    shards: list[list[str]] = [[]]
    filled = total = 0
    for name, entry in stored.items():
        num_bytes = torch.Size(entry.shape).numel() * (dtype or entry.dtype).itemsize
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
        tensors = {name: _cast(_read(stored[name], name), dtype) for name in names}
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise CheckpointError(
                    f"{name} in {stored[name].file} holds NaN or infinity as {_name_of(tensor.dtype)}: such a model "
                    "is of no use. Export an earlier checkpoint, or choose a dtype of larger range"
                )
        dtypes |= {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
        weight_map |= dict.fromkeys(names, file)
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if len(dtypes) != 1:
        raise CheckpointError(
            f"the checkpoint mixes {', '.join(sorted(map(_name_of, dtypes)))}, and a config names one: choose --dtype"
        )
    if len(shards) > 1:
        _write_json(
            folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )
    return dtypes.pop()


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


def _prove_tensors(stored: Mapping[str, _Stored], folder: Path) -> None:
    """Raise CheckpointError unless folder holds exactly the checkpoint's tensors, equal element by element."""
    left = dict(stored)
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in _all_tensors(file):
            entry = left.pop(name, None)
            if entry is None or not torch.equal(tensor, _read(entry, name).to(tensor.dtype)):
                raise CheckpointError(f"{name} in {file} is not what the checkpoint holds; nothing was exported")
    if left:
        raise CheckpointError(
            f"{len(left)} tensors were not written ({', '.join(sorted(left)[:3])}); nothing was exported"
        )


def _prove_logits(stored: Mapping[str, _Stored], folder: Path, dtype: torch.dtype) -> None:
    """Raise CheckpointError unless the folder loads whole and computes what the checkpoint's tensors compute."""
    declare_operators()
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder)
    family = family_of(config)
    auto_class: Any = AutoModelForImageTextToText if family.has_vision else AutoModelForCausalLM
    probe = _probe(folder, family)

    with torch.random.fork_rng(devices=[]):  # the new model's own numbers, about to be replaced, are drawn by chance
        reference: Any = auto_class.from_config(config, dtype=torch.float32)
    _fill(reference, stored, family, dtype)
    expected = _logits(reference, probe)
    del reference

    exported, report = auto_class.from_pretrained(folder, dtype="auto", output_loading_info=True)
    problems = {kind: sorted(map(str, report[kind])) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if any(problems.values()):
        raise CheckpointError(f"the exported model does not load whole: {problems}; nothing was exported")
    if exported.dtype != dtype:
        raise CheckpointError(f"the exported model loads as {exported.dtype}, not {dtype}; nothing was exported")
    actual = _logits(exported.float(), probe)
    difference = float((actual - expected).abs().max())
    if not difference <= _LOGIT_TOLERANCE * max(1.0, float(expected.abs().max())):
        raise CheckpointError(
            f"the exported model's logits differ from the checkpoint's by {difference:.2e}; nothing was exported"
        )


def _probe(folder: Path, family: Family) -> Mapping[str, Any]:
    """Return the inputs of a small question, made by the exported tokenizer or processor, with an image if it takes
    one.
    """
    from transformers import AutoProcessor, AutoTokenizer

    question = "What is 2 + 3?"
    if not family.has_vision:
        inputs: Mapping[str, Any] = AutoTokenizer.from_pretrained(folder)(question, return_tensors="pt")
        return inputs
    processor = AutoProcessor.from_pretrained(folder)
    content = [{"type": "image"}, {"type": "text", "text": question}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    image = (torch.arange(84 * 112 * 3) % 256).to(torch.uint8).view(84, 112, 3).numpy()  # height, width, colour
    inputs = processor(text=[text], images=[image], return_tensors="pt")
    return inputs


@torch.no_grad()
def _fill(model: nn.Module, stored: Mapping[str, _Stored], family: Family, dtype: torch.dtype) -> None:
    """Put the checkpoint's tensors, rounded to dtype, into a model by name: all of them, into all of its parameters."""
    left = dict(stored)
    for here, parameter in model.named_parameters():
        name = family.checkpoint_name(here)
        entry = left.pop(name, None)
        if entry is None or entry.shape != tuple(parameter.shape):
            found = "is missing from" if entry is None else f"is {entry.shape}, not {tuple(parameter.shape)}, in"
            raise CheckpointError(f"{name} {found} the checkpoint, so it does not belong to its own config.json")
        parameter.copy_(_read(entry, name).to(dtype))
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
