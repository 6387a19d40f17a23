"""`trigon check`: each planted fault is named, and nothing else; a good run has no problem."""

import copy
import json
import re
import shutil
import socket
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from support.images import png
from support.planted import FAULTS, GIB, MACHINE, MAZE, TOGETHER, good_run, plant_environment
from support.recipes import EXAMPLES, ROOT, arguments_of
from trigon.assemble.memory import count_checkpoints
from trigon.checkpoint.store import CheckpointStore
from trigon.config.load import inspect_config, load_config, split_arguments
from trigon.data.rows import Reason
from trigon.models.load import copy_side_files, load_processors
from trigon.report.run_folder import RunFolder
from trigon.system.files import read_json_object
from trigon.tools.check.dataset import ADVICE, RowFacts
from trigon.tools.check.machine import Gpu, check_devices, check_memory, check_network, check_run_folder
from trigon.tools.check.model import check_model, find_max_pixels, find_missing_header, token_counter
from trigon.tools.check.rewards import asked_formats, final_answer
from trigon.tools.check.run import Result, check_run

PAGE = (ROOT / "docs" / "check.md").read_text(encoding="utf-8").partition("\n## Checking a machine\n")[0]
"""What the page says about a configuration."""
SKIPPED_ROWS = (ROOT / "docs" / "data.md").read_text(encoding="utf-8").partition("\n## Skipped rows\n")[2]
SKIPPED_ROWS = SKIPPED_ROWS.partition("\n## ")[0]
"""The reasons for which a row is skipped; the check `rows` names a problem after each."""


@pytest.fixture(autouse=True)
def _own_cache(own_datasets_cache):
    """Do not fill the cache that other tests share."""


@pytest.fixture
def run(tmp_path, tiny_vlm):
    return good_run(tmp_path, tiny_vlm)


def check(run):
    return check_run(None, run.write(), machine=run.machine)


def found(report):
    return {problem.kind for problem in report.problems}


def shown(report):
    return "\n".join(f"{problem.kind}: {problem.message}" for problem in report.problems)


def test_a_good_run_has_no_problem_and_no_weights_are_read(run, tiny_vlm, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny_vlm, model)
    (model / "model.safetensors").write_bytes(b"no weights")
    run.options["worker.actor.model.model_path"] = model
    report = check(run)
    assert found(report) == set(), shown(report)
    assert not report.would_fail
    skipped = {name for name, result in report.results.items() if result.status == "skipped"}
    assert skipped == {"network"}  # one worker opens no port
    checks = re.findall(r"^\| `([\w ]+)` \|", PAGE, flags=re.MULTILINE)
    assert list(report.results) == checks


