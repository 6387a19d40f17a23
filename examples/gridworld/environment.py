"""A room of MiniGrid: the model sees the room from above, and writes left, right or forward.

    worker.rollout.environment=examples/gridworld/environment.py:Room

Needs `pip install "trigon-rl[gymnasium]" minigrid`. A row has the column `seed`, which decides
where the player stands and looks. The reward is MiniGrid's: 0, and for reaching the green square
1 less up to 0.9 for the steps that it took.
"""

from typing import Any

import minigrid  # noqa: F401 - registers its rooms; imported here, it is imported once, not in each episode
from PIL import Image

from trigon.environments.gymnasium import GymnasiumEnvironment


class Room(GymnasiumEnvironment):
    """A room of size x size squares, with its walls, a random start, and the goal in a corner."""

    def __init__(self, size: int = 5, tile_pixels: int = 32, max_steps: int = 8) -> None:
        super().__init__(
            f"MiniGrid-Empty-Random-{size}x{size}-v0",
            actions=["left", "right", "forward"],
            env_kwargs={"tile_size": tile_pixels, "highlight": False, "max_steps": max_steps},
        )
        self.tile_pixels = tile_pixels

    def describe(self, observation: Any) -> tuple[str, list[Image.Image]]:
        """Return the room without its walls: each square is as many pixels as an image token."""
        _, [image] = super().describe(observation)
        wall = self.tile_pixels
        return "", [image.crop((wall, wall, image.width - wall, image.height - wall))]
