"""A policy whose weights are sharded over several processes by torch's fully_shard (FSDP2).

Has the process group, the device mesh and the creation of a sharded policy: rank 0 reads the
weights and broadcasts them, and no rank holds a second full copy. Does not depend on losses,
optimizers, Ray and vLLM.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from trigon.models.policy import Policy
from trigon.models.sequence_parallel import RowRanks
from trigon.models.value import ActorCritic
from trigon.training.parallel import ProcessGroup, Sharding

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where a rank meets the others. store: the store of all ranks."""

    rank: int
    size: int
    store: Store


class TorchProcessGroup:
    """The ranks of torch.distributed's default process group. Satisfies ProcessGroup."""

    def __init__(self, device: torch.device, *, timeout_seconds: float | None = None) -> None:
        """Wrap the default process group, which is initialized already.

        device: the device on which this rank computes. timeout_seconds: the timeout of the groups
        that this makes; None: torch's default, which is less than a large checkpoint may take.
        """
        self.device = device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # Checkpoints are written from a second thread while training continues.
        self._timeout = None if timeout_seconds is None else datetime.timedelta(seconds=timeout_seconds)
        self.state_group: Any = dist.new_group(backend="gloo", timeout=self._timeout)

    @classmethod
    def joined(cls, device: torch.device, rendezvous: Rendezvous, *, timeout_seconds: float) -> TorchProcessGroup:
        """Initialize the default process group. Blocks until all ranks have joined.

        timeout_seconds: time after which a collective that some rank does not reach fails on the
        other ranks.
        """
        timeout = datetime.timedelta(seconds=timeout_seconds)
        rendezvous.store.set_timeout(timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=rendezvous.store,
            rank=rendezvous.rank,
            world_size=rendezvous.size,
            timeout=timeout,
        )
        return cls(device, timeout_seconds=timeout_seconds)

    def all_reduce_sum(self, numbers: Sequence[float]) -> list[float]:
        """See ProcessGroup."""
        return self._all_reduce(numbers, dist.ReduceOp.SUM)

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
        """See ProcessGroup."""
        return self._all_reduce(numbers, dist.ReduceOp.MAX)

    def count_ranks(self) -> int:
        """Return the number of ranks as an all-reduce on their devices counts it.

        Equals size if the network between the devices works.
        """
        count = torch.ones((), dtype=torch.int64, device=self.device)
        dist.all_reduce(count)
        return int(count)

    def row_ranks(self, size: int) -> RowRanks:
        """Return the consecutive ranks, this one included, that compute the same rows.

        Makes a torch process group; all ranks call it together. size: the number of these ranks.
        """
        first = self.rank - self.rank % size
        groups = {
            start: dist.new_group(range(start, start + size), timeout=self._timeout)
            for start in range(0, self.size, size)
        }
        return RowRanks(self.rank - first, size, groups[first])

    def before_forward(self, policy: nn.Module, *, sync_gradients: bool) -> None:
        """See ProcessGroup.

        Within one copy of the weights, gradients are reduce-scattered after every pass; between
        copies they are reduced when sync_gradients is True. FSDP keeps deferred gradients in one
        flat tensor per layer, which has no room for a parameter without a gradient.
        """
        cast(FSDPModule, policy).set_requires_all_reduce(sync_gradients)

    def reshard(self, policy: nn.Module) -> None:
        """See ProcessGroup.

        Affects the root module above all, which fully_shard keeps gathered after a forward pass.
        """
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _all_reduce(self, numbers: Sequence[float], operation: Any) -> list[float]:
        values = torch.tensor(numbers, dtype=torch.float64)
        if values.numel() > 0:
            dist.all_reduce(values, operation)
        return cast("list[float]", values.tolist())


class MakePolicy(Protocol):
    """Makes a policy, for one process or to be sharded."""

    def __call__(self, device: torch.device, *, as_stored: bool = False) -> Policy:
        """Return the policy on a device, on "meta" without weights.

        as_stored: its weights have the dtype of the model's files, if that is narrower.
        """
        ...


