"""Exports of LoRA weights, merged into the base model or as an adapter that peft loads."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_export
import torch
from safetensors.torch import load_file, save_file
from test_export import hugging_face, logits
from torch import Tensor

from trigon.checkpoint.export import Part, export_checkpoint
from trigon.checkpoint.store import CheckpointStore, open_checkpoint
from trigon.config.schema import LoraConfig
from trigon.errors import CheckpointError
from trigon.models.families import family_of
from trigon.models.load import copy_side_files, load_model
from trigon.models.lora import adapter_config, adapters_of, add_lora
from trigon.models.policy import Policy
from trigon.tools.cli.export import main
from trigon.training.state import save_tensors

pytestmark = pytest.mark.extended

FAMILIES = [
    ("qwen2_5_vl", False),
    ("qwen2_5_vl", True),
    ("qwen3_vl", False),
    ("qwen2", False),
    ("llama", True),
    ("qwen2_moe", False),
    ("qwen3_moe", True),
    ("qwen3_vl_moe", False),
    ("internvl", False),
    ("gemma3", True),
    ("gemma4", True),
]
Edit = Callable[[dict[str, Any]], None]
PARTS: tuple[Part, ...] = ("adapter", "model")


def adapted_policy(base: Path, *, exclude: str | None = None) -> Policy:
    """Return a policy whose adapters change its logits by much more than any tolerance."""
    model = load_model(str(base), dtype=torch.float32, device="cpu")
    add_lora(model, LoraConfig(rank=4, alpha=8, exclude_modules=exclude), seed=0)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for adapter in adapters_of(model).values():
            adapter.lora_b.add_(0.1 * torch.randn(adapter.lora_b.shape, generator=generator))
    return Policy(model, family_of(model.config), temperature=1.0, banned_token_ids=())


def save(root: Path, base: Path, policy: Policy, *, edit: Edit = lambda config: None) -> Path:
    """Write a checkpoint as a run with LoRA does. edit: changes the adapter's config before."""

    def write(actor: Path) -> None:
        config = adapter_config(policy.model, base_model=str(base))
        edit(config)
        (actor / "adapter_config.json").write_text(json.dumps(config))
        save_tensors(dict(policy.saved_tensors()), actor / "adapter", group=None)
        copy_side_files(base, actor / "huggingface")

    CheckpointStore(root, keep=-1).save(5, write=write, progress={}, score=None)
    return root / "global_step_5"


def saved_tensors(policy: Policy) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in policy.saved_tensors()}


def with_peft(base: Path, adapter: Path) -> Any:
    model = hugging_face(base)
    from peft import PeftModel

    return PeftModel.from_pretrained(model, adapter).eval()


@pytest.fixture(scope="module")
def adapted(tiny_vlm: Path) -> Policy:
    return adapted_policy(tiny_vlm, exclude=".*visual.*")


@pytest.fixture
def checkpoint(tmp_path: Path, tiny_vlm: Path, adapted: Policy) -> Path:
    return save(tmp_path / "run", tiny_vlm, adapted)


@pytest.mark.parametrize(("model_type", "tied"), FAMILIES)
def test_merged_weights_equal_the_policys_and_have_the_logits_of_peft_with_the_adapter(
    tmp_path: Path, tiny_model: Callable[..., Path], model_type: str, tied: bool
) -> None:
    base = tiny_model(model_type, tie_word_embeddings=tied)
    policy = adapted_policy(base)
    checkpoint = save(tmp_path / "run", base, policy)
    merged = export_checkpoint(checkpoint, None, dtype=None)
    adapter = export_checkpoint(checkpoint, None, dtype=None, part="adapter")

    assert merged == checkpoint / "huggingface_model"
    written, expected = load_file(merged / "model.safetensors"), dict(policy.named_weights())
    assert written.keys() == expected.keys() == load_file(base / "model.safetensors").keys()
    assert all(torch.equal(written[name], expected[name]) for name in written)

    assert adapter == checkpoint / "lora_adapter"
    merged_logits, base_logits = logits(hugging_face(merged), base), logits(hugging_face(base), base)
    assert (merged_logits - base_logits).abs().max() > 0.1
    peft_logits = logits(with_peft(base, adapter), base)
    torch.testing.assert_close(peft_logits, merged_logits, atol=1e-4, rtol=0)


