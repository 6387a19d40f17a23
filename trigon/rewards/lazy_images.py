"""The images that a reward function gets: a sequence that opens a file where it is asked for one.

Runs in reward workers.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from PIL.Image import Image


class LazyImages(Sequence["Image"]):
    """Images as PIL images, of which each is read anew when it is indexed.

    PIL decodes the pixels when they are used. paths: of the encoded files.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = tuple(paths)

    def __len__(self) -> int:
        return len(self.paths)

    @overload
    def __getitem__(self, index: int) -> Image: ...

    @overload
    def __getitem__(self, index: slice) -> list[Image]: ...

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        from PIL import Image  # here: not every function looks

        # By its bytes: an image that is not decoded would keep a file open.
        return Image.open(io.BytesIO(Path(self.paths[index]).read_bytes()))

    def __repr__(self) -> str:
        return f"LazyImages of {len(self)} files"


def with_images(reward_input: dict[str, Any]) -> dict[str, Any]:
    """Return a reward_input with images in place of their paths, if it has any.

    Those of the prompt, and those in the observation of each turn.
    """
    if "images" not in reward_input:
        return reward_input
    turns = [{**turn, "images": LazyImages(turn["images"])} for turn in reward_input["turns"]]
    return {**reward_input, "images": LazyImages(reward_input["images"]), "turns": turns}
