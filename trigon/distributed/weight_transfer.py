"""Sends a policy's weights from the workers that learn to those that sample.

Rank 0 of the transfer's own process group is the first learner; all others are samplers. It
broadcasts one bucket of tensors after the other, while all learners gather the next tensors, so
that no process holds a second copy of the model. Knows neither Ray nor what loads the weights.

    learner 1   gathers with learner 0
    learner 0   q k v ... -> bucket --broadcast--> sampler 0: loads it into vLLM
                                                   sampler 1: loads it into vLLM
"""

from __future__ import annotations

import datetime
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from trigon.distributed.rendezvous import open_store
from trigon.errors import ParityError, TransferError
from trigon.system.process_settings import set_variables
from trigon.training.parallel import ProcessGroup
from trigon.types import LocalWeights, NamedTensors, ReadWeights

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

BUCKET_BYTES = 256 * 2**20
"""The most bytes of a broadcast: a bucket of tensors, or a part of a larger tensor."""

JOIN_SECONDS = 15.0
"""Time limit for all members to connect. All of them are idle when they receive the request."""

_RAISING = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
"""Read by ProcessGroupNCCL as it is made: the thread that waits gets the error of a lost member.

Otherwise wait() returns at once and raises nothing, and torch's watchdog ends the whole process
when a member dies or the time limit is reached. A group that waits so has no watchdog (torch 2.13).
"""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_ANY_DTYPE, _FAILED = len(_DTYPES), len(_DTYPES) + 1  # codes beside the indices of _DTYPES
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_Header = list[tuple[str, list[int], int, int]]
"""What a bucket holds: of each tensor the name, the shape, the index of its dtype, its checksum."""


@dataclass(frozen=True, slots=True)
class TransferAddress:
    """Where the members of a transfer's process group meet, and how many they are."""

    host: str
    port: int
    size: int


