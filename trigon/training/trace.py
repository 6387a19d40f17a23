"""Profiler traces of the first update of selected steps, for Perfetto (ui.perfetto.dev).

The only module that depends on torch's profiler. A trace covers the calling thread and its device;
data threads and reward workers are not in it. A whole step, with every decoding step of every
sequence, would be millions of events, which take minutes to write and all of a machine's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

FOLDER = "profile"
"""Folder of the traces inside the run folder."""


class Tracer(Protocol):
    """Traces this process, or all workers."""

    def start(self) -> None:
        """Start a trace."""
        ...

    def finish(self, step: int) -> None:
        """Stop the trace, and write it to a file named after the step."""
        ...


class LocalTracer:
    """Traces the calling thread and its device. Satisfies Tracer.

    folder: of the trace files. rank: of this worker; None for a single process.
    """

    def __init__(self, folder: Path, *, rank: int | None) -> None:
        self._folder = folder
        self._rank = rank
        self._profile: Any = None

    def start(self) -> None:
        """See Tracer."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        # Events are written and not analysed, which would take minutes for each million.
        config = torch.profiler._ExperimentalConfig(trace_only=True)  # type: ignore[attr-defined]
        self._profile = torch.profiler.profile(activities=activities, experimental_config=config)
        self._profile.start()

    def finish(self, step: int) -> None:
        """See Tracer. Writes step_000003.json, or step_000003.rank_1.json on a worker."""
        assert self._profile is not None, "start() comes first"
        profile, self._profile = self._profile, None
        profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        suffix = "" if self._rank is None else f".rank_{self._rank}"
        profile.export_chrome_trace(str(self._folder / f"step_{step:06d}{suffix}.json"))


def marked(name: str) -> AbstractContextManager[object]:
    """Return a context that is a named span in the trace, if one is being recorded."""
    return torch.profiler.record_function(name)


@contextmanager
def traced(tracer: Tracer, step: int, name: str) -> Iterator[None]:
    """Trace the work of this context, as a span of this name."""
    tracer.start()
    try:
        with marked(name):
            yield
    finally:
        tracer.finish(step)
