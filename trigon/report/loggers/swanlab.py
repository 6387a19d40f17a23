"""Logs to SwanLab."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from trigon.report.delivery import LoggedRun, Sample, SampleSplit
from trigon.report.samples import as_html


class SwanLabLogger:
    """Samples are an HTML table with the images in it, since SwanLab's own tables take none."""

    name = "swanlab"
    remedy = "Run `swanlab login`, or set SWANLAB_API_KEY, or SWANLAB_MODE=offline"

    def __init__(self) -> None:
        self._swanlab: Any = None
        self._run: Any = None

    def open(self, run: LoggedRun) -> None:
        """See delivery.py. SwanLab itself prints where the results can be seen."""
        import swanlab

        if (key := os.environ.get("SWANLAB_API_KEY")) is not None:
            swanlab.login(key)
        self._swanlab = swanlab
        on_interrupt = signal.getsignal(signal.SIGINT)
        self._run = swanlab.init(
            project=run.project,
            name=run.experiment,
            config=dict(run.config),
            log_dir=os.environ.get("SWANLAB_DIR") or str(run.folder / "swanlab"),
            mode=os.environ.get("SWANLAB_MODE"),
        )
        # SwanLab's own handler (0.8) would send its data before Ctrl-C could end the run.
        signal.signal(signal.SIGINT, on_interrupt)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """See Logger."""
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, split: SampleSplit, samples: Sequence[Sample]) -> None:
        """See Logger."""
        self._run.log({f"samples/{split}": self._swanlab.Html(as_html(samples))}, step=step)

    def close(self) -> None:
        """Send what is pending."""
        try:
            self._run.finish()
        except ValueError as error:
            # At its end finish (0.8) restores SIGINT's handler, which only the main thread can.
            if "main thread" not in str(error):
                raise


LOGGER = SwanLabLogger
