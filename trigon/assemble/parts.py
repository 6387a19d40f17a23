"""Opens what a run and an evaluation have before they read data, and tries it on a first prompt."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trigon.assemble.data import open_builder, open_processors
from trigon.assemble.episodes import check_chat_template, load_episodes, try_episode
from trigon.assemble.memory import check_memory, find_hardware, size_of_model
from trigon.assemble.models import check_policy, choose_device, choose_kernel, device_type
from trigon.assemble.pools import Workers, open_worker_pools
from trigon.assemble.preflight import RunObjects, check_rewards
from trigon.config.checks import find_device_warnings
from trigon.config.names import DeviceType
from trigon.config.schema import Config
from trigon.data.prompts import PromptBuilder
from trigon.environments.pool import EnvironmentPool
from trigon.errors import ConfigError
from trigon.models.load import Processors
from trigon.models.sizes import ModelSize
from trigon.report.delivery import check_loggers
from trigon.rewards.pool import RewardPool
from trigon.system.installation import install_command, untested_versions
from trigon.system.machine import require_free_memory
from trigon.types import Prompt


def check_environment(config: Config) -> None:
    """Raise ConfigError or ModelError if a logger, vLLM, the device or a kernel is not available.

    The devices and the packages of several workers are checked when these have started.
    """
    check_loggers(config.trainer.logger)
    if not config.has_workers:
        if config.worker.rollout.name == "vllm":
            require_vllm()
        device = choose_device(config)
        if device.type == "cuda" and config.worker.rollout.name == "vllm":
            require_free_memory(config.worker.rollout.gpu_memory_utilization)
        choose_kernel(config, device)


def require_vllm() -> None:
    """Raise ConfigError if vLLM, which the configuration names, is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"worker.rollout.name is vllm, which is not installed: run {install_command('gpu')} (without a GPU: cpu "
            "instead of gpu), or set worker.rollout.name=transformers, which is slow"
        )


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run and an evaluation have before they read data.

    size: of the models, for the arithmetic of memory. workers: None if this process does the work.
    device: of each of them. episodes: None if completions have one turn.
    """

    processors: Processors
    size: ModelSize
    workers: Workers | None
    device: DeviceType
    episodes: EnvironmentPool | None
    builder: PromptBuilder

    def try_prompt(self, config: Config, rewards: RewardPool, prompt: Prompt) -> None:
        """Call the rewards on dummy completions of a prompt, and begin an episode if there are any.

        Raises: RewardError, EpisodeError.
        """
        check_rewards(rewards, prompt)
        if self.episodes is not None:
            try_episode(config, self.processors, self.episodes, prompt)


def open_parts(
    config: Config, objects: RunObjects, folder: Path, warn: Callable[[str], None], stack: ExitStack
) -> Parts:
    """Read the model's configuration, and start workers, environments and tools.

    folder: the run folder. stack: closes them. warn: called with what does not suit the device.
    Raises: ConfigError, also if the run does not fit into memory; ModelError, EpisodeError.
    """
    processors = open_processors(config)
    check_policy(config, processors.hf_config)
    size = size_of_model(config)
    check_hardware = partial(check_memory, config, size, warn=warn)
    workers = None
    if config.has_workers:
        workers = stack.enter_context(open_worker_pools(config, folder, check_hardware, warn))
        device = workers.device
    else:
        own_device = choose_device(config)
        device = device_type(own_device)
        check_hardware(find_hardware(own_device))
    _, newer = untested_versions()
    for warning in (*newer, *find_device_warnings(config, device)):
        warn(warning)
    episodes = load_episodes(config, processors, stack, objects)
    schemas = () if episodes is None else episodes.schemas
    check_chat_template(config, processors, schemas=schemas)
    builder = open_builder(config, processors, schemas=schemas)
    return Parts(processors, size, workers, device, episodes, builder)
