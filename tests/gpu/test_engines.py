"""vLLM and the trainer compute the same, with each of vLLM's runners, and after each sleep.

The engines are those that a run builds from its configuration, on a random model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from support.gpu import Figures, Machine
from support.rollout import runs_with
from trigon.assemble.data import open_processors
from trigon.assemble.engines import open_rollout
from trigon.assemble.models import DevicePlacement, choose_device, open_models
from trigon.config.plan import make_plan
from trigon.config.schema import Config
from trigon.rollout.protocol import RolloutEngine
from trigon.system.terminal import format_bytes
from trigon.tools.quickstart.model import make_tiny
from trigon.training.local import LocalTrainEngine
from trigon.training.parallel import SingleProcess
from trigon.types import NO_RECORD, Completion, Prompt, Rollout, RolloutGroup, SamplingParams, Score

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(1500)]

Variant = tuple[Literal["v1", "v2"], bool, bool]
"""How vLLM is started: its model runner, whether it schedules the next forward pass during the last
one, and whether it compiles the model and records CUDA graphs."""

COMPLETIONS = 5
MEAN_TOLERANCE = 0.05
"""Mean |log-probability difference| in nats of vLLM and the trainer, both in bfloat16."""
STALE_MINIMUM = 0.1
"""The same after the weights have changed and before they are synced; if it is not far above the
tolerance, the comparison would not find weights that did not arrive."""
CHANGE_TOLERANCE = 0.02
"""Largest difference of a log-probability between two samples of one seed on a GPU, where kernels
may sum in another order."""
SYNC_WEIGHTS = 3
"""Most copies of the largest weight that a weight sync holds, as a run's memory is planned: one
that vLLM collects for a layer, one in the layout of its layer, and one of a conversion."""
CHECKSUM_BYTES = 512 * 2**20
"""Temporaries of the checksums of weights; see rollout/vllm/weight_check.py."""
SMALL_MEMORY = 40 * 2**30
TINY_MODEL_BYTES = 6 * 2**30
"""GPU memory of vLLM with a tiny model. In more there would be millions of blocks of KV cache, over
which vLLM iterates whenever its prefix cache is reset."""
FEW_LAYERS = 8
"""Layers of the language model on a GPU with less memory."""


@dataclass(slots=True)
class Session:
    """A trainer, vLLM, and the version of the weights."""

    trainer: LocalTrainEngine
    rollout: RolloutEngine
    version: int = 0

    def sample(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[RolloutGroup]:
        """Wake vLLM up, load the weights of this version, and sample."""
        with self.rollout.awake(self.trainer.weights(), version=self.version):
            made = self.rollout.generate(prompts, sampling)
        score = Score(0.0, {}, "ok", "")
        return [
            RolloutGroup(prompt, tuple(Rollout(each, score) for each in completions))
            for prompt, completions in zip(prompts, made, strict=True)
        ]

    def differences(self, groups: Sequence[RolloutGroup]) -> Tensor:
        """Return |log-probability difference| of trainer and vLLM at each sampled token."""
        computed = torch.cat([each for group in self.trainer.logprobs(groups) for each in group])
        return (computed - sampled_logprobs(groups)).abs()

    @torch.no_grad()
    def change_weights(self) -> None:
        """Add noise to every weight, half as large as its weights, and count the version up."""
        self.version += 1
        for weight in self.trainer.policy.parameters():
            generator = torch.Generator(weight.device).manual_seed(self.version)
            noise = torch.randn(weight.shape, generator=generator, device=weight.device, dtype=weight.dtype)
            weight.add_(noise.mul_(0.5 * weight.float().std(correction=0).to(weight.dtype)))


def compare_engines(machine: Machine, variant: Variant) -> Figures:
    """Compare log-probabilities before and after a change of weights, and of texts after a sleep.

    A bfloat16 model with the shapes of Qwen2.5-VL-3B; vLLM sleeps and wakes up in between.
    """
    from random_models import MODELS, make_groups, write_model

    from trigon.rollout.vllm import VllmEngine

    on_gpu = machine.on_gpu
    device = torch.device(machine.device)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    max_layers = None
    if on_gpu and torch.cuda.mem_get_info()[1] < SMALL_MEMORY:
        max_layers = FEW_LAYERS
    folder = write_model(
        machine.folder / "qwen2_5_vl",
        MODELS["3b" if on_gpu else "tiny"],
        device,
        dtype,
        max_layers=max_layers,
    )
    figures = Figures()
    with ExitStack() as stack:
        start = time.monotonic()
        session = open_session(machine, folder, stack, variant)
        figures["seconds of the start"] = f"{time.monotonic() - start:.1f}"
        assert isinstance(session.rollout, VllmEngine)
        assert runs_with(session.rollout) == tuple(variant)
        asleep = used_bytes() if on_gpu else 0
        scale, count, tokens = (1.0, 16, 128) if on_gpu else (0.1, 2, 8)
        config = session.trainer.policy.model.config
        images = [group.prompt for group in make_groups(config, count, scale, seed=0)]
        texts = [without_image(prompt, config) for prompt in images]
        sampling = SamplingParams(COMPLETIONS, 1.0, 1.0, -1, tokens, ignore_eos=True, seed=0)

        first = session.sample([*images, *texts], sampling)
        compare(figures, "start", session.differences(first))
        session.change_weights()
        stale = session.differences(first)
        figures.at_least("mean difference of stale weights", float(stale.mean()), STALE_MINIMUM)
        if on_gpu:  # memory that vLLM drops in its sleep stays allocated in this count
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            allocated = torch.cuda.memory_allocated()
        start = time.monotonic()
        with session.rollout.awake(session.trainer.weights(), version=session.version):
            figures["seconds of wake-up and weight sync"] = f"{time.monotonic() - start:.2f}"
            if on_gpu:
                temporaries = torch.cuda.max_memory_allocated() - allocated
                figures["temporaries of the weight sync"] = format_bytes(temporaries)
                largest = max(weight.nbytes for weight in session.trainer.policy.parameters())
                excess = (temporaries - CHECKSUM_BYTES) / largest
                figures.at_most("as a multiple of the largest weight", excess, SYNC_WEIGHTS)
            start = time.monotonic()
            # Nested with the same version: does nothing but generate.
            changed = session.sample(images, sampling)
            seconds = time.monotonic() - start
        figures["sampling"] = f"{count * COMPLETIONS * tokens / seconds:.0f} tokens/s"
        compare(figures, "new weights", session.differences(changed))
        text = session.sample(texts, sampling)
        compare(figures, "text only, after another sleep", session.differences(text))
        if on_gpu:
            figures["GPU memory in use asleep"] = (
                f"{format_bytes(asleep)} at the start, {format_bytes(used_bytes())} at the end"
            )
    layers = config.get_text_config().num_hidden_layers
    figures["layers"] = f"{layers}, {dtype}"
    return figures


def compare_text_after_sleep(machine: Machine) -> Figures:
    """Compare the log-probabilities of texts before and after vLLM sleeps.

    With a Qwen3-VL, whose vision features of several layers vLLM keeps in buffers of the model.
    """
    folder = machine.folder / "qwen3_vl"
    if not (folder / "config.json").is_file():
        make_tiny(folder, model_type="qwen3_vl")
    figures = Figures()
    with ExitStack() as stack:
        session = open_session(machine, folder, stack, None, vllm_bytes=TINY_MODEL_BYTES)
        texts = [text_prompt(number) for number in range(4)]
        sampling = SamplingParams(COMPLETIONS, 1.0, 1.0, -1, 24, ignore_eos=True, seed=0)
        before = session.sample(texts, sampling)
        compare(figures, "before", session.differences(before))
        if machine.on_gpu:
            fill_free_memory()
        after = session.sample(texts, sampling)
        compare(figures, "after", session.differences(after))
        tolerance = CHANGE_TOLERANCE if machine.on_gpu else 0.0
        figures.at_most("largest change of a log-probability", largest_change(before, after), tolerance)
    return figures


def compare_router_replay(machine: Machine) -> Figures:
    """Compare log-probabilities of an MoE model with the experts of vLLM, and with the trainer's.

    On the CPU with the transformers engine, since vLLM returns experts on GPUs only.
    """
    folder = machine.folder / "qwen3_moe"
    if not (folder / "config.json").is_file():
        make_tiny(folder, model_type="qwen3_moe")
    figures = Figures()
    with ExitStack() as stack:
        session = open_session(machine, folder, stack, None, vllm_bytes=TINY_MODEL_BYTES, router_replay="R3")
        sampling = SamplingParams(COMPLETIONS, 1.0, 1.0, -1, 24, ignore_eos=True, seed=0)
        groups = session.sample([text_prompt(number) for number in range(4)], sampling)
        for group in groups:
            for number, rollout in enumerate(group.rollouts):
                experts = rollout.completion.routed_experts
                assert experts is not None
                assert (experts.prompt is None) == (number > 0)
                assert (experts.completion[:, 0, 0] == NO_RECORD).nonzero().flatten().tolist() == [23]
        compare(figures, "experts of the engine", session.differences(groups))
        with session.trainer.policy.own_routing():
            compare(figures, "experts of the trainer", session.differences(groups))
    return figures


def open_session(
    machine: Machine,
    folder: Path,
    stack: ExitStack,
    variant: Variant | None,
    *,
    vllm_bytes: int | None = None,
    router_replay: Literal["disabled", "R3"] = "disabled",
) -> Session:
    """Load the policy and start vLLM, as a run with these settings does.

    Args:
        stack: closes them.
        vllm_bytes: GPU memory of vLLM; None: the default fraction of all.
    """
    dtype = "bf16" if machine.on_gpu else "fp32"
    # Fewer sequences at a time than by default, for fewer CUDA graphs, which take time to record.
    rollout: dict[str, Any] = {"name": "vllm", "dtype": dtype, "limit_images": 1, "max_num_seqs": 128}
    if vllm_bytes is not None and machine.on_gpu:
        rollout |= {"gpu_memory_utilization": vllm_bytes / torch.cuda.mem_get_info()[1]}
    if router_replay == "R3" and not machine.on_gpu:
        rollout["name"] = "transformers"
    if variant is not None:
        runner, is_async, graphs = variant
        rollout |= {"model_runner": runner, "async_scheduling": is_async, "enforce_eager": not graphs}
    config = Config.model_validate(
        {
            "data": {"max_prompt_length": 1024, "max_response_length": 256},
            "worker": {
                "actor": {
                    "model": {"model_path": str(folder)},
                    "fsdp": {"torch_dtype": dtype, "mp_param_dtype": dtype},
                    "router_replay": router_replay,
                },
                "rollout": rollout,
            },
            "trainer": {"device": machine.device, "val_only": True},  # without an optimizer
        }
    )
    place = DevicePlacement(choose_device(config), SingleProcess())
    processors = open_processors(config)
    trainer, *_ = open_models(config, processors, make_plan(config, num_train_prompts=0), place)
    engine = open_rollout(config, processors, place, trainer, shows_videos=False)
    stack.callback(engine.close)
    return Session(trainer, engine)


def without_image(prompt: Prompt, config: Any) -> Prompt:
    """Return a prompt's text alone."""
    special = (config.image_token_id, config.vision_start_token_id, config.vision_end_token_id)
    token_ids = tuple(token for token in prompt.token_ids if token not in special)
    return replace(prompt, prompt_id=f"{prompt.prompt_id}:text", token_ids=token_ids, vision=None, image_refs=())


