"""The TRL side of episodes.py --trl: as side_trl.py, with a tool that each turn calls.

    python benchmarks/side_trl_episodes.py FOLDER TOOL PROMPTS N TURNS TURN_TOKENS STEPS

The tool is asynchronous, so that TRL runs the calls of a turn at the same time. A model with random
weights calls no tool: what TRL parses calls with returns one for each turn.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import slow_environment
from shared import Trained, count_different, images_processed
from side_trl import train
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

MAX_OBSERVED = 1024
"""More tokens than the observations of a completion have."""


class RecordingTrainer(GRPOTrainer):  # type: ignore[misc]
    """Compares the tokens that were sampled with those of the loss."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.sampled: list[list[tuple[int, list[int]]]] = []  # the turns of each completion
        self.different = 0
        super().__init__(*arguments, **options)

    def _generate_single_turn(self, prompt_ids: Any, *arguments: Any, **options: Any) -> Any:
        completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *arguments, **options)
        turns = [
            (len(before), list(after[: self.generation_config.max_new_tokens]))
            for before, after in zip(prompt_ids, completion_ids, strict=True)
        ]
        if not self.sampled:
            self.sampled.extend([] for _ in turns)
        for sequence, turn in zip(self.sampled, turns, strict=True):  # all of them continue
            sequence.append(turn)
        return completion_ids, logprobs

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        trained = []
        for row in range(len(inputs["prompt_ids"])):
            is_prompt, is_completion = inputs["prompt_mask"][row].bool(), inputs["completion_mask"][row].bool()
            prompt, completion = inputs["prompt_ids"][row][is_prompt], inputs["completion_ids"][row][is_completion]
            in_loss = inputs["tool_mask"][row][is_completion].bool()
            trained.append(
                Trained([*prompt.tolist(), *completion.tolist()], [*[False] * len(prompt), *in_loss.tolist()])
            )
        self.different += count_different(self.sampled, trained)
        return super()._compute_loss(model, inputs)


def main(folder: Path, tool: str, prompts: int, n: int, turns: int, turn_tokens: int, steps: int) -> None:
    """Train, and print of each step the seconds, and what was sampled and processed."""
    config = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))
    function = getattr(slow_environment, f"{tool}_async")
    function.__name__ = tool
    trainers: list[RecordingTrainer] = []

    def make(*arguments: Any, **options: Any) -> RecordingTrainer:
        trainers.append(RecordingTrainer(*arguments, **options))
        return trainers[0]

    def parse(tokenizer: Any, token_ids: Any, **_: Any) -> dict[str, Any]:
        content = tokenizer.decode(token_ids, skip_special_tokens=True)
        call = {"type": "function", "function": {"name": tool, "arguments": {}}}
        return {"role": "assistant", "content": content, "tool_calls": [call]}

    def describe() -> dict[str, float]:
        [trainer] = trainers
        sequences = len(trainer.sampled)
        found = {
            "sampled": sum(len(token_ids) for sequence in trainer.sampled for _, token_ids in sequence),
            "different": trainer.different,
            "processed": len(processed),
            "images": prompts + (sequences * (turns - 1) if tool == "look" else 0),
        }
        trainer.sampled.clear()
        processed.clear()
        trainer.different = 0
        return found

    with images_processed() as processed, mock.patch.object(grpo_trainer, "parse_response", parse):
        train(
            folder,
            make,
            prompts=prompts,
            n=n,
            response=turns * turn_tokens,
            steps=steps,
            changes={
                "max_completion_length": turns * turn_tokens + MAX_OBSERVED,
                "max_tool_calling_iterations": turns - 1,
                "generation_kwargs": {
                    "min_new_tokens": turn_tokens,
                    "max_new_tokens": turn_tokens,
                    # With random weights it may sample one, which the next turn has no image for.
                    "suppress_tokens": [config["image_token_id"], config["video_token_id"]],
                },
            },
            tools=[function],
            describe=describe,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:8]))
