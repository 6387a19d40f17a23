"""The policy's weights by name, its errors and metrics; tests/invariants test its outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from support.critics import make_value_model
from support.models import processors_of
from support.oracle import load_hugging_face, make_group, make_prompt
from trigon.data.packing import pack_rollouts
from trigon.errors import ModelError
from trigon.models.load import load_model
from trigon.models.policy import Policy, computing_device, full_tensor
from trigon.models.sizes import GroupLengths, update_flops
from trigon.types import TrainGroup, TrainSequence

TinyModel = Callable[..., Path]


def make_policy(folder: Path) -> Policy:
    processors = processors_of(folder)
    model = load_model(str(folder), dtype=torch.float32, device="cpu")
    return Policy(model, processors.family, temperature=1.0, banned_token_ids=processors.banned_token_ids)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", "qwen2", "qwen3", "llama"])
def test_weights_have_the_names_that_save_pretrained_writes(
    tiny_model: TinyModel, tmp_path: Path, model_type: str, tied: bool
) -> None:
    folder = tiny_model(model_type, tie_word_embeddings=tied)
    load_hugging_face(folder, torch.float32).save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    named = dict(make_policy(folder).named_weights())
    assert named.keys() == written.keys()
    assert all(torch.equal(named[name], written[name]) for name in written)


def test_named_weights_are_rounded_to_a_narrower_dtype_and_never_widened(tiny_model: TinyModel) -> None:
    policy = make_policy(tiny_model("qwen2"))
    exact, rounded = dict(policy.named_weights()), dict(policy.named_weights(torch.bfloat16))
    assert list(rounded) == list(exact)
    assert all(torch.equal(rounded[name], exact[name].bfloat16()) for name in exact)
    policy.model.bfloat16()
    assert {weight.dtype for _, weight in policy.named_weights(torch.float32)} == {torch.bfloat16}


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_load_named_weights_restores_named_weights(tiny_model: TinyModel, model_type: str) -> None:
    source = make_policy(tiny_model(model_type, seed=1))
    target = make_policy(tiny_model(model_type, seed=2))
    weights = {name: weight.clone() for name, weight in source.named_weights()}
    assert not torch.equal(dict(target.named_weights())["lm_head.weight"], weights["lm_head.weight"])
    target.load_named_weights(weights)
    assert all(torch.equal(weight, weights[name]) for name, weight in target.named_weights())


def test_loading_into_a_tied_model_keeps_it_tied(tiny_model: TinyModel) -> None:
    policy = make_policy(tiny_model("qwen2", tie_word_embeddings=True))
    weights = {name: torch.full_like(weight, 0.5) for name, weight in policy.named_weights()}
    policy.load_named_weights(weights)
    assert policy.model.lm_head.weight is policy.model.model.embed_tokens.weight
    assert (policy.model.lm_head.weight == 0.5).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("lm_head.weight"), r"lm_head\.weight is missing \(1 differences"),
        (lambda weights: weights.update(extra=torch.zeros(1)), "extra is unexpected"),
        (lambda weights: weights.update({"lm_head.weight": torch.zeros(2)}), r"lm_head\.weight is \(2,\) instead of"),
    ],
    ids=["missing", "unexpected", "wrong shape"],
)
def test_weights_of_another_model_are_an_error_with_nothing_changed(
    tiny_vlm: Path, change: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    policy = make_policy(tiny_vlm)
    before = {name: weight.clone() for name, weight in policy.named_weights()}
    weights = {name: weight + 1.0 for name, weight in before.items()}
    change(weights)
    with pytest.raises(ModelError, match=message):
        policy.load_named_weights(weights)
    assert all(torch.equal(weight, before[name]) for name, weight in policy.named_weights())


def test_images_that_do_not_match_the_placeholders_are_an_error(tiny_vlm: Path) -> None:
    policy = make_policy(tiny_vlm)
    processors = processors_of(tiny_vlm)
    group = make_group(make_prompt(processors, [(4, 4)], seed=0), [2], seed=1)
    (row,) = pack_rollouts([group], max_tokens=100, positions=lambda prompt: torch.zeros(3, len(prompt.token_ids)))
    doubled = replace(row.packed, visions=row.packed.visions * 2)
    with pytest.raises(ModelError, match="has 4 placeholder tokens, but its 2 images and videos give 8 features"):
        policy(doubled)


def test_a_temperature_of_zero_is_an_error(tiny_vlm: Path) -> None:
    model = load_model(str(tiny_vlm), dtype=torch.float32, device="cpu")
    with pytest.raises(ModelError, match="temperature above 0, not 0"):
        Policy(model, processors_of(tiny_vlm).family, temperature=0.0, banned_token_ids=())


def test_update_work_counts_the_operations_of_an_update(tiny_model: TinyModel) -> None:
    folder = tiny_model("qwen2_5_vl")
    policy, processors = make_policy(folder), processors_of(folder)
    prompt = make_prompt(processors, [(4, 6)], seed=1)
    sequence = TrainSequence((1, 2, 3), *(torch.zeros(3),) * 3, None, None)
    groups = [TrainGroup(prompt, (sequence,) * 2)]
    lengths = [GroupLengths(prompt=len(prompt.token_ids), completions=(3, 3), grids=((1, 4, 6),))]
    [(name, work)] = policy.update_work(groups).items()
    assert name == "actor/model_tflops"
    assert work.value * 1e12 == pytest.approx(update_flops(policy.model.config, lengths))
    policy.freeze_vision_tower()
    frozen = policy.update_work(groups)["actor/model_tflops"]
    assert frozen.value * 1e12 == pytest.approx(update_flops(policy.model.config, lengths, trains_vision=False))
    assert make_policy(tiny_model("internvl")).update_work([]) == {}


def test_a_critic_has_no_operations_of_a_head_over_the_vocabulary(tiny_model: TinyModel) -> None:
    folder = tiny_model("qwen3")
    policy, critic = make_policy(folder), make_value_model(folder)
    prompt = make_prompt(processors_of(folder), [], seed=1)
    groups = [TrainGroup(prompt, (TrainSequence((1, 2, 3), *(torch.zeros(3),) * 3, None, None),))]
    own, other = (each.update_work(groups)["actor/model_tflops"].value * 1e12 for each in (critic, policy))
    text = policy.model.config.get_text_config()
    assert other - own == pytest.approx(3 * 2 * 3 * text.hidden_size * (text.vocab_size - 1))


def test_update_work_has_the_peak_of_a_known_gpu(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy(tiny_model("qwen2"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L20")
    assert "perf/peak_tflops" not in policy.update_work([])
    weight = SimpleNamespace(device=torch.device("cuda"))
    language = SimpleNamespace(embed_tokens=SimpleNamespace(weight=weight))
    policy.family = SimpleNamespace(language_model=lambda model: language, vision_tower=lambda model: None)
    assert policy.update_work([])["perf/peak_tflops"].value == 119.5


@pytest.mark.parametrize(
    ("mesh", "weight", "expected"),
    [(None, "cuda:1", "cuda:1"), (None, "cpu", "cpu"), ("cuda", "cuda:1", "cuda:1"), ("cuda", "cpu", "cuda")],
)
def test_a_shard_that_is_kept_on_the_cpu_is_used_on_the_device_of_its_mesh(
    mesh: str | None, weight: str, expected: str
) -> None:
    shard = SimpleNamespace(device=torch.device(weight))
    if mesh is not None:
        shard.device_mesh = SimpleNamespace(device_type=mesh)
    assert computing_device(shard) == torch.device(expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kept_on", "moves"), [("cpu", ["cuda"]), ("cuda:0", [])])
def test_shards_that_are_kept_on_the_cpu_are_gathered_on_the_device_of_their_mesh(
    kept_on: str, moves: list[str]
) -> None:
    class Shard:
        device_mesh = SimpleNamespace(device_type="cuda")
        device = torch.device(kept_on)

        def to(self, device: torch.device) -> Shard:
            if device != self.device:
                moved.append(str(device))
                self.device = device
            return self

        def full_tensor(self) -> torch.device:
            return self.device

    moved: list[str] = []
    assert full_tensor(Shard()).type == "cuda"  # type: ignore[arg-type, attr-defined]
    assert moved == moves
