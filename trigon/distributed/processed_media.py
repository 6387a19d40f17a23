"""Which workers have processed the images and videos of which groups since the last weight sync.

Kept by the driver, which sends a group to a worker that has its pixels where it can. Forgotten at
each weight sync, so that what a step computes does not depend on the steps before it: a run that is
resumed has not seen them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from trigon.types import Completion, EncodedMedia, Prompt, RolloutGroup, TrainGroup, TrainSequence, parts_of

Part = Prompt | Completion | TrainSequence


class ProcessedMedia:
    """The ranks that have processed the media of each prompt and of each completion."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[str, ...], set[int]] = {}  # by the hashes of a part's files

    def ranks_of(self, group: RolloutGroup | TrainGroup) -> Collection[int]:
        """Return the ranks that have all pixels of a group; none for a group without media."""
        media = [part.vision.hashes for part in parts_of(group) if isinstance(part.vision, EncodedMedia)]
        return set.intersection(*(self._ranks.get(hashes, set()) for hashes in media)) if media else ()

    def add(self, parts: Iterable[Part], ranks: Iterable[int]) -> None:
        """Record that these ranks have these prompts or completions, whose media they process."""
        ranks = tuple(ranks)
        for part in parts:
            if isinstance(part.vision, EncodedMedia):
                self._ranks.setdefault(part.vision.hashes, set()).update(ranks)

    def forget(self) -> None:
        """Forget everything."""
        self._ranks.clear()
