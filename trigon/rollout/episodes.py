"""Runs the completions of a call of generate over an engine that samples turns.

The same code for all engines; see TurnEngine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trigon.rollout.protocol import OnGroup
from trigon.rollout.seeds import sample_seed
from trigon.rollout.turns import SampledTurn, TurnEngine, TurnRequest
from trigon.types import Completion, Prompt, SamplingParams, Turn


def run_episodes(
    turns: TurnEngine,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    step: int,
    policy_version: int,
    on_progress: Callable[[int | None], None] | None = None,
    on_group: OnGroup | None = None,
) -> list[list[Completion]]:
    """Return what RolloutEngine.generate returns.

    The caller aborts what is still sampled if this raises.
    Raises: as turns.step, on_progress and on_group.
    """
    groups = _Groups(len(prompts), sampling.n)
    sampled: dict[str, tuple[int, int]] = {}  # (prompt index, sample) by the name of their request
    for prompt_index, prompt in enumerate(prompts):
        vision = prompt.pixels()
        for sample in range(sampling.n):
            name = f"{prompt_index}.{sample}"
            sampled[name] = prompt_index, sample
            seed = sample_seed(sampling.seed, step=step, prompt_id=prompt.prompt_id, sample=sample)
            visions = () if vision is None else (vision,)
            turns.submit(TurnRequest(name, prompt, prompt.token_ids, visions, sampling.max_tokens, seed))
    while sampled:
        ended: list[int] = []  # prompt indices, one for each completion
        for name, turn in turns.step():
            prompt_index, sample = sampled.pop(name)
            ended.append(prompt_index)
            groups.add(prompt_index, sample, None if turn is None else _completion(turn, policy_version))
        if on_progress is not None:
            on_progress(len(ended))
        for prompt_index in dict.fromkeys(ended):
            if groups.is_finished(prompt_index) and on_group is not None:
                on_group(prompt_index, groups.completions(prompt_index))
    return [groups.completions(prompt_index) for prompt_index in range(len(prompts))]


def _completion(turn: SampledTurn, policy_version: int) -> Completion:
    return Completion(
        token_ids=turn.token_ids,
        sampling_logprobs=turn.logprobs,
        finish_reason=turn.finish_reason,
        text=turn.text,
        policy_version=policy_version,
        turns=(Turn(0, len(turn.token_ids), turn.text),),
    )


class _Groups:
    """The completions of one call of generate, as they arrive."""

    def __init__(self, num_prompts: int, n: int) -> None:
        self._completions: list[list[Completion | None]] = [[None] * n for _ in range(num_prompts)]
        self._num_pending = [n] * num_prompts
        self._failed: set[int] = set()  # prompt indices

    def add(self, prompt_index: int, sample: int, completion: Completion | None) -> None:
        """Store a completion; None if the engine failed to sample it."""
        if completion is None:
            self._failed.add(prompt_index)
        self._completions[prompt_index][sample] = completion
        self._num_pending[prompt_index] -= 1

    def is_finished(self, prompt_index: int) -> bool:
        """Return whether no completion of the prompt is pending."""
        return self._num_pending[prompt_index] == 0

    def completions(self, prompt_index: int) -> list[Completion]:
        """Return the completions of a finished prompt, by sample; [] if one failed."""
        if prompt_index in self._failed:
            return []
        completions = [completion for completion in self._completions[prompt_index] if completion is not None]
        assert len(completions) == len(self._completions[prompt_index]), "the engine dropped a request"
        return completions
