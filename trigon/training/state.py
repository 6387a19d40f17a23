"""Tensors in a folder, written by any number of ranks and read by any other number.

    folder/
      shard-00001-model-00001-of-00002.safetensors     pieces of rank 0
      shard-00001-model-00002-of-00002.safetensors     more of them: a file holds about FILE_BYTES
      shard-00002-model-00001-of-00002.safetensors     pieces of rank 1

The metadata of a file has the offsets of its pieces in the full tensors. These are the safetensors
files of torch's distributed checkpoint, which splits tensors and puts them together again; the
pickle files of its own format are not used. Does not depend on policies and optimizers. Hashes and
atomic publication are left to the caller.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from trigon.errors import CheckpointError, PeerError
from trigon.models.weight_files import save_weights
from trigon.system.files import parse_json

FILE_BYTES = 4 * 10**9
"""Approximate size of one file. While a file is written, host memory holds its content twice."""

_OFFSETS = "saved_offsets"
"""Key of torch's metadata of a file: where each piece begins in its tensor."""

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
    """Full shape and dtype of a tensor on disk, which may be stored in several pieces."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Piece:
    """A slice of a tensor, and the file that holds it.

    begin, end: first (inclusive) and last (exclusive) index in each dimension.
    """

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
    """The tensors in the safetensors files of a folder, put together from their pieces.

    Headers are read at construction, tensors on demand. A file without offsets in its metadata
    holds full tensors. The shape of a tensor is the end of its last piece; if that piece is missing
    the tensor appears smaller, which callers detect by comparing it with the expected shape.
    """

    def __init__(self, folder: Path) -> None:
        """Read the headers.

        Raises: CheckpointError if there are no files, one cannot be read, or pieces of a tensor
        have gaps or overlap.
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
        self._tensors = {
            name: _stored_tensor(folder, name, self._pieces[name], dtypes[name]) for name in sorted(dtypes)
        }

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors, sorted by name."""
        return self._tensors

    def read(self, name: str) -> Tensor:
        """Return the full tensor on the CPU. No other tensor is read."""
        stored = self._tensors[name]
        pieces = [piece for piece in self._pieces[name] if piece.volume > 0]
        if len(pieces) == 1:
            return _read_piece(pieces[0], name)
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        for piece in pieces:
            index = tuple(slice(begin, end) for begin, end in zip(piece.begin, piece.end, strict=True))
            tensor[index] = _read_piece(piece, name)
        return tensor


def save_tensors(tensors: Mapping[str, Tensor], folder: Path, *, group: Any | None) -> None:
    """Write tensors into a folder, which is created if necessary; each rank writes its own pieces.

    A plain tensor is written by one rank.

    Args:
        tensors: sharded (DTensor) or plain, without shared memory; the same names on all ranks, and
            equal plain tensors.
        group: process group of all ranks, which call this together; None for a single process, with
            plain tensors only. A call in a second thread needs a group that no other thread uses.
    Raises: CheckpointError on the rank that fails, or finds that the folder does not contain the
    tensors of all ranks afterwards; PeerError on the other ranks.
    """
    problem = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"{folder} cannot be made: {error}"
    _raise_on_all_ranks(problem, group)
    ranks = 1 if group is None else dist.get_world_size(group)
    writer = HuggingFaceStorageWriter(str(folder), _file_numbers(tensors, ranks), save_distributed=True)
    writer.per_thread_copy_ahead = 0  # copying ahead uses CUDA streams, and the current GPU of the calling thread
    planner = _SafetensorsPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    if not tensors:  # torch would write no file
        if group is None or dist.get_rank(group) == 0:
            save_weights({}, folder / "shard-00001-model-00001-of-00001.safetensors")
    elif group is None:
        # The steps of torch's save(), which warns in a single process.
        planner.set_up_planner(dict(tensors), is_coordinator=True)
        writer.set_up_storage_writer(is_coordinator=True)
        plans, _ = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
        [plan] = writer.prepare_global_plan(plans)
        writer.write_data(planner.finish_plan(plan), planner).wait()
    else:
        with _checkpoint_errors(folder, group):
            save(dict(tensors), storage_writer=writer, planner=planner, process_group=group)
    if group is not None:
        _raise_on_all_ranks(_mismatch(tensors, folder) if dist.get_rank(group) == 0 else None, group)


def load_tensors(tensors: Mapping[str, Tensor], folder: Path, *, group: Any | None) -> None:
    """Load tensors in place, bit for bit. Any number of ranks may have written them.

    Args: see save_tensors.
    Raises: CheckpointError (PeerError on other ranks), before any tensor changes, unless the folder
    has the same names, shapes and dtypes on every rank.
    """
    _raise_on_all_ranks(_mismatch(tensors, folder), group)
    if group is None:
        files = ShardedFiles(folder)
        for name, tensor in tensors.items():
            tensor.detach().copy_(files.read(name))
    elif tensors:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with _checkpoint_errors(folder, group):
            load(
                dict(tensors),
                storage_reader=HuggingFaceStorageReader(str(folder)),
                planner=planner,
                process_group=group,
            )


def copy_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies in host memory, which can be saved while training continues.

    DTensors stay DTensors.
    """
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


