"""A policy that many processes hold in shards, by torch's fully_shard (FSDP2).

Knows process groups, device meshes and how a sharded policy comes into being: one rank reads the weights, nobody ever
holds a second copy. Refuses to know losses, optimizers, Ray and vLLM.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from trigon.models.policy import Policy
from trigon.training.parallel import ProcessGroup


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a policy is spread over the ranks.

    full_shard: gather each layer anew for the backward pass; False keeps it gathered between forward and backward,
    which is faster and needs the memory of all weights.
    ranks_per_copy: ranks that share one copy, the others holding further ones (hybrid sharding); None: all of them.
    param_dtype: in which weights are gathered and computed with. reduce_dtype: in which gradients are summed.
    cpu_offload: keep weights, gradients and optimizer states in host memory, always.
    """

    full_shard: bool
    ranks_per_copy: int | None
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    cpu_offload: bool


class TorchProcessGroup:
    """Ranks that are processes, joined by torch.distributed. Satisfies Ranks."""

    def __init__(self, device: torch.device) -> None:
        """Take the process group that is there for ranks that compute on this kind of device."""
        self.device = device
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        # Checkpoints are written from a thread of their own while training goes on.
        self._state_group = dist.new_group(backend="gloo")

    @classmethod
    def joined(cls, device: torch.device, *, timeout_seconds: float) -> TorchProcessGroup:
        """Join the others as RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say; blocks until all are there.

        timeout_seconds: after which a collective that some rank does not reach is an error on the others.
        """
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            timeout=datetime.timedelta(seconds=timeout_seconds),
        )
        return cls(device)

    @property
    def rank(self) -> int:
        """See Ranks."""
        return self._rank

    @property
    def size(self) -> int:
        """See Ranks."""
        return self._size

    @property
    def state_group(self) -> Any:
        """See Ranks."""
        return self._state_group

    def totals(self, numbers: Sequence[float]) -> list[float]:
        """See Ranks."""
        return self._reduced(numbers, dist.ReduceOp.SUM)

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """See Ranks."""
        return self._reduced(numbers, dist.ReduceOp.MAX)

    def counted(self) -> int:
        """Return how many ranks there are, added up on their devices: proof that these can talk to each other."""
        one = torch.ones((), dtype=torch.int64, device=self.device)
        dist.all_reduce(one)
        return int(one)

    def before_forward(self, policy: nn.Module, *, sync_gradients: bool) -> None:
        """See Ranks. Within a copy gradients are summed and sharded after each pass, between copies when they settle.

        What waits lies in one flat tensor for each layer, with no place for a parameter that had no gradient yet.
        """
        cast(FSDPModule, policy).set_requires_all_reduce(sync_gradients)

    def reshard(self, policy: nn.Module) -> None:
        """See Ranks. The root, which fully_shard leaves gathered after a forward, is all there is to let go of."""
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _reduced(self, numbers: Sequence[float], operation: Any) -> list[float]:
        values = torch.tensor(numbers, dtype=torch.float64)
        if values.numel() > 0:
            dist.all_reduce(values, operation)
        return cast("list[float]", values.tolist())


def open_sharded(
    make_policy: Callable[[torch.device], Policy],
    process_group: ProcessGroup,
    sharding: Sharding,
    device: torch.device,
) -> Policy:
    """Return a policy whose weights lie sharded over the ranks; to be called on all of them.

    make_policy: given a device, returns the policy, on "meta" without weights. It is called with "cpu" on rank 0 alone,
    from where each tensor is sent out in turn, and with "meta" on all.
    """
    whole = make_policy(torch.device("cpu")) if process_group.rank == 0 else None
    policy = make_policy(torch.device("meta"))
    _shard(policy, _mesh(device, process_group.size, sharding.ranks_per_copy), sharding)
    policy.to_empty(device="cpu" if sharding.cpu_offload else device)
    set_model_state_dict(
        policy,
        {} if whole is None else whole.state_dict(),
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    _send_buffers(policy, whole, device)
    return policy


def _mesh(device: torch.device, size: int, ranks_per_copy: int | None) -> DeviceMesh:
    if ranks_per_copy is None or ranks_per_copy == size:
        return init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    return init_device_mesh(
        device.type, (size // ranks_per_copy, ranks_per_copy), mesh_dim_names=("replicate", "shard")
    )


def _shard(policy: Policy, mesh: DeviceMesh, sharding: Sharding) -> None:
    """Make each layer a unit of its own, and the rest (embeddings, norms, head, merger) the root's."""
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=sharding.param_dtype, reduce_dtype=sharding.reduce_dtype, cast_forward_inputs=False
        ),
        "offload_policy": CPUOffloadPolicy() if sharding.cpu_offload else OffloadPolicy(),
    }
    for layer in policy.layers():
        fully_shard(layer, reshard_after_forward=sharding.full_shard, **options)
    fully_shard(policy, **options)


def _send_buffers(policy: Policy, whole: Policy | None, device: torch.device) -> None:
    """Give every rank the buffers, which a model computes when it is made and no checkpoint holds."""
    known = {} if whole is None else dict(whole.named_buffers())
    for name, buffer in list(policy.named_buffers()):
        values = torch.empty_like(buffer, device=device) if whole is None else known[name].to(device)
        dist.broadcast(values, src=0)
        module, _, leaf = name.rpartition(".")
        setattr(policy.get_submodule(module), leaf, values)
