"""Trigon's side of episodes.py --trl: as side_trigon.py, with a tool that each turn calls.

    python benchmarks/side_trigon_episodes.py FOLDER TOOL PROMPTS N TURNS TURN_TOKENS STEPS

A model with random weights calls no tool: the text of each turn is replaced by a call before it is
given to the tools.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from episodes import ENVIRONMENT, SHAPE, cut_turns_end
from shared import Trained, count_different, images_processed
from side_trigon import options, train

from trigon.rollout.episodes import Episodes
from trigon.rollout.vllm import engine
from trigon.training.local import LocalTrainEngine
from trigon.types import TrainGroup

MAX_OBSERVED = 1024
"""More tokens than the observations of a completion have."""

MAX_PROMPT = 1024
"""More tokens than a prompt has, with the description of the tool."""


def main(folder: Path, tool: str, prompts: int, n: int, turns: int, turn_tokens: int, steps: int) -> None:
    """Train, and print of each step the seconds, and what was sampled and processed."""
    sampled: dict[str, list[tuple[int, Sequence[int]]]] = {}  # the turns of each completion, by prompt and sample
    different = 0

    def record(output: Any) -> None:
        completion, turn, _ = output.request_id.rsplit(".", 2)
        found = sampled.setdefault(completion, [])
        if int(turn) == len(found):  # not those of the parity probe, which follow
            found.append((len(output.prompt_token_ids), list(output.outputs[0].token_ids)))

    class CallingEpisodes(Episodes):
        def decode(self, token_ids: Sequence[int]) -> str:
            return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': {}})}\n</tool_call>"

    step = LocalTrainEngine.step

    def comparing_step(trainer: LocalTrainEngine, groups: Sequence[TrainGroup]) -> Any:
        nonlocal different
        different += count_different(sampled.values(), [each for group in groups for each in trained(group)])
        return step(trainer, groups)

    def describe() -> dict[str, float]:
        nonlocal different
        found = {
            "sampled": sum(len(token_ids) for turns in sampled.values() for _, token_ids in turns),
            "different": different,
            "processed": len(processed),
            "images": prompts + (prompts * n * (turns - 1) if tool == "look" else 0),
        }
        sampled.clear()
        processed.clear()
        different = 0
        return found

    shape = replace(SHAPE, prompt=MAX_PROMPT, response=turns * turn_tokens + MAX_OBSERVED, n=n, prompts=prompts)
    changes = [
        f"worker.rollout.tools={json.dumps([f'{ENVIRONMENT}:{tool}'])}",
        "worker.rollout.ignore_eos=false",
        f"worker.rollout.max_turns={turns}",
        f"worker.rollout.max_turn_tokens={turn_tokens}",
    ]
    with ExitStack() as stack:
        processed = stack.enter_context(images_processed())
        stack.enter_context(cut_turns_end(record))
        stack.enter_context(mock.patch.object(engine, "Episodes", CallingEpisodes))
        stack.enter_context(mock.patch.object(LocalTrainEngine, "step", comparing_step))
        train([*options(folder, shape, steps), *changes], steps, describe)


def trained(group: TrainGroup) -> list[Trained]:
    """Return the sequences of a group, with the prompt's tokens."""
    found = []
    for sequence in group.sequences:
        trainable = [False] * (len(group.prompt.token_ids) + len(sequence.token_ids))
        in_loss = iter(sequence.loss_mask.bool().tolist())
        for start, end in sequence.sampled or ((0, len(sequence.token_ids)),):
            for index in range(start, end):
                trainable[len(group.prompt.token_ids) + index] = next(in_loss)
        found.append(Trained(group.prompt.token_ids + sequence.token_ids, trainable))
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:8]))
