"""The state of a train engine in a checkpoint folder.

    folder/
      weights/               all weights, without LoRA
      adapter/               the adapters alone, with LoRA
      adapter_config.json    with LoRA
      optimizer/             the optimizer states, "<parameter name>/<state name>"
      state.json             number of updates, and the optimizer's strategy

state.py has the format of the tensor files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trigon.config.names import OptimizerStrategy
from trigon.errors import CheckpointError, NotFiniteError
from trigon.models.lora import adapter_config
from trigon.models.policy import Policy
from trigon.models.value import HEAD_NAME
from trigon.system.files import read_json_object, write_json
from trigon.system.terminal import listed
from trigon.training.optim import empty_state, on_this_rank
from trigon.training.parallel import ProcessGroup
from trigon.training.state import ShardedFiles, copy_to_host, load_tensors, save_tensors
from trigon.types import NamedTensors

WEIGHTS_FOLDER = "weights"
ADAPTER_FOLDER = "adapter"
OPTIMIZER_FOLDER = "optimizer"
STATE_FILE = "state.json"
ADAPTER_CONFIG = "adapter_config.json"


class Saved(Protocol):
    """What is saved and loaded: a policy, a value model, or a value head alone."""

    @property
    def has_adapters(self) -> bool:
        """Whether saved_tensors are adapters."""
        ...

    def saved_tensors(self) -> NamedTensors:
        """Iterate over the parameters, by their names in a checkpoint."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters, by the names of their optimizer states."""
        ...

    def clear_features(self) -> None:
        """Take note that the weights have changed."""
        ...


def stage_state(
    policy: Saved,
    optimizer: Optimizer,
    folder: Path,
    *,
    updates: int,
    strategy: OptimizerStrategy,
    model_only: bool,
    process_group: ProcessGroup,
) -> Callable[[], None]:
    """Copy the state to host memory and return a function that writes it into the folder.

    Every rank writes its part of the tensors, and rank 0 the JSON files.

    Args:
        folder: exists when the function is called.
        updates: number of updates that the optimizer made.
        model_only: leave out the optimizer states and state.json.
    Raises: NotFiniteError on all ranks, before anything is copied, if a value is not finite.
    """
    saved = {_weights_folder(policy): dict(policy.saved_tensors())}
    if not model_only:
        saved[OPTIMIZER_FOLDER] = _optimizer_tensors(policy, optimizer)
    require_finite(
        {f"{part}/{name}": tensor for part, tensors in saved.items() for name, tensor in tensors.items()},
        process_group,
        what=f"the weights and optimizer states after {updates:,} updates",
    )
    parts = {part: copy_to_host(tensors) for part, tensors in saved.items()}
    state = {"updates": updates, "strategy": strategy}
    adapter = None
    if isinstance(policy, Policy) and policy.has_adapters:
        adapter = adapter_config(policy.model, base_model=policy.model.name_or_path)

    def write() -> None:
        for name, tensors in parts.items():
            save_tensors(tensors, folder / name, group=process_group.state_group)
        if process_group.rank > 0:
            return
        try:
            if not model_only:
                write_json(folder / STATE_FILE, state)
            if adapter is not None:
                write_json(folder / ADAPTER_CONFIG, adapter)
        except OSError as error:  # a full disk is no reason for a worker to end
            raise CheckpointError(f"{folder}: {error}") from error

    return write


