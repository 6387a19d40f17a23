"""Shared by the benchmarks: shapes of the work, a model of 40 M parameters, data and figures."""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

VOCABULARY = 8192
QUESTION_WORDS = "Find the length of the side . How many corners can you see ? What is the measure of the angle ?"


@dataclass(frozen=True, slots=True)
class Shape:
    """The work of one step. Lengths in tokens; every completion has exactly `response` tokens.

    image_grid: rows and columns of image tokens; a token covers 28 x 28 pixels.
    """

    name: str
    image_grid: tuple[int, int]
    prompt: int
    response: int
    n: int
    prompts: int

    @property
    def image_tokens(self) -> int:
        rows, columns = self.image_grid
        return rows * columns

    @property
    def sequences(self) -> int:
        return self.prompts * self.n

    @property
    def token_ratio(self) -> float:
        """The tokens of a padded batch relative to those of a group: n (P + R) / (P + n R)."""
        return self.n * (self.prompt + self.response) / (self.prompt + self.n * self.response)


SHORT = Shape("64 response tokens", (16, 16), prompt=322, response=64, n=8, prompts=2)
LONG = Shape("160 response tokens", (16, 16), prompt=322, response=160, n=8, prompts=2)
GEOMETRY = Shape("Geometry3K, 450 : 275", (17, 20), prompt=450, response=275, n=5, prompts=2)


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table. at_least, at_most: the target; with neither it is for information."""

    bar: int
    what: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def label(self) -> str:
        if self.at_least is None and self.at_most is None:
            return ""
        reaches_minimum = self.at_least is None or self.value >= self.at_least
        within_maximum = self.at_most is None or self.value <= self.at_most
        return "pass" if reaches_minimum and within_maximum else "falls short"

    @property
    def target(self) -> str:
        if self.at_least is not None:
            return f"at least {self.at_least:g}{self.unit}"
        if self.at_most is not None:
            return f"at most {self.at_most:g}{self.unit}"
        return ""


def phases_of(run: Path, average: Callable[[Iterable[float]], float]) -> dict[str, float]:
    """Return the average seconds of each phase over the steps of a run, without the first step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line["metrics"] for line in lines if line["step"] > 1]
    names = {key.removeprefix("timing_s/") for step in steps for key in step if key.startswith("timing_s/")}
    return {name: average(step.get(f"timing_s/{name}", 0.0) for step in steps) for name in names}


