"""A short supervised warm start: reinforcement learning can only strengthen what a model already does now and then.

Knows the policy and packing; the prompts and the wanted answers are handed in. Nothing here is used once a run has
begun.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from trigon.data.packing import Positions, pack_train, tokens_of
from trigon.models.policy import Policy
from trigon.training.optim import Schedule, make_optimizer
from trigon.types import Prompt, TrainGroup, TrainSequence

Example = tuple[Prompt, tuple[int, ...]]
"""A prompt, and the token ids of its wanted answer, end-of-sequence token included."""

SKILL_WINDOW = 8


def warm_start(
    policy: Policy,
    example: Callable[[int], Example],
    *,
    num_examples: int,
    max_updates: int,
    enough_skill: float,
    batch_size: int,
    schedule: Schedule,
    positions: Positions,
    seed: int,
    on_progress: Callable[[float], None] | None = None,
) -> float:
    """Train the policy in place to give the wanted answers, until it gives enough of them, and return how many.

    example: makes that of a number below num_examples, when it is wanted; most never are.
    The loss is the mean negative log-probability of their tokens. The skill is the probability of a whole wanted
    answer, which is the accuracy of sampling at temperature 1: measured before each update, so on examples not yet
    trained on (as long as they last), and averaged over the last SKILL_WINDOW updates. Skill comes suddenly, after a
    number of updates that differs by seed: hence it, and not their number, ends the warm start. on_progress hears it.
    """
    optimizer = make_optimizer(
        policy.parameters(), strategy="adamw", learning_rate=schedule.peak, betas=(0.9, 0.99), weight_decay=0.0
    )
    rng = random.Random(seed)
    order: list[int] = []

    def draw() -> list[TrainGroup]:
        if len(order) < batch_size:
            order[:] = rng.sample(range(num_examples), num_examples)
        return [_as_group(example(order.pop())) for _ in range(batch_size)]

    recent: deque[float] = deque(maxlen=SKILL_WINDOW)
    with ThreadPoolExecutor(1, thread_name_prefix="examples") as thread:
        upcoming = thread.submit(draw)
        for update in range(1, max_updates + 1):
            groups, upcoming = upcoming.result(), thread.submit(draw)
            [batch] = pack_train(groups, max_tokens=sum(tokens_of(group) for group in groups), positions=positions)
            logprobs = policy(batch.packed).logprobs
            whole = torch.zeros(batch.num_sequences).index_add(0, batch.sequence_index, logprobs.detach())
            recent.append(float(whole.exp().mean()))
            skill = sum(recent) / SKILL_WINDOW  # too low until the window is full
            if on_progress is not None:
                on_progress(skill)
            if skill >= enough_skill:
                break
            loss = -logprobs.mean()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = schedule.learning_rate(update)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return skill


def _as_group(example: Example) -> TrainGroup:
    prompt, answer = example
    ones = torch.ones(len(answer))
    sequence = TrainSequence(
        token_ids=answer,
        loss_mask=ones,
        advantages=ones,
        sampling_logprobs=torch.zeros(len(answer)),
        old_logprobs=None,
        ref_logprobs=None,
    )
    return TrainGroup(prompt=prompt, sequences=(sequence,))
