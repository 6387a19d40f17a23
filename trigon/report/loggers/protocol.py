"""The interface of a logger: what receives a run's metrics and samples besides the run folder.

A logger is any object with the two methods of Logger:

    class Prints:
        def log_metrics(self, step, metrics):
            print(step, metrics["reward/overall"])

        def log_samples(self, step, split, samples):
            for sample in samples:
                print(sample.row.response)

It may have two more: `open(run: LoggedRun) -> str | None`, called once before the others, and
`close() -> None`, called once after them. open returns where the results can be seen, such as a
URL, for the console. If the object has a `name`, messages use it.

open is called by the thread that starts the run, and the others by a thread of the logger's own
(delivery.py), one at a time and in order. They may raise: the logger is then reported as failed,
and not used again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from PIL import Image

from trigon.report.rollouts import RolloutRow

SampleSplit = Literal["train", "validation"]


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """The run that is logged.

    project, experiment: its names. config: the resolved configuration, nested, of JSON types,
    without secrets.
    folder: the run folder; a run that resumes in it continues its curves where the logger supports
    it.
    first_step: the first step that the run will report; what an earlier run reported from there on
    is superseded. 0: it starts from the beginning. None: it supersedes nothing.
    """

    project: str
    experiment: str
    config: Mapping[str, Any]
    folder: Path
    first_step: int | None


@dataclass(frozen=True, slots=True)
class LoggerEnvironment:
    """Settings of Trigon's own loggers that users give by environment variables.

    tensorboard_dir: of all experiments, each in project/experiment. None: tensorboard/ in the run
    folder. swanlab_dir: None: swanlab/ in the run folder. swanlab_mode: None: SwanLab's default.
    swanlab_api_key: None: SwanLab is logged in already.
    """

    tensorboard_dir: Path | None = None
    swanlab_dir: Path | None = None
    swanlab_mode: str | None = None
    swanlab_api_key: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A completion to be shown.

    row: what rollouts/ has of it; its texts come from models and datasets and are not escaped.
    images: of the prompt, RGB, reduced to at most MAX_IMAGE_SIDE pixels in width and height.
    """

    row: RolloutRow
    images: tuple[Image.Image, ...]


MAX_IMAGE_SIDE = 512


class Logger(Protocol):
    """Receives metrics and samples. See the module's docstring for what it may have besides."""

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step. Steps ascend; 0 is the validation before training."""
        ...

    def log_samples(self, step: int, split: SampleSplit, samples: Sequence[Sample]) -> None:
        """Record some completions of a step, before its metrics."""
        ...
