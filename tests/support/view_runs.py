"""Run folders for the tests of `trigon view`, written as a run writes them, and a served page."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from io import BytesIO
from pathlib import Path

from PIL import Image

from trigon.report.rollouts import RolloutRow, TokenRecord
from trigon.report.run_folder import RunFolder
from trigon.tools.view.runs import ViewedRun, open_runs
from trigon.tools.view.server import address, listen, make_server

CONFIG = "trainer:\n  max_steps: 3\nworker:\n  actor:\n    optim:\n      lr: {lr}\n"


def make_row(prompt_id: str, sample: int, reward: float, *, response: str = "", **fields: object) -> RolloutRow:
    """Return a row of a group of which a step learned. fields: of RolloutRow, replaced."""
    response = response or f"I count {sample}."
    texts = [word + " " for word in response.split(" ")]
    texts[-1] = texts[-1][:-1]
    values: dict[str, object] = {
        "prompt_id": prompt_id,
        "sample": sample,
        "prompt": f"<image>How many circles are in {prompt_id}?",
        "response": response,
        "reward": reward,
        "parts": {"overall": reward, "accuracy": float(reward >= 1), "format": 1.0},
        "outcome": "ok",
        "error": "",
        "finish_reason": "stop",
        "num_tokens": len(texts),
        "policy_version": 0,
        "images": (f"{prompt_id}/images/0",),
        "ground_truth": "3",
        "ground_truth_type": "str",
        "row": {"answer": "3"},
        "filtered": "",
        "advantage": reward - 0.5,
        "tokens": TokenRecord(
            ids=list(range(len(texts))),
            texts=texts,
            sampling_logprobs=[-0.5] * len(texts),
            advantages=[reward - 0.5] * len(texts),
            old_logprobs=[-0.5 - 0.01 * sample] * len(texts),
            entropy=[0.25 * t for t in range(len(texts))],
        ),
        "num_prompt_tokens": 12,
    }
    return RolloutRow(**(values | fields))  # type: ignore[arg-type]


def write_image(folder: Path, color: tuple[int, int, int]) -> str:
    """Write an image of one colour as a run does, and return its name in image_files."""
    buffer = BytesIO()
    Image.new("RGB", (64, 48), color).save(buffer, "PNG")
    (folder / "images").mkdir(exist_ok=True, parents=True)
    name = f"images/{sha256(buffer.getvalue()).hexdigest()}.png"
    (folder / name).write_bytes(buffer.getvalue())
    return name


def write_run(folder: Path, *, lr: float = 1e-6, num_steps: int = 3) -> Path:
    """Write a run whose steps have groups that none, some and all of 4 completions solve."""
    image = write_image(folder, (200, 60, 40))
    with RunFolder(folder) as run:
        run.write_config(CONFIG.format(lr=lr))
        for step in range(1, num_steps + 1):
            write_step(run, step, image, gain=lr * 1e5)
    return folder


def write_step(run: RunFolder, step: int, image: str, *, gain: float = 0.1) -> None:
    """Write the metrics and the rollouts of a step."""
    times = {"timing_s/step": 2.0, "timing_s/gen": 1.25, "timing_s/update_actor": 0.5, "timing_s/other": 0.25}
    run.append_metrics(step, {"reward/overall": gain * step, "actor/entropy": 1.0 / step, **times})
    rows = [
        make_row(name, sample, reward, image_files=(image,), policy_version=step - 1)
        for name, rewards in (("train:0", [0, 0, 0, 0]), ("train:1", [0, 1, 0, 1]), ("train:2", [1, 1, 1, 1]))
        for sample, reward in enumerate(map(float, rewards))
    ]
    run.write_rollouts(step, "train", rows)


@contextmanager
def served(folders: Sequence[Path], cache: Path, *, token: str = "") -> Iterator[tuple[str, list[ViewedRun]]]:
    """Serve the page of runs, and yield its address and the runs."""
    runs = open_runs(folders, cache=cache)
    listening = listen("127.0.0.1", 0)
    server = make_server(runs, token=token)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    for run in runs:
        run.update()
        run.start()
    thread.start()
    try:
        yield address(listening, "127.0.0.1", token), runs
    finally:
        server.should_exit = True
        thread.join()
        for run in runs:
            run.close()