def measure_and_print(description: str, measure: Callable[..., tuple[list[Figure], str]]) -> None:
    """Run a benchmark of two sides from the command line.

    description: of the benchmark. measure: returns its figures and tables, given repeats.
    """
    import torch  # not above: a benchmark sets the threads of its processes before

    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each side (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (%(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    figures, tables = measure(repeats=arguments.repeats)
    print(f"{tables}\n\n{figures_table(figures)}")


def table(rows: Iterable[Sequence[object]], header: Sequence[str]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def figures_table(figures: Iterable[Figure]) -> str:
    """Return figures as a Markdown table."""
    rows = [
        (figure.bar, figure.what, f"{figure.value:.3g}{figure.unit}", figure.target, figure.label, figure.note)
        for figure in figures
    ]
    return table(rows, ("bar", "figure", "measured", "target", "", "note"))


def machine() -> str:
    """Return a description of this machine."""
    import torch
    import transformers

    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return (
        f"{model}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )


def make_model(vocabulary: int, special: dict[str, int]) -> Any:
    """Return a random Qwen2.5-VL with 40 M parameters at a vocabulary of VOCABULARY.

    The vision tower takes about the same fraction of the work as in the 7B model.

    special: the ids of image_token_id, video_token_id, vision_start_token_id and
    vision_end_token_id.
    """
    from trigon.system.torchvision_stub import declare_operators

    declare_operators()
    import torch
    from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig

    text = {
        "bos_token_id": 0,
        "eos_token_id": 1,
        "vocab_size": vocabulary,
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 10,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 12, 12]},
    }
    vision = {
        "depth": 4,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_heads": 4,
        "out_hidden_size": 512,
        "window_size": 112,
        "fullatt_block_indexes": [1, 3],
    }
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **special)
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()


def make_folder(folder: Path, *, vocabulary: int, shape: Shape, tiny: bool = False) -> Path:
    """Write the model as a Hugging Face folder for all trainers, with a tokenizer of 1024 tokens.

    Its processors resize all images to the image tokens of the shape. tiny: the embedded tiny model
    instead, with its own vocabulary and processors.
    """
    from trigon.tools.quickstart.model import make_tiny

    make_tiny(folder)  # for its tokenizer, its processors and its chat template
    if tiny:
        return folder
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    special = {key: value for key, value in config.items() if key.endswith("_token_id")}
    model = make_model(vocabulary, special)
    generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    model.generation_config = type(model.generation_config)(**generation)
    model.save_pretrained(folder)
    processors = json.loads((folder / "processor_config.json").read_text(encoding="utf-8"))
    pixels = shape.image_tokens * 28 * 28
    for name in ("image_processor", "video_processor"):
        processors[name]["size"] = {"shortest_edge": pixels, "longest_edge": pixels}
    (folder / "processor_config.json").write_text(json.dumps(processors, indent=2), encoding="utf-8")
    return folder


def make_data(file: Path, *, model: Path, shape: Shape, rows: int) -> Path:
    """Write drawings and questions of exactly the shape's length as Parquet, as in Geometry3K."""
    from datasets import Dataset, Features, Sequence, Value
    from datasets import Image as ImageFeature

    features = Features({"problem": Value("string"), "images": Sequence(ImageFeature()), "answer": Value("string")})
    question = question_of(model, shape)
    examples = [
        {
            "problem": f"<image>{question}",
            "images": [{"bytes": draw(row, shape), "path": None}],
            "answer": str(row % 10),
        }
        for row in range(rows)
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    Dataset.from_list(examples, features=features).to_parquet(file)
    return file


def draw(seed: int, shape: Shape) -> bytes:
    """Return a PNG of lines and circles, of the size that gives the shape's image tokens."""
    from PIL import Image, ImageDraw

    rows, columns = shape.image_grid
    width, height = columns * 28, rows * 28
    image, rng = Image.new("RGB", (width, height), "white"), random.Random(seed)
    pen = ImageDraw.Draw(image)
    for _ in range(12):
        x, y, size = rng.randrange(width), rng.randrange(height), rng.randrange(20, 200)
        pen.line((x, y, rng.randrange(width), rng.randrange(height)), fill="black", width=2)
        pen.ellipse((x, y, x + size, y + size), outline="black", width=2)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def question_of(model: Path, shape: Shape) -> str:
    """Return a question for a prompt of exactly the shape's length.

    The length includes the chat template and the image tokens.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    words = QUESTION_WORDS.split()

    def length(count: int) -> int:
        text = " ".join(words[index % len(words)] for index in range(count))
        chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        return len(ids) - 1 + shape.image_tokens

    count = 1
    while length(count) < shape.prompt:
        count += 1
    if length(count) != shape.prompt:
        raise SystemExit(f"no question gives a prompt of exactly {shape.prompt} tokens ({length(count)})")
    return " ".join(words[index % len(words)] for index in range(count))


@contextmanager
def images_processed() -> Iterator[list[int]]:
    """Return a list that gets an entry for each image that an image processor is called for."""
    from transformers.image_processing_utils import BaseImageProcessor

    found: list[int] = []
    call = BaseImageProcessor.__call__

    def counted(processor: Any, images: Any, *arguments: Any, **options: Any) -> Any:
        found.extend(_flat(images))
        return call(processor, images, *arguments, **options)

    with mock.patch.object(BaseImageProcessor, "__call__", counted):
        yield found


def _flat(images: Any) -> Iterator[int]:
    if isinstance(images, list | tuple):
        for each in images:
            yield from _flat(each)
    elif images is not None:
        yield 1


@dataclass(frozen=True, slots=True)
class Trained:
    """A sequence that a trainer computes the loss of. trainable: whether each token has a loss."""

    token_ids: Sequence[int]
    trainable: Sequence[bool]


def count_different(sampled: Iterable[Sequence[tuple[int, Sequence[int]]]], trained: Sequence[Trained]) -> int:
    """Return how many sampled tokens are not trained on where they were sampled.

    sampled: for each sequence its turns, as the place of the first token and the token ids. The
    order of sequences may differ: each is compared with the most similar one.
    """

    def different(turns: Sequence[tuple[int, Sequence[int]]], sequence: Trained) -> int:
        trains = dict(enumerate(zip(sequence.token_ids, sequence.trainable, strict=True)))
        return sum(
            trains.get(start + index) != (token_id, True)
            for start, token_ids in turns
            for index, token_id in enumerate(token_ids)
        )

    return sum(min(different(turns, sequence) for sequence in trained) for turns in sampled)


def arbitrary_rewards(reward_inputs: list[dict[str, Any]]) -> list[dict[str, float]]:
    """The reward function, with the signature that Trigon expects."""
    return [{"overall": arbitrary_reward(each["response"])} for each in reward_inputs]


def arbitrary_reward(text: str) -> float:
    """Return a number from 0 to 1 that differs between texts.

    A group with equal rewards would cost Trigon no update, but would cost other trainers one.
    """
    return zlib.crc32(text.encode()) / 2**32
