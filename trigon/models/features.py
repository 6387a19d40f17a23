"""A cache of the outputs of a frozen vision tower, keyed by the content of images and videos.

It holds tensors in host memory up to a limit in bytes. It does not depend on vision towers, ranks
or packed rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from trigon.models.transfer import host_bytes, to_device, to_pinned


@dataclass(frozen=True, slots=True, eq=False)
class VisionFeatures:
    """The inputs of the language model for one image or video of T tokens.

    tokens: [T, D]. deepstack: [T, D] for each of the first decoder layers; empty without deepstack.
    """

    tokens: Tensor
    deepstack: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        """The memory that the features take."""
        return sum(host_bytes(part.nbytes, pinned=part.is_pinned()) for part in (self.tokens, *self.deepstack))

    def map(self, copy: Callable[[Tensor], Tensor]) -> VisionFeatures:
        """Return the features with each tensor replaced by its copy."""
        return VisionFeatures(copy(self.tokens), tuple(copy(part) for part in self.deepstack))


class VisionFeatureCache:
    """A least-recently-used cache of vision features in host memory, pinned if there is a GPU.

    Features are returned bit for bit as they were stored. The host does not read them: it issues
    the copies to and from the GPU, and waits for none.

    max_bytes: the limit of all features together; 0 disables the cache.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._features: OrderedDict[str, VisionFeatures] = OrderedDict()  # the most recently used comes last
        self._num_bytes = 0
        self._num_hits = 0
        self._num_lookups = 0

    def lookup(self, hashes: Iterable[str], device: torch.device) -> dict[str, VisionFeatures]:
        """Return the cached features among these hashes of images and videos, on the device."""
        found: dict[str, VisionFeatures] = {}
        for key in hashes:
            self._num_lookups += 1
            if key in self._features:
                self._num_hits += 1
                self._features.move_to_end(key)
                found[key] = self._features[key].map(lambda part: to_device(part, device))
        return found

    def store(self, key: str, features: VisionFeatures) -> None:
        """Store a copy and evict the least recently used, unless the copy exceeds max_bytes."""
        if features.num_bytes > self._max_bytes or key in self._features:
            return
        self._features[key] = features.map(to_pinned)
        self._num_bytes += self._features[key].num_bytes
        while self._num_bytes > self._max_bytes:
            _, evicted = self._features.popitem(last=False)
            self._num_bytes -= evicted.num_bytes

    def clear(self) -> None:
        """Remove all features, after the weights of the vision tower have changed."""
        self._features.clear()
        self._num_bytes = 0

    def swap_counts(self, counts: tuple[int, int]) -> tuple[int, int]:
        """Continue from these numbers of hits and lookups, and return those so far.

        Models that share the cache thereby count apart.
        """
        before = self.pop_metrics()
        self._num_hits, self._num_lookups = counts
        return before

    def pop_metrics(self) -> tuple[int, int]:
        """Return the number of hits, and of lookups, since the last call.

        An image that occurs in several rows, or in several groups of a row, counts as often.
        """
        counts = self._num_hits, self._num_lookups
        self._num_hits = self._num_lookups = 0
        return counts
