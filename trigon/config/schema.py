"""The table of options: the type, default, bounds and description of each.

Sections, keys and defaults are EasyR1's, so that its configuration files run unchanged. The
description says where a default differs and which keys are Trigon only. Files and the command line
are read in load.py, renamed keys are in legacy.py, and checks across options are in checks.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from trigon.config.names import (
    DTYPE_ALIASES,
    CorrectionKind,
    CorrectionLevel,
    Dtype,
    Estimator,
    KlEstimator,
    LearningRateSchedule,
    LossAveraging,
    ObservationRole,
    OptimizerStrategy,
    PolicyLossType,
    Sink,
    ToolFormat,
    WatchLevel,
    WatchRule,
)

# Upper bounds: a value above one of them is an error of typing, not a larger run.
MAX_COUNT = 1_000_000
"""Prompts of a step, completions of a prompt, and the like."""
MAX_TOKENS = 100_000_000
"""Tokens of a sequence or of a batch."""
MAX_PIXELS = 10_000_000_000
"""Pixels of an image."""
MAX_STEPS = 2**31 - 1
"""Steps, and numbers for which a large value means all of them; vLLM's top_k has 32 bits."""
MAX_SECONDS = 1_000_000
"""Time limits: 11 days. The operating system's have 32 bits, in milliseconds."""
MAX_SEED = 2**63 - 1
"""Seeds: torch's have 64 bits."""


class Section(BaseModel):
    """A frozen section of options. An unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True, hide_input_in_errors=True
    )


def _short_dtype(name: Any) -> Any:
    return DTYPE_ALIASES.get(name, name) if isinstance(name, str) else name


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _as_files(value: Any) -> Any:
    return () if value is None or value == "" else _as_tuple(value)


DtypeOption = Annotated[Dtype, BeforeValidator(_short_dtype)]
"""A floating-point format. float32, bfloat16 and float16 are accepted and shortened."""

Files = Annotated[tuple[str, ...], BeforeValidator(_as_files)]
"""Datasets. A single one may be written without the brackets of a list."""

Variables = Annotated[tuple[str, ...], BeforeValidator(_as_files)]
"""Names of environment variables. A single one may be written without the brackets of a list."""

Tools = Annotated[tuple[str, ...], BeforeValidator(_as_files)]
"""Tools. A single one may be written without the brackets of a list."""

Names = Annotated[tuple[str, ...], BeforeValidator(_as_files)]
"""Names of options. A single one may be written without the brackets of a list."""


class DataConfig(Section):
    """The datasets, and how prompts are built from their rows."""

    train_files: Files = ()
    """Training datasets: hub ids, files (parquet, json, jsonl, csv) or folders.
    `@split` selects a split (default: train)."""

    train_weights: tuple[Annotated[float, Field(gt=0, le=1000)], ...] = ()
    """Passes over each of train_files per epoch: 2 is twice, 0.5 is half of it; empty: once.
    Trigon only."""

    val_files: Files = ()
    """Validation datasets, written like train_files."""

    prompt_key: str = "prompt"
    """Column of the question; each `<image>` in it stands for one image of the row, in order.
    As in the next three, dots reach into structs: `reward_model.ground_truth`."""

    answer_key: str = "answer"
    """Column of the ground truth, which is passed to the reward function."""

    image_key: str = "images"
    """Column of a row's images (PIL, bytes, mapping or path); absent or empty: a text-only row."""

    video_key: str = "videos"
    """Column of a row's videos (paths or bytes), one for each `<video>`; absent or empty: none."""

    image_dir: str | None = None
    """Folder of relative image and video paths; null: the folder of the dataset."""

    video_fps: float = Field(default=2.0, gt=0, le=1000)
    """Frames sampled per second of video. Raising it uses more prompt tokens."""

    max_video_frames: int = Field(default=768, ge=2, le=MAX_COUNT)
    """Maximum number of frames per video, evenly spaced; longer videos are sampled at a lower rate.
    Trigon only."""

    max_prompt_length: int = Field(default=512, ge=1, le=MAX_TOKENS)
    """Maximum number of prompt tokens, image tokens included.
    Raising it keeps more rows and needs more memory."""

    max_response_length: int = Field(default=512, ge=1, le=MAX_TOKENS)
    """Maximum number of tokens in a completion.
    Raising it needs more generation time and memory."""

    rollout_batch_size: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Prompts per step; null: all training prompts, and at most 512, EasyR1's default.
    Raising it makes steps longer and gradients less noisy, and updates more off-policy."""

    mini_rollout_batch_size: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Prompts per sampling round of algorithm.online_filtering; null: rollout_batch_size."""

    val_batch_size: int = Field(default=-1, ge=-1, le=MAX_STEPS)
    """Prompts per validation batch; -1: all at once.
    Raising it is faster and needs more host memory for images."""

    format_prompt: str | None = None
    """Jinja template of the question (its variable `content`).
    Either a file, or the template itself (contains `{{` or `{%`)."""

    system_prompt: str | None = None
    """System message before each question; null: the chat template's default. Trigon only."""

    allow_special_tokens: bool = False
    """Special tokens in a row's text, such as `<|im_start|>`, act as such; false: they are text.
    Trigon only."""

    override_chat_template: str | None = None
    """Jinja chat template that replaces the model's.
    Either a file, or the template itself (contains `{{` or `{%`)."""

    shuffle: bool = True
    """Shuffle the training prompts in each epoch, seeded; false: keep the order of the dataset."""

    seed: int = Field(default=1, ge=0, le=MAX_SEED)
    """Seed of the shuffle."""

    min_pixels: int | None = Field(default=None, ge=1, le=MAX_PIXELS)
    """Smaller images are enlarged to this number of pixels; null: the processor's limit.
    Raising it uses more prompt tokens. EasyR1's default is 262144."""

    max_pixels: int | None = Field(default=None, ge=1, le=MAX_PIXELS)
    """Larger images are reduced to this number of pixels; null: the processor's limit.
    Raising it uses more prompt tokens. EasyR1's default is 4194304."""

    max_image_pixels: int = Field(default=64_000_000, ge=1, le=MAX_PIXELS)
    """Images with more pixels are rejected before decoding, to bound memory.
    Also those whose decoding takes more than 12 bytes for each of these pixels. Trigon only."""

    filter_overlong_prompts: bool = True
    """Skip prompts longer than max_prompt_length and count them; false: they are an error."""

    filter_overlong_prompts_workers: int = Field(default=16, ge=1, le=4096)
    """Threads that measure prompts and prepare images; of several workers, each has its own.
    Raising it helps up to the number of usable CPUs (in a worker, its share of the node's)."""

    max_bad_row_fraction: float = Field(default=0.01, ge=0, le=1)
    """Share of unusable rows (unreadable image, wrong number of markers) above which the run stops.
    Trigon only."""


