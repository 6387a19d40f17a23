"""Qwen3-VL in vLLM keeps tensors that are neither parameters nor buffers, and reads them always."""

import pytest
import torch

from support.rollout import handle_of, make_vllm_engine
from trigon.models.load import load_model, load_processors
from trigon.models.policy import Policy
from trigon.rollout.vllm.sleep import find_state
from trigon.rollout.vllm.weights import itself
from trigon.types import Prompt, SamplingParams

pytestmark = pytest.mark.vllm

SAMPLING = SamplingParams(n=2, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=4, ignore_eos=True, seed=5)


@pytest.mark.extended
def test_a_text_only_prompt_is_not_changed_by_what_a_sleep_leaves_in_memory(tiny_model):
    folder = tiny_model("qwen3_vl")
    processors = load_processors(str(folder))
    policy = load_model(str(folder), dtype=torch.float32, device="cpu")
    weights = dict(Policy(policy, processors.family, temperature=1.0, banned_token_ids=()).named_weights())
    question = tuple(processors.tokenizer("Which number does the dot stand on?")["input_ids"])
    prompt = Prompt("train:0", question, None, "", None, {}, ())
    engine = make_vllm_engine(folder, processors)
    try:
        [model] = engine._llm_engine.apply_model(itself)
        embeds = model.deepstack_input_embeds
        addresses = {tensor.untyped_storage().data_ptr() for tensor in embeds}
        state = find_state(model, lambda storage: storage.data_ptr() in addresses)
        assert sum(storage.nbytes() for storage in state.storages) == sum(tensor.nbytes for tensor in embeds) > 0

        def sampled():
            with engine.awake(handle_of(weights), version=0):
                [group] = engine.generate([prompt], SAMPLING)
            return [(each.token_ids, each.sampling_logprobs) for each in group]

        expected = sampled()
        for tensor in embeds:
            tensor.fill_(3.0)  # what a CUDA page may hold after a sleep
        assert sampled() != expected
        state.restore()
        assert sampled() == expected
    finally:
        engine.close()
