"""An echo environment behind OpenEnv's own server: python openenv_server.py; prints its port.

It echoes messages with the seed of the episode, and has what tests need beside: pictures, failures.
"""

import base64
import io
import socket
import time
from typing import Any

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from PIL import Image


class EchoAction(Action):
    message: str
    times: int = 1


class EchoObservation(Observation):
    echoed: str
    count: int = 0
    file: str | None = None
    pixels: list[list[list[int]]] | None = None


class EchoEnvironment(Environment):
    """Replies with what was said; the reward is the length of the message, and "bye" is the end."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._seed: int | None = None

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> EchoObservation:
        self._state, self._seed = State(episode_id=episode_id), seed
        return EchoObservation(echoed=f"ready, seed {seed}")

    def step(self, action: EchoAction, timeout_s: float | None = None, **kwargs: Any) -> EchoObservation:
        self._state.step_count += 1
        match action.message:
            case "fail":
                raise RuntimeError("the environment is broken")
            case "hang":
                time.sleep(3)
            case "draw":
                file = io.BytesIO()
                Image.new("RGB", (5, 4), (200, 0, 0)).save(file, "PNG")
                encoded = base64.b64encode(file.getvalue()).decode()
                return EchoObservation(echoed="", file=encoded, pixels=[[[0, 0, 255]] * 3] * 2)
        return EchoObservation(
            echoed=" ".join([action.message] * action.times),
            count=self._state.step_count,
            reward=float(len(action.message)),
            done=action.message == "bye",
        )

    @property
    def state(self) -> State:
        return self._state


def main() -> None:
    app = create_fastapi_app(EchoEnvironment, EchoAction, EchoObservation, max_concurrent_envs=2)
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])


if __name__ == "__main__":
    main()
