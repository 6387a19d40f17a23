"""Logs to trackio: a local database, or a Hugging Face Space with TRACKIO_SPACE_ID."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

from trigon.report.loggers.protocol import LoggedRun, LoggerEnvironment, Sample, SampleSplit
from trigon.report.loggers.samples import COLUMNS, cells


class TrackioLogger:
    """Samples are a table with the images in it."""

    name = "trackio"

    def __init__(self, environment: LoggerEnvironment) -> None:
        self._trackio: Any = None
        self._run: Any = None
        self._project = ""

    def open(self, run: LoggedRun) -> str:
        """See protocol.py."""
        import trackio

        self._trackio = trackio
        with contextlib.redirect_stdout(io.StringIO()):  # the place is printed by the caller
            self._run = trackio.init(
                project=run.project,
                name=run.experiment,
                config=dict(run.config),
                resume="never" if run.first_step == 0 else "allow",
                embed=False,
            )
        return f'trackio show --project "{run.project}"'

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """See Logger."""
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, split: SampleSplit, samples: Sequence[Sample]) -> None:
        """See Logger."""
        rows = []
        for sample in samples:
            images = [self._trackio.Image(image, caption="") for image in sample.images]
            rows.append([images, *cells(sample)])  # the dashboard (0.43) shows texts as they are
        table = self._trackio.Table(columns=["images", *COLUMNS], data=rows)
        self._run.log({f"samples/{split}": table}, step=step)

    def close(self) -> None:
        """Write what is pending."""
        self._run.finish()