class TransferGroup:
    """A process group in which rank 0 broadcasts weights to all others."""

    def __init__(
        self, store: Store, rank: int, size: int, device: torch.device, *, timeout_seconds: float, bucket_bytes: int
    ) -> None:
        """Connect to all other members over gloo; NCCL connects in connect().

        timeout_seconds: how long a broadcast waits for the other members.
        Raises: TransferError if they do not connect within JOIN_SECONDS.
        """
        self._device = device
        self._rank = rank
        self._bucket_bytes = bucket_bytes
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self._num_bytes = 0
        try:
            if device.type == "cuda":
                nccl: Any = dist.ProcessGroupNCCL
                with set_variables(_RAISING):
                    self._group: Any = nccl(store, rank, size, self._timeout)
            else:
                join = datetime.timedelta(seconds=JOIN_SECONDS)
                self._group = dist.ProcessGroupGloo(store, rank, size, join)
        except RuntimeError as error:
            raise TransferError(f"member {rank} of {size} could not connect to the others: {error}") from error

    def connect(self) -> None:
        """Connect to all other members over NCCL; abort() in another thread ends it.

        Raises: TransferError if they do not connect within JOIN_SECONDS.
        """
        if self._device.type == "cuda":  # NCCL connects at its first call
            first = torch.zeros(1, device=self._device)
            self._broadcast(first, timeout=datetime.timedelta(seconds=JOIN_SECONDS))

    def abort(self) -> None:
        """Close the connections; ends a broadcast that waits, in another thread."""
        self._group.abort()

    # -- the learners --

    def send(self, weights: NamedTensors) -> int:
        """Broadcast all tensors, and return their bytes. Rank 0 only.

        Raises: TransferError if another member has failed; the tensors are then read to the end,
        since each is gathered from all learners.
        """
        self._num_bytes = 0
        bucket: list[tuple[str, Tensor]] = []
        bucket_bytes = 0
        try:
            for name, tensor in weights:
                if bucket and bucket_bytes + tensor.nbytes > self._bucket_bytes:
                    self._send_bucket(bucket)
                    bucket, bucket_bytes = [], 0
                # A copy: the next tensor may be gathered into the same memory.
                bucket.append((name, tensor.detach().to(self._device, copy=True).contiguous()))
                bucket_bytes += tensor.nbytes
            if bucket:
                self._send_bucket(bucket)
            self._send_header([])
        except TransferError:
            for _ in weights:
                pass
            raise
        return self._num_bytes

    def requested_dtype(self) -> int:
        """Return the code of the dtype that the samplers ask for, or the code of a failure."""
        code = torch.zeros(1, dtype=torch.int64, device=self._device)
        try:
            self._broadcast(code, root=1)
        except TransferError:
            return _FAILED
        return int(code)

    def _send_bucket(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        sums = torch.stack([_checksum(tensor) for _, tensor in bucket]).tolist()
        self._send_header(
            [
                (name, list(tensor.shape), _DTYPES.index(tensor.dtype), checksum)
                for (name, tensor), checksum in zip(bucket, sums, strict=True)
            ]
        )
        self._send_parts([tensor for _, tensor in bucket])

    def _send_header(self, header: _Header) -> None:
        text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8).to(self._device)
        self._broadcast(torch.tensor([text.numel()], dtype=torch.int64, device=self._device))
        self._broadcast(text)

    # -- the samplers --

    def weights(self) -> LocalWeights:
        """Return the weights that rank 0 sends next, to be read once. On all other ranks.

        Reading raises: TransferError if a member has failed; ParityError if a tensor does not
        arrive with the checksum with which it was sent.
        """
        return LocalWeights(self._receive)

    def _receive(self, dtype: torch.dtype | None = None) -> NamedTensors:
        damaged: list[str] = []
        code = _ANY_DTYPE if dtype is None else _DTYPES.index(dtype)
        self._broadcast(torch.tensor([code], dtype=torch.int64, device=self._device), root=1)
        while header := self._receive_header():
            tensors = [torch.empty(shape, dtype=_DTYPES[code], device=self._device) for _, shape, code, _ in header]
            self._receive_parts(tensors)
            sums = torch.stack([_checksum(tensor) for tensor in tensors]).tolist()
            damaged += [name for (name, _, _, sent), got in zip(header, sums, strict=True) if sent != got]
            yield from ((name, tensor) for (name, *_), tensor in zip(header, tensors, strict=True))
        if damaged:
            raise ParityError(
                f"{len(damaged)} tensors did not arrive with the checksum with which they were sent, the first "
                f"is {damaged[0]}: the network between the workers that learn and those that sample damages data"
            )

    def _receive_header(self) -> _Header:
        size = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._broadcast(size)
        if int(size) <= 0:  # of a broadcast that was aborted
            raise TransferError("a member of the weight transfer has failed: a bucket has an empty header")
        text = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        self._broadcast(text)
        try:
            header: _Header = json.loads(bytes(text.cpu().tolist()))
        except ValueError as error:
            raise TransferError(f"a member of the weight transfer has failed: a header is damaged ({error})") from error
        return header

    # -- both --

    def _send_parts(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast a bucket as one tensor; a single tensor in parts of at most bucket_bytes."""
        flat = [_bytes_of(tensor) for tensor in tensors]
        packed = flat[0] if len(flat) == 1 else torch.cat(flat)
        for part in torch.split(packed, self._bucket_bytes):
            self._broadcast(part)
            self._num_bytes += part.nbytes

    def _receive_parts(self, tensors: Sequence[Tensor]) -> None:
        """Receive what _send_parts sends."""
        flat = [_bytes_of(tensor) for tensor in tensors]
        sizes = [part.numel() for part in flat]
        packed = flat[0] if len(flat) == 1 else torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        for part in torch.split(packed, self._bucket_bytes):
            self._broadcast(part)
        if len(flat) > 1:
            for part, received in zip(flat, torch.split(packed, sizes), strict=True):
                part.copy_(received)

    def _broadcast(self, tensor: Tensor, *, root: int = 0, timeout: datetime.timedelta | None = None) -> None:
        options: Any = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = root, 0, timeout or self._timeout
        try:
            self._group.broadcast([tensor], options).wait(options.timeout)  # NCCL ignores options.timeout
        except RuntimeError as error:
            raise TransferError(f"a member of the weight transfer has failed: {error}") from error


class TransferMember:
    """The part that one worker has in the transfers, one group after the other."""

    def __init__(self, device: torch.device) -> None:
        """Start without a group. device: the device of this worker."""
        self._device = device
        self._store: Store | None = None
        self._group: TransferGroup | None = None

    def listen(self, address: str) -> tuple[str, int]:
        """Open the store of a new group at this address, for its rank 0, and return its port."""
        self.leave()
        listener = socket.create_server((address, 0))
        host, port = listener.getsockname()
        self._store = open_store(host, port, listener=listener, seconds=JOIN_SECONDS)
        return host, port

    def join(self, address: TransferAddress, rank: int, *, timeout_seconds: float) -> None:
        """Connect to the other members of a group. rank: 0 for the member that listens.

        Raises: TransferError if they do not connect, and if leave() was called since listen().
        """
        if rank > 0:
            self.leave()
            try:
                self._store = open_store(address.host, address.port, listener=None, seconds=JOIN_SECONDS)
            except RuntimeError as error:
                raise TransferError(f"{address.host}:{address.port} does not answer: {error}") from error
        store = self._store
        if store is None:  # another member has died so soon that leave() has come first
            raise TransferError("the transfer group has ended before this member has connected")
        group = TransferGroup(
            store,
            rank,
            address.size,
            self._device,
            timeout_seconds=timeout_seconds,
            bucket_bytes=BUCKET_BYTES,
        )
        self._group = group  # before its first call, which leave() can end then
        group.connect()

    def leave(self) -> None:
        """Close the connections, if there are any. May be called from another thread."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            group.abort()

    def send(self, read: ReadWeights, process_group: ProcessGroup) -> int:
        """Gather the weights on all learners, and send them from the first one. Collective.

        process_group: the process group of the learners; only its rank 0 has joined the transfer.
        Returns: the bytes sent; 0 on all other ranks. Raises: as TransferGroup.send, on rank 0.
        """
        group = self._group
        own = -1 if process_group.rank > 0 else _FAILED if group is None else group.requested_dtype()
        [requested] = process_group.all_reduce_max([float(own)])
        code = int(requested)
        if code == _FAILED:
            if process_group.rank > 0:
                return 0
            raise TransferError("a worker that was to receive the weights has failed")
        weights = read(None if code == _ANY_DTYPE else _DTYPES[code])
        if group is not None:
            return group.send(weights)
        for _ in weights:
            pass
        return 0

    def weights(self) -> LocalWeights:
        """Return the weights that are sent next. See TransferGroup.weights."""
        assert self._group is not None, "join() has not been called"
        return self._group.weights()


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, as a view."""
    return tensor.view(-1).view(torch.uint8)


def _checksum(tensor: Tensor) -> Tensor:
    """Return the sum of the bits of all values as integers, which wraps around."""
    return tensor.view(-1).view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)
