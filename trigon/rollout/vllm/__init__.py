"""vLLM as a rollout engine in this process: on the CPU or a GPU, alone or as one of several ranks.

The only package that imports vLLM, and it does so when an engine starts, not when this package is
imported. Written for vLLM 0.32 and 0.33. Does not depend on trainers or rewards.
"""

from trigon.rollout.vllm.arguments import VllmSettings
from trigon.rollout.vllm.engine import VllmEngine
from trigon.rollout.vllm.process import import_ahead

__all__ = ["VllmEngine", "VllmSettings", "import_ahead"]
