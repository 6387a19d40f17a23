"""trigon eval on a run's checkpoints has the numbers of the run's own validation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support import runs
from trigon.cli.main import main
from trigon.errors import ConfigError
from trigon.evaluation.evaluate import evaluate
from trigon.records.rollouts import read_rollouts
from trigon.records.run import open_run

pytestmark = pytest.mark.extended

STEPS = 2


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model and its data."""
    return runs.make_tiny(tmp_path_factory.mktemp("evaluation") / "made")


@pytest.fixture(scope="module")
def trained(made: Path) -> Path:
    """Return the run folder of a run of two steps, each with a checkpoint and a validation."""
    folder = made.parent / "run"
    process = runs.start(
        made,
        folder,
        "worker.reward.reward_function=math",
        "trainer.val_freq=1",
        "trainer.save_freq=1",
        "algorithm.disable_kl=true",
        steps=STEPS,
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
    exported = trained / f"global_step_{STEPS}" / "huggingface_model"
    arguments = [str(exported), "--config", str(trained / "config.yaml"), "--output", str(tmp_path / "exported")]
    assert main(["eval", *arguments, "--json"]) == 0
    [model] = json.loads(capsys.readouterr().out)["models"]
    assert model["summary"]["accuracy"]["value"] == validation_of(trained, STEPS)[0]["val/accuracy_reward"]


def test_models_are_compared_and_images_are_taken_away(trained, made, tmp_path):
    data = made / "data" / "validation.parquet"
    output = tmp_path / "out"

    def run():
        return evaluate(
            [trained, made / "model"],
            data,
            n=2,
            limit=12,
            by=["dataset"],
            blind=True,
            engine="transformers",
            output=output,
            overrides=["data.val_batch_size=5"],
        )

    evaluation = run()
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

    again = run()  # in the same folder
    assert again.to_json() == evaluation.to_json()
    (output / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"notes\.txt, which no evaluation has written"):
        run()
    assert (output / "notes.txt").read_text() == "mine"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is no earlier evaluation"):
        evaluate(trained, data, output=tmp_path / "mine")
