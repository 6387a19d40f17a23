"""Speed of a whole training step against TRL's: sampling, scoring, update and weight sync.

    python benchmarks/whole_step.py [--swift]

Both sides train the same 40 M-parameter Qwen2.5-VL in float32 on one CPU thread, on the same
drawings and questions, with the same group size, completions of exactly the same length, the same
reward, and one AdamW update per step. Each side is a process; they take turns, step by step, and
the other one waits. Trigon's first step is not counted, since it includes the start of vLLM; TRL
first runs a warm-up. Vocabulary sizes are 1,024 and 32,000: without a GPU, TRL computes the logits
of prompt tokens too, which takes minutes at 32,000, so that those steps have one prompt.
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
"""The number of prompts per step, by vocabulary size."""


class Side:
    """A trainer in a separate process that runs one step at a time on request."""

    def __init__(self, command: Sequence[str], log: Path, **variables: str) -> None:
        settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment = os.environ | settings | variables
        self._log = log
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True, env=environment
        )

    def wait(self) -> None:
        """Wait until the process is idle before a step. Raises: RuntimeError if it ends instead."""
        self._read("@waiting")

    def step(self) -> float:
        """Run one step and return its seconds. Raises: RuntimeError if the process ends instead."""
        return self.report()["seconds"]

    def report(self) -> dict[str, float]:
        """Run one step and return what the process reports of it. Raises: as step."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended, see below
            print("go", file=self._process.stdin, flush=True)
        reported: dict[str, float] = json.loads(self._read("@step "))
        return reported

    def _read(self, marker: str) -> str:
        """Return the rest of the next output line that contains a marker."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            rest = line.rpartition(marker)[2]
            if rest != line:
                return rest
        raise RuntimeError(f"{self._process.args[1]} ended early:\n{self._log.read_text()[-3000:]}")

    def finish(self) -> None:
        """Wait until the process ends after its last step. Raises: RuntimeError if it fails."""
        if self._process.wait():
            raise RuntimeError(f"{self._process.args[1]} failed:\n{self._log.read_text()[-3000:]}")

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True, slots=True)
class Comparison:
    """The seconds of each step on both sides, and of the phases of Trigon's steps."""

    shape: Shape
    vocabulary: int
    trigon: list[float]
    peer: list[float]
    phases: dict[str, float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.peer) / statistics.median(self.trigon)


def open_trigon(folder: Path, shape: Shape, steps: int) -> Side:
    """Start Trigon's side."""
    arguments = (shape.name, str(shape.prompts), str(steps))
    return Side([sys.executable, str(HERE / "side_trigon.py"), str(folder), *arguments], folder / "log.trigon")


def open_trl(folder: Path, shape: Shape, steps: int) -> Side:
    """Start TRL's side."""
    counts = map(str, (shape.prompts, shape.n, shape.response, steps))
    return Side([str(python_of("trl")), str(HERE / "side_trl.py"), str(folder), *counts], folder / "log.trl")


def open_swift(folder: Path, shape: Shape, steps: int) -> Side:
    """Start ms-swift's side, with the data in its format; its prompts have a system message."""
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
        "reward_funcs": "arbitrary_rewards",
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
"""How each trainer is started, and how many first steps are not counted: TRL's side has a warm-up.
"""


def compare(shape: Shape, vocabulary: int, folder: Path, *, steps: int, peer: str = "TRL") -> Comparison:
    """Run both sides, step by step in turn."""
    make_folder(folder / "model", vocabulary=vocabulary, shape=shape)
    make_data(folder / "data.parquet", model=folder / "model", shape=shape, rows=shape.prompts * (steps + 2))
    open_peer, uncounted = PEERS[peer]
    trigon, other = open_trigon(folder, shape, steps + 1), open_peer(folder, shape, steps + uncounted)
    try:
        trigon.step()
        for _ in range(uncounted):
            other.step()
        other.wait()
        pairs = [(trigon.step(), other.step()) for _ in range(steps)]
        trigon.finish()
        _require_no_filtered_group(folder / "trigon")
    finally:
        trigon.close()
        other.close()
    return Comparison(
        shape,
        vocabulary,
        [pair[0] for pair in pairs],
        [pair[1] for pair in pairs],
        phases_of(folder / "trigon", statistics.fmean),
    )


