"""A cache of the outputs of a frozen vision tower, keyed by the content of images and videos.

It holds tensors in host memory up to a limit in bytes. It does not depend on vision towers, ranks
or packed rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import torch
from torch import Tensor

from trigon.models.transfer import host_bytes, to_device, to_pinned


class VisionFeatureCache:
    """A least-recently-used cache of vision features in host memory, pinned if there is a GPU.

    The features of an image or video are one tensor. They are returned bit for bit as they were
    stored. The host does not read them: it issues
    the copies to and from the GPU, and waits for none.

    max_bytes: the limit of all features together; 0 disables the cache.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._features: OrderedDict[str, Tensor] = OrderedDict()  # the most recently used comes last
        self._num_bytes = 0
        self._num_hits = 0
        self._num_lookups = 0

    def lookup(self, hashes: Iterable[str], device: torch.device) -> dict[str, Tensor]:
        """Return the cached features among these hashes of images and videos, on the device."""
        found: dict[str, Tensor] = {}
        for key in hashes:
            self._num_lookups += 1
            if key in self._features:
                self._num_hits += 1
                self._features.move_to_end(key)
                found[key] = to_device(self._features[key], device)
        return found

    def store(self, key: str, features: Tensor) -> None:
        """Store a copy and evict the least recently used, unless the copy exceeds max_bytes."""
        if features.nbytes > self._max_bytes or key in self._features:
            return
        self._features[key] = to_pinned(features)
        self._num_bytes += _host_bytes(self._features[key])
        while self._num_bytes > self._max_bytes:
            _, evicted = self._features.popitem(last=False)
            self._num_bytes -= _host_bytes(evicted)

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


def _host_bytes(features: Tensor) -> int:
    return host_bytes(features.nbytes, pinned=features.is_pinned())
