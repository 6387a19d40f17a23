"""What a sharded policy holds and sends: gathered weights, rounded weights, buffers of a load."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from support.engines import CPU, make_engine, make_rollouts, to_train
from support.models import processors_of
from trigon.assemble.pools import collective_timeout_seconds
from trigon.config.schema import Config
from trigon.models.load import load_model
from trigon.models.policy import Policy
from trigon.models.weight_files import stored_dtype
from trigon.training.fsdp import TorchProcessGroup, open_sharded
from trigon.training.parallel import Sharding

SHARDING = Sharding(
    full_shard=True, ranks_per_copy=None, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cpu_offload=False
)


# -- gathered weights ------------------------------------------------------------------------------


def gathered(policy: Policy) -> set[str]:
    """Return which parameters outside of the layers are gathered."""
    large = ("embed_tokens.weight", "lm_head.weight", "merger.mlp.0.weight")
    names = {name for name, parameter in policy.named_parameters() if not isinstance(parameter, DTensor)}
    return {end for end in large if any(name.endswith(end) for name in names)}


def gathered_by_stage(folder: Path, options: dict[str, object]) -> dict[str, set[str]]:
    """Return what is gathered when the last decoder layer starts its forward and its backward."""
    engine = make_engine(folder, sharding=SHARDING, **options)
    policy = engine.policy
    stages: dict[str, set[str]] = {}
    layer = policy.family.language_model(policy.model).layers[-1]

    def before_forward(module: nn.Module, inputs: object) -> None:
        stages["forward"] = gathered(policy)

    def before_backward(gradient: torch.Tensor) -> None:
        stages["backward"] = gathered(policy)

    def after_forward(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(before_backward)

    layer.register_forward_pre_hook(before_forward)
    layer.register_forward_hook(after_forward)
    rollouts = make_rollouts(folder)
    engine.logprobs(rollouts)
    stages["scored"] = gathered(policy)
    engine.step(to_train(rollouts))
    stages["updated"] = gathered(policy)
    return stages


@pytest.mark.extended
@pytest.mark.extended(but=["all"])
@pytest.mark.parametrize(
    "options", [{}, {"lora_rank": 2}, {"checkpointing": True}], ids=["all", "lora", "checkpointing"]
)
def test_embedding_head_and_merger_are_gathered_only_while_they_are_used(processes, tiny_model, options):
    folder = tiny_model("qwen2_5_vl", tie_word_embeddings=False)
    for stages in processes.run(gathered_by_stage, folder, options, ranks=2):
        assert stages == {"forward": set(), "backward": set(), "scored": set(), "updated": set()}


@pytest.mark.extended
def test_an_embedding_that_is_tied_to_the_head_stays_gathered(processes, tiny_model):
    folder = tiny_model("qwen2_5_vl", tie_word_embeddings=True)
    for stages in processes.run(gathered_by_stage, folder, {}, ranks=2):
        tied = {"embed_tokens.weight"}
        assert stages == {"forward": tied, "backward": tied, "scored": set(), "updated": set()}


# -- weight sync -----------------------------------------------------------------------------------


class Sent(TorchDispatchMode):
    """Counts the bytes that all-gathers return."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "all_gather_into_tensor" in str(func):
            self.num_bytes += sum(tensor.nbytes for tensor in tree_iter(result))
        return result


def bytes_sent(folder: Path, dtype: torch.dtype | None, options: dict[str, object]) -> tuple[int, int]:
    """Return the bytes sent by a weight sync, and the number of parameters."""
    engine = make_engine(folder, sharding=SHARDING, **options)
    with Sent() as sent:
        for _ in engine.weights().read(dtype):
            pass
    return sent.num_bytes, sum(part.numel() for part in engine.policy.model.parameters())


@pytest.mark.extended
def test_a_weight_sync_sends_weights_in_the_dtype_of_the_rollout_engine(processes, tiny_model):
    folder = tiny_model("qwen2_5_vl")
    for dtype, each in ((None, 4), (torch.float32, 4), (torch.bfloat16, 2)):
        for num_bytes, parameters in processes.run(bytes_sent, folder, dtype, {}, ranks=2):
            # Parameters whose rows do not divide are padded.
            assert each * parameters <= num_bytes < 1.1 * each * parameters
    base_in_bf16 = {"lora_rank": 2, "dtype": torch.bfloat16}
    for num_bytes, parameters in processes.run(bytes_sent, folder, torch.float32, base_in_bf16, ranks=2):
        assert num_bytes < 3 * parameters  # the base is not widened before it is sent


# -- loading ---------------------------------------------------------------------------------------


def open_recorded(folder: Path) -> tuple[list[tuple[str, bool]], bytes]:
    """Return how a sharded policy in float32 was made, and its weights and buffers."""
    family = processors_of(folder).family
    made = []

    def make_policy(device: torch.device, *, as_stored: bool = False) -> Policy:
        made.append((device.type, as_stored))
        dtype = stored_dtype(folder) if as_stored else torch.float32
        return Policy(load_model(str(folder), dtype=dtype, device=device), family, temperature=1.0, banned_token_ids=())

    sharding = replace(SHARDING, param_dtype=torch.float32)
    return made, tensors_of(open_sharded(make_policy, TorchProcessGroup(CPU), sharding, CPU))


def tensors_of(policy: Policy) -> bytes:
    weights = {name: weight.contiguous() for name, weight in policy.named_weights()}
    return save(weights | {name: buffer.clone() for name, buffer in policy.named_buffers()})


@pytest.mark.extended
@pytest.mark.parametrize(
    ("model_type", "as_stored"), [("qwen2_5_vl", True), ("qwen3_vl_moe", True), ("gemma3_text", False)]
)
def test_one_rank_maps_the_weights_from_their_files_unless_that_rounds_a_buffer(
    processes, tiny_model, tmp_path, model_type, as_stored
):
    folder = shutil.copytree(tiny_model(model_type), tmp_path / "model")
    for file in folder.glob("*.safetensors"):
        save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    (first_made, first), (second_made, second) = processes.run(open_recorded, folder, ranks=2)
    assert first_made == [("meta", False), ("meta", True), ("cpu", as_stored)]
    assert second_made == [("meta", False)]
    model = load_model(str(folder), dtype=torch.float32, device=CPU)
    alone = Policy(model, processors_of(folder).family, temperature=1.0, banned_token_ids=())
    assert first == second == tensors_of(alone)


# -- process groups --------------------------------------------------------------------------------


def state_group_timeout(seconds: float) -> float:
    group = TorchProcessGroup(CPU, timeout_seconds=seconds).state_group
    dist.barrier(group)  # a rank that has ended is one to which another cannot connect any more
    return group._get_backend(CPU).options._timeout.total_seconds()


@pytest.mark.extended
def test_the_process_group_for_saving_waits_as_long_as_the_run_allows(processes):
    assert processes.run(state_group_timeout, 5000.0, ranks=2) == [5000.0] * 2


@pytest.mark.extended
@pytest.mark.parametrize(("configured", "expected"), [(600.0, 3660.0), (3600.0, 3660.0), (7200.0, 7260.0)])
def test_collective_calls_wait_longer_than_the_driver_allows_any_call(configured, expected):
    assert collective_timeout_seconds(Config(trainer={"worker_timeout_seconds": configured})) == expected
