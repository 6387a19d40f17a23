"""The run that is checked: its configuration, and what several checks need of it, made once.

A part that cannot be made is the problem of one check; the others that need it are skipped.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from trigon.config.load import InspectedConfig
from trigon.config.options import with_options
from trigon.config.plan import has_critic
from trigon.config.schema import MAX_TOKENS, Config
from trigon.errors import ModelError, TrigonError
from trigon.tools.check.result import CheckSkipped

if TYPE_CHECKING:
    from trigon.assemble.episodes import EpisodeParts
    from trigon.config.plan import Plan
    from trigon.data.prompts import PromptBuilder
    from trigon.environments.pool import EnvironmentPool
    from trigon.models.load import Processors
    from trigon.models.sizes import ModelSize
    from trigon.rewards.pool import RewardPool
    from trigon.tools.check.machine import Machine
    from trigon.tools.check.rewards import Judged
    from trigon.tools.check.scanning import ScannedDataset

T = TypeVar("T")

Progress = Callable[[str, int | None], AbstractContextManager[Callable[[int], None]]]
"""Shows the progress of a phase, given its name and the number of its parts; see Console.progress.
"""


class Part(Generic[T]):
    """A part of a run that is made when it is first needed.

    name: of the check that reports it if it cannot be made.
    """

    def __init__(self, name: str, make: Callable[[], T]) -> None:
        self._name = name
        self._make = make
        self._made: list[T] = []
        self._error: TrigonError | CheckSkipped | None = None

    def get(self) -> T:
        """Return the part. Raises: TrigonError if it cannot be made; CheckSkipped."""
        if self._error is not None:
            raise self._error
        if not self._made:
            try:
                self._made.append(self._make())
            except (TrigonError, CheckSkipped) as error:
                self._error = error
                raise
        return self._made[0]

    def require(self) -> T:
        """Return the part. Raises: CheckSkipped if it cannot be made."""
        try:
            return self.get()
        except TrigonError as error:
            raise CheckSkipped(f"see the check {self._name!r}") from error


@dataclass(eq=False)
class Subject:
    """A run that is checked. machine: on which it is to run. close: ends its processes."""

    inspected: InspectedConfig
    machine: Machine
    progress: Progress
    stack: ExitStack = field(default_factory=ExitStack)

    @property
    def given(self) -> Config:
        """The configuration, as the user wrote it."""
        return self.inspected.loaded.config

    @cached_property
    def config(self) -> Part[Config]:
        """The configuration with a local folder for its model, which has no weights if it has none.

        A model of a hub is downloaded without its weights.
        """
        return Part("model", self._localize)

    @cached_property
    def processors(self) -> Part[Processors]:
        """The tokenizer, the image and video processors, and the config of the model."""
        return Part("model", self._open_processors)

    @cached_property
    def readers(self) -> Part[tuple[Config, Processors]]:
        """What reads the rows: the processors, and the configuration that they are used with.

        Those of a stand-in if the model cannot be read, because a hub is out of reach for example:
        rows, images and rewards can still be checked, but no length.
        """
        return Part("model", self._open_readers)

    @cached_property
    def size(self) -> Part[ModelSize]:
        """The number of the model's weights, from its config."""
        return Part("model", self._count_weights)

    @cached_property
    def episodes(self) -> Part[tuple[EpisodeParts, EnvironmentPool] | None]:
        """The environment or the tools, in their processes; None: completions of one turn."""
        return Part("environment", self._load_episodes)

    @property
    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        """The descriptions of the tools, which are a part of prompts.

        Raises: CheckSkipped if there are tools that cannot be loaded.
        """
        episodes = self.episodes.require() if self.given.worker.rollout.tools else None
        return () if episodes is None else episodes[0].schemas

    @cached_property
    def builder(self) -> Part[PromptBuilder]:
        """What makes prompts of rows."""
        return Part("template", self._open_builder)

    @cached_property
    def datasets(self) -> Part[list[ScannedDataset]]:
        """All datasets with all of their rows: those of training, then those of validation."""
        return Part("rows", self._scan)

    @cached_property
    def plan(self) -> Part[Plan]:
        """The numbers of steps and updates."""
        return Part("steps", self._make_plan)

    @cached_property
    def rewards(self) -> Part[RewardPool]:
        """The reward workers, which are starting."""
        return Part("reward", self._open_rewards)

    @cached_property
    def val_rewards(self) -> Part[RewardPool | None]:
        """The reward workers of validation, which are starting; None without their own function."""
        return Part("reward", self._open_val_rewards)

    @cached_property
    def judged(self) -> Part[Judged]:
        """What made completions say about the reward function."""
        return Part("reward", self._judge)

    def close(self) -> None:
        """End the reward workers, and the processes of the environment or the tools."""
        self.stack.close()

    def _localize(self) -> Config:
        from trigon.models.load import folder_without_weights

        model = self.given.worker.actor.model
        if not model.model_path:
            raise CheckSkipped("no model is set")
        changes = {"worker.actor.model.model_path": str(folder_without_weights(model.model_path))}
        if model.tokenizer_path:
            changes["worker.actor.model.tokenizer_path"] = str(folder_without_weights(model.tokenizer_path))
        critic = self.given.worker.critic.model.model_path if has_critic(self.given) else None
        if critic:
            changes["worker.critic.model.model_path"] = str(folder_without_weights(critic))
        return with_options(self.given, changes)

    def _open_processors(self) -> Processors:
        from trigon.assemble.data import read_processors

        return read_processors(self.config.get())

    def _count_weights(self) -> ModelSize:
        from trigon.assemble.memory import size_of_model

        return size_of_model(self.config.get())

    def _load_episodes(self) -> tuple[EpisodeParts, EnvironmentPool] | None:
        from trigon.assemble.episodes import load_episodes

        return load_episodes(self.config.require(), self.processors.require(), self.stack)

    def _open_readers(self) -> tuple[Config, Processors]:
        try:
            return self.config.get(), self.processors.get()
        except ModelError:
            from trigon.models.load import load_processors
            from trigon.tools.quickstart.model import make_tiny

            with tempfile.TemporaryDirectory(prefix="trigon-") as folder:
                processors = load_processors(str(make_tiny(Path(folder))))
            return with_options(self.given, {"data.max_prompt_length": MAX_TOKENS}), processors

    def _open_builder(self) -> PromptBuilder:
        from trigon.assemble.data import open_builder

        config, processors = self.readers.require()
        schemas = self.tool_schemas if self.reads_model else ()
        return open_builder(config, processors, process_images=False, schemas=schemas)

    @property
    def reads_model(self) -> bool:
        """Whether the rows are read with the model's own processors."""
        try:
            return self.processors.get() is self.readers.get()[1]
        except ModelError:
            return False

    def _scan(self) -> list[ScannedDataset]:
        from trigon.tools.check.scanning import scan_datasets

        return scan_datasets(self.readers.require()[0], self.builder.require(), self.progress)

    def _make_plan(self) -> Plan:
        from trigon.tools.check.scanning import make_plan_of

        return make_plan_of(self.given, self.datasets.require())

    def _open_rewards(self) -> RewardPool:
        from trigon.assemble.rewards import open_rewards

        if not self.given.worker.reward.reward_function:
            raise CheckSkipped("no reward function is set")
        # Each failure is a finding; a run stops at too many.
        pool = open_rewards(with_options(self.given, {"worker.reward.max_failed_fraction": 1.0}))
        self.stack.callback(pool.close)
        return pool

    def _open_val_rewards(self) -> RewardPool | None:
        from trigon.assemble.rewards import open_validation_rewards

        pool = open_validation_rewards(self.given)
        if pool is not None:
            self.stack.callback(pool.close)
        return pool

    def _judge(self) -> Judged:
        from trigon.tools.check.rewards import judge_reward

        return judge_reward(self)


@contextmanager
def no_progress(name: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show nothing."""
    yield lambda k: None


def run_folder_of(config: Config) -> Path:
    """Return the run folder, or the lowest of its parents that exists."""
    from trigon.config.defaults import resolve_run_folder

    folder = resolve_run_folder(config).absolute()
    return next(each for each in (folder, *folder.parents) if each.exists())
