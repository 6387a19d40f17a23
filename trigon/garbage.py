"""How often Python looks for garbage: seldom. Knows nothing else.

By default it looks after every 700 objects (of the kind that can be part of a cycle). Importing torch, transformers and
vLLM makes a million of them, none of which ever dies: a quarter of the time that it takes was spent looking.
"""

from __future__ import annotations

import gc

_OBJECTS = 20_000


def collect_seldom() -> None:
    """Have this process look for garbage less often. What is part of no cycle, as tensors are, goes at once as ever."""
    gc.set_threshold(_OBJECTS, *gc.get_threshold()[1:])