def test_an_adapter_folder_equals_what_peft_saves(
    checkpoint: Path, adapted: Policy, tiny_vlm: Path, tmp_path: Path
) -> None:
    folder = export_checkpoint(checkpoint, None, dtype=None, part="adapter")
    assert {path.name for path in folder.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "trigon_export.json",
    }
    with_peft(tiny_vlm, folder).save_pretrained(tmp_path / "reference")
    exported, expected = (load_file(place / "adapter_model.safetensors") for place in (folder, tmp_path / "reference"))
    assert exported.keys() == expected.keys() == saved_tensors(adapted).keys()
    for name, tensor in saved_tensors(adapted).items():
        assert torch.equal(exported[name], tensor)
        assert torch.equal(expected[name], tensor)
    exported, expected = (
        json.loads((place / "adapter_config.json").read_text()) for place in (folder, tmp_path / "reference")
    )
    for key in ("base_model_name_or_path", "r", "lora_alpha", "task_type", "peft_type", "bias"):
        assert exported[key] == expected[key], key
    assert sorted(exported["target_modules"]) == sorted(expected["target_modules"])
    assert exported["base_model_name_or_path"] == str(tiny_vlm)


def test_merging_rounds_once_to_the_base_models_dtype_or_to_the_given_one(tmp_path: Path, tiny_vlm: Path) -> None:
    base = tmp_path / "base"
    hugging_face(tiny_vlm).bfloat16().save_pretrained(base)
    copy_side_files(tiny_vlm, tmp_path / "side")
    for file in (tmp_path / "side").iterdir():
        if file.name != "config.json":
            shutil.copyfile(file, base / file.name)
    policy = adapted_policy(base)  # in float32, as a run has it
    checkpoint = save(tmp_path / "run", base, policy)
    exact = dict(policy.named_weights())

    folder = export_checkpoint(checkpoint, None, dtype=None)
    weights = load_file(folder / "model.safetensors")
    assert all(torch.equal(weights[name], exact[name].bfloat16()) for name in exact)
    assert hugging_face(folder).dtype == torch.bfloat16

    folder = export_checkpoint(checkpoint, None, dtype="fp32")
    weights = load_file(folder / "model.safetensors")
    assert all(torch.equal(weights[name], exact[name]) for name in exact)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"

    said: list[str] = []
    for options in ({}, {"logits": False}, {"usable_bytes": 2**20}):
        export_checkpoint(checkpoint, None, dtype=None, part="adapter", on_progress=said.append, **options)
        assert ("; not verified: that peft loads all of them" in said[-1]) == bool(options)
        assert "that logits equal the logits of merged weights" in said[-1]

    folder = export_checkpoint(checkpoint, None, dtype="bf16", part="adapter")
    halves = load_file(folder / "adapter_model.safetensors")
    assert all(torch.equal(halves[name], tensor.bfloat16()) for name, tensor in saved_tensors(policy).items())


