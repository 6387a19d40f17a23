"""Mixes several datasets, each drawn as often as its weight says.

An epoch draws round(w * n) prompts of a dataset with n prompts and weight w. They are taken from an
endless sequence of passes through the dataset, each in an order of its own, so that weight 2 gives
two full passes, and weight 0.5 one half and then the other:

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
from trigon.data.content import DatasetContent
from trigon.data.dataset import DrawnPrompt, PromptSet
from trigon.data.orders import permutation
from trigon.errors import DataError
from trigon.types import Prompt


@dataclass(frozen=True, slots=True, eq=False)
class MixedPrompts:
    """Several PromptSets with consecutive prompt indices. Satisfies Prompts.

    weights: of each set, how many passes through it make an epoch.
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

    def image_files(self, index: int) -> list[bytes]:
        """See Prompts."""
        starts = self._starts()
        number = bisect_right(starts, index) - 1
        return self.parts[number].image_files(index - starts[number])

    @property
    def shows_videos(self) -> bool:
        """Whether any prompt may have videos."""
        return any(part.shows_videos for part in self.parts)

    def index_of(self, prompt_id: str) -> int | None:
        """See Prompts."""
        found = ((start, part.index_of(prompt_id)) for start, part in zip(self._starts(), self.parts, strict=True))
        return next((start + index for start, index in found if index is not None), None)

    @property
    def num_rows(self) -> int:
        """Rows of all datasets, usable or not."""
        return sum(part.num_rows for part in self.parts)

    @property
    def num_skipped(self) -> Mapping[Reason, int]:
        """How many rows were skipped when the datasets were opened, by reason."""
        total: Counter[Reason] = Counter()
        for part in self.parts:
            total.update(part.num_skipped)
        return total

    @property
    def max_bad_row_fraction(self) -> float:
        """The fraction of rows that may be bad, not counting overlong ones; equal for all parts."""
        return self.parts[0].max_bad_row_fraction

    @property
    def fingerprint(self) -> str:
        """Equal for the same usable rows with the same content and weights, in the same order."""
        pairs = ((part.fingerprint, weight) for part, weight in zip(self.parts, self.weights, strict=True))
        return hashlib.sha256(repr(tuple(pairs)).encode()).hexdigest()[:32]

    @property
    def contents(self) -> Sequence[DatasetContent]:
        """See Prompts."""
        return tuple(
            replace(part.contents[0], weight=float(weight))
            for part, weight in zip(self.parts, self.weights, strict=True)
        )

    @property
    def prompts_per_epoch(self) -> int:
        """How many prompts an epoch draws, counting repeated ones each time."""
        return sum(self._draws_per_epoch())

    def draw_epoch(self, epoch: int, *, seed: int, shuffle: bool) -> list[DrawnPrompt]:
        """Return the prompts of an epoch, by dataset and pass, in the order of each dataset."""
        drawn = []
        for number, (part, count, start) in enumerate(
            zip(self.parts, self._draws_per_epoch(), self._starts(), strict=True)
        ):
            first, last = epoch * count, (epoch + 1) * count
            occurrences: Counter[int] = Counter()
            for pass_number in range(first // len(part), -(-last // len(part))):
                offset = pass_number * len(part)
                begin, end = max(first - offset, 0), min(last - offset, len(part))
                order: Sequence[int] = range(len(part))
                if shuffle and end - begin < len(part):
                    order = permutation(len(part), f"{seed}:dataset {number}:pass {pass_number}")
                for index in sorted(order[begin:end]):
                    occurrences[index] += 1
                    drawn.append(DrawnPrompt(start + index, occurrences[index]))
        return drawn

    def _starts(self) -> list[int]:
        """Return the index of each dataset's first prompt."""
        return list(accumulate((len(part) for part in self.parts[:-1]), initial=0))

    def _draws_per_epoch(self) -> list[int]:
        """Return how many prompts of each dataset an epoch draws."""
        return [int(len(part) * weight + 0.5) for part, weight in zip(self.parts, self.weights, strict=True)]


def with_blank_media(prompts: PromptSet | MixedPrompts) -> PromptSet | MixedPrompts:
    """Return the same prompts with images and videos of one colour (blank.py)."""
    if isinstance(prompts, MixedPrompts):
        return replace(prompts, parts=tuple(map(_with_blank_media, prompts.parts)))
    return _with_blank_media(prompts)


def _with_blank_media(prompts: PromptSet) -> PromptSet:
    return replace(prompts, builder=prompts.builder.with_blank_media())


def mix(parts: Sequence[PromptSet], weights: Sequence[float]) -> PromptSet | MixedPrompts:
    """Return several datasets as one; a single dataset with weight 1 is returned unchanged.

    weights: one per dataset, or none for weight 1 each. Datasets of the same name get numbers in
    prompt ids: "train:17", "train~2:17".
    Raises: DataError if a dataset is so small that its weight gives no prompt of it.
    """
    if len(parts) == 1 and tuple(weights) in ((), (1,)):
        return parts[0]
    named: list[PromptSet] = []
    original_names = {part.name for part in parts}
    for part in parts:
        name, number, used_names = part.name, 1, {other.name for other in named}
        while name in used_names or (number > 1 and name in original_names):
            number += 1
            name = f"{part.name}~{number}"
        named.append(replace(part, name=name))
    mixture = MixedPrompts(tuple(named), tuple(weights) or (1.0,) * len(named))
    for part, count, weight in zip(mixture.parts, mixture._draws_per_epoch(), mixture.weights, strict=True):
        if count == 0:
            raise DataError(
                f"data.train_weights: {weight:g} of the {len(part)} prompts of {part.name!r} is not even one an epoch; "
                "raise the weight, or leave the dataset out"
            )
    return mixture
