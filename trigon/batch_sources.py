"""Chooses where the batches of a run come from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trigon.batch_source import AheadSource, BatchSource, InLineSource
from trigon.run import Progress, Run
from trigon.stream_source import StreamSource


@contextmanager
def open_source(run: Run, progress: Progress) -> Iterator[BatchSource]:
    """Yield the source of the batches after this progress."""
    if run.max_staleness == 0:
        yield InLineSource(run)
        return
    source = AheadSource(run, progress.ahead) if run.max_staleness == 1 else StreamSource(run, progress.streamed)
    try:
        yield source
    finally:
        source.close()
