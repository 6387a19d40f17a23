"""A corridor of MiniGrid, seen from above: the model writes left, right or forward.

    worker.rollout.environment=examples/gridworld/environment.py:Corridor

Needs `pip install -e ".[gymnasium]" minigrid`. The player is a red triangle, which points to
where it looks; the goal is the green square at the right end. `left` and `right` turn the player by
90 degrees, `forward` moves it. The row's column `seed` decides where it stands and looks. An
episode ends at the goal or after eight steps. The reward is MiniGrid's: 1 - 0.9 * steps / 8 at the
goal, else 0.
"""

from typing import Any

from minigrid.core.grid import Grid
from minigrid.core.mission import MissionSpace
from minigrid.core.world_object import Goal
from minigrid.minigrid_env import MiniGridEnv
from PIL import Image

from trigon.environments.gymnasium import GymnasiumEnvironment

ACTIONS = ("left", "right", "forward")  # 0, 1 and 2 of MiniGrid's actions
LENGTH = 4  # squares
MAX_STEPS = 8
TILE_PIXELS = 28  # a square is one image token of Qwen2.5-VL


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
    """The corridor as an environment of episodes.

    blank: show grey pictures of the same size, to see what is reached without looking.
    """

    def __init__(self, *, blank: bool = False) -> None:
        super().__init__("Corridor", actions=ACTIONS)
        self.blank = blank

    def make(self, env_id: str) -> CorridorEnv:
        """Return the corridor, which Gymnasium does not need to know."""
        return CorridorEnv(max_steps=MAX_STEPS, tile_size=TILE_PIXELS, highlight=False, render_mode="rgb_array")

    def describe(self, observation: Any) -> tuple[str, list[Image.Image]]:
        """Return the squares without the walls around them."""
        _, [image] = super().describe(observation)
        squares = image.crop((TILE_PIXELS, TILE_PIXELS, image.width - TILE_PIXELS, image.height - TILE_PIXELS))
        return "", [Image.new("RGB", squares.size, "grey") if self.blank else squares]