def text_prompt(number: int) -> Prompt:
    """Return a prompt of 40 random tokens."""
    generator = torch.Generator().manual_seed(number)
    token_ids = tuple(torch.randint(0, 900, (40,), generator=generator).tolist())
    return Prompt(f"text:{number}", token_ids, None, "", None, {}, ())


def completions_of(groups: Sequence[RolloutGroup]) -> list[Completion]:
    """Return all completions, in order."""
    return [rollout.completion for group in groups for rollout in group.rollouts]


def sampled_logprobs(groups: Sequence[RolloutGroup]) -> Tensor:
    """Return vLLM's log-probabilities of all sampled tokens."""
    return torch.tensor([logprob for each in completions_of(groups) for logprob in each.sampling_logprobs])


def largest_change(one: Sequence[RolloutGroup], other: Sequence[RolloutGroup]) -> float:
    """Return the largest |log-probability difference| of two samples, up to where tokens differ."""
    changes = [0.0]
    for first, second in zip(completions_of(one), completions_of(other), strict=True):
        pairs = zip(first.token_ids, second.token_ids, first.sampling_logprobs, second.sampling_logprobs, strict=True)
        for token, other_token, logprob, other_logprob in pairs:
            if token != other_token:
                break  # the tokens after it have another context
            changes.append(abs(logprob - other_logprob))
    return float(torch.tensor(changes).max())  # nan if one of them is


