"""A room of MiniGrid: the model sees the room from above, and writes left, right or forward.

    worker.rollout.environment=examples/gridworld/environment.py:Room

Needs `pip install "trigon-rl[gymnasium]" minigrid`. A row has the column `seed`, which decides
where the player stands and looks. The reward is MiniGrid's: 0, and for reaching the green square
1 less up to 0.9 for the steps that it took.
"""

from typing import Any

from minigrid.core.world_object import Floor
from minigrid.envs import EmptyEnv
from PIL import Image

from trigon.environments.gymnasium import GymnasiumEnvironment

TILE_PIXELS = 28  # each square is an image token of Qwen2.5-VL


class PaintedRoom(EmptyEnv):
    """An empty room with the goal in a corner, a random start, and the two ways to the goal painted."""

    def _gen_grid(self, width: int, height: int) -> None:
        super()._gen_grid(width, height)
        for place in range(1, width - 2):
            self.put_obj(Floor("blue"), width - 2, place)
            self.put_obj(Floor("yellow"), place, height - 2)


class Room(GymnasiumEnvironment):
    """An environment of 5 x 5 squares, its walls included, that ends after eight steps."""

    def __init__(self) -> None:
        super().__init__("PaintedRoom", actions=["left", "right", "forward"])

    def make(self, env_id: str) -> PaintedRoom:
        return PaintedRoom(
            size=5, agent_start_pos=None, max_steps=8, tile_size=TILE_PIXELS, highlight=False, render_mode="rgb_array"
        )

    def describe(self, observation: Any) -> tuple[str, list[Image.Image]]:
        """Return the room without its walls."""
        _, [image] = super().describe(observation)
        return "", [image.crop((TILE_PIXELS, TILE_PIXELS, image.width - TILE_PIXELS, image.height - TILE_PIXELS))]
