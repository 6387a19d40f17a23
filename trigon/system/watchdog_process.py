"""The process that ends a run which hangs: it watches the driver from outside.

A thread of the driver could not: C code that holds the interpreter lock stops all of its threads.
Imports the standard library and small modules only, so that it starts fast and stays small. The
driver's side is watchdog.py.

    driver                                          this process
    shared memory  phase, its limit, beats    -->   reads it twice a second
    stdin          never written              -->   ends when it closes: the driver has ended
    stdout         one line of JSON each      <--   {"hang": ...}, then {"exit": ...}
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trigon.system.processes import ProcessTree, Started, start_of
from trigon.system.signals import outlive_stop_signals
from trigon.system.stacks import dump_stacks, is_stopped, name_of

RECORD_BYTES = 1024
_FIELDS = struct.Struct("<QQdii")  # sequence (odd while it is written), beats, limit, status, bytes of the name
_POLL_SECONDS = 0.5
_EXIT_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Record:
    """What the driver does. limit: seconds without a beat; 0: none. beats: of progress so far.

    status: 0; or the exit status of a run that is to end within the limit in any case.
    """

    name: str
    beats: int
    limit: float
    status: int


def write_record(memory: mmap.mmap, sequence: int, record: Record) -> None:
    """Write a record, of which the reader never sees a part. sequence: even, higher each time."""
    name = record.name.encode()[: RECORD_BYTES - _FIELDS.size]
    fields = (record.beats, record.limit, record.status, len(name))
    _FIELDS.pack_into(memory, 0, sequence - 1, *fields)
    memory[_FIELDS.size : _FIELDS.size + len(name)] = name
    _FIELDS.pack_into(memory, 0, sequence, *fields)


def read_record(memory: mmap.mmap) -> Record | None:
    """Return the record, or None while it is being written."""
    sequence, beats, limit, status, num_bytes = _FIELDS.unpack_from(memory, 0)
    name = memory[_FIELDS.size : _FIELDS.size + num_bytes].decode(errors="replace")
    if sequence % 2 or _FIELDS.unpack_from(memory, 0)[0] != sequence:
        return None
    return Record(name, beats, limit, status)


def main(memory_fd: int, driver: int, file: str, unwind_seconds: float, others: Sequence[Started]) -> None:
    """Watch until the driver ends.

    file: where stacks are written. unwind_seconds: how long a driver that was told of a hang may
    take to end by itself. others: processes below the driver that are not the run's.
    """
    outlive_stop_signals()
    memory = mmap.mmap(memory_fd, RECORD_BYTES)
    last, waited, before = None, 0.0, time.monotonic()
    while not _driver_closed(_POLL_SECONDS):
        now = time.monotonic()
        # Time in which this process or the driver was stopped, as by Ctrl-Z, does not count.
        passed, before = min(now - before, 4 * _POLL_SECONDS), now
        record = read_record(memory)
        if record is None or record != last or is_stopped(driver):
            last, waited = record or last, 0.0 if record != last else waited
            continue
        waited += passed
        if record.limit and waited > record.limit:
            _end(record, driver, Path(file), unwind_seconds, others)
            return


def _end(record: Record, driver: int, file: Path, unwind_seconds: float, others: Sequence[Started]) -> None:
    """Write the stacks, and let the driver end; kill all processes of the run if it does not."""
    processes = [driver, *_processes_of_run(driver, others)]
    what = f"{record.name} made no progress for {record.limit:g} s"
    if record.status == 0:
        stopped = [f"process {pid} ({name_of(pid)}) is STOPPED" for pid in processes if is_stopped(pid)]
        stacks = dump_stacks(processes)
        where = f"the stacks of all threads of its {len(processes)} processes are in {file}"
        try:
            file.write_text(f"{what}\n\n{stacks}", encoding="utf-8")
        except OSError as error:
            where = f"the stacks cannot be written to {file} ({error}):\n{stacks}"
        _send({"hang": "; ".join([what, *stopped]), "where": where})
        if _driver_closed(unwind_seconds):
            return
        what = f"{'; '.join([what, *stopped])}; {where}. It did not end within {unwind_seconds:g} s more"
    os.write(2, f"WorkerError: {what}: killing the run\n".encode())
    for pid in _processes_of_run(driver, others):
        _kill(pid)
    _send({"exit": record.status or 1})
    if not _driver_closed(_EXIT_SECONDS):
        _kill(driver)


def _processes_of_run(driver: int, others: Sequence[Started]) -> list[int]:
    """Return the processes below the driver, without this one and the others."""
    running = [pid for pid, started in others if start_of(pid) == started]  # an id may be used again
    return ProcessTree().below(driver, without=(os.getpid(), *running))


def _driver_closed(seconds: float) -> bool:
    """Wait so long, or until the driver has closed its end of stdin; return whether it has."""
    return bool(select.select([0], [], [], seconds)[0])


def _send(message: dict[str, object]) -> None:
    try:
        os.write(1, json.dumps(message).encode() + b"\n")
    except OSError:  # the driver has ended
        return


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
