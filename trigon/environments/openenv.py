"""Environments behind an OpenEnv server: each episode is one session of the server.

    worker:
      rollout:
        environment: trigon.environments.openenv:OpenEnvEnvironment
        environment_kwargs:
          base_url: http://127.0.0.1:8000
          action: {message: "{action}"}

OpenEnv's own client makes the connection, a WebSocket. Needs that client:
`pip install -e ".[openenv]"`.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from openenv.core import GenericEnvClient
from PIL import Image

from trigon.environments.protocol import action_text
from trigon.system.image_formats import DECODING_ERRORS, read_image
from trigon.system.terminal import shorten

ACTION = "{action}"
"""Stands for the text of a turn in an action's template."""


class OpenEnvEnvironment:
    """An environment of an OpenEnv server in an episode: JSON to observe and to act.

    Observations: each field that is not empty is a line `name: value` of the text; a single text is
    shown without its name. Fields in image_keys are pictures: PNG or JPEG files in base64, data
    URLs, nested lists of values from 0 to 255 [H, W, 3], or lists of these. After the last step
    nothing is observed.

    Actions: the text of a turn (thoughts left out, and of `<action> ... </action>` the content) is
    put into a template, or has to be a JSON object itself. A turn that is no JSON object, or one
    that the server does not accept as an action, does not step the environment: the model gets a
    message that says so, and invalid_reward, and the turn counts as one of max_steps.

    A server that cannot be reached, refuses a session, fails in a step or does not reply in time
    costs the episode: reset and step raise RuntimeError.

    Args:
        base_url: http:// or ws:// address of the server. It must allow as many sessions at a time
            as there are episodes (max_concurrent_envs of the server).
        action: the action with "{action}" where the turn's text goes, at any depth, such as
            {"message": "{action}"}; None: the text is the action, as a JSON object.
        reset_columns: columns of the row that are arguments of the environment's reset, under the
            same names. All completions of a row should start in the same state, so one is a seed.
        text_keys: fields of an observation that are the text; None: all but image_keys.
        image_keys: fields of an observation that are pictures.
        max_steps: turns after which the episode ends; None: no limit of its own.
        timeout_seconds: time limit for connecting, and for each reply of the server. Below
            worker.rollout.environment_timeout_seconds the error says what did not reply.
        invalid_reward: reward of a turn that is no action.

    Raises: ValueError for options, rows and observations that cannot be used.
    """

    def __init__(
        self,
        base_url: str,
        *,
        action: Mapping[str, Any] | None = None,
        reset_columns: Sequence[str] = ("seed",),
        text_keys: Sequence[str] | None = None,
        image_keys: Sequence[str] = (),
        max_steps: int | None = None,
        timeout_seconds: float = 55.0,
        invalid_reward: float = 0.0,
    ) -> None:
        if action is not None and ACTION not in json.dumps(action):
            raise ValueError(f"action is {dict(action)!r}; it must contain {ACTION!r}, where the turn's text goes")
        if timeout_seconds <= 0:
            raise ValueError(f"timeout_seconds is {timeout_seconds}; it must be greater than 0")
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps is {max_steps}; it must be at least 1, or null for no limit")
        self.base_url = base_url
        self.action = action
        self.reset_columns = tuple(reset_columns)
        self.text_keys, self.image_keys = text_keys, tuple(image_keys)
        self.max_steps, self.timeout_seconds = max_steps, float(timeout_seconds)
        self.invalid_reward = float(invalid_reward)
        self._client: Any = None
        self._num_steps = 0

    def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Start the episode of a row in a session of its own, and return its first observation."""
        missing = [column for column in self.reset_columns if column not in row]
        if missing:
            raise ValueError(f"the row has no {missing[0]!r}, which reset_columns names: only {', '.join(row)}")
        try:
            if self._client is None:
                self._client = self.connect()
            result = self._client.reset(**{column: row[column] for column in self.reset_columns})
        except Exception as error:
            self.close()
            raise RuntimeError(
                f"the OpenEnv server {self.base_url} started no episode ({_described(error)}); check that it runs, "
                f"and allows as many sessions at a time as there are episodes (max_concurrent_envs)"
            ) from error
        self._num_steps = 0
        return self.describe(result.observation)

    def step(self, action: str) -> tuple[dict[str, Any] | str | None, float | None, bool]:
        """Send the action of a turn.

        Returns: the observation, the reward, and whether the episode is over.
        """
        self._num_steps += 1
        is_last = self._num_steps == self.max_steps
        try:
            payload = self.as_action(action_text(action))
        except ValueError as error:
            return (None if is_last else f"{error}"), self.invalid_reward, is_last
        try:
            result = self._client.step(payload)
        except Exception as error:
            # The client has no type of its own for what the server refuses: the text has the code.
            if "(code: VALIDATION_ERROR)" in str(error):
                reply = f"The environment did not accept the action {_written(payload)}"
                return (None if is_last else reply), self.invalid_reward, is_last
            self.close()
            raise RuntimeError(f"the OpenEnv server {self.base_url} failed in a step ({_described(error)})") from error
        done = bool(result.done) or is_last
        reward = None if result.reward is None else float(result.reward)
        return (None if done else self.describe(result.observation)), reward, done

    def close(self) -> None:
        """End the session."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def connect(self) -> Any:
        """Return a connected client with blocking calls. Override it for a client of your own.

        A client has reset(**arguments) and step(dict), which return an object with observation (a
        dict), reward and done, and close().
        """
        client = GenericEnvClient(
            base_url=self.base_url, connect_timeout_s=self.timeout_seconds, message_timeout_s=self.timeout_seconds
        ).sync()
        try:
            return client.connect()
        except BaseException:
            client.close()  # its thread
            raise

    def as_action(self, text: str) -> dict[str, Any]:
        """Return the action of a turn's text. Raises: ValueError with a message for the model."""
        if self.action is not None:
            return {key: _filled(value, text) for key, value in self.action.items()}
        try:
            action = json.loads(text)
        except ValueError as error:
            raise ValueError(f"The action is not valid JSON: {error}") from error
        if not isinstance(action, dict):
            raise ValueError(f"The action must be a JSON object, not {type(action).__name__}.")
        return action

    def describe(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        """Return an observation's text and pictures. Override it to show something else."""
        images = [
            image
            for key in self.image_keys
            if observation.get(key) is not None
            for image in _pictures(observation[key], key)
        ]
        if self.text_keys is None:
            keys = [key for key in observation if key not in (*self.image_keys, "metadata", "done", "reward")]
        else:
            keys = [key for key in self.text_keys if key in observation]
        shown = {key: observation[key] for key in keys if observation[key] not in (None, "", [], {})}
        if not shown and not images:
            raise ValueError(
                f"the observation {shorten(repr(observation), 200)} has neither text nor a picture; see text_keys"
            )
        if len(shown) == 1 and isinstance(only := next(iter(shown.values())), str):
            return {"text": only, "images": images}
        return {"text": "\n".join(f"{key}: {_written(value)}" for key, value in shown.items()), "images": images}


def _filled(template: Any, text: str) -> Any:
    """Return a template with the text in place of ACTION."""
    if isinstance(template, str):
        return template.replace(ACTION, text)
    if isinstance(template, Mapping):
        return {key: _filled(value, text) for key, value in template.items()}
    if isinstance(template, list | tuple):
        return [_filled(value, text) for value in template]
    return template


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _pictures(value: Any, key: str) -> list[Image.Image]:
    """Return the pictures of a field. Raises: ValueError if it has none."""
    if isinstance(value, str):
        return [_decoded(value, key)]
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return [_decoded(part, key) for part in value]
    try:
        array = np.asarray(value)
    except ValueError as error:  # lists of different lengths
        raise ValueError(f"the field {key!r} of the observation is no picture: {error}") from error
    if array.ndim not in (3, 4) or array.shape[-1] != 3 or array.dtype.kind not in "iu":
        raise ValueError(
            f"the field {key!r} of the observation is no picture: {array.dtype} values of shape {list(array.shape)}; "
            f"it must be a file in base64, or values from 0 to 255 of shape [H, W, 3]"
        )
    if array.min() < 0 or array.max() > 255:
        raise ValueError(f"the field {key!r} of the observation has values from {array.min()} to {array.max()}")
    frames = array.astype(np.uint8)
    return [Image.fromarray(frame) for frame in (frames if frames.ndim == 4 else frames[None])]


def _decoded(text: str, key: str) -> Image.Image:
    encoded = text.partition(",")[2] if text.startswith("data:") else text
    try:
        return read_image(base64.b64decode(encoded, validate=True))
    except (binascii.Error, *DECODING_ERRORS) as error:
        raise ValueError(
            f"the field {key!r} of the observation is no picture: it must be a PNG or JPEG file in base64 ({error})"
        ) from error
