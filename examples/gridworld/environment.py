"""A corridor of MiniGrid: the model sees it from above, and writes left, right or forward.

    worker.rollout.environment=examples/gridworld/environment.py:Corridor

Needs `pip install "trigon-rl[gymnasium]" minigrid`. A row has the column `seed`, which decides
where the player stands and looks. The reward is MiniGrid's: 0, and for reaching the green square
1 less up to 0.9 for the steps that it took.
"""

from typing import Any

from minigrid.core.grid import Grid
from minigrid.core.mission import MissionSpace
from minigrid.core.world_object import Goal
from minigrid.minigrid_env import MiniGridEnv
from PIL import Image

from trigon.environments.gymnasium import GymnasiumEnvironment

TILE_PIXELS = 28  # each square is an image token of Qwen2.5-VL
LENGTH = 4


class CorridorEnv(MiniGridEnv):
    """Squares in a row, with the goal at the right end, and a random start."""

    def __init__(self, **options: Any) -> None:
        mission = MissionSpace(mission_func=lambda: "get to the green goal square")
        super().__init__(mission, width=LENGTH + 2, height=3, see_through_walls=True, **options)

    def _gen_grid(self, width: int, height: int) -> None:
        self.grid = Grid(width, height)
        self.grid.wall_rect(0, 0, width, height)
        self.put_obj(Goal(), LENGTH, 1)
        self.place_agent()
        self.mission = "get to the green goal square"


class Corridor(GymnasiumEnvironment):
    """An environment of squares in a row that ends after eight steps."""

    def __init__(self) -> None:
        super().__init__("Corridor", actions=["left", "right", "forward"])

    def make(self, env_id: str) -> CorridorEnv:
        return CorridorEnv(max_steps=8, tile_size=TILE_PIXELS, highlight=False, render_mode="rgb_array")

    def describe(self, observation: Any) -> tuple[str, list[Image.Image]]:
        """Return the squares without the walls around them."""
        _, [image] = super().describe(observation)
        return "", [image.crop((TILE_PIXELS, TILE_PIXELS, image.width - TILE_PIXELS, image.height - TILE_PIXELS))]
