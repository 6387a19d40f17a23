"""Loading models, tokenizers and processors, and the checks before and after."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from trigon.errors import ModelError
from trigon.models.load import (
    family_of_folder,
    load_model,
    load_processors,
    model_folder,
    pixel_limits,
    require_weights,
    write_side_files,
)

TinyModel = Callable[..., Path]


@pytest.fixture
def copied(tiny_vlm: Path, tmp_path: Path) -> Path:
    """Return a copy of a tiny Qwen2.5-VL that a test may change."""
    return Path(shutil.copytree(tiny_vlm, tmp_path / "model"))


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("model_path", ["no/such-model", "/no/such/folder", "not a name!"])
def test_a_model_that_cannot_be_found_is_an_error(model_path: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither a folder on this machine nor"):
        model_folder(model_path)
    with pytest.raises(ModelError, match=r"contains no config\.json"):
        model_folder(str(tmp_path))


def test_folders_without_usable_weights_are_errors_that_say_so(copied: Path, tmp_path: Path) -> None:
    weights = copied / "model.safetensors"
    torch.save(load_file(weights), copied / "pytorch_model.bin")
    require_weights(str(copied))
    for content in (b"no weights", b"\x08" + bytes(7) + b"{}      "):
        weights.write_bytes(content)
        with pytest.raises(ModelError, match=r"weights|model .*cannot be loaded"):
            load_model(str(copied), dtype=torch.float32, device="cpu")
    weights.unlink()
    with pytest.raises(ModelError, match=r"pytorch_model\.bin only.*save_pretrained"):  # which can run code
        require_weights(str(copied))
    (copied / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match=r"has a config\.json but no weights"):
        load_model(str(copied), dtype=torch.float32, device="cpu")
    checkpoint = tmp_path / "a run" / "global_step_5"
    shutil.copytree(copied, checkpoint / "actor" / "huggingface")
    for folder, exported in {
        checkpoint / "actor" / "huggingface": checkpoint / "actor",
        checkpoint / "actor": checkpoint / "actor",
        checkpoint: checkpoint,
        checkpoint.parent: checkpoint.parent,
    }.items():
        with pytest.raises(ModelError) as caught:
            require_weights(str(folder))
        assert f"`trigon export '{exported}'`" in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "files", "message"),
    [
        ("qwen2_5_vl", ["tokenizer.json", "tokenizer_config.json"], "no vocabulary for its tokenizer"),
        ("llama", ["tokenizer.json", "tokenizer_config.json"], "tokenizer .*cannot be loaded"),
        ("qwen2_5_vl", ["processor_config.json"], "image processor .*cannot be loaded"),
        ("qwen2_5_vl", ["chat_template.jinja"], "has no chat template"),
    ],
)
def test_missing_files_of_tokenizer_and_processors_are_errors(
    tiny_model: TinyModel, tmp_path: Path, model_type: str, files: list[str], message: str
) -> None:
    folder = Path(shutil.copytree(tiny_model(model_type), tmp_path / "model"))
    for name in files:
        (folder / name).unlink()
    with pytest.raises(ModelError, match=message):
        load_processors(str(folder))


def test_processors_have_stop_tokens_and_banned_tokens(copied: Path, tiny_model: TinyModel) -> None:
    processors = load_processors(str(copied))
    ids = processors.tokenizer.convert_tokens_to_ids
    assert processors.stop_token_ids == tuple(ids(["<|im_end|>", "<|endoftext|>"]))
    media = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    assert processors.banned_token_ids == tuple(ids(media))
    edit_json(copied / "generation_config.json", eos_token_id=7)
    assert load_processors(str(copied)).stop_token_ids == (7,)
    (copied / "generation_config.json").unlink()
    assert load_processors(str(copied)).stop_token_ids == (processors.tokenizer.eos_token_id,)
    text = load_processors(str(tiny_model("llama")))
    assert (text.image_processor, text.banned_token_ids) == (None, ())


def test_pixel_limits_decide_how_many_patches_an_image_has(tiny_vlm: Path) -> None:
    from PIL import Image

    processor = load_processors(str(tiny_vlm), min_pixels=28 * 28 * 6, max_pixels=28 * 28 * 9).image_processor
    small, large = Image.new("RGB", (56, 56)), Image.new("RGB", (840, 840))
    grid = processor(images=[small, large], return_tensors="pt")["image_grid_thw"]
    assert grid.tolist() == [[1, 6, 6], [1, 6, 6]]
    own = load_processors(str(tiny_vlm)).image_processor
    given = load_processors(str(tiny_vlm), min_pixels=28 * 28 * 6).image_processor
    assert (given.size["shortest_edge"], given.size["longest_edge"]) == (28 * 28 * 6, own.size["longest_edge"])
    with pytest.raises(ModelError, match="min_pixels must not exceed max_pixels"):
        load_processors(str(tiny_vlm), min_pixels=28 * 28 * 9, max_pixels=28 * 28 * 6)


@pytest.mark.parametrize("part", ["", "thinker_config"])
def test_an_unsupported_model_with_a_vision_tower_is_compared_with_such_models(tmp_path: Path, part: str) -> None:
    config = {"vision_config": {}}
    content = {"model_type": "qwen3_moe_omni", **({part: config} if part else config)}
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ModelError, match=r"nearest supported type is 'qwen3_(vl|5)_moe'.*docs/model-families\.md"):
        family_of_folder(tmp_path)


def test_a_model_is_loaded_with_all_weights_in_eval_mode(tiny_model: TinyModel) -> None:
    folder = tiny_model("qwen3_vl")
    model = load_model(str(folder), dtype=torch.float32, device="cpu")
    on_disk = load_file(folder / "model.safetensors")
    weights = dict(model.named_parameters())
    assert weights.keys() == on_disk.keys()
    assert all(torch.equal(weights[name], on_disk[name]) for name in on_disk)
    assert not model.training
    tied = load_model(str(tiny_model("qwen2", tie_word_embeddings=True)), dtype=torch.float32, device="cpu")
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda weights: weights.pop("visual.merger.ln_q.weight"),
            r"1 missing \(model\.visual\.merger\.ln_q\.weight\)",
        ),
        (lambda weights: weights.update(extra=torch.zeros(1)), r"1 unexpected \(extra\)"),
        (
            lambda weights: weights.update({"model.norm.weight": torch.zeros(3)}),
            r"1 of the wrong shape \(model\.language_model\.norm\.weight\)",
        ),
    ],
    ids=["missing", "unexpected", "wrong shape"],
)
def test_weights_that_do_not_fit_are_an_error(
    copied: Path, change: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    edit_weights(copied, change)
    with pytest.raises(ModelError, match=message):
        load_model(str(copied), dtype=torch.float32, device="cpu")


def error_of_config(folder: Path, tmp_path: Path, **changes: Any) -> str:
    """Return the error message for a model with this config."""
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    edit_json(model / "config.json", **changes)
    with pytest.raises(ModelError) as error:
        load_model(str(model), dtype=torch.float32, device="meta")
    return str(error.value)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
WINDOW = {"use_sliding_window": True, "layer_types": None}


@pytest.mark.parametrize(
    ("model_type", "changes", "fact"),
    [
        ("qwen2", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ("gemma3_text", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping = 30.0"),
        ("qwen2", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attends to later tokens"),
        ("qwen2", {"layer_types": ["linear_attention", "full_attention"]}, "layers of type linear_attention"),
        ("qwen2", WINDOW | {"sliding_window": 8, "max_window_layers": 1}, "sliding window attention"),
        ("llama", {"rope_parameters": DYNAMIC}, "of type 'dynamic'"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {**DYNAMIC, "rope_type": "default"}, "full_attention": DYNAMIC}},
            "of type 'dynamic'",
        ),
        ("qwen2_5_vl", {"model_type": "mamba"}, "'mamba' are not supported"),
    ],
)
def test_models_that_would_be_computed_wrongly_are_refused(
    tiny_model: TinyModel, tmp_path: Path, model_type: str, changes: dict[str, Any], fact: str
) -> None:
    assert fact in error_of_config(tiny_model(model_type), tmp_path, **changes)


def test_sliding_windows_are_allowed_where_they_change_nothing_or_are_tested(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_model("qwen2"), tmp_path / "model"))
    edit_json(folder / "config.json", **WINDOW, sliding_window=4096, max_window_layers=0)
    for model, window in ((folder, 4096), (tiny_model("mistral"), 8), (tiny_model("gemma3_text"), 8)):
        assert load_model(str(model), dtype=torch.float32, device="meta").config.sliding_window == window


def test_the_config_can_be_overridden(tiny_vlm: Path) -> None:
    def load(**changes: float) -> Any:
        return load_model(str(tiny_vlm), dtype=torch.float32, device="cpu", override_config={"text_config": changes})

    assert load(rms_norm_eps=0.5).model.language_model.norm.variance_epsilon == 0.5
    with pytest.raises(ModelError, match=r"sets text_config\.rms_norm_epz.*mean text_config\.rms_norm_eps"):
        load(rms_norm_epz=0.5)


def test_square_experts_that_transformers_would_not_transpose_are_an_error(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = tiny_model("qwen3_vl_moe")
    text = json.loads((folder / "config.json").read_text())["text_config"]
    assert "square" in error_of_config(folder, tmp_path, text_config=text | {"moe_intermediate_size": 64})


LIMITS = {"min_pixels": 30_000, "max_pixels": 40_000}


def as_version_4_wrote_it(folder: Path, key: str) -> None:
    """Give a folder the processor files of published checkpoints in place of version 5's."""
    parts = json.loads((folder / "processor_config.json").read_text())
    (folder / "processor_config.json").unlink()
    image, video = parts["image_processor"], parts["video_processor"]
    size = image.pop("size")
    if key == "min_pixels":
        image |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    else:
        image["size"] = size
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    processor = {"processor_class": parts["processor_class"]}
    (folder / "preprocessor_config.json").write_text(json.dumps(image | processor))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer["chat_template"] = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": tokenizer["chat_template"]}))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("model_type", "files"), [("qwen2_5_vl", "version 5"), ("qwen2_5_vl", "min_pixels"), ("qwen3_vl", "size")]
)
def test_side_files_have_the_limits_and_templates_of_the_run(
    tiny_model: TinyModel, tmp_path: Path, model_type: str, files: str
) -> None:
    from transformers import AutoProcessor

    source, other = tmp_path / "model", tiny_model("qwen2")
    shutil.copytree(tiny_model(model_type), source)
    if files != "version 5":
        as_version_4_wrote_it(source, files)
    template = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    processors = load_processors(str(source), tokenizer_path=str(other), chat_template=template, **LIMITS)
    write_side_files(
        source,
        tmp_path / "copy",
        processors,
        sets_limits=True,
        sets_chat_template=True,
        tokenizer=other,
        override_config={"text_config": {"rms_norm_eps": 1e-3}},
    )
    loaded = AutoProcessor.from_pretrained(tmp_path / "copy")
    assert dict(loaded.image_processor.size) == {"shortest_edge": 30_000, "longest_edge": 40_000}
    assert (dict(loaded.video_processor.size) == dict(loaded.image_processor.size)) == (model_type == "qwen2_5_vl")
    message = [{"role": "user", "content": "hello"}]
    assert loaded.apply_chat_template(message) == "[user]hello"
    assert loaded.tokenizer.apply_chat_template(message, tokenize=False) == "[user]hello"
    assert loaded.tokenizer.get_vocab() == processors.tokenizer.get_vocab()
    assert load_processors(str(tmp_path / "copy")).hf_config.text_config.rms_norm_eps == 1e-3
    again = load_processors(str(tmp_path / "copy"))
    assert pixel_limits(again) == pixel_limits(processors) == (30_000, 40_000)


