"""Opens what needs no heavy library, so that errors of data, model folder and reward come at once.

torch, transformers and vLLM take ten seconds and more to import. What is opened here is not opened
again; what cannot be known yet (datasets and models of a hub, rewards that look at images) is
checked later, like everything else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice

from trigon.assemble.objects import RunObjects
from trigon.assemble.rewards import open_rewards, open_validation_rewards
from trigon.config.paths import DATASET_SUFFIXES, is_python_object, local_path, split_dataset
from trigon.config.schema import Config, DataConfig
from trigon.data.rows import UnusableRow, column_value, require_columns, without_column
from trigon.data.sources import Source, open_source, preview_parquet
from trigon.errors import RewardError
from trigon.models.folders import require_config_file, require_weight_files
from trigon.rewards.pool import RewardPool
from trigon.rollout.collect import dummy_requests
from trigon.types import Prompt

_WAIT_SECONDS = 3.0
"""How long the first call of a reward function is waited for.

One that takes longer, perhaps because it imports large libraries itself, goes on beside other work,
and is called again later.
"""

_CLOSE_SECONDS = 10.0
"""How long the end of a run waits for that call before it ends the reward workers."""

_TRIED_ROWS = 3
_SEARCHED_ROWS = 100


@dataclass(frozen=True, slots=True)
class Opened:
    """The datasets that are open, by their texts in the options, and the reward workers."""

    sources: Mapping[str, Source]
    rewards: RewardPool
    val_rewards: RewardPool | None


def open_early(config: Config, objects: RunObjects, stack: ExitStack) -> Opened:
    """Open local datasets and the reward workers, and check them and the folder of the model.

    stack: closes them. Raises: ModelError, DataError or RewardError.
    """
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
        if spec not in sources and _is_local(spec):
            preview = preview_parquet(spec, max_rows=_SEARCHED_ROWS)
            if preview is None:
                sources[spec] = open_source(spec)
            else:
                previews[spec] = preview
    shown = sources | previews
    for spec in filter(shown.__contains__, specs):
        require_columns(shown[spec].columns, spec, data)
    _call(rewards, data, stack, [shown[spec] for spec in train_files or data.val_files if spec in shown])
    if val_rewards is not None:
        _call(val_rewards, data, stack, [shown[spec] for spec in data.val_files if spec in shown])
    return Opened(sources | {spec: open_source(spec) for spec in previews}, rewards, val_rewards)


def _check_model_folders(config: Config) -> None:
    critic = config.worker.critic.model.model_path if config.has_critic else None
    for path in (config.worker.actor.model.model_path, critic):
        folder = None if path is None else local_path(path)
        if folder is not None and folder.is_dir():
            require_config_file(folder)
            require_weight_files(folder)


def _is_local(spec: str) -> bool:
    location, _ = split_dataset(spec)
    return not is_python_object(spec) and local_path(location, suffixes=DATASET_SUFFIXES) is not None


def _call(rewards: RewardPool, data: DataConfig, stack: ExitStack, sources: list[Source]) -> None:
    """Raise RewardError if the function cannot be loaded, or fails on each of the first rows.

    A row that is skipped later may make a function fail, but not all of them.
    """
    errors: list[RewardError] = []
    deadline = time.monotonic() + _WAIT_SECONDS

    def check() -> None:
        try:
            rewards.ready()
            if rewards.takes_images():
                return
            prompts = list(islice((each for source in sources for each in _text_prompts(source, data)), _TRIED_ROWS))
        except RewardError as error:
            errors.append(error)
            return
        failures: list[RewardError] = []
        for prompt in prompts:
            try:
                rewards.check(dummy_requests(prompt), described=f"a dummy completion of {prompt.prompt_id}")
                return
            except RewardError as error:
                failures.append(error)
            if time.monotonic() > deadline:
                return
        errors.extend(failures[:1])

    thread = threading.Thread(target=check, name="first call of the reward function", daemon=True)
    thread.start()
    thread.join(_WAIT_SECONDS)
    if thread.is_alive():
        stack.callback(thread.join, _CLOSE_SECONDS)
    if errors:
        raise errors[0]


def _text_prompts(source: Source, data: DataConfig) -> Iterator[Prompt]:
    """Yield prompts of the first rows that have a text and a ground truth, as rewards see them."""
    for index in range(min(len(source.rows), _SEARCHED_ROWS)):
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
