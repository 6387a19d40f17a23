"""Opens what needs no heavy library, so that errors of data, model folder and reward come at once.

torch, transformers and vLLM take ten seconds or more to import. What is opened here is not opened
again. Datasets and models of a hub, and reward functions that take images, are checked later.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from trigon.assemble.objects import RunObjects
from trigon.assemble.rewards import check_rewards, open_rewards, open_validation_rewards
from trigon.config.paths import is_local_dataset, local_path
from trigon.config.schema import Config, DataConfig
from trigon.data.rows import UnusableRow, column_value, require_columns, without_column
from trigon.data.sources import Source, open_source, preview_parquet
from trigon.errors import ConfigError, RewardError
from trigon.models.folders import require_config_file, require_weight_files
from trigon.rewards.pool import RewardPool
from trigon.system.installation import install_command, untested_versions
from trigon.types import Prompt

if TYPE_CHECKING:
    from trigon.data.stream import Prompts

_WAIT_SECONDS = 3.0
"""How long the first call of a reward function is waited for.

One that takes longer, perhaps because it imports large libraries itself, continues beside other
work, and is waited for before the models are loaded.
"""

_CLOSE_SECONDS = 10.0
"""How long the end of a run waits for that call before it ends the reward workers."""

_TRIED_ROWS = 3
_SEARCHED_ROWS = 100


class FirstCall:
    """The first call of a reward function, on dummy completions of the first rows, in a thread."""

    def __init__(self, rewards: RewardPool, prompts: Iterator[Prompt]) -> None:
        """Start the call. prompts: the first few are tried."""
        self._rewards = rewards
        self._prompts = prompts
        self._error: RewardError | None = None
        self._has_scored = False
        self._thread = threading.Thread(target=self._run, name="first call of the reward function", daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end of the call, and return whether the function has scored a row.

        False also if the call takes longer, and for a function that takes images, which is not
        called here.
        Raises: RewardError if the function cannot be loaded, or fails on each of the rows.
        """
        self._thread.join(seconds)
        if self._error is not None:
            raise self._error
        return self._has_scored

    def close(self) -> None:
        """Wait for the end of the call before the reward workers are ended, but not for long."""
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            self._rewards.ready()
            if self._rewards.takes_images():
                return
        except RewardError as error:
            self._error = error
            return
        failures: list[RewardError] = []
        for prompt in islice(self._prompts, _TRIED_ROWS):
            try:
                check_rewards(self._rewards, [prompt])
                self._has_scored = True
                return
            except RewardError as error:  # a row that is skipped later may make a function fail
                failures.append(error)
        self._error = failures[0] if failures else None


@dataclass(frozen=True, slots=True)
class Opened:
    """The datasets that are open, by their texts in the options, and the reward workers.

    first_call: the first call of the training reward function. val_first_call: that of the reward
    function of validation, if it has its own.
    """

    sources: Mapping[str, Source]
    rewards: RewardPool
    val_rewards: RewardPool | None
    first_call: FirstCall
    val_first_call: FirstCall | None

    def call_rewards(self, train_prompts: Prompts | None, val_prompts: Prompts | None) -> None:
        """Call each reward function on the first prompt, unless its first call has scored a row.

        Raises: RewardError as FirstCall.wait, or if the function has no score.
        """
        has_scored = self.first_call.wait()
        if not has_scored and (self.val_rewards is None or train_prompts is not None):
            check_rewards(self.rewards, val_prompts if train_prompts is None else train_prompts)
        if self.val_rewards is not None and val_prompts is not None:
            assert self.val_first_call is not None
            if not self.val_first_call.wait():
                check_rewards(self.val_rewards, val_prompts)


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

    def call(rewards: RewardPool, specs: Sequence[str]) -> FirstCall:
        call = FirstCall(rewards, _text_prompts([shown[spec] for spec in specs if spec in shown], data))
        stack.callback(call.close)
        call.wait(_WAIT_SECONDS)
        return call

    first = call(rewards, train_files or data.val_files)
    val_first = None if val_rewards is None else call(val_rewards, data.val_files)
    return Opened(sources | {spec: open_source(spec) for spec in previews}, rewards, val_rewards, first, val_first)


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
