"""Every pair of capabilities works together: runs of a few steps that have many of them each."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from support.runs import finish, kill, lines, log_of, num_lines, rollouts, start, wait_for
from support.videos import make_video

pytestmark = pytest.mark.extended

SEPARATE = ("worker.hybrid_engine=false",)
OPTIONS = {
    "environment": ("worker.rollout.max_turns=3", "worker.rollout.max_turn_tokens=40"),
    "tools": ("worker.rollout.tools=[crop]",),
    "tensor parallel 2": ("worker.rollout.tensor_parallel_size=2",),
    "separate pools": SEPARATE,
    "staleness 1": (*SEPARATE, "algorithm.max_staleness=1"),
    "staleness 4, continue": (*SEPARATE, "algorithm.max_staleness=4", "worker.rollout.partial=continue"),
    "staleness 4, finish": (*SEPARATE, "algorithm.max_staleness=4"),
    "oversampling": ("worker.rollout.oversampling=0.5",),
    "online filtering": (
        "algorithm.online_filtering=true",
        "algorithm.filter_low=0.1",
        "algorithm.filter_high=100",
        "trainer.max_try_make_batch=0",
    ),
    "remax": ("algorithm.adv_estimator=remax",),
    "gae": (
        "algorithm.adv_estimator=gae",
        "worker.critic.global_batch_size=2",
        "worker.critic.optim.lr=1e-3",
        "worker.critic.fsdp.mp_param_dtype=fp32",
    ),
    "LoRA": ("worker.actor.model.lora.rank=4", "worker.actor.optim.lr=1e-3"),
    "video": ("data.video_fps=5", "data.max_video_frames=6"),
    "Ulysses 2": ("worker.actor.ulysses_sequence_parallel_size=2",),
    "2 workers": ("trainer.n_gpus_per_node=2",),
    "resume after SIGKILL": (),
}
EXCLUSIVE = (
    ("separate pools", "staleness 1", "staleness 4, continue", "staleness 4, finish"),
    ("remax", "gae"),
)
"""What a run has one of: a bound of staleness, which needs separate pools; an estimator."""

RUNS = (
    ("environment", "tools", "tensor parallel 2", "staleness 4, finish", "oversampling", "online filtering", "remax",
     "LoRA", "video", "Ulysses 2", "2 workers", "resume after SIGKILL"),
    ("tools", "tensor parallel 2", "staleness 4, continue", "oversampling", "online filtering", "gae", "LoRA", "video",
     "Ulysses 2", "2 workers", "resume after SIGKILL"),
    ("environment", "tensor parallel 2", "staleness 1", "oversampling", "online filtering", "gae", "LoRA", "video",
     "Ulysses 2", "2 workers", "resume after SIGKILL"),
    ("tools", "tensor parallel 2", "separate pools", "oversampling", "online filtering", "remax", "LoRA", "video",
     "Ulysses 2", "2 workers", "resume after SIGKILL"),
    ("environment", "separate pools", "gae", "video", "2 workers", "resume after SIGKILL"),
    ("tools", "staleness 4, finish", "oversampling", "online filtering", "gae", "video", "resume after SIGKILL"),
    ("environment", "tensor parallel 2", "staleness 4, continue", "remax", "LoRA", "video", "Ulysses 2", "2 workers"),
    ("tools", "tensor parallel 2", "staleness 1", "remax", "2 workers", "resume after SIGKILL"),
    # In one process, where a run takes seconds.
    ("environment", "oversampling", "online filtering", "remax", "LoRA", "resume after SIGKILL"),
)  # fmt: skip

ENVIRONMENT = """
import random

from PIL import Image


class Drawing:
    def reset(self, row):
        self.random = random.Random(row["seed"])
        self.step_number = 0
        return self._observe("Here is a picture.")

    def step(self, action):
        self.step_number += 1
        return self._observe("And another one."), sum(map(ord, action)) % 7 / 7, self.step_number == 2

    def _observe(self, text):
        colour = tuple(self.random.randrange(256) for _ in range(3))
        return {"text": text, "images": [Image.new("RGB", (56, 56), colour)]}
"""
STEPS = 3


def test_each_pair_is_in_a_run_or_excludes_each_other():
    covered = {pair for run in RUNS for pair in itertools.combinations(sorted(run), 2)}
    exclusive = {pair for each in EXCLUSIVE for pair in itertools.combinations(sorted(each), 2)}
    assert covered | exclusive == set(itertools.combinations(sorted(OPTIONS), 2))
    assert not covered & exclusive


@pytest.fixture(scope="module")
def parts(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an environment, and rows with images and with videos that have seeds."""
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "drawing.py").write_text(ENVIRONMENT)
    texts = [{"problem": f"What is {seed} + 1?", "answer": str(seed + 1), "seed": seed} for seed in range(24)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    videos = []
    for row in texts:
        name = f"{row['seed'] % 4}.mp4"
        (folder / name).write_bytes(make_video(frames=8 + 4 * (row["seed"] % 4), first=row["seed"] % 4))
        videos.append({**row, "problem": f"<video>{row['problem']}", "videos": name})
    (folder / "video.jsonl").write_text("".join(json.dumps(row) + "\n" for row in videos))
    return folder


def options_of(run: tuple[str, ...], parts: Path) -> list[str]:
    """Return the options of a run."""
    options = [
        f"data.train_files={parts / ('video' if 'video' in run else 'text')}.jsonl",
        "data.val_files=",
        "trainer.val_before_train=false",
        "trainer.val_freq=-1",
        "trainer.save_freq=1",
        "data.rollout_batch_size=4",
        "data.max_prompt_length=700",  # descriptions of tools take most of it
        "data.max_response_length=300",
        "worker.rollout.n=2",
        "worker.rollout.ignore_eos=false",
        *(option for name in run for option in OPTIONS[name]),
    ]
    if "environment" in run:
        options.append(f"worker.rollout.environment={parts / 'drawing.py'}:Drawing")
    samplers = 2 if "tensor parallel 2" in run else 1
    if any(option in options for option in SEPARATE):
        options.append(f"worker.rollout.n_gpus_per_node={samplers}")
    return options


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.long(but=["8"])
@pytest.mark.parametrize("number", range(len(RUNS)), ids=str)
def test_capabilities_compose(made: Path, parts: Path, tmp_path: Path, number: int) -> None:
    run, folder = RUNS[number], tmp_path / "run"
    options = options_of(run, parts)
    process = start(made, folder, *options, steps=STEPS)
    if "resume after SIGKILL" in run:
        wait_for(lambda: num_lines(folder) >= 2, process, folder)
        kill(process)
        process = start(made, folder, *options, steps=STEPS)
    finish(process, folder)
    if "resume after SIGKILL" in run:
        assert "resuming after step" in log_of(folder).read_text()
    metrics = [line["metrics"] for line in lines(folder)]
    assert len(metrics) == STEPS
    rows = [json.loads(line) for name, text in rollouts(folder).items() if "step" in name for line in text.splitlines()]
    assert len(rows) == STEPS * 4 * 2
    scored = [row for row in rows if row["outcome"] == "ok"]
    assert len(scored) == len(rows)
    if "environment" in run:
        assert max(len(row["turns"]) for row in rows) == 2
    if "gae" in run:
        assert all("critic/vf_loss" in each for each in metrics)
    if "oversampling" in run or "separate pools" in run or any("staleness" in name for name in run):
        assert max(each["staleness/max"] for each in metrics) <= 5
    assert max(each.get("parity/logprobs_diff_max", 0.0) for each in metrics) < 1e-3
