"""Compares vLLM's parameters with the trainer's weights by checksum, after a weight sync.

vLLM fuses tensors (q, k and v; gate and up) and shards them over the ranks of a replica. Which
tensors a parameter is made of is observed while they are loaded, so no table of names is needed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trigon.config.names import DeviceType
from trigon.errors import ParityError
from trigon.models.weight_files import stored_tensors
from trigon.rollout.vllm.inputs import CHECK_VLLM
from trigon.types import NamedTensors


@dataclass(frozen=True, slots=True)
class RankSums:
    """What one rank of a replica has loaded.

    tensors: checksum of each of the trainer's tensors, rounded to the dtype in which vLLM stores
    it, by (name, dtype).
    sources: for each of vLLM's parameters, the keys in `tensors` of the tensors that were loaded
    into it, and the number of places of each: two where values are keys, as in layers of Gemma 4.
    parameters: checksum of each of vLLM's parameters, of this rank's shard.
    not_taken: names of the trainer's tensors that were loaded into no parameter.
    """

    tensors: Mapping[tuple[str, str], Checksum]
    sources: Mapping[str, Mapping[tuple[str, str], int]]
    parameters: Mapping[str, Checksum]
    not_taken: frozenset[str]


@dataclass(slots=True)
class WeightCheck:
    """Observes one weight sync: the trainer's tensors, and vLLM's parameters after it.

    The CPU build packs most weights when they are loaded, and frees the parameters. Their values
    are then the values right before packing; on a GPU they are the values that vLLM computes with.

    left_out: prefix of the trainer's tensors for which vLLM's model need not have a place; None: it
    must have one for all of them.
    """

    model: torch.nn.Module
    device: DeviceType
    left_out: str | None = None
    _tensor_name: str = ""  # of the tensor that vLLM is loading
    _dtypes: set[torch.dtype] = field(default_factory=set)  # of the parameters into which it has been loaded
    _sources: dict[str, dict[tuple[str, torch.dtype], set[str]]] = field(default_factory=dict)  # places of each tensor
    _tensors: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    _packed: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    _not_taken: set[str] = field(default_factory=set)

    @contextmanager
    def observe(self, weights: NamedTensors) -> Iterator[NamedTensors]:
        """Return a context with the same tensors, from which vLLM must load while it lasts."""
        with ExitStack() as restored:
            yield self._read(weights, restored)

    def result(self) -> RankSums:
        """Return the sums of this rank. To be called when vLLM has loaded all tensors.

        On the CPU, before heads and experts are packed again.
        """
        sums = self._packed | {
            name: (sum_values(parameter), parameter.numel())
            for name, parameter in stored_tensors(self.model)
            # Not every buffer that vLLM would store is in a checkpoint.
            if parameter.numel() and (name in self._sources or isinstance(parameter, torch.nn.Parameter))
        }
        tensors = {
            (name, str(dtype)): _key(name, dtype) for sources in self._sources.values() for name, dtype in sources
        }
        checksums = read_sums(self._tensors)
        return RankSums(
            tensors={key: checksums[text] for key, text in tensors.items()},
            sources={
                parameter: {(name, str(dtype)): len(places) for (name, dtype), places in sources.items()}
                for parameter, sources in self._sources.items()
            },
            parameters=read_sums(sums),
            not_taken=frozenset(self._not_taken),
        )

    def _read(self, weights: NamedTensors, restored: ExitStack) -> NamedTensors:
        # vLLM asks for the first tensor when it has prepared its parameters for loading.
        self._watch_loaders(restored)
        if self.device == "cpu":
            self._watch_packing(restored)
        for name, tensor in weights:
            self._tensor_name = name
            self._dtypes.clear()
            yield name, tensor
            for dtype in self._dtypes:
                self._tensors[_key(name, dtype)] = (sum_values(tensor.to(dtype)), tensor.numel())
            if not self._dtypes and not (self.left_out and name.startswith(self.left_out)):
                self._not_taken.add(name)

    def _watch_loaders(self, restored: ExitStack) -> None:
        """Record into which parameter each tensor is loaded."""
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        for name, parameter in stored_tensors(self.model):
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            _set_until_end(restored, parameter, "weight_loader", self._observed(loader, name, parameter.dtype))

    def _observed(self, loader: Callable[..., Any], parameter_name: str, dtype: torch.dtype) -> Callable[..., Any]:
        # vLLM finds its own wrappers by __name__ and unwraps them by __wrapped__; functools.wraps
        # keeps both.
        @functools.wraps(loader)
        def load(*args: Any, **kwargs: Any) -> Any:
            # vLLM writes to a tensor into which part of a parameter it is to be loaded.
            place = next((str(part.shard_id) for part in args if hasattr(part, "shard_id")), "")
            self._sources.setdefault(parameter_name, {}).setdefault((self._tensor_name, dtype), set()).add(place)
            self._dtypes.add(dtype)
            return loader(*args, **kwargs)

        return load

    def _watch_packing(self, restored: ExitStack) -> None:
        """Record the values of each layer before vLLM packs them."""
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

        names = {layer: name for name, layer in self.model.named_modules()}

        def before_packing(pack: Callable[..., Any]) -> Callable[..., Any]:
            def observed(layer: torch.nn.Module) -> Any:
                for name, parameter in layer.named_parameters(prefix=names[layer], recurse=False):
                    if parameter.numel():
                        self._packed[name] = (sum_values(parameter), parameter.numel())
                return pack(layer)

            return observed

        for method in {getattr(layer, "quant_method", None) for layer in names}:
            if isinstance(method, QuantizeMethodBase):
                packs = before_packing(method.process_weights_after_loading)
                _set_until_end(restored, method, "process_weights_after_loading", packs)


def compare(ranks: list[RankSums], *, version: int) -> None:
    """Check that the parameters of a replica have the checksums of the trainer's weights.

    ranks: the sums of all ranks of the replica. version: the policy version, for messages.
    Raises: ParityError with the parameters that differ, or into which nothing was loaded; or with
    the trainer's tensors for which vLLM's model has no place, such as biases that its config omits.
    """
    first = ranks[0]
    assert first.sources.keys() <= first.parameters.keys(), "the values of some parameters were not read"
    different, not_loaded = [], []
    for name in first.parameters:
        held = add((1, rank.parameters[name]) for rank in ranks)
        sources = first.sources.get(name, {})
        if not sources:
            not_loaded.append(name)
        elif not any(held.equals(expected) for expected in _possible(sources, first.tensors, len(ranks))):
            given = add((times, first.tensors[source]) for source, times in sources.items())
            if not math.isfinite(given.squares):  # finite in the trainer's dtype, before they were rounded
                dtype = next(dtype for _, dtype in sources).removeprefix("torch.")
                raise ParityError(
                    f"weights of policy version {version} do not fit into the dtype of vLLM's parameter {name}: as "
                    f"{dtype} they are nan or infinite. Set worker.rollout.dtype to bf16 or fp32"
                )
            different.append(f"{name} has sum {held.total:.17g} instead of {given.total:.17g}")
    not_taken = sorted(frozenset.intersection(*(rank.not_taken for rank in ranks)))
    if different or not_loaded or not_taken:
        problems = [
            *([f"{len(different)} differ ({'; '.join(different[:3])})"] if different else []),
            *([f"{len(not_loaded)} received nothing ({', '.join(not_loaded[:3])})"] if not_loaded else []),
            *([f"none took {len(not_taken)} tensors ({', '.join(not_taken[:3])})"] if not_taken else []),
        ]
        raise ParityError(
            f"after the weight sync of policy version {version}, vLLM's parameters are not the trainer's weights: of "
            f"{len(first.parameters)} parameters, {' and '.join(problems)}. {CHECK_VLLM}; "
            "worker.rollout.weight_check_freq=0 turns this check off"
        )


def gather_ranks(sums: RankSums) -> list[RankSums]:
    """Return the sums of all ranks of this replica (tensor parallelism). Collective."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return [sums]
    import torch.distributed as dist

    ranks: list[Any] = [None] * group.world_size
    dist.all_gather_object(ranks, sums, group=group.cpu_group)
    return ranks


