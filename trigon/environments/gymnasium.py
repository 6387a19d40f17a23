"""Environments of Gymnasium: the model sees pictures or text, and writes the name of an action.

    worker:
      rollout:
        environment: trigon.environments.gymnasium:GymnasiumEnvironment
        environment_kwargs:
          env_id: minigrid:MiniGrid-Empty-5x5-v0
          actions: [left, right, forward]

Needs Gymnasium: `pip install -e ".[gymnasium]"`. A file of your own with a subclass can import
the package of its environments (minigrid): it is then imported once, and not again in each episode.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from PIL import Image

from trigon.environments.protocol import action_text, as_names, find_action

_HIGHLIGHT, _END_OF_HIGHLIGHT = re.compile(r"\x1b\[[1-9][\d;]*m"), re.compile(r"\x1b\[0?m")


class GymnasiumEnvironment:
    """A Gymnasium environment in an episode: pictures and text to observe, named actions to take.

    Observations: the picture is what `render()` draws. With render_mode "ansi" it is text, in which
    [brackets] are around what a terminal would highlight. With render_mode None the observation
    itself is the picture (uint8 [H, W, 3] or [H, W]) or the text. Strings in an observation, such
    as MiniGrid's mission, are text in each case; beside a picture they are repeated only when they
    change. Others, such as vectors of numbers, need a subclass with a `describe` of its own. After
    the last step nothing is observed.

    Actions: each turn is searched for the name of an action (see trigon.environments.protocol); if
    the action space is `Text`, the turn's text is the action. A turn that names none, or several,
    does not step the environment: the model gets the names and unknown_reward, and the turn
    counts as one of max_steps. With unknown_action, that action is taken instead.

    The episode is over when the environment is terminated or truncated, or after max_steps turns.
    worker.rollout.max_turns is a limit beside it.

    env: the Gymnasium environment, from the first reset to close().

    Args:
        env_id: id as in `gymnasium.make`; "module:id" imports the module that registers it.
        actions: name -> action (an integer for Discrete, a list of numbers for Box), or names in
            the order of a Discrete space, of which the first may be all that are wanted. None: the
            names that MiniGrid and Atari environments give to their actions, else "0", "1", ...
        env_kwargs: further arguments of `gymnasium.make`.
        render_mode: "rgb_array", "ansi" or None, see above.
        image_key: entry of a dict observation that is the picture, instead of render().
        text_keys: entries of a dict observation that are the text; None: all that are strings.
        seed_key: column of the row with the seed of the episode, an integer of at least 0. All
            completions of a row start in the same state.
        id_key: column with the id of a row's environment, in place of env_id.
        options_key: column with the `options` of `reset`, a dict.
        max_steps: turns after which the episode ends; None: no limit of its own.
        unknown_action: name of the action for a turn that names none; None: see above.
        unknown_reward: reward of a turn that names none and does not step the environment.

    Raises: ValueError for options, actions and columns that the environment or the row does not
    have, and for observations with nothing to show.
    """

    def __init__(
        self,
        env_id: str | None = None,
        *,
        actions: Mapping[str, Any] | Sequence[str] | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        render_mode: str | None = "rgb_array",
        image_key: str | None = None,
        text_keys: Sequence[str] | None = None,
        seed_key: str = "seed",
        id_key: str | None = None,
        options_key: str | None = None,
        max_steps: int | None = None,
        unknown_action: str | None = None,
        unknown_reward: float = 0.0,
    ) -> None:
        if env_id is None and id_key is None:
            raise ValueError("env_id is missing: name a Gymnasium environment, or a column of the data with id_key")
        if render_mode not in ("rgb_array", "ansi", None):
            raise ValueError(f"render_mode is {render_mode!r}; it must be rgb_array, ansi or null")
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps is {max_steps}; it must be at least 1, or null for no limit")
        self.env_id = env_id
        self.env_kwargs = dict(env_kwargs or {})
        self.render_mode = render_mode
        self.image_key, self.text_keys = image_key, text_keys
        self.seed_key, self.id_key, self.options_key = seed_key, id_key, options_key
        self.max_steps = max_steps
        self.unknown_action, self.unknown_reward = unknown_action, float(unknown_reward)
        self._given_actions = actions
        self.env: Any = None
        self._made_id: str | None = None
        self._actions: dict[str, Any] | None = None  # None: text is the action
        self._names: dict[str, str] = {}
        self._num_steps = 0
        self._last_text = ""

    def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Start the episode of a row, and return its first observation."""
        env_id = self.env_id if self.id_key is None else str(_column(row, self.id_key, "id_key"))
        assert env_id is not None  # one of the two was given
        if self.env is None or env_id != self._made_id:
            self.close()
            self.env, self._made_id = self.make(env_id), env_id
            modes = self.env.metadata.get("render_modes", [])
            if self.render_mode is not None and self.render_mode not in modes:
                raise ValueError(
                    f"render_mode is {self.render_mode!r}, but {env_id} has {', '.join(modes) or 'none'}; choose "
                    f"another one, or null to show its observations"
                )
            self._actions = self._read_actions()
        options = None if self.options_key is None else _column(row, self.options_key, "options_key")
        observation, _ = self.env.reset(seed=self._seed_of(row), options=options)
        self._num_steps, self._last_text = 0, ""
        return self._show(observation)

    def step(self, action: str) -> tuple[dict[str, Any] | str | None, float, bool]:
        """Take the action that a turn's text names.

        Returns: the observation, the reward, and whether the episode is over.
        """
        self._num_steps += 1
        is_last = self._num_steps == self.max_steps
        if self._actions is None:
            taken: Any = action_text(action)
        else:
            name = find_action(action, self._names) or self.unknown_action
            if name is None:
                reply = f"Unknown action. Write one of: {', '.join(self._actions)}."
                return (None if is_last else reply), self.unknown_reward, is_last
            taken = self._actions[name]
        observation, reward, terminated, truncated, _ = self.env.step(taken)
        done = bool(terminated or truncated or is_last)
        return (None if done else self._show(observation)), float(reward), done

    def close(self) -> None:
        """Close the environment."""
        env, self.env, self._made_id = self.env, None, None
        if env is not None:
            env.close()

    def make(self, env_id: str) -> Any:
        """Return the Gymnasium environment of an id. Override it to add wrappers."""
        mode = {} if self.render_mode is None else {"render_mode": self.render_mode}
        return gymnasium.make(env_id, **mode, **self.env_kwargs)

    def describe(self, observation: Any) -> tuple[str, list[Image.Image]]:
        """Return the text and the pictures of an observation. Override it for other observations.

        The environment is `self.env`.
        """
        texts, images = self._texts_of(observation), []
        if self.image_key is not None:
            images.append(_picture(_column(observation, self.image_key, "image_key")))
        elif self.render_mode is None:
            if isinstance(observation, np.ndarray):
                images.append(_picture(observation))
        elif self.render_mode == "ansi":
            texts.append(_with_brackets(str(self.env.render())))
        else:
            images.append(_picture(self.env.render()))
        return "\n".join(text for text in texts if text), images

    def _show(self, observation: Any) -> dict[str, Any]:
        text, images = self.describe(observation)
        if not text and not images:
            raise ValueError(
                f"{self._made_id}: an observation of type {type(observation).__name__} has neither text nor a picture; "
                f"choose render_mode rgb_array or ansi, or override describe()"
            )
        shown = "" if images and text == self._last_text else text
        self._last_text = text
        return {"text": shown, "images": images}

    def _texts_of(self, observation: Any) -> list[str]:
        if isinstance(observation, str):
            return [observation]
        if not isinstance(observation, Mapping):
            return []
        if self.text_keys is None:
            return [value for value in observation.values() if isinstance(value, str)]
        return [str(_column(observation, key, "text_keys")) for key in self.text_keys]

    def _seed_of(self, row: Mapping[str, Any]) -> int:
        seed = _column(row, self.seed_key, "seed_key")
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
            raise ValueError(f"the row's {self.seed_key!r} is {seed!r}; the seed must be an integer of at least 0")
        return int(seed)

    def _read_actions(self) -> dict[str, Any] | None:
        """Return the environment's actions by name; None for an action space of texts."""
        space, given = self.env.action_space, self._given_actions
        if given is None and isinstance(space, spaces.Text):
            return None
        is_discrete = isinstance(space, spaces.Discrete)
        if isinstance(given, Mapping):
            actions = {str(name): _as_action(value, space) for name, value in given.items()}
        elif not is_discrete:
            raise ValueError(
                f"{self._made_id} has the action space {space}; give its actions as a dict from names to actions"
            )
        else:
            names = _own_names(self.env) if given is None else [str(name) for name in given]
            names = names or [str(number) for number in range(int(space.start), int(space.start + space.n))]
            actions = {name: _as_action(int(space.start) + index, space) for index, name in enumerate(names)}
            if len(actions) < len(names):
                raise ValueError(f"actions are {names}; each name may occur once")
        wrong = [f"{name} ({value!r})" for name, value in actions.items() if not space.contains(value)]
        if wrong:
            raise ValueError(f"{self._made_id} has the action space {space}, which does not contain {', '.join(wrong)}")
        self._names = as_names(actions)
        if self.unknown_action is not None and self.unknown_action not in actions:
            raise ValueError(f"unknown_action is {self.unknown_action!r}; it must be one of {', '.join(actions)}")
        return actions


