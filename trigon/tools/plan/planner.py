"""Makes the plan of one configuration for given devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch

from trigon.assemble.data import NO_SOURCES
from trigon.assemble.memory import count_checkpoint_bytes
from trigon.assemble.memory_check import TIGHT, MemoryCounter, Remedy, can_divide_engine, find_remedies
from trigon.assemble.memory_table import Hardware, PhaseMemory, RunMemory, format_gib
from trigon.assemble.options import needs_old_logprobs
from trigon.config.names import DeviceType
from trigon.config.options import with_options
from trigon.config.plan import make_plan, with_critic_as_actor
from trigon.config.schema import Config
from trigon.data.sources import Source
from trigon.errors import ConfigError
from trigon.models.dimensions import dimensions_of
from trigon.models.dtypes import DTYPES
from trigon.models.load import load_hf_config
from trigon.tools.plan.calibration import Calibration
from trigon.tools.plan.hardware import Cluster
from trigon.tools.plan.lengths import LengthOptions, find_lengths
from trigon.tools.plan.model import open_model_config
from trigon.tools.plan.pools import describe_devices, plan_pools
from trigon.tools.plan.result import Disk, RunPlan, Verdict
from trigon.tools.plan.timing import StepTime, Timing, may_share_node
from trigon.tools.plan.work import TRIGON, Ledger, Trainer, count_flops, make_ledger
from trigon.training.budget import HEADROOM
from trigon.training.optim import state_bytes

KEEP_RATE = 0.5
"""Assumed share of the groups that online filtering keeps."""

_MOST_CHANGES = 6  # that are combined
_NUMBER_BYTES = 4  # of a token id or a float between driver and workers
_UNKNOWN_HOST = 2**60  # bytes of host memory that is not known: no limit
_ROLLOUT_BYTES = 600  # of a line in rollouts/, without its texts
_TEXT_BYTES = 5  # of a token
_TOKEN_RECORD_BYTES = 65  # of a token whose numbers are stored (trainer.rollout_tokens)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run is planned to run. host_bytes: of a machine; None: not known."""

    cluster: Cluster
    device: DeviceType
    host_bytes: int | None

    @property
    def hardware(self) -> Hardware:
        """The memory of a device and of a machine."""
        memory = self.cluster.accelerator.memory_bytes if self.device == "cuda" else 0
        return Hardware(self.device, memory, _UNKNOWN_HOST if self.host_bytes is None else self.host_bytes)


