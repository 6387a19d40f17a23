"""Defaults of scoring that its command names in its help, which loads no numpy."""

from __future__ import annotations

OVERALL = "overall"
TIMEOUT_SECONDS = 10.0
"""Default time limit of a completion, that of worker.reward.timeout_seconds."""
MAX_MEMORY_GB = 16.0
"""Default memory limit of a reward worker in GiB, that of worker.reward.max_memory_gb."""