class AlgorithmConfig(Section):
    """Advantages, the KL penalty, group filtering, and the mismatch correction."""

    adv_estimator: Estimator = "grpo"
    """Advantage estimator, see docs/algorithms.md. The first five and gae are EasyR1's.
    gae: PPO with a critic (worker.critic)."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token (reinforce_plus_plus, gae).
    Lowering it gives the last tokens more of the credit."""

    lam: float = Field(default=1.0, ge=0, le=1)
    """Weight of later steps in the advantages of gae; 1: the whole return, 0: one step.
    Lowering it relies more on the critic: less noise, more bias."""

    lam_critic: float | None = Field(default=None, ge=0, le=1)
    """The same for the returns that the critic learns; null: as lam.
    1 with a lower lam is the decoupled estimate of VC-PPO. Trigon only."""

    lam_alpha: float | None = Field(default=None, gt=0, le=1000)
    """A completion of S tokens has 1 - 1 / (lam_alpha * S) in place of lam; null: lam.
    VAPO has 0.05. Raising it brings lam nearer to 1. Trigon only."""

    bootstrap_cut: bool = False
    """The state after a completion that was cut at its limit has the critic's value; false: 0.
    Trigon only."""

    reward_weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each part of the reward in gdpo; empty: 1 for all but `overall`. Trigon only."""

    disable_kl: bool = False
    """Train without a reference model: no KL term, and less memory by one copy of the weights."""

    use_kl_loss: bool = False
    """Add the KL term to the loss; false: subtract it from the reward of each completion."""

    kl_penalty: KlEstimator = "kl"
    """KL estimator per token, see docs/algorithms.md.
    kl: log-ratio; abs: its absolute value; mse: half its square; low_var_kl: k3 (unbiased, low
    variance); full: the exact KL over the vocabulary."""

    kl_coef: float = Field(default=1e-3, ge=0, le=1000)
    """Weight of the KL term.
    Raising it keeps the policy closer to the reference and slows learning."""

    kl_type: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: adjust the weight of a KL in the reward so that the KL approaches kl_target."""

    kl_horizon: float = Field(default=10000.0, gt=0, le=1e12)
    """Completions over which the adaptive weight changes by its relative error.
    Raising it makes changes slower."""

    kl_target: float = Field(default=0.1, gt=0, le=1000)
    """Target of the adaptive weight: mean over completions of the mean KL of their tokens, in nats.
    Raising it lets the policy move further."""

    online_filtering: bool = False
    """Train only on groups whose mean filter_key is strictly between filter_low and filter_high.
    More prompts are sampled until there are rollout_batch_size of them (DAPO's dynamic sampling).
    """

    filter_key: str = "overall"
    """Score returned by the reward function that online_filtering averages over a group."""

    filter_low: float = 0.01
    """Groups with a mean at or below this are filtered, as all wrong."""

    filter_high: float = 0.99
    """Groups with a mean at or above this are filtered, as all right."""

    filter_surplus: Literal["drop", "keep"] = "drop"
    """Drop groups beyond rollout_batch_size, or keep them for the next step.
    Kept groups are one step old. Trigon only."""

    overlong_filtering: bool = False
    """Exclude completions cut at max_response_length from the loss.
    Their rewards still count in their group (DAPO, section 3.4). Trigon only."""

    mismatch_correction: Literal["off", CorrectionKind] | None = None
    """Importance sampling against the train-inference mismatch, and for tokens of older weights.
    null: truncate with worker.rollout.oversampling or max_staleness above 0, else off.
    The ratio of trainer to engine probability weights the loss of a token. truncate: the ratio is
    capped at mismatch_high; mask: tokens outside mismatch_low and mismatch_high are excluded;
    reject: completions outside are excluded, the others have weight 1. Trigon only."""

    mismatch_level: CorrectionLevel = "token"
    """token: a ratio per token; sequence: one per completion, the geometric mean over its tokens.
    Trigon only."""

    mismatch_low: float = Field(default=0.5, ge=0, le=1)
    """Ratio below which mask and reject exclude. Raising it is stricter. Trigon only."""

    mismatch_high: float = Field(default=2.0, ge=1, le=1e9)
    """Ratio at which truncate caps, and above which mask and reject exclude.
    Lowering it is stricter. Trigon only."""

    max_staleness: int = Field(default=0, ge=0, le=1000)
    """Steps by which the weights that sample may be older than those that learn.
    1: a batch is sampled while the last one is learned from, with the weights before that. Above 1:
    groups are sampled all the time, up to so many steps ahead, and those that have become older are
    sampled again. Both need worker.hybrid_engine=false, see docs/separate-workers.md. Trigon only.
    """


