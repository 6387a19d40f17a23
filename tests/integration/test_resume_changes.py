"""A run that is resumed with other options, models, reward functions or data notices it.

Each case resumes one real run of a tiny model. What is refused must be refused before the models
load, and leave the run folder as it was.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from support.runs import CONFIG, lines, overrides_of
from trigon.assemble.start import StopSignals, start_run
from trigon.config.load import load_config
from trigon.errors import CheckpointError
from trigon.tools.check.machine import check_run_folder
from trigon.tools.check.run import Result, check_run

pytestmark = pytest.mark.extended

REWARD_OPTION = "worker.reward.reward_function"

LOADING = "loading the model"
"""What a run prints before its models load."""


# Differs between the completions of a barely trained model, so that there is a gradient.
REWARD = """
from helper import MODULO

def compute_score(predict_str, ground_truth, judge, api_key):
    return sum(map(ord, predict_str)) % MODULO / 7
"""


@pytest.fixture(scope="module")
def parts(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, few rows of data, a template and a reward function."""
    folder = tmp_path_factory.mktemp("parts")
    shutil.copytree(made / "model", folder / "model")
    (folder / "reward.py").write_text(REWARD)
    (folder / "helper.py").write_text("MODULO = 7\n")
    (folder / "format.jinja").write_text("{{ content }} Answer briefly.")
    (folder / "data").mkdir()
    for name, rows in (("train.parquet", 16), ("validation.parquet", 2)):
        pq.write_table(pq.read_table(made / "data" / name).slice(0, rows), folder / "data" / name)
    return folder


@pytest.fixture(scope="module")
def saved(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that stopped after step 1. It must not change."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    train(parts, folder)
    assert [path.name for path in folder.glob("global_step_*")] == ["global_step_1"]
    return folder


def options_of(parts: Path, folder: Path, *overrides: str) -> list[str]:
    return [
        *overrides_of(parts, folder, steps=40),
        f"data.format_prompt={parts / 'format.jinja'}",
        "worker.reward.reward_function_kwargs={judge: small, api_key: sk-abcdefgh123}",
        "worker.rollout.name=transformers",
        "worker.rollout.n=2",
        "data.rollout_batch_size=2",
        "data.max_response_length=4",
        "worker.actor.global_batch_size=2",
        "trainer.val_before_train=false",
        "trainer.val_freq=1",
        *overrides,
    ]


def train(parts: Path, folder: Path, *overrides: str) -> None:
    """Make one step in this process, after the last checkpoint, and save it."""
    stop = StopSignals()
    stop.received = signal.SIGTERM  # the run ends after its first step
    start_run(load_config(CONFIG, options_of(parts, folder, *overrides)), stop=stop)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def starts(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "starts.jsonl").read_text().splitlines()]


def test_trigon_check_finds_what_a_resume_refuses_and_changes_nothing(parts, saved):
    before = contents(saved)
    report = check_run(CONFIG, options_of(parts, saved, "trainer.max_steps=1"))
    assert report.results["run folder"].problems == []
    assert [problem.kind for problem in report.results["steps"].problems] == ["steps.complete"]
    for change, named in (
        ("algorithm.adv_estimator=rloo", "algorithm.adv_estimator was grpo, and is now rloo"),
        (f"trainer.load_checkpoint_path={parts}", "is not a checkpoint"),
        ("worker.actor.model.lora.rank=4", "LoRA"),
    ):
        with pytest.raises(CheckpointError, match=named):
            check_run_folder(Result("run folder"), load_config(CONFIG, options_of(parts, saved, change)).config)
    assert contents(saved) == before


@contextmanager
def edited(folder: Path, edits: Mapping[str, Callable[[Path], None]]) -> Iterator[None]:
    """Change files within the context."""
    before = {folder / name: (folder / name).read_bytes() for name in edits}
    for name, edit in edits.items():
        edit(folder / name)
        assert (folder / name).read_bytes() != before[folder / name]
    try:
        yield
    finally:
        for file, content in before.items():
            file.write_bytes(content)


def replaced(old: str, new: str) -> Callable[[Path], None]:
    return lambda file: file.write_text(file.read_text().replace(old, new))


def change_one_weight(file: Path) -> None:
    tensors = load_file(file)
    name = sorted(tensors)[3]
    save_file({**tensors, name: tensors[name] * 1.01}, file, metadata={"format": "pt"})


