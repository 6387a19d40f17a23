"""How much faster a whole training step is than TRL's: sample, score, learn, hand over, on the same work.

    python benchmarks/whole_step.py [--swift]

Both sides train the same 40 M-parameter Qwen2.5-VL in float32 on one CPU thread, on the same drawings and questions,
with the same group size, completions of exactly the same length, the same reward, and one AdamW update a step. Each is
a process of its own; they take turns, step by step, and whichever is not asked waits. Our first step is not counted,
since vLLM's start is in it; TRL first samples and learns from a few tokens, to be as warm. Vocabularies of 1,024 and of
32,000: off a GPU, TRL computes logits of prompt tokens too, which takes it minutes, so that steps of the latter have
one prompt.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from peers import python_of
from shared import GEOMETRY, LONG, SHORT, Figure, Shape, figures_table, make_data, make_folder, phases_of, table

HERE = Path(__file__).parent
BARS = {SHORT.name: 3.5, LONG.name: 2.3, GEOMETRY.name: 2.0}
VOCABULARIES = {1024: 2, 32_000: 1}
"""How many prompts a step has with each."""


class Side:
    """A trainer in a process of its own, that makes a step when it is asked to."""

    def __init__(self, command: Sequence[str], log: Path, **variables: str) -> None:
        quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment = os.environ | quiet | variables
        self._log = log
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True, env=environment
        )

    def wait(self) -> None:
        """Wait until it is about to make a step, and is idle. Raises: RuntimeError if it ends instead."""
        self._hear("@waits ")

    def step(self) -> float:
        """Let it make one step, and return the seconds that it took. Raises: RuntimeError if it ends instead."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which is heard below
            print("go", file=self._process.stdin, flush=True)
        return float(json.loads(self._hear("@step "))["seconds"])

    def _hear(self, word: str) -> str:
        """Return what follows a word in what it says next."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = line.rpartition(word)[2]
            if told != line:
                return told
        raise RuntimeError(f"{self._process.args[1]} ended early:\n{self._log.read_text()[-3000:]}")

    def finish(self) -> None:
        """Wait until it has written what it wants to write after its last step. Raises: RuntimeError if it fails."""
        if self._process.wait():
            raise RuntimeError(f"{self._process.args[1]} failed:\n{self._log.read_text()[-3000:]}")

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds of the steps of both sides, in the order in which they were made."""

    shape: Shape
    vocabulary: int
    ours: list[float]
    theirs: list[float]
    phases: dict[str, float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.theirs) / statistics.median(self.ours)


def open_trigon(folder: Path, shape: Shape, steps: int) -> Side:
    """Return our side."""
    which = (shape.name, str(shape.prompts), str(steps))
    return Side([sys.executable, str(HERE / "side_trigon.py"), str(folder), *which], folder / "log.ours")


def open_trl(folder: Path, shape: Shape, steps: int) -> Side:
    """Return TRL's side."""
    counts = map(str, (shape.prompts, shape.n, shape.response, steps))
    return Side([str(python_of("trl")), str(HERE / "side_trl.py"), str(folder), *counts], folder / "log.trl")


def open_swift(folder: Path, shape: Shape, steps: int) -> Side:
    """Return ms-swift's side, with its data in its own format. Its prompt has a system message of its own."""
    from pyarrow import parquet

    with (folder / "data.jsonl").open("w") as file:
        for number, row in enumerate(parquet.read_table(folder / "data.parquet").to_pylist()):
            image = folder / f"{number}.png"
            image.write_bytes(row["images"][0]["bytes"])
            chat = [{"role": "user", "content": row["problem"]}]
            print(json.dumps({"messages": chat, "images": [str(image)]}), file=file)
    options = {
        "rlhf_type": "grpo",
        "model": folder / "model",
        "model_type": "qwen2_5_vl",
        "template": "qwen2_5_vl",
        "dataset": folder / "data.jsonl",
        "external_plugins": HERE / "side_swift.py",
        "reward_funcs": "drawn_lots",
        "tuner_type": "full",
        "torch_dtype": "float32",
        "use_vllm": "false",
        "num_generations": shape.n,
        "per_device_train_batch_size": shape.sequences,
        "gradient_accumulation_steps": 1,
        "max_completion_length": shape.response,
        "max_length": 2 * shape.prompt,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_steps": steps,
        "learning_rate": 1e-6,
        "beta": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "gradient_checkpointing": "false",
        "freeze_vit": "false",
        "attn_impl": "sdpa",
        "report_to": "none",
        "split_dataset_ratio": 0,
        "dataloader_num_workers": 0,
        "output_dir": folder / "swift",
    }
    command = [str(python_of("ms-swift").with_name("swift")), "rlhf"]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    image_token = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))["image_token_id"]
    return Side(command, folder / "log.swift", IMAGE_TOKEN_ID=str(image_token), PYTHONPATH=str(HERE))


PEERS = {"TRL": (open_trl, 0), "ms-swift": (open_swift, 1)}
"""How each is opened, and how many of its first steps are not counted: TRL's side warms up by itself."""


