"""Every recipe of examples/ trains two steps: its command line, a tiny model, small sizes.

Generated data has the columns of the datasets that the recipes name; environments are those of the
recipes. The models are warmed up to be correct about half of the time, so that the rewards of a
group differ and online filtering keeps groups.
"""

from __future__ import annotations

import gc
import hashlib
import io
import json
import math
import random
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import pytest
from PIL import Image

from support.recipes import RECIPES, ROOT, arguments_of, name_of
from trigon.assemble.data import open_builder, open_processors
from trigon.config.load import load_config, split_arguments
from trigon.config.schema import Config, OptimConfig
from trigon.data.dataset import open_prompts
from trigon.environments.source import find_tools
from trigon.environments.tools import describe_tools, load_tools
from trigon.tools.cli.main import main
from trigon.tools.quickstart.warm_start import Demonstration, as_target, learn_demonstrations, warm_start_folder
from trigon.training.optim import Schedule
from trigon.types import TrainGroup

STEPS = 2
NUM_TRAIN, NUM_TEST = 8, 4
PROMPT_TOKENS, COMPLETION_TOKENS = 640, 64
TOOL_TOKENS, REGION_TOKENS = 640, 128
"""Added to them for recipes with tools: their description, and a region that `crop` returns."""


# -- data: the columns of each hub dataset ---------------------------------------------------------


def png_bytes(rng: random.Random) -> bytes:
    image = Image.new("RGB", (84, 56), tuple(rng.randrange(256) for _ in range(3)))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def question_rows(text: str, answer: str, *, images: int = 0) -> Callable[[random.Random, int], datasets.Dataset]:
    """Return a function that generates rows of problem, answer and `images` images."""

    def make(rng: random.Random, count: int) -> datasets.Dataset:
        columns = {"problem": [f"{text} ({number})" for number in range(count)], "answer": [answer] * count}
        features = {"problem": datasets.Value("string"), "answer": datasets.Value("string")}
        if images:
            files = [[{"bytes": png_bytes(rng), "path": None} for _ in range(images)] for _ in range(count)]
            columns["images"] = files
            features["images"] = datasets.List(datasets.Image())
        return datasets.Dataset.from_dict(columns, datasets.Features(features))

    return make


def screen_rows(rng: random.Random, count: int) -> datasets.Dataset:
    return datasets.Dataset.from_dict(
        {
            "image": [{"bytes": png_bytes(rng)} for _ in range(count)],
            "instruction": [f"open the settings ({number})" for number in range(count)],
            "id": [f"row{number}" for number in range(count)],
            "gt_action": ["click"] * count,
            "gt_bbox": [[0.1, 0.2, 0.3, 0.4]] * count,
            "gt_input_text": ["no input text"] * count,
            "history": ["None"] * count,
            "task_type": ["low"] * count,
        }
    )


def search_rows(rng: random.Random, count: int) -> datasets.Dataset:
    # visual_search.py splits the rows by the hash of the image: one of twenty is for the test.
    for_test: list[bytes] = []
    for_training: list[bytes] = []
    while len(for_test) < NUM_TEST or len(for_training) < count:
        file = png_bytes(rng)
        (for_training if hashlib.sha256(file).digest()[0] % 20 else for_test).append(file)
    files = for_test[:NUM_TEST] + for_training[:count]
    information = {"question": "Is the countertop tan or blue?", "answer": "The countertop is tan."}
    return datasets.Dataset.from_dict(
        {
            "images": [[{"bytes": file, "path": ""}] for file in files],
            "extra_info": [{**information, "index": str(number), "split": "train"} for number in range(len(files))],
        }
    )