def _possible(
    sources: Mapping[tuple[str, str], int], tensors: Mapping[tuple[str, str], Checksum], num_ranks: int
) -> Iterator[Checksum]:
    """Yield the checksums that a parameter of these tensors may have, added over all ranks.

    Every rank holds another shard; or several ranks hold the same one (norms, routers); or, where
    there are fewer key heads than ranks, only keys and values are held several times. No query is
    smaller than its keys.
    """
    parts = [(times, tensors[source]) for source, times in sources.items()]
    largest = max(part.num_values for _, part in parts)
    for copies in (number for number in range(1, num_ranks + 1) if num_ranks % number == 0):
        yield add((times * copies, part) for times, part in parts)
        yield add((times * (1 if part.num_values == largest else copies), part) for times, part in parts)


def _key(name: str, dtype: torch.dtype) -> str:
    return f"{name} in {dtype}"


def _set_until_end(restored: ExitStack, owner: Any, attribute: str, value: Any) -> None:
    """Set an attribute until the context ends."""
    has_own = attribute in vars(owner) or isinstance(getattr(type(owner), attribute, None), property)
    if has_own:
        restored.callback(setattr, owner, attribute, getattr(owner, attribute))
    else:
        restored.callback(delattr, owner, attribute)
    setattr(owner, attribute, value)


