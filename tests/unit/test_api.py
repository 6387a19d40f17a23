"""The public names, and how the arguments of trigon.train become a configuration and objects."""

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from PIL import Image

import trigon
from trigon.api import TRAIN, VALIDATION, read_arguments
from trigon.config.load import dump_config, load_config
from trigon.errors import CheckpointError, ConfigError, DataError, RewardError
from trigon.tools.cli.plan import main

REQUIRED = {"worker.rollout.n": 4, "data.rollout_batch_size": 8, "worker.actor.global_batch_size": 8}


def read(**given):
    names = ("model", "data", "reward", "val_data", "config", "loggers", "options")
    arguments = {name: given.pop(name, None) for name in names}
    arguments["options"] = {**REQUIRED, **(arguments["options"] or {})}
    arguments["model"] = arguments["model"] or "owner/model"
    arguments["reward"] = arguments["reward"] or "math"
    arguments["data"] = [{"prompt": "?", "answer": "1"}] if arguments["data"] is None else arguments["data"]
    return read_arguments(**arguments, keyword_options=given)


def configured(**given):
    read_as = read(**given)
    return load_config(read_as.config, read_as.options, python_objects=read_as.objects).config


def test_no_module_hides_a_public_name():
    """An imported module trigon.evaluate would be the attribute of this name from then on."""
    package = Path(trigon.__file__).parent
    modules = {path.stem for path in package.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert modules & set(trigon.__all__) == set()


def make_plan(model, **given):
    options = {**REQUIRED, "data.max_prompt_length": 4096, **given.pop("options", {})}
    return trigon.plan(model=model, options=options, gpus="2xH100-80G", response_tokens=50, **given)


def test_a_run_of_python_objects_is_planned_without_calling_or_pickling_them(tiny_vlm, tmp_path):
    lock = threading.Lock()
    rows = [{"prompt": f"What is {number}?", "answer": "1"} for number in range(20)]
    images = [{"prompt": "<image>?", "answer": "1", "images": [Image.new("RGB", (200, 90))]}] * 16
    text = make_plan(tiny_vlm, data=rows, val_data=rows[:3], reward=lambda completion: lock, trainer={"val_freq": 1})
    assert (text.num_prompts, text.lengths.num_val_prompts) == (20, 3)
    assert text.lengths.sources[0] == "prompts: measured in python:train"
    seen = make_plan(tiny_vlm, data=images)
    assert seen.num_prompts == 16
    assert all(prompt.grids for prompt in seen.lengths.prompts)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    from_file = make_plan(tiny_vlm, data=tmp_path / "rows.jsonl")
    assert from_file.lengths.prompts == text.lengths.prompts
    with pytest.raises(DataError, match=r"python:train has no column 'prompt'"):
        make_plan(tiny_vlm, data=[{"question": "?", "answer": "1"}])


def test_the_configuration_of_a_run_of_python_objects_is_planned(tiny_vlm, tmp_path, capsys):
    rows = [{"prompt": "What?", "answer": "1"}] * 20
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(configured(model=tiny_vlm, data=rows, val_data=rows, reward=len)))
    plan = trigon.plan(file, gpus="2xH100-80G")
    assert (plan.num_prompts, plan.lengths.num_val_prompts) == (None, None)
    assert "python:train was a Python object" in "\n".join(plan.lengths.sources)
    assert trigon.plan(file, gpus="2xH100-80G", data=rows * 2).num_prompts == 40
    assert trigon.plan(file, gpus="2xH100-80G", download=True, num_prompts=9).num_prompts == 9
    main([str(file), "--gpus", "2xH100-80G"])
    assert "python:train was a Python object" in " ".join(capsys.readouterr().out.split())


def test_problems_of_a_planned_configuration_are_errors(tiny_vlm):
    with pytest.raises(TypeError, match=r"plan\(\) has no argument 'gpu'; did you mean gpus"):
        trigon.plan(gpu="8xH100-80G")
    with pytest.raises(ConfigError, match=r"data\.train_files is not set"):
        make_plan(tiny_vlm)
    with pytest.raises(ConfigError, match=r"worker\.rollout\.n is 0"):
        make_plan(tiny_vlm, data="owner/data", options={"worker.rollout.n": 0})