class Planner:
    """Makes one plan."""

    def __init__(
        self,
        config: Config,
        place: Place,
        model_config: Path | None,
        options: LengthOptions,
        calibration: Calibration | None,
        *,
        observed: LengthOptions | None = None,
        download: bool = False,
        trainer: Trainer = TRIGON,
        opened: Mapping[str, Source] = NO_SOURCES,
    ) -> None:
        self._config, self._place, self._trainer = config, place, trainer
        self._options, self._calibration = options, calibration
        actor = config.worker.actor.model
        self._model = actor.model_path or ""
        with open_model_config(self._model, model_config) as folder:
            self._sized = with_options(config, {"worker.actor.model.model_path": str(folder)})
            critic = config.worker.critic.model.model_path if config.has_critic else None
            if critic is not None:
                with open_model_config(critic, None) as own:
                    self._sized = with_options(self._sized, {"worker.critic.model.model_path": str(own)})
            self._hf_config: Any = load_hf_config(
                folder, trust_remote_code=actor.trust_remote_code, override_config=actor.override_config
            )
            counter = MemoryCounter(self._sized, place.hardware)
            self._count, self._size = counter.count, counter.size(self._sized)
            self._memory = self._count(self._sized)
            self._verdict, worst = _judge(self._memory)
            self._problem = self._engine_problem()
            if self._problem is not None:
                self._verdict = "does not fit"
            self._remedies: tuple[Remedy, ...] = ()
            self._combination: dict[str, Any] | None = None
            if worst is not None:
                found = find_remedies(self._sized, self._memory, worst, self._count, certain=False)
                self._remedies = tuple(found)
                self._combination = self._combine()
            self._budgets = self._find_budgets()
        observed = observed if calibration is None else calibration.lengths
        self._lengths = find_lengths(
            config, self._hf_config, options, observed=observed, download=download, opened=opened
        )
        knows_steps = bool(self._lengths.num_prompts or config.trainer.max_steps)
        self._plan = make_plan(
            # Of an unknown number of steps the warm-up may be a part.
            config if knows_steps else with_options(config, {"trainer.critic_warmup": 0}),
            num_train_prompts=self._lengths.num_prompts or config.prompts_per_step,
        )

    def uncalibrated(self, *, learned_share: float) -> tuple[dict[str, float], int]:
        """Return the seconds of the phases of a step, and its completions."""
        ledger, timing = self.step(learned_share)
        if timing is None:
            raise ConfigError(f"the operations of {self._hf_config.model_type} models are not counted")
        return timing.phases(), ledger.sampled

    def plan(self) -> RunPlan:
        """Return the plan."""
        config, calibration = self._config, self._calibration
        ledger, timing = self.step(1.0 if calibration is None else calibration.learned_share)
        steps = self._plan.total_steps if self._lengths.num_prompts or config.trainer.max_steps else None
        time, validation, flops, moved = None, 0.0, None, None
        if timing is not None:
            phases = timing.phases()
            if self._lengths.num_val_prompts and self._verdict != "does not fit":
                validation = timing.validation_seconds(self._lengths.num_val_prompts)
            flops, moved = timing.flops, timing.bytes()
            if calibration is not None:
                validation *= calibration.factors.get("gen", 1.0)
                measured = calibration.apply(phases, completions=ledger.sampled)
                # Separate workers get their weights in another way than those of the measured run.
                phases = measured if config.worker.hybrid_engine else measured | {"weights": phases["weights"]}
            if self._verdict != "does not fit":
                time = StepTime(phases, calibration is not None, steps_ahead=config.algorithm.max_staleness)
        all_ = self._size.all
        return RunPlan(
            model=self._model,
            devices=describe_devices(config, self._place.cluster),
            num_devices=config.num_devices,
            num_learners=config.num_workers,
            pools=plan_pools(config, self._place.cluster, time),
            device=self._place.device,
            peak_flops=self._place.cluster.accelerator.flops,
            parameters=all_.frozen + all_.trained + all_.adapters,
            trained_parameters=all_.trained + all_.adapters,
            plan=self._plan,
            num_prompts=self._lengths.num_prompts,
            num_steps=steps,
            lengths=self._lengths,
            ledger=ledger,
            memory=self._memory,
            knows_host_memory=self._place.host_bytes is not None,
            verdict=self._verdict,
            problem=self._problem,
            remedies=self._remedies,
            combination=self._combination,
            flops=flops,
            time=time,
            moved=moved,
            validation_seconds=validation,
            num_validations=self._num_validations(steps),
            sent_bytes=self._sent_bytes(ledger),
            disk=self._disk(ledger, steps),
            assumptions=tuple(self._assumptions(ledger)),
        )

    def step(self, learned_share: float) -> tuple[Ledger, Timing | None]:
        """Return the batches of a step, and its times; None for a family that is not counted.

        learned_share: share of the groups that have a gradient.
        """
        keep = self._keep_rate()[0]
        ledger = make_ledger(
            self._config,
            self._plan,
            self._lengths,
            budgets=self._budgets,
            keep_rate=keep,
            learned_share=learned_share,
            trainer=self._trainer,
        )
        flops = count_flops(
            self._config, self._plan, self._hf_config, self._size, self._lengths, ledger, trainer=self._trainer
        )
        if flops is None:
            return ledger, None
        timing = Timing(
            self._config,
            self._size,
            dimensions_of(self._hf_config),
            self._lengths,
            ledger,
            flops,
            self._place.cluster,
            self._place.device,
            trainer=self._trainer,
        )
        return ledger, timing

    def _keep_rate(self) -> tuple[float, str]:
        if self._options.keep_rate is not None:
            return self._options.keep_rate, "given"
        if self._calibration is not None and self._calibration.lengths.keep_rate is not None:
            return self._calibration.lengths.keep_rate, "of the run that calibrates"
        return KEEP_RATE, "assumed (--keep-rate)"

    def _measures_budgets(self) -> bool:
        return self._config.trainer.tunes_budgets_on(self._place.device)

    def _find_budgets(self) -> tuple[int, int]:
        """Return the most tokens of a row in an update and in a scoring.

        Where a run measures them, the most that fit by the arithmetic of memory, with its reserve.
        """
        config, actor = self._config, self._config.worker.actor
        longest = config.data.max_prompt_length + config.data.max_response_length
        sizes = (actor.micro_batch_size_per_device_for_update, actor.micro_batch_size_per_device_for_experience)
        if not self._measures_budgets():
            return sizes[0] * longest, sizes[1] * longest
        n = config.group_size
        most = max(1, -(-config.prompts_per_update * n // config.num_workers))
        keys = ("micro_batch_size_per_device_for_update", "micro_batch_size_per_device_for_experience")
        update, score = (
            _largest(partial(self._fits, key, phase), most)
            for key, phase in zip(keys, ("update", "log-probs"), strict=True)
        )
        return update * longest, score * longest

    def _fits(self, key: str, phase: str, micro: int) -> bool:
        changes = {f"worker.actor.{key}": micro, "trainer.auto_micro_batch": False}
        memory = self._count(with_options(self._sized, changes))
        used = max(each.expected for each in memory.phases if (each.phase, each.pool) == (phase, "GPU"))
        on_host = max(
            (each.expected for each in memory.phases if (each.phase, each.pool) == (phase, "host")), default=0
        )
        fits_host = on_host <= memory.hardware.host_bytes
        return used <= (1 - HEADROOM) * memory.hardware.device_bytes and fits_host

    def _engine_problem(self) -> str | None:
        """Return why vLLM's share of a GPU cannot hold its weights and one sequence, or None."""
        rollout, hardware = self._config.worker.rollout, self._place.hardware
        if hardware.device == "cpu" or rollout.name != "vllm":
            return None
        all_, itemsize = self._size.all, DTYPES[rollout.dtype].itemsize
        cache = self._config.context_length * self._size.key_values * itemsize
        weights = (all_.frozen + all_.trained) * itemsize

        def needed(parallel: int) -> float:
            return weights / parallel + cache / min(parallel, self._size.key_heads)

        share = rollout.gpu_memory_utilization * hardware.device_bytes
        if needed(rollout.tensor_parallel_size) <= share:
            return None
        ways = []
        ranks = self._config.num_samplers
        fitting = [size for size in self._size.tensor_parallel_sizes if ranks % size == 0 and needed(size) <= share]
        if fitting and can_divide_engine(self._config):
            ways.append(f"worker.rollout.tensor_parallel_size={fitting[0]}")
        enough = ceil(10 * needed(rollout.tensor_parallel_size) / hardware.device_bytes) / 10
        if enough < 1:
            ways.append(f"worker.rollout.gpu_memory_utilization={enough}")
        return (
            f"vLLM gets {format_gib(int(share))} of each GPU (worker.rollout.gpu_memory_utilization="
            f"{rollout.gpu_memory_utilization}), and its weights with one sequence of maximum length need "
            f"{format_gib(int(needed(rollout.tensor_parallel_size)))}: "
            f"{'set ' + ' or '.join(ways) if ways else 'use larger GPUs, or more of them'}"
        )

    def _combine(self) -> dict[str, Any] | None:
        """Return changes with which the run fits: each time the one that helps most."""
        changes: dict[str, Any] = {}
        config, memory = self._sized, self._memory
        for _ in range(_MOST_CHANGES):
            _, worst = _judge(memory)
            if worst is None:
                return changes
            remedies = find_remedies(config, memory, worst, self._count, certain=False)
            if not remedies:
                return None
            changes |= remedies[0].changes
            config = with_options(self._sized, changes)
            memory = self._count(config)
        return changes if _judge(memory)[1] is None else None

    def _sent_bytes(self, ledger: Ledger) -> int:
        """Return the bytes of token ids and numbers between the driver and the workers.

        Prompts go out for sampling, prompts and completions for each kind of pass; completions come
        back with a log-probability for each token, scorings with one.
        """
        if not self._config.has_workers:
            return 0
        scorings = needs_old_logprobs(self._config, self._plan) + self._config.needs_reference
        prompt, response = ledger.prompt_tokens, ledger.response_tokens
        ids = prompt + response + ledger.observed_tokens
        sampling = ledger.sampled_prompts / ledger.prompts * (ids + response)
        # The loss also has a mask, an advantage and the log-probabilities of a token.
        update = ledger.epochs * (ids + (3 + scorings) * response)
        return round(_NUMBER_BYTES * (sampling + scorings * (ids + response) + update))

    def _num_validations(self, steps: int | None) -> int:
        trainer = self._config.trainer
        if not self._config.data.val_files or not self._lengths.num_val_prompts:
            return 0
        last = steps or 0
        every = last // trainer.val_freq if trainer.val_freq > 0 else 0
        ends_on_one = every > 0 and last % trainer.val_freq == 0
        return int(self._config.validates_first) + every + (0 if ends_on_one else 1)

    def _disk(self, ledger: Ledger, steps: int | None) -> Disk:
        config, all_ = self._config, self._size.all
        trainer = config.trainer
        weight = DTYPES[config.worker.actor.weight_dtype].itemsize
        if all_.adapters:
            stored, states = all_.adapters * 4, all_.adapters * 8
        else:
            stored = (all_.frozen + all_.trained) * weight
            states = self._states()
        critic = 0
        if config.worker.critic.share_trunk:
            critic = self._size.value_head * (4 if trainer.save_model_only else 12)
        elif self._size.critic is not None:
            critic = count_checkpoint_bytes(with_critic_as_actor(config), self._size.critic)
        saves = 1
        if trainer.save_freq > 0 and steps is not None:
            saves = -(-steps // trainer.save_freq)
        kept = min(saves, trainer.save_limit + 1) if trainer.save_limit > 0 else saves
        tokens = self._lengths.completion_tokens + min(200, self._lengths.mean_prompt)
        text = ledger.sampled * (_ROLLOUT_BYTES + _TEXT_BYTES * tokens)
        recorded = min(trainer.rollout_tokens, ledger.prompts) * ledger.completions * self._lengths.response_tokens
        text += _TOKEN_RECORD_BYTES * recorded
        return Disk(stored + (0 if trainer.save_model_only else states) + critic, kept, round(text))

    def _states(self) -> int:
        """The optimizer states of all ranks together."""
        dtype = DTYPES[self._config.worker.actor.weight_dtype]
        trained = torch.empty(self._size.all.trained, dtype=dtype, device="meta")
        return state_bytes(trained, self._config.worker.actor.optim.strategy)

    def _assumptions(self, ledger: Ledger) -> list[str]:
        config, lines = self._config, [f"{what}: {source}" for what, source in self._lengths.sources]
        if self._measures_budgets():
            lines.append(
                "token budgets: estimated; the run measures them before its first step (trainer.auto_micro_batch)"
            )
        if config.algorithm.online_filtering:
            rate, source = self._keep_rate()
            lines.append(f"online filtering keeps {rate:.0%} of the groups: {source}")
        if ledger.learned_groups_share < 1:
            lines.append(f"groups with a gradient: {ledger.learned_groups_share:.0%}, as in the run that calibrates")
        elif not config.learns_without_advantage:
            lines.append("every group has a gradient: groups with equal rewards are skipped, and make updates faster")
        if self._place.device == "cpu" and config.trainer.device == "auto":
            lines.append("devices: this machine has no GPU; name those of the run with --gpus 8xH100-80G")
        if self._place.host_bytes is None:
            lines.append("host memory: not known, so that it is not a limit (--host-memory)")
        if self._calibration is not None:
            lines.append(f"time: by the timings of {self._calibration.source}")
        else:
            lines.append("time: by specification figures and assumed efficiencies (docs/plan.md)")
        shared = config.worker.hybrid_engine
        if not shared and config.algorithm.max_staleness:
            lines.append("sampling and learning take their times at once, without slowing each other")
        if not shared and config.algorithm.max_staleness > 1:
            what = (
                "the prefills of completions that go on with new weights"
                if config.worker.rollout.partial == "continue"
                else "samplers that idle before a weight sync, while the last completions end"
            )
            lines.append(f"not counted: {what}, and groups that are sampled again because they became too old")
        if (config.num_workers > 1 and self._place.cluster.nodes > 1) or not (shared or may_share_node(config)):
            rate = self._place.cluster.network_rate * 8 / 1e9
            lines.append(f"network between nodes: {rate:,.0f} Gbit/s for each GPU, assumed")
        return lines


def _judge(memory: RunMemory) -> tuple[Verdict, PhaseMemory | None]:
    """Return the verdict, and the phase that does not fit."""
    worst = memory.worst(certain=False)
    if worst.expected > memory.capacity(worst):
        return "does not fit", worst
    return ("tight" if worst.expected > TIGHT * memory.capacity(worst) else "fits"), None


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number from 1 to most that fits, at least 1."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
