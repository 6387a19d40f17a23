"""How episodes run, and what they need of environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trigon.config.names import ToolFormat
from trigon.data.media_processing import MediaProcessor
from trigon.data.turns import TurnTemplate
from trigon.environments.protocol import Outcome
from trigon.errors import EngineError
from trigon.types import EncodedMedia, Prompt, Vision


class Environments(Protocol):
    """The environments of any number of episodes, each known by a number that is used once."""

    def start(self, episode: int, row: Any, images: tuple[bytes, ...]) -> None:
        """Begin an episode. Does not wait for its outcome.

        images: the images of the prompt, as files.
        """
        ...

    def step(self, episode: int, action: str) -> None:
        """Carry out an action. Does not wait for its outcome."""
        ...

    def poll(self, timeout_seconds: float) -> Sequence[Outcome]:
        """Return the outcomes since the last call; wait for the first of them if there is none.

        Each start and each step of an episode that is not stopped has one outcome in the end: an
        environment that fails or hangs has one with an error.
        """
        ...

    def stop(self, episode: int) -> None:
        """End an episode, also one that has failed or still has to answer."""
        ...


def encoded_images(prompt: Prompt) -> tuple[bytes, ...]:
    """Return the images of a prompt as files; none with videos.

    Raises: EngineError if only their pixel values are left.
    """
    match prompt.vision:
        case EncodedMedia(kind="image", encoded=encoded):
            return encoded
        case Vision(kind="image"):
            raise EngineError(
                f"{prompt.prompt_id}: environments get the images of a prompt as files, but only its pixel values are "
                "here. Build prompts with process_images=False."
            )
        case _:
            return ()


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeSettings:
    """How episodes run.

    environments: the environments, which answer the turns. template: the chat template of the
    conversation. opens: whether a first observation follows each prompt, which then has no
    generation prompt.
    tool_format: how the model writes calls of tools, with which a turn ends; None: no tools.
    max_turns: most turns of an episode. max_turn_tokens: most sampled tokens of a turn; None: no
    limit other than the completion's.
    load_pixels: processes the images of one observation; called in threads. load_prompts: returns
    prompts with pixel values in place of files. Both raise DataError for files that cannot be
    decoded.
    max_episodes: most episodes at a time, in every engine; None: all of a call. Episodes that wait
    for another call do not count.
    media: what load_pixels and load_prompts use; None where the caller of the engine calls
    start_step.
    """

    environments: Environments
    template: TurnTemplate
    opens: bool
    max_turns: int
    load_pixels: Callable[[EncodedMedia], Vision]
    load_prompts: Callable[[Sequence[Prompt]], list[Prompt]]
    max_turn_tokens: int | None = None
    tool_format: ToolFormat | None = None
    max_episodes: int | None = None
    media: MediaProcessor | None = None