def change_one_answer(file: Path) -> None:
    rows = pq.read_table(file)
    table = rows.to_pylist()
    table[1]["answer"] = "17"
    pq.write_table(type(rows).from_pylist(table, schema=rows.schema), file)


def refusal(parts: Path, saved: Path, *overrides: str) -> str:
    """Return why a run that would resume is refused, in a short time, before its models load."""
    before, started = contents(saved), time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        train(parts, saved, *overrides)
    assert time.monotonic() - started < 20  # two processes are started, and the checkpoint is verified
    assert contents(saved) == before
    message = str(caught.value)
    assert message.startswith(f"{saved / 'global_step_1'} was saved by a run with other options or files:\n")
    assert "continue with these changes from step 2 on" in message
    assert "sk-" not in message
    return message


CHANGES = {
    "worker.rollout.seed=7": "worker.rollout.seed was 1, and is now 7",
    "data.seed=7": "data.seed was 1, and is now 7",
    "worker.rollout.temperature=0.5": "worker.rollout.temperature was 1.0, and is now 0.5",
    "worker.actor.optim.lr=2e-3": "worker.actor.optim.lr was 0.001, and is now 0.002",
    "worker.rollout.n=4": "worker.rollout.n was 2, and is now 4",
    "algorithm.disable_kl=true": "algorithm.disable_kl was false, and is now true",
    "worker.reward.reward_function_kwargs={judge: large, api_key: sk-another1234}": (
        "worker.reward.reward_function_kwargs has other content than before (judge)"
    ),
    "data.format_prompt=": "data.format_prompt was",
    "worker.rollout.val_override_config.temperature=0.5": "worker.rollout.val_override_config.temperature was 1.0",
}


@pytest.mark.faults
def test_other_options_are_refused_before_anything_loads(parts, saved, capsys):
    message = refusal(parts, saved, *CHANGES)
    for change in CHANGES.values():
        assert f"\n  {change}" in message
    assert message.count("\n  ") == len(CHANGES) + 1  # and how they are accepted
    math = ("worker.reward.reward_function=math", "worker.reward.reward_function_kwargs=null")
    message = refusal(parts, saved, *math)
    assert "and is now math, with other content" in message
    assert "reward_function_kwargs has other content" in message
    assert LOADING not in capsys.readouterr().out


@pytest.mark.faults
@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        (
            {
                "helper.py": replaced("7", "5"),
                "format.jinja": replaced("briefly", "at length"),
                "model/model.safetensors": change_one_weight,
                "model/tokenizer.json": replaced("1.0", "1.0 "),
            },
            (
                f"{REWARD_OPTION} has other content than before (code)",
                "data.format_prompt has other content than before (text)",
                "model_path has other content than before (tokenizer.json, model.safetensors)",
            ),
        ),
        ({"reward.py": replaced("/ 7", "/ 9")}, (f"{REWARD_OPTION} has other content than before (code)",)),
        (
            {"data/train.parquet": change_one_answer, "data/validation.parquet": change_one_answer},
            (
                "train.parquet has other rows (16 usable ones then, 16 now)",
                "validation.parquet has other rows (2 usable ones then, 2 now)",
            ),
        ),
    ],
)
def test_files_with_other_content_at_the_same_place_are_refused(parts, saved, capsys, edits, expected):
    with edited(parts, edits):
        message = refusal(parts, saved)
    for fact in expected:
        assert fact in message
    assert LOADING not in capsys.readouterr().out


@pytest.mark.faults
def test_files_of_the_same_content_elsewhere_and_options_without_consequence_are_accepted(
    parts, saved, tmp_path, capsys
):
    folder, moved = shutil.copytree(saved, tmp_path / "run"), shutil.copytree(parts, tmp_path / "moved")
    (moved / "reward.py").write_text(f"# a comment\n{(moved / 'reward.py').read_text()}")
    (moved / "model" / "README.md").write_text("another page")
    train(
        moved,
        folder,
        "worker.reward.reward_function_kwargs={judge: small, api_key: sk-anotherkey1}",
        "worker.reward.num_cpus=2",
        "worker.actor.micro_batch_size_per_device_for_update=2",
        "worker.actor.fsdp.torch_dtype=float32",
        "trainer.save_freq=1",
        "trainer.max_steps=30",
        "trainer.logger=[file]",
    )
    assert [line["step"] for line in lines(folder)] == [1, 2]
    first, second = starts(folder)
    assert (first["after_step"], second["after_step"]) == (0, 1)
    assert second["accepted_changes"] == second["notes"] == []
    # The earlier configuration is kept.
    assert (folder / "earlier_configs" / "001.yaml").read_bytes() == (saved / "config.yaml").read_bytes()
    assert "max_steps: 30" in (folder / "config.yaml").read_text()


