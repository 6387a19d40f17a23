"""The sizes of the models of a run, from their config.json: no weights are loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from trigon.assemble.models import check_parallel_sizes, check_sequence_parallel, open_trained_policy
from trigon.assemble.options import model_path
from trigon.config.plan import with_critic_as_actor
from trigon.config.schema import Config
from trigon.models.load import Processors, family_of_folder, load_hf_config, model_folder
from trigon.models.memory import ModelSize, model_size
from trigon.models.policy import Policy
from trigon.models.value import ValueModel


def size_of_model(config: Config) -> ModelSize:
    """Return the sizes of policy and critic, from the config.json of their models."""
    size = _size_of(config, Policy, check=check_parallel_sizes)
    if config.shares_trunk:
        hf_config = load_hf_config(
            model_folder(model_path(config)),
            trust_remote_code=config.worker.actor.model.trust_remote_code,
            override_config=config.worker.actor.model.override_config,
        )
        return replace(size, value_head=hf_config.get_text_config().hidden_size + 1)
    if not config.has_critic:
        return size
    critic = _size_of(with_critic_as_actor(config), ValueModel, check=check_sequence_parallel)
    if critic.dimensions is not None:  # a critic has no logits
        text = replace(critic.dimensions.text, vocabulary=1)
        critic = replace(critic, dimensions=replace(critic.dimensions, text=text))
    return replace(size, critic=critic)


def _size_of(config: Config, model_class: type[Policy], *, check: Callable[[Config, Any], None]) -> ModelSize:
    actor = config.worker.actor
    # These kernels change no size, and may need a GPU. Adapters are counted, not added.
    plain = actor.model.model_copy(
        update={
            "use_liger_kernel": False,
            "compile_layers": False,
            "lora": actor.model.lora.model_copy(update={"rank": 0}),
        }
    )
    plain_config = config.model_copy(
        update={"worker": config.worker.model_copy(update={"actor": actor.model_copy(update={"model": plain})})}
    )
    assert plain.model_path is not None
    # Sizes depend on the family alone, not on the tokenizer and the processors.
    processors = Processors(None, None, None, family_of_folder(model_folder(plain.model_path)), None, (), ())
    policy = open_trained_policy(
        plain_config, plain_config.worker.actor, processors, "sdpa", torch.device("meta"), model_class=model_class
    )
    check(config, policy.model.config)
    return model_size(policy, actor.model.lora if actor.model.lora.rank > 0 else None)