class _SafetensorsPlanner(DefaultSavePlanner):
    """Provides tensors as safetensors needs them: contiguous, in host memory."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Tensor:
        tensor: Tensor = object.detach().cpu().contiguous()
        return tensor


def _file_numbers(tensors: Mapping[str, Tensor], ranks: int) -> dict[str, int]:
    """Return for each tensor the number of the file, from 1, that its pieces go to."""
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
    """Return how the tensors in the folder differ in name, shape or dtype; None if they do not."""
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
        f"the tensors in {folder} are not the tensors of this run: missing {missing[:3]}, unknown {unknown[:3]}, of "
        f"another shape or dtype {other[:3]} ({len(missing)}, {len(unknown)} and {len(other)} in total)"
    )


def _raise_on_all_ranks(problem: str | None, group: Any | None) -> None:
    """Raise CheckpointError on a rank that has a problem, and PeerError on the others.

    Otherwise the other ranks would wait for it.
    """
    problems = [problem]
    if group is not None:
        problems = [None] * dist.get_world_size(group)
        dist.all_gather_object(problems, problem, group=group)
    if problem is not None:
        raise CheckpointError(problem)
    for rank, other in enumerate(problems):
        if other is not None:
            raise PeerError(f"rank {rank}: {other}")


@contextmanager
def _checkpoint_errors(folder: Path, group: Any) -> Iterator[None]:
    """Raise errors as _raise_on_all_ranks for CheckpointException, which is not an Exception.

    torch raises it on all ranks, with the errors of all.
    """
    try:
        yield
    except CheckpointException as error:
        causes = {rank: f"{type(cause).__name__}: {cause}" for rank, (cause, _) in sorted(error.failures.items())}
        own = causes.get(dist.get_rank(group))
        if own is not None:
            raise CheckpointError(f"{folder}: {own}") from error
        others = "; ".join(f"rank {rank}: {cause}" for rank, cause in causes.items())
        raise PeerError(f"{folder}: {others}") from error


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file. Raises: CheckpointError if it cannot be read."""
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _pieces_in(file: Path) -> Iterator[tuple[str, _Piece, torch.dtype]]:
    """Iterate over the tensors of a file, from its header: name, piece, dtype.

    Raises: CheckpointError if the header is invalid.
    """
    with _opened(file) as opened:
        metadata = (opened.metadata() or {}).get("DCP_SHARDING_INFO")
        try:
            begins = None if metadata is None else parse_json(metadata)
            for name in opened.keys():  # noqa: SIM118  (not a mapping)
                header = opened.get_slice(name)
                shape = header.get_shape()
                begin = [0] * len(shape) if begins is None else [_checked_offset(n) for n in begins[name][_OFFSETS]]
                end = tuple(offset + length for offset, length in zip(begin, shape, strict=True))
                yield name, _Piece(file, tuple(begin), end), _DTYPES[header.get_dtype()]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file} has an invalid header ({type(error).__name__}: {error})") from error


def _checked_offset(value: object) -> int:
    """Return an offset. Raises: ValueError if it is none."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no offset")
    return value


def _read_piece(piece: _Piece, name: str) -> Tensor:
    with _opened(piece.file) as opened:
        tensor: Tensor = opened.get_tensor(name)
        return tensor


def _stored_tensor(folder: Path, name: str, pieces: list[_Piece], dtypes: set[torch.dtype]) -> StoredTensor:
    """Return the tensor that the pieces form. Raises: CheckpointError if they form none."""
    shape = tuple(map(max, zip(*(piece.end for piece in pieces), strict=True)))
    non_empty = sorted((piece for piece in pieces if piece.volume > 0), key=lambda piece: piece.begin)
    has_gap = sum(piece.volume for piece in non_empty) != math.prod(shape)
    if len(dtypes) > 1 or has_gap or _any_overlap(non_empty):
        files = ", ".join(sorted({piece.file.name for piece in pieces}))
        raise CheckpointError(
            f"the pieces of {name} in {folder} ({files}) do not form a tensor: a file is missing, "
            "or one is from another save"
        )
    return StoredTensor(shape, dtypes.pop())


def _any_overlap(pieces: list[_Piece]) -> bool:
    """Return whether any two pieces share an element. pieces: sorted by begin."""
    for index, piece in enumerate(pieces):
        for later in pieces[index + 1 :]:
            if later.begin[:1] >= piece.end[:1]:  # as do all later pieces
                break
            if piece.overlaps(later):
                return True
    return False
