"""The comparisons of the checks of vLLM, and the random models that they are made with."""

from __future__ import annotations

import math

import pytest
import torch

from support.models import processors_of
from support.oracle import group_of
from trigon.models.load import load_model
from trigon.tools.doctor.engine_parity import Session, equal_fraction, largest_change, text_prompt, without_image
from trigon.tools.doctor.random_models import MODELS, make_groups, model_config, write_model
from trigon.tools.doctor.training_runs import read_steps, speed, worst_parity
from trigon.types import Completion, Rollout, RolloutGroup, Score


def sampled(*completions):
    """Return a group of completions, each as [(token, log-probability)]."""
    return [
        RolloutGroup(
            text_prompt(0),
            tuple(
                Rollout(
                    Completion(tuple(t for t, _ in each), tuple(p for _, p in each), "length", "", 0),
                    Score(0.0, {}, "ok", ""),
                )
                for each in completions
            ),
        )
    ]


def test_samples_are_compared_up_to_the_first_token_that_differs():
    before = sampled([(1, -1.0), (2, -2.0), (3, -3.0)], [(4, -1.0)])
    after = sampled([(1, -1.25), (9, -8.0), (3, -9.0)], [(4, -1.5)])
    assert largest_change(before, before) == 0.0
    assert largest_change(before, after) == 0.5
    assert equal_fraction(before, after) == 0.75


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_log_probability_that_is_not_a_number_is_a_change(place):
    logprobs = [-1.0, -2.0, -3.0]
    logprobs[place] = math.nan
    after = sampled(list(zip((1, 2, 3), logprobs, strict=True)))
    assert math.isnan(largest_change(sampled([(1, -1.0), (2, -2.0), (3, -3.0)]), after))


class Scorer:
    """A trainer whose log-probabilities are all -2."""

    def logprobs(self, groups):
        return [[torch.full((len(r.completion.token_ids),), -2.0) for r in group.rollouts] for group in groups]


def test_engine_and_trainer_are_compared_token_by_token():
    session = Session(Scorer(), rollout=None)
    assert session.differences(sampled([(1, -2.0), (2, -2.5)], [(3, -1.0)])).tolist() == [0.0, 0.5, 1.0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(
        tmp_path_factory.mktemp("random") / "model", MODELS["tiny"], torch.device("cpu"), torch.float32, max_layers=1
    )


def test_a_random_model_is_written_as_a_model_folder_and_only_once(folder):
    processors = processors_of(folder)
    model = load_model(str(folder), dtype=torch.float32, device="cpu")
    text = model.config.get_text_config()
    assert (text.num_hidden_layers, text.vocab_size) == (1, 2048)
    assert model.config.image_token_id == processors.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert set(processors.stop_token_ids) == set(
        processors.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    )
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert write_model(folder, MODELS["7b"], torch.device("cpu"), torch.float32) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_a_prompt_without_its_image_has_the_same_text():
    config = model_config(MODELS["tiny"])
    [group] = make_groups(config, 1, 0.1, seed=0)
    text = without_image(group.prompt, config)
    assert text.vision is None
    assert config.image_token_id in group.prompt.token_ids
    assert list(text.token_ids) == [token for token in group.prompt.token_ids if token < config.image_token_id]
    assert group_of(text, [(1,)]).prompt.prompt_id != group.prompt.prompt_id


def test_the_metrics_of_a_run_are_read_without_its_validations(tmp_path):
    lines = [
        '{"step": 0, "metrics": {"val/reward_score": 0.1}}',
        '{"step": 1, "metrics": {"parity/logprobs_diff_mean": 0.3, "timing_s/step": 9, "timing_s/gen": 5, '
        '"timing_s/update_actor": 3}}',
        '{"step": 2, "metrics": {"parity/logprobs_diff_mean": 0.1, "timing_s/step": 2, "timing_s/gen": 1, '
        '"timing_s/update_actor": 0.5}}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    steps = read_steps(tmp_path)
    assert len(steps) == 2
    assert worst_parity(steps) == 0.3
    assert speed(steps) == {"seconds of step": "2.00", "seconds of sampling": "1.00", "seconds of update": "0.50"}