def used_bytes() -> int:
    """Return the GPU memory that is in use, by all processes, without the allocator's cache."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def fill_free_memory() -> None:
    """Write nan into most of the free GPU memory, and free it again.

    Memory that vLLM drops in its sleep and does not write again then differs from what it was.
    """
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    garbage = torch.full((int(0.9 * free) // 4,), float("nan"), device="cuda")
    torch.cuda.synchronize()
    del garbage
    torch.cuda.empty_cache()


def compare(figures: Figures, when: str, differences: Tensor) -> None:
    figures.at_most(f"{when}: mean log-prob difference", float(differences.mean()), MEAN_TOLERANCE)
    figures[f"{when}: largest"] = f"{float(differences.max()):.2g}"


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_vllm_computes_the_log_probabilities_of_the_trainer(machine, measure, runner, is_async, graphs):
    if not machine.on_gpu and (runner, is_async, graphs) != ("v1", False, False):
        pytest.skip("vLLM on the CPU has the V1 runner only, without asynchronous scheduling and graphs")
    measure(compare_engines, (runner, is_async, graphs))


def test_log_probabilities_of_texts_are_the_same_after_a_sleep(measure):
    measure(compare_text_after_sleep)


def test_router_replay_uses_the_experts_of_the_engine(measure):
    measure(compare_router_replay)


def test_changes_are_compared_up_to_the_first_token_that_differs():
    def sampled(*pairs):
        completion = Completion(tuple(t for t, _ in pairs), tuple(p for _, p in pairs), "length", "", 0)
        return [RolloutGroup(text_prompt(0), (Rollout(completion, Score(0.0, {}, "ok", "")),))]

    before = sampled((1, -1.0), (2, -2.0), (3, -3.0))
    assert largest_change(before, sampled((1, -1.25), (9, -8.0), (3, -9.0))) == 0.25
    assert math.isnan(largest_change(before, sampled((1, -1.0), (2, math.nan), (3, -3.0))))