@pytest.mark.extended
def test_without_the_model_rows_and_rewards_are_checked(run, monkeypatch):
    """A hub that is out of reach hides neither an unreadable image nor a wrong reward function."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else it is tried again for seconds
    run.options["worker.actor.model.model_path"] = "owner/out-of-reach"
    report = check(run)
    assert found(report) == {"model.unusable"}, shown(report)
    status = {name: result.status for name, result in report.results.items()}
    needs_model = {name for name, each in status.items() if each == "skipped"} - {"network"}
    assert needs_model == {"memory", "environment", "template", "lengths", "prompt", "episode", "disk"}
    assert report.results["memory"].skipped == "see the check 'model'"
    run.train[3]["images"] = ["absent.png"]
    assert found(check(run)) == {"model.unusable", "rows.image_missing"}


@pytest.mark.long(but=["a reward function that hangs on nothing"])
@pytest.mark.parametrize("name", [name for name in FAULTS if name not in TOGETHER])
def test_exactly_the_planted_fault_is_named(run, name, monkeypatch):
    kind, plant = FAULTS[name]
    if kind == "versions.package":
        monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    plant(run)
    report = check(run)
    assert found(report) == {kind}, shown(report)


def test_all_faults_of_a_dataset_are_named_at_once(run):
    for name in TOGETHER:
        FAULTS[name][1](run)
    report = check(run)
    planted = Counter(FAULTS[name][0] for name in TOGETHER)
    assert found(report) == set(planted), shown(report)
    assert report.would_fail
    rows = {problem.kind: problem.message for problem in report.results["rows"].problems}
    for kind, message in rows.items():
        assert f"{planted[kind]} of 40 rows" in message


def test_every_kind_of_problem_is_planted_or_has_a_test():
    planted = {kind for kind, _ in FAULTS.values()}
    with_tests = {"devices.used", "network.loopback", "loggers.package", "memory.tight", "model.kernels"}
    with_tests |= {"folder.used", "checkpoint.unusable", "checkpoint.damaged", "steps.complete"}
    videos = {f"rows.{reason}" for reason in ADVICE if reason.startswith("video_")}  # as images, by the code of a run
    named = {*re.findall(r"^\| `(\w+\.\w+)` \|", PAGE, flags=re.MULTILINE)} - {"rows.REASON"}
    cells = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", SKIPPED_ROWS, flags=re.MULTILINE)
    reasons = {reason for cell in cells for reason in re.findall(r"\w+", cell)} - {"overlong"}
    assert planted | with_tests | videos == named | {f"rows.{reason}" for reason in reasons}
    assert set(ADVICE) == set(get_args(Reason)) - {"overlong"}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "status"), [("some long prompts", "warning"), ("many long prompts", "fail"), ("large images", "warning")]
)
def test_the_advice_on_lengths_makes_all_rows_fit(run, name, status):
    FAULTS[name][1](run)
    lengths = check(run).results["lengths"]
    assert lengths.status == status
    (problem,) = lengths.problems
    values = dict(re.findall(r"(data\.max_\w+) to (\d+)", problem.advice))
    if name == "large images":
        assert problem.advice.startswith("lower data.max_pixels")
        assert set(values) == {"data.max_pixels", "data.max_prompt_length"}
    else:
        assert problem.advice.startswith("raise data.max_prompt_length")
    for key, value in values.items():
        options = run.options
        run.options = options | {key: value, "data.max_response_length": 16}
        report = check(run)
        run.options = options
        assert found(report) == set(), (key, value, shown(report))


def test_the_advised_number_of_pixels_is_the_largest_with_which_images_of_different_shapes_fit(tiny_vlm):
    processors = load_processors(str(tiny_vlm))
    config = inspect_config(None, ["data.max_prompt_length=150"]).config
    sizes = ((2000, 20), (30, 900), (640, 480))
    row = RowFacts("row", 0, "1", num_tokens=1100, media_tokens=1050, image_sizes=sizes)
    pixels = find_max_pixels(config, processors, [row])
    side = processors.family.patch_size(processors.hf_config) * processors.family.spatial_merge(processors.hf_config)

    def num_tokens(pixels):
        return 50 + sum(token_counter(processors, max_pixels=pixels)(*size) for size in sizes)

    assert num_tokens(pixels) <= 150 < num_tokens(pixels + side**2)
    assert find_max_pixels(config, processors, [replace(row, media_tokens=900)]) is None  # the text is too long


def test_an_invalid_option_skips_only_the_checks_that_read_it(run):
    run.options["data.max_prompt_length"] = "many"
    run.options["trainer.save_freq"] = "often"
    run.options["worker.actor.global_batch_size"] = 3
    report = check(run)
    invalid = [problem.message for problem in report.problems]
    assert len(invalid) == 3
    assert found(report) == {"configuration.invalid"}
    assert "data.max_prompt_length" in report.results["rows"].skipped
    for name in ("model", "devices", "loggers"):
        assert report.results[name].status == "pass"
    assert "trainer.save_freq" in report.results["disk"].skipped


def found_by(check, run, *parts, **options):
    """Return what one check finds. The configuration is that of the run."""
    result = Result("one")
    check(result, inspect_config(None, run.write()).config, *parts, **options)
    return result


def kinds_of(result):
    return [problem.kind for problem in result.problems]


def test_a_gpu_that_another_process_uses(run):
    run.options |= {"worker.rollout.name": "vllm", "trainer.device": "auto"}
    gpus = (Gpu("a GPU", 80 * GIB, 79 * GIB), Gpu("a GPU", 80 * GIB, 20 * GIB))
    run.options["trainer.n_gpus_per_node"] = 2
    [problem] = found_by(check_devices, run, replace(MACHINE, gpus=gpus)).problems
    assert (problem.kind, "20.0 GiB of 80.0 GiB" in problem.message) == ("devices.used", True)
    assert kinds_of(found_by(check_devices, run, replace(MACHINE, gpus=(gpus[0],) * 2))) == []
    # GPUs of a cluster are not compared with those of this machine.
    run.options["trainer.n_gpus_per_node"] = 8
    assert kinds_of(found_by(check_devices, run, replace(MACHINE, has_cluster=True))) == []


@pytest.mark.extended
@pytest.mark.parametrize(
    ("model_type", "width", "billions", "key_values", "parallel_sizes"),
    [
        ("qwen3_5", 4096, "9.41", 2 * 8 * 4 * 256, (1, 2, 4, 8, 16)),
        ("qwen3_5_moe", 2048, "35.11", 2 * 10 * 2 * 256, (1, 2, 4, 8, 16)),  # Qwen3.5-35B-A3B
    ],
)
def test_the_published_shape_of_qwen3_5_is_accepted_without_its_weights(
    run, tiny_model, tmp_path, model_type, width, billions, key_values, parallel_sizes
):
    import transformers

    tiny, folder = tiny_model(model_type), tmp_path / "published"
    copy_side_files(tiny, folder)
    tokens = {key: value for key, value in read_json_object(tiny / "config.json").items() if key.endswith("token_id")}
    kind = transformers.AutoConfig.for_model(model_type).__class__
    config = kind(vision_config={"out_hidden_size": width}, **tokens)  # the other sizes are its own
    config.text_config.rope_parameters |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    config.save_pretrained(folder)
    run.options |= {"worker.actor.model.model_path": str(folder), "trainer.device": "auto"}
    result = Result("model")
    model = check_model(result, inspect_config(None, run.write()).config, on_gpus=True)
    assert kinds_of(result) == ["model.unusable", "model.kernels"]  # the first: there are no weights
    assert "no weights" in result.problems[0].message
    assert "flash-linear-attention" in result.problems[1].advice
    assert result.summary.startswith(f"{model_type}, {billions} billion weights")
    assert kinds_of(found_by(check_model, run)) == ["model.unusable"]
    size = model.require_size()
    assert size.key_values == key_values  # one layer of four has keys and values
    assert size.tensor_parallel_sizes == parallel_sizes


def test_an_unsupported_model_type_is_named_with_the_nearest_supported_one(run, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_omni_moe", "thinker_config": {"vision_config": {}}}')
    run.options["worker.actor.model.model_path"] = str(tmp_path)
    [problem] = found_by(check_model, run).problems
    assert problem.kind == "model.unusable"
    assert {"qwen3_omni_moe", "qwen3_vl_moe", "docs/model-families.md"} <= {*re.findall(r"[\w/.-]*\w", problem.message)}


def test_workers_that_cannot_connect(run, monkeypatch):
    run.options["trainer.n_gpus_per_node"] = 2
    assert kinds_of(found_by(check_network, run)) == []

    def refuse(*arguments, **options):
        raise PermissionError("not permitted")

    monkeypatch.setattr(socket, "create_server", refuse)
    assert kinds_of(found_by(check_network, run)) == ["network.loopback"]


def test_a_model_that_the_workers_cannot_divide(run):
    run.options |= {"worker.rollout.name": "vllm", "trainer.n_gpus_per_node": 8}
    for option in ("worker.rollout.tensor_parallel_size", "worker.actor.ulysses_sequence_parallel_size"):
        run.options[option] = 8
        [problem] = found_by(check_model, run).problems
        del run.options[option]
        assert (problem.kind, option in problem.message) == ("model.unusable", True)


def test_tight_memory(run):
    model = check_model(Result("model"), inspect_config(None, run.write()).config)
    roomy, tight = Result("memory"), Result("memory")
    check_memory(roomy, model, MACHINE)
    gib = float(re.search(r"at most ([\d.]+) GiB", roomy.summary)[1])
    check_memory(tight, model, replace(MACHINE, host_bytes=int(gib * GIB)))
    assert kinds_of(tight) == ["memory.tight"]


def test_a_run_folder_that_another_run_writes_to_and_damaged_checkpoints(run, tmp_path):
    run.options["trainer.save_checkpoint_path"] = tmp_path / "run"
    config = inspect_config(None, run.write()).config
    used, damaged = Result("run folder"), Result("run folder")
    with RunFolder(tmp_path / "run"):
        assert check_run_folder(used, config) == 0
    assert kinds_of(used) == ["folder.used"]

    def write(folder: Path) -> None:
        (folder / "weights").write_text("w")

    store = CheckpointStore(tmp_path / "run", keep=-1)
    for step in (1, 2):
        store.save(step, write=write, progress={}, score=None)
    (tmp_path / "run" / "global_step_2" / "actor" / "weights").unlink()
    validated = [*run.write(), "trainer.val_only=true"]  # reads the weights only
    assert check_run_folder(damaged, inspect_config(None, validated).config) == 1
    assert kinds_of(damaged) == ["checkpoint.damaged"]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ([], 1),  # after the last step
        (["save_freq=10"], 10),
        (["save_freq=30"], 4),
        (["save_freq=10", "save_limit=3"], 4),  # three, the best among them, and one that is written
        (["save_freq=10", "save_limit=1", "val_freq=10"], 3),  # the newest, the best, and one that is written
        (["save_freq=10", "save_limit=1", "val_freq=-1"], 2),  # no checkpoint is the best
    ],
)
def test_the_checkpoints_that_are_kept(options, kept):
    config = inspect_config(None, ["data.val_files=a/b", *(f"trainer.{each}" for each in options)]).config
    assert count_checkpoints(config, total_steps=100) == kept


HEADED = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "missing"),
    [
        (HEADED, "<|assistant|>"),
        (HEADED + "{% if add_generation_prompt %}<|assistant|>{% endif %}", None),
        # As Mistral's, whose assistant has no header.
        (
            "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}"
            "</s>{% endif %}{% endfor %}",
            None,
        ),
        ("{{ raise_exception('no') }}", None),
    ],
)
def test_a_missing_generation_prompt_is_recognized(processors, template, missing):
    tokenizer = copy.deepcopy(processors.tokenizer)
    tokenizer.chat_template = template
    assert find_missing_header(tokenizer) == missing


@pytest.mark.parametrize(
    ("instructions", "first", "number"),
    [
        (r"Answer in \boxed{}.", r"\boxed{7}", 2),
        (r"Think between <think> and </think>, then \boxed{}.", r"<think>...</think> \boxed{7}", 1),
        (r"Put \boxed{} between <answer> and </answer>.", r"<answer>\boxed{7}</answer>", 2),
        ('Finish with a line "Answer: ...".', "Answer: 7", 2),
        ("End with #### and the number.", "#### 7", 2),
        ("Think between <think> and </think>.", None, 0),
    ],
)
def test_the_formats_that_a_prompt_asks_for(instructions, first, number):
    asked = asked_formats(instructions)
    assert len(asked) == number
    if first is not None:
        assert (
            asked[0].write("7").replace("A made completion has no thoughts of its own.", "...").split() == first.split()
        )


@pytest.mark.parametrize(
    ("ground_truth", "answer"),
    [("3", "3"), (3, "3"), (2.5, "2.5"), ("<answer> 3 </answer>", "3"), (r"so \boxed{3}", "3"), ([1, 2], "[1, 2]")],
)
def test_a_ground_truth_becomes_a_final_answer(ground_truth, answer):
    assert final_answer(ground_truth) == answer


@pytest.mark.extended
def test_a_reward_function_of_groups_is_called_and_not_judged(run):
    run.reward = (
        'REWARD_TYPE = "group"\ndef score(reward_inputs):\n    return [len(reward_inputs)] * len(reward_inputs)\n'
    )
    report = check(run)
    assert found(report) == set()
    assert "depend on the other completions of a prompt are not judged" in report.results["reward"].summary
    run.reward = 'REWARD_TYPE = "group"\ndef score(reward_inputs):\n    return [1]\n'
    assert found(check(run)) == {"reward.fails"}


@pytest.mark.extended
def test_the_reward_function_of_validation_is_called_too(run):
    (run.folder / "strict.py").write_text("def main(response, ground_truth):\n    raise ValueError('strict')\n")
    run.options["worker.reward.val_reward_function"] = f"{run.folder / 'strict.py'}:main"
    report = check(run)
    assert found(report) == {"reward.fails"}
    [problem] = report.problems
    assert "val_reward_function" in problem.message
    assert "ValueError: strict" in problem.message


@pytest.mark.extended
def test_an_environment_is_begun_and_its_reward_is_no_problem_without_turns(run):
    plant_environment(run, MAZE)
    for row in (*run.train, *run.validation):
        row["answer"] = "0"  # which the environment knows
    report = check(run)
    assert found(report) == set(), shown(report)
    assert report.results["environment"].summary.endswith("maze.py:Maze; at most 8 turns, in messages of the role user")
    episode = report.results["episode"]
    assert episode.text == "<|im_start|>user\nYou are at 0.<|im_end|>\n<|im_start|>assistant\n"
    assert report.results["prompt"].text.endswith("<|im_end|>\n")  # the first observation follows
    assert "not judged" in report.results["reward"].summary


EXAMPLES_ROWS = {
    "qwen2_5_vl_3b_geo3k_grpo": [("<image>Find x.", answer) for answer in ("48", r"\frac{1}{2}", "2.5", r"12\sqrt{3}")],
    "qwen3_14b_dapo17k_dapo": [("What is half of it?", answer) for answer in ("48", "7", "-3", "1000")],
    "baselines/qwen2_5_vl_3b_clevr": [("<image>How many?", answer) for answer in ("3", "5", "0", "10")],
    "baselines/qwen2_5_vl_3b_geoqa8k": [("<image>What is it?", answer) for answer in ("145°", "10√3", "25π", "5 cm")],
    "qwen2_5_vl_7b_multi_image": [("<image>\n<image>\nWhich?", answer) for answer in ("A", "two", "red", "no")],
    "qwen2_5_vl_7b_visual_search_crop": [("<image>Is it?", answer) for answer in ("tan", "yes", "left", "no")],
    "qwen2_5_vl_3b_android_gui_grpo": [("Open it.", box) for box in ([0.1, 0.2, 0.3, 0.4], [0.5, 0.5, 0.6, 0.6])],
}


@pytest.mark.extended(but=["qwen2_5_vl_3b_geo3k_grpo"])
@pytest.mark.parametrize("name", EXAMPLES_ROWS)
def test_the_shipped_recipes_have_no_problem(name, tmp_path, tiny_vlm, monkeypatch):
    monkeypatch.chdir(ROOT)
    questions = EXAMPLES_ROWS[name] * 8
    given = arguments_of(EXAMPLES / f"{name}.sh", tmp_path / "recipe", environment={"DATA": str(tmp_path)})
    config = load_config(*split_arguments([*given, "data.train_files=a/b", "data.val_files=a/b"])).config
    files = []
    for split, seed in (("train", 0), ("test", 1000)):
        rows = []
        for index, (text, answer) in enumerate(questions):
            images = [f"{split}{index}_{number}.png" for number in range(max(1, text.count("<image>")))]
            for number, image in enumerate(images):
                (tmp_path / image).write_bytes(png(seed=seed + 2 * index + number))
            row = {config.data.prompt_key: f"{text} ({split} {index})", config.data.answer_key: answer}
            rows.append(row | ({config.data.image_key: images} if "dapo17k" not in name else {}))
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files.append(tmp_path / f"{split}.jsonl")
    small = [
        f"data.train_files={files[0]}",
        f"data.val_files={files[1]}",
        f"worker.actor.model.model_path={tiny_vlm}",
        *("data.max_prompt_length=2048", "data.max_response_length=512", "data.rollout_batch_size=8"),
        *("worker.actor.global_batch_size=8", "data.mini_rollout_batch_size=8"),
        f"trainer.save_checkpoint_path={tmp_path / 'run'}",
        "worker.rollout.name=transformers",
        "worker.rollout.tensor_parallel_size=1",
    ]
    gpus = (Gpu("a GPU", 80 * GIB, 80 * GIB),) * config.trainer.n_gpus_per_node
    report = check_run(*split_arguments([*given, *small]), machine=replace(MACHINE, gpus=gpus))
    assert found(report) - {"configuration.warning"} == set(), shown(report)