def _own_names(env: Any) -> list[str]:
    """Return the names that an environment gives to its actions, [] if it gives none."""
    actions = getattr(env.unwrapped, "actions", None)  # MiniGrid
    if isinstance(actions, type) and issubclass(actions, Enum):
        return [action.name for action in sorted(actions, key=lambda action: int(action.value))]
    meanings = getattr(env.unwrapped, "get_action_meanings", None)  # Atari
    return [str(meaning) for meaning in meanings()] if callable(meanings) else []


def _as_action(value: Any, space: Any) -> Any:
    """Return an action of a configuration as one of the space: a list becomes an array."""
    return np.asarray(value, dtype=space.dtype) if isinstance(value, list | tuple) else value


def _column(values: Mapping[str, Any], key: str, option: str) -> Any:
    if not isinstance(values, Mapping) or key not in values:
        known = (
            f"only {', '.join(map(str, values))}" if isinstance(values, Mapping) else f"it is {type(values).__name__}"
        )
        raise ValueError(f"there is no {key!r}, which {option} names: {known}")
    return values[key]


def _picture(pixels: Any) -> Image.Image:
    """Return uint8 pixels [H, W, 3], [H, W, 1] or [H, W] as an RGB image."""
    array = np.asarray(pixels)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] != 3):
        raise ValueError(
            f"a picture has {array.dtype} values of shape {list(array.shape)}; it must be uint8, [H, W, 3] or [H, W]. "
            f"Use render_mode rgb_array, or override describe()"
        )
    return Image.fromarray(array).convert("RGB")


def _with_brackets(text: str) -> str:
    """Replace a terminal's colours by brackets: they show where the player is."""
    return _END_OF_HIGHLIGHT.sub("]", _HIGHLIGHT.sub("[", text)).strip("\n")
