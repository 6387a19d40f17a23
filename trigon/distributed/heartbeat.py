"""What the driver asks a worker while it works, and what the worker answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeartbeatRequest:
    """What a heartbeat should include besides memory use.

    with_stack: the Python stack of the method that is running. generation: the number of a call of
    Worker.generate whose progress is requested; 0 for none. skip_groups: how many of its finished
    groups the driver already has.
    """

    with_stack: bool = False
    generation: int = 0
    skip_groups: int = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The state of a worker.

    memory_bytes, max_memory_bytes: resident memory, current and peak. stack: the innermost call
    last; "" unless requested. num_samples: completions finished so far in the requested generation.
    groups: its finished groups in the order in which they finished, less skip_groups: the index of
    the prompt and the encoded completions.
    """

    memory_bytes: int
    max_memory_bytes: int
    stack: str
    num_samples: int
    groups: tuple[tuple[int, bytes], ...]
