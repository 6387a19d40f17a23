"""The checks of environments and tools: whether their code loads, and whether an episode begins.

The code runs in the processes of a run, with its time limits and its confinement. No step is taken:
what an environment answers to a model, only a model can show.
"""

from __future__ import annotations

from trigon.assemble.episodes import first_observation
from trigon.assemble.options import max_completion_tokens
from trigon.rollout.episodes import find_long_opening
from trigon.tools.check.result import Findings, Problem
from trigon.tools.check.rewards import build, first_dataset
from trigon.tools.check.rows import show_prompt
from trigon.tools.check.subject import Subject

_ONE_TURN = "none: completions have one turn"


def check_code(subject: Subject) -> Findings:
    """Return whether the environment or the tools can be loaded."""
    episodes = subject.episodes.get()
    if episodes is None:
        return Findings(_ONE_TURN)
    parts, pool = episodes
    pool.ready()
    rollout = subject.given.worker.rollout
    turns = f"at most {rollout.max_turns} turns, in messages of the role {rollout.role_of_observations}"
    if parts.code.environment is not None:
        return Findings(f"{rollout.environment}; {turns}")
    return Findings(f"{', '.join(rollout.tools)}, called in the format {parts.code.tool_format}; {turns}")


def check_episode(subject: Subject) -> Findings:
    """Return what follows the first prompt in its environment, as the model sees it."""
    episodes = subject.episodes.require()
    if episodes is None:
        return Findings(_ONE_TURN)
    parts, pool = episodes
    if parts.code.environment is None:
        return Findings("tools: the first turn follows the prompt")
    config, processors = subject.config.require(), subject.processors.require()
    dataset = first_dataset(subject.datasets.require())
    facts = dataset.usable[0]
    tokens = first_observation(config, processors, parts, pool, build(dataset, facts))
    number, limit = len(tokens.token_ids), max_completion_tokens(config)
    text = show_prompt(processors.tokenizer, tokens.token_ids, collapsed=processors.banned_token_ids)
    problems = []
    if (problem := find_long_opening(number, limit)) is not None:
        message = f"{parts.code.where} cannot begin {facts.name}: {problem}"
        advice = "observations count as tokens of the completion; data.max_pixels makes their images smaller"
        problems.append(Problem("environment.fails", True, message, advice))
    num_images = 0 if tokens.media is None else len(tokens.media.encoded)
    images = f" with {num_images} image{'s' * (num_images > 1)}" if num_images else ""
    summary = f"the first observation for {facts.name} has {number} tokens{images}, of a completion's at most {limit}"
    return Findings(summary, tuple(problems), text)
