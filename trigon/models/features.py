"""What a vision tower that never changes made of images and videos, remembered by their content.

Knows tensors, hashes and a limit in bytes. Refuses to know towers, ranks and rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """What the language model is given of one image or video.

    tokens: [its tokens, D]. layered: with deepstack as many for each of the first decoder layers, otherwise none.
    """

    tokens: Tensor
    layered: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.tokens, *self.layered))

    def to(self, device: torch.device, *, copy: bool = False) -> Features:
        """Return the same on a device; copy: in memory of its own, even where it is there already."""
        return Features(self.tokens.to(device, copy=copy), tuple(part.to(device, copy=copy) for part in self.layered))


class FeatureMemory:
    """Holds features in host memory, bit for bit as they were computed, and forgets those that were used longest ago.

    max_bytes: of all features together; 0 remembers nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[str, Features] = OrderedDict()  # the one used last stands last
        self._num_bytes = 0
        self._found = 0
        self._asked = 0

    def recall(self, hashes: Iterable[str], device: torch.device) -> dict[str, Features]:
        """Return the features that it holds of these images and videos, on the device."""
        found: dict[str, Features] = {}
        for key in hashes:
            self._asked += 1
            if key in self._held:
                self._found += 1
                self._held.move_to_end(key)
                found[key] = self._held[key].to(device)
        return found

    def remember(self, key: str, features: Features) -> None:
        """Keep a copy, unless it alone is beyond max_bytes."""
        if features.num_bytes > self._max_bytes or key in self._held:
            return
        self._held[key] = features.to(torch.device("cpu"), copy=True)
        self._num_bytes += features.num_bytes
        while self._num_bytes > self._max_bytes:
            _, forgotten = self._held.popitem(last=False)
            self._num_bytes -= forgotten.num_bytes

    def forget(self) -> None:
        """Forget everything: the tower has other weights now."""
        self._held.clear()
        self._num_bytes = 0

    def pop_metrics(self) -> tuple[int, int]:
        """Return how many of the images and videos asked for since the last call it held, and how many were asked for.

        One that several rows show, or several groups of a row, is asked for as often.
        """
        counts = self._found, self._asked
        self._found = self._asked = 0
        return counts