class LoraConfig(Section):
    """Low-rank adapters (LoRA), trained instead of the weights."""

    rank: int = Field(default=0, ge=0, le=65_536)
    """Rank of the adapters; 0: no adapters, all weights are trained.
    Raising it adds capacity and memory."""

    alpha: int = Field(default=64, ge=1, le=MAX_COUNT)
    """The output of an adapter is scaled by alpha / rank.
    Raising it acts like a higher learning rate."""

    target_modules: str = "all-linear"
    """Layers with an adapter.
    all-linear: every linear layer but the head; otherwise names separated by commas, or one regular
    expression."""

    exclude_modules: str | None = None
    """Layers without an adapter, written likewise; `.*visual.*` excludes the vision tower.
    null: none."""


class ModelConfig(Section):
    """The model to train."""

    model_path: str | None = None
    """Model to start from: a hub id or a local folder."""

    tokenizer_path: str | None = None
    """Tokenizer and image processor; null: those of model_path."""

    override_config: dict[str, Any] = Field(default_factory=dict)
    """Values to set in the model's config before its weights are loaded."""

    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: about a third more time, much less memory."""

    enable_activation_offload: bool = False
    """Keep the inputs of recomputed layers in host memory until the backward pass: longer rows.
    They are copied while the GPU computes; on the CPU it saves nothing. Trigon only."""

    trust_remote_code: bool = False
    """Run code from the model's repository. EasyR1's default is true."""

    freeze_vision_tower: bool = False
    """Train everything but the vision tower: less memory and time."""

    vision_cache_gb: float = Field(default=4.0, ge=0, le=100_000)
    """GiB of host memory per worker for cached image features; 0: no cache.
    Used if the vision tower is frozen or excluded from LoRA. Raising it avoids recomputation;
    results do not change. Trigon only."""

    attention_kernel: Literal["auto", "sdpa", "varlen", "flex", "flash"] = "auto"
    """Attention kernel; auto: varlen on a GPU in 16 bits, else sdpa.
    sdpa: exact, one segment at a time; varlen: torch's variable-length kernel, one call per layer;
    flex: torch's flex attention, compiled; flash: the package flash-attn. All but sdpa need a GPU.
    Trigon only."""

    compile_layers: bool = False
    """Compile the norms and MLPs of each layer (torch.compile), to fuse elementwise operations.
    The first passes take a minute or more. Off, since its gain is not measured. Trigon only."""

    use_liger_kernel: bool = False
    """Use liger-kernel's fused norms and gated activations, on a GPU.
    Off, since its gain is not measured. Trigon only."""

    lora: LoraConfig = Field(default_factory=LoraConfig)


class OptimConfig(Section):
    """The optimizer and its learning rate."""

    lr: float = Field(default=1e-6, gt=0, le=1)
    """Learning rate after warm-up. Raising it learns faster until training becomes unstable: AdamW
    changes each weight by about as much in an update."""

    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moments.
    Raising them averages over more updates."""

    weight_decay: float = Field(default=1e-2, ge=0, le=100)
    """Decoupled weight decay of matrices; vectors have none. Raising it keeps weights smaller."""

    strategy: OptimizerStrategy = "adamw"
    """adamw: for fp32 weights; adamw_bf16: for bf16 weights, whose missing bits it keeps.
    With adamw_bf16 weights are updated exactly as in fp32; gradients and first moments have 16
    bits. 12 bytes per weight, with gradient and states, instead of 16."""

    lr_warmup_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of all steps over which the learning rate rises to lr."""

    lr_warmup_steps: int | None = Field(default=None, ge=0, le=MAX_STEPS)
    """The same as a number of steps; null: lr_warmup_ratio applies."""

    min_lr_ratio: float | None = Field(default=None, ge=0, le=1)
    """Final learning rate of the cosine schedule as a share of lr; null: 0."""

    lr_scheduler_type: LearningRateSchedule = "constant"
    """Learning rate after warm-up: constant, or a half cosine down to min_lr_ratio."""


class FsdpConfig(Section):
    """Number formats of the policy, and its sharding over workers (FSDP)."""

    torch_dtype: DtypeOption | None = None
    """Dtype in which weights are stored and updated; null: fp32, and with LoRA mp_param_dtype.
    bf16 needs less memory, and optim.strategy=adamw_bf16; fp16 cannot be trained. With LoRA both
    are allowed: it updates adapters only, which are in fp32."""

    mp_param_dtype: DtypeOption = "bf16"
    """Dtype of the forward and backward passes. bf16 is fast on a GPU; fp32 is exact.
    fp16 is for trainer.val_only alone, since its gradients would need scaling."""

    mp_reduce_dtype: DtypeOption = "fp32"
    """Dtype in which gradients are reduced over workers."""

    enable_full_shard: bool = True
    """Reshard each layer after its forward pass and gather it again for the backward pass.
    false: keep it gathered, which is faster and needs more memory."""

    fsdp_size: int = Field(default=-1, ge=-1, le=MAX_COUNT)
    """Workers that share one copy of the model; -1, 0 or all workers: a single copy."""

    enable_cpu_offload: bool = False
    """Keep weights, gradients and optimizer states in host memory: least device memory, slow.
    No effect with a single worker, which shards nothing."""


class OffloadConfig(Section):
    """What moves to host memory while completions are sampled."""

    offload_params: bool = False
    """Move the weights to the CPU outside of training passes.
    Frees device memory for sampling, costs transfers."""

    offload_optimizer: bool = False
    """Move the optimizer states to the CPU between updates.
    Frees twice the memory of the weights, costs transfers."""


class ActorConfig(Section):
    """The update of the policy."""

    global_batch_size: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Prompts per optimizer update, each with its n completions; null: rollout_batch_size.
    Where that is set to a multiple of 256, null is 256, as in EasyR1. Lowering it makes more
    updates per step."""

    micro_batch_size_per_device_for_update: int = Field(default=4, ge=1, le=MAX_COUNT)
    """Token budget of a forward and backward pass, as a number k of sequences of maximum length.
    A pass takes at most k * (max_prompt_length + max_response_length) tokens, in any number of
    completions. Raising it is faster and needs more memory; results do not change."""

    micro_batch_size_per_device_for_experience: int = Field(default=16, ge=1, le=MAX_COUNT)
    """The same token budget, for passes without gradient (old and reference log-probabilities)."""

    max_grad_norm: float = Field(default=1.0, gt=0, le=1e12)
    """Maximum norm of the gradient, which is scaled down to it.
    Raising it lets outliers move the policy more."""

    clip_ratio_low: float = Field(default=0.2, ge=0, le=1)
    """A token's probability ratio is clipped at 1 minus this; for cispo 1 is no bound.
    Raising it allows larger decreases."""

    clip_ratio_high: float = Field(default=0.3, ge=0, le=1e9)
    """A token's probability ratio is clipped at 1 plus this.
    Raising it lets rare tokens become more likely."""

    clip_ratio_dual: float = Field(default=3.0, gt=1, le=1e9)
    """Bound of the ratio where the advantage is negative.
    Raising it lets bad completions weigh more."""

    loss_avg_mode: LossAveraging = "token"
    """How the token losses of an update are averaged.
    token: each token has the same weight; seq: each completion has; seq_fixed: the token sum of
    each completion is divided by loss_fixed_length (Dr. GRPO)."""

    loss_fixed_length: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """Divisor of seq_fixed in tokens; null: data.max_response_length.
    Raising it makes updates smaller. Trigon only."""

    loss_type: PolicyLossType = "default"
    """Policy loss, see docs/algorithms.md; default: the clipped ratio with a dual bound."""

    cispo_cap: float | None = Field(default=None, ge=1, le=1e9)
    """Maximum weight of a token in cispo, at least 1; null: 1 + clip_ratio_high.
    A cap below 1 would shrink the gradient even of an unchanged policy. Trigon only."""

    tau_positive: float = Field(default=1.0, gt=0, le=1e6)
    """Steepness of sapo's gate for positive advantages.
    Raising it reduces the weight of off-policy tokens."""

    tau_negative: float = Field(default=1.05, gt=0, le=1e6)
    """Steepness of sapo's gate for negative advantages."""

    ulysses_sequence_parallel_size: int = Field(default=1, ge=1, le=4096)
    """Workers that compute each row of sequences together, a slice of its tokens each.
    Divides the number of workers. For sequences whose activations do not fit into one GPU, see
    docs/long-sequences.md: raising it divides them, and costs communication."""

    entropy_coeff: float = Field(default=0.0, ge=0, le=1000)
    """Weight of an entropy bonus in the loss.
    Raising it keeps completions varied and costs a little time."""

    ppo_epochs: int = Field(default=1, ge=1, le=10_000)
    """Passes over the data of a step. Raising it learns more from them, further off-policy."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    fsdp: FsdpConfig = Field(default_factory=FsdpConfig)
    offload: OffloadConfig = Field(default_factory=OffloadConfig)


class CriticLoraConfig(LoraConfig):
    """Adapters (LoRA) of the critic, trained with its head instead of its weights."""


class CriticModelConfig(Section):
    """The model of the critic. Kernels and the cache of image features are worker.actor's."""

    model_path: str | None = None
    """Model that the critic starts from, with a new head of zeros; null: the policy's.
    It needs the policy's tokens: one of the same family. EasyR1 requires it."""

    override_config: dict[str, Any] = Field(default_factory=dict)
    """Values to set in the critic's config before its weights are loaded; empty and without
    model_path: the policy's."""

    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: about a third more time, much less memory."""

    enable_activation_offload: bool = False
    """Keep the inputs of recomputed layers in host memory until the backward pass: longer rows.
    They are copied while the GPU computes; on the CPU it saves nothing. Trigon only."""

    trust_remote_code: bool = False
    """Run code from the critic's repository. EasyR1's default is true."""

    freeze_vision_tower: bool = False
    """Train everything but the vision tower: less memory and time."""

    lora: CriticLoraConfig = Field(default_factory=CriticLoraConfig)


class CriticOptimConfig(OptimConfig):
    """The optimizer of the critic and its learning rate."""


class CriticFsdpConfig(FsdpConfig):
    """Number formats of the critic, and its sharding over workers (FSDP)."""


class CriticOffloadConfig(OffloadConfig):
    """What of the critic moves to host memory while it is not in use."""


class CriticConfig(Section):
    """The critic of algorithm.adv_estimator=gae, and its update."""

    share_trunk: bool = False
    """One model for policy and critic: the critic is a second head on the actor's trunk.
    Much less memory and time; the critic has no model, batches and formats of its own. Trigon only.
    """

    vf_coef: float = Field(default=0.1, ge=0, le=1e6)
    """Weight of the value loss in the gradient of a shared trunk; the head learns from all of it.
    Raising it lets the values shape the trunk more, against the policy. Trigon only."""

    global_batch_size: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Prompts per update of the critic, each with its n completions; null: by the same
    rule as for worker.actor. Lowering it makes more updates per step."""

    micro_batch_size_per_device_for_update: int = Field(default=4, ge=1, le=MAX_COUNT)
    """Token budget of a forward and backward pass, as in worker.actor."""

    micro_batch_size_per_device_for_experience: int = Field(default=16, ge=1, le=MAX_COUNT)
    """The same token budget, for the pass without gradient that computes the values."""

    max_grad_norm: float = Field(default=1.0, gt=0, le=1e12)
    """Maximum norm of the gradient, which is scaled down to it."""

    cliprange_value: float = Field(default=0.5, gt=0, le=1e12)
    """A value is clipped to that before the step's updates plus or minus this, in the loss.
    Raising it lets the critic follow the returns faster, with several updates per step."""

    loss_avg_mode: Literal["token", "seq"] = "token"
    """How the token losses of an update are averaged, as in worker.actor."""

    ppo_epochs: int = Field(default=1, ge=1, le=10_000)
    """Passes over the data of a step. Raising it fits the critic better to them."""

    model: CriticModelConfig = Field(default_factory=CriticModelConfig)
    optim: CriticOptimConfig = Field(default_factory=CriticOptimConfig)
    fsdp: CriticFsdpConfig = Field(default_factory=CriticFsdpConfig)
    offload: CriticOffloadConfig = Field(default_factory=CriticOffloadConfig)


