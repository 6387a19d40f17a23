"""Checks of the options of environments and tools, and what follows from them.

Files are looked for, and not run. Whether a chat template can be used is checked by data/turns.py.
"""

from __future__ import annotations

from collections import Counter

from trigon.config.names import BUILT_IN_TOOLS
from trigon.config.paths import expand_path, is_python_object, nearest_path
from trigon.config.rewards import reward_specs
from trigon.config.schema import Config
from trigon.system.suggestions import did_you_mean

ENVIRONMENT = "worker.rollout.environment"
TOOLS = "worker.rollout.tools"


def has_episodes(config: Config) -> bool:
    """Return whether completions may have several turns: with an environment, or with tools."""
    return config.worker.rollout.environment is not None or bool(config.worker.rollout.tools)


def _check_environment(config: Config) -> list[str]:
    environment = config.worker.rollout.environment
    return [] if environment is None else _check_code(ENVIRONMENT, environment, "Class")


def _check_tools(config: Config) -> list[str]:
    tools = config.worker.rollout.tools
    problems = [
        problem
        for tool in tools
        if tool not in BUILT_IN_TOOLS
        for problem in _check_code(TOOLS, tool, "function", built_in=BUILT_IN_TOOLS)
    ]
    names = Counter(tool.removeprefix("python:").rpartition(":")[2] for tool in tools)
    problems += [
        f"{TOOLS} has {number} functions of the name {name!r}, by which the model calls them; rename one"
        for name, number in names.items()
        if number > 1
    ]
    return problems


def _check_ends(config: Config) -> list[str]:
    if not (config.worker.rollout.ignore_eos and has_episodes(config)):
        return []
    return [
        "worker.rollout.ignore_eos is true, so that no turn ends and the environment or the tools are never called; "
        "set it to false"
    ]


def _check_reward(config: Config) -> list[str]:
    reward = config.worker.reward
    if config.worker.rollout.environment is not None:
        return []
    return [
        f"worker.reward.{key}=environment is the sum of what an environment gives for each turn; set {ENVIRONMENT}, or "
        f"choose another reward function"
        for key, option in (
            ("reward_function", reward.reward_function),
            ("val_reward_function", reward.val_reward_function),
        )
        if "environment" in reward_specs(option)
    ]


def _check_code(option: str, text: str, form: str, *, built_in: tuple[str, ...] = ()) -> list[str]:
    """Return problems of `file.py:Name` or `module:Name`."""
    if is_python_object(text):
        return []
    place, _, name = text.rpartition(":")
    known = f", or one of the built-in {', '.join(built_in)}" if built_in else ""
    if not place or not name.isidentifier():
        return [f"{option}: {text!r} is not file.py:{form} or module:{form}{known}{did_you_mean(text, built_in)}"]
    if not place.endswith(".py") and all(part.isidentifier() for part in place.split(".")):
        return []  # a module, which only the process that runs it can import
    path = expand_path(place)
    if path.is_file():
        return []
    return [f"{option}: there is no {place} (looked for {path.absolute()}){nearest_path(place)}"]


EPISODE_CHECKS = (_check_environment, _check_tools, _check_ends, _check_reward)
"""Checks that environments and tools can be found, and be used with other options."""


def warn_of_episodes(config: Config) -> list[str]:
    """Return warnings about options of episodes that work against others or have no effect."""
    rollout = config.worker.rollout
    warnings = []
    if has_episodes(config):
        if rollout.name == "vllm" and not rollout.enable_prefix_caching:
            warnings.append(
                "worker.rollout.enable_prefix_caching=false: each turn computes all tokens before it again; set it to "
                "true"
            )
        if rollout.max_turns == 1:
            warnings.append(
                "worker.rollout.max_turns=1 ends each episode with its first turn, and no observation follows it"
            )
        if not rollout.tools and rollout.tool_format != "auto":
            warnings.append(f"worker.rollout.tool_format has no effect without {TOOLS}")
        if rollout.environment is None and rollout.environment_kwargs:
            warnings.append(f"worker.rollout.environment_kwargs has no effect without {ENVIRONMENT}")
        return warnings
    options = (
        ("environment_kwargs", bool(rollout.environment_kwargs)),
        ("tool_format", rollout.tool_format != "auto"),
        ("observation_role", rollout.observation_role is not None),
        ("max_turns", rollout.max_turns != 8),
        ("max_turn_tokens", rollout.max_turn_tokens is not None),
    )
    return [f"worker.rollout.{key} has no effect without {ENVIRONMENT} or {TOOLS}" for key, is_set in options if is_set]