def test_importing_trigon_imports_nothing_and_train_and_load_run_nothing_heavy():
    heavy = ("torch", "transformers", "vllm", "ray", "datasets", "pandas", "pyarrow", "rich", "PIL")
    code = (
        "import sys, trigon; first = [m for m in sys.modules if m.startswith('trigon.') or m == 'pydantic']\n"
        "for name in ('train', 'plan', 'load_run', 'TrainResult', 'RunTables', 'TrigonError'): getattr(trigon, name)\n"
        f"print(first, [m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] []\n"


def test_python_objects_have_names_in_the_configuration():
    rows = [{"prompt": "<image>?", "answer": "1", "images": [Image.new("RGB", (56, 56))]}]

    def accuracy(response, ground_truth):
        return 1.0

    given = {"data": rows, "val_data": rows, "reward": [(accuracy, 2), accuracy]}
    config = configured(**given)
    assert (config.data.train_files, config.data.val_files) == ((TRAIN,), (VALIDATION,))
    assert read(**given).data == {TRAIN: rows, VALIDATION: rows}
    assert config.worker.reward.reward_function == "python:2 * accuracy + 1 * accuracy"


def test_without_validation_data_there_is_no_validation_before_training(tmp_path):
    assert not configured().validates_first
    (tmp_path / "run.yaml").write_text("data: {val_files: owner/data}")
    assert configured(config=tmp_path / "run.yaml").validates_first
    with pytest.raises(ConfigError, match=r"data\.val_files is not set, but validation is on"):
        configured(trainer={"val_before_train": True})


def test_later_arguments_replace_earlier_ones(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "trainer: {max_steps: 1, save_freq: 1, val_freq: -1}\nworker: {actor: {model: {model_path: owner/yaml}}}"
    )
    config = configured(
        config=tmp_path / "run.yaml",
        options={"trainer.max_steps": 2, "trainer.save_freq": 2},
        trainer={"max_steps": 3},
        **{"worker.rollout.temperature": 0.5},
    )
    assert (config.trainer.max_steps, config.trainer.save_freq, config.worker.rollout.temperature) == (3, 2, 0.5)
    assert config.worker.actor.model.model_path == "owner/model"


def test_loggers_are_names_and_objects_and_the_latter_leave_the_names_of_the_configuration(tmp_path):
    mine = object()
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {logger: [console, wandb]}")
    for config, loggers, names, objects in (
        (None, ["console", mine, "tensorboard"], ("console", "tensorboard"), [mine]),
        (None, [mine], ("console", "file"), [mine]),
        (file, (mine,), ("console", "wandb"), [mine]),
        (file, "file", ("file",), []),
    ):
        assert configured(config=config, loggers=loggers).trainer.logger == names
        assert read(config=config, loggers=loggers).loggers == objects


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mdoel": "x"}, TypeError, r"train\(\) has no argument 'mdoel'; did you mean model\?"),
        ({"max_steps": 3}, TypeError, r"no argument 'max_steps'; if trainer.max_steps is meant, give options="),
        ({"callbacks": []}, TypeError, r"no argument 'callbacks'; did you mean on_step\?"),
        ({"report_to": "wandb"}, TypeError, r"no argument 'report_to'; if trainer.logger is meant, give options="),
        ({"model": Image.new("RGB", (1, 1))}, ConfigError, r"model is .* \(Image\); give a hub id or the path"),
        ({"config": {"trainer": {}}}, ConfigError, r"config is .* \(dict\); give the path"),
        ({"data": {"max_prompt_length": 3}}, ConfigError, "data is a dict; give rows as a list of dicts, and options"),
        ({"loggers": threading.Lock()}, ConfigError, r"loggers is a lock; give a list of names .* loggers=\['console'"),
    ],
)
def test_wrong_arguments_are_errors_that_say_what_to_write(arguments, error, message):
    with pytest.raises(error, match=message):
        read(**arguments)


@pytest.mark.parametrize("given", [{"options": ["trainer.max_steps=3"]}, {"tools": "crop"}, {"export_to": 3}])
def test_arguments_of_another_type_are_named(given):
    [(name, value)] = given.items()
    with pytest.raises(ConfigError, match=rf"{name} is .* \({type(value).__name__}\); give "):
        trigon.train(model="owner/model", data=[{"prompt": "?", "answer": "1"}], reward="math", **given)


def test_what_cannot_travel_and_what_is_no_data_are_errors_of_train_before_anything_heavy():
    rows = [{"prompt": "?", "answer": "1"}]
    lock = threading.Lock()
    arguments = {"model": "owner/model", "options": {**REQUIRED}}
    with pytest.raises(RewardError, match=r"'lambda' cannot be sent to other processes .*_thread"):
        trigon.train(**arguments, data=rows, reward=lambda completion: lock)
    with pytest.raises(RewardError, match=r"takes \(samples, limit\), which fits no contract"):
        trigon.train(**arguments, data=rows, reward=lambda samples, limit: 1.0)
    arguments["options"] |= {"worker.reward.reward_function_kwargs": {"limit": 3}}
    with pytest.raises(DataError, match="row 0, 'answer' is a builtins"):  # the reward fits one then
        trigon.train(**arguments, data=[{"prompt": "?", "answer": object()}], reward=lambda samples, limit: 1.0)
    with pytest.raises(DataError, match="row 0, 'answer' is a builtins"):
        trigon.train(**arguments, data=[{"prompt": "?", "answer": object()}], reward="math")


def test_a_model_that_was_exported_is_loaded_without_another_export(tmp_path, tiny_model):
    checkpoint = tmp_path / "global_step_3"  # without weights: it cannot be exported
    result = trigon.TrainResult(tmp_path, 3, False, checkpoint, None)
    exported = checkpoint / "huggingface_model"
    shutil.copytree(tiny_model("qwen2"), exported)
    with pytest.raises(CheckpointError):  # some folder, which no export has finished
        result.load_model()
    (exported / "trigon_export.json").write_text(json.dumps({"step": 3}))
    assert result.load_model().config.model_type == "qwen2"


def test_without_a_checkpoint_there_is_no_model(tmp_path):
    for checkpoint, message in (
        (None, "has no checkpoint: it has made no step"),
        (tmp_path / "global_step_3", "no ch"),
    ):
        result = trigon.TrainResult(tmp_path, 3, False, checkpoint, None)
        for method in (result.export, result.load_model):
            with pytest.raises(CheckpointError, match=message):
                method()
