"""Processes, signals, memory, disks and addresses: what the operating system gives a run."""
