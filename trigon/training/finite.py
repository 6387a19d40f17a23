"""Finds weights and optimizer states that are not finite, before they are saved or sampled from.

Does not depend on policies and optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from trigon.errors import NotFiniteError
from trigon.training.optim import on_this_rank
from trigon.training.parallel import ProcessGroup

NUM_NAMED = 3
"""How many tensors a message names."""


@torch.no_grad()
def require_finite(tensors: Mapping[str, Tensor], process_group: ProcessGroup, *, what: str) -> None:
    """Check that all values of these tensors are finite, on all ranks. Collective.

    Makes the host wait once for each device, not for each tensor, and allocates no copy of any.

    Args:
        tensors: sharded or plain, with the same names on all ranks. Integers are not checked.
        what: names the tensors in the message, such as "the weights after 12 updates".
    Raises: NotFiniteError on all ranks, with the same message, if a value of any rank is not
    finite.
    """
    shards = {name: on_this_rank(tensor) for name, tensor in tensors.items() if tensor.is_floating_point()}
    [failed] = process_group.all_reduce_max([float(not all_finite(shards.values()))])
    if not failed:
        return
    # Which ones is asked only now: this makes the host wait for each tensor.
    found = process_group.all_reduce_sum([float(not all_finite([shard])) for shard in shards.values()])
    names = [name for name, ranks in zip(shards, found, strict=True) if ranks]
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    raise NotFiniteError(
        f"{what} hold nan or infinity, in {len(names)} of {len(shards)} tensors: {', '.join(names[:NUM_NAMED])}{more}"
    )


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all values of these tensors are finite.

    The largest absolute value of a tensor is nan or infinite if any of its values is. Unlike a sum
    or a norm of squares, it does not overflow for finite values.
    """
    filled = [tensor.detach() for tensor in tensors if tensor.numel()]
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in filled:
        by_device.setdefault(tensor.device, []).append(tensor)
    # Read as numbers only when the reductions of all devices have been started.
    largest = [torch.nn.utils.get_total_norm(each, norm_type=math.inf) for each in by_device.values()]
    return all(math.isfinite(float(value)) for value in largest)
