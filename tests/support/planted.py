"""A run with a good dataset, and functions that each plant one kind of fault in it."""

from __future__ import annotations

import io
import json
import shutil
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from support.images import png
from trigon.tools.check.machine import Gpu, Machine

NUM_TRAIN, NUM_VALIDATION = 40, 8
GIB = 2**30
MACHINE = Machine(gpus=(), num_cpus=8, host_bytes=64 * GIB, free_disk_bytes=1000 * GIB)

REWARD = r"""
import re

REWARD_TYPE = "sequential"


def score(reward_input):
    found = re.findall(r"\\boxed\{([^}]*)\}", reward_input["response"])
    right = bool(found) and found[-1].strip() == str(reward_input["ground_truth"]).strip()
    return {"overall": float(right)}
"""


@dataclass
class PlantedRun:
    """A run in a folder. train, validation: rows. options: overrides of the configuration."""

    folder: Path
    model: Path
    train: list[dict[str, Any]] = field(default_factory=list)
    validation: list[dict[str, Any]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    machine: Machine = MACHINE
    reward: str = REWARD

    def image(self, name: str, content: bytes) -> str:
        """Write an image file, and return its path in a row."""
        (self.folder / "images").mkdir(exist_ok=True)
        (self.folder / "images" / name).write_bytes(content)
        return f"images/{name}"

    def write(self) -> list[str]:
        """Write the files, and return the overrides of the command line."""
        for name, rows in (("train", self.train), ("validation", self.validation)):
            (self.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (self.folder / "reward.py").write_text(self.reward)
        return [f"{key}={value}" for key, value in self.options.items()]


def good_run(folder: Path, model: Path) -> PlantedRun:
    """Return a run without a fault."""
    run = PlantedRun(folder, model)
    for index in range(NUM_TRAIN + NUM_VALIDATION):
        row = {
            "problem": f"<image>How much is shown in drawing {index}?",
            "answer": str(index * 7 % 11),
            "images": [run.image(f"{index}.png", png(seed=index))],
        }
        (run.train if index < NUM_TRAIN else run.validation).append(row)
    run.options = {
        "data.train_files": folder / "train.jsonl",
        "data.val_files": folder / "validation.jsonl",
        "data.prompt_key": "problem",
        "data.format_prompt": r"{{ content }} Answer in \boxed{}.",
        "data.max_prompt_length": 128,
        "data.max_response_length": 64,
        "data.min_pixels": "null",
        "data.max_pixels": "null",
        "data.rollout_batch_size": 8,
        "algorithm.disable_kl": "true",
        "worker.actor.global_batch_size": 8,
        "worker.actor.model.model_path": model,
        "worker.actor.fsdp.mp_param_dtype": "fp32",
        "worker.rollout.name": "transformers",
        "worker.rollout.n": 4,
        "worker.rollout.dtype": "fp32",
        "worker.reward.reward_function": f"{folder / 'reward.py'}:score",
        "worker.reward.timeout_seconds": 1,
        "trainer.device": "cpu",
        "trainer.max_steps": 10,
        "trainer.save_checkpoint_path": folder / "run",
    }
    return run


def _set(index: int, **columns: Any) -> Callable[[PlantedRun], None]:
    """Return a fault that changes columns of one row. Faults change different rows."""

    def plant(run: PlantedRun) -> None:
        run.train[index] |= columns

    return plant


def _option(**options: Any) -> Callable[[PlantedRun], None]:
    """Return a fault of the configuration; __ in a name is a dot."""

    def plant(run: PlantedRun) -> None:
        run.options |= {key.replace("__", "."): value for key, value in options.items()}

    return plant


def _image(index: int, content: bytes) -> Callable[[PlantedRun], None]:
    """Return a fault that gives one row another image."""

    def plant(run: PlantedRun) -> None:
        run.train[index]["images"] = [run.image(f"planted{index}.png", content)]

    return plant


def _reward(body: str) -> Callable[[PlantedRun], None]:
    """Return a fault that begins the reward function with other code."""

    def plant(run: PlantedRun) -> None:
        run.reward = run.reward.replace("    found =", f"    {body}\n    found =")

    return plant


def _machine(**changes: Any) -> Callable[[PlantedRun], None]:
    def plant(run: PlantedRun) -> None:
        run.machine = replace(run.machine, **changes)

    return plant


def _png_of(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, "PNG")
    return stream.getvalue()


def _repeat(run: PlantedRun) -> None:
    run.train[5] = run.train[4] | {"images": [run.image("another_name.png", png(seed=4))]}


def _conflict(run: PlantedRun) -> None:
    run.train[7] = run.train[6] | {"answer": "a different one"}


def _overlap(run: PlantedRun) -> None:
    run.validation[0] = dict(run.train[8])


def _other_column(run: PlantedRun) -> None:
    for row in (*run.train, *run.validation):
        row["picture"] = row.pop("images")[0]
        row["problem"] = row["problem"].replace("<image>", "")


def _missing_column(run: PlantedRun) -> None:
    for row in run.train:
        row["question"] = row.pop("problem")


def _many_too_long(run: PlantedRun) -> None:
    for row in run.train[:12]:
        row["problem"] += " Look at every corner of the drawing." * 30


def _some_too_long(run: PlantedRun) -> None:
    for row in run.train[10:13]:
        row["problem"] += " Look at every corner of the drawing." * 30


def _large_images(run: PlantedRun) -> None:
    run.options["data.max_pixels"] = 10**6
    for index, row in enumerate(run.train[:5]):
        row["images"] = [run.image(f"large{index}.png", png(400, 400, seed=100 + index))]


def _gpus(number: int, *, free: float = 1.0) -> Callable[[PlantedRun], None]:
    def plant(run: PlantedRun) -> None:
        _machine(gpus=(Gpu("a GPU", 80 * GIB, int(free * 80 * GIB)),) * number)(run)
        run.options["trainer.device"] = "auto"

    return plant


def _template(text: str) -> Callable[[PlantedRun], None]:
    return _option(data__override_chat_template=text)


def _no_chat_template(run: PlantedRun) -> None:
    model = run.folder / "model"
    shutil.copytree(run.model, model)
    (model / "chat_template.jinja").unlink()
    run.options["worker.actor.model.model_path"] = model


def _weights_of_pytorch(run: PlantedRun) -> None:
    model = run.folder / "pickled"
    shutil.copytree(run.model, model, ignore=shutil.ignore_patterns("*.safetensors*"))
    (model / "pytorch_model.bin").write_bytes(b"a pickle")
    run.options["worker.actor.model.model_path"] = model


def _sizes(**sizes: int) -> Callable[[PlantedRun], None]:
    """Return a fault of a model's config.json, wherever it has these sizes."""

    def plant(run: PlantedRun) -> None:
        model = run.folder / "sizes"
        shutil.copytree(run.model, model)
        config = json.loads((model / "config.json").read_text())
        for section in (config, config.get("text_config", {})):
            section.update({name: size for name, size in sizes.items() if name in section})
        (model / "config.json").write_text(json.dumps(config))
        run.options["worker.actor.model.model_path"] = model

    return plant


def _added_token(run: PlantedRun) -> None:
    model = run.folder / "added"
    shutil.copytree(run.model, model)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_tokens(["<grounding>"])
    tokenizer.save(str(model / "tokenizer.json"))
    run.options["worker.actor.model.model_path"] = model
    run.train[37]["problem"] = "<image>Where <grounding>?"


_NO_GENERATION_PROMPT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}"
    "{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)

_FORGETS_THOUGHTS = _NO_GENERATION_PROMPT.replace(
    "{{ m.content }}", "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}"
) + ("{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def plant_environment(run: PlantedRun, body: str) -> None:
    """Give a run an environment, whose reward is that of the run. body: of its class."""
    (run.folder / "maze.py").write_text(f"class Maze:\n{textwrap.indent(body, '    ')}")
    run.options["worker.rollout.environment"] = f"{run.folder / 'maze.py'}:Maze"
    run.options["worker.reward.reward_function"] = "environment"


def _environment(body: str, **options: Any) -> Callable[[PlantedRun], None]:
    """Return a fault of a run with an environment. options: as for _option."""

    def plant(run: PlantedRun) -> None:
        plant_environment(run, body)
        _option(**options)(run)

    return plant


def _tool(text: str) -> Callable[[PlantedRun], None]:
    def plant(run: PlantedRun) -> None:
        (run.folder / "tools.py").write_text(text)
        run.options["worker.rollout.tools"] = f"{run.folder / 'tools.py'}:look"

    return plant


TOOL = """
def look(where: str) -> str:
    \"\"\"
    Look at a part of the drawing.

    Args:
        where: the part
    \"\"\"
    return where
"""

MAZE = """\
def reset(self, row):
    return f"You are at {row['answer']}."
def step(self, action):
    return "a wall", 1.0, False
"""

FAULTS: dict[str, tuple[str, Callable[[PlantedRun], None]]] = {
    "a misspelt option": ("configuration.invalid", _option(trainer__save_freqs=3)),
    "an option without effect": ("configuration.warning", _option(algorithm__gamma=0.9)),
    "an engine that is missing": ("versions.package", _option(worker__rollout__name="vllm")),
    "no GPU": ("devices.missing", _option(trainer__device="cuda")),
    "too few GPUs": (
        "devices.missing",
        lambda run: (_gpus(1)(run), run.options.update({"trainer.n_gpus_per_node": 2})),
    ),
    "idle GPUs": ("devices.idle", _gpus(4)),
    "too few CPUs": ("devices.idle", lambda run: (_machine(num_cpus=1)(run), _two_workers(run))),
    "a kernel for GPUs": ("devices.kernel", _option(worker__actor__model__attention_kernel="varlen")),
    "little memory": ("memory.too_little", _machine(host_bytes=2**20)),
    "a file in place of the run folder": (
        "folder.unusable",
        lambda run: run.options.update({"trainer.save_checkpoint_path": run.folder / "reward.py"}),
    ),
    "a full disk": ("disk.full", _machine(free_disk_bytes=1000)),
    "no disk for all checkpoints": (
        "disk.checkpoints",
        lambda run: (_machine(free_disk_bytes=30_000_000)(run), run.options.update({"trainer.save_freq": 1})),
    ),
    "a long context": ("model.context", _option(data__max_response_length=10**6)),
    "an option that the model lacks": (
        "model.unusable",
        _option(worker__actor__model__override_config__hiden_size=3),
    ),
    "weights that are a pickle": ("model.unusable", _weights_of_pytorch),
    "a negative size": ("model.unusable", _sizes(hidden_size=-64)),
    "a size that no model has": ("model.unusable", _sizes(num_hidden_layers=10**12)),
    "a template that calls itself without end": (
        "template.chat",
        _template("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"),
    ),
    "a template without the assistant": ("template.generation_prompt", _template(_NO_GENERATION_PROMPT)),
    "no chat template": ("template.chat", _no_chat_template),
    "a template that is no template": ("template.chat", _template("{{ messages | nothing }}")),
    "a format prompt of other columns": (
        "template.format_prompt",
        _option(data__format_prompt="{{ content }} {{ hint }}"),
    ),
    "a missing column": ("dataset.unreadable", _missing_column),
    "a line that is no JSON": ("dataset.unreadable", lambda run: run.train.append("not a row")),
    "images in another column": ("dataset.unused_images", _other_column),
    "half of a surrogate pair": ("rows.encoding", _set(21, problem="What is \ud83d?")),
    "an empty prompt": ("rows.prompt", _set(0, problem="")),
    "a row without a ground truth": ("rows.answer", _set(1, answer=None)),
    "a marker too many": ("rows.markers", _set(22, problem="<image><image>How much?")),
    "a marker too few": ("rows.markers", _set(23, problem="How much?")),
    "a placeholder token": ("rows.media_tokens", _set(24, problem="<image>What is <|image_pad|>?")),
    "a missing image": ("rows.image_missing", _set(25, images=["images/nowhere.png"])),
    "an image elsewhere": ("rows.image_outside", _set(26, images=["/etc/hostname"])),
    "an image of the web": ("rows.image_outside", _set(27, images=["https://example.com/a.png"])),
    "a truncated image": ("rows.image_unreadable", _image(28, png(200, 200)[:9000])),
    "an empty image file": ("rows.image_unreadable", _image(29, b"")),
    "a huge image": (
        "rows.image_pixels",
        lambda run: (_image(30, png(300, 300))(run), run.options.update({"data.max_image_pixels": 80_000})),
    ),
    "a line of pixels": ("rows.image_shape", _image(31, png(1000, 4))),
    "too many images": (
        "rows.image_count",
        lambda run: (
            run.options.update({"worker.rollout.limit_images": 1}),
            run.train[32].update(images=["images/0.png", "images/1.png"], problem="<image><image>Which?"),
        ),
    ),
    "a missing video": (
        "rows.video_missing",
        _set(33, images=[], videos=["no.mp4"], problem="<video>What?"),
    ),
    "a row with images and videos": ("rows.mixed_media", _set(34, videos=["a.mp4"])),
    "a token that was added to the tokenizer": ("rows.vocabulary", _added_token),
    "a row with a large column": ("rows.row_size", _set(36, notes="x" * (2**24 + 1))),
    "a blank image": ("rows.blank_image", _image(35, _png_of(np.full((56, 56, 3), 200, np.uint8)))),
    "many long prompts": ("lengths.overlong", _many_too_long),
    "some long prompts": ("lengths.overlong", _some_too_long),
    "large images": ("lengths.overlong", _large_images),
    "an environment that does not compile": ("environment.unusable", _environment("def reset(self, row\n")),
    "an environment without step": ("environment.unusable", _environment("def reset(self, row): return None")),
    "a tool without a description": ("environment.unusable", _tool("def look(where): return where\n")),
    "a first episode that fails": ("environment.fails", _environment(MAZE.replace("'answer'", "'start'"))),
    "a first observation that is too long": ("environment.fails", _environment(MAZE.replace('."', '." * 99'))),
    "a template that forgets thoughts": (
        "template.chat",
        _environment(MAZE, data__override_chat_template=_FORGETS_THOUGHTS),
    ),
    "a row twice": ("duplicates.prompt", _repeat),
    "a row with two ground truths": ("duplicates.conflict", _conflict),
    "a validation row to train on": ("overlap.validation", _overlap),
    "an empty ground truth": ("answers.empty", lambda run: run.train[9].update(answer=" ")),
    "one ground truth for all": (
        "answers.constant",
        lambda run: [row.update(answer="7") for row in (*run.train, *run.validation)],
    ),
    "a ground truth that is too long": ("answers.too_long", lambda run: run.train[2].update(answer="7 and " * 80)),
    "a reward function that does not compile": (
        "reward.unusable",
        lambda run: setattr(run, "reward", "def score(reward_input:\n"),
    ),
    "a keyword argument that it does not take": (
        "reward.unusable",
        _option(worker__reward__reward_function_kwargs__weight=3),
    ),
    "a reward function that hangs on nothing": (
        "reward.fails",
        _reward('while reward_input["response"] == "":\n        pass'),
    ),
    "a reward function that crashes on nothing": ("reward.fails", _reward('reward_input["response"][0]')),
    "a reward function that ends its process": (
        "reward.fails",
        _reward('import os\n    reward_input["response"] or os._exit(3)'),
    ),
    "a reward that is no number": ("reward.fails", _reward('return {"overall": float("nan")}')),
    "a constant reward": ("reward.constant", _reward('return {"overall": 1.0}')),
    "a reward for nothing": (
        "reward.wrong",
        _reward('if not reward_input["response"]:\n        return {"overall": 2}'),
    ),
    "another format than asked for": (
        "reward.format",
        _option(data__format_prompt="{{ content }} Answer between <answer> and </answer>."),
    ),
    "a random reward": ("reward.random", _reward('import random\n    return {"overall": random.random() + 1}')),
    "a ground truth that cannot be right": ("reward.ground_truth", lambda run: run.train[20].update(answer="{3}")),
    "a warm-up that never ends": (
        "steps.warmup",
        _option(worker__actor__optim__lr_warmup_steps=100_000),
    ),
    "too few rows for a step": (
        "steps.plan",
        _option(data__rollout_batch_size=64, worker__actor__global_batch_size=64),
    ),
}
"""The kind of problem that is named for each fault, and what plants it."""


def _two_workers(run: PlantedRun) -> None:
    run.options["trainer.n_gpus_per_node"] = 2


TOGETHER = [
    "an option without effect",
    "a misspelt option",
    "a template without the assistant",
    *[name for name, (kind, _) in FAULTS.items() if kind.startswith("rows.")],
    "some long prompts",
    "a row twice",
    "a row with two ground truths",
    "a validation row to train on",
    "an empty ground truth",
    "a ground truth that is too long",
    "a ground truth that cannot be right",
]
"""Faults that can be planted in one run."""
