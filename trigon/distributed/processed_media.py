"""Which workers have processed the images and videos of which prompts since the last weight sync.

Kept by the driver, which sends a prompt to a worker that has its pixels where it can. Forgotten at
each weight sync, so that what a step computes does not depend on the steps before it: a run that is
resumed has not seen them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from trigon.types import EncodedMedia, Prompt


class ProcessedMedia:
    """The ranks that have processed the media of each prompt."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[str, ...], set[int]] = {}  # by the hashes of a prompt's files

    def ranks_of(self, prompt: Prompt) -> Collection[int]:
        """Return the ranks that have the pixels of this prompt; none for one without media."""
        return self._ranks.get(prompt.vision.hashes, ()) if isinstance(prompt.vision, EncodedMedia) else ()

    def add(self, prompts: Iterable[Prompt], ranks: Iterable[int]) -> None:
        """Record that these ranks receive these prompts, whose media they then process."""
        ranks = tuple(ranks)
        for prompt in prompts:
            if isinstance(prompt.vision, EncodedMedia):
                self._ranks.setdefault(prompt.vision.hashes, set()).update(ranks)

    def forget(self) -> None:
        """Forget everything."""
        self._ranks.clear()
