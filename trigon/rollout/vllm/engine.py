"""VllmEngine: the RolloutEngine protocol on a vllm.LLMEngine in this process."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from trigon.errors import EngineError, RolloutError, WorkerError
from trigon.metrics import Metrics, Sum, merge
from trigon.models.load import Processors
from trigon.rollout.episode_settings import EpisodeSettings
from trigon.rollout.episodes import Episodes, newest_draw
from trigon.rollout.protocol import OnGroup, Until, require_awake, require_local_weights
from trigon.rollout.vllm.arguments import VllmSettings, batched_tokens, engine_arguments
from trigon.rollout.vllm.inputs import check_prompt, check_sampling
from trigon.rollout.vllm.leader import TensorParallelRanks, follow, leading
from trigon.rollout.vllm.process import one_thread, start_llm_engine, stop_llm_engine
from trigon.rollout.vllm.sleep import SleepingState, find_state, in_weights_pool
from trigon.rollout.vllm.turns import VllmTurns
from trigon.rollout.vllm.weights import canonical_names, checkpoint_names, itself, load_weights, reset_caches
from trigon.system.machine import gpu_memory_left, loopback_variables
from trigon.system.process_settings import set_variables
from trigon.system.temporary import private_folder
from trigon.system.trace import DecodeTracer
from trigon.types import Completion, LocalWeights, Prompt, SamplingParams, WeightsHandle


class VllmEngine:
    """Samples with vLLM. Satisfies RolloutEngine.

    Log-probabilities belong to the distribution that was sampled from: after the ban of media
    tokens, temperature, top-k and top-p. The same calls in the same order give the same tokens and
    log-probabilities, bit for bit, on one machine.
    """

    num_replicas = 1

    def __init__(
        self,
        settings: VllmSettings,
        processors: Processors,
        episodes: EpisodeSettings | None = None,
        *,
        tracer: DecodeTracer | None = None,
    ) -> None:
        """Start vLLM; on a GPU, put it to sleep at once.

        episodes: None: completions of one turn. With episodes prefixes are always cached, so that a
        turn computes only its observation. With tensor parallelism, the first rank of a replica has
        the episodes, and the others cache prefixes by their settings and have None.
        tracer: traces the decode steps; None: no traces.
        Raises: EngineError if vLLM is not installed, built for another device or does not start,
        and if the model folder has no safetensors.
        """
        self._settings = settings
        self._episodes = Episodes(
            episodes,
            tokenizer=processors.tokenizer,
            skip_special_tokens=settings.config.worker.reward.skip_special_tokens,
            stop_token_ids=processors.stop_token_ids,
            turn_by_turn=settings.device == "cpu",
            tracer=tracer,
        )
        self._processors = processors
        self._encoder_tokens = batched_tokens(settings)
        # vLLM always compiles one small function of its sampler, which takes 5 seconds on the CPU.
        self._compile_stance: Literal["force_eager", "default"] = (
            "force_eager" if settings.device == "cpu" else "default"
        )
        self._version: int | None = None  # of the weights that vLLM holds; None: of none
        self._awake = False
        self._closed = False
        self._unusable_because = ""  # empty while the engine can be used
        self._num_retried = 0  # since the last pop_metrics
        self._restarted = False  # and has loaded no weights since then
        self._memory_left: Metrics = {}  # the least while awake, since the last pop_metrics
        names = checkpoint_names(settings.model_folder)
        self._expected_names = canonical_names(names, processors)
        self._arguments = engine_arguments(
            settings, processors, checkpoint_names=names, has_episodes=episodes is not None
        )
        self._llm_engine: Any = None
        self._store_folder: Path | None = None
        with ExitStack() as stack:
            if settings.tensor_parallel_size is None:  # vLLM makes a process group, which only itself may reach
                self._store_folder = stack.enter_context(private_folder())
                # NCCL opens its sockets when they are first used.
                stack.enter_context(set_variables(loopback_variables()))
            self._start()
            self._resources = stack.pop_all()  # for as long as the process group, which outlives a restart
        # vLLM's process groups outlive a restart.
        self._ranks = TensorParallelRanks() if (settings.tensor_parallel_size or 1) > 1 else None

    def _start(self) -> None:
        """Start vLLM, and put it to sleep."""
        self._llm_engine = start_llm_engine(
            self._arguments,
            device=self._settings.device,
            model_runner=self._settings.model_runner,
            architectures=self._processors.hf_config.architectures,
            store_folder=self._store_folder,
        )
        self._state = SleepingState(())
        if self._settings.frees_memory:
            [model] = self._llm_engine.apply_model(itself)
            self._state = find_state(model, in_weights_pool())
        self._sleep()

    def restart(self) -> None:
        """See Restartable. All ranks together."""
        assert not self._awake, "restart() inside awake()"
        assert not self._closed
        self._episodes.stop()
        self._version = None
        self._unusable_because = "it could not be started again"
        self._state = SleepingState(())
        is_frozen = gc.get_freeze_count() > 0
        if self._llm_engine is not None:
            try:
                self._wake_to_stop()
            except RuntimeError as error:
                raise RolloutError(f"vLLM cannot be woken up to be replaced: {error}") from error
        stopped, self._llm_engine = self._llm_engine, None
        if stopped is not None:
            stop_llm_engine(stopped)
        del stopped
        gc.unfreeze()  # also what was frozen when the run started: the engine that is dropped
        gc.collect()
        if self._settings.device == "cuda":
            torch.cuda.empty_cache()
        try:
            self._start()
        except WorkerError:  # of the watchdog: the run is to end
            raise
        except Exception as error:  # vLLM raises errors of many types
            raise RolloutError(f"vLLM could not be started again: {type(error).__name__}: {error}") from error
        self._unusable_because = ""
        self._restarted = True
        self._sleep()
        if is_frozen:
            gc.freeze()

    @contextmanager
    def awake(self, weights: WeightsHandle, *, version: int) -> Iterator[None]:
        """See RolloutEngine. May be nested with the same version: the inner context does nothing.

        A GPU drops the weights at exit, so that every entry loads them there; the CPU keeps them.
        Raises: EngineError if a tensor is missing, unexpected, repeated or has another shape, and
        if the GPU has too little free memory. The engine cannot be used afterwards.
        """
        local = require_local_weights(weights)
        self._check_usable()
        if self._awake:
            if version != self._version:
                raise EngineError(
                    f"The rollout engine is awake with the weights of policy version {self._version} and cannot load "
                    f"policy version {version} before it sleeps. Leave the outer awake() first."
                )
            yield
            return
        sleeps = self._settings.frees_memory
        if sleeps:
            self._wake_up("weights")
            self._state.restore()
        if version != self._version:
            self._load(local, version)
        if sleeps:
            self._wake_up("kv_cache")
        if self._settings.device == "cuda":
            self._memory_left = merge(self._memory_left, gpu_memory_left())
        self._reset_caches()
        self._episodes.wake()
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
        until: Until | None = None,
        on_progress: Callable[[int | None], None] | None = None,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        """See RolloutEngine. A request that vLLM gives up or loses is submitted once more.

        Its seed is the same, so that the completion does not depend on the failure. If the call is
        interrupted, all of its requests are aborted. With tensor parallelism all ranks of a replica
        make this call, with the same prompts. The first one decides until its call ends, and has
        the completions; the others leave until and the callbacks out, and return empty lists.
        Raises: EngineError also for a prompt that with sampling.max_tokens exceeds max_model_len,
        for too many images or too long a video, and for a temperature that vLLM does not support;
        RolloutError if vLLM itself fails, which makes the engine unusable until restart().
        """
        self._check_usable()
        require_awake(self._awake)
        assert self._version is not None
        check_sampling(sampling)
        unprocessed, prompts = prompts, self._episodes.with_pixels(prompts)
        for prompt in prompts:
            check_prompt(prompt, sampling, self._settings, self._processors, encoder_tokens=self._encoder_tokens)

        # The result is then a function of the arguments alone: a block that an earlier call cached
        # was computed in another batch, and differs in its last bits from one that is computed now.
        self._reset_caches()
        turns = VllmTurns(
            self._llm_engine,
            self._processors,
            sampling,
            to_text=self._episodes.to_text,
            records_experts=self._settings.records_experts,
        )
        run = partial(
            self._episodes.run,
            prompts=prompts,
            sampling=sampling,
            unprocessed=unprocessed,
            policy_version=self._version,
            on_group=on_group,
            until=until,
        )
        with (
            one_thread(self._settings.device),
            torch.random.fork_rng(devices=[]),  # vLLM advances the global generator too, without using the numbers
            torch.compiler.set_stance(self._compile_stance),
        ):
            try:
                if self._ranks is None:
                    return run(turns, on_progress=on_progress)
                if self._ranks.is_first:
                    with leading(turns, self._ranks, prompts) as leader:
                        return run(leader, on_progress=on_progress)
                with self._episodes.tracer.call(newest_draw(prompts)) as trace:
                    follow(turns, self._ranks, prompts, trace)
                return [[] for _ in prompts]
            except WorkerError:  # of the watchdog: the run is to end, without further calls of vLLM
                self._unusable_because = "it was interrupted while it sampled"
                raise
            except RolloutError:
                self._unusable_because = "it failed while it sampled"
                raise
            finally:
                self._num_retried += turns.num_retried
                if not self._unusable_because:
                    turns.abort()

    def pop_metrics(self) -> Metrics:
        """See RolloutEngine."""
        retried, self._num_retried = self._num_retried, 0
        left, self._memory_left = self._memory_left, {}
        return {"rollout/retried_requests": Sum(float(retried)), **left, **self._episodes.pop_metrics()}

    def close(self) -> None:
        """Free everything, vLLM's torch.distributed process group included. May be called twice."""
        if not self._closed:
            self._closed = True
            self._unusable_because = "it was closed"
            self._episodes.stop()
            # vLLM frees its allocator, into which this memory must have been given back before.
            self._state = SleepingState(())
            # Not public in 0.32: LLMEngine itself shuts down only when it is garbage-collected.
            if self._llm_engine is not None:
                try:
                    self._wake_to_stop()
                except RuntimeError as error:  # the trainer has the memory, which ends with this process
                    warnings.warn(f"vLLM is closed while it sleeps, since it cannot wake up: {error}", stacklevel=2)
                self._llm_engine.engine_core.shutdown()
            self._llm_engine = None
            self._resources.close()

    def _wake_to_stop(self) -> None:
        """Give memory back to an engine that sleeps: vLLM 0.32 fails to free what it does not hold.

        Raises: RuntimeError if there is too little.
        """
        if self._settings.frees_memory and not self._awake:
            for tag in ("weights", "kv_cache"):
                self._llm_engine.wake_up([tag])

    def _wake_up(self, tag: Literal["weights", "kv_cache"]) -> None:
        try:
            self._llm_engine.wake_up([tag])
        except RuntimeError as error:
            self._unusable_because = "it could not wake up"
            if "out of memory" not in str(error):
                raise
            memory = {"weights": "the weights", "kv_cache": "the KV cache"}[tag]
            raise EngineError(
                f"The GPU has no room for {memory}, whose memory vLLM gave back for its sleep ({error}). "
                "Lower worker.rollout.gpu_memory_utilization, or move more of the trainer to host memory: "
                "worker.actor.offload.offload_params=true worker.actor.offload.offload_optimizer=true; see "
                "docs/distributed.md (Out of memory)"
            ) from error

    def _load(self, weights: LocalWeights, version: int) -> None:
        self._version = None
        self._unusable_because = "its last weight sync did not finish"
        load_weights(
            self._llm_engine,
            weights,
            self._processors,
            expected_names=self._expected_names,
            device=self._settings.device,
            version=version,
            check_values=self._settings.checks_weights(version, restarted=self._restarted),
        )
        self._restarted = False
        self._version = version
        self._unusable_because = ""

    def _sleep(self) -> None:
        if self._unusable_because:
            return
        self._reset_caches()
        if self._settings.frees_memory:
            # Level 2 drops the weights; level 1 would copy them to the host, but the next awake()
            # loads them anyway.
            self._llm_engine.sleep(level=2)
            self._version = None

    def _reset_caches(self) -> None:
        try:
            reset_caches(self._llm_engine)
        except RolloutError:
            self._unusable_because = "its prefix cache could not be reset"
            raise

    def _check_usable(self) -> None:
        if self._unusable_because:
            raise EngineError(f"The rollout engine cannot be used: {self._unusable_because}. Start a new one.")