def compare(shape: Shape, vocabulary: int, folder: Path, *, steps: int, peer: str = "TRL") -> Comparison:
    """Let both sides take turns."""
    make_folder(folder / "model", vocabulary=vocabulary, shape=shape)
    make_data(folder / "data.parquet", model=folder / "model", shape=shape, rows=shape.prompts * (steps + 2))
    open_peer, uncounted = PEERS[peer]
    ours, theirs = open_trigon(folder, shape, steps + 1), open_peer(folder, shape, steps + uncounted)
    try:
        ours.step()
        for _ in range(uncounted):
            theirs.step()
        theirs.wait()
        pairs = [(ours.step(), theirs.step()) for _ in range(steps)]
        ours.finish()
        _check_that_all_was_learned(folder / "trigon")
    finally:
        ours.close()
        theirs.close()
    return Comparison(
        shape,
        vocabulary,
        [pair[0] for pair in pairs],
        [pair[1] for pair in pairs],
        phases_of(folder / "trigon", statistics.fmean),
    )


def _check_that_all_was_learned(run: Path) -> None:
    """Raises: RuntimeError if a group of ours had equal rewards, and so cost no update."""
    steps = [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    skipped = sum(step["actor/skipped_groups"] for step in steps)
    if skipped:
        raise RuntimeError(f"{skipped:.0f} of our groups had nothing to learn from: no fair comparison")


def profile_of(found: Comparison) -> dict[str, float]:
    """Return the seconds of each phase of our step, and of what is in none; that we waited for our turn is in none."""
    phases = {name: seconds for name, seconds in found.phases.items() if name not in ("step", "other")}
    return phases | {"other": statistics.fmean(found.ours) - sum(phases.values())}


def host_share(profile: dict[str, float]) -> float:
    """Return the share of a step that was spent neither in the engine nor in the trainer."""
    devices = ("gen", "weights", "update_actor", "old", "ref", "parity")
    return 1.0 - sum(profile.get(name, 0.0) for name in devices) / sum(profile.values())


def measure(*, steps: int) -> tuple[list[Figure], str]:
    """Return the figures of bars 2 and 4, and the tables behind them. steps: of each side that count."""
    python_of("trl")  # installed before the clock runs
    figures, rows, profile = [], [], {}
    for (vocabulary, prompts), shape in itertools.product(VOCABULARIES.items(), (SHORT, LONG, GEOMETRY)):
        with tempfile.TemporaryDirectory() as folder:
            found = compare(replace(shape, prompts=prompts), vocabulary, Path(folder), steps=steps)
        ours, theirs = statistics.median(found.ours), statistics.median(found.theirs)
        print(f"{shape.name}, vocabulary {vocabulary:,}: {theirs:.2f} s, {ours:.2f} s", file=sys.stderr, flush=True)
        answers = f"{prompts} x {shape.n}"
        rows.append((shape.name, answers, f"{vocabulary:,}", f"{theirs:.2f}", f"{ours:.2f}", f"{found.ratio:.2f}"))
        what = f"whole step against TRL, {shape.name}, vocabulary {vocabulary:,}"
        figures.append(Figure(2, what, found.ratio, "x", at_least=BARS[shape.name]))
        if shape is GEOMETRY and vocabulary == min(VOCABULARIES):
            profile = profile_of(found)
            share = 100 * host_share(profile)
            figures.append(Figure(4, "share of a step outside engine and trainer", share, " %", at_most=5.0))
    step = sum(profile.values())
    parts = sorted(profile.items(), key=lambda part: -part[1])
    return figures, "\n\n".join(
        (
            table(rows, ("a step", "answers", "vocabulary", "TRL, s", "Trigon, s", "ratio")),
            f"A step of the {GEOMETRY.name} shape, vocabulary {min(VOCABULARIES):,}:",
            table(
                [(name, f"{seconds:.3f}", f"{100 * seconds / step:.1f} %") for name, seconds in parts]
                + [("all", f"{step:.3f}", "100 %")],
                ("phase", "seconds", "share"),
            ),
        )
    )


def measure_swift(*, steps: int) -> str:
    """Return a table of ms-swift beside us, at the smaller vocabulary."""
    rows, vocabulary = [], min(VOCABULARIES)
    for shape in (SHORT, LONG):
        with tempfile.TemporaryDirectory() as folder:
            found = compare(shape, vocabulary, Path(folder), steps=steps, peer="ms-swift")
        seconds = [f"{statistics.median(side):.2f}" for side in (found.theirs, found.ours)]
        rows.append((shape.name, f"{vocabulary:,}", *seconds, f"{found.ratio:.2f}"))
    return table(rows, ("a step of 16 answers", "vocabulary", "ms-swift, s", "Trigon, s", "ratio"))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3, help="steps of each side that count (%(default)s)")
    parser.add_argument("--swift", action="store_true", help="compare with ms-swift instead, at two shapes")
    arguments = parser.parse_args()
    if arguments.swift:
        print(measure_swift(steps=arguments.steps))
        return
    figures, tables = measure(steps=arguments.steps)
    print(f"{tables}\n\n{figures_table(figures)}")


if __name__ == "__main__":
    main()