def read_updates(folder: Path, *, lora_rank: int, strategy: OptimizerStrategy, section: str = "worker.actor") -> int:
    """Return the number of updates of a saved state, without loading any tensor.

    lora_rank: rank of the adapters that the run trains; 0: it trains none. section: the section of
    the model, for messages.
    Raises: CheckpointError if a run with these settings cannot resume from the folder.
    """
    has_adapters = lora_rank > 0
    saved_adapters, saved_weights = (folder / ADAPTER_FOLDER).exists(), (folder / WEIGHTS_FOLDER).exists()
    own_rank = f"{section}.model.lora.rank"
    start = "start a new run with another trainer.experiment_name, or with trainer.find_last_checkpoint=false"
    if has_adapters and saved_weights and not saved_adapters:
        raise CheckpointError(
            f"{folder} holds all weights of a run without LoRA, and this run trains LoRA adapters; set {own_rank}=0 to "
            f"resume it, or export it, set {section}.model.model_path to the export, and {start}"
        )
    if not has_adapters and saved_adapters and not saved_weights:
        rank = read_adapter_rank(folder)
        raise CheckpointError(
            f"{folder} holds the LoRA adapters of a run with {own_rank}={rank}, and this run trains all weights; set "
            f"{own_rank}={rank} to resume it, or {start}"
        )
    for name in (ADAPTER_FOLDER if has_adapters else WEIGHTS_FOLDER, OPTIMIZER_FOLDER, STATE_FILE):
        if not (folder / name).exists():
            raise CheckpointError(
                f"{folder} has no {name}. A checkpoint saved with trainer.save_model_only=true cannot be resumed; "
                f"export it and set {section}.model.model_path to the result"
            )
    state = read_object(folder / STATE_FILE, strategy=str, updates=int)
    if state["strategy"] != strategy:
        raise CheckpointError(
            f"{folder} was saved with {section}.optim.strategy={state['strategy']}, this run has {strategy}; set it to "
            f"{state['strategy']}, or export the checkpoint and set {section}.model.model_path to the result"
        )
    if has_adapters and (saved_rank := read_adapter_rank(folder)) != lora_rank:
        raise CheckpointError(
            f"{folder} holds LoRA adapters of rank {saved_rank}, and {own_rank} is {lora_rank}; set it to "
            f"{saved_rank}, or {start}"
        )
    return int(state["updates"])


def is_head_alone(folder: Path) -> bool:
    """Return whether the folder holds a value head without a model, as with a shared trunk."""
    weights = folder / WEIGHTS_FOLDER
    return weights.is_dir() and all(name.startswith(f"{HEAD_NAME}.") for name in ShardedFiles(weights).tensors)


def read_adapter_rank(folder: Path) -> int:
    """Return the rank of the LoRA adapters in the folder."""
    return int(read_object(folder / ADAPTER_CONFIG, r=int)["r"])


def read_object(path: Path, **types: type) -> dict[str, Any]:
    """Return the content of a JSON file of a checkpoint.

    types: keys that it must have, with the types of their values. Raises: CheckpointError.
    """
    try:
        content = read_json_object(path)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; restore it, or use another checkpoint") from error
    for key, kind in types.items():
        if type(content.get(key)) is not kind:
            raise CheckpointError(f"{path} has no valid {key!r}; restore it, or use another checkpoint")
    return content


def load_policy(policy: Saved, folder: Path, *, process_group: ProcessGroup) -> None:
    """Load weights in place, without optimizer states.

    Raises: CheckpointError unless the names, shapes and dtypes of all tensors match.
    """
    weights = folder / _weights_folder(policy)
    if not weights.exists():
        raise CheckpointError(
            f"{folder} has no {weights.name}. A run with LoRA cannot load a checkpoint without LoRA, nor the other way "
            "round; set worker.actor.model.lora.rank as in the run that saved it"
        )
    load_tensors(dict(policy.saved_tensors()), weights, group=process_group.state_group)
    policy.clear_features()


def _weights_folder(policy: Saved) -> str:
    return ADAPTER_FOLDER if policy.has_adapters else WEIGHTS_FOLDER


def _optimizer_tensors(policy: Saved, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return all optimizer states under the names that they have in a checkpoint."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in policy.named_parameters()}
    return {
        f"{names[parameter]}/{key}": value.detach().contiguous()
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def load_optimizer(
    policy: Saved, optimizer: Optimizer, folder: Path, *, strategy: OptimizerStrategy, process_group: ProcessGroup
) -> None:
    """Replace all optimizer states by those of a checkpoint.

    Raises: CheckpointError unless the names, shapes and dtypes of all tensors match.
    """
    folder = folder / OPTIMIZER_FOLDER
    trainable = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    # A parameter that never had a gradient (in a vision tower before the first image) has no state.
    updated = {name.rpartition("/")[0] for name in ShardedFiles(folder).tensors} & trainable.keys()
    states = {name: empty_state(trainable[name], strategy) for name in sorted(updated)}
    tensors = {f"{name}/{key}": tensor for name, state in states.items() for key, tensor in state.items()}
    load_tensors(tensors, folder, group=process_group.state_group)
    optimizer.state.clear()
    for name, state in states.items():
        optimizer.state[trainable[name]] = state


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
    raise NotFiniteError(
        f"{what} hold nan or infinity, in {len(names)} of {len(shards)} tensors: {listed(names, at_most=NUM_NAMED)}"
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
