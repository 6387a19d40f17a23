"""The trackers to which a run can report: MLflow, SwanLab, TensorBoard, Weights & Biases.

Each library is imported only if it is configured, and none of their errors stops a run. Does not
read environment
variables: trigon/cli/train.py does.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from trigon.errors import ConfigError
from trigon.installation import install_command
from trigon.json_files import write_json
from trigon.records.rollouts import RolloutRow
from trigon.report.console import format_number
from trigon.terminal import sanitize

# The package of each tracker, and a hint for when it does not open.
_PACKAGES = {
    "mlflow": "Set MLFLOW_TRACKING_URI to a tracking server (mlflow-skinny keeps no database of its own)",
    "swanlab": "Run `swanlab login`, or set SWANLAB_API_KEY, or SWANLAB_MODE=offline",
    "tensorboard": "Set TENSORBOARD_DIR to a writable folder",
    "wandb": "Run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline",
}
MAX_IMAGE_SIDE = 512
"""Width and height in pixels to which the trackers' images are reduced."""

Images = Mapping[str, Sequence[Image.Image]]
"""The images of some prompts, by prompt id."""

_BUILT_IN = ("console", "file")


@dataclass(frozen=True, slots=True)
class TrackerSettings:
    """The settings of all trackers.

    project, experiment: names of the run. config: the resolved configuration, nested, of JSON
    types. folder: the run folder; a run that resumes in it continues its curves where the tracker
    supports it.
    first_step: the first step that the run will report; what an earlier run reported from there on
    is superseded. 0: it starts from the beginning. None: it supersedes nothing.
    tensorboard_dir: of all experiments, each in project/experiment. None: folder/tensorboard.
    swanlab_dir: None: folder/swanlab. swanlab_mode:
    None: SwanLab's default.
    swanlab_api_key: None: SwanLab is logged in already.
    """

    project: str
    experiment: str
    config: Mapping[str, Any]
    folder: Path
    first_step: int | None
    tensorboard_dir: Path | None
    swanlab_dir: Path | None
    swanlab_mode: str | None
    swanlab_api_key: str | None


class Sink(Protocol):
    """A tracker. Its methods may raise any exception."""

    name: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        ...

    def rollouts(self, step: int, rows: Sequence[RolloutRow], images: Images) -> None:
        """Record some validation completions as plain text, and the images of their prompts."""
        ...

    def close(self) -> None:
        """Send pending data, and close the tracker."""
        ...


def check_sinks(names: Sequence[str]) -> None:
    """Raise ConfigError if a tracker is unknown or not installed. Imports none of them."""
    for name in names:
        if name in _BUILT_IN:
            continue
        if name not in _PACKAGES:
            raise ConfigError(f"trainer.logger names {name!r}; it takes {', '.join((*_BUILT_IN, *_PACKAGES))}")
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"trainer.logger names {name}, which is not installed: run {install_command(name)}, or remove it"
            )


def open_sinks(names: Sequence[str], settings: TrackerSettings) -> list[Sink]:
    """Open the trackers in trainer.logger; "console" and "file" are not trackers and are skipped.

    Raises: ConfigError if one is unknown, not installed, or fails to open (no account, no network).
    """
    check_sinks(names)
    sinks: list[Sink] = []
    for name in names:
        if name in _BUILT_IN:
            continue
        opened: Callable[[TrackerSettings], Sink]
        match name:
            case "mlflow":
                opened = _MLflow
            case "swanlab":
                opened = _SwanLab
            case "tensorboard":
                opened = _TensorBoard
            case "wandb":
                opened = _Wandb
            case _:
                raise AssertionError(name)
        try:
            sinks.append(opened(settings))
        except Exception as error:
            for sink in sinks:
                sink.close()
            raise ConfigError(
                f"trainer.logger names {name}, which failed to open: {type(error).__name__}: {error}. "
                f"{_PACKAGES[name]}, or remove it"
            ) from error
    return sinks


