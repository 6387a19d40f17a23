"""Logs to Weights & Biases."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from trigon.report.delivery import LoggedRun, Sample, SampleSplit
from trigon.report.samples import COLUMNS, cells, image_strip


class WandbLogger:
    """Samples are a table with the images in it."""

    name = "wandb"
    remedy = "Run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline"

    def __init__(self) -> None:
        self._wandb: Any = None
        self._run: Any = None

    def open(self, run: LoggedRun) -> str | None:
        """See delivery.py."""
        import wandb

        self._wandb = wandb
        # The id in the run folder lets a resumed run continue its curves. Steps that it repeats
        # have the same values, and wandb keeps the first. It would drop all steps of a run that
        # starts again from step 0, and the step that is validated by trainer.val_only: both have
        # another id.
        only_validates = run.first_step is None
        run_id = uuid.uuid4().hex[:16]
        if not only_validates:
            run_id = run.read_record(self.name).get("run_id", run_id)
            run.write_record(self.name, {"run_id": run_id})
        # Console capture is off, since completions are on the console; silent, since the place is
        # printed by the caller.
        self._run = wandb.init(
            project=run.project,
            name=run.experiment,
            job_type="validation" if only_validates else "training",
            config=dict(run.config),
            dir=str(run.folder),
            id=run_id,
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )
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
