"""What the tests of tests/gpu share: a process for each, figures with their bounds, and models."""

from __future__ import annotations

import multiprocessing
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))


@dataclass(frozen=True)
class Machine:
    """Where a test runs: on "cpu" in small shapes. folder: for models, shared by all tests."""

    device: Literal["cpu", "cuda"]
    num_gpus: int
    folder: Path

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


@dataclass
class Figures:
    """Measured values by name, as text, and those that are outside of their bounds."""

    values: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def __setitem__(self, name: str, value: str) -> None:
        self.values[name] = value

    def at_most(self, name: str, value: float, bound: float) -> None:
        """Record a value, which is wrong above the bound, or if it is not a number."""
        self[name] = f"{value:.2g}"
        if not value <= bound:
            self.wrong.append(f"{name} is {value:.3g}, and may be {bound:.3g}")

    def at_least(self, name: str, value: float, bound: float) -> None:
        """Record a value, which is wrong below the bound, or if it is not a number."""
        self[name] = f"{value:.2g}"
        if not value >= bound:
            self.wrong.append(f"{name} is {value:.3g}, and must be {bound:.3g}")


def in_own_process(function: Callable[..., Figures], *arguments: Any, seconds: float) -> Figures:
    """Return what a function of a test module returns in a new process, which is then ended.

    A crash, a hang or an error of CUDA in one test does not end the others, and each finds all of
    the GPU's memory free. Raises: AssertionError with the traceback of an exception.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        assert receiver.poll(seconds), f"{function.__name__} did not end within {seconds:.0f} s"
        result = receiver.recv()
    except EOFError:
        process.join()
        raise AssertionError(f"the process of {function.__name__} ended with status {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    assert isinstance(result, Figures), result
    return result


def _call(sender: Connection, function: Callable[..., Figures], arguments: tuple[Any, ...]) -> None:
    try:
        sender.send(function(*arguments))
    except BaseException:  # noqa: BLE001
        sender.send(traceback.format_exc())


def host_waits(work: Callable[[], object]) -> list[str]:
    """Call a function, and return where the host waited for a GPU, as "file.py:12".

    Found by torch.cuda.set_sync_debug_mode: copies that block and reads of values, but not
    torch.cuda.synchronize. The line is one of Python's in the thread that called the operation; for
    operations of a backward pass it is that of the call of backward.
    """
    import torch  # the parent of the tests of tests/gpu does not load it

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return [f"{each.filename}:{each.lineno}" for each in caught if "synchronizing CUDA operation" in str(each.message)]
