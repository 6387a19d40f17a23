"""The content of datasets, by which a resumed run notices other rows, images or videos."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from PIL import Image

from trigon.data.images import OpenedFile, image_content


@dataclass(frozen=True, slots=True)
class DatasetContent:
    """What a checkpoint keeps of a dataset, so that a resumed run can name what has changed.

    spec: as in data.train_files. num_prompts: usable ones. fingerprint: as PromptSet's.
    weight: as in data.train_weights. files: a digest of the files that rows name; "" if they name
    none, and in checkpoints of earlier versions.
    """

    spec: str
    num_prompts: int
    fingerprint: str
    weight: float
    files: str = ""

    def has_rows_of(self, other: DatasetContent) -> bool:
        """Return whether the rows of both are the same, with the files that they name."""
        same_files = self.files == other.files or not self.files or not other.files
        return self.fingerprint == other.fingerprint and same_files

    def change_since(self, saved: DatasetContent) -> str:
        """Return what differs from the same dataset when it was saved, for a message."""
        if self.fingerprint == saved.fingerprint:
            return f"{self.spec} has other images or videos in the files that its rows name"
        return f"{self.spec} has other rows ({saved.num_prompts} usable ones then, {self.num_prompts} now)"


def update_digest(digest: Any, value: Any) -> None:
    """Hash a row's content: every key, number and text, and the bytes of encoded images."""
    match value:
        case bytes():
            digest.update(b"bytes %d " % len(value))
            digest.update(value)
        case Image.Image() | OpenedFile():
            update_digest(digest, image_content(value))
        case dict():
            for key in sorted(value):
                update_digest(digest, key)
                update_digest(digest, value[key])
        case list():
            digest.update(b"list %d " % len(value))
            for part in value:
                update_digest(digest, part)
        case _:
            digest.update(repr(value).encode("utf-8", "backslashreplace") + b" ")