class ValOverride(Section):
    """Sampling parameters of validation where they differ from training; null: as in training."""

    temperature: float | None = Field(default=None, ge=0, le=100)
    """Sampling temperature; 0 is greedy."""

    top_p: float | None = Field(default=None, gt=0, le=1)
    """Probability mass to sample from."""

    top_k: int | None = Field(default=None, ge=-1, le=MAX_STEPS)
    """Number of most likely tokens to sample from; -1: all."""

    n: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Completions per prompt. Raising it makes validation metrics less noisy and more expensive."""

    ignore_eos: bool | None = None
    """Continue after the end-of-sequence token."""

    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    """Sampling seed."""

    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """Maximum number of tokens in a completion; null: data.max_response_length."""


class RolloutConfig(Section):
    """How completions are sampled."""

    name: Literal["vllm", "transformers"] = "vllm"
    """Rollout engine: vllm, or transformers, which is slow but needs no further package."""

    n: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Completions per prompt (group size); at least 2 for estimators that compare them.
    null: 8 for these in training, otherwise 1, EasyR1's default.
    Raising it costs generation and helps where few completions are right."""

    temperature: float = Field(default=1.0, gt=0, le=100)
    """Sampling temperature; the trainer divides its logits by it too.
    Raising it makes completions more varied."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Probability mass to sample from; 1: all of it.
    The trainer's log-probabilities ignore the cut."""

    top_k: int = Field(default=-1, ge=-1, le=MAX_STEPS)
    """Number of most likely tokens to sample from; -1: all.
    The trainer's log-probabilities ignore the cut."""

    seed: int = Field(default=1, ge=0, le=MAX_SEED)
    """Sampling seed.
    The seed of a completion is derived from it, the step, the prompt and the index of the
    completion."""

    limit_images: int = Field(default=0, ge=0, le=MAX_COUNT)
    """Maximum number of images per prompt; 0: any number. Those of observations do not count."""

    dtype: DtypeOption = "bf16"
    """Dtype of the engine's weights and computation."""

    gpu_memory_utilization: float = Field(default=0.6, gt=0, le=1)
    """Share of GPU memory that vLLM may use while it samples.
    Raising it runs more completions at once."""

    ignore_eos: bool = False
    """Continue after the end-of-sequence token, to the maximum length; for speed measurements."""

    oversampling: float = Field(default=0.0, ge=0, le=1)
    """Share of prompts that a step samples beyond those it learns from; 0: none.
    Sampling stops once enough groups are complete, and the next step goes on with the others.
    Raising it shortens the wait for the longest completions, and trains on older ones. See
    docs/long-tails.md. Trigon only."""

    max_carried_steps: int = Field(default=4, ge=1, le=MAX_COUNT)
    """Steps that may leave a group unfinished; the next one waits for it.
    The oldest tokens that are trained on are so many steps old. Trigon only."""

    partial: Literal["finish", "continue"] = "finish"
    """What completions do that are being sampled when new weights arrive.
    finish: they end with the old weights; once these are max_staleness / 2 versions old, no others
    begin until the new ones are loaded. continue: they go on with the new weights. Needs
    max_staleness above 1, see docs/separate-workers.md. Trigon only."""

    enforce_eager: bool = False
    """Run vLLM without CUDA graphs: faster start and less memory, slower sampling."""

    enable_chunked_prefill: bool | None = None
    """Let vLLM split long prompts over several batches; null: on a GPU.
    vLLM warns that without it an engine on a GPU may crash or give wrong results. Not available on
    the CPU. EasyR1's default is false."""

    enable_prefix_caching: bool = True
    """Let vLLM compute the shared prefix of prompts once. Trigon only."""

    nnodes: int = Field(default=1, ge=1, le=10_000)
    """Machines of the workers that sample, with worker.hybrid_engine=false. Trigon only."""

    n_gpus_per_node: int = Field(default=1, ge=1, le=1024)
    """Workers per machine that sample, with worker.hybrid_engine=false. Trigon only."""

    tensor_parallel_size: int = Field(default=1, ge=1, le=4096)
    """Workers per copy of the model in vLLM; must divide the number of workers that sample.
    Raising it leaves more memory on each. EasyR1's default is 2."""

    max_model_len: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """Maximum tokens of a sequence in vLLM; null: max_prompt_length + max_response_length."""

    max_num_batched_tokens: int = Field(default=8192, ge=1, le=MAX_TOKENS)
    """Maximum number of tokens per batch of vLLM.
    Raising it speeds up prompts and needs more memory."""

    max_num_seqs: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Maximum number of sequences that vLLM computes at a time, at most max_num_batched_tokens.
    null: by device. Raising it samples faster as long as the KV cache holds all of them, and needs
    a little more memory. Trigon only."""

    model_runner: Literal["auto", "v1", "v2"] = "auto"
    """vLLM's model runner on a GPU; auto: vLLM's choice, which is v2 from vLLM 0.32 on.
    v1 draws random numbers for one sequence after the other, which is slow where many run at a
    time. To be changed if a fault of the runner is suspected. Trigon only."""

    async_scheduling: bool | None = None
    """Let vLLM prepare a batch on a GPU while the last one runs; null: vLLM's choice, now true.
    false samples more slowly; to be set if a fault is suspected here. Trigon only."""

    disable_log_stats: bool = True
    """Do not log vLLM's statistics."""

    disable_tqdm: bool = False
    """Show no progress bar while sampling."""

    parity_tolerance: float | None = Field(default=None, gt=0, le=1000)
    """Mean |log-probability difference| of engine and trainer above which the run stops, in nats.
    null: 1e-3 if both compute in fp32, else 0.1. Trigon only."""

    weight_check_freq: int = Field(default=1, ge=0, le=MAX_STEPS)
    """Steps between comparisons, by checksum, of vLLM's weights with the trainer's.
    0: never. Trigon only."""

    environment: str | None = None
    """Class that completions of several turns act in: `file.py:Class` or `module:Class`.
    See docs/agents.md. null: completions of one turn. Trigon only."""

    environment_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of its constructor; `env:NAME` reads an environment variable.
    Secrets among them are not written anywhere. Trigon only."""

    tools: Tools = ()
    """Functions that the model may call: `[crop, tools.py:search]`.
    Beside an environment, a turn with calls is answered by the tools, any other by the environment.
    crop and python are built in, others `file.py:function` or `module:function`. Trigon only."""

    tool_format: Literal["auto", ToolFormat] = "auto"
    """How the model writes calls of tools; auto: as its chat template says.
    Trigon only."""

    observation_role: ObservationRole | None = None
    """Role of the messages with observations; null: tool for tools, user for an environment.
    Where a chat template removes the thoughts before a message of the user (Qwen3), `tool` keeps
    them. Trigon only."""

    max_turns: int = Field(default=8, ge=1, le=10_000)
    """Maximum number of turns of a completion, with an environment or tools.
    Raising it allows longer episodes; tokens are limited by data.max_response_length. Trigon only.
    """

    max_turn_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """Maximum number of tokens that the model samples in a turn; null: as many as are left.
    A turn that reaches it ends the episode. Trigon only."""

    environment_timeout_seconds: float = Field(default=60.0, gt=0, le=MAX_SECONDS)
    """Maximum seconds of a reset or a step of the environment, or of a turn's tools.
    Then its process is killed, and the completion is skipped. Trigon only."""

    environment_workers: int = Field(default=256, ge=1, le=4096)
    """Maximum number of episodes at a time in each replica that samples, each in a process of its
    own; others wait. Lowering it needs less memory. Trigon only."""

    val_override_config: ValOverride = Field(default_factory=ValOverride)


class RefFsdpConfig(Section):
    """Number format and memory of the reference model."""

    torch_dtype: DtypeOption | None = None
    """Dtype of the reference's weights and computation; null: bf16."""

    enable_full_shard: bool = True
    """Reshard each layer after its forward pass; false: keep it gathered to the end of the pass."""

    enable_cpu_offload: bool = True
    """Keep the reference in host memory between its passes.
    Frees device memory, costs one transfer per step."""


