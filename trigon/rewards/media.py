"""Images and videos as files that reward workers can read, each written once.

Those of prompts, and the images that the turns of an episode observed.

Runs in the driver, in the thread of the reward pool, so that the caller, which samples, waits for
no file. A folder of the run holds the files of one scoring, by hash, so that one which several
prompts share, or many completions, is there once. Does not depend on reward workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from trigon.errors import BadRow, DataError, RewardError
from trigon.rewards.contract import RequestFiles, RewardRequest
from trigon.system.temporary import private_folder
from trigon.types import EncodedMedia, ReadMedia


class MediaFolder:
    """A private folder of the run. Its methods may be used by one thread at a time."""

    def __init__(self) -> None:
        """Make the folder."""
        self._stack = ExitStack()
        self.path: Path = self._stack.enter_context(private_folder())

    def write(self, requests: Sequence[RewardRequest]) -> list[RequestFiles]:
        """Write the media of requests, and return the paths for each; media are read once each.

        Raises: RewardError if some cannot be read or written.
        """
        written: dict[int, RequestFiles] = {}  # by the identity of what gives the media

        def write(given: EncodedMedia | ReadMedia | None, owner: str) -> RequestFiles:
            if id(given) not in written:
                try:
                    media = given() if callable(given) else given
                    written[id(given)] = RequestFiles() if media is None else self._write(media)
                except (BadRow, DataError, OSError) as error:
                    raise RewardError(f"the images of {owner} cannot be read: {error}") from error
            return written[id(given)]

        return [
            replace(
                write(request.media, "the prompt"),
                turns=[
                    write(each, "an observation").images for each in request.turn_media or [None] * len(request.turns)
                ],
            )
            for request in requests
        ]

    def clear(self) -> None:
        """Remove the files."""
        for path in self.path.glob("media-*"):
            path.unlink()

    def close(self) -> None:
        """Remove the folder."""
        self._stack.close()

    def _write(self, media: EncodedMedia) -> RequestFiles:
        paths = []
        for file in media.encoded:
            # The hashes of media are not used: they name what engines see.
            path = self.path / f"media-{hashlib.sha256(file).hexdigest()}"
            if not path.exists():
                path.write_bytes(file)
            paths.append(str(path))
        return RequestFiles(images=paths) if media.kind == "image" else RequestFiles(videos=paths)