class Trackers:
    """All trackers of a run. One that fails is reported once and not used again.

    Every exception of a tracker is caught: a tracker can fail for reasons outside the run (network,
    disk space, quota, a bug), and all metrics are in metrics.jsonl as well.
    """

    def __init__(self, sinks: Sequence[Sink], *, warn: Callable[[str], None]) -> None:
        self._sinks = list(sinks)
        self._warn = warn

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        self._call(lambda sink: sink.log(step, metrics))

    def any(self) -> bool:
        """Return whether there is a tracker that has not failed."""
        return bool(self._sinks)

    def rollouts(self, step: int, rows: Sequence[RolloutRow], images: Images) -> None:
        """Record some validation completions, and the images of their prompts, reduced."""
        reduced = {prompt_id: [_reduced(image) for image in each] for prompt_id, each in images.items()}
        self._call(lambda sink: sink.rollouts(step, rows, reduced))

    def close(self) -> None:
        """Close all trackers."""
        self._call(lambda sink: sink.close())
        self._sinks.clear()

    def _call(self, method: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                method(sink)
            except Exception as error:  # noqa: BLE001  (see the class docstring)
                self._sinks.remove(sink)
                self._warn(
                    f"{sink.name} failed and is no longer used: {type(error).__name__}: {error}. Training continues; "
                    "all metrics are in metrics.jsonl"
                )


class _TensorBoard:
    name = "tensorboard"

    def __init__(self, settings: TrackerSettings) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = settings.folder / "tensorboard"
        if settings.tensorboard_dir is not None:
            folder = settings.tensorboard_dir / settings.project / settings.experiment
        # purge_step: TensorBoard hides earlier events from this step on.
        self._writer: Any = SummaryWriter(str(folder), purge_step=settings.first_step)
        self._writer.add_text("config", _as_code("\n".join(f"{k}: {v}" for k, v in _flat(settings.config).items())), 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def rollouts(self, step: int, rows: Sequence[RolloutRow], images: Images) -> None:
        self._writer.add_text("val/generations", _as_code(_as_text(rows)), step)
        for name, image in _named(images):
            self._writer.add_image(f"val/images/{name}", np.asarray(image), step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    name = "wandb"

    def __init__(self, settings: TrackerSettings) -> None:
        import wandb

        self._wandb: Any = wandb
        # The id depends on the run folder only, so that a resumed run continues its curves. Steps
        # that it repeats have the same values, and wandb keeps the first. Console capture is off,
        # since completions are on the console.
        self._run: Any = wandb.init(
            project=settings.project,
            name=settings.experiment,
            config=dict(settings.config),
            dir=str(settings.folder),
            id=hashlib.sha256(str(settings.folder.resolve()).encode()).hexdigest()[:16],
            resume="allow",
            settings=wandb.Settings(console="off"),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def rollouts(self, step: int, rows: Sequence[RolloutRow], images: Images) -> None:
        header = ["prompt_id", "prompt", "response", "ground_truth", "reward"]
        cells = [[*_texts(row), row.reward] for row in rows]
        media: dict[str, Any] = {"val/generations": self._wandb.Table(columns=header, data=cells)}
        if images:
            media["val/images"] = [self._wandb.Image(image, caption=name) for name, image in _named(images)]
        self._run.log(media, step=step)

    def close(self) -> None:
        self._run.finish()


class _SwanLab:
    name = "swanlab"

    def __init__(self, settings: TrackerSettings) -> None:
        import swanlab

        if settings.swanlab_api_key is not None:
            swanlab.login(settings.swanlab_api_key)
        self._swanlab: Any = swanlab
        mode = {} if settings.swanlab_mode is None else {"mode": settings.swanlab_mode}
        swanlab.init(
            project=settings.project,
            experiment_name=settings.experiment,
            config=dict(settings.config),
            logdir=str(settings.swanlab_dir or settings.folder / "swanlab"),
            **mode,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def rollouts(self, step: int, rows: Sequence[RolloutRow], images: Images) -> None:
        texts = [
            self._swanlab.Text(_as_text([row]), caption=sanitize(row.prompt_id, max_characters=100)) for row in rows
        ]
        media: dict[str, Any] = {"val/generations": texts}
        if images:
            media["val/images"] = [self._swanlab.Image(image, caption=name) for name, image in _named(images)]
        self._swanlab.log(media, step=step)

    def close(self) -> None:
        self._swanlab.finish()


class _MLflow:
    name = "mlflow"

    def __init__(self, settings: TrackerSettings) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        mlflow.set_experiment(settings.project)
        # The id in the run folder lets a resumed run continue its curves.
        record = settings.folder / "mlflow.json"
        server = hashlib.sha256(mlflow.get_tracking_uri().encode()).hexdigest()  # the address may hold a password
        saved = json.loads(record.read_text(encoding="utf-8")) if record.exists() and settings.first_step != 0 else {}
        if saved.get("server_sha256") == server:
            mlflow.start_run(run_id=saved["run_id"])
            return  # MLflow rejects a parameter that has another value
        run = mlflow.start_run(run_name=settings.experiment)
        write_json(record, {"run_id": run.info.run_id, "server_sha256": server})
        mlflow.log_params({key: str(value)[:500] for key, value in _flat(settings.config).items()})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def rollouts(self, step: int, rows: Sequence[RolloutRow], images: Images) -> None:
        self._mlflow.log_text(_as_text(rows), f"val_generations/step_{step:06d}.txt")
        for name, image in _named(images):
            self._mlflow.log_image(image, f"val_generations/step_{step:06d}/{name}.png")

    def close(self) -> None:
        self._mlflow.end_run()


def _named(images: Images) -> list[tuple[str, Image.Image]]:
    """Return each image with a name of letters, digits and -, such as "test-17-0"."""
    return [
        (f"{re.sub(r'[^A-Za-z0-9]+', '-', prompt_id)}-{number}", image)
        for prompt_id, each in images.items()
        for number, image in enumerate(each)
    ]


def _reduced(image: Image.Image) -> Image.Image:
    """Return an image of at most MAX_IMAGE_SIDE pixels in width and height."""
    small = image.copy()
    small.thumbnail((MAX_IMAGE_SIDE, MAX_IMAGE_SIDE))
    return small


def _texts(row: RolloutRow) -> list[str]:
    return [
        sanitize(text, max_characters=20_000)
        for text in (row.prompt_id, row.prompt, row.response, str(row.ground_truth))
    ]


def _as_text(rows: Sequence[RolloutRow]) -> str:
    blocks = []
    for row in rows:
        prompt_id, prompt, response, ground_truth = _texts(row)
        blocks.append(
            f"{prompt_id}\nprompt: {prompt}\ncompletion: {response}\nground truth: {ground_truth}\n"
            f"reward: {format_number(row.reward)}\n"
        )
    return "\n".join(blocks)


def _as_code(text: str) -> str:
    """Return text as a Markdown code block, so that links and images in it are not rendered."""
    return "\n".join(f"    {line}" for line in text.split("\n"))


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return flat
