"""One worker: a process with a device, which is a rank of the sharded trainer and hosts a rollout engine as well.

Weights go from the one to the other inside it. What comes in and goes out is bytes (serialization.py). Does not know
how engines are built: the function that builds them is an argument.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import ray
from torch import Tensor

from trigon.data.processed import ProcessedImages
from trigon.distributed.cluster import enter_environment
from trigon.distributed.preflight import NodeReport
from trigon.distributed.serialization import (
    decode_prompts,
    decode_rollouts,
    decode_train,
    encode_completions,
    encode_logprobs,
)
from trigon.garbage import set_gc_threshold
from trigon.metrics import Metrics
from trigon.rollout.protocol import RolloutEngine
from trigon.training.budget import Budgets, Lengths, tune_engines
from trigon.training.fsdp import TorchProcessGroup
from trigon.training.memory import memory_of
from trigon.training.protocol import LogprobEngine, Sizes, TunableEngine
from trigon.training.trace import LocalTracer
from trigon.types import Completion, Prompt, RolloutGroup, SamplingParams, TrainGroup

Group = TypeVar("Group", RolloutGroup, TrainGroup)


@dataclass(frozen=True, slots=True, eq=False)
class WorkerEngines:
    """What one worker is made of. reference: None where no term needs one.

    replica_rank: its place among the ranks that sample the same prompts together (tensor parallelism); 0 answers.
    """

    trainer: TunableEngine
    reference: LogprobEngine | None
    rollout: RolloutEngine
    images: ProcessedImages | None
    replica_rank: int


class OpenWorkerEngines(Protocol):
    """Builds a worker's engines, in the worker, together with all others."""

    def __call__(self, process_group: TorchProcessGroup) -> WorkerEngines: ...


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """How a worker is. memory_bytes, max_memory_bytes: resident, now and at most. stack: what it is doing, the
    innermost call last; empty unless asked for. samples: completions finished in the generation asked for. groups: of
    its prompts that have ended, the place and the encoded completions, in the order in which they ended.
    """

    memory_bytes: int
    max_memory_bytes: int
    stack: str
    samples: int
    groups: tuple[tuple[int, bytes], ...]


@dataclass(slots=True)
class _Generation:
    """What has come of one call of generate so far; as Vitals tells it. number: 0 for none."""

    number: int
    samples: int = 0
    groups: list[tuple[int, bytes]] = field(default_factory=list)


class Join(Protocol):
    """Makes a worker a rank, once all of them are there, and looks around on its node."""

    def __call__(self) -> tuple[TorchProcessGroup, NodeReport]: ...


