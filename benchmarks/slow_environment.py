"""An environment and tools that take 50 ms for each step, for episodes.py and the sides it starts.

Loaded in the processes of environments, and by other trainers: it does not use Trigon.
"""

from __future__ import annotations

import asyncio
import io
import random
import time
from collections.abc import Sequence
from typing import Any

from PIL import Image
from shared import Shape, draw

SECONDS = 0.05
TOOL_GRID = (8, 8)
TOOL_TEXT = "Nothing was heard but the wind. Listen again, or answer the question."


class SlowEnvironment:
    """Answers each turn with a text and, with a grid, a drawing that depends on the turn."""

    def __init__(self, *, turns: int, image_grid: Sequence[int] | None = None) -> None:
        """Keep the settings. image_grid: rows and columns of image tokens; None: no image."""
        self._turns = turns
        self._image_grid = image_grid
        self._turn = 0

    def reset(self, row: dict[str, Any]) -> None:
        """Begin, without a first observation."""

    def step(self, action: str) -> tuple[dict[str, Any], float, bool]:
        """Wait, and return (observation, reward, done)."""
        time.sleep(SECONDS)
        self._turn += 1
        observation: dict[str, Any] = {"text": "Go on."}
        if self._image_grid is not None:
            observation["image"] = drawing(self._image_grid, f"{self._turn} {action}")
        return observation, 0.0, self._turn == self._turns


def drawing(image_grid: Sequence[int], seed: str) -> Image.Image:
    """Return a drawing of this many rows and columns of image tokens."""
    rows, columns = image_grid
    shape = Shape("observation", (rows, columns), prompt=0, response=0, n=1, prompts=1)
    return Image.open(io.BytesIO(draw(random.Random(seed).getrandbits(32), shape)))


def look() -> Image.Image:
    """Take another picture with the camera."""
    time.sleep(SECONDS)
    return _picture()


def listen() -> str:
    """Listen to the microphone for a while."""
    time.sleep(SECONDS)
    return TOOL_TEXT


async def look_async() -> list[dict[str, Any]]:
    """Take another picture with the camera."""
    await asyncio.sleep(SECONDS)
    return [{"type": "image", "image": _picture()}]


async def listen_async() -> str:
    """Listen to the microphone for a while."""
    await asyncio.sleep(SECONDS)
    return TOOL_TEXT


def _picture() -> Image.Image:
    return drawing(TOOL_GRID, str(random.SystemRandom().random()))  # no two are the same
