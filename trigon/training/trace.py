"""Profiler traces of selected training steps, for Perfetto (ui.perfetto.dev).

The only module that depends on torch's profiler. A trace covers the calling thread and its device;
data threads and reward workers are not in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager
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
        # There is one cycle only. Without acc_events torch 2.11 warns that others lose events.
        self._profile = torch.profiler.profile(activities=activities, acc_events=True)
        self._profile.start()

    def finish(self, step: int) -> None:
        """See Tracer. Writes step_000003.json.gz, or step_000003.rank_1.json.gz on a worker."""
        assert self._profile is not None, "start() comes first"
        profile, self._profile = self._profile, None
        profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        suffix = "" if self._rank is None else f".rank_{self._rank}"
        profile.export_chrome_trace(str(self._folder / f"step_{step:06d}{suffix}.json.gz"))


def marked(name: str) -> AbstractContextManager[object]:
    """Return a context that is a named span in the trace, if one is being recorded."""
    return torch.profiler.record_function(name)


def traced(steps: Iterable[int], chosen: Collection[int], tracer: Tracer) -> Iterator[int]:
    """Yield all steps, and trace the work of the caller during each chosen one."""
    for step in steps:
        if step not in chosen:
            yield step
            continue
        tracer.start()
        try:
            yield step
        finally:  # also if the caller leaves the loop
            tracer.finish(step)
