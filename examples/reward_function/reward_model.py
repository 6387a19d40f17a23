"""A reward model, a sequence classifier of Hugging Face, as the reward.

    worker:
      reward:
        reward_function: examples/reward_function/reward_model.py:RewardModel
        reward_function_kwargs: {model: ./my-reward-model, device: cpu, batch_size: 8}
        timeout_seconds: 120    # for a list of up to 32 completions
        num_cpus: 1             # each reward worker loads the model
        max_memory_gb: 16       # of each: the weights, and what a batch needs

docs/rewards.md says how a GPU is used. The model reads text only: the question and the
completion, as a conversation in its own chat template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

REWARD_TYPE = "batch"

disable_progress_bar()  # it would be printed as lines of the reward worker


class RewardModel:
    """The reward function. Each reward worker makes one, which loads the model once."""

    def __init__(
        self,
        model: str,
        *,
        device: str = "cpu",
        batch_size: int = 8,
        dtype: str = "auto",
        label: str | None = None,
        max_length: int | None = None,
        chat_template: str | None = None,
    ) -> None:
        """Load the model.

        model: a folder, or the name of a model on the Hugging Face Hub. device: "cpu", "cuda:0".
        batch_size: completions in a forward pass. dtype: "float32", "bfloat16"; "auto": that of the
        checkpoint. label: of a classifier with several labels, the one whose probability is the
        reward; one with a single output has its output as the reward. max_length: in tokens;
        default: what the model can read. chat_template: if the tokenizer has none.
        Raises: ValueError if the model has no chat template, another number of labels, or random
        weights; OSError if it cannot be loaded.
        """
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.chat_template = chat_template or self.tokenizer.chat_template
        if not self.chat_template:
            raise ValueError(f"the tokenizer of {model} has no chat template; set chat_template, a Jinja template")
        self.model, report = AutoModelForSequenceClassification.from_pretrained(
            model, dtype=dtype, output_loading_info=True
        )
        if missing := sorted(report["missing_keys"]):  # transformers would give the head random weights
            raise ValueError(f"{model} has no weights for {', '.join(missing)}; is it a sequence classifier?")
        self.model.to(device).eval()
        self.device, self.batch_size = device, batch_size
        self.label = self.find_label(label)
        self.max_length = max_length or min(
            self.tokenizer.model_max_length, getattr(self.model.config, "max_position_embeddings", 1 << 30)
        )

    def find_label(self, label: str | None) -> int | None:
        """Return the number of a label; None for a classifier with a single output."""
        labels = self.model.config.id2label
        if label is None and len(labels) == 1:
            return None
        found = [number for number, name in labels.items() if name == label]
        if not found:
            raise ValueError(f"label={label!r}; the labels of this classifier are {', '.join(labels.values())}")
        return int(found[0])

    def __call__(self, reward_inputs: list[dict[str, Any]]) -> list[dict[str, float]]:
        sequences = [self.encode(reward_input) for reward_input in reward_inputs]
        # Sequences of similar length together, so that little is padded.
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
        rewards = [0.0] * len(sequences)
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            for index, reward in zip(batch, self.score([sequences[index] for index in batch]), strict=True):
                rewards[index] = reward
        return [{"overall": reward} for reward in rewards]

    def encode(self, reward_input: dict[str, Any]) -> list[int]:
        """Return the token ids of a question and a completion. Raises: ValueError if too many."""
        messages = [
            {"role": "user", "content": reward_input["prompt"]},
            {"role": "assistant", "content": reward_input["response"]},
        ]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, chat_template=self.chat_template)
        token_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(token_ids) > self.max_length:
            raise ValueError(
                f"the question and the completion have {len(token_ids):,} tokens of the reward model, which reads "
                f"{self.max_length:,}; lower data.max_prompt_length or data.max_response_length"
            )
        return token_ids

    @torch.inference_mode()
    def score(self, sequences: Sequence[list[int]]) -> list[float]:
        """Return the rewards of a batch of token ids."""
        # Classifiers of decoders find the last token by the padding id; without one, by any id that
        # is not in the batch. Other models do not look at it: padding is masked.
        config = self.model.config.get_text_config()
        used = {token for sequence in sequences for token in sequence}
        padding = config.pad_token_id
        if padding is None:
            padding = next(token for token in range(config.vocab_size) if token not in used)
        length = max(map(len, sequences))
        token_ids = torch.tensor([[*ids, *[padding] * (length - len(ids))] for ids in sequences], device=self.device)
        mask = torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids in sequences], device=self.device)
        config.pad_token_id, before = padding, config.pad_token_id
        try:
            logits = self.model(input_ids=token_ids, attention_mask=mask).logits.float()
        finally:
            config.pad_token_id = before
        rewards = logits[:, 0] if self.label is None else logits.softmax(dim=-1)[:, self.label]
        return rewards.tolist()
