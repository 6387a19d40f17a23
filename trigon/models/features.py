"""A cache of the outputs of a frozen vision tower, keyed by the content of images and videos.

It holds tensors in host memory up to a limit in bytes. It does not depend on vision towers, ranks
or packed rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class VisionFeatures:
    """The inputs of the language model for one image or video of T tokens.

    tokens: [T, D]. deepstack: [T, D] for each of the first decoder layers; empty without deepstack.
    """

    tokens: Tensor
    deepstack: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.tokens, *self.deepstack))

    def to(self, device: torch.device, *, copy: bool = False) -> VisionFeatures:
        """Return the features on a device; with copy always in new memory."""
        return VisionFeatures(
            self.tokens.to(device, copy=copy), tuple(part.to(device, copy=copy) for part in self.deepstack)
        )


class VisionFeatureCache:
    """A least-recently-used cache of vision features in host memory.

    Features are returned bit for bit as they were stored.

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
                found[key] = self._features[key].to(device)
        return found

    def store(self, key: str, features: VisionFeatures) -> None:
        """Store a copy and evict the least recently used, unless the copy exceeds max_bytes."""
        if features.num_bytes > self._max_bytes or key in self._features:
            return
        self._features[key] = features.to(torch.device("cpu"), copy=True)
        self._num_bytes += features.num_bytes
        while self._num_bytes > self._max_bytes:
            _, evicted = self._features.popitem(last=False)
            self._num_bytes -= evicted.num_bytes

    def clear(self) -> None:
        """Remove all features, after the weights of the vision tower have changed."""
        self._features.clear()
        self._num_bytes = 0

    def pop_metrics(self) -> tuple[int, int]:
        """Return the number of hits, and of lookups, since the last call.

        An image that occurs in several rows, or in several groups of a row, counts as often.
        """
        counts = self._num_hits, self._num_lookups
        self._num_hits = self._num_lookups = 0
        return counts