def test_a_base_model_may_use_module_names_and_hold_a_copy_of_its_tied_head(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    published = tiny_model("qwen2_5_vl", tie_word_embeddings=True)
    base = tmp_path / "base"
    copy_side_files(published, base)
    weights = load_file(published / "model.safetensors")
    in_memory = {
        f"model.{name}" if name.startswith("visual.") else name.replace("model.", "model.language_model.", 1): weight
        for name, weight in weights.items()
    }
    head = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    save_file({**in_memory, **head}, base / "model.safetensors", metadata={"format": "pt"})
    policy = adapted_policy(base)
    folder = export_checkpoint(save(tmp_path / "run", base, policy), None, dtype=None)
    written, expected = load_file(folder / "model.safetensors"), dict(policy.named_weights())
    assert written.keys() == expected.keys() == weights.keys()
    assert all(torch.equal(written[name], expected[name]) for name in written)


def test_a_base_model_that_has_moved_is_an_error_unless_base_is_given(
    tmp_path: Path, tiny_vlm: Path, adapted: Policy
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(tiny_vlm, old)
    checkpoint = save(tmp_path / "run", old, adapted)
    old.rename(new)
    for part in PARTS:
        with pytest.raises(CheckpointError, match=r"(?s)base model .*/old' is neither a folder.* with --base"):
            export_checkpoint(checkpoint, None, dtype=None, part=part)
    assert sorted(path.name for path in checkpoint.iterdir()) == ["actor", "manifest.json", "progress.json"]
    assert main([str(checkpoint), "--base", str(new)]) == 0
    assert main([str(checkpoint), "--base", str(new), "--adapter", "--output", str(tmp_path / "adapter")]) == 0
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(new)


def test_a_run_that_was_started_in_another_folder_is_exported_with_its_base_model(
    tmp_path: Path, tiny_vlm: Path, adapted: Policy
) -> None:
    base = tmp_path / "started" / "demo" / "model"
    shutil.copytree(tiny_vlm, base)

    def with_relative_path(config: dict[str, Any]) -> None:
        config["base_model_name_or_path"] = "demo/model"

    checkpoint = save(tmp_path / "run", base, adapted, edit=with_relative_path)
    (tmp_path / "run" / "local_sources.json").write_text(json.dumps({"demo/model": str(base)}))
    adapter = export_checkpoint(checkpoint, tmp_path / "adapter", dtype=None, part="adapter", logits=False)
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert export_checkpoint(checkpoint, tmp_path / "merged", dtype=None, logits=False).is_dir()


def test_a_model_of_other_shapes_is_not_accepted_as_the_base(
    tmp_path: Path, checkpoint: Path, tiny_vlm: Path, tiny_model: Callable[..., Path]
) -> None:
    with pytest.raises(CheckpointError, match=r"is not the base model .*lm_head\.weight is missing there"):
        export_checkpoint(checkpoint, None, dtype=None, base=str(tiny_model("qwen2_5_vl", tie_word_embeddings=True)))
    other = tmp_path / "other"
    copy_side_files(tiny_vlm, other)
    weights = load_file(tiny_vlm / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1].clone()
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is \[127\] there instead of \[128\] \(1 of"):
        export_checkpoint(checkpoint, None, dtype=None, base=str(other), part="adapter")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda config: config["target_modules"].pop(), "peft does not load"),
        (lambda config: config.update(use_rslora=True), "logits differ"),
        (lambda config: config.update(r=8), "fit no weight of this model at rank 8"),
    ],
)
def test_an_adapter_that_peft_would_apply_differently_fails_verification(
    tmp_path: Path, tiny_vlm: Path, adapted: Policy, edit: Edit, message: str
) -> None:
    checkpoint = save(tmp_path / "run", tiny_vlm, adapted, edit=edit)
    with pytest.raises(CheckpointError, match=message):
        export_checkpoint(checkpoint, None, dtype=None, part="adapter")
    assert sorted(path.name for path in checkpoint.iterdir()) == ["actor", "manifest.json", "progress.json"]


@pytest.mark.parametrize(("part", "weight"), [("adapter", "lora_B.weight"), ("model", r"gate_proj\.weight")])
def test_adapters_that_are_not_finite_are_never_exported(
    tmp_path: Path, tiny_vlm: Path, part: Part, weight: str
) -> None:
    policy = adapted_policy(tiny_vlm)
    with torch.no_grad():
        adapters_of(policy.model)["model.language_model.layers.0.mlp.gate_proj"].lora_b[3, 1] = float("nan")
    checkpoint = save(tmp_path / "run", tiny_vlm, policy)
    with pytest.raises(CheckpointError, match=f"{weight} in the checkpoint holds NaN or infinity"):
        export_checkpoint(checkpoint, None, dtype=None, part=part)
    assert sorted(path.name for path in checkpoint.iterdir()) == ["actor", "manifest.json", "progress.json"]