class Worker:
    """What runs in the process. Methods come one at a time in one thread; vitals and write_state run beside them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._generation = _Generation(0)
        self._thread: int | None = None
        self._awake: list[ExitStack] = []
        self._write_state: Callable[[], None] | None = None
        self._process_group: TorchProcessGroup
        self._tracer: LocalTracer
        self._engines: WorkerEngines | None = None
        set_gc_threshold()
        faulthandler.enable()  # a crash leaves the stack in this worker's log

    def __repr__(self) -> str:  # what Ray writes before each line that a worker prints
        return f"rank {self._rank}"

    def host(self) -> tuple[str, int]:
        """Return host name and process number."""
        return socket.gethostname(), os.getpid()

    def free_address(self) -> tuple[str, int]:
        """Return the address under which other nodes know this one, and a port that is free there."""
        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, probe.getsockname()[1]

    def prepare(self, environment: Mapping[str, str]) -> None:
        """Set environment variables, in the thread that all other methods will run in."""
        self._thread = threading.get_ident()
        enter_environment(environment, address=ray.util.get_node_ip_address())

    def join(self, join: Join) -> NodeReport:
        """Become a rank, and tell what there is here."""
        self._process_group, surroundings = join()
        return surroundings

    def open(self, open_worker_engines: OpenWorkerEngines) -> Sizes:
        """Build the engines."""
        self._engines = open_worker_engines(self._process_group)
        return self._engines.trainer.sizes()

    def tune_micro_batch(self, lengths: Lengths, known: Budgets | None, shared_by: int) -> Budgets:
        """Find how many tokens a pass may take, and go by that from now on. shared_by: workers on this machine."""
        engines = self._require_engines
        memory = memory_of(self._process_group.device, shared_by=shared_by)
        return tune_engines(engines.trainer, engines.reference, memory, lengths, self._process_group, known=known)

    # -- rollout --

    def wake(self, version: int) -> None:
        """Wake the rollout engine and load the trainer's weights. A collective call of all workers."""
        context = ExitStack()
        context.enter_context(
            self._require_engines.rollout.awake(self._require_engines.trainer.weights(), version=version)
        )
        self._awake.append(context)

    def sleep(self) -> None:
        """Undo the last wake."""
        self._awake.pop().close()

    def generate(self, prompts: bytes, sampling: SamplingParams, step: int, *, number: int) -> None:
        """Sample completions, which vitals() brings when it is asked for this number. Of ranks that sample the same
        prompts together the first has them.
        """
        self._generation = generation = _Generation(number)
        answers = self._require_engines.replica_rank == 0

        def on_progress(finished: int) -> None:
            generation.samples += finished

        def on_group(place: int, completions: Sequence[Completion]) -> None:
            generation.groups.append((place, encode_completions([completions])))

        self._require_engines.rollout.generate(
            self._seen(decode_prompts(prompts)),
            sampling,
            step=step,
            on_progress=on_progress if answers else None,
            on_group=on_group if answers else None,
        )

    # -- training --

    def logprobs(self, groups: bytes) -> bytes:
        """Score this rank's groups under the policy."""
        return self._scored(self._require_engines.trainer.logprobs, groups)

    def full_kl(self, groups: bytes) -> bytes:
        """Compare the policy with the reference on this rank's groups."""
        return self._scored(self._require_engines.trainer.full_kl, groups)

    def reference_logprobs(self, groups: bytes) -> bytes:
        """Score this rank's groups under the reference."""
        assert self._require_engines.reference is not None
        return self._scored(self._require_engines.reference.logprobs, groups)

    def step(self, groups: bytes) -> Metrics:
        """Learn from this rank's groups, with all others; the metrics of all, merged, are those of the update."""
        return self._require_engines.trainer.step(self._with_pixels(decode_train(groups)))

    # -- traces --

    def start_trace(self, folder: Path) -> None:
        """Begin to trace this worker."""
        self._tracer = LocalTracer(folder, rank=self._rank)
        self._tracer.start()

    def finish_trace(self, step: int) -> None:
        """End the trace, and write it."""
        self._tracer.finish(step)

    # -- state --

    def stage_state(self, folder: Path, model_only: bool) -> None:
        """Copy what a checkpoint is to hold into host memory."""
        self._write_state = self._require_engines.trainer.save_state(folder, model_only=model_only)

    @ray.method(concurrency_group="saving")  # type: ignore[untyped-decorator]
    def write_state(self) -> None:
        """Write what was staged, while other methods run."""
        assert self._write_state is not None, "nothing was staged"
        write, self._write_state = self._write_state, None
        write()

    def load_state(self, folder: Path) -> None:
        """Restore this rank's part of what any number of ranks wrote."""
        self._require_engines.trainer.load_state(folder)

    @ray.method(concurrency_group="vitals")  # type: ignore[untyped-decorator]
    def heartbeat(self, *, with_stack: bool = False, generation: int = 0, since: int = 0) -> Heartbeat:
        """Tell how this worker is, while another method runs; and what has come of a generation, less its first groups,
        `since` of them. To be asked twice changes nothing.
        """
        latest = self._generation
        asked = latest if latest.number == generation else _Generation(generation)  # it may not have begun
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        frame = sys._current_frames().get(self._thread) if with_stack and self._thread is not None else None
        return Heartbeat(
            memory_bytes=pages * resource.getpagesize(),
            max_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            stack="" if frame is None else "".join(traceback.format_stack(frame)),
            samples=asked.samples,
            groups=tuple(asked.groups[since:]),
        )

    @property
    def _require_engines(self) -> WorkerEngines:
        assert self._engines is not None, "open() comes first"
        return self._engines

    def _seen(self, prompts: list[Prompt]) -> list[Prompt]:
        """Return prompts with the pixels of their images."""
        return prompts if self._require_engines.images is None else self._require_engines.images.of(prompts)

    def _scored(self, score: Callable[[Sequence[RolloutGroup]], list[list[Tensor]]], encoded: bytes) -> bytes:
        return encode_logprobs(score(self._with_pixels(decode_rollouts(encoded))))

    def _with_pixels(self, groups: list[Group]) -> list[Group]:
        prompts = self._seen([group.prompt for group in groups])
        return [replace(group, prompt=prompt) for group, prompt in zip(groups, prompts, strict=True)]


def actor_of(worker_class: type[Worker]) -> Any:
    """Return Ray's class of actors that hold a worker."""
    return ray.remote(concurrency_groups={"vitals": 1, "saving": 1})(worker_class)