class RefOffloadConfig(Section):
    """EasyR1's second key for keeping the reference model in host memory."""

    offload_params: bool = False
    """Same as worker.ref.fsdp.enable_cpu_offload: either one suffices."""


class RefConfig(Section):
    """The reference model: the policy before training."""

    fsdp: RefFsdpConfig = Field(default_factory=RefFsdpConfig)
    offload: RefOffloadConfig = Field(default_factory=RefOffloadConfig)


class WeightedReward(BaseModel):
    """One of several reward functions, whose weighted sum is the reward.

    name: begins the names of its parts; None: that of the function.
    """

    model_config = Section.model_config

    function: str = Field(min_length=1)
    name: str | None = Field(default=None, pattern=r"^\w+$")
    weight: float = Field(default=1.0, ge=-1e6, le=1e6)
    kwargs: dict[str, Any] = Field(default_factory=dict)


def _as_weighted(value: Any) -> Any:
    return {"function": value} if isinstance(value, str) else value


Rewards = tuple[Annotated[WeightedReward, BeforeValidator(_as_weighted)], ...]
"""Several reward functions. One without a weight may be written as text."""


class RewardConfig(Section):
    """How completions are scored."""

    reward_function: str | Rewards | None = None
    """`file.py:function` (default function: main), or a shipped name (docs/rewards.md).
    Several are summed: `[{function: judge.py, weight: 0.5, kwargs: {}}, math]` (Trigon only)."""

    reward_function_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of a single reward function; `env:NAME` reads an environment
    variable. Secrets among them are not written anywhere, see docs/rewards.md."""

    val_reward_function: str | Rewards | None = None
    """The reward function of validation and of `trigon eval`, written like reward_function, with
    arguments in the list only. null: reward_function. Trigon only."""

    env: Variables = ()
    """Environment variables that reward workers get besides those of docs/rewards.md, by name:
    `[OPENAI_API_KEY]`. Trigon only."""

    confinement: Literal["default", "strict", "off"] = "default"
    """What is kept from reward functions (docs/rewards.md). default: all other processes.
    strict: also the network, and files except those of Python, of the function's folder and of
    `readable`; they write to a temporary folder only. Trigon only."""

    network: bool | None = None
    """Whether reward functions may open network connections. null: yes, but not with `strict`.
    Trigon only."""

    readable: Files = ()
    """Files and folders that reward functions can read with `confinement: strict`. Trigon only."""

    writable: Files = ()
    """Files and folders that reward functions can also write with `confinement: strict`. They must
    exist. Trigon only."""

    skip_special_tokens: bool = True
    """Exclude special tokens from the text that is scored."""

    num_cpus: int = Field(default=1, ge=1, le=4096)
    """Reward workers (processes). Raising it scores more completions at a time."""

    concurrency: int = Field(default=16, ge=1, le=512)
    """Completions that each reward worker scores at a time, if the function is `async def`.
    Trigon only."""

    timeout_seconds: float = Field(default=10.0, gt=0, le=MAX_SECONDS)
    """Maximum seconds to score a completion; then its reward worker is killed.
    The completion is skipped. Trigon only."""

    max_memory_gb: float = Field(default=16.0, ge=1, le=100_000)
    """Maximum memory of a reward worker with all processes that it starts, in GiB. Beyond, it is
    killed, and the completion is skipped. Each of `num_cpus` workers may use as much. Trigon only.
    """

    max_failed_fraction: float = Field(default=0.1, ge=0, le=1)
    """Share of a step's completions whose scoring may fail before the run stops. Trigon only."""