DATASETS = {
    "hiyouga/geometry3k": question_rows("<image>Find x.", "48", images=1),
    "hiyouga/math12k": question_rows("What is half of 96?", "48"),
    "Saigyouji-Yuyuko1000/dapo17k": question_rows("What is half of 96?", "48"),
    "BUAADreamer/clevr_count_70k": question_rows("<image>How many items are there?", "3", images=1),
    "leonardPKU/GEOQA_8K_R1V": question_rows("<image>∠A = 35°; what is ∠B?", "145°", images=1),
    "hiyouga/journeybench-multi-image-vqa": question_rows("<image>\n<image>\nHow many cups in both?", "5", images=2),
    "datasets/GUI-R1": screen_rows,
    "datasets/deepeyes": search_rows,
}
"""A hub dataset, or the folder that a recipe reads -> the function that generates its rows."""

CALL = '<tool_call>{"name":"crop","arguments":{"bbox_2d":[0,0,9,9]}}</tool_call>'

COMPLETIONS = {
    "math": ("<think>I see.</think>\\boxed{48}", "<think>I see.</think>\\boxed{47}"),
    "dapo": ("Answer: 48", "Answer: 47"),
    "counting": ("<think>I see.</think><answer>3</answer>", "<think>I see.</think><answer>4</answer>"),
    "geoqa": ("<think>I see.</think><answer>145°</answer>", "<think>I see.</think><answer>35°</answer>"),
    "vqa": ("<think>I see.</think><answer>5</answer>", "<think>I see.</think><answer>4</answer>"),
    "android_gui": (
        '<think>.</think><answer>{"action": "click", "point": [200, 300]}</answer>',
        '<think>.</think><answer>{"action": "click", "point": [900, 300]}</answer>',
    ),
    "visual_search": ("<think>I see.</think><answer>tan</answer>", CALL),
    "environment": ("<action>tap(200, 100)</action>", "I see."),
}
"""Reward -> a correct and a wrong completion, both well formatted; models are warmed up to both.
With tools the wrong one is a call, after which the model does not know what to write; of an
environment: turns with different rewards."""


@pytest.fixture(scope="module", autouse=True)
def _frozen_garbage() -> Iterator[None]:
    """Freeze imported objects: vLLM collects garbage several times per engine."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the generated datasets, and what data_preprocess/ makes of two."""
    folder = tmp_path_factory.mktemp("home")
    for name, make in DATASETS.items():
        (folder / name).mkdir(parents=True)
        for split, count in (("train", NUM_TRAIN), ("test", NUM_TEST)):
            make(random.Random(f"{name} {split}"), count).to_parquet(folder / name / f"{split}.parquet")
    prepare = ROOT / "examples" / "data_preprocess"
    for script, source, output in (
        ("geo3k.py", "hiyouga/geometry3k", "data/geo3k"),
        ("visual_search.py", "datasets/deepeyes/train.parquet", "datasets/visual_search"),
    ):
        command = [str(prepare / script), "--local_dir", str(folder / output), "--source", str(folder / source)]
        subprocess.run([sys.executable, *command], check=True, capture_output=True, timeout=120)
    sizes = ["--num-train", str(NUM_TRAIN), "--num-test", str(NUM_TEST)]
    make = [sys.executable, str(ROOT / "examples" / "gui" / "make.py"), "--folder", str(folder / "datasets" / "gui")]
    subprocess.run([*make, *sizes], check=True, capture_output=True, timeout=120)
    return folder


# -- models ----------------------------------------------------------------------------------------

MODEL_TYPES = (
    ("Qwen/Qwen2.5-VL-", "qwen2_5_vl"),
    ("Qwen/Qwen3.5-35B-A3B", "qwen3_5_moe"),
    ("Qwen/Qwen3.5-", "qwen3_5"),
    ("Qwen/Qwen3-VL-30B-A3B", "qwen3_vl_moe"),
    ("Qwen/Qwen3-VL-", "qwen3_vl"),
    ("Qwen/Qwen2.5-", "qwen2"),
    ("Qwen/Qwen3-", "qwen3"),
)
"""Prefix of a model's name -> its family; the first match counts."""

WarmModel = Callable[[Config], Path]


