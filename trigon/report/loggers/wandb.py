"""Logs to Weights & Biases."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from trigon.report.delivery import LoggedRun, LoggerEnvironment, Sample, SampleSplit
from trigon.report.samples import COLUMNS, cells, image_strip
from trigon.system.files import read_json_object, write_json


class WandbLogger:
    """Samples are a table with the images in it."""

    name = "wandb"
    remedy = "Run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline"

    def __init__(self, environment: LoggerEnvironment) -> None:
        self._wandb: Any = None
        self._run: Any = None

    def open(self, run: LoggedRun) -> str | None:
        """See delivery.py."""
        import wandb

        self._wandb = wandb
        # The id in the run folder lets a resumed run continue its curves. Steps that it repeats
        # have the same values, and wandb keeps the first; a run that starts again from step 0 has
        # another id, since wandb would drop its steps up to the last one of the earlier run.
        record = run.folder / "wandb.json"
        if run.first_step == 0:
            run_id = uuid.uuid4().hex[:16]
        elif record.exists():
            run_id = read_json_object(record)["run_id"]
        else:  # the id that the versions without this file used
            run_id = hashlib.sha256(str(run.folder.resolve()).encode()).hexdigest()[:16]
        # Console capture is off, since completions are on the console; silent, since the place is
        # printed by the caller.
        self._run = wandb.init(
            project=run.project,
            name=run.experiment,
            config=dict(run.config),
            dir=str(run.folder),
            id=run_id,
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )
        write_json(record, {"run_id": run_id})
        return str(self._run.dir if self._run.settings.mode == "offline" else self._run.url)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """See Logger."""
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, split: SampleSplit, samples: Sequence[Sample]) -> None:
        """See Logger."""
        rows = [[self._image(sample), *cells(sample)] for sample in samples]
        table = self._wandb.Table(columns=["images", *COLUMNS], data=rows)
        self._run.log({f"samples/{split}": table}, step=step)

    def _image(self, sample: Sample) -> Any:
        strip = image_strip(sample.images)
        return None if strip is None else self._wandb.Image(strip)

    def close(self) -> None:
        """Send what is pending."""
        self._run.finish()


LOGGER = WandbLogger
