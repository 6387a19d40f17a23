"""`trigon plan` from Python, and the configuration of a run that is planned.

Imports nothing heavy, so that errors of the configuration come at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from trigon.api import open_rows, read_arguments
from trigon.config.load import LoadedConfig, Override, inspect_config, load_config
from trigon.config.paths import PYTHON_PREFIX, is_python_object
from trigon.config.schema import reward_specs
from trigon.errors import raises_at_caller

if TYPE_CHECKING:
    from trigon.api import Data
    from trigon.rewards.callables import Reward
    from trigon.tools.plan.plan import RunPlan

_REWARD = "worker.reward.reward_function"
_VAL_REWARD = "worker.reward.val_reward_function"
_DEVICES = ("trainer.nnodes", "trainer.n_gpus_per_node")
# A run does not write the secrets in its arguments.
_NO_ARGUMENTS = {"worker.reward.reward_function_kwargs": None}


@raises_at_caller
def plan(
    config: str | PurePath | None = None,
    *,
    model: str | PurePath | None = None,
    data: Data | None = None,
    val_data: Data | None = None,
    reward: Reward | PurePath | None = None,
    options: Mapping[str, Any] | None = None,
    gpus: str | None = None,
    host_memory: int | None = None,
    model_config: str | PurePath | None = None,
    measured: str | PurePath | None = None,
    download: bool = False,
    prompt_tokens: float | None = None,
    image_tokens: float | None = None,
    response_tokens: float | None = None,
    num_prompts: int | None = None,
    num_val_prompts: int | None = None,
    keep_rate: float | None = None,
    observed_tokens: float | None = None,
    observed_image_tokens: float | None = None,
    **keyword_options: Any,
) -> RunPlan:
    """Return batches, memory, operations and disk of a run before it starts, as `trigon plan` does.

    Neither GPUs nor weights are needed.

    Args:
        config: the YAML file of the run, or the config.yaml of a run folder.
        model, data, val_data, options, **keyword_options: as for train. Rows of Python objects are
            measured as rows of files are; without the model's tokenizer they are counted.
        reward: as for train; not called, and not needed.
        gpus: such as 8xH100-80G; None: this machine.
        host_memory: bytes of each machine. model_config: a config.json in place of the model's.
        measured: the folder of a finished run of the same model on as many GPUs, for seconds.
        download: read tokenizer and datasets from the hub if they are not on this machine.
        prompt_tokens, image_tokens, response_tokens: means, if they are known without the dataset.
        num_prompts, num_val_prompts: sizes of the datasets. keep_rate: share of groups that online
            filtering keeps.
        observed_tokens: mean that a completion observes in an environment or with tools, with
            images. observed_image_tokens: the image tokens among these.
    Raises: ConfigError, DataError or ModelError for what cannot be planned.
    """
    given = read_arguments(
        model=model,
        data=data,
        reward=reward,
        val_data=val_data,
        config=config,
        loggers=None,
        options=options,
        keyword_options=keyword_options,
        caller=plan,
    )
    loaded = load_planned(given.config, given.options)

    from trigon.tools.plan.lengths import LengthOptions
    from trigon.tools.plan.plan import plan as plan_run

    return plan_run(
        loaded.config,
        gpus=gpus,
        host_memory=host_memory,
        model_config=None if model_config is None else Path(model_config),
        measured=None if measured is None else Path(measured),
        download=download,
        lengths=LengthOptions(
            prompt_tokens=prompt_tokens,
            image_tokens=image_tokens,
            response_tokens=response_tokens,
            num_prompts=num_prompts,
            num_val_prompts=num_val_prompts,
            keep_rate=keep_rate,
            observed_tokens=observed_tokens,
            observed_image_tokens=observed_image_tokens,
        ),
        opened={spec: open_rows(dataset, spec) for spec, dataset in given.data.items()},
    )


def load_planned(path: Path | None, overrides: Sequence[Override]) -> LoadedConfig:
    """Return the checked configuration of a run that is planned.

    Unlike a run, a plan needs no reward function and none of its arguments; and the datasets, the
    reward function, the environment and the tools may be Python objects that an earlier run was
    given, of which its config.yaml has the names only. What depends on the number of workers is
    checked by trigon.tools.plan.plan, which receives the devices.
    Args: as trigon.config.load.load_config. Raises: ConfigError with all problems.
    """
    overrides = [*overrides, _NO_ARGUMENTS]
    inspected = inspect_config(path, overrides, undecided=_DEVICES)
    config = inspected.config
    data, rollout, reward = config.data, config.worker.rollout, config.worker.reward.reward_function
    if not reward and _REWARD not in inspected.uncertain:
        reward = f"{PYTHON_PREFIX}any"
        overrides.append({_REWARD: reward})
    if reward and not isinstance(reward, str):
        overrides.append({_REWARD: [entry.model_dump(exclude={"kwargs"}) for entry in reward]})
    overrides.append({_VAL_REWARD: None})
    named = (*data.train_files, *data.val_files, *reward_specs(reward), rollout.environment or "", *rollout.tools)
    objects = set(filter(is_python_object, named))
    return load_config(path, overrides, python_objects=objects, undecided=_DEVICES)
