"""trigon eval on a run's checkpoints has the numbers of the run's own validation.

So have exports of them, which transformers and vLLM's server give the run's pixels and prompts.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from support import runs
from support.served import served
from trigon.assemble.data import open_builder, open_processors
from trigon.checkpoint.export import export_checkpoint
from trigon.config.load import load_config
from trigon.data.images import open_image
from trigon.data.media_files import MediaSource
from trigon.data.sources import open_source
from trigon.errors import ConfigError
from trigon.report.rollouts import read_rollouts
from trigon.report.run import open_run
from trigon.tools.cli.main import main
from trigon.tools.eval.evaluate import evaluate, locate_run
from trigon.types import Prompt, Vision

pytestmark = pytest.mark.extended

STEPS = 2
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}: {% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type in ('image', 'image_url') %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)
"""Another chat template than the model's."""


@pytest.fixture(scope="module")
def made(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the model and its data that no other test reads."""
    return shutil.copytree(made, tmp_path_factory.mktemp("evaluation") / "made")


@pytest.fixture(scope="module")
def trained(made: Path) -> Path:
    """Return the run folder of a run of two steps, each with a checkpoint and a validation."""
    folder = made.parent / "run"
    (made.parent / "question.jinja").write_text("{{ content }} Count twice.")
    process = runs.start(
        Path(made.name),  # relative paths, from another folder than that of the evaluations
        folder,
        "worker.reward.reward_function=math",
        "worker.rollout.val_override_config.temperature=0",
        "data.format_prompt=question.jinja",
        "data.system_prompt=You look closely.",
        f"data.override_chat_template={TEMPLATE}",
        "data.min_pixels=12544",  # 16 tokens for each drawing, which has 9 of its own size
        "data.max_prompt_length=160",
        "trainer.val_freq=1",
        "trainer.save_freq=1",
        "algorithm.disable_kl=true",
        steps=STEPS,
        cwd=made.parent,
    )
    runs.finish(process, folder)
    return folder


def validation_of(run: Path, step: int) -> tuple[dict[str, float], list[tuple[str, str]]]:
    """Return the metrics of a step, and prompt and completion of its validation rollouts."""
    [metrics] = [line["metrics"] for line in runs.lines(run) if line["step"] == step]
    rows = read_rollouts(run / "rollouts" / f"validation_{step:06d}.jsonl")
    return metrics, [(row.prompt_id, row.response) for row in rows]


def test_a_checkpoint_has_the_validation_of_its_step(trained, tmp_path, capsys):
    for spec, step in ((trained, STEPS), (trained / "global_step_1", 1)):
        output = tmp_path / f"out{step}"
        assert main(["eval", str(spec), "--output", str(output), "--json"]) == 0
        content = json.loads(capsys.readouterr().out)
        [model] = content["models"]
        metrics, completions = validation_of(trained, step)
        again, sampled = validation_of(output, step)
        assert sampled == completions
        assert model["summary"]["accuracy"]["value"] == metrics["val/accuracy_reward"]
        assert {key: value for key, value in again.items() if key.startswith("val")} == {
            key: value for key, value in metrics.items() if key.startswith("val")
        }
        assert content == json.loads((output / "evaluation.json").read_text())


@pytest.fixture(scope="module")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an export of the run that is far from the run's folder."""
    return export_checkpoint(trained, tmp_path_factory.mktemp("far") / "model", dtype=None, logits=False)


def eval_export(exported: Path, made: Path, output: Path, *arguments: str) -> int:
    data = str(made / "data" / "validation.parquet")
    keys = ["--reward", "math", "--prompt-key", "problem"]
    return main(["eval", str(exported), data, *keys, "--output", str(output), *arguments])


def test_an_export_alone_has_the_validation_of_its_run(trained, exported, made, tmp_path, capsys):
    assert eval_export(exported, made, tmp_path / "out", "--json") == 0
    printed = capsys.readouterr()
    [model] = json.loads(printed.out)["models"]
    metrics, completions = validation_of(trained, STEPS)
    assert validation_of(tmp_path / "out", 0)[1] == completions
    assert model["summary"]["accuracy"]["value"] == metrics["val/accuracy_reward"]
    for said in ("You look closely.", "Count twice.", "data.min_pixels=12544"):
        assert said in printed.err
    assert "not evaluated as its run" not in printed.err
    arguments = ("data.system_prompt=Guess.", "--temperature", "1", "--limit", "2")
    assert eval_export(exported, made, tmp_path / "other", *arguments) == 0
    [warning] = [text for text in capsys.readouterr().out.split("warning: ") if "not evaluated as its run" in text]
    for said in ("data.system_prompt", "You look closely.", "Guess.", "temperature"):
        assert said in warning


@pytest.fixture(scope="module")
def validated(trained: Path) -> list[tuple[Prompt, list[dict[str, Any]], Image.Image]]:
    """Return the prompts of the run's validation with pixels, as messages, and their images."""
    made = trained.parent / "made"
    overrides = [f"{name}={value}" for name, value in locate_run(trained).items() if isinstance(value, str)]
    overrides += [f"data.val_files={made / 'data' / 'validation.parquet'}", "trainer.val_only=true"]
    config = load_config(
        trained / "config.yaml", [*overrides, f"worker.actor.model.model_path={made / 'model'}"]
    ).config
    builder = open_builder(config, open_processors(config), process_images=True)
    rows = open_source(config.data.val_files[0]).rows
    found = []
    for number in range(8):
        row = rows[number]
        before, _, after = row["problem"].partition("<image>")
        text = [{"type": "text", "text": each} for each in (before, f"{after} Count twice.")]
        content = [text[0], {"type": "image"}, text[1]]
        messages = [
            {"role": "system", "content": [{"type": "text", "text": "You look closely."}]},
            {"role": "user", "content": [part for part in content if part.get("text") != ""]},
        ]
        image = open_image(MediaSource(row["images"][0], "", 10**6))
        found.append((builder.build(row, str(number)), messages, image))
    return found


def test_transformers_gives_an_export_the_pixels_and_prompts_of_its_run(exported, validated):
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(exported)
    for prompt, messages, image in validated:
        text = processor.apply_chat_template(messages, add_generation_prompt=True)
        inputs = processor(text=[text], images=[image], return_tensors="pt")
        assert tuple(inputs["input_ids"][0].tolist()) == prompt.token_ids
        assert isinstance(prompt.vision, Vision)
        assert torch.equal(inputs["pixel_values"], prompt.vision.pixel_values)
        assert inputs["image_grid_thw"].prod() == 64  # 16 tokens of 4 patches


@pytest.mark.long
@pytest.mark.alone
def test_vllms_server_gives_an_export_the_prompts_and_completions_of_its_run(trained, exported, validated, tmp_path):
    pytest.importorskip("vllm")
    _, completions = validation_of(trained, STEPS)
    expected = {int(name.rpartition(":")[2]): text for name, text in completions}
    with served(exported, tmp_path / "log.txt", "--served-model-name", "export") as address:
        for number, (prompt, messages, image) in enumerate(validated):
            file = io.BytesIO()
            image.save(file, "png")
            url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
            [system, user] = messages
            parts = [
                {"type": "image_url", "image_url": {"url": url}} if part["type"] == "image" else part
                for part in user["content"]
            ]
            body = {"model": "export", "messages": [system, {"role": "user", "content": parts}], "temperature": 0}
            body |= {"max_tokens": 24, "return_token_ids": True}
            request = urllib.request.Request(
                f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            answer = json.load(urllib.request.urlopen(request, timeout=120))
            assert tuple(answer["prompt_token_ids"]) == prompt.token_ids
            assert answer["choices"][0]["message"]["content"] == expected[number]


def test_models_are_compared_and_images_are_taken_away(trained, made, tmp_path):
    data = made / "data" / "validation.parquet"
    output = tmp_path / "out"

    options = {"n": 2, "temperature": 1.0, "limit": 12, "by": ["dataset"], "blind": True, "engine": "transformers"}
    options |= {"output": output, "options": ["data.val_batch_size=5"]}
    evaluation = evaluate([trained, made / "model"], data, **options)
    first, second = evaluation.models
    assert (first.step, second.step) == (STEPS, 0)
    assert first.summary.num_prompts == second.summary.num_prompts == 12
    assert first.summary.num_completions == 24
    assert set(first.summary.pass_at) == {1, 2}
    assert first.by["dataset"]["validation"].accuracy == first.summary.accuracy
    [comparison] = evaluation.comparisons
    assert comparison.difference.num_prompts == 12
    assert comparison.difference.value == pytest.approx(second.summary.accuracy.value - first.summary.accuracy.value)
    assert first.blind is not None
    assert first.blind.num_with_images == 12
    shown, hidden = (open_run(folder) for folder in (first.folder, first.blind.folder))
    assert shown.config()["trainer"]["val_only"] is True
    rows = [[row for _, row in record.rollouts()] for record in (shown, hidden)]
    assert [row.prompt_id for row in rows[0]] == [row.prompt_id for row in rows[1]]
    assert [row.num_prompt_tokens for row in rows[0]] == [row.num_prompt_tokens for row in rows[1]]
    assert [row.response for row in rows[0]] != [row.response for row in rows[1]]

    (output / "notes.txt").write_text("mine")
    again = evaluate([trained, made / "model"], data, **options)  # in the same folder
    assert again.to_json() == evaluation.to_json()
    assert (output / "notes.txt").read_text() == "mine"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is no earlier evaluation"):
        evaluate(trained, data, output=tmp_path / "mine")
