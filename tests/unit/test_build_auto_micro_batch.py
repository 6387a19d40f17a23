"""Token budgets that are measured on the device and stored in the run folder."""

import pytest

from trigon.assemble.engines import Engines, tune_plan
from trigon.config.plan import make_plan
from trigon.config.schema import Config
from trigon.errors import CheckpointError
from trigon.report.console import Console
from trigon.report.reporter import Reporter
from trigon.report.run_folder import RunFolder
from trigon.training.budget import Budgets, Lengths
from trigon.training.fake import FakeTrainEngine

BUDGETS = Budgets(
    update_tokens=36_864,
    update_bytes=43 * 2**30,
    experience_tokens=98_304,
    experience_bytes=61 * 2**30,
    device="Emulated",
    device_bytes=139 * 2**30,
)


def make_config(*, auto: bool | None = True, **model) -> Config:
    return Config(
        data={"max_prompt_length": 100, "max_response_length": 30, "rollout_batch_size": 8},
        worker={"actor": {"global_batch_size": 4, "model": {"model_path": "some/model", **model}}, "rollout": {"n": 5}},
        trainer={"auto_micro_batch": auto},
    )


def tune(config: Config, folder: RunFolder, *, resumes: bool = False) -> tuple[tuple[int, int], list[tuple]]:
    """Return the token budgets of the tuned plan, and the arguments of each measurement."""
    calls: list[tuple] = []

    def tune_micro_batch(lengths: Lengths, known: Budgets | None) -> Budgets:
        calls.append((lengths, known))
        return BUDGETS

    console = Console(progress=False, step_lines=False)
    plan = tune_plan(
        config,
        make_plan(config, num_train_prompts=1000),
        Engines("", FakeTrainEngine(), None, None, None, tune_micro_batch),
        folder,
        Reporter(folder, console),
        console,
        image_pixels=5000,
        resumes=resumes,
    )
    return (plan.tokens_per_update_pass, plan.tokens_per_experience_pass), calls


def test_measured_budgets_go_into_the_plan_and_are_reused_on_resume_unless_the_model_options_change(tmp_path, capsys):
    def output() -> str:
        return " ".join("".join(capsys.readouterr()).split())

    with RunFolder(tmp_path) as folder:
        budgets, calls = tune(make_config(), folder)
        assert budgets == (36_864, 98_304)
        assert calls == [(Lengths(100, 30, 5000, update_tokens=4 * 250, step_tokens=8 * 250), None)]
        said = output()
        for fact in ("36,864 tokens", "43.0 GiB of 139.0 GiB", "98,304", "61.0 GiB"):
            assert fact in said

        _, calls = tune(make_config(vision_cache_gb=1.0), folder, resumes=True)  # does not change device memory
        assert calls[0][1] == BUDGETS
        said = output()
        assert "reused" in said
        assert "measured again" not in said

        _, calls = tune(make_config(enable_gradient_checkpointing=False), folder, resumes=True)
        assert calls[0][1] is None
        assert "measured again" in output()

        tune(make_config(auto=None), folder)  # on by default, which makes other options unused
        assert "trainer.auto_micro_batch=false" in output()


def test_stored_budgets_that_cannot_be_parsed_are_an_error(tmp_path):
    with RunFolder(tmp_path) as folder:
        for content in ("{", "[1]"):
            (tmp_path / "auto_micro_batch.json").write_text(content)
            with pytest.raises(CheckpointError, match=r"auto_micro_batch.json.*remove it"):
                tune(make_config(), folder)
        (tmp_path / "auto_micro_batch.json").write_text('{"of another": "version"}')
        assert tune(make_config(), folder)[1][0][1] is None
