"""Gymnasium's environments, MiniGrid's among them, as environments of episodes.

`make test-environments` runs these with the packages, elsewhere they are skipped without them.
"""

import numpy as np
import pytest
from PIL import Image

from support.packages import require

gymnasium = require("gymnasium")
require("minigrid")

from gymnasium import spaces  # noqa: E402

from support.pooled_episode import play_in_pool  # noqa: E402
from trigon.environments.gymnasium import GymnasiumEnvironment  # noqa: E402

ROOM = "minigrid:MiniGrid-Empty-Random-5x5-v0"


@pytest.fixture
def make():
    """Return a function that makes an environment, which is closed at the end."""
    made = []

    def make(*arguments, kind=GymnasiumEnvironment, **options):
        made.append(kind(*arguments, **options))
        return made[-1]

    yield make
    for environment in made:
        environment.close()


def pixels(observation):
    [image] = observation["images"]
    assert isinstance(image, Image.Image)
    assert image.mode == "RGB"
    return np.asarray(image)


# -- MiniGrid: pictures ----------------------------------------------------------------------------


def test_a_room_is_shown_as_a_picture_with_its_mission(make):
    room = make(ROOM, env_kwargs={"tile_size": 28})
    first = room.reset({"seed": 3})
    assert first["text"] == "get to the green goal square"
    assert pixels(first).shape == (140, 140, 3)


def test_the_mission_is_not_repeated_beside_a_picture(make):
    room = make(ROOM)
    room.reset({"seed": 3})
    second, _, _ = room.step("left")
    assert second["text"] == ""
    assert room.reset({"seed": 3})["text"] == "get to the green goal square"


def test_the_same_seed_gives_the_same_episode_and_another_seed_another(make):
    def episode(room, seed):
        shown = [pixels(room.reset({"seed": seed}))]
        for action in ("left", "forward", "right", "forward"):
            observation, _, _ = room.step(action)
            shown.append(pixels(observation))
        return shown

    room, other = make(ROOM), make(ROOM)
    first = episode(room, 1)
    assert all(np.array_equal(a, b) for a, b in zip(first, episode(other, 1), strict=True))
    room.reset({"seed": 8})
    assert all(np.array_equal(a, b) for a, b in zip(first, episode(room, 1), strict=True))  # played again
    assert not np.array_equal(first[0], episode(other, 2)[0])


def test_the_goal_ends_the_episode_with_the_environments_reward(make):
    room = make("minigrid:MiniGrid-Empty-5x5-v0")
    room.reset({"seed": 0})  # the agent is at the top left, the goal at the bottom right
    steps = [room.step(action) for action in ("forward", "Forward.", "I turn right", "forward", "forward")]
    assert [done for _, _, done in steps] == [False, False, False, False, True]
    observation, reward, _ = steps[-1]
    assert observation is None
    assert reward == pytest.approx(1 - 0.9 * 5 / 100)  # MiniGrid's: 1 less 0.9 of the share of its steps
    assert [reward for _, reward, _ in steps[:-1]] == [0.0] * 4


def test_the_environments_own_limit_ends_the_episode(make):
    room = make(ROOM, env_kwargs={"max_steps": 2})
    room.reset({"seed": 0})
    assert room.step("left")[2] is False
    assert room.step("left") == (None, 0.0, True)


def test_max_steps_counts_turns_that_name_no_action_too(make):
    room = make(ROOM, max_steps=2)
    room.reset({"seed": 0})
    assert room.step("what?")[2] is False
    assert room.step("what?") == (None, 0.0, True)
    room.reset({"seed": 0})
    assert room.step("left")[2] is False
    assert room.step("left") == (None, 0.0, True)


def test_a_turn_without_an_action_is_told_the_names_and_does_not_step(make):
    room = make(ROOM, actions=["left", "right", "forward"], unknown_reward=-0.1)
    room.reset({"seed": 0})
    reply = ("Unknown action. Write one of: left, right, forward.", -0.1, False)
    assert room.step("left or right") == reply
    assert room.step("pickup") == reply  # an action of the environment that was not named
    assert room.env.unwrapped.step_count == 0


def test_unknown_action_is_taken_for_a_turn_without_one(make):
    room, other = make(ROOM, unknown_action="left"), make(ROOM)
    for each in (room, other):
        each.reset({"seed": 5})
    assert np.array_equal(pixels(room.step("hm")[0]), pixels(other.step("left")[0]))


def test_actions_may_have_names_of_their_own(make):
    room = make(ROOM, actions={"turn left": 0, "walk": 2})
    room.reset({"seed": 0})
    direction = room.env.unwrapped.agent_dir
    room.step("Turn left")
    assert room.env.unwrapped.agent_dir == (direction - 1) % 4


def test_rows_may_name_their_environment(make):
    room = make(id_key="level", env_kwargs={"tile_size": 10})
    small = room.reset({"seed": 0, "level": ROOM})
    large = room.reset({"seed": 0, "level": "minigrid:MiniGrid-Empty-8x8-v0"})
    assert (pixels(small).shape[0], pixels(large).shape[0]) == (50, 80)


