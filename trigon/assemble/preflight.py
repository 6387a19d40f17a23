"""Opens what needs no heavy library, so that errors of data, model folder and reward come at once.

torch, transformers and vLLM take ten seconds or more to import. What is opened here is not opened
again. Datasets and models of a hub, and reward functions that take images, are checked later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice

from trigon.config.paths import expand_path, is_local_dataset, local_path
from trigon.config.schema import Config, DataConfig, RewardConfig
from trigon.data.rows import UnusableRow, column_value, require_columns, without_column
from trigon.data.sources import Source, open_source, preview_parquet
from trigon.errors import ConfigError, RewardError
from trigon.models.hub import require_config_file, require_weight_files
from trigon.report.delivery import Hooks
from trigon.rewards.load import RewardTerm, find_reward
from trigon.rewards.pool import RewardPool
from trigon.rollout.collect import dummy_requests
from trigon.system.confinement.options import Confinement
from trigon.system.installation import install_command, untested_versions
from trigon.system.user_code import CodeSource
from trigon.types import Prompt


@dataclass(frozen=True, slots=True)
class RunObjects:
    """What a run is given besides its configuration.

    sources: opened datasets, by their texts in data.train_files and data.val_files. reward,
    val_reward, environment, tools: what was given as Python objects in place of the options; None
    or empty: the options name files, modules or shipped code. hooks: functions that the run calls.
    """

    sources: Mapping[str, Source] = field(default_factory=dict)
    reward: Sequence[RewardTerm] | None = None
    val_reward: Sequence[RewardTerm] | None = None
    environment: CodeSource | None = None
    tools: tuple[CodeSource, ...] = ()
    hooks: Hooks = field(default_factory=Hooks)


NO_OBJECTS = RunObjects()


_TRIED_ROWS = 3
_SEARCHED_ROWS = 100


@dataclass(frozen=True, slots=True)
class Opened:
    """The datasets that are open, by their texts in the options, and the reward workers.

    val_rewards: the reward workers of validation, if it has a reward function of its own.
    """

    sources: Mapping[str, Source]
    rewards: RewardPool
    val_rewards: RewardPool | None


def open_early(config: Config, objects: RunObjects, stack: ExitStack) -> Opened:
    """Open local datasets and the reward workers, and check them and the folder of the model.

    stack: closes them.
    Raises: ModelError, DataError or RewardError; ConfigError for a library older than is supported.
    """
    older, _ = untested_versions()
    if older:
        raise ConfigError("\n".join(older) + f"\nrun {install_command('cpu')}, or [gpu], in a fresh environment")
    _check_model_folders(config)
    rewards = open_rewards(config, objects)
    stack.callback(rewards.close)
    val_rewards = open_validation_rewards(config, objects)
    if val_rewards is not None:
        stack.callback(val_rewards.close)
    data = config.data
    train_files = () if config.trainer.val_only else data.train_files
    sources, previews = dict(objects.sources), {}
    specs = dict.fromkeys((*train_files, *data.val_files))
    for spec in specs:
        if spec not in sources and is_local_dataset(spec):
            preview = preview_parquet(spec, max_rows=_SEARCHED_ROWS)
            if preview is None:
                sources[spec] = open_source(spec)
            else:
                previews[spec] = preview
    shown = sources | previews
    for spec in filter(shown.__contains__, specs):
        require_columns(shown[spec].columns, spec, data)

    for pool, files in ((rewards, train_files or data.val_files), (val_rewards, data.val_files)):
        if pool is not None:
            _try_rewards(pool, _text_prompts([shown[spec] for spec in files if spec in shown], data))
    return Opened(sources | {spec: open_source(spec) for spec in previews}, rewards, val_rewards)


def _try_rewards(rewards: RewardPool, prompts: Iterator[Prompt]) -> None:
    """Call a reward function on dummy completions of the first rows, unless it takes images.

    Raises: RewardError if it cannot be loaded, or fails on each of these rows: one that is skipped
    later may make it fail.
    """
    if rewards.ready().takes_images:
        return
    failures: list[RewardError] = []
    for prompt in islice(prompts, _TRIED_ROWS):
        try:
            check_rewards(rewards, prompt)
            return
        except RewardError as error:
            failures.append(error)
    if failures:
        raise failures[0]


def _check_model_folders(config: Config) -> None:
    for path in (config.worker.actor.model.model_path, config.critic_model_path):
        folder = None if path is None else local_path(path)
        if folder is not None and folder.is_dir():
            require_config_file(folder)
            require_weight_files(folder)


def _text_prompts(sources: Sequence[Source], data: DataConfig) -> Iterator[Prompt]:
    """Yield prompts of the first rows that have a text and a ground truth, as rewards see them."""
    first = ((each, index) for each in sources for index in range(min(len(each.rows), _SEARCHED_ROWS)))
    for source, index in first:
        try:
            row = source.row(index)
        except UnusableRow:
            continue
        text, truth = column_value(row, data.prompt_key), column_value(row, data.answer_key)
        if isinstance(text, str) and truth is not None:
            yield Prompt(
                prompt_id=f"{source.name}:{index}",
                token_ids=(),
                vision=None,
                text=text,
                ground_truth=truth,
                row=without_column(without_column(row, data.image_key), data.video_key),
                image_refs=(),
            )


# -- reward workers --------------------------------------------------------------------------------


def open_rewards(config: Config, objects: RunObjects = NO_OBJECTS) -> RewardPool:
    """Start the reward workers."""
    reward = config.worker.reward
    assert reward.reward_function is not None
    return _open_pool(reward, objects.reward or find_reward(reward.reward_function, reward.reward_function_kwargs))


def open_validation_rewards(config: Config, objects: RunObjects = NO_OBJECTS) -> RewardPool | None:
    """Start reward workers for validation, if there is any, with a reward function of its own."""
    reward = config.worker.reward
    if reward.val_reward_function is None or not config.data.val_files:
        return None
    return _open_pool(reward, objects.val_reward or find_reward(reward.val_reward_function, {}))


def _open_pool(reward: RewardConfig, terms: Sequence[RewardTerm]) -> RewardPool:
    return RewardPool(
        terms,
        num_workers=reward.num_cpus,
        timeout_seconds=reward.timeout_seconds,
        max_failed_fraction=reward.max_failed_fraction,
        concurrency=reward.concurrency,
        passed_variables=reward.env,
        confinement=make_confinement(reward),
    )


def make_confinement(reward: RewardConfig) -> Confinement:
    """Return what is kept from the user's code: reward functions, environments and tools."""
    return Confinement(
        level=reward.confinement,
        network=reward.network,
        readable=tuple(str(expand_path(path).absolute()) for path in reward.readable),
        writable=tuple(str(expand_path(path).absolute()) for path in reward.writable),
        max_memory_bytes=int(reward.max_memory_gb * 2**30),
    )


def check_rewards(rewards: RewardPool, prompt: Prompt) -> None:
    """Call the reward function on dummy completions of a prompt, before the models load.

    Raises: RewardError if it does not score them.
    """
    rewards.check(dummy_requests(prompt), described=f"a dummy completion of {prompt.prompt_id}")
