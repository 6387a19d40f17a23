"""vLLM as a rollout engine, in this process, on the CPU or on one GPU; alone, or as one of several ranks.

Knows vLLM, and is the only file that imports it or sets its environment variables; written for 0.32 and 0.33. Prompts
go in as already processed inputs, token ids and pixel values, so vLLM's own image processing never runs and the trainer
sees the very same pixels. Refuses to know trainers, rewards, and what the completions are for.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, assert_never

import numpy as np
import torch

from trigon.errors import EngineError
from trigon.models.flops import head_dim
from trigon.models.load import Processors, model_folder
from trigon.models.tiles import to_tiles
from trigon.rollout.protocol import OnGroup
from trigon.rollout.seeds import sample_seed
from trigon.torchvision_stub import declare_operators
from trigon.types import Completion, FinishReason, NamedTensors, Prompt, SamplingParams, Vision

# What vLLM says of a request that it gave up for a reason of its own.
_FAILED = ("abort", "error")

# vLLM raises anything between 0 and the lower one to it, with which the trainer would not agree; it refuses the rest.
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 0.01, 2.0

_SEQUENCES = 256
"""How many vLLM runs at a time on the CPU, by its own choice."""

_CPU_BLOCK_TOKENS = 32
"""Tokens of a block of vLLM's cache on the CPU: the fewest that its attention there takes. The answers of a group share
whole blocks of the prompt, and each computes the rest again, which with vLLM's own 128 is a prompt's half or all of it.
"""


@dataclass(frozen=True, slots=True)
class _Request:
    """One completion asked of vLLM. row: of its prompt. sample: its number within the group. attempt: from 1."""

    row: int
    sample: int
    attempt: int

    @property
    def name(self) -> str:
        """What vLLM calls it."""
        return f"{self.row}.{self.sample}.{self.attempt}"


class VllmEngine:
    """Samples with vLLM. Satisfies RolloutEngine.

    Log-probabilities are those of the distribution sampled from: after the ban of media tokens, temperature, top-k and
    top-p. The same calls in the same order give the same tokens and log-probabilities, bit for bit, on one machine.
    """

    def __init__(
        self,
        *,
        model_path: str,
        processors: Processors,
        device: Literal["cpu", "cuda"],
        dtype: torch.dtype,
        max_model_len: int,
        max_num_batched_tokens: int,
        gpu_memory_utilization: float,
        enforce_eager: bool,
        enable_chunked_prefill: bool,
        enable_prefix_caching: bool,
        limit_images: int,
        seed: int,
        trust_remote_code: bool,
        override_config: Mapping[str, Any],
        skip_special_tokens: bool,
        disable_log_stats: bool,
        tensor_parallel_size: int | None = None,
        shows_videos: bool = False,
    ) -> None:
        """Start vLLM; on a GPU, put it to sleep at once.

        Args:
            shows_videos: whether a prompt may have videos, which can be long and so take more of the memory.
            tensor_parallel_size: consecutive ranks of torch.distributed's process group that hold one copy of the
                model together; all of them must make the same calls. None: this process is alone.
            max_model_len: prompt and response together, in tokens.
            max_num_batched_tokens: of all requests in one forward; at least max_model_len where prompts are not split.
            gpu_memory_utilization: fraction of the GPU that vLLM may hold while awake. On the CPU its cache takes
                VLLM_CPU_KVCACHE_SPACE GiB instead; 1 unless set, or less where nothing could fill it.
            enforce_eager: neither compile the model nor record CUDA graphs; neither is ever done on the CPU.
            enable_chunked_prefill: let long prompts be split; they never are on the CPU.
            limit_images: most images in one prompt; 0: any number.
            skip_special_tokens: for Completion.text.
        Raises: EngineError if vLLM is not installed, or built for another device.
        """
        self._processors = processors
        self._device = device
        self._max_model_len = max_model_len
        self._limit_images = limit_images
        self._skip_special_tokens = skip_special_tokens
        # Eager also for the one small function of the sampler that vLLM always compiles: it takes the CPU 5 seconds.
        self._stance = "force_eager" if device == "cpu" else "default"
        self._version: int | None = None  # whose weights vLLM holds, if anybody's
        self._awake = False
        self._unusable = ""  # why the engine can no longer be used; empty while it can
        folder = model_folder(model_path)
        # On the CPU vLLM 0.32 dies of a seeded request whose prompt it has split ("CPU Generator does not use offset").
        split = enable_chunked_prefill and device == "cuda"
        batched_tokens = max_num_batched_tokens if split else max(max_num_batched_tokens, max_model_len)
        self._encoder_tokens = batched_tokens  # vLLM's encoder cache has room for as many, and for a largest image
        with _process_left_as_it_was(), warnings.catch_warnings(), ExitStack() as undo:
            for deprecated in (DeprecationWarning, FutureWarning):
                warnings.simplefilter("ignore", deprecated)  # what vLLM uses of torch is not the user's to mend
            vllm = _import_vllm(device)
            _register_in_process(vllm, processors.hf_config.architectures)
            # vLLM collects garbage five times as it starts, each time looking at all that was ever imported.
            gc.freeze()
            undo.callback(gc.unfreeze)
            self._engine = vllm.LLMEngine.from_engine_args(
                vllm.EngineArgs(
                    model=str(folder),
                    dtype=dtype,
                    max_model_len=max_model_len,
                    max_num_batched_tokens=batched_tokens,
                    gpu_memory_utilization=gpu_memory_utilization,
                    block_size=_CPU_BLOCK_TOKENS if device == "cpu" else None,
                    kv_cache_memory_bytes=_cache_bytes(processors, max_model_len, dtype) if device == "cpu" else None,
                    enforce_eager=enforce_eager or device == "cpu",
                    enable_chunked_prefill=split,
                    enable_prefix_caching=enable_prefix_caching,
                    enable_sleep_mode=device == "cuda",
                    # The latter finds its place by RANK and LOCAL_RANK in the group of processes that is there.
                    distributed_executor_backend="uni" if tensor_parallel_size is None else "external_launcher",
                    tensor_parallel_size=tensor_parallel_size or 1,
                    **(
                        _vision_arguments(processors, limit_images, shows_videos)
                        if processors.family.has_vision
                        else {}
                    ),
                    logprobs_mode="processed_logprobs",  # the default: those before temperature, top-k and top-p
                    generation_config="vllm",  # the model's own sampling defaults are not wanted
                    hf_overrides=dict(override_config),
                    trust_remote_code=trust_remote_code,
                    disable_log_stats=disable_log_stats,
                    use_tqdm_on_load=False,
                    seed=seed,
                )
            )
        self._expected_names = self._canonical(_stored_names(folder))
        self._sleep()

    def awake(self, weights: NamedTensors, *, version: int) -> AbstractContextManager[None]:
        """See RolloutEngine. May be entered again inside itself with the same version, which then does nothing.

        A GPU forgets the weights when the context is left, so there every entry loads; the CPU keeps them.
        Raises: EngineError if a tensor is missing, left over or misshapen; the engine cannot be used afterwards.
        """
        return self._awake_context(weights, version)

    @contextmanager
    def _awake_context(self, weights: NamedTensors, version: int) -> Iterator[None]:
        self._check_usable()
        if self._awake:
            if version != self._version:
                raise EngineError(
                    f"The rollout engine is awake with the weights of step {self._version} and cannot take those of "
                    f"step {version} before it has slept. Leave the outer awake() first."
                )
            yield
            return
        if self._device == "cuda":
            self._engine.wake_up(["weights"])
        if version != self._version:
            self._load(weights, version)
        if self._device == "cuda":
            self._engine.wake_up(["kv_cache"])
        self._forget_caches()
        self._awake = True
        try:
            yield
        finally:
            self._awake = False
            self._sleep()

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        step: int,
        on_progress: Callable[[int], None] | None = None,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        """See RolloutEngine. A request that vLLM gives up is tried once more. If the call is interrupted, all of its
        requests are dropped.

        Raises: EngineError also for a prompt that with sampling.max_tokens exceeds max_model_len, for too many images,
        and for a temperature that vLLM does not take.
        """
        self._check_usable()
        if not self._awake:
            raise EngineError(
                "generate() was called while the rollout engine sleeps. Call it inside `with engine.awake(...)`."
            )
        if not (sampling.temperature == 0 or _MIN_TEMPERATURE <= sampling.temperature <= _MAX_TEMPERATURE):
            raise EngineError(
                f"vLLM cannot sample at a temperature of {sampling.temperature}. Choose 0, which is greedy, or one "
                f"from {_MIN_TEMPERATURE} to {_MAX_TEMPERATURE}."
            )
        for prompt in prompts:
            self._check_prompt(prompt, sampling)

        # So that the result depends on the arguments alone: a block cached by an earlier call was computed in another
        # batch, and differs in its last bits from one computed now.
        self._forget_caches()
        completions: list[list[Completion | None]] = [[None] * sampling.n for _ in prompts]
        num_left = [sampling.n] * len(prompts)  # of each prompt's completions, to be sampled or lost
        asked: dict[str, _Request] = {}
        lost: set[int] = set()  # prompts of which a request failed twice

        def group(row: int) -> list[Completion]:
            return [] if row in lost else [_present(completion) for completion in completions[row]]

        def ask(request: _Request) -> None:
            prompt = prompts[request.row]
            params = self._vllm_sampling(sampling, step=step, prompt_id=prompt.prompt_id, sample=request.sample)
            asked[request.name] = request
            self._engine.add_request(request.name, inputs[request.row], params)

        with (
            torch.random.fork_rng(devices=[]),  # vLLM draws from the global generator as well, to no effect
            torch.compiler.set_stance(self._stance),
        ):
            try:
                inputs = [self._engine_input(prompt) for prompt in prompts]
                for row, sample in itertools.product(range(len(prompts)), range(sampling.n)):
                    ask(_Request(row, sample, attempt=1))
                while self._engine.has_unfinished_requests():
                    done: list[int] = []  # prompts, one for each of their completions
                    for output in self._engine.step():
                        if not output.finished:
                            continue
                        request = asked.pop(output.request_id)
                        if output.outputs[0].finish_reason not in _FAILED:
                            completions[request.row][request.sample] = self._completion(
                                output.outputs[0], prompts[request.row], sampling
                            )
                        elif request.attempt == 1:  # the same seed, so that a success leaves no trace of the failure
                            ask(_Request(request.row, request.sample, attempt=2))
                            continue
                        else:
                            lost.add(request.row)
                        done.append(request.row)
                        num_left[request.row] -= 1
                    if done and on_progress is not None:
                        on_progress(len(done))
                    for row in dict.fromkeys(done):
                        if num_left[row] == 0 and on_group is not None:
                            on_group(row, group(row))
            finally:
                self._engine.abort_request(list(asked))
        return [group(row) for row in range(len(prompts))]

    def close(self) -> None:
        """Free everything, vLLM's process group (that of torch.distributed) with it. Safe to call twice."""
        if self._unusable != "it was closed":
            self._unusable = "it was closed"
            # Not public in 0.32: LLMEngine itself is shut down only by being collected, which may take long.
            self._engine.engine_core.shutdown()
            del self._engine

    # -- weights --

    def _load(self, weights: NamedTensors, version: int) -> None:
        names: list[str] = []

        def handed_over() -> NamedTensors:
            for name, tensor in weights:
                names.append(name)
                yield name, tensor.detach()

        # Until all is done the model is neither the old one nor the new one, and some of its layers have no storage.
        self._version = None
        self._unusable = "its last weight load did not finish"
        # reload_weights, not model.load_weights: the latter fails half-way on the CPU, whose linear layers are packed
        # after loading, and leaves a model that is a mixture of two (measured with 0.32).
        try:
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": handed_over()})
        except (AssertionError, KeyError, RuntimeError, ValueError) as error:  # what its loaders raise
            raise EngineError(
                f"vLLM could not take the weights of step {version}, the last of them {names[-1:]}: {error}"
            ) from error
        if self._device == "cpu":
            self._engine.apply_model(_repack_heads)
            self._engine.apply_model(_repack_experts)
        self._check_names(names)
        self._version = version
        self._unusable = ""

    def _canonical(self, names: Iterable[str]) -> frozenset[str]:
        """Spell checkpoint names in one way, less those that a checkpoint may hold or not."""
        family, tied = self._processors.family, getattr(self._processors.hf_config, "tie_word_embeddings", False)
        ignored = ("rotary_emb.inv_freq", "lm_head.weight") if tied else ("rotary_emb.inv_freq",)
        return frozenset(family.checkpoint_name(name) for name in names if not name.endswith(ignored))

    def _check_names(self, names: Sequence[str]) -> None:
        """Check that the names handed over are those of the checkpoint from which the engine was built.

        vLLM itself ignores some unknown names, and leaves part of a layer uninitialised when one of its tensors is
        missing. Raises: EngineError.
        """
        given = self._canonical(names)
        missing, unexpected = sorted(self._expected_names - given), sorted(given - self._expected_names)
        repeated = sorted(name for name, times in Counter(names).items() if times > 1)
        if missing or unexpected or repeated:
            raise EngineError(
                "The weights handed to vLLM are not those that its model is made of: "
                f"{len(missing)} missing {missing[:3]}, {len(unexpected)} unexpected {unexpected[:3]}, "
                f"{len(repeated)} repeated {repeated[:3]}. Trainer and rollout engine must load the same model_path."
            )

    # -- memory and caches --

    def _sleep(self) -> None:
        if self._unusable:
            return
        self._forget_caches()
        if self._device == "cuda":
            # Level 2 drops the weights instead of copying them to the host: the trainer hands them over again anyway.
            self._engine.sleep(level=2)
            self._version = None

    def _forget_caches(self) -> None:
        """Forget everything computed so far; vLLM does not do so by itself when the weights change.

        Raises: EngineError if vLLM refuses, since stale entries shift log-probabilities by 0.5 and more (measured).
        """
        if not self._engine.reset_prefix_cache():
            self._unusable = "its prefix cache could not be reset"
            raise EngineError("vLLM would not reset its prefix cache: some request still holds blocks.")
        # The engine's, not the worker's alone: else the scheduler believes in entries that the worker no longer has.
        self._engine.reset_encoder_cache()

    def _check_usable(self) -> None:
        if self._unusable:
            raise EngineError(f"The rollout engine cannot be used: {self._unusable}.")

    # -- requests --

    def _check_prompt(self, prompt: Prompt, sampling: SamplingParams) -> None:
        needed = len(prompt.token_ids) + sampling.max_tokens
        if needed > self._max_model_len:
            raise EngineError(
                f"{prompt.prompt_id}: its {len(prompt.token_ids)} tokens and a response of up to {sampling.max_tokens} "
                f"need {needed} tokens, but worker.rollout.max_model_len is {self._max_model_len}. Raise it, or "
                "shorten either."
            )
        vision = prompt.pixels()
        num_images = len(vision.grid_thw) if vision is not None and vision.kind == "image" else 0
        if vision is not None and vision.kind == "video":
            longest = max(place.length for place in self._places(prompt, vision))
            if longest > self._encoder_tokens:
                raise EngineError(
                    f"{prompt.prompt_id}: a video of {longest} tokens is more than vLLM's encoder cache holds; set "
                    f"worker.rollout.max_num_batched_tokens, which is {self._encoder_tokens}, to as many, or lower "
                    "data.video_fps, data.max_video_frames or data.max_pixels."
                )
        if 0 < self._limit_images < num_images:
            raise EngineError(
                f"{prompt.prompt_id}: it has {num_images} images, but worker.rollout.limit_images is "
                f"{self._limit_images}. Raise it."
            )

    def _engine_input(self, prompt: Prompt) -> Any:
        """Return what vLLM's own processor would have made of the prompt, made of what we have processed already."""
        from vllm.inputs.engine import mm_input, tokens_input

        vision = prompt.pixels()
        if vision is None:
            return tokens_input(list(prompt.token_ids))
        from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

        kind, family, hf_config = vision.kind, self._processors.family, self._processors.hf_config
        inputs: dict[str, torch.Tensor]
        if family.tiles:
            counts = vision.grid_thw[:, 0]
            inputs = {
                "pixel_values": to_tiles(vision.pixel_values, vision.grid_thw, family.patch_size(hf_config)),
                "image_num_patches": counts,
                "image_token_id": torch.tensor(family.image_token_id(hf_config)),
            }
            fields = {
                "pixel_values": MultiModalFieldConfig.flat_from_sizes(kind, counts),
                "image_num_patches": MultiModalFieldConfig.batched(kind, keep_on_cpu=True),
                "image_token_id": MultiModalFieldConfig.shared(kind, len(counts), keep_on_cpu=True),
            }
        else:
            pixel_values = {"image": "pixel_values", "video": "pixel_values_videos"}[kind]
            inputs = {pixel_values: vision.pixel_values, f"{kind}_grid_thw": vision.grid_thw}
            fields = {
                pixel_values: MultiModalFieldConfig.flat_from_sizes(kind, vision.grid_thw.prod(-1)),
                f"{kind}_grid_thw": MultiModalFieldConfig.batched(kind, keep_on_cpu=True),
            }
        if family.video == "seconds" and kind == "video":
            # In float64, in which vLLM counts on, so that its positions are those of models/positions.py.
            inputs["second_per_grid_ts"] = torch.tensor(vision.temporal_patch_seconds, dtype=torch.float64)
            fields["second_per_grid_ts"] = MultiModalFieldConfig.batched(kind, keep_on_cpu=True)
        items = MultiModalKwargsItems.from_hf_inputs(inputs, fields)
        return mm_input(
            list(prompt.token_ids), items, {kind: list(vision.hashes)}, {kind: self._places(prompt, vision)}
        )

    def _places(self, prompt: Prompt, vision: Vision) -> list[Any]:
        """Return the vLLM PlaceholderRange of each image or video in the prompt.

        Where a video tells times as text, its range reaches from the token before its first placeholder, by which vLLM
        finds the first of its temporal patches, to its last placeholder, with a mask of those that are placeholders.
        Raises: EngineError if the prompt's placeholders are not those of its images or videos.
        """
        from vllm.multimodal.inputs import PlaceholderRange

        family, hf_config = self._processors.family, self._processors.hf_config
        match vision.kind:
            case "image":
                placeholder = family.image_token_id(hf_config)
            case "video":
                placeholder = family.video_token_id(hf_config)
            case _:
                assert_never(vision.kind)
        is_placeholder = torch.tensor(prompt.token_ids) == placeholder
        found = is_placeholder.nonzero()[:, 0]
        lengths = (vision.grid_thw.prod(-1) // family.spatial_merge(hf_config) ** 2).tolist()
        spread = family.video == "timestamps" and vision.kind == "video"
        places = []
        if len(found) == sum(lengths):
            for indices in torch.split(found, lengths):
                start, end = int(indices[0]) - spread, int(indices[-1]) + 1
                if not spread and end - start != len(indices):
                    break
                mask = is_placeholder[start:end] if spread else None
                places.append(PlaceholderRange(start, end - start, is_embed=mask))
        if len(places) < len(lengths):
            raise EngineError(
                f"{prompt.prompt_id}: {len(found)} {vision.kind} placeholders do not match {vision.kind}s of {lengths} "
                "tokens. Placeholders must be expanded, and never cut, when a prompt is built."
            )
        return places

    def _vllm_sampling(self, sampling: SamplingParams, *, step: int, prompt_id: str, sample: int) -> Any:
        from vllm.sampling_params import RequestOutputKind
        from vllm.sampling_params import SamplingParams as VllmSamplingParams

        return VllmSamplingParams(
            # One request for each sample, not one with n children, whose seeds would be seed + 0, 1, 2 ...
            n=1,
            seed=sample_seed(sampling.seed, step=step, prompt_id=prompt_id, sample=sample),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            # All stop tokens are named here; those that vLLM would find for itself are left aside.
            ignore_eos=True,
            stop_token_ids=[] if sampling.ignore_eos else list(self._processors.stop_token_ids),
            # The constructor, unlike the HTTP server, takes any bias; minus infinity is a ban, before all else is
            # computed.
            logit_bias=dict.fromkeys(self._processors.banned_token_ids, float("-inf")),
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
            skip_clone=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _completion(self, output: Any, prompt: Prompt, sampling: SamplingParams) -> Completion:
        token_ids = tuple(output.token_ids)
        logprobs = tuple(output.logprobs.logprobs)
        if not token_ids or len(logprobs) != len(token_ids):
            raise EngineError(
                f"{prompt.prompt_id}: vLLM returned {len(token_ids)} tokens with {len(logprobs)} log-probabilities."
            )
        banned = set(token_ids).intersection(self._processors.banned_token_ids)
        if banned:
            raise EngineError(f"{prompt.prompt_id}: vLLM sampled the banned media tokens {sorted(banned)}.")
        assert self._version is not None
        return Completion(
            token_ids=token_ids,
            sampling_logprobs=logprobs if sampling.temperature > 0 else (0.0,) * len(token_ids),
            finish_reason=_finish_reason(output.finish_reason, prompt),
            text=self._processors.tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens),
            policy_version=self._version,
        )


def _vision_arguments(processors: Processors, limit_images: int, shows_videos: bool) -> dict[str, Any]:
    assert processors.image_processor is not None
    size = processors.image_processor.size
    limits: dict[str, Any] = {}
    if not processors.family.tiles:
        limits = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    return {
        # vLLM plans by the number of videos, and does not mind a prompt with more.
        "limit_mm_per_prompt": {"video": int(shows_videos)} | ({"image": limit_images} if limit_images else {}),
        # How large an image can be: vLLM sizes its encoder cache by it, and never processes one itself.
        "mm_processor_kwargs": limits,
        "mm_device_do_normalize": False,  # the pixels that we hand over are normalised already
        "mm_processor_cache_gb": 0,  # every prompt brings its pixels along; there is nothing to look up
    }


def _cache_bytes(processors: Processors, max_model_len: int, dtype: torch.dtype) -> int:
    """Return how large a cache vLLM may have on the CPU, where it takes and clears all of it at once: a GiB, or what
    as many sequences as it runs at a time can fill. VLLM_CPU_KVCACHE_SPACE, where set, goes before it.
    """
    config = processors.hf_config.get_text_config()
    token = int(2 * config.num_hidden_layers * config.num_key_value_heads * head_dim(config) * dtype.itemsize)
    return min(2**30, _SEQUENCES * (max_model_len + _CPU_BLOCK_TOKENS) * token)


def _stored_names(folder: Path) -> list[str]:
    """Return the names of all tensors in a model folder.

    Raises: EngineError if it holds no safetensors.
    """
    from safetensors import safe_open

    names: list[str] = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            names.extend(tensors.keys())
    if not names:
        raise EngineError(f"{folder} holds no *.safetensors file. Convert the model's weights to safetensors first.")
    return names


def _import_vllm(device: Literal["cpu", "cuda"]) -> Any:
    """Import vLLM, with the environment that an engine in this process needs; but for one, the user's settings stay."""
    # Weights are handed over as tensors, which do not leave the process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    match device:
        case "cpu":
            # Else the threads of the trainer are pinned to cores as well.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            # Below an error: each reload warns of a tied head, which _repack_heads mends, and each start of LD_PRELOAD.
            os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        case "cuda":
            os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        case _:
            assert_never(device)
    declare_operators()
    try:
        import vllm
    except ImportError as error:
        raise EngineError(
            f"worker.rollout.name=vllm needs vLLM, which cannot be imported ({error}). Install trigon's gpu or cpu "
            "extra, or choose worker.rollout.name=transformers."
        ) from error
    from vllm.platforms import current_platform

    if current_platform.device_type != device:
        raise EngineError(
            f"vLLM {vllm.__version__} is built for {current_platform.device_type or 'no device'}, but the rollout "
            f"engine is to run on {device}. Install trigon's {'gpu' if device == 'cuda' else 'cpu'} extra."
        )
    return vllm


def import_ahead(device: Literal["cpu", "cuda"]) -> None:
    """Import now what an engine will import when it starts, which takes seconds. Raises: as starting it does."""
    with _process_left_as_it_was(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as when it starts
        vllm = _import_vllm(device)
        vllm.LLMEngine, vllm.EngineArgs  # noqa: B018  (they are imported when they are named)
        # Not public in 0.32: where vLLM's models and executors come in, by a name that its platform holds.
        importlib.import_module({"cpu": "vllm.v1.worker.cpu_worker", "cuda": "vllm.v1.worker.gpu_worker"}[device])


def _register_in_process(vllm: Any, architectures: Iterable[str]) -> None:
    """Import the model's class here and now, instead of letting vLLM look at it first in a process of its own.

    That process takes some ten seconds. It is there to keep CUDA out of this one, to no purpose when the engine runs in
    it, and it imports torchvision before it loads plug-ins, so it dies of what declare_operators mends.
    Not public in 0.32: ModelRegistry.models.
    """
    for architecture in architectures:
        known = vllm.ModelRegistry.models.get(architecture)
        if known is not None:
            vllm.ModelRegistry.register_model(architecture, known.load_model_cls())


@contextmanager
def _process_left_as_it_was() -> Iterator[None]:
    """Undo what starting vLLM does to its process, which is also the trainer's.

    It reseeds every global random generator; sets torch's threads to one and, on the CPU, replaces
    torch.set_num_threads by nothing; and puts libraries into LD_PRELOAD, which all later child processes would load.
    """
    threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    python_state, numpy_state = random.getstate(), np.random.get_state()
    preload = os.environ.get("LD_PRELOAD")
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        os.environ.pop("LD_PRELOAD", None)
        if preload is not None:
            os.environ["LD_PRELOAD"] = preload


def _repack_heads(model: torch.nn.Module) -> None:
    """Pack the output head's weights again, after the embedding that a tied head shares them with has been reloaded.

    Not public in 0.32: on the CPU a head computes with a packed copy of its weights, and a reload renews the copy only
    if the head has tensors of its own. Without this a tied head keeps the old weights, silently.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _repack_experts(model: torch.nn.Module) -> None:
    """Pack the stacked weights of experts again.

    Not public in 0.32: on the CPU a layer of experts packs its weights when they are loaded first, and after a reload
    leaves them as they came, while its kernel goes on to take them for packed: log-probabilities are off by 0.5 and
    more (measured), silently.
    """
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)


def _finish_reason(reason: str | None, prompt: Prompt) -> FinishReason:
    match reason:
        case "stop" | "length":
            return reason
        case _:
            raise EngineError(f"{prompt.prompt_id}: vLLM ended a completion with {reason!r} instead of stop or length.")


def _present(completion: Completion | None) -> Completion:
    assert completion is not None, "vLLM lost a request"
    return completion