@pytest.fixture(scope="module")
def warm_model(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> WarmModel:
    """Return a function that warms up a tiny model for a recipe, once per model type and reward."""
    models: dict[tuple[str, str], Path] = {}

    def warm_up_once(config: Config) -> Path:
        model_type = model_type_of(config)
        key = model_type, reward_of(config)
        if key not in models:
            models[key] = warm_up(config, tiny_model(model_type), tmp_path_factory.mktemp("-".join(key)))
        return models[key]

    return warm_up_once


def model_type_of(config: Config) -> str:
    path = str(config.worker.actor.model.model_path)
    return next(family for beginning, family in MODEL_TYPES if path.startswith(beginning))


def reward_of(config: Config) -> str:
    return Path(str(config.worker.reward.reward_function).partition(":")[0]).stem


def warm_up(config: Config, source: Path, folder: Path) -> Path:
    """Write a model that is correct about half of the time, and return its folder."""
    model = config.worker.actor.model.model_copy(update={"model_path": str(source)})
    actor = config.worker.actor.model_copy(update={"model": model})
    config = config.model_copy(update={"worker": config.worker.model_copy(update={"actor": actor})})
    shutil.copytree(source, folder, dirs_exist_ok=True)
    if config.worker.rollout.environment is not None:
        skill = warm_up_in_environment(config, folder)
        assert skill >= 0.35, skill
        return folder
    processors = open_processors(config)
    schemas = describe_tools(load_tools(find_tools(config.worker.rollout.tools)))
    prompts = open_prompts(
        config.data.train_files[0],
        open_builder(config, processors, process_images=True, schemas=schemas),
        num_workers=1,
    )
    examples = [
        TrainGroup(prompts[index], (as_target((*processors.tokenizer.encode(text), processors.stop_token_ids[0])),))
        for index in range(len(prompts))
        for text in COMPLETIONS[reward_of(config)]
    ]
    assert max(len(example.sequences[0].token_ids) for example in examples) <= COMPLETION_TOKENS
    skill = warm_start_folder(
        folder,
        processors,
        examples.__getitem__,
        num_examples=len(examples),
        max_updates=100,
        target_accuracy=0.35,
        batch_size=4,
        schedule=Schedule(OptimConfig(lr=3e-3), 5, 100),
        seed=0,
    )
    assert skill >= 0.35, skill
    return folder


def warm_up_in_environment(config: Config, folder: Path) -> float:
    """Train the model in a folder to write both turns about equally often. Returns its accuracy."""
    file, _, name = str(config.worker.rollout.environment).partition(":")
    make = runpy.run_path(str(ROOT / file))[name]
    rows = pq.read_table(config.data.train_files[0]).to_pylist()

    def demonstrate(index: int) -> Demonstration:
        rng = random.Random(index)
        turns = COMPLETIONS[reward_of(config)]
        return Demonstration(rows[index % len(rows)], make(), lambda turn: (rng.choice(turns), True))

    return learn_demonstrations(
        folder,
        demonstrate,
        num_updates=100,
        target_accuracy=0.35,
        batch_size=4,
        learning_rate=3e-3,
        seed=0,
        max_turns=2,
    )


# -- runs ------------------------------------------------------------------------------------------


def file_overrides(config: Config, home: Path) -> list[str]:
    """Return the overrides that replace hub datasets by generated ones; local files exist."""
    overrides = []
    for key, specs in (("data.train_files", config.data.train_files), ("data.val_files", config.data.val_files)):
        [spec] = specs
        location, _, split = spec.partition("@")
        if not Path(location).exists():
            assert location in DATASETS, f"{location}: add a function that generates its rows to DATASETS"
            overrides.append(f"{key}={home / location / f'{split}.parquet'}")
    return overrides


def size_overrides(config: Config) -> list[str]:
    """Return the overrides that make a recipe small, without changing the algorithm."""
    updates = min(config.data.rollout_batch_size // config.worker.actor.global_batch_size, 2)
    has_tools = bool(config.worker.rollout.tools)
    small: dict[str, object] = {
        "data.max_prompt_length": PROMPT_TOKENS + has_tools * TOOL_TOKENS,
        "data.max_response_length": COMPLETION_TOKENS + has_tools * REGION_TOKENS,
        "data.rollout_batch_size": 2 * updates,
        "data.val_batch_size": NUM_TEST,
        "data.min_pixels": "null",
        "data.max_pixels": "null",
        "worker.actor.global_batch_size": 2,
        "worker.actor.micro_batch_size_per_device_for_update": 2,
        "worker.actor.micro_batch_size_per_device_for_experience": 4,
        "worker.actor.fsdp.torch_dtype": "fp32",
        "worker.actor.fsdp.mp_param_dtype": "fp32",
        "worker.ref.fsdp.torch_dtype": "fp32",
        "worker.rollout.dtype": "fp32",
        "worker.rollout.tensor_parallel_size": 1,
        "worker.rollout.max_num_batched_tokens": 2048,
        "trainer.max_steps": STEPS,
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 1,
    }
    if config.worker.rollout.environment is not None:  # turns with a picture of at most 64 tokens
        small |= {"data.max_response_length": 512, "worker.rollout.max_turns": 3}
    if config.worker.rollout.max_turn_tokens is not None:
        small["worker.rollout.max_turn_tokens"] = COMPLETION_TOKENS
    if config.data.mini_rollout_batch_size is not None:
        small["data.mini_rollout_batch_size"] = 4
    if config.worker.actor.optim.lr_warmup_steps:
        small["worker.actor.optim.lr_warmup_steps"] = 1
    if "max_response_length" in config.worker.reward.reward_function_kwargs:
        kwargs = config.worker.reward.reward_function_kwargs
        small["worker.reward.reward_function_kwargs"] = json.dumps(
            {**kwargs, "max_response_length": COMPLETION_TOKENS, "overlong_buffer_length": COMPLETION_TOKENS // 4}
        )
    return [f"{key}={value}" for key, value in small.items()]


@pytest.mark.extended
@pytest.mark.long(but=["qwen3_14b_dapo17k_dapo"])
@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_a_recipe_trains(
    recipe: Path, home: Path, warm_model: WarmModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    environment = {"HOME": str(home)}
    if local := re.search(r"\bDATA:-(datasets/[\w-]+)\}", recipe.read_text(encoding="utf-8")):
        environment["DATA"] = str(home / local[1])

    def configured(*overrides: str) -> tuple[Config, list[str]]:
        arguments = arguments_of(recipe, tmp_path / "bin", *overrides, environment=environment)
        return load_config(*split_arguments(arguments)).config, arguments

    original, _ = configured()
    run = tmp_path / "run"
    overrides = [*file_overrides(original, home), *size_overrides(original), f"trainer.save_checkpoint_path={run}"]
    if not {"console", "file"}.issuperset(original.trainer.logger):
        overrides.append("trainer.logger=[console,file]")  # the other loggers need an account
    if model_type_of(original).startswith("qwen3_5"):  # vLLM computes its tiny model on GPUs only
        overrides.append("worker.rollout.name=transformers")
    model = warm_model(configured(*overrides)[0])
    overrides.append(f"worker.actor.model.model_path={model}")
    config, arguments = configured(*overrides)

    assert main(["train", *arguments]) == 0

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["step"] > 0]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert all(math.isfinite(value) for value in line["metrics"].values()), line
        assert "actor/pg_loss" in line["metrics"]
    assert max(line["metrics"]["actor/grad_norm"] for line in lines) > 1e-4, "no group had a gradient"
    assert (run / f"global_step_{STEPS}").is_dir()
    if config.worker.rollout.tools:
        assert max(line["metrics"]["rollout/num_turns"] for line in lines) > 1, "no tool was called"
