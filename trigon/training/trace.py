"""Traces of chosen steps: what this process computed, when and for how long, for Perfetto (ui.perfetto.dev).

Knows torch's profiler, here and nowhere else, and one thread: the one that calls. What data threads and graders do is
in other threads and processes, and in no trace.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

FOLDER = "profile"
"""Where traces lie in the folder of a run."""


class Tracer(Protocol):
    """Traces this process, or all workers."""

    def start(self) -> None:
        """Begin a trace."""
        ...

    def finish(self, step: int) -> None:
        """End it, and write it under the number of a step."""
        ...


class LocalTracer:
    """Traces the calling thread and its device, into a folder. rank: of a worker; None: there is but this process."""

    def __init__(self, folder: Path, *, rank: int | None) -> None:
        self._folder = folder
        self._rank = rank
        self._profile: Any = None

    def start(self) -> None:
        """See Tracer."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()

    def finish(self, step: int) -> None:
        """See Tracer. Writes step_000003.json.gz, of a worker step_000003.rank_1.json.gz."""
        assert self._profile is not None, "start() comes first"
        profile, self._profile = self._profile, None
        profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        suffix = "" if self._rank is None else f".rank_{self._rank}"
        profile.export_chrome_trace(str(self._folder / f"step_{step:06d}{suffix}.json.gz"))


def marked(name: str) -> AbstractContextManager[object]:
    """Return a context that is a named span in a trace, if one is being made."""
    return torch.profiler.record_function(name)


def traced(steps: Iterable[int], chosen: Collection[int], tracer: Tracer) -> Iterator[int]:
    """Yield steps, and trace what the caller does between one that is chosen and the next."""
    for step in steps:
        if step not in chosen:
            yield step
            continue
        tracer.start()
        try:
            yield step
        finally:  # also where the caller breaks off
            tracer.finish(step)
