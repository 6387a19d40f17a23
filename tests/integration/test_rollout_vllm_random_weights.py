"""A weight sync replaces everything that vLLM has loaded, random weights too."""

import pytest
import torch

from support.rollout import handle_of, make_vllm_settings
from trigon.models.load import load_model, load_processors
from trigon.models.policy import Policy
from trigon.rollout.vllm.arguments import engine_arguments
from trigon.rollout.vllm.process import start_llm_engine
from trigon.rollout.vllm.weights import canonical_names, checkpoint_names, itself, load_weights

pytestmark = [pytest.mark.extended, pytest.mark.vllm]


def tensors_after_weight_sync(folder, load_format):
    """Return parameters, buffers and other tensors of vLLM's model after one weight sync.

    All but the KV cache, which this does not load. Weights that are packed have no values here;
    load_weights compares their checksums before they are packed.
    """
    processors = load_processors(str(folder))
    policy = load_model(str(folder), dtype=torch.float32, device="cpu")
    weights = dict(Policy(policy, processors.family, temperature=1.0, banned_token_ids=()).named_weights())
    names = checkpoint_names(folder)
    engine = start_llm_engine(
        engine_arguments(make_vllm_settings(folder), processors) | {"load_format": load_format},
        device="cpu",
        architectures=processors.hf_config.architectures,
    )
    load_weights(
        engine,
        handle_of(weights),
        processors,
        expected_names=canonical_names(names, processors),
        device="cpu",
        version=0,
        check_values=True,
    )
    [model] = engine.apply_model(itself)
    tensors = {name: value.detach().clone() for name, value in (*model.named_parameters(), *model.named_buffers())}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            for index, item in enumerate(value if isinstance(value, list | tuple) else [value]):
                if isinstance(item, torch.Tensor) and key != "kv_cache":
                    tensors[f"{name}.{key}.{index}"] = item.detach().clone()
    engine.engine_core.shutdown()
    return tensors


@pytest.mark.long(cases=["qwen2"])
@pytest.mark.parametrize(("model_type", "tied"), [("qwen2", True), ("qwen3_vl_moe", False)])
def test_random_initial_weights_leave_nothing_behind(tiny_model, model_type, tied):
    folder = tiny_model(model_type, tie_word_embeddings=tied)
    expected = tensors_after_weight_sync(folder, "auto")
    found = tensors_after_weight_sync(folder, "dummy")
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
