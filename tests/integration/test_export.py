"""Exports of tiny models, loaded by transformers and by vLLM."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trigon.checkpoint import export
from trigon.checkpoint.export import ACTIVATION_BYTES, export_checkpoint, loading_bytes, verify_model
from trigon.checkpoint.store import Checkpoint, CheckpointStore, open_checkpoint
from trigon.checkpoint.weights import open_weights
from trigon.errors import CheckpointError
from trigon.models.families import family_of
from trigon.models.load import copy_side_files, load_model, load_processors, write_side_files
from trigon.models.policy import Policy
from trigon.system.torchvision_stub import declare_operators
from trigon.tools.cli.export import main
from trigon.training.device_memory import HostMemory
from trigon.training.state import ShardedFiles, save_tensors

FAMILIES = [
    ("qwen2_5_vl", False),
    ("qwen2_5_vl", True),
    ("qwen3_vl", False),
    ("qwen3_vl", True),
    ("qwen2", False),
    ("qwen3", True),
    ("llama", True),
    ("qwen2_vl", False),
    ("qwen2_moe", True),
    ("qwen3_moe", False),
]


def trained_policy(model_folder: Path) -> Policy:
    """Return a policy whose weights differ from those of its model folder."""
    model = load_model(str(model_folder), dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return Policy(model, family_of(model.config), temperature=1.0, banned_token_ids=())


def save(root: Path, model_folder: Path, policy: Policy, *, step: int = 5, score: float | None = None):
    def write(actor: Path) -> None:
        save_tensors(dict(policy.saved_tensors()), actor / "weights", group=None)
        save_tensors({"state": torch.zeros(1)}, actor / "optimizer", group=None)
        copy_side_files(model_folder, actor / "huggingface")

    CheckpointStore(root, keep=-1).save(step, write=write, progress={}, score=score)
    return open_checkpoint(root / f"global_step_{step}", resumable=True)


def tensors_of(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    files = ShardedFiles(checkpoint.actor / "weights")
    return {name: files.read(name) for name in files.tensors}


@pytest.fixture(scope="module")
def trained(tiny_vlm):
    return trained_policy(tiny_vlm)


@pytest.fixture
def checkpoint(tmp_path, tiny_vlm, trained):
    return save(tmp_path / "run", tiny_vlm, trained)


def hugging_face(folder: Path) -> Any:
    declare_operators()
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    has_vision = family_of(AutoConfig.from_pretrained(folder)).has_vision
    auto_class = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
    return auto_class.from_pretrained(folder).eval()


def logits(model: Any, folder: Path) -> Tensor:
    from transformers import AutoProcessor, AutoTokenizer

    text = "user: how many circles? assistant:"
    if family_of(model.config).has_vision:
        image = torch.randint(0, 256, (3, 56, 84), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
        # Gemma 3's processor writes the image, and what is around it, for its first token.
        is_gemma = family_of(model.config).image_text is not None
        text = ("<|vision_start|>" if is_gemma else "<|vision_start|><|image_pad|><|vision_end|>") + text
        inputs = AutoProcessor.from_pretrained(folder)(text=[text], images=[image], return_tensors="pt")
    else:
        inputs = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    with torch.no_grad():
        return model(**inputs).logits.float()


@pytest.mark.extended(but=["qwen2_5_vl-False"])
@pytest.mark.parametrize(("model_type", "tied"), FAMILIES)
def test_an_export_equals_what_transformers_saves(tmp_path, tiny_model, model_type, tied):
    model_folder = tiny_model(model_type, tie_word_embeddings=tied)
    policy = trained_policy(model_folder)
    policy.model.save_pretrained(tmp_path / "reference")  # with the names and files of transformers
    copy_side_files(model_folder, tmp_path / "reference")

    checkpoint = save(tmp_path / "run", model_folder, policy)
    exported = export_checkpoint(checkpoint.folder, None, dtype=None)

    assert exported == checkpoint.folder / "huggingface_model"
    expected, written = (load_file(f / "model.safetensors") for f in (tmp_path / "reference", exported))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in written)
    found, reference, untrained = (
        logits(hugging_face(folder), model_folder) for folder in (exported, tmp_path / "reference", model_folder)
    )
    assert torch.equal(found, reference)
    assert not torch.allclose(found, untrained, atol=0.1)
    said = []
    export_checkpoint(checkpoint.folder, None, dtype="bf16", on_progress=said.append)
    assert said[-1].startswith("verified: names, shapes and values of ")
    assert said[-1].endswith("in bfloat16; that transformers loads all of them, and that logits are finite")


def test_an_export_has_the_side_files_a_record_and_the_mode_of_new_files(tmp_path, tiny_vlm, trained):
    checkpoint = save(tmp_path, tiny_vlm, trained, step=7, score=0.5)
    before = os.umask(0o027)
    try:
        folder = export_checkpoint(checkpoint.folder, None, dtype=None)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o640}
    for file in tiny_vlm.iterdir():
        if file.suffix != ".safetensors":
            assert (folder / file.name).read_bytes() == file.read_bytes(), file.name
    assert {path.name for path in folder.iterdir()} == {path.name for path in tiny_vlm.iterdir()} | {
        "trigon_export.json"
    }
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".")]
    record = json.loads((folder / "trigon_export.json").read_text())
    assert record.pop("trigon_version")
    assert record == {"checkpoint": "global_step_7", "step": 7, "val_reward_score": 0.5, "dtype": "float32"}


@pytest.mark.extended
def test_another_dtype_is_written_to_weights_and_config(checkpoint):
    from transformers import AutoConfig

    folder = export_checkpoint(checkpoint.folder, None, dtype="bf16")
    before, after = tensors_of(checkpoint), load_file(folder / "model.safetensors")
    assert all(torch.equal(after[name], before[name].bfloat16()) for name in before)
    config = AutoConfig.from_pretrained(folder)
    assert config.dtype == config.text_config.dtype == config.vision_config.dtype == torch.bfloat16
    # The checkpoint's own side files are unchanged.
    assert json.loads((checkpoint.actor / "huggingface" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.extended
def test_a_large_model_is_written_in_several_files(checkpoint, monkeypatch):
    monkeypatch.setattr(export, "SHARD_BYTES", 500_000)
    folder = export_checkpoint(checkpoint.folder, None, dtype=None)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert sorted(set(index["weight_map"].values())) == files
    assert index["weight_map"].keys() == tensors_of(checkpoint).keys()


def test_a_checkpoint_without_weights_is_an_error(tmp_path, tiny_vlm):
    def write(actor: Path) -> None:
        copy_side_files(tiny_vlm, actor / "huggingface")

    CheckpointStore(tmp_path, keep=-1).save(5, write=write, progress={}, score=None)
    with pytest.raises(CheckpointError, match=r"global_step_5/actor holds no weights/\*\.safetensors"):
        export_checkpoint(tmp_path, None, dtype=None)


@pytest.mark.extended
def test_merging_in_place_gives_a_model_and_keeps_the_checkpoint_valid(checkpoint, monkeypatch):
    in_place = checkpoint.actor / "huggingface"
    monkeypatch.setattr(export, "SHARD_BYTES", 500_000)
    assert main(["--local_dir", str(checkpoint.actor), "--dtype", "bf16"]) == 0
    assert open_checkpoint(checkpoint.folder, resumable=True).step == 5
    monkeypatch.undo()
    assert export_checkpoint(checkpoint.actor, None, dtype=None) == in_place
    assert [path.name for path in in_place.glob("model*")] == [
        "model.safetensors"
    ]  # no shard of the first merge remains
    assert json.loads((in_place / "config.json").read_text())["dtype"] == "float32"
    assert open_checkpoint(checkpoint.folder, resumable=True).step == 5
    assert logits(hugging_face(in_place), in_place).isfinite().all()


def test_a_run_folder_exports_its_latest_or_its_best_checkpoint(tmp_path, tiny_vlm, trained, capsys):
    for step, score in ((1, 0.9), (2, 0.1)):
        save(tmp_path / "run", tiny_vlm, trained, step=step, score=score)
    record = tmp_path / "run" / "huggingface_model" / "trigon_export.json"
    assert export_checkpoint(tmp_path / "run", None, dtype=None) == record.parent
    assert json.loads(record.read_text())["step"] == 2
    assert main([str(tmp_path / "run"), "--best", "--no-logits"]) == 0
    assert NOT_LOADED + "since --no-logits was given" in " ".join(capsys.readouterr().out.split())
    assert json.loads(record.read_text())["step"] == 1
    with pytest.raises(CheckpointError, match=re.escape(f"name the run folder, {tmp_path / 'run'}, or leave --best")):
        main([str(tmp_path / "run" / "global_step_2"), "--best"])


def test_a_damaged_latest_checkpoint_is_skipped_with_a_warning_but_an_error_if_named(tmp_path, tiny_vlm, trained):
    save(tmp_path / "run", tiny_vlm, trained, step=1)
    folder = save(tmp_path / "run", tiny_vlm, trained, step=2).folder
    (folder / "actor" / "huggingface" / "tokenizer.json").write_text("{}")
    warnings = []
    made = export_checkpoint(tmp_path / "run", tmp_path / "model", dtype=None, warn=warnings.append)
    assert json.loads((made / "trigon_export.json").read_text())["step"] == 1
    assert len(warnings) == 1
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has"):
        export_checkpoint(folder, tmp_path / "other", dtype=None)


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [(math.nan, None, r"lm_head\.weight .* holds NaN or infinity"), (1e6, "fp16", "infinity as float16")],
)
def test_weights_that_are_not_finite_are_never_exported(tmp_path, tiny_vlm, value, dtype, message):
    policy = trained_policy(tiny_vlm)
    with torch.no_grad():
        policy.model.lm_head.weight[3, 4] = value
    checkpoint = save(tmp_path / "run", tiny_vlm, policy)
    with pytest.raises(CheckpointError, match=message):
        export_checkpoint(checkpoint.folder, None, dtype=dtype)
    assert sorted(path.name for path in checkpoint.folder.iterdir()) == ["actor", "manifest.json", "progress.json"]


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda config: config["text_config"].update(num_hidden_layers=1), "does not have"),
        (lambda config: config["text_config"].update(num_hidden_layers=3), "is missing from"),
        (lambda config: config["text_config"].update(intermediate_size=128), "belong to its own"),
    ],
)
def test_weights_that_do_not_fit_their_config_fail_verification(tmp_path, tiny_vlm, trained, break_it, message):
    broken = tmp_path / "broken"
    shutil.copytree(tiny_vlm, broken)
    config = json.loads((broken / "config.json").read_text())
    break_it(config)
    config["text_config"].pop("layer_types", None)
    (broken / "config.json").write_text(json.dumps(config))
    checkpoint = save(tmp_path / "run", broken, trained)
    with pytest.raises(CheckpointError, match=message):
        export_checkpoint(checkpoint.folder, None, dtype=None)
    assert not (checkpoint.folder / "huggingface_model").exists()


NOT_LOADED = "; not verified: that transformers loads all of them, and that logits are finite, "


@pytest.mark.extended
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"logits": False}, r"since --no-logits was given"),
        ({"usable_bytes": 2**20}, r"which takes \d+\.\d [GM]iB of memory: 1\.0 MiB are usable here"),
    ],
)
def test_a_model_that_is_not_loaded_has_its_tensors_verified_and_the_rest_named(
    checkpoint, options, reason, monkeypatch
):
    from transformers import PreTrainedModel

    said = []
    with monkeypatch.context() as patched:
        patched.setattr(PreTrainedModel, "from_pretrained", lambda *arguments, **keywords: pytest.fail("was loaded"))
        folder = export_checkpoint(checkpoint.folder, None, dtype=None, on_progress=said.append, **options)
    assert re.fullmatch(rf"verified: names, shapes and values of \d+ tensors, in float32{NOT_LOADED}{reason}", said[-1])
    assert load_file(folder / "model.safetensors").keys() == tensors_of(checkpoint).keys()


@pytest.mark.extended
def test_verification_holds_one_model_in_its_dtype_and_a_layer_in_float32(checkpoint):
    """Tensors that transformers reads from files, one model in its dtype, are not counted."""
    folder = export_checkpoint(checkpoint.folder, None, dtype="bf16", logits=False)
    weights = open_weights(checkpoint.actor)
    sizes = [math.prod(tensor.shape) for tensor in weights.tensors.values()]
    peak = HostMemory(shared_by=1).peak_bytes(lambda: verify_model(weights, folder, torch.bfloat16))
    assert peak < 2 * 4 * max(sizes) + 2**18 < 4 * sum(sizes)
    assert 0 < loading_bytes(weights, torch.bfloat16) - 2 * sum(sizes) - peak < 1.1 * ACTIVATION_BYTES


@pytest.mark.extended
def test_a_model_that_loads_with_another_tensor_fails_verification(checkpoint):
    folder = export_checkpoint(checkpoint.folder, None, dtype=None)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] += 1e-6  # no difference that logits would show
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"loads another model\.[a-z_.]*norm\.weight than"):
        verify_model(open_weights(checkpoint.actor), folder, torch.float32)


@pytest.mark.extended
def test_only_an_earlier_export_is_replaced(checkpoint, tmp_path):
    existing = tmp_path / "existing"
    existing.mkdir()
    (existing / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="is not an earlier export"):
        export_checkpoint(checkpoint.folder, existing, dtype=None)
    assert (existing / "thesis.txt").read_text() == "years of work"
    for dtype in ("bf16", None):
        folder = export_checkpoint(checkpoint.folder, tmp_path / "model", dtype=dtype)
    assert load_file(folder / "model.safetensors")["lm_head.weight"].dtype == torch.float32


def test_an_unknown_dtype_and_a_missing_checkpoint_are_named(checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match="'int4'; choose one of fp32, bf16"):
        export_checkpoint(checkpoint.folder, None, dtype="int4")
    with pytest.raises(CheckpointError, match="no checkpoint folder"):
        export_checkpoint(tmp_path / "nowhere", None, dtype=None)


# In a process of its own, since vLLM changes global state of its process.
IN_VLLM = """
    import json, sys
    from trigon.system.torchvision_stub import declare_operators
    declare_operators()
    from PIL import Image
    from vllm import LLM, SamplingParams

    folder, text, image = sys.argv[1:]
    llm = LLM(
        model=folder,
        dtype="float32",  # vLLM would round the model to bfloat16
        max_model_len=256,
        enforce_eager=True,
        distributed_executor_backend="uni",
        max_num_seqs=2,
        max_num_batched_tokens=256,
        limit_mm_per_prompt={"image": 1},
    )
    prompt = {"prompt": text, "multi_modal_data": {"image": Image.open(image)}}
    greedy = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    (result,) = llm.generate(prompt, greedy, use_tqdm=False)
    ids = result.prompt_token_ids
    logprobs = [result.prompt_logprobs[t][ids[t]].logprob for t in range(1, len(ids))]
    print("RESULT", json.dumps({"ids": ids, "logprobs": logprobs, "next": result.outputs[0].token_ids[0]}))
