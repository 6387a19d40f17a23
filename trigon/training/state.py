"""Tensors in a folder, whole or in pieces: one format whether one process wrote it or many, read by any number.

    folder/
      shard-00001-model-00001-of-00002.safetensors     the first rank's pieces
      shard-00001-model-00002-of-00002.safetensors     more of them: a file holds about FILE_BYTES
      shard-00002-model-00001-of-00002.safetensors     the second rank's; its metadata says where each piece begins

These are the safetensors files of torch's distributed checkpoint, which cuts tensors up and puts them together again;
the pickles of its own format are not used. Knows sharded tensors, files and process groups; refuses to know policies
and optimizers, and leaves hashes and publication to whoever asked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from trigon.errors import CheckpointError

FILE_BYTES = 4 * 10**9
"""About how much a rank puts into one file, all of which is in host memory twice while it is written."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor on disk: its whole shape, however many pieces it lies in."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Piece:
    """A box of a tensor, from begin (inclusive) to end (exclusive) along each dimension, and the file that holds it."""

    file: Path
    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def volume(self) -> int:
        return math.prod(end - begin for begin, end in zip(self.begin, self.end, strict=True))

    def overlaps(self, other: _Piece) -> bool:
        sides = zip(self.begin, self.end, other.begin, other.end, strict=True)
        return all(begin < other_end and other_begin < end for begin, end, other_begin, other_end in sides)


class ShardedFiles:
    """The safetensors files of a folder, seen as the whole tensors that they hold pieces of.

    Only headers are read until a tensor is asked for. Files that say nothing of pieces hold whole tensors. A tensor's
    shape is where its pieces end: if its last piece is missing, it looks smaller, and whoever knows its shape must say.
    """

    def __init__(self, folder: Path) -> None:
        """Read the headers.

        Raises: CheckpointError if there is no such file, one cannot be read, or pieces have gaps or overlap.
        """
        self._folder = folder
        self._pieces: dict[str, list[_Piece]] = {}
        dtypes: dict[str, set[torch.dtype]] = {}
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder} holds no safetensors files")
        for file in files:
            for name, piece, dtype in _pieces_in(file):
                self._pieces.setdefault(name, []).append(piece)
                dtypes.setdefault(name, set()).add(dtype)
        self._tensors = {name: _whole(folder, name, self._pieces[name], dtypes[name]) for name in sorted(dtypes)}

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Every tensor by name, in the order of their names."""
        return self._tensors

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, on the CPU. No other is read."""
        stored = self._tensors[name]
        pieces = [piece for piece in self._pieces[name] if piece.volume > 0]
        if len(pieces) == 1:
            return _read_piece(pieces[0], name)
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        for piece in pieces:
            place = tuple(slice(begin, end) for begin, end in zip(piece.begin, piece.end, strict=True))
            whole[place] = _read_piece(piece, name)
        return whole


def save_tensors(tensors: Mapping[str, Tensor], folder: Path, *, group: Any | None) -> None:
    """Write tensors into a folder, which is made if it is not there; each rank its own pieces, of plain tensors one.

    Args: tensors: sharded (DTensor) or plain; the same names, and equal plain ones, on all ranks. group: the process
    group of all ranks, each of which is to call this; None in a process that is alone, with plain tensors only. A call
    in a thread wants a group for itself, or its messages mix with those of the others.
    Raises: CheckpointError on all ranks if one of them fails, or if what they wrote is not found in the one folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ranks = 1 if group is None else dist.get_world_size(group)
    writer = HuggingFaceStorageWriter(str(folder), _file_numbers(tensors, ranks), save_distributed=True)
    writer.per_thread_copy_ahead = 0  # the road with it needs streams, and the right GPU to be current in this thread
    planner = _AcceptableTensors()
    if not tensors:  # for which no file would be written
        if group is None or dist.get_rank(group) == 0:
            save_file({}, folder / "shard-00001-model-00001-of-00001.safetensors", metadata={"format": "pt"})
    elif group is None:
        # What save does, which would warn that there is only one process.
        planner.set_up_planner(dict(tensors), is_coordinator=True)
        writer.set_up_storage_writer(is_coordinator=True)
        plans, _ = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
        [plan] = writer.prepare_global_plan(plans)
        writer.write_data(planner.finish_plan(plan), planner).wait()
    else:
        with _ours(folder):
            save(dict(tensors), storage_writer=writer, planner=planner, process_group=group)
    if group is not None:
        _agree(_mismatch(tensors, folder) if dist.get_rank(group) == 0 else None, group)


def load_tensors(tensors: Mapping[str, Tensor], folder: Path, *, group: Any | None) -> None:
    """Fill tensors in place with what save_tensors wrote, bit for bit, however many ranks wrote it.

    Args: as of save_tensors.
    Raises: CheckpointError, before anything is touched, unless names, shapes and dtypes are those of the folder, none
    missing and none left over; on all ranks if one of them fails.
    """
    _agree(_mismatch(tensors, folder), group)
    if group is None:
        files = ShardedFiles(folder)
        for name, tensor in tensors.items():
            tensor.detach().copy_(files.read(name))
    elif tensors:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with _ours(folder):
            load(
                dict(tensors),
                storage_reader=HuggingFaceStorageReader(str(folder)),
                planner=planner,
                process_group=group,
            )


def stage(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies in host memory, for save_tensors to write while training goes on; sharded ones stay sharded."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


class _AcceptableTensors(DefaultSavePlanner):
    """Hands out tensors as safetensors wants them: in host memory, contiguous, and each with memory of its own."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._storages: set[int] = set()

    def transform_object(self, write_item: WriteItem, object: Any) -> Tensor:
        storage = object.untyped_storage().data_ptr()
        tensor: Tensor = object.detach().to("cpu", copy=storage in self._storages).contiguous()
        self._storages.add(storage)
        return tensor