class WorkerConfig(Section):
    """Sampling, scoring and training."""

    hybrid_engine: bool = True
    """Sample and learn with the same workers, in turns. false: learn with those of
    trainer.nnodes x trainer.n_gpus_per_node, and sample with worker.rollout.nnodes x
    worker.rollout.n_gpus_per_node others; see docs/separate-workers.md."""

    actor: ActorConfig = Field(default_factory=ActorConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    ref: RefConfig = Field(default_factory=RefConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)


class WatchConfig(Section):
    """Rules that find out from a run's metrics that it fails; see docs/watchers.md. Trigon only."""

    level: WatchLevel = "warn"
    """What is done when a rule finds something: nothing (off), a warning, or the end of the run.
    Memory that is about to run out ends the run, after a save, also with warn."""

    ignore: Annotated[tuple[WatchRule, ...], BeforeValidator(_as_tuple)] = ()
    """Rules that are not applied."""


class TrainerConfig(Section):
    """Duration, hardware, validation, checkpoints and logging."""

    total_epochs: int = Field(default=15, ge=1, le=MAX_STEPS)
    """Passes over the training prompts."""

    max_steps: int | None = Field(default=None, ge=1, le=MAX_STEPS)
    """Number of training steps, which overrides total_epochs; null: as many as the epochs have."""

    project_name: str = Field(default="easy_r1", min_length=1)
    """Project name in the loggers and in the checkpoint path."""

    experiment_name: str = Field(default="demo", min_length=1)
    """Name of the run. A run started again under the same name resumes."""

    logger: Annotated[tuple[Sink, ...], BeforeValidator(_as_tuple)] = ("console", "file")
    """Where metrics are written, see docs/loggers.md.
    EasyR1's default is console and wandb, which needs an account."""

    nnodes: int = Field(default=1, ge=1, le=10_000)
    """Machines; above 1, those of an existing Ray cluster."""

    n_gpus_per_node: int = Field(default=1, ge=1, le=1024)
    """Workers per machine, with a GPU each, or with CPU cores if it has no GPUs.
    EasyR1's default is 8."""

    critic_warmup: int = Field(default=0, ge=0, le=MAX_STEPS)
    """First steps of gae in which only the critic learns, and the policy rests.
    EasyR1 rests one step fewer."""

    max_skipped_updates: int = Field(default=3, ge=0, le=1000)
    """Updates in a row whose gradients are not finite after which the run stops; it also stops if
    more than half of the last 20 are. A minibatch counts once per step, whatever ppo_epochs is.
    0: never. Trigon only."""

    worker_timeout_seconds: float = Field(default=3600.0, gt=0, le=MAX_SECONDS)
    """Maximum seconds of a call to the workers, and of any part of a step without progress.
    The run then ends with an error and the stacks of its processes; see docs/resuming.md. Trigon
    only."""

    grace_seconds: float | None = Field(default=30.0, gt=0, le=MAX_SECONDS)
    """Seconds after SIGTERM or SIGHUP by which the run must have saved; null: as long as it takes.
    A step that takes longer is left, and the step before it is saved; see docs/resuming.md. Raise
    it with terminationGracePeriodSeconds of Kubernetes. Trigon only."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto: a GPU if there is one. Trigon only."""

    auto_micro_batch: bool | None = None
    """Measure before the first step how many tokens a pass can take on this device; null: on a GPU.
    The result replaces worker.actor.micro_batch_size_per_device_for_update and
    micro_batch_size_per_device_for_experience. Trigon only."""

    check_memory: bool = True
    """Refuse a run that cannot fit into the memory that is there, before anything is loaded.
    By arithmetic from the model's config.json, see docs/hardware.md; false: no check. Trigon only.
    """

    max_try_make_batch: int = Field(default=20, le=MAX_STEPS)
    """Maximum rounds of online_filtering per step; 0 or below: no limit.
    Rounds that keep no group count too. After the last round the step trains on the groups it has.
    """

    profile_steps: tuple[Annotated[int, Field(ge=1, le=MAX_STEPS)], ...] = ()
    """Steps of which the first update and 8 decode steps are traced into `profile/`, for Perfetto.
    The folder is in the run folder. These are slower, and a trace takes tens of MB. Trigon only."""

    val_freq: int = Field(default=-1, ge=-1, le=MAX_STEPS)
    """Steps between validations; 0 or -1: only before and after training."""

    val_before_train: bool | None = None
    """Validate before the first step; null: if there are val_files."""

    val_only: bool = False
    """Validate the weights of the model or checkpoint, and stop. Needs no train_files; the numbers
    are in metrics.jsonl and the loggers.
    """

    val_generations_to_log: int = Field(default=0, ge=0, le=MAX_COUNT)
    """Completions shown at each validation, on the console and, with their images, in the loggers.
    """

    train_samples_freq: int = Field(default=-1, ge=-1, le=MAX_STEPS)
    """Steps between tables of training completions in the loggers: one group, with its images.
    0 or -1: none. Trigon only."""

    save_images: bool = True
    """Store the images of the prompts in `images/` of the run folder, each distinct image once.
    Files up to 128 KiB are stored as they are. Trigon only."""

    saved_image_side: int = Field(default=1024, ge=16, le=16_384)
    """Width and height in pixels to which larger files are reduced for save_images. Trigon only."""

    rollout_tokens: int = Field(default=2, ge=0, le=MAX_COUNT)
    """Groups of each step, the first that are learned from, whose rollouts are recorded with
    log-probabilities and entropy per token. They take about 60 bytes per token on disk; 0: none.
    Trigon only."""

    watch: WatchConfig = Field(default_factory=WatchConfig)

    save_freq: int = Field(default=-1, ge=-1, le=MAX_STEPS)
    """Steps between checkpoints; 0 or -1: only after the last step."""

    save_limit: int = Field(default=-1, ge=-1, le=MAX_STEPS)
    """Checkpoints to keep: the newest ones, besides the best; 0 or -1: all.
    Raising it needs disk space."""

    save_model_only: bool = False
    """Save weights without optimizer states: smaller, but training cannot resume from them."""

    save_in_background: bool = True
    """Copy a checkpoint to host memory, and write it while training continues; false: wait.
    Trigon only."""

    save_checkpoint_path: str | None = None
    """Run folder; null: checkpoints/project_name/experiment_name."""

    load_checkpoint_path: str | None = None
    """Checkpoint to resume from, a global_step or actor folder; null: see find_last_checkpoint."""

    find_last_checkpoint: bool = True
    """Resume from the last checkpoint in the run folder, if there is one."""

    accept_changes: Names = ()
    """Options that may have other values, or files of other content, than in the run that saved the
    checkpoint: their names, or `all`.
    Any other change that a run's numbers depend on is an error before anything is loaded, which
    gives this option as it has to be set; see docs/resuming.md. Trigon only."""


class Config(Section):
    """The configuration of a run."""

    data: DataConfig = Field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    worker: WorkerConfig = Field(default_factory=WorkerConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
