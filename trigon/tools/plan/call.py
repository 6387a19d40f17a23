"""`trigon plan` from Python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from trigon.api import open_rows, read_arguments
from trigon.errors import raises_at_caller
from trigon.tools.plan.configuration import load_planned

if TYPE_CHECKING:
    from trigon.api import Data
    from trigon.rewards.callables import Reward
    from trigon.tools.plan.result import RunPlan


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
    calibrate_with: str | PurePath | None = None,
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
    """Return batches, memory, time and disk of a run before it starts, as `trigon plan` does.

    Neither GPUs nor weights are needed.

    Args:
        config: the YAML file of the run, or the config.yaml of a run folder.
        model, data, val_data, options, **keyword_options: as for train. Rows of Python objects are
            measured as those of files are; without the model's tokenizer they are counted.
        reward: as for train; not called, and not needed.
        gpus: such as 8xH100-80G; None: this machine.
        host_memory: bytes of each machine. model_config: a config.json in place of the model's.
        calibrate_with: the folder of a finished run on the same hardware.
        download: read tokenizer and datasets from the hub if they are not on this machine.
        prompt_tokens, image_tokens, response_tokens: means, if they are known without the dataset.
        num_prompts, num_val_prompts: of the datasets. keep_rate: share of groups that online
            filtering keeps.
        observed_tokens: mean that a completion observes in an environment or with tools, with
            images. observed_image_tokens: of these, those of images.
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
        load_planned=load_planned,
    )

    from trigon.tools.plan.lengths import LengthOptions
    from trigon.tools.plan.plan import plan as plan_run

    return plan_run(
        given.loaded.config,
        gpus=gpus,
        host_memory=host_memory,
        model_config=None if model_config is None else Path(model_config),
        calibrate_with=None if calibrate_with is None else Path(calibrate_with),
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