"""


@pytest.mark.extended
@pytest.mark.vllm
def test_an_export_has_the_same_logprobs_in_vllm_and_transformers(tmp_path, checkpoint):
    folder = export_checkpoint(checkpoint.folder, None, dtype=None)
    declare_operators()
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    text = "<|vision_start|><|image_pad|><|vision_end|>how many circles are there?"
    image = Image.linear_gradient("L").convert("RGB").resize((84, 56))
    image.save(tmp_path / "image.png")
    inputs = AutoProcessor.from_pretrained(folder)(text=[text], images=[image], return_tensors="pt")
    with torch.no_grad():
        logits = AutoModelForImageTextToText.from_pretrained(folder).eval()(**inputs).logits[0]
    expected = logits.log_softmax(-1)

    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(IN_VLLM), str(folder), text, str(tmp_path / "image.png")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.partition("RESULT")[2])
    ids = inputs["input_ids"][0].tolist()
    assert result["ids"] == ids
    assert result["next"] == int(expected[-1].argmax())
    assert result["logprobs"] == pytest.approx([float(expected[t - 1, ids[t]]) for t in range(1, len(ids))], abs=1e-4)


@pytest.mark.extended
def test_a_head_of_its_own_is_exported_with_the_override_that_says_so(tmp_path, tiny_model):
    """A tied configuration with another head is refused, and names this override."""
    model, untied = tmp_path / "model", {"tie_word_embeddings": False}
    shutil.copytree(tiny_model(tie_word_embeddings=True), model)
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(str(model), dtype=torch.float32, device="cpu", override_config=untied)
    policy = Policy(loaded, family_of(loaded.config), temperature=1.0, banned_token_ids=())

    def write(actor: Path) -> None:
        save_tensors(dict(policy.saved_tensors()), actor / "weights", group=None)
        write_side_files(model, actor / "huggingface", load_processors(str(model)), override_config=untied)

    CheckpointStore(tmp_path / "run", keep=-1).save(1, write=write, progress={}, score=None)
    exported = export_checkpoint(tmp_path / "run", tmp_path / "exported", dtype=None)
    assert torch.equal(load_file(exported / "model.safetensors")["lm_head.weight"], tensors["lm_head.weight"])
    assert json.loads((exported / "config.json").read_text())["tie_word_embeddings"] is False