def test_episodes_run_in_processes_as_in_a_run():
    environment = "trigon.environments.gymnasium:GymnasiumEnvironment"
    kwargs = {"env_id": ROOM, "actions": ["left", "right", "forward"], "env_kwargs": {"tile_size": 28, "max_steps": 3}}
    rows = [{"seed": 1}, {"seed": 1}, {"seed": 2}]
    one, again, other = play_in_pool(environment, kwargs, rows, ["left", "perhaps", "right", "right"])
    assert [outcome.error for outcome in (*one, *again, *other)] == [""] * 15
    [first] = one[0].observation.messages
    assert (first.role, first.text, len(first.images)) == ("user", "<image>get to the green goal square", 1)
    [second] = one[2].observation.messages
    assert (second.text, second.images) == ("Unknown action. Write one of: left, right, forward.", ())
    assert [(outcome.reward, outcome.done) for outcome in one] == [(None, False), *[(0.0, False)] * 3, (0.0, True)]
    assert one[4].observation is None
    assert [outcome.observation for outcome in one] == [outcome.observation for outcome in again]
    assert one[0].observation != other[0].observation


# -- Others: text, arrays, action spaces -----------------------------------------------------------


def test_a_text_rendering_shows_the_player_in_brackets(make):
    lake = make("FrozenLake-v1", render_mode="ansi", env_kwargs={"is_slippery": False})
    first = lake.reset({"seed": 0})
    assert first == {"text": "[S]FFF\nFHFH\nFFFH\nHFFG", "images": []}
    second, reward, done = lake.step("2")  # to the right; the environment has no names
    assert second["text"].splitlines()[1] == "S[F]FF"
    assert (reward, done) == (0.0, False)
    down = [lake.step(name) for name in ("1", "1")]
    assert down[0] == (None, 0.0, True)  # a hole


class Echo(gymnasium.Env):
    """Answers a text in its own words; the row's options give the first."""

    action_space = spaces.Text(20)
    observation_space = spaces.Text(40)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"say {options['word']}", {}

    def step(self, action):
        return f"you said {action}", 1.0, False, action == "bye", {}


class Pixels(gymnasium.Env):
    """Shows its observation, an array, and moves by an array."""

    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, shape=(6, 8, 3), dtype=np.uint8):
        self.observation_space = spaces.Box(0, 255, shape, dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.full(self.observation_space.shape, 7, self.observation_space.dtype), {}

    def step(self, action):
        assert action.dtype == np.float32
        return self.reset()[0], float(action.sum()), False, False, {}


@pytest.fixture(autouse=True, scope="module")
def _registered():
    for kind in (Echo, Pixels):
        gymnasium.register(f"Trigon{kind.__name__}-v0", kind, disable_env_checker=True)
    yield
    for kind in (Echo, Pixels):
        gymnasium.registry.pop(f"Trigon{kind.__name__}-v0")


def test_texts_go_in_and_out(make):
    echo = make("TrigonEcho-v0", render_mode=None, options_key="options")
    assert echo.reset({"seed": 0, "options": {"word": "hello"}}) == {"text": "say hello", "images": []}
    assert echo.step("<think>well</think>hello") == ({"text": "you said hello", "images": []}, 1.0, False)
    assert echo.step("<action>bye</action>") == (None, 1.0, True)


@pytest.mark.parametrize("shape", [(6, 8, 3), (6, 8, 1), (6, 8)])
def test_an_array_is_a_picture_and_actions_may_be_lists_of_numbers(make, shape):
    environment = make(
        "TrigonPixels-v0", render_mode=None, env_kwargs={"shape": shape}, actions={"up": [0, 0.5], "down": [0, -0.5]}
    )
    first = pixels(environment.reset({"seed": 0}))
    assert first.shape == (6, 8, 3)
    assert (first == 7).all()
    assert environment.step("up")[1] == 0.5


class Described(GymnasiumEnvironment):
    def describe(self, observation):
        return f"position {observation[0]:.1f}", []


def test_a_subclass_describes_other_observations(make):
    cart = make("CartPole-v1", kind=Described, render_mode=None, actions=["left", "right"])
    assert cart.reset({"seed": 0})["text"] == "position 0.0"


# -- What cannot be used ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "env_id is missing"),
        ({"env_id": ROOM, "render_mode": "human"}, "render_mode is 'human'"),
        ({"env_id": ROOM, "max_steps": 0}, "max_steps is 0"),
    ],
)
def test_wrong_options_are_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        GymnasiumEnvironment(**options)


@pytest.mark.parametrize(
    ("options", "row", "message"),
    [
        ({}, {"seed": -1}, "'seed' is -1"),
        ({}, {"seed": "1"}, "'seed' is '1'"),
        ({}, {"id": 1}, "there is no 'seed', which seed_key names: only id"),
        ({"actions": [f"a{i}" for i in range(8)]}, {"seed": 0}, r"does not contain a7 \(7\)"),
        ({"actions": {"left": "0"}}, {"seed": 0}, r"does not contain left \('0'\)"),
        ({"unknown_action": "wait"}, {"seed": 0}, "unknown_action is 'wait'"),
        ({"image_key": "picture"}, {"seed": 0}, "no 'picture', which image_key names: only image, direction, mission"),
        ({"render_mode": "ansi"}, {"seed": 0}, "render_mode is 'ansi', but .* has human, rgb_array"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*render_mode:UserWarning")
def test_what_the_environment_does_not_have_is_named(make, options, row, message):
    room = make(ROOM, **options)
    with pytest.raises(ValueError, match=message):
        room.reset(row)


@pytest.mark.parametrize(
    ("env_id", "options", "message"),
    [
        ("CartPole-v1", {"render_mode": None}, "values of shape"),
        ("TrigonPixels-v0", {"render_mode": None}, "has the action space Box"),
        ("TrigonPixels-v0", {"render_mode": None, "actions": {"up": [0, 9]}}, "does not contain up"),
    ],
)
def test_spaces_that_need_more_are_named(make, env_id, options, message):
    environment = make(env_id, **options)
    with pytest.raises(ValueError, match=message):
        environment.reset({"seed": 0})
