"""A trainer and vLLM in one process on a random model: both compute the same, also after a sleep.

The engines are those that a run builds from its configuration.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trigon.assemble.data import open_processors
from trigon.assemble.engines import open_rollout
from trigon.assemble.models import DevicePlacement, choose_device, open_models
from trigon.config.plan import make_plan
from trigon.config.schema import Config
from trigon.rollout.protocol import RolloutEngine
from trigon.rollout.vllm import RunsWith, VllmEngine
from trigon.tools.doctor.engines import EngineVariant
from trigon.tools.doctor.random_models import COMPLETIONS, MODELS, make_groups, write_model
from trigon.tools.doctor.result import Findings, Setting, Tolerances, bytes_text
from trigon.tools.quickstart.model import make_tiny
from trigon.training.local import LocalTrainEngine
from trigon.training.parallel import SingleProcess
from trigon.types import Completion, Prompt, Rollout, RolloutGroup, SamplingParams, Score

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
"""Temporaries of the checksums of weights; see rollout/checksums.py."""
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

    def sample(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, *, calls: int = 1
    ) -> list[list[RolloutGroup]]:
        """Wake vLLM up, load the weights of this version, and make the same call several times."""
        with self.rollout.awake(self.trainer.weights(), version=self.version):
            return [
                [
                    RolloutGroup(prompt, tuple(Rollout(each, Score(0.0, {}, "ok", "")) for each in completions))
                    for prompt, completions in zip(prompts, self.rollout.generate(prompts, sampling), strict=True)
                ]
                for _ in range(calls)
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


def compare_engines(setting: Setting, variant: EngineVariant) -> Findings:
    """See engines.check_variant."""
    on_gpu = setting.device == "cuda"
    device = torch.device(setting.device)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    max_layers = None
    if on_gpu and torch.cuda.mem_get_info()[1] < SMALL_MEMORY:
        max_layers = FEW_LAYERS
    folder = write_model(
        setting.folder / "models" / "qwen2_5_vl",
        MODELS["3b" if on_gpu else "tiny"],
        device,
        dtype,
        max_layers=max_layers,
    )
    compared = Tolerances(setting)
    with ExitStack() as stack:
        start = time.monotonic()
        session = open_session(setting, folder, stack, variant)
        compared.figures["seconds of the start"] = f"{time.monotonic() - start:.1f}"
        _check_variant(compared, session, variant)
        asleep = used_bytes() if on_gpu else 0
        scale, count, tokens = (1.0, 16, 128) if on_gpu else (0.1, 2, 8)
        config = session.trainer.policy.model.config
        images = [group.prompt for group in make_groups(config, count, scale, seed=0)]
        texts = [without_image(prompt, config) for prompt in images]
        sampling = SamplingParams(COMPLETIONS, 1.0, 1.0, -1, tokens, ignore_eos=True, seed=0)

        first, second = session.sample([*images, *texts], sampling, calls=2)
        _compare(compared, "start", session.differences(first))
        compared.figures["equal tokens of a repeated call"] = f"{100 * equal_fraction(first, second):.1f} %"
        session.change_weights()
        stale = session.differences(first)
        compared.at_least("mean difference of stale weights", float(stale.mean()), STALE_MINIMUM)
        allocated = start_counting() if on_gpu else 0
        start = time.monotonic()
        with session.rollout.awake(session.trainer.weights(), version=session.version):
            compared.figures["seconds of wake-up and weight sync"] = f"{time.monotonic() - start:.2f}"
            if on_gpu:
                temporaries = torch.cuda.max_memory_allocated() - allocated
                compared.figures["temporaries of the weight sync"] = bytes_text(temporaries)
                largest = max(weight.nbytes for weight in session.trainer.policy.parameters())
                excess = (temporaries - CHECKSUM_BYTES) / largest
                compared.at_most("as a multiple of the largest weight", excess, SYNC_WEIGHTS)
            start = time.monotonic()
            # Nested with the same version: does nothing but generate.
            [changed] = session.sample(images, sampling)
            seconds = time.monotonic() - start
        compared.figures["sampling"] = f"{count * COMPLETIONS * tokens / seconds:.0f} tokens/s"
        _compare(compared, "new weights", session.differences(changed))
        [text] = session.sample(texts, sampling)
        _compare(compared, "text only, after another sleep", session.differences(text))
        if on_gpu:
            compared.figures["GPU memory in use asleep"] = (
                f"{bytes_text(asleep)} at the start, {bytes_text(used_bytes())} at the end"
            )
    layers = config.get_text_config().num_hidden_layers
    compared.figures["layers"] = f"{layers}, {str(dtype).removeprefix('torch.')}"
    return compared.findings()


def compare_text_after_sleep(setting: Setting) -> Findings:
    """See engines.check_text_after_sleep."""
    folder = setting.folder / "models" / "qwen3_vl"
    if not (folder / "config.json").is_file():
        make_tiny(folder, model_type="qwen3_vl")
    compared = Tolerances(setting)
    with ExitStack() as stack:
        session = open_session(setting, folder, stack, None, vllm_bytes=TINY_MODEL_BYTES)
        texts = [text_prompt(number) for number in range(4)]
        sampling = SamplingParams(COMPLETIONS, 1.0, 1.0, -1, 24, ignore_eos=True, seed=0)
        [before] = session.sample(texts, sampling)
        _compare(compared, "before", session.differences(before))
        if setting.device == "cuda":
            fill_free_memory()
        [after] = session.sample(texts, sampling)
        _compare(compared, "after", session.differences(after))
        compared.figures["equal tokens after the sleep"] = f"{100 * equal_fraction(before, after):.1f} %"
        tolerance = CHANGE_TOLERANCE if setting.device == "cuda" else 0.0
        compared.at_most("largest change of a log-probability", largest_change(before, after), tolerance)
    return compared.findings()


def open_session(
    setting: Setting,
    folder: Path,
    stack: ExitStack,
    variant: EngineVariant | None,
    *,
    vllm_bytes: int | None = None,
) -> Session:
    """Load the policy and start vLLM, as a run with these settings does.

    Args:
        stack: closes them.
        vllm_bytes: GPU memory of vLLM; None: the default fraction of all.
    """
    dtype = "bf16" if setting.device == "cuda" else "fp32"
    # Fewer sequences at a time than by default, for fewer CUDA graphs, which take time to record.
    rollout: dict[str, Any] = {"name": "vllm", "dtype": dtype, "limit_images": 1, "max_num_seqs": 128}
    if vllm_bytes is not None and setting.device == "cuda":
        rollout |= {"gpu_memory_utilization": vllm_bytes / torch.cuda.mem_get_info()[1]}
    if variant is not None:
        rollout |= {
            "model_runner": variant.runner,
            "async_scheduling": variant.async_scheduling,
            "enforce_eager": not variant.graphs,
        }
    config = Config.model_validate(
        {
            "data": {"max_prompt_length": 1024, "max_response_length": 256},
            "worker": {
                "actor": {
                    "model": {"model_path": str(folder)},
                    "fsdp": {"torch_dtype": dtype, "mp_param_dtype": dtype},
                },
                "rollout": rollout,
            },
            "trainer": {"device": setting.device, "val_only": True},  # without an optimizer
        }
    )
    place = DevicePlacement(choose_device(config), SingleProcess())
    processors = open_processors(config)
    trainer, _ = open_models(config, processors, make_plan(config, num_train_prompts=0), place)
    stack.callback(trainer.close)
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


def equal_fraction(one: Sequence[RolloutGroup], other: Sequence[RolloutGroup]) -> float:
    """Return the fraction of tokens that are the same at the same place."""
    pairs = [
        (a, b)
        for first, second in zip(completions_of(one), completions_of(other), strict=True)
        for a, b in zip(first.token_ids, second.token_ids, strict=False)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


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


def start_counting() -> int:
    """Reset the peak of the allocator, and return the bytes that are allocated now.

    Memory that vLLM drops in its sleep stays allocated in this count.
    """
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


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


def _check_variant(compared: Tolerances, session: Session, variant: EngineVariant) -> None:
    """Record how vLLM runs; it is a problem if that is not what was asked for."""
    assert isinstance(session.rollout, VllmEngine)
    runs_with = session.rollout.runs_with
    scheduling = "asynchronous" if runs_with.async_scheduling else "synchronous"
    graphs = "CUDA graphs" if runs_with.graphs else "eager"
    compared.figures["vLLM runs with"] = f"{runs_with.model_runner.upper()} runner, {scheduling} scheduling, {graphs}"
    if runs_with != RunsWith(variant.runner, variant.async_scheduling, variant.graphs):
        compared.problems.append(f"vLLM runs with {compared.figures['vLLM runs with']}, which is not {variant.name}")


def _compare(compared: Tolerances, when: str, differences: Tensor) -> None:
    compared.at_most(f"{when}: mean log-prob difference", float(differences.mean()), MEAN_TOLERANCE)
    compared.figures[f"{when}: largest"] = f"{float(differences.max()):.2g}"