def _require_no_filtered_group(run: Path) -> None:
    """Check that every group cost an update.

    Raises: RuntimeError if a group had equal rewards, for which Trigon needs no update.
    """
    steps = [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    skipped = sum(step["actor/skipped_groups"] for step in steps)
    if skipped:
        raise RuntimeError(
            f"{skipped:.0f} groups had equal rewards and cost Trigon no update, so the sides are not comparable"
        )


def profile_of(found: Comparison) -> dict[str, float]:
    """Return the seconds of each phase of Trigon's step, and of the rest.

    Waiting between steps is not included.
    """
    phases = {name: seconds for name, seconds in found.phases.items() if name not in ("step", "other")}
    return phases | {"other": statistics.fmean(found.trigon) - sum(phases.values())}


def host_fraction(profile: dict[str, float]) -> float:
    """Return the fraction of a step that is spent neither in the engine nor in the trainer."""
    devices = ("gen", "weights", "update_actor", "old", "ref", "parity")
    return 1.0 - sum(profile.get(name, 0.0) for name in devices) / sum(profile.values())


def measure(*, steps: int) -> tuple[list[Figure], str]:
    """Return the figures of bars 2 and 4, and their tables. steps: number counted on each side."""
    python_of("trl")  # installed before any measurement
    figures, rows, profile = [], [], {}
    for (vocabulary, prompts), shape in itertools.product(VOCABULARIES.items(), (SHORT, LONG, GEOMETRY)):
        with tempfile.TemporaryDirectory() as folder:
            found = compare(replace(shape, prompts=prompts), vocabulary, Path(folder), steps=steps)
        trigon, trl = statistics.median(found.trigon), statistics.median(found.peer)
        print(
            f"{shape.name}, vocabulary {vocabulary:,}: TRL {trl:.2f} s, Trigon {trigon:.2f} s",
            file=sys.stderr,
            flush=True,
        )
        completions = f"{prompts} x {shape.n}"
        rows.append((shape.name, completions, f"{vocabulary:,}", f"{trl:.2f}", f"{trigon:.2f}", f"{found.ratio:.2f}"))
        what = f"whole step, TRL / Trigon, {shape.name}, vocabulary {vocabulary:,}"
        figures.append(Figure(2, what, found.ratio, "x", at_least=BARS[shape.name]))
        if shape is GEOMETRY and vocabulary == min(VOCABULARIES):
            profile = profile_of(found)
            percent = 100 * host_fraction(profile)
            figures.append(Figure(4, "share of a step outside engine and trainer", percent, " %", at_most=5.0))
    step = sum(profile.values())
    parts = sorted(profile.items(), key=lambda part: -part[1])
    return figures, "\n\n".join(
        (
            table(rows, ("step", "completions", "vocabulary", "TRL, s", "Trigon, s", "TRL / Trigon")),
            f"A step of the {GEOMETRY.name} shape, vocabulary {min(VOCABULARIES):,}:",
            table(
                [(name, f"{seconds:.3f}", f"{100 * seconds / step:.1f} %") for name, seconds in parts]
                + [("total", f"{step:.3f}", "100 %")],
                ("phase", "seconds", "share"),
            ),
        )
    )


def measure_swift(*, steps: int) -> str:
    """Return a table of ms-swift and Trigon, at the smaller vocabulary."""
    rows, vocabulary = [], min(VOCABULARIES)
    for shape in (SHORT, LONG):
        with tempfile.TemporaryDirectory() as folder:
            found = compare(shape, vocabulary, Path(folder), steps=steps, peer="ms-swift")
        seconds = [f"{statistics.median(side):.2f}" for side in (found.peer, found.trigon)]
        rows.append((shape.name, f"{vocabulary:,}", *seconds, f"{found.ratio:.2f}"))
    return table(rows, ("step of 16 completions", "vocabulary", "ms-swift, s", "Trigon, s", "ms-swift / Trigon"))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3, help="steps counted on each side (%(default)s)")
    parser.add_argument("--swift", action="store_true", help="compare with ms-swift instead, at two shapes")
    arguments = parser.parse_args()
    if arguments.swift:
        print(measure_swift(steps=arguments.steps))
        return
    figures, tables = measure(steps=arguments.steps)
    print(f"{tables}\n\n{figures_table(figures)}")


if __name__ == "__main__":
    main()