def open_sharded(
    make_policy: MakePolicy,
    process_group: ProcessGroup,
    sharding: Sharding,
    device: torch.device,
) -> Policy:
    """Return a policy whose weights are sharded over the ranks. All ranks call this together.

    Args:
        make_policy: called with "cpu" on rank 0 only, which broadcasts one tensor after the other,
            as it is stored if possible, and with "meta" on all ranks.
    """
    policy = make_policy(torch.device("meta"))
    full_policy = _load_full_policy(make_policy, policy) if process_group.rank == 0 else None
    _shard(policy, _mesh(device, process_group.size, sharding.ranks_per_copy), sharding)
    policy.to_empty(device="cpu" if sharding.cpu_offload else device)
    set_model_state_dict(
        policy,
        {} if full_policy is None else full_policy.state_dict(),
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    _broadcast_buffers(policy, full_policy, device)
    return policy


def _load_full_policy(make_policy: MakePolicy, policy: Policy) -> Policy:
    """Return the policy with all weights on the CPU, as they are stored unless a buffer is rounded.

    policy: the same policy on "meta". Some buffers have the dtype of the weights: the scale of
    Gemma's embedding.
    """
    meta, cpu = torch.device("meta"), torch.device("cpu")
    wanted, stored = (
        {name: buffer.dtype for name, buffer in each.named_buffers()}
        for each in (policy, make_policy(meta, as_stored=True))
    )
    return make_policy(cpu, as_stored=stored == wanted)


def _mesh(device: torch.device, size: int, ranks_per_copy: int | None) -> DeviceMesh:
    if ranks_per_copy is None or ranks_per_copy == size:
        return init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    return init_device_mesh(
        device.type, (size // ranks_per_copy, ranks_per_copy), mesh_dim_names=("replicate", "shard")
    )


def _shard(policy: Policy, mesh: DeviceMesh, sharding: Sharding) -> None:
    """Shard the policy in units, each of which is gathered while it computes.

    A unit is a layer, a merger, the embedding, a head, or the root with all other modules. The
    root is gathered from the start of the forward until the end of the backward, and with it an
    embedding and a head that share a weight.
    """
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=sharding.param_dtype, reduce_dtype=sharding.reduce_dtype, cast_forward_inputs=False
        ),
        "offload_policy": CPUOffloadPolicy() if sharding.cpu_offload else OffloadPolicy(),
    }
    for module in (*policy.layers(), *policy.mergers()):
        fully_shard(module, reshard_after_forward=sharding.full_shard, **options)
    for module in policy.layer_embeddings():
        fully_shard(module, reshard_after_forward=sharding.full_shard, **options).set_unshard_in_backward(False)
    if not policy.has_tied_head:
        embedding = fully_shard(policy.embedding, reshard_after_forward=sharding.full_shard, **options)
        embedding.set_unshard_in_backward(False)  # its gradient does not depend on its weight
        # The backward of the head follows its forward at once.
        head_options = options
        if policy.head_dtype is not None:
            precision = MixedPrecisionPolicy(
                param_dtype=policy.head_dtype, reduce_dtype=policy.head_dtype, cast_forward_inputs=False
            )
            head_options = {**options, "mp_policy": precision}
        fully_shard(policy.head, reshard_after_forward=False, **head_options)
        for method in policy.head_methods:
            register_fsdp_forward_method(policy.head, method)
    if isinstance(policy, ActorCritic):
        exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(policy.value_head, reshard_after_forward=False, **{**options, "mp_policy": exact})
    fully_shard(policy, **options)
    for method in policy.row_methods:
        register_fsdp_forward_method(policy, method)


def _broadcast_buffers(policy: Policy, full_policy: Policy | None, device: torch.device) -> None:
    """Broadcast the buffers of rank 0, which are not in checkpoints."""
    full_buffers = {} if full_policy is None else dict(full_policy.named_buffers())
    for name, buffer in list(policy.named_buffers()):
        values = torch.empty_like(buffer, device=device) if full_policy is None else full_buffers[name].to(device)
        dist.broadcast(values, src=0)
        module, _, leaf = name.rpartition(".")
        setattr(policy.get_submodule(module), leaf, values)