RELATIVE_TOLERANCE = 1e-12
"""Largest difference between sums of the same values in another order, relative to their size.

float64 sums of the same values differ by about 1e-15. One update with a learning rate of 1e-6
changes them by 1e-9 and more.
"""

_CPU_CHUNK = 2**17  # values whose float64 copy stays in the cache of a core
_GPU_CHUNK = 2**24  # whose float64 copy has 128 MiB


@dataclass(frozen=True, slots=True)
class Checksum:
    """Sums over the values of one or several tensors. num_values: the number of values."""

    total: float
    squares: float
    num_values: int

    def equals(self, other: Checksum) -> bool:
        """Return whether both can be of the same values. False if a sum is not finite.

        The number of values is not compared: an engine may pad its parameters with zeros.
        """
        squares = max(self.squares, other.squares)
        # |sum| <= sqrt(number * sum of squares), so this is the scale of the rounding of the sum.
        scale = math.sqrt(max(self.num_values, other.num_values) * squares)
        return (
            abs(self.total - other.total) <= RELATIVE_TOLERANCE * scale
            and abs(self.squares - other.squares) <= RELATIVE_TOLERANCE * squares
        )


def add(checksums: Iterable[tuple[int, Checksum]]) -> Checksum:
    """Return the sum of checksums, each with the number of times that it counts."""
    terms = list(checksums)
    return Checksum(
        total=sum(times * term.total for times, term in terms),
        squares=sum(times * term.squares for times, term in terms),
        num_values=sum(times * term.num_values for times, term in terms),
    )


@torch.no_grad()
def sum_values(tensor: Tensor) -> Tensor:
    """Return the sum and the sum of squares, float64 [2] on the tensor's device."""
    chunk = _CPU_CHUNK if tensor.device.type == "cpu" else _GPU_CHUNK
    values = tensor.detach().reshape(-1)
    if values.numel() <= chunk:  # most tensors: norms and biases
        return _sum_chunk(values)
    return torch.stack([_sum_chunk(part) for part in torch.split(values, chunk)]).sum(dim=0)


def _sum_chunk(values: Tensor) -> Tensor:
    values = values.double()
    return torch.stack([values.sum(), values.dot(values)])


def read_sums(sums: dict[str, tuple[Tensor, int]]) -> dict[str, Checksum]:
    """Return the checksums of (sum_values, number of values), with one copy from each device."""
    by_device: dict[torch.device, list[str]] = {}
    for name, (values, _) in sums.items():
        by_device.setdefault(values.device, []).append(name)
    return {
        name: Checksum(total, squares, sums[name][1])
        for names in by_device.values()
        for name, (total, squares) in zip(names, torch.stack([sums[name][0] for name in names]).tolist(), strict=True)
    }
