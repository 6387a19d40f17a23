"""Logs to trackio: a local database, or a Hugging Face Space with TRACKIO_SPACE_ID."""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO, cast

from trigon.report.delivery import LoggedRun, Sample, SampleSplit
from trigon.report.samples import COLUMNS, cells


class TrackioLogger:
    """Samples are a table with the images in it."""

    name = "trackio"
    remedy = "Set TRACKIO_DIR to a writable folder"

    def __init__(self) -> None:
        self._trackio: Any = None
        self._run: Any = None
        self._project = ""

    def open(self, run: LoggedRun) -> str:
        """See delivery.py."""
        import trackio

        self._trackio = trackio
        # trackio resumes the latest run of a name, so the name has to belong to the run folder.
        name = f"{run.experiment}-{hashlib.sha256(str(run.folder.resolve()).encode()).hexdigest()[:6]}"
        with _quiet():  # the place is printed by the caller
            # In a context of its own, the run is not trackio's current one, which trackio finishes
            # again at the end of the process.
            self._run = contextvars.copy_context().run(
                trackio.init,
                project=run.project,
                name=name,
                config=dict(run.config),
                resume="never" if run.first_step == 0 else "allow",
                embed=False,
            )
        return f'trackio show --project "{run.project}" (run {name})'

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
        with _quiet():
            self._run.finish()


LOGGER = TrackioLogger


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop what this thread prints. Other threads, such as the run's, still print."""
    with contextlib.redirect_stdout(cast(TextIO, _OtherThreads(sys.stdout))):
        yield


class _OtherThreads:
    """A stream that drops what the thread that made it writes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
