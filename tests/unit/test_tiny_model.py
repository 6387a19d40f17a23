"""The tiny model folders: complete, small, and the same bytes for the same arguments."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from trigon.models.families import family_named, supported_model_types
from trigon.system.torchvision_stub import declare_operators
from trigon.tools.quickstart.model import make_tiny

ALL_TYPES = supported_model_types()
VISION_TYPES = tuple(kind for kind in ALL_TYPES if family_named(kind).has_vision)
MakeTiny = Callable[..., Path]


@pytest.fixture(autouse=True)
def _torchvision() -> None:
    declare_operators()


def _hashes(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def _load(folder: Path, model_type: str):
    import transformers

    vision = model_type in VISION_TYPES
    auto_class = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
    return auto_class.from_pretrained(folder, local_files_only=True)


@pytest.mark.extended(but=["qwen2_5_vl-False", "qwen2-True"])
@pytest.mark.parametrize(
    ("model_type", "tied"), [*((each, False) for each in ALL_TYPES), ("qwen2_5_vl", True), ("qwen2", True)]
)
def test_a_model_loads_as_its_family_with_under_a_million_parameters(
    model_type: str, tied: bool, tiny_model: MakeTiny
) -> None:
    model = _load(tiny_model(model_type, tie_word_embeddings=tied), model_type)
    assert model.config.model_type == model_type
    assert 400_000 < sum(weight.numel() for weight in model.parameters()) < 1_000_000
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert len(model.generation_config.eos_token_id) == 2  # the ends of a turn and of a text


@pytest.mark.extended
def test_the_same_arguments_give_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    torch.manual_seed(99)
    here = make_tiny(tmp_path / "here", model_type="qwen2_5_vl", seed=3)
    code = "import sys; from pathlib import Path; from trigon.tools.quickstart.model import make_tiny; "
    code += "make_tiny(Path(sys.argv[1]), model_type='qwen2_5_vl', seed=3)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "there")], check=True, capture_output=True)
    assert _hashes(here) == _hashes(tmp_path / "there")


def test_another_seed_changes_the_weights_and_nothing_else(tmp_path: Path, capfd) -> None:
    before = torch.get_rng_state()
    first, second = (_hashes(make_tiny(tmp_path / str(seed), seed=seed)) for seed in (0, 1))
    assert {name for name in first if first[name] != second[name]} == {"model.safetensors"}
    assert first.keys() == second.keys()
    assert torch.equal(before, torch.get_rng_state())
    assert capfd.readouterr() == ("", "")


def test_the_tokenizer_round_trips_any_text_and_has_special_tokens_last(tiny_vlm: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_vlm)
    text = "<think>caf\u00e9 \u4e09\u89d2\u5f62 \U0001f642</think>\\boxed{17}\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 1024
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|video_pad|>"]
    assert tokenizer.convert_tokens_to_ids(names) == [1010, 1011, 1012, 1019, 1022, 1023]
    assert tokenizer.eos_token == "<|im_end|>"


def test_the_chat_layout_is_that_of_qwen(tiny_vlm: Path) -> None:
    from transformers import AutoTokenizer

    parts = [{"type": "image"}, {"type": "text", "text": "What?"}]
    tokenizer = AutoTokenizer.from_pretrained(tiny_vlm)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == (
        "<|im_start|>system\nYou answer questions about pictures.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "".join(
        f"<|im_start|>{role}\n{role}<|im_end|>\n" for role in ("system", "user", "assistant")
    )


@pytest.mark.extended
@pytest.mark.parametrize("model_type", VISION_TYPES)
def test_an_image_becomes_image_tokens_and_changes_the_logits(model_type: str, tiny_model: MakeTiny) -> None:
    from transformers import AutoProcessor

    folder = tiny_model(model_type)
    processor = AutoProcessor.from_pretrained(folder)
    model = _load(folder, model_type)

    def logits(colour: str) -> torch.Tensor:
        parts = [{"type": "image"}, {"type": "text", "text": "What?"}]
        text = processor.apply_chat_template([{"role": "user", "content": parts}])
        batch = processor(text=[text], images=[Image.new("RGB", (84, 84), colour)], return_tensors="pt")
        # Five or ten tiles of four tokens (one of them is small), one tile of sixteen or of four,
        # one of sixteen with eight rows of nine, 64 where an image is enlarged to at most 70, or
        # nine tokens for 84 x 84 pixels.
        expected = {
            **{"internvl": 20, "llava": 16, "llava_onevision": 88},
            **{"gemma3": 4, "gemma4": 64, "idefics3": 40, "smolvlm": 40},
        }.get(model_type, 9)
        assert (batch["input_ids"] == model.config.image_token_id).sum() == expected
        with torch.no_grad():
            return model(**batch).logits[0, -1]

    assert (logits("red") - logits("blue")).abs().max() > 1e-3
