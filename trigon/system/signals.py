"""Signals that ask a run to stop, and how the processes that a run starts get through them.

systemd, Kubernetes and batch systems send SIGTERM to every process of a job at once. Only the
driver acts on it: the others must live until it has saved. SIGINT is left to Ctrl-C.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

TERMINATION = (signal.SIGTERM, signal.SIGHUP)
"""What a system sends to end a job: before it kills it, and when its terminal is closed."""


class Terminated(KeyboardInterrupt):
    """The run ends at once because of SIGTERM or SIGHUP, as KeyboardInterrupt does after Ctrl-C."""


@contextmanager
def termination_blocked() -> Iterator[None]:
    """Block SIGTERM and SIGHUP in this thread; processes started within keep them blocked.

    A mask is inherited by programs, by their threads and by what they start, and no handler that a
    program installs undoes it. SIGKILL still ends them. A signal that arrives here meanwhile is
    delivered when the context ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TERMINATION)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def outlive_stop_signals() -> None:
    """Do nothing at SIGTERM, SIGHUP and SIGINT in this process, and unblock them.

    What this process starts gets the default actions: a reward function may end its own programs by
    SIGTERM. Handlers, unlike masks and ignored signals, are not inherited by programs, and forked
    processes reset them; the signals are blocked meanwhile, so that none gets lost.
    """
    for number in (*TERMINATION, signal.SIGINT):
        signal.signal(number, _disregard)
        signal.siginterrupt(number, False)  # calls of the system go on, in C libraries as well
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_reset)
    _unblock()


def ignore_stop_signals() -> None:
    """Ignore SIGTERM, SIGHUP and SIGINT in this process, for all of its threads.

    For a worker, in which a library starts threads that have nothing blocked, and whose methods do
    not run in the main thread, the only one in which Python's signal() may be called.
    """
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    for number in (*TERMINATION, signal.SIGINT):
        set_handler(number, int(signal.SIG_IGN))


def _disregard(number: int, frame: object) -> None:
    """Do nothing."""


def _block() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, TERMINATION)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINATION)


def _reset() -> None:
    for number in (*TERMINATION, signal.SIGINT):
        if signal.getsignal(number) is _disregard:
            signal.signal(number, signal.SIG_DFL)
    _unblock()
