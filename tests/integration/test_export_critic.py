"""A critic is exported as a token classifier of transformers, whose outputs are its values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.critics import make_critic, make_trunk, to_learn
from support.engines import make_engine, make_rollouts
from trigon.checkpoint.export import export_checkpoint
from trigon.checkpoint.store import CheckpointStore
from trigon.errors import CheckpointError, ConfigError
from trigon.models.load import copy_side_files
from trigon.tools.cli.export import main
from trigon.training.critic import LocalCriticEngine
from trigon.training.local import LocalTrainEngine

pytestmark = pytest.mark.extended


def save(model: Path, root: Path, critic: LocalCriticEngine | None, policy: LocalTrainEngine | None = None) -> None:
    """Save a checkpoint of a policy, and of a critic if there is one. policy: None: a new one."""

    def write(folder: Path):
        copy_side_files(model, folder / "huggingface")
        finish = (policy or make_engine(model)).save_state(folder, model_only=True)
        if critic is None:
            return finish
        copy_side_files(model, folder.parent / "critic" / "huggingface")
        finish_critic = critic.save_state(folder.parent / "critic", model_only=True)

        def finish_both() -> None:
            finish()
            finish_critic()

        return finish_both

    store = CheckpointStore(root, keep=-1, background=False)
    store.save(1, write=write, progress={}, score=None, required=True)


@pytest.mark.parametrize(("shares_trunk", "tied"), [(False, True), (True, True), (True, False)])
def test_the_exported_classifier_gives_the_critics_values(tiny_model, tmp_path, shares_trunk, tied):
    from transformers import AutoModelForTokenClassification

    model = tiny_model("qwen3", tie_word_embeddings=tied)
    policy, critic = make_trunk(model) if shares_trunk else (None, make_critic(model))
    rollouts = make_rollouts(model)
    (policy or critic).step(to_learn(rollouts))
    save(model, tmp_path, critic, policy)
    folder = export_checkpoint(tmp_path, None, dtype=None, part="critic")
    assert folder == tmp_path / "huggingface_critic"
    classifier = AutoModelForTokenClassification.from_pretrained(folder).eval()
    assert classifier.config.num_labels == 1
    [scored, *_] = critic.values(rollouts)
    prompt = rollouts[0].prompt.token_ids
    for rollout, expected in zip(rollouts[0].rollouts, scored, strict=True):
        with torch.no_grad():
            values = classifier(torch.tensor([prompt + rollout.completion.token_ids])).logits[0, :, 0]
        torch.testing.assert_close(values[len(prompt) - 1 :], expected, atol=1e-5, rtol=0)
    assert export_checkpoint(tmp_path, None, dtype="bf16", part="critic") == folder  # an earlier export is replaced
    checkpoint = tmp_path / "global_step_1"
    for _ in range(2):  # the checkpoint stays undamaged
        assert (
            export_checkpoint(checkpoint / "actor", None, dtype=None, part="critic")
            == checkpoint / "huggingface_critic"
        )


def test_options_of_an_adapter_are_refused_for_a_critic(tmp_path):
    with pytest.raises(ConfigError, match=r"--base.*--critic"):
        main([str(tmp_path), "--critic", "--base", "somewhere"])


@pytest.mark.parametrize(
    ("model_type", "lora_rank", "message"),
    [
        ("qwen2_5_vl", 0, "transformers has no token classifier for qwen2_5_vl models"),
        ("qwen3", 2, "has LoRA adapters"),
        ("qwen3", None, "has no critic"),
    ],
)
def test_what_cannot_be_exported_is_said(tiny_model, tmp_path, model_type, lora_rank, message):
    model = tiny_model(model_type)
    save(model, tmp_path, None if lora_rank is None else make_critic(model, lora_rank=lora_rank))
    with pytest.raises(CheckpointError, match=message):
        export_checkpoint(tmp_path, None, dtype=None, part="critic")
    assert not (tmp_path / "huggingface_critic").exists()


def test_a_critic_on_a_trunk_with_adapters_is_refused(tiny_model, tmp_path):
    model = tiny_model("qwen3")
    policy, critic = make_trunk(model, lora_rank=2)
    save(model, tmp_path, critic, policy)
    with pytest.raises(CheckpointError, match=r"has LoRA adapters.*worker\.actor\.model\.lora\.rank=0"):
        export_checkpoint(tmp_path, None, dtype=None, part="critic")
