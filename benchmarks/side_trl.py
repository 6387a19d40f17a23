"""The TRL side of whole_step.py: train, and wait for a line on standard input before each step.

    python benchmarks/side_trl.py FOLDER PROMPTS N RESPONSE STEPS      (started by whole_step.py)

TRL's fastest settings that run on a CPU: one micro-batch, no recomputation, SDPA, no reference.
With TRL, vLLM's CPU build crashes in the weight sync, and its continuous batching does not support
images.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shared import arbitrary_reward


def main(folder: Path, prompts: int, n: int, response: int, steps: int) -> None:
    """Train, and print the seconds of each step."""
    from trl import GRPOTrainer

    train(folder, GRPOTrainer, prompts=prompts, n=n, response=response, steps=steps)


def train(
    folder: Path,
    trainer_class: Any,
    *,
    prompts: int,
    n: int,
    response: int,
    steps: int,
    changes: Mapping[str, Any] | None = None,
    tools: Sequence[Callable[..., Any]] = (),
    describe: Callable[[], dict[str, float]] = dict,
) -> None:
    """Train, and print of each step the seconds and what describe returns.

    Args: trainer_class: GRPOTrainer. response: sampled tokens of each completion. changes: to the
    arguments of GRPOConfig. tools: functions that the model may call.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig

    class Stepwise(TrainerCallback):
        started = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            describe()  # what it counts begins with the first step

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            print("@waiting", flush=True)
            sys.stdin.readline()
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds = time.perf_counter() - self.started
            print(f"@step {json.dumps({'seconds': seconds} | describe())}", flush=True)

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            length = logs.get("completions/mean_length")
            if length is not None and length != response:
                raise RuntimeError(f"the completions have {length} tokens on average, not {response}")

    def arbitrary_rewards(completions: list[Any], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [arbitrary_reward(text) for text in texts]

    data = Dataset.from_parquet(str(folder / "data.parquet"))
    data = data.map(
        lambda row: {"prompt": [{"role": "user", "content": row["problem"].removeprefix("<image>")}]},
        remove_columns=["problem"],
    )
    make_config = partial(
        GRPOConfig,
        output_dir=str(folder / "trl"),
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        use_vllm=False,
        per_device_train_batch_size=prompts * n,
        gradient_accumulation_steps=1,
        num_generations=n,
        max_completion_length=response,
        generation_kwargs={"min_new_tokens": response},  # as many tokens as the other side
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        beta=0.0,
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
    )
    trainer = trainer_class(
        model=str(folder / "model"),
        reward_funcs=[arbitrary_rewards],
        args=make_config(**changes or {}),
        train_dataset=data,
        tools=list(tools) or None,
        callbacks=[Stepwise()],
    )
    warm_up(trainer.model)
    trainer.train()


def warm_up(model: Any) -> None:
    """Run a generation and a backward without effect, to warm up for the first step.

    Measured: a first step of 45.3 s and a second of 42.6 s with the warm-up; without it the first
    took up to a sixth longer.
    """
    import torch

    few = torch.arange(100, 132)[None]
    model.generate(input_ids=few, attention_mask=torch.ones_like(few), max_new_tokens=4, do_sample=True)
    model(input_ids=few).logits.logsumexp(-1).sum().backward()
    model.zero_grad()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:6]))