@pytest.mark.parametrize("overrides", [{}, {"tie_word_embeddings": False}])
def test_a_tied_config_with_a_head_of_its_own_is_refused_unless_it_says_so(
    tiny_model: TinyModel, tmp_path: Path, overrides: dict[str, bool]
) -> None:
    folder = Path(shutil.copytree(tiny_model(tie_word_embeddings=True), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def load(device: str) -> Any:
        return load_model(str(folder), dtype=torch.float32, device=device, override_config=overrides)

    load("cpu")  # a copy, as some published models have it
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for device in ("cpu", "meta"):
        if overrides:
            assert load(device).lm_head.weight.shape == tensors["lm_head.weight"].shape
        else:
            with pytest.raises(ModelError, match=r"lm_head.*override_config=\{tie_word_embeddings: false\}"):
                load(device)
    if overrides:
        assert torch.equal(load("cpu").lm_head.weight, tensors["lm_head.weight"])


HOSTILE_SIZES = [
    ("text_config", {"hidden_size": -5}),
    ("text_config", {"hidden_size": "x"}),
    ("text_config", {"num_hidden_layers": 10**12, "layer_types": None}),
    ("text_config", {"num_attention_heads": 0}),
    ("text_config", {"num_key_value_heads": -1}),
    ("text_config", {"intermediate_size": 10**15}),
    ("vision_config", {"depth": 10**12}),
    ("vision_config", {"hidden_size": -64}),
    ("vision_config", {"patch_size": 0}),
    ("vision_config", {"num_heads": 0}),
    ("vision_config", {"spatial_merge_size": -2}),
]


@pytest.mark.parametrize(("part", "sizes"), HOSTILE_SIZES, ids=str)
def test_sizes_that_no_model_has_are_errors(tiny_vlm: Path, tmp_path: Path, part: str, sizes: dict[str, Any]) -> None:
    config = json.loads((tiny_vlm / "config.json").read_text())[part]
    message = error_of_config(tiny_vlm, tmp_path, **{part: config | sizes})
    assert next(iter(sizes)) in message or "cannot be loaded" in message


def test_a_config_cannot_choose_code_of_a_hub(copied: Path) -> None:
    keys = ("_attn_implementation", "attn_implementation", "_experts_implementation")
    edit_json(copied / "config.json", **dict.fromkeys(keys, "someone/kernels"))
    for device in ("cpu", "meta"):
        model = load_model(str(copied), dtype=torch.float32, device=device)
        assert "someone" not in str(model.config._attn_implementation)
        assert "someone" not in str(model.config.get_text_config()._attn_implementation)