def test_merging_in_place_as_easyr1_does_keeps_the_checkpoint_valid(checkpoint: Path, adapted: Policy) -> None:
    actor = checkpoint / "actor"
    assert main(["--local_dir", str(actor)]) == 0
    weights, expected = load_file(actor / "huggingface" / "model.safetensors"), dict(adapted.named_weights())
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert main(["--local_dir", str(actor), "--adapter"]) == 0
    assert (actor / "lora_adapter" / "adapter_model.safetensors").is_file()
    assert open_checkpoint(checkpoint, resumable=False).step == 5
    with pytest.raises(CheckpointError, match="belongs to the checkpoint"):
        export_checkpoint(actor, actor / "huggingface", dtype=None, part="adapter")
    assert (actor / "huggingface" / "model.safetensors").is_file()


def test_an_export_never_replaces_its_base_model(tmp_path: Path, tiny_vlm: Path, adapted: Policy) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_vlm, base)
    (base / "trigon_export.json").write_text("{}")  # an earlier export, which an export may replace
    checkpoint = save(tmp_path / "run", base, adapted)
    for part in PARTS:
        with pytest.raises(CheckpointError, match="holds the base model"):
            export_checkpoint(checkpoint, base, dtype=None, part=part)
    assert (base / "model.safetensors").read_bytes() == (tiny_vlm / "model.safetensors").read_bytes()


def test_lora_options_are_an_error_for_a_run_without_lora(tmp_path: Path, tiny_vlm: Path) -> None:
    test_export.save(tmp_path, tiny_vlm, test_export.trained_policy(tiny_vlm))
    for option, *value in (("--adapter",), ("--base", "somewhere")):
        with pytest.raises(CheckpointError, match=f"no LoRA adapter; leave {option} out"):
            main([str(tmp_path), option, *value])


def test_exporting_does_not_advance_the_random_number_generator(checkpoint: Path) -> None:
    state = torch.random.get_rng_state()
    for part in PARTS:
        export_checkpoint(checkpoint, None, dtype=None, part=part)
    assert torch.equal(torch.random.get_rng_state(), state)


# Scores tokens with a model, by vLLM: merged weights, or a base model with an adapter.
WITH_VLLM = """
import json, os, sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
import numpy
from PIL import Image
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

base, adapter, merged = sys.argv[1:]
image = Image.fromarray((numpy.arange(84 * 112 * 3) % 256).astype("uint8").reshape(84, 112, 3))
prompt = {
    "prompt": "<|vision_start|><|image_pad|><|vision_end|>user: how many circles? assistant:",
    "multi_modal_data": {"image": image},
}
options = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 2, "skip_mm_profiling": True,
    "limit_mm_per_prompt": {"image": 1, "video": 0}, "mm_processor_cache_gb": 0,
}


def score(engine, **request):
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    [output] = engine.generate([prompt], sampling, use_tqdm=False, **request)
    return [next(iter(each.values())).logprob for each in output.prompt_logprobs[1:]]


adapted = LLM(base, enable_lora=True, max_lora_rank=8, max_loras=1, **options)
found = {"base": score(adapted), "adapter": score(adapted, lora_request=LoRARequest("trained", 1, adapter))}
found["merged"] = score(LLM(merged, **options))
print("SCORES" + json.dumps(found))
"""


@pytest.mark.long
@pytest.mark.alone
def test_vllm_serves_an_adapter_as_it_serves_the_merged_export(
    checkpoint: Path, tiny_vlm: Path, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    adapter = export_checkpoint(checkpoint, tmp_path / "adapter", dtype=None, part="adapter")
    merged = export_checkpoint(checkpoint, tmp_path / "merged", dtype=None)
    command = [sys.executable, "-c", WITH_VLLM, str(tiny_vlm), str(adapter), str(merged)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    scores = {name: torch.tensor(each) for name, each in json.loads(done.stdout.partition("SCORES")[2]).items()}
    torch.testing.assert_close(scores["adapter"], scores["merged"], atol=1e-3, rtol=0)
    assert (scores["adapter"] - scores["base"]).abs().max() > 0.1
