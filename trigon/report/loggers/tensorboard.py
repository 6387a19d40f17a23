"""Logs to TensorBoard's event files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trigon.report.delivery import LoggedRun, Sample, SampleSplit
from trigon.report.run import flatten
from trigon.report.samples import as_text, one_per_prompt


class TensorBoardLogger:
    """Samples are text, which TensorBoard shows without images, and images beside it by prompt."""

    name = "tensorboard"
    remedy = "Set TENSORBOARD_DIR to a writable folder"

    def __init__(self) -> None:
        self._writer: Any = None

    def open(self, run: LoggedRun) -> str:
        """See delivery.py."""
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        if all_experiments := os.environ.get("TENSORBOARD_DIR"):
            folder = Path(all_experiments) / run.project / run.experiment
        # purge_step: TensorBoard hides earlier events from this step on.
        self._writer = SummaryWriter(str(folder), purge_step=run.first_step)
        self._writer.add_text("config", _as_code("\n".join(f"{k}: {v}" for k, v in flatten(run.config).items())), 0)
        return str(folder)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """See Logger."""
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def log_samples(self, step: int, split: SampleSplit, samples: Sequence[Sample]) -> None:
        """See Logger."""
        self._writer.add_text(f"samples/{split}", _as_code(as_text(samples)), step)
        for name, image in one_per_prompt(samples):
            self._writer.add_image(f"samples/{split}/{name}", np.asarray(image), step, dataformats="HWC")
        self._writer.flush()

    def close(self) -> None:
        """Write what is pending."""
        self._writer.close()


LOGGER = TensorBoardLogger


def _as_code(text: str) -> str:
    """Return text as a Markdown code block, so that links and images in it are not rendered."""
    return "\n".join(f"    {line}" for line in text.split("\n"))