@pytest.mark.faults
def test_a_row_whose_image_is_missing_is_left_out_of_a_resumed_run_and_named(parts, tmp_path):
    rows = pq.read_table(parts / "data" / "train.parquet").slice(0, 8).to_pylist()
    for number, row in enumerate(rows):
        (tmp_path / f"{number}.png").write_bytes(row["images"][0]["bytes"])
    examples = [
        {"problem": row["problem"], "answer": row["answer"], "images": [f"{number}.png"]}
        for number, row in enumerate(rows)
    ]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in examples))
    data = (f"data.train_files={tmp_path / 'train.jsonl'}", "data.max_bad_row_fraction=0.25", "data.shuffle=false")
    train(parts, tmp_path / "run", *data)
    for number in (0, 2):
        (tmp_path / f"{number}.png").unlink()
    train(parts, tmp_path / "run", *data)
    [note] = starts(tmp_path / "run")[-1]["notes"]
    assert "train:0 (image_missing), train:2 (image_missing)" in note
    used = (tmp_path / "run" / "rollouts" / "step_000002.jsonl").read_text().splitlines()
    assert {json.loads(row)["prompt_id"] for row in used} == {"train:3", "train:4"}


@pytest.mark.faults
def test_accepted_changes_are_told_and_recorded_until_they_are_what_the_run_is_made_from(
    parts, saved, tmp_path, capsys
):
    folder = shutil.copytree(saved, tmp_path / "run")
    changes = ("worker.actor.optim.lr=2e-3", "worker.rollout.seed=7")
    with pytest.raises(CheckpointError) as caught:
        train(parts, folder, *changes, "trainer.accept_changes=worker.rollout.seed")
    [option] = [line.strip() for line in str(caught.value).splitlines() if "accept_changes" in line]
    assert option == "'trainer.accept_changes=[worker.rollout.seed,worker.actor.optim.lr]'"
    train(parts, folder, *changes, option.strip("'"))
    told = capsys.readouterr().out.replace("\n", " ")
    assert "accepted from step 2 on: worker.rollout.seed was 1, and is now 7" in told
    assert starts(folder)[-1]["accepted_changes"] == [
        {"name": "worker.actor.optim.lr", "text": "was 0.001, and is now 0.002"},
        {"name": "worker.rollout.seed", "text": "was 1, and is now 7"},
    ]
    assert lines(folder)[-1]["metrics"]["actor/lr"] == 0.002
    train(parts, folder, *changes)  # the checkpoint of step 2 is of a run with these options
    assert starts(folder)[-1]["accepted_changes"] == []
    with pytest.raises(CheckpointError, match=r"optim\.lr was 0\.002, and is now 0\.001"):
        train(parts, folder)


@pytest.mark.faults
def test_an_accepted_dataset_is_drawn_from_its_beginning(parts, saved, tmp_path, capsys):
    folder = shutil.copytree(saved, tmp_path / "run")
    with edited(parts, {"data/train.parquet": change_one_answer}):
        train(parts, folder, "trainer.accept_changes=all", "data.shuffle=false")
    names = [change["name"] for change in starts(folder)[-1]["accepted_changes"]]
    assert names == ["data.shuffle", "data.train_files"]
    rows = (folder / "rollouts" / "step_000002.jsonl").read_text().splitlines()
    assert {json.loads(row)["prompt_id"] for row in rows} == {"train:0", "train:1"}


def test_a_named_checkpoint_of_another_run_is_compared_too_and_one_that_is_only_validated_is_not(
    parts, saved, tmp_path, capsys
):
    checkpoint = f"trainer.load_checkpoint_path={saved / 'global_step_1'}"
    with pytest.raises(CheckpointError, match=r"global_step_1 was saved .*\n  worker\.rollout\.seed was 1"):
        train(parts, tmp_path / "run", checkpoint, "worker.rollout.seed=7")
    train(parts, tmp_path / "run", checkpoint, "worker.rollout.seed=7", "trainer.val_only=true")
    assert [line["step"] for line in lines(tmp_path / "run")] == [1]
