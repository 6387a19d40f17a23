"""Profiler traces of one update and a few decode steps of selected steps.

The only module that depends on torch's profiler. A trace covers the calling thread and its device;
data threads and reward workers are not in it. A whole step, with every decode step of every
sequence, would be millions of events, which take minutes to write and all of a machine's memory.
Perfetto (ui.perfetto.dev) shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

FOLDER = "profile"
"""Folder of the traces inside the run folder."""

NUM_DECODE_STEPS = 8
"""The most decode steps in a trace."""


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

    folder: the folder of the trace files. rank: the rank of this worker; None for a single process.
    name: what is traced, in the names of the files.
    """

    def __init__(self, folder: Path, *, rank: int | None, name: str = "") -> None:
        self._folder = folder
        self._suffix = "".join(f".{part}" for part in (name, "" if rank is None else f"rank_{rank}") if part)
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
        profile.export_chrome_trace(str(self._folder / f"step_{step:06d}{self._suffix}.json"))


class DecodeTracer:
    """Traces the first NUM_DECODE_STEPS decode steps of some calls of a rollout engine's generate.

    It traces the first call of each of these steps: validations and further rounds of sampling come
    later.
    Writes step_000003.decode.json, or step_000003.decode.rank_1.json on a worker.
    """

    def __init__(self, folder: Path, *, rank: int | None, steps: Collection[int], pool: str = "") -> None:
        """Trace nothing yet.

        folder, rank: as for LocalTracer. pool: name of the workers that have these ranks, in the
        names of the files, if a run has several.
        """
        self._tracer = LocalTracer(folder, rank=rank, name=f"decode.{pool}" if pool else "decode")
        self._steps = set(steps)
        self._step = self._num_left = 0  # of the call, and the decode steps of it to trace
        self._is_started = False

    @contextmanager
    def call(self, step: int) -> Iterator[DecodeTracer]:
        """Trace the decode steps of a call of generate, within this context."""
        self._step, self._num_left = step, NUM_DECODE_STEPS if step in self._steps else 0
        self._steps.discard(step)
        try:
            yield self
        finally:
            self._finish()

    @contextmanager
    def engine_step(self, is_decode: Callable[[], bool]) -> Iterator[None]:
        """Trace a step of the engine, from the first decode step on.

        is_decode: whether the step computes no prompts.
        """
        if self._num_left == 0 or not (self._is_started or is_decode()):
            yield
            return
        if not self._is_started:
            self._is_started = True
            self._tracer.start()
        with marked("decode step"):
            yield
        self._num_left -= 1
        if self._num_left == 0:
            self._finish()

    def _finish(self) -> None:
        """Write the trace, if there is one that is not written."""
        self._num_left = 0
        if self._is_started:
            self._is_started = False
            self._tracer.finish(self._step)


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
