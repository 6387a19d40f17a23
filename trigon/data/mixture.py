"""Several datasets drawn as one, each as often as its weight says.

Knows weights and how prompts of several datasets are told apart. Refuses to know rows, and how an epoch is shuffled.

A dataset of n prompts with weight w gives an epoch round(w * n) of them. They come off an endless row of passes through
the dataset, each in an order of its own, so that weight 2 is two whole passes, and 0.5 one half and then the other:

    n = 6, w = 0.5    | 4 0 3   5 1 2 | 1 5 0   3 4 2 | ...
                        epoch 0 epoch 1 epoch 2 epoch 3
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from trigon.data.bad_rows import Reason
from trigon.data.dataset import Draw, PromptSet
from trigon.data.orders import permuted
from trigon.errors import DataError
from trigon.types import Prompt


@dataclass(frozen=True, slots=True, eq=False)
class MixedPrompts:
    """Several PromptSets, their prompts numbered from 0 through all of them. Satisfies Prompts.

    weights: how often an epoch goes through each.
    """

    parts: tuple[PromptSet, ...]
    weights: tuple[float, ...]

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def __getitem__(self, index: int) -> Prompt:
        """Build a prompt. Raises: as PromptSet's."""
        starts = self._starts()
        number = bisect_right(starts, index) - 1
        return self.parts[number][index - starts[number]]

    @property
    def shows_videos(self) -> bool:
        """Whether there may be videos among them."""
        return any(part.shows_videos for part in self.parts)

    def index_of(self, prompt_id: str) -> int | None:
        """See Prompts."""
        places = ((start, part.index_of(prompt_id)) for start, part in zip(self._starts(), self.parts, strict=True))
        return next((start + index for start, index in places if index is not None), None)

    @property
    def num_rows(self) -> int:
        """Rows of all datasets, usable or not."""
        return sum(part.num_rows for part in self.parts)

    @property
    def report(self) -> Mapping[Reason, int]:
        """How many rows were set aside at the start, by reason."""
        total: Counter[Reason] = Counter()
        for part in self.parts:
            total.update(part.report)
        return total

    @property
    def max_bad_row_fraction(self) -> float:
        """The share of rows, overlong ones not counted, that may be bad; the same for all."""
        return self.parts[0].max_bad_row_fraction

    @property
    def fingerprint(self) -> str:
        """The same for the same usable rows with the same content and weights, in the same order."""
        each = ((part.fingerprint, weight) for part, weight in zip(self.parts, self.weights, strict=True))
        return hashlib.sha256(repr(tuple(each)).encode()).hexdigest()[:32]

    @property
    def prompts_per_epoch(self) -> int:
        """How many prompts an epoch draws, some of them more than once."""
        return sum(self._shares())

    def of_epoch(self, epoch: int, *, seed: int, shuffle: bool) -> list[Draw]:
        """Return what an epoch draws, dataset by dataset; within one, pass by pass, in the dataset's order."""
        draws = []
        for number, (part, share, start) in enumerate(zip(self.parts, self._shares(), self._starts(), strict=True)):
            first, last = epoch * share, (epoch + 1) * share
            times: Counter[int] = Counter()
            for turn in range(first // len(part), -(-last // len(part))):
                offset = turn * len(part)
                begin, end = max(first - offset, 0), min(last - offset, len(part))
                order: Sequence[int] = range(len(part))
                if shuffle and end - begin < len(part):
                    order = permuted(len(part), f"{seed}:dataset {number}:pass {turn}")
                for index in sorted(order[begin:end]):
                    times[index] += 1
                    draws.append(Draw(start + index, times[index]))
        return draws

    def _starts(self) -> list[int]:
        """Return the number of each dataset's first prompt."""
        return list(accumulate((len(part) for part in self.parts[:-1]), initial=0))

    def _shares(self) -> list[int]:
        """Return how many prompts an epoch draws of each dataset."""
        return [int(len(part) * weight + 0.5) for part, weight in zip(self.parts, self.weights, strict=True)]


def mixed(parts: Sequence[PromptSet], weights: Sequence[float]) -> PromptSet | MixedPrompts:
    """Return datasets as one: a single one with weight 1 as it is. weights: none for once each.

    Datasets of the same name are told apart in prompt ids by their number: "train:17", "train~2:17".
    Raises: DataError if a dataset is so small that its weight gives no prompt of it.
    """
    if len(parts) == 1 and tuple(weights) in ((), (1,)):
        return parts[0]
    named: list[PromptSet] = []
    given = {part.name for part in parts}
    for part in parts:
        name, number, taken = part.name, 1, {other.name for other in named}
        while name in taken or (number > 1 and name in given):
            number += 1
            name = f"{part.name}~{number}"
        named.append(replace(part, name=name))
    mixture = MixedPrompts(tuple(named), tuple(weights) or (1.0,) * len(named))
    for part, share, weight in zip(mixture.parts, mixture._shares(), mixture.weights, strict=True):
        if share == 0:
            raise DataError(
                f"data.train_weights: {weight:g} of the {len(part)} prompts of {part.name!r} is not even one an epoch; "
                "raise the weight, or leave the dataset out"
            )
    return mixture