def _file_numbers(tensors: Mapping[str, Tensor], ranks: int) -> dict[str, int]:
    """Return which of its files, counted from 1, each rank writes its piece of a tensor into."""
    numbers: dict[str, int] = {}
    number, filled = 1, 0
    for name, tensor in sorted(tensors.items()):
        num_bytes = tensor.numel() * tensor.element_size() // ranks
        if filled > 0 and filled + num_bytes > FILE_BYTES:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += num_bytes
    return numbers


def _mismatch(tensors: Mapping[str, Tensor], folder: Path) -> str | None:
    """Return what keeps the folder from holding exactly tensors such as these, or None."""
    try:
        stored = ShardedFiles(folder).tensors
    except CheckpointError as error:
        return str(error)
    missing = sorted(tensors.keys() - stored.keys())
    unknown = sorted(stored.keys() - tensors.keys())
    other = [
        f"{name} {stored[name].dtype} {list(stored[name].shape)} instead of {tensor.dtype} {list(tensor.shape)}"
        for name, tensor in sorted(tensors.items())
        if name in stored and stored[name] != StoredTensor(tuple(tensor.shape), tensor.dtype)
    ]
    if not (missing or unknown or other):
        return None
    return (
        f"the tensors in {folder} are not those of this run: missing {missing[:3]}, unknown {unknown[:3]}, of another "
        f"shape or dtype {other[:3]} ({len(missing)}, {len(unknown)} and {len(other)} in all)"
    )


def _agree(problem: str | None, group: Any | None) -> None:
    """Raise CheckpointError on all ranks if one of them has a problem: the others would wait for it for ever."""
    problems = [problem]
    if group is not None:
        problems = [None] * dist.get_world_size(group)
        dist.all_gather_object(problems, problem, group=group)
    for problem in problems:
        if problem is not None:
            raise CheckpointError(problem)


@contextmanager
def _ours(folder: Path) -> Iterator[None]:
    """Turn torch's CheckpointException, which "except Exception" does not catch, into CheckpointError."""
    try:
        yield
    except CheckpointException as error:
        failures = "; ".join(
            f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in sorted(error.failures.items())
        )
        raise CheckpointError(f"{folder}: {failures}") from error


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _pieces_in(file: Path) -> Iterator[tuple[str, _Piece, torch.dtype]]:
    with _opened(file) as opened:
        metadata = (opened.metadata() or {}).get("DCP_SHARDING_INFO")
        begins = None if metadata is None else json.loads(metadata)
        for name in opened.keys():  # noqa: SIM118  (it is no mapping)
            header = opened.get_slice(name)
            shape = header.get_shape()
            begin = [0] * len(shape) if begins is None else begins[name]["saved_offsets"]
            end = tuple(offset + length for offset, length in zip(begin, shape, strict=True))
            yield name, _Piece(file, tuple(begin), end), _DTYPES[header.get_dtype()]


def _read_piece(piece: _Piece, name: str) -> Tensor:
    with _opened(piece.file) as opened:
        tensor: Tensor = opened.get_tensor(name)
        return tensor


def _whole(folder: Path, name: str, pieces: list[_Piece], dtypes: set[torch.dtype]) -> StoredTensor:
    """Return the tensor that these pieces make. Raises: CheckpointError if they make none."""
    shape = tuple(map(max, zip(*(piece.end for piece in pieces), strict=True)))
    full = sorted((piece for piece in pieces if piece.volume > 0), key=lambda piece: piece.begin)
    gap = sum(piece.volume for piece in full) != math.prod(shape)
    if len(dtypes) > 1 or gap or _overlap(full):
        files = ", ".join(sorted({piece.file.name for piece in pieces}))
        raise CheckpointError(
            f"the pieces of {name} in {folder} ({files}) make no tensor: a file is missing, or one is of another save"
        )
    return StoredTensor(shape, dtypes.pop())


def _overlap(pieces: list[_Piece]) -> bool:
    """Tell whether any two of these pieces, which come in the order of their beginnings, share an element."""
    for index, piece in enumerate(pieces):
        for later in pieces[index + 1 :]:
            if later.begin[:1] >= piece.end[:1]:  # and so do all that follow
                break
            if piece.overlaps(later):
                return True
    return False
