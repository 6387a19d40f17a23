"""Rows with PIL images, two weighted reward functions, hooks, a logger, and the tables of the run.

trigon tiny tiny && python images_and_hooks.py tiny/model
"""

import random
import sys

from PIL import Image, ImageDraw

import trigon

NAMES = {"red": (200, 30, 30), "green": (20, 130, 40), "blue": (30, 60, 200)}


def make_row(color: str) -> dict:
    image = Image.new("RGB", (84, 84), "white")
    ImageDraw.Draw(image).rectangle((14, 14, 70, 70), fill=NAMES[color])
    return {"prompt": "<image>Which colour is the square?", "answer": color, "images": [image]}


def accuracy(response: str, ground_truth: str) -> float:
    return float(ground_truth in response.lower())


def brevity(reward_input: dict) -> dict:
    length = reward_input["response_length"]
    return {"overall": 1.0 / length, "is_short": float(length < 20)}


class Log:
    """A logger is any object with these two methods."""

    def log_metrics(self, step, metrics):
        print(f"step {step}: accuracy {metrics['reward/accuracy']:.2f}, short {metrics['reward/brevity/is_short']:.2f}")

    def log_samples(self, step, split, samples):
        pass


def on_step(step, metrics):
    if metrics["actor/grad_norm"] > 1000:
        raise RuntimeError(f"the gradient exploded at step {step}")


def on_rollouts(groups):
    first = groups[0]
    best = max(first.rollouts, key=lambda rollout: rollout.score.overall)
    print(f"{first.prompt.prompt_id}: {first.prompt.ground_truth}: {best.completion.text[:40]!r}")


colors = random.Random(0).choices(list(NAMES), k=64)
result = trigon.train(
    model=sys.argv[1],
    data=[make_row(color) for color in colors],
    val_data=[make_row(color) for color in NAMES],
    reward=[(accuracy, 1.0), (brevity, 0.5)],
    on_step=on_step,
    on_rollouts=on_rollouts,
    loggers=[Log()],
    export_to="runs/colours_model",
    options={
        "data": {"rollout_batch_size": 8, "max_prompt_length": 256, "max_response_length": 24, "min_pixels": None},
        "worker": {"actor.optim.lr": 1e-4, "rollout.n": 4},
        "algorithm.disable_kl": True,
        "trainer": {"max_steps": 4, "val_before_train": False, "save_checkpoint_path": "runs/colours"},
    },
)
print(result.metrics.filter(like="reward/"))
rollouts = trigon.load_run("runs/colours").rollouts(splits=["train"])
print(rollouts.groupby("ground_truth")["parts.accuracy"].mean())
print(result.model_folder)
