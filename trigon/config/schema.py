"""The table of options: the type, default, bounds and description of each, by section.

Sections, keys and defaults are EasyR1's, so that its configuration files run unchanged. The
description says where a default differs and which keys are Trigon only. A property is a value that
follows from the options of its section, or, in Config, of several sections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from trigon.config.names import (
    DTYPE_ALIASES,
    SINGLE_COMPLETION_ESTIMATORS,
    CorrectionKind,
    CorrectionLevel,
    DeviceType,
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
from trigon.config.paths import expand_path
from trigon.system.stopping import SameCommand

# Upper bounds: a value above one of them is a typing error, not a larger run.
MAX_COUNT = 1_000_000
"""Prompts of a step, completions of a prompt, and the like."""
MAX_TOKENS = 100_000_000
"""Tokens of a sequence or of a batch."""
MAX_PIXELS = 10_000_000_000
"""Pixels of an image."""
MAX_STEPS = 2**31 - 1
"""Steps, and numbers of which a large value means all; vLLM's top_k has 32 bits."""
MAX_SECONDS = 1_000_000
"""Time limits: 11 days. Those of the operating system have 32 bits, in milliseconds."""
MAX_SEED = 2**63 - 1
"""Seeds. The seeds of torch have 64 bits."""

DEVICE_DEFAULTS: Mapping[str, Mapping[DeviceType, Any]] = {
    # On the CPU vLLM's own value for an engine that is started as Trigon starts it. On a GPU one
    # pass of decoding takes about as long for many sequences as for few, since the bandwidth of
    # the memory limits it: vLLM's own value for offline sampling on 70 GiB or more.
    "worker.rollout.max_num_seqs": {"cpu": 128, "cuda": 1024},
    # vLLM 0.32 fails on the CPU at a seeded request whose prompt it has split. On a GPU it warns
    # that the engine may crash or give wrong results without it.
    "worker.rollout.enable_chunked_prefill": {"cpu": False, "cuda": True},
    # FSDP gathers the weights for each pass, so that passes on GPUs should be as large as fits.
    # The memory of a machine is seldom the limit, and a run that measures it takes longer.
    "trainer.auto_micro_batch": {"cpu": False, "cuda": True},
}
"""Defaults, by device, of the options that are null here because they depend on it."""

GROUP_SIZE = 8
"""Default of worker.rollout.n for estimators that compare the completions of a group."""
MAX_PROMPTS_PER_STEP = 512
"""Largest default of data.rollout_batch_size. EasyR1's default."""
EASYR1_PROMPTS_PER_UPDATE = 256
"""EasyR1's default of global_batch_size, on which files may rely that set rollout_batch_size."""

TRUNK_OPTIONS = (
    "global_batch_size",
    "micro_batch_size_per_device_for_update",
    "micro_batch_size_per_device_for_experience",
    "ppo_epochs",
    "model",
    "fsdp",
    "offload",
)
"""Options and sections that a critic with a shared trunk takes from worker.actor."""


class Section(BaseModel):
    """A frozen section of options. An unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True, hide_input_in_errors=True
    )


def _short_dtype(name: Any) -> Any:
    return DTYPE_ALIASES.get(name, name) if isinstance(name, str) else name


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _as_texts(value: Any) -> Any:
    return () if value is None or value == "" else _as_tuple(value)


DtypeOption = Annotated[Dtype, BeforeValidator(_short_dtype)]
"""A floating-point format. float32, bfloat16 and float16 are accepted and shortened."""

Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_texts)]
"""Datasets, files, tools or names. A single one may be written without the brackets of a list."""


class DataConfig(Section):
    """The datasets, and how prompts are built from their rows."""

    train_files: Texts = ()
    """Training datasets: hub ids, files (parquet, json, jsonl, csv) or folders.
    A name may end in `@split`; the default split is train."""

    train_weights: tuple[Annotated[float, Field(gt=0, le=1000)], ...] = ()
    """Passes over each of train_files per epoch: 2 reads a dataset twice, 0.5 reads half of it.
    If the list is empty, each dataset is read once. Trigon only."""

    val_files: Texts = ()
    """Validation datasets, written like train_files."""

    prompt_key: str = "prompt"
    """Column of the question. Each `<image>` in it stands for one image of the row, in order.
    In this and the next three keys dots reach into structs: `reward_model.ground_truth`."""

    answer_key: str = "answer"
    """Column of the ground truth, which is passed to the reward function."""

    image_key: str = "images"
    """Column of the images of a row (PIL images, bytes, mappings or paths). A row in which it is
    absent or empty is text only."""

    video_key: str = "videos"
    """Column of the videos of a row (paths or bytes), one for each `<video>` of the question. A row
    in which it is absent or empty has no videos."""

    image_dir: str | None = None
    """Folder of relative image and video paths. null is the folder of the dataset."""

    video_fps: float = Field(default=2.0, gt=0, le=1000)
    """Frames that are sampled per second of video. Raising it uses more prompt tokens."""

    max_video_frames: int = Field(default=768, ge=2, le=MAX_COUNT)
    """Maximum number of frames per video, evenly spaced. Longer videos are sampled at a lower rate.
    Trigon only."""

    max_prompt_length: int = Field(default=512, ge=1, le=MAX_TOKENS)
    """Maximum number of prompt tokens, image tokens included.
    Raising it keeps more rows and needs more memory."""

    max_response_length: int = Field(default=512, ge=1, le=MAX_TOKENS)
    """Maximum number of tokens in a completion. Raising it needs more generation time and memory.
    """

    rollout_batch_size: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Prompts per step. null is all training prompts, and at most 512, EasyR1's default.
    Raising it makes steps longer, gradients less noisy, and updates more off-policy."""

    mini_rollout_batch_size: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Prompts per sampling round of algorithm.online_filtering. null is rollout_batch_size."""

    val_batch_size: int = Field(default=-1, ge=-1, le=MAX_STEPS)
    """Prompts per validation batch; -1 validates all prompts at once.
    Raising it is faster and needs more host memory for images."""

    format_prompt: str | None = None
    """Jinja template of the question, whose variable is `content`.
    It is the path of a file, or the template itself if it contains `{{` or `{%`."""

    system_prompt: str | None = None
    """System message before each question. null is the default of the chat template. Trigon only.
    """

    allow_special_tokens: bool = False
    """If true, special tokens in the text of a row, such as `<|im_start|>`, act as special tokens.
    If false, they are ordinary text. Trigon only."""

    override_chat_template: str | None = None
    """Jinja chat template that replaces the template of the model.
    It is the path of a file, or the template itself if it contains `{{` or `{%`."""

    shuffle: bool = True
    """Shuffle the training prompts in each epoch, from `seed`. If false, the order of the dataset
    is kept."""

    seed: int = Field(default=1, ge=0, le=MAX_SEED)
    """Seed of the shuffle."""

    min_pixels: int | None = Field(default=None, ge=1, le=MAX_PIXELS)
    """Smaller images are enlarged to this number of pixels. null is the limit of the processor.
    Raising it uses more prompt tokens. EasyR1's default is 262144."""

    max_pixels: int | None = Field(default=None, ge=1, le=MAX_PIXELS)
    """Larger images are reduced to this number of pixels. null is the limit of the processor.
    Raising it uses more prompt tokens. EasyR1's default is 4194304."""

    max_image_pixels: int = Field(default=64_000_000, ge=1, le=MAX_PIXELS)
    """Images with more pixels are rejected before they are decoded, to bound memory. So are images
    whose decoding takes more than 12 bytes for each of these pixels. Trigon only."""

    filter_overlong_prompts: bool = True
    """Skip and count prompts that are longer than max_prompt_length. If false, they are an error.
    """

    filter_overlong_prompts_workers: int = Field(default=16, ge=1, le=4096)
    """Threads in each process that measure prompts and prepare images. Raising it helps up to the
    number of usable CPUs, of which several workers on a node have a share each."""

    max_bad_row_fraction: float = Field(default=0.01, ge=0, le=1)
    """Share of unusable rows (unreadable image, wrong number of markers) above which the run stops.
    Trigon only."""


class AlgorithmConfig(Section):
    """Advantages, the KL penalty, group filtering, and the mismatch correction."""

    adv_estimator: Estimator = "grpo"
    """Advantage estimator, see docs/algorithms.md. EasyR1 has grpo, grpo_passk, rloo,
    reinforce_plus_plus, remax and gae, which is PPO with a critic (worker.critic)."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token of reinforce_plus_plus and gae.
    Lowering it gives the last tokens more of the credit."""

    lam: float = Field(default=1.0, ge=0, le=1)
    """Weight of later steps in the advantages of gae: 1 is the whole return, 0 is one step.
    Lowering it relies more on the critic, which has less noise and more bias."""

    lam_critic: float | None = Field(default=None, ge=0, le=1)
    """Weight of later steps in the returns that the critic learns. null is lam.
    1 with a lower lam is the decoupled estimate of VC-PPO. Trigon only."""

    lam_alpha: float | None = Field(default=None, gt=0, le=1000)
    """If set, a completion of S tokens has 1 - 1 / (lam_alpha * S) in place of lam.
    VAPO uses 0.05. Raising it brings the value nearer to 1. Trigon only."""

    bootstrap_cut: bool = False
    """If true, gae gives the state after a completion that was cut at its limit the value of the
    critic. If false, its value is 0. Trigon only."""

    reward_weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each part of the reward in gdpo. If empty, each part but `overall` has weight 1.
    Trigon only."""

    disable_kl: bool = False
    """Train without a reference model: there is no KL term, and the memory of one copy of the
    weights is saved."""

    use_kl_loss: bool = False
    """Add the KL term to the loss. If false, it is subtracted from the reward of each completion.
    """

    kl_penalty: KlEstimator = "kl"
    """KL estimator per token, see docs/algorithms.md. kl is the log-ratio, abs its absolute value,
    mse half its square, low_var_kl the unbiased estimator k3 of low variance, and full the exact KL
    over the vocabulary."""

    kl_coef: float = Field(default=1e-3, ge=0, le=1000)
    """Weight of the KL term.
    Raising it keeps the policy closer to the reference and slows learning."""

    kl_type: Literal["fixed", "adaptive"] = "fixed"
    """adaptive changes the weight of a KL in the reward so that the KL approaches kl_target."""

    kl_horizon: float = Field(default=10000.0, gt=0, le=1e12)
    """Completions over which the adaptive weight changes by its relative error.
    Raising it makes changes slower."""

    kl_target: float = Field(default=0.1, gt=0, le=1000)
    """Target of the adaptive weight, in nats: the mean over completions of the mean KL of their
    tokens. Raising it lets the policy move further."""

    online_filtering: bool = False
    """Train only on groups whose mean filter_key is strictly between filter_low and filter_high.
    More prompts are sampled until there are rollout_batch_size of them (DAPO's dynamic sampling).
    """

    filter_key: str = "overall"
    """Score of the reward function that online_filtering averages over a group."""

    filter_low: float = 0.01
    """Groups with a mean at or below this are filtered, as all wrong."""

    filter_high: float = 0.99
    """Groups with a mean at or above this are filtered, as all right."""

    filter_surplus: Literal["drop", "keep"] = "drop"
    """Whether groups beyond rollout_batch_size are dropped, or kept for the next step, in which
    they are one step old. Trigon only."""

    overlong_filtering: bool = False
    """Exclude completions that were cut at max_response_length from the loss.
    Their rewards still count in their group (DAPO, section 3.4). Trigon only."""

    mismatch_correction: Literal["off", CorrectionKind] | None = None
    """Importance sampling against the train-inference mismatch, and for tokens of older weights.
    The weight of a token's loss is its probability in the trainer divided by that in the engine.
    truncate caps this weight at mismatch_high. mask excludes tokens outside mismatch_low and
    mismatch_high. reject excludes completions outside them, and gives the others weight 1. null is
    truncate with worker.rollout.oversampling or max_staleness above 0, and otherwise off.
    Trigon only."""

    mismatch_level: CorrectionLevel = "token"
    """token computes a weight per token; sequence computes one per completion, the geometric mean
    over its tokens. Trigon only."""

    mismatch_low: float = Field(default=0.5, ge=0, le=1)
    """Weight below which mask and reject exclude. Raising it is stricter. Trigon only."""

    mismatch_high: float = Field(default=2.0, ge=1, le=1e9)
    """Weight at which truncate caps, and above which mask and reject exclude.
    Lowering it is stricter. Trigon only."""

    max_staleness: int = Field(default=0, ge=0, le=1000)
    """Steps by which the weights that sample may be older than the weights that learn.
    With 1, a batch is sampled during the update on the batch before it. Above 1, groups are sampled
    continuously, up to this number of steps ahead, and groups that have become older are sampled
    again. Both need worker.hybrid_engine=false, see docs/distributed.md. Trigon only."""

    @property
    def has_values(self) -> bool:
        """Whether the estimator needs the values of a critic."""
        return self.adv_estimator == "gae"

    @property
    def compares_groups(self) -> bool:
        """Whether the estimator compares the completions of a prompt, of which it needs two."""
        return not self.has_values and self.adv_estimator not in SINGLE_COMPLETION_ESTIMATORS

    @property
    def samples_continuously(self) -> bool:
        """Whether groups are sampled all the time, and not for one step after the other."""
        return self.max_staleness > 1

    @property
    def has_kl(self) -> bool:
        """Whether there is a KL term with a coefficient above 0."""
        return not self.disable_kl and self.kl_coef > 0

    @property
    def kl_in_reward(self) -> KlEstimator | None:
        """The estimator of the KL that is subtracted from the reward; None if there is none."""
        return self.kl_penalty if self.has_kl and not self.use_kl_loss else None

    @property
    def kl_in_loss(self) -> KlEstimator | None:
        """The estimator of the KL that is added to the loss; None if there is none."""
        return self.kl_penalty if self.has_kl and self.use_kl_loss else None


class LoraConfig(Section):
    """Low-rank adapters (LoRA), trained instead of the weights."""

    rank: int = Field(default=0, ge=0, le=65_536)
    """Rank of the adapters. With 0 there are no adapters, and all weights are trained.
    Raising it adds capacity and memory."""

    alpha: int = Field(default=64, ge=1, le=MAX_COUNT)
    """The output of an adapter is scaled by alpha / rank.
    Raising it acts like a higher learning rate."""

    target_modules: str = "all-linear"
    """Layers that get an adapter. all-linear is every linear layer but the head. Otherwise it is
    the ends of module names (`q_proj`, `mlp.down_proj`), separated by commas, or one regular
    expression that matches full names of modules."""

    exclude_modules: str | None = None
    """Layers that get no adapter, written like target_modules; `.*visual.*` excludes the vision
    tower of a Qwen or GLM. null excludes none."""


class TrainedModelConfig(Section):
    """A model that is trained. A critic has the kernels and the image cache of worker.actor."""

    model_path: str | None = None
    """Model to start from: a hub id or a local folder. The critic starts from it with a new head of
    zeros, and needs a model of the policy's family. For the critic, null is the policy's model;
    EasyR1 requires one."""

    override_config: dict[str, Any] = Field(default_factory=dict)
    """Values that are set in the config of the model before its weights are loaded. A critic
    without them and without a model_path has the values of the policy."""

    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass, which takes about a third more time and much less
    memory."""

    enable_activation_offload: bool = False
    """Keep the inputs of recomputed layers in host memory until the backward pass, for longer rows.
    They are copied while the GPU computes; on the CPU it saves nothing. Trigon only."""

    trust_remote_code: bool = False
    """Run code from the repository of the model. EasyR1's default is true."""

    freeze_vision_tower: bool = False
    """Train everything but the vision tower, which takes less memory and time."""

    lora: LoraConfig = Field(default_factory=LoraConfig)


class ModelConfig(TrainedModelConfig):
    """The model to train. The kernels and the cache of image features are also the critic's."""

    tokenizer_path: str | None = None
    """Tokenizer and image processor. null is model_path."""

    vision_cache_gb: float = Field(default=4.0, ge=0, le=100_000)
    """GiB of host memory per worker for cached image features; 0 disables the cache. It is used if
    the vision tower is frozen or excluded from LoRA. Raising it avoids recomputation, and does not
    change results. Trigon only."""

    attention_kernel: Literal["auto", "sdpa", "varlen", "flex", "flash"] = "auto"
    """Attention kernel. auto is varlen on a GPU in 16 bits (flex for Gemma 3 with images), and
    otherwise sdpa. sdpa computes one segment at a time, exactly; varlen is torch's variable-length
    kernel, with one call per layer; flex is torch's flex attention, compiled; flash is the package
    flash-attn. All but sdpa need a GPU. Trigon only."""

    compile_layers: bool = False
    """Compile the norms and MLPs of each layer (torch.compile), to fuse elementwise operations.
    The first passes take a minute or more. It is off because its gain is not measured. Trigon only.
    """

    use_liger_kernel: bool = False
    """Use the fused norms and gated activations of liger-kernel, on a GPU.
    It is off because its gain is not measured. Trigon only."""


class OptimConfig(Section):
    """The optimizer and its learning rate."""

    lr: float = Field(default=1e-6, gt=0, le=1)
    """Learning rate after warm-up. AdamW changes each weight by about as much in an update. Raising
    it learns faster until training becomes unstable."""

    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay rates of AdamW's first and second moments.
    Raising them averages over more updates."""

    weight_decay: float = Field(default=1e-2, ge=0, le=100)
    """Decoupled weight decay of matrices; vectors have none. Raising it keeps weights smaller."""

    strategy: OptimizerStrategy = "adamw"
    """adamw is for fp32 weights; adamw_bf16 is for bf16 weights, of which it keeps the missing
    bits, so that they are updated exactly as in fp32. Its gradients and first moments have 16 bits:
    with gradient and states it needs 12 bytes per weight instead of 16."""

    lr_warmup_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of all steps over which the learning rate rises to lr."""

    lr_warmup_steps: int | None = Field(default=None, ge=0, le=MAX_STEPS)
    """Number of steps over which the learning rate rises to lr. If null, lr_warmup_ratio applies.
    """

    min_lr_ratio: float | None = Field(default=None, ge=0, le=1)
    """The share of lr that the cosine schedule reaches after the last update. null is 0."""

    lr_scheduler_type: LearningRateSchedule = "constant"
    """Learning rate after warm-up: constant, or a half cosine down to min_lr_ratio."""


class FsdpConfig(Section):
    """Number formats of the model, and its sharding over workers (FSDP)."""

    torch_dtype: DtypeOption | None = None
    """Dtype in which weights are stored and updated. null is fp32, and with LoRA mp_param_dtype.
    bf16 needs less memory, and optim.strategy=adamw_bf16. fp16 cannot be trained. With LoRA both
    are allowed, since only the adapters are updated, which are in fp32."""

    mp_param_dtype: DtypeOption = "bf16"
    """Dtype of the forward and backward passes. bf16 is fast on a GPU, and fp32 is exact. fp16
    works only with trainer.val_only, since its gradients would need scaling."""

    mp_reduce_dtype: DtypeOption = "fp32"
    """Dtype in which gradients are reduced over workers."""

    enable_full_shard: bool = True
    """Reshard each layer after its forward pass and gather it again for the backward pass.
    If false, it stays gathered, which is faster and needs more memory."""

    fsdp_size: int = Field(default=-1, ge=-1, le=MAX_COUNT)
    """Workers that share one copy of the model. -1 and 0 are all workers."""

    enable_cpu_offload: bool = False
    """Keep weights, gradients and optimizer states in host memory, which needs the least device
    memory and is slow. It has no effect with a single worker, which shards nothing."""


class OffloadConfig(Section):
    """What moves to host memory while the model is not in use, as while completions are sampled."""

    offload_params: bool = False
    """Move the weights to the CPU outside of passes. This frees device memory for sampling, and
    costs transfers."""

    offload_optimizer: bool = False
    """Move the optimizer states to the CPU between updates. This frees twice the memory of the
    weights, and costs transfers."""


class TrainedConfig(Section):
    """The update of a model. Base of the sections of the policy and of the critic."""

    global_batch_size: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Prompts per optimizer update, each with its n completions. null is rollout_batch_size, or
    256, EasyR1's default, where that is set to a multiple of 256. Lowering it makes more updates
    per step."""

    micro_batch_size_per_device_for_update: int = Field(default=4, ge=1, le=MAX_COUNT)
    """Token budget of a forward and backward pass, as a number k of sequences of maximum length.
    A pass takes at most k * (max_prompt_length + max_response_length) tokens, in any number of
    completions. Raising it is faster and needs more memory, and does not change results."""

    micro_batch_size_per_device_for_experience: int = Field(default=16, ge=1, le=MAX_COUNT)
    """Token budget, counted likewise, of a pass without gradient, which computes log-probabilities
    or the values of the critic."""

    max_grad_norm: float = Field(default=1.0, gt=0, le=1e12)
    """Maximum norm of the gradient, which is scaled down to it.
    Raising it lets outliers move the model more."""

    ppo_epochs: int = Field(default=1, ge=1, le=10_000)
    """Passes over the data of a step. Raising it learns more from them, further off-policy."""

    model: TrainedModelConfig = Field(default_factory=TrainedModelConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    fsdp: FsdpConfig = Field(default_factory=FsdpConfig)
    offload: OffloadConfig = Field(default_factory=OffloadConfig)

    @property
    def weight_dtype(self) -> Dtype:
        """The format in which weights are stored and updated.

        With LoRA the base model is not updated, and the default is the format of the passes, to
        which each pass would round the weights anyway.
        """
        return self.fsdp.torch_dtype or (self.fsdp.mp_param_dtype if self.model.lora.rank > 0 else "fp32")


class ActorConfig(TrainedConfig):
    """The update of the policy."""

    clip_ratio_low: float = Field(default=0.2, ge=0, le=1)
    """The probability ratio of a token is clipped at 1 minus this; for cispo 1 is no bound.
    Raising it allows larger decreases."""

    clip_ratio_high: float = Field(default=0.3, ge=0, le=1e9)
    """The probability ratio of a token is clipped at 1 plus this.
    Raising it lets rare tokens become more likely."""

    clip_ratio_dual: float = Field(default=3.0, gt=1, le=1e9)
    """Bound of the ratio where the advantage is negative.
    Raising it lets bad completions weigh more."""

    loss_avg_mode: LossAveraging = "token"
    """How the token losses of an update are averaged. token gives each token the same weight, and
    seq each completion. seq_fixed divides the token sum of each completion by loss_fixed_length
    (Dr. GRPO)."""

    loss_fixed_length: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """Divisor of seq_fixed in tokens. null is data.max_response_length.
    Raising it makes updates smaller. Trigon only."""

    loss_type: PolicyLossType = "default"
    """Policy loss, see docs/algorithms.md. default is the clipped ratio with a dual bound."""

    cispo_cap: float | None = Field(default=None, ge=1, le=1e9)
    """Maximum weight of a token in cispo. null is 1 + clip_ratio_high.
    A cap below 1 would shrink the gradient even of an unchanged policy. Trigon only."""

    tau_positive: float = Field(default=1.0, gt=0, le=1e6)
    """Steepness of sapo's gate for positive advantages.
    Raising it reduces the weight of off-policy tokens."""

    tau_negative: float = Field(default=1.05, gt=0, le=1e6)
    """Steepness of sapo's gate for negative advantages."""

    ulysses_sequence_parallel_size: int = Field(default=1, ge=1, le=4096)
    """Workers that compute each row of sequences together, a slice of its tokens each. It divides
    the number of workers. Raising it divides the activations of long sequences, which do not fit
    into one GPU otherwise, and costs communication; see docs/distributed.md."""

    entropy_coeff: float = Field(default=0.0, ge=0, le=1000)
    """Weight of an entropy bonus in the loss.
    Raising it keeps completions varied and costs a little time."""

    router_aux_loss_coef: float = Field(default=0.0, ge=0, le=1000)
    """Weight of the load-balancing loss of an MoE model, see docs/model-families.md. Raising it
    spreads the tokens more evenly over the experts, against the policy loss. Above 0 an update
    makes one more pass, without gradient."""

    router_replay: Literal["disabled", "R3"] = "disabled"
    """R3: in an MoE model each token uses the experts that the rollout engine has used for it, so
    that trainer and engine do not differ where two experts have nearly the same score. Their
    weights are computed, with gradient; see docs/model-families.md."""

    model: ModelConfig = Field(default_factory=ModelConfig)

    @property
    def replays_routing(self) -> bool:
        """Whether each token uses the experts that the rollout engine has recorded for it."""
        return self.router_replay == "R3"

    @property
    def max_cispo_weight(self) -> float:
        """The maximum weight of a token in cispo."""
        return 1.0 + self.clip_ratio_high if self.cispo_cap is None else self.cispo_cap


class CriticConfig(TrainedConfig):
    """The critic of algorithm.adv_estimator=gae, and its update."""

    share_trunk: bool = False
    """Train one model for policy and critic, in which the critic is a second head on the trunk of
    the actor. It needs much less memory and time. The model, batches, formats and offloading are
    then taken from worker.actor. Trigon only."""

    vf_coef: float = Field(default=0.1, ge=0, le=1e6)
    """Weight of the value loss in the gradient of a shared trunk; the gradient of the head is not
    scaled. Raising it lets the values shape the trunk more, against the policy. Trigon only."""

    cliprange_value: float = Field(default=0.5, gt=0, le=1e12)
    """In the loss, a value is clipped to its value before the updates of the step plus or minus
    this. Raising it lets the critic follow the returns faster, with several updates per step."""

    loss_avg_mode: Literal["token", "seq"] = "token"
    """How the token losses of an update are averaged, as in worker.actor."""


class ValOverride(Section):
    """Sampling parameters of validation that differ from training. null is the value of
    training."""

    temperature: float | None = Field(default=None, ge=0, le=100)
    """Sampling temperature; 0 is greedy."""

    top_p: float | None = Field(default=None, gt=0, le=1)
    """Probability mass to sample from."""

    top_k: int | None = Field(default=None, ge=-1, le=MAX_STEPS)
    """Number of most likely tokens to sample from; -1 samples from all."""

    n: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Completions per prompt. Raising it makes validation metrics less noisy and more expensive."""

    ignore_eos: bool | None = None
    """Continue after the end-of-sequence token."""

    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    """Sampling seed."""

    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """Maximum number of tokens in a completion. null is data.max_response_length."""


class RolloutConfig(Section):
    """How completions are sampled."""

    name: Literal["vllm", "transformers"] = "vllm"
    """Rollout engine. transformers is slow and needs no further package."""

    n: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Completions per prompt (group size), at least 2 for estimators that compare them. null is 8
    for these in training, and otherwise 1, EasyR1's default.
    Raising it costs generation and helps where few completions are right."""

    temperature: float = Field(default=1.0, gt=0, le=100)
    """Sampling temperature. The trainer divides its logits by it too.
    Raising it makes completions more varied."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Probability mass to sample from; 1 is all of it.
    The trainer's log-probabilities ignore the cut."""

    top_k: int = Field(default=-1, ge=-1, le=MAX_STEPS)
    """Number of most likely tokens to sample from; -1 samples from all.
    The trainer's log-probabilities ignore the cut."""

    seed: int = Field(default=1, ge=0, le=MAX_SEED)
    """Sampling seed. The seed of a completion is derived from it, the position of its prompt in the
    order of the data, and the index of the completion."""

    limit_images: int = Field(default=0, ge=0, le=MAX_COUNT)
    """Maximum number of images per prompt, without images of observations; 0 is no limit."""

    dtype: DtypeOption = "bf16"
    """Dtype of the engine's weights and computation."""

    gpu_memory_utilization: float = Field(default=0.6, gt=0, le=1)
    """Share of GPU memory that vLLM may use while it samples.
    Raising it runs more completions at once."""

    ignore_eos: bool = False
    """Continue after the end-of-sequence token, to the maximum length, for speed measurements."""

    oversampling: float = Field(default=0.0, ge=0, le=1)
    """Share of prompts that a step samples beyond the prompts that it learns from.
    Sampling stops once enough groups are complete, and the next step continues the others. Raising
    it shortens the wait for the longest completions, and trains on older ones; see
    docs/distributed.md. Trigon only."""

    max_carried_steps: int = Field(default=4, ge=1, le=MAX_COUNT)
    """Steps that may leave a group unfinished; the step after them waits for it. The oldest tokens
    that are trained on are this number of steps old. Trigon only."""

    partial: Literal["finish", "continue"] = "finish"
    """What completions do that are being sampled when new weights arrive. With finish, they end
    with the old weights; once these are max_staleness / 2 versions old, no others begin until the
    new weights are loaded. With continue, they continue with the new weights. It needs
    max_staleness above 1, see docs/distributed.md. Trigon only."""

    enforce_eager: bool = False
    """Run vLLM without CUDA graphs, which starts faster, needs less memory and samples slower."""

    enable_chunked_prefill: bool | None = None
    """Let vLLM split long prompts over several batches. null is true on a GPU. Without it vLLM
    warns that an engine on a GPU may crash or give wrong results. It is not available on the CPU.
    EasyR1's default is false."""

    enable_prefix_caching: bool = True
    """Let vLLM compute the shared prefix of prompts once. Trigon only."""

    nnodes: int = Field(default=1, ge=1, le=10_000)
    """Machines of the workers that sample, with worker.hybrid_engine=false. Trigon only."""

    n_gpus_per_node: int = Field(default=1, ge=1, le=1024)
    """Workers per machine that sample, with worker.hybrid_engine=false. Trigon only."""

    tensor_parallel_size: int = Field(default=1, ge=1, le=4096)
    """Workers per copy of the model in vLLM. It must divide the number of workers that sample.
    Raising it leaves more memory on each. EasyR1's default is 2."""

    max_model_len: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """Maximum number of tokens of a sequence in vLLM. null is max_prompt_length +
    max_response_length."""

    max_num_batched_tokens: int = Field(default=8192, ge=1, le=MAX_TOKENS)
    """Maximum number of tokens per batch of vLLM.
    Raising it speeds up prompts and needs more memory."""

    max_num_seqs: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Maximum number of sequences that vLLM computes at a time, at most max_num_batched_tokens.
    Raising it samples faster as long as the KV cache holds all of them, and needs a little more
    memory. Trigon only."""

    model_runner: Literal["auto", "v1", "v2"] = "auto"
    """vLLM's model runner on a GPU. auto is vLLM's choice, which is v2 from vLLM 0.32 on.
    v1 draws random numbers for one sequence after the other, which is slow where many run at a
    time. Change it if you suspect a fault of the runner. Trigon only."""

    async_scheduling: bool | None = None
    """Let vLLM prepare a batch on a GPU while the last one runs. null is vLLM's choice, now true.
    false samples more slowly; set it if you suspect a fault here. Trigon only."""

    disable_log_stats: bool = True
    """Do not log vLLM's statistics."""

    disable_tqdm: bool = False
    """Show no progress bar while sampling."""

    parity_tolerance: float | None = Field(default=None, gt=0, le=1000)
    """Mean |log-probability difference| of engine and trainer above which the run stops, in nats.
    null is 1e-3 if both compute in fp32, and otherwise 0.1. Trigon only."""

    weight_check_freq: int = Field(default=1, ge=0, le=MAX_STEPS)
    """Steps between comparisons, by checksum, of vLLM's weights with the trainer's; 0 is never.
    Trigon only."""

    environment: str | None = None
    """Environment of completions of several turns: `file.py:Class` or `module:Class`, see
    docs/agents.md. With null and without tools, completions have one turn. Trigon only."""

    environment_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor; `env:NAME` reads an environment variable.
    Secrets among them are not written anywhere. Trigon only."""

    tools: Texts = ()
    """Functions that the model may call: `[crop, tools.py:search]`. With an environment, the tools
    answer turns that call them, and the environment answers the others. crop and python are built
    in, others are `file.py:function` or `module:function`. Trigon only."""

    tool_format: Literal["auto", ToolFormat] = "auto"
    """How the model writes calls of tools. auto takes the format from its chat template.
    Trigon only."""

    observation_role: ObservationRole | None = None
    """Role of the messages with observations. null is tool with tools alone, and otherwise user.
    Some chat templates (Qwen3) remove thoughts before a message of the user; `tool` keeps them.
    Trigon only."""

    max_turns: int = Field(default=8, ge=1, le=10_000)
    """Maximum number of turns of a completion, with an environment or tools. Raising it allows
    longer trajectories, whose tokens data.max_response_length limits. Trigon only."""

    max_turn_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """Maximum number of tokens that the model samples in a turn. A turn that reaches it ends the
    trajectory. With null only the completion has a limit. Trigon only."""

    environment_timeout_seconds: float = Field(default=60.0, gt=0, le=MAX_SECONDS)
    """Maximum seconds of a reset or a step of the environment, or of a turn's tools.
    After that its process is killed, and the completion is skipped. Trigon only."""

    environment_workers: int = Field(default=256, ge=1, le=4096)
    """Maximum number of trajectories at a time in each replica that samples, each in a process of
    its own; others wait. Lowering it needs less memory. Trigon only."""

    val_override_config: ValOverride = Field(default_factory=ValOverride)

    @property
    def has_episodes(self) -> bool:
        """Whether completions may have several turns: with an environment, or with tools."""
        return self.environment is not None or bool(self.tools)

    @property
    def role_of_observations(self) -> ObservationRole:
        """The role of the messages with observations."""
        return self.observation_role or ("tool" if self.tools and self.environment is None else "user")

    @property
    def role_of_tools(self) -> ObservationRole:
        """The role of the messages with what tools return."""
        return self.observation_role or "tool"

    def max_num_seqs_on(self, device: DeviceType) -> int:
        """Return the maximum number of sequences that vLLM computes at a time."""
        return self.max_num_seqs or int(DEVICE_DEFAULTS["worker.rollout.max_num_seqs"][device])

    def chunks_prefill_on(self, device: DeviceType) -> bool:
        """Return whether vLLM may split long prompts over several batches."""
        chosen = self.enable_chunked_prefill
        return bool(DEVICE_DEFAULTS["worker.rollout.enable_chunked_prefill"][device]) if chosen is None else chosen


class RefFsdpConfig(Section):
    """Number format and memory of the reference model."""

    torch_dtype: DtypeOption | None = None
    """Dtype of the reference's weights and computation. null is bf16."""

    enable_full_shard: bool = True
    """Reshard each layer after its forward pass. If false, it stays gathered to the end of the
    pass."""

    enable_cpu_offload: bool = True
    """Keep the reference in host memory between its passes.
    This frees device memory, and costs one transfer per step."""


class RefOffloadConfig(Section):
    """EasyR1's second key for keeping the reference model in host memory."""

    offload_params: bool = False
    """The same as worker.ref.fsdp.enable_cpu_offload: either one suffices."""


class RefConfig(Section):
    """The reference model: the policy before training."""

    fsdp: RefFsdpConfig = Field(default_factory=RefFsdpConfig)
    offload: RefOffloadConfig = Field(default_factory=RefOffloadConfig)

    @property
    def dtype(self) -> Dtype:
        """The format in which the reference stores its weights and computes."""
        return self.fsdp.torch_dtype or "bf16"


class WeightedReward(BaseModel):
    """One of several reward functions, whose weighted sum is the reward.

    name: begins the names of its parts; None is the name of the function.
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

RewardOption = str | Sequence[WeightedReward] | None
"""The value of worker.reward.reward_function."""


def reward_specs(option: RewardOption) -> tuple[str, ...]:
    """Return the functions that an option names: `file.py:function`, or shipped names."""
    if option is None or isinstance(option, str):
        return (option,) if option else ()
    return tuple(entry.function for entry in option)


def describe_rewards(option: RewardOption) -> str | None:
    """Return an option as text: "math", or "0.5 * math + 1 * judge.py:main"; None if it is null."""
    if option is None or isinstance(option, str):
        return option
    return " + ".join(f"{entry.weight:g} * {entry.function}" for entry in option)


class RewardConfig(Section):
    """How completions are scored."""

    reward_function: str | Rewards | None = None
    """`file.py:function` (the default function is main), or a shipped name (docs/rewards.md).
    Several are summed: `[{function: judge.py, weight: 0.5, kwargs: {}}, math]` (Trigon only)."""

    reward_function_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of a single reward function; `env:NAME` reads an environment
    variable. Secrets among them are not written anywhere, see docs/rewards.md."""

    val_reward_function: str | Rewards | None = None
    """The reward function of validation and of `trigon eval`, written like reward_function, with
    arguments in the list only. null is reward_function. Trigon only."""

    env: Texts = ()
    """Names of environment variables that reward workers get besides the list in docs/rewards.md:
    `[OPENAI_API_KEY]`. Trigon only."""

    confinement: Literal["default", "strict", "off"] = "default"
    """What reward functions cannot reach (docs/rewards.md). default is all other processes. strict
    is also the network, and files except Python's own, files in the function's folder and in
    `readable`; they write to a temporary folder only. Trigon only."""

    network: bool | None = None
    """Whether reward functions may open network connections. null allows them, but not with
    `strict`. Trigon only."""

    readable: Texts = ()
    """Files and folders that reward functions can read with `confinement: strict`. Trigon only."""

    writable: Texts = ()
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
    """Maximum seconds to score a completion. After that its reward worker is killed, and the
    completion is skipped. Trigon only."""

    max_memory_gb: float = Field(default=16.0, ge=1, le=100_000)
    """Maximum memory in GiB of a reward worker with all processes that it starts. A worker that
    uses more is killed, and the completion is skipped. Each of `num_cpus` workers may use as much.
    Trigon only."""

    max_failed_fraction: float = Field(default=0.1, ge=0, le=1)
    """Share of a step's completions whose scoring may fail before the run stops. Trigon only."""

    @property
    def of_validation(self) -> str | Rewards | None:
        """The reward functions of validation: its own, or else the functions of training."""
        return self.reward_function if self.val_reward_function is None else self.val_reward_function


class WorkerConfig(Section):
    """Sampling, scoring and training."""

    hybrid_engine: bool = True
    """Sample and learn with the same workers, in turns. If false, trainer.nnodes x
    trainer.n_gpus_per_node workers learn, and worker.rollout.nnodes x
    worker.rollout.n_gpus_per_node others sample; see docs/distributed.md."""

    actor: ActorConfig = Field(default_factory=ActorConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    ref: RefConfig = Field(default_factory=RefConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)


class WatchConfig(Section):
    """Rules that find a failing run by its metrics: docs/troubleshooting.md. Trigon only."""

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
    """Number of training steps, which overrides total_epochs. null is the steps of these epochs."""

    project_name: str = Field(default="easy_r1", min_length=1)
    """Project name in the loggers and in the checkpoint path."""

    experiment_name: str = Field(default="demo", min_length=1)
    """Name of the run. A run that is started again under the same name resumes."""

    logger: Annotated[tuple[Sink, ...], BeforeValidator(_as_tuple)] = ("console", "file")
    """Where metrics are written, see docs/view.md.
    EasyR1's default is console and wandb, which needs an account."""

    nnodes: int = Field(default=1, ge=1, le=10_000)
    """Machines. Above 1 they belong to an existing Ray cluster."""

    n_gpus_per_node: int = Field(default=1, ge=1, le=1024)
    """Workers per machine, with a GPU each, or with CPU cores if the machine has no GPUs.
    EasyR1's default is 8."""

    critic_warmup: int = Field(default=0, ge=0, le=MAX_STEPS)
    """First steps of gae in which only the critic learns, and the policy is not updated. EasyR1 has
    one step fewer of them."""

    max_skipped_updates: int = Field(default=3, ge=0, le=1000)
    """The run stops after this number of updates in a row whose gradients are not finite, and also
    if more than half of the last 20 are not finite. A minibatch counts once per step, whatever
    ppo_epochs is. With 0 the run does not stop. Trigon only."""

    worker_timeout_seconds: float = Field(default=3600.0, gt=0, le=MAX_SECONDS)
    """Maximum seconds of a call to the workers, while they sample since a completion was
    finished, and of any part of a step without progress.
    The run then ends with an error and the stacks of its processes; see docs/resuming.md.
    Trigon only."""

    grace_seconds: float | None = Field(default=30.0, gt=0, le=MAX_SECONDS)
    """Seconds after SIGTERM or SIGHUP by which the run must have saved. null is no limit.
    A step that takes longer is abandoned, and the step before it is saved; see docs/resuming.md.
    Raise it together with terminationGracePeriodSeconds of Kubernetes. Trigon only."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on. auto is a GPU if there is one. Trigon only."""

    auto_micro_batch: bool | None = None
    """Measure before the first step how many tokens a pass can take on this device. The result
    replaces worker.actor.micro_batch_size_per_device_for_update and
    micro_batch_size_per_device_for_experience. Trigon only."""

    check_memory: bool = True
    """Refuse a run that cannot fit into the available memory, before anything is loaded, by
    arithmetic from the model's config.json; see docs/hardware.md. Trigon only."""

    max_try_make_batch: int = Field(default=20, le=MAX_STEPS)
    """Maximum rounds of online_filtering per step; 0 or below is no limit. Rounds that keep no
    group count too. After the last round the step trains on the groups that it has."""

    profile_steps: tuple[Annotated[int, Field(ge=1, le=MAX_STEPS)], ...] = ()
    """Steps of which the first update and 8 decode steps are traced into the folder `profile/` of
    the run, for Perfetto. These steps are slower, and a trace takes tens of MB. Trigon only."""

    val_freq: int = Field(default=-1, ge=-1, le=MAX_STEPS)
    """Steps between validations. With 0 or -1 there are only those before and after training."""

    val_before_train: bool | None = None
    """Validate before the first step. null does so if there are val_files."""

    val_only: bool = False
    """Validate the weights of the model or checkpoint, and stop. This needs no train_files. The
    numbers are in metrics.jsonl and the loggers."""

    val_generations_to_log: int = Field(default=0, ge=0, le=MAX_COUNT)
    """Completions that each validation shows, on the console and, with their images, in the
    loggers. With 0 the console shows the beginning of one."""

    train_samples_freq: int = Field(default=-1, ge=-1, le=MAX_STEPS)
    """Steps between tables of training completions in the loggers, of one group with its images.
    With 0 or -1 there are none. Trigon only."""

    save_images: bool = True
    """Store the images of the prompts in the folder `images/` of the run, each distinct image once.
    Files up to 128 KiB are stored unchanged. Trigon only."""

    saved_image_side: int = Field(default=1024, ge=16, le=16_384)
    """Width and height in pixels to which larger files are reduced for save_images. Trigon only."""

    rollout_tokens: int = Field(default=2, ge=0, le=MAX_COUNT)
    """Number of groups of each step, the first that are learned from, whose rollouts are recorded
    with log-probabilities and entropy per token, in about 60 bytes per token. Trigon only."""

    watch: WatchConfig = Field(default_factory=WatchConfig)

    save_freq: int = Field(default=-1, ge=-1, le=MAX_STEPS)
    """Steps between checkpoints. With 0 or -1 there is only that after the last step."""

    save_limit: int = Field(default=-1, ge=-1, le=MAX_STEPS)
    """Number of checkpoints that are kept: the newest ones, with the best one in place of the
    oldest of them. 1 keeps the newest and the best; 0 or -1 keeps all. Raising it needs disk
    space."""

    save_model_only: bool = False
    """Save weights without optimizer states, which is smaller. Training cannot resume from them."""

    save_in_background: bool = True
    """Copy a checkpoint to host memory, and write it while training continues. If false, training
    waits for the write. Trigon only."""

    save_checkpoint_path: str | None = None
    """Run folder. null is checkpoints/project_name/experiment_name."""

    load_checkpoint_path: str | None = None
    """Checkpoint to resume from, a global_step or actor folder. With null, find_last_checkpoint
    applies."""

    find_last_checkpoint: bool = True
    """Resume from the last checkpoint in the run folder, if there is one."""

    accept_changes: Texts = ()
    """Names of options, or `all`, whose values or files may differ from the run that saved the
    checkpoint. Any other change that a run's numbers depend on is an error before anything is
    loaded, which says how to set this option; see docs/resuming.md. Trigon only."""

    @property
    def run_folder(self) -> Path:
        """The folder of the run, which holds its checkpoints, metrics and rollouts."""
        if self.save_checkpoint_path:
            return expand_path(self.save_checkpoint_path)
        return Path("checkpoints") / self.project_name / self.experiment_name

    @property
    def same_command(self) -> SameCommand:
        """The command that continues the run, for messages."""
        finds_last = self.find_last_checkpoint and self.load_checkpoint_path is None
        return SameCommand(self.run_folder, finds_last, saves_weights_only=self.save_model_only)

    def tunes_budgets_on(self, device: DeviceType) -> bool:
        """Return whether token budgets are measured before the first step."""
        chosen = self.auto_micro_batch
        return bool(DEVICE_DEFAULTS["trainer.auto_micro_batch"][device]) if chosen is None else chosen


class Config(Section):
    """The configuration of a run.

    The properties are what follows from options of several sections. A size that is null follows
    from the data: as long as the number of training prompts is not known, it is the largest that it
    can be (plan.fill_batch_sizes).
    """

    data: DataConfig = Field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    worker: WorkerConfig = Field(default_factory=WorkerConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)

    # -- the critic --

    @property
    def has_critic(self) -> bool:
        """Whether the run trains a critic."""
        return self.algorithm.has_values and not self.trainer.val_only

    @property
    def shares_trunk(self) -> bool:
        """Whether the critic is a head on the policy's trunk, and not a model of its own."""
        return self.has_critic and self.worker.critic.share_trunk

    @property
    def critic_warmup(self) -> int:
        """The number of first steps in which the policy is not updated; 0 without a critic."""
        return self.trainer.critic_warmup if self.has_critic else 0

    @property
    def critic(self) -> CriticConfig:
        """The section of the critic, with the values that it takes from the policy.

        These are the model, where it is not set, and with a shared trunk all of TRUNK_OPTIONS.
        """
        actor, critic = self.worker.actor, self.worker.critic
        if critic.share_trunk:
            return critic.model_copy(update={name: getattr(actor, name) for name in TRUNK_OPTIONS})
        if critic.model.model_path is not None:
            return critic
        override = critic.model.override_config or actor.model.override_config
        model = {"model_path": actor.model.model_path, "override_config": override}
        return critic.model_copy(update={"model": critic.model.model_copy(update=model)})

    @property
    def critic_model_path(self) -> str | None:
        """The model of a critic that does not start from the policy's model; None without one."""
        return self.worker.critic.model.model_path if self.has_critic else None

    # -- sizes --

    @property
    def group_size(self) -> int:
        """The completions per prompt."""
        default = GROUP_SIZE if self.algorithm.compares_groups and not self.trainer.val_only else 1
        return default if self.worker.rollout.n is None else self.worker.rollout.n

    @property
    def prompts_per_step(self) -> int:
        """The prompts of a step, a multiple of the configured prompts per update."""
        return self.prompts_per_step_of(MAX_PROMPTS_PER_STEP)

    def prompts_per_step_of(self, num_train_prompts: int) -> int:
        """Return the prompts of a step. num_train_prompts: usable training prompts of an epoch."""
        if self.data.rollout_batch_size is not None:
            return self.data.rollout_batch_size
        updates = [self.worker.actor.global_batch_size]
        if self.algorithm.has_values and not self.worker.critic.share_trunk:
            updates.append(self.worker.critic.global_batch_size)
        per_update = lcm(*(size for size in updates if size is not None))
        return max(1, min(MAX_PROMPTS_PER_STEP, num_train_prompts) // per_update) * per_update

    def prompts_per_update_of(self, model: TrainedConfig, num_train_prompts: int = MAX_PROMPTS_PER_STEP) -> int:
        """Return the prompts of an update. model: worker.actor or critic."""
        per_step, is_set = self.prompts_per_step_of(num_train_prompts), self.data.rollout_batch_size is not None
        default = EASYR1_PROMPTS_PER_UPDATE if is_set and per_step % EASYR1_PROMPTS_PER_UPDATE == 0 else per_step
        return model.global_batch_size or default

    @property
    def prompts_per_update(self) -> int:
        """The prompts of an update of the policy."""
        return self.prompts_per_update_of(self.worker.actor)

    @property
    def prompts_per_round(self) -> int:
        """The prompts of a sampling round of online filtering."""
        return self.data.mini_rollout_batch_size or self.prompts_per_step

    @property
    def oldest_age(self) -> int:
        """How many steps older than the newest weights a token may be when it is learned from."""
        algorithm, rollout = self.algorithm, self.worker.rollout
        if algorithm.samples_continuously:
            return algorithm.max_staleness
        carried = rollout.max_carried_steps + 1 if rollout.oversampling > 0 else 0
        kept = algorithm.online_filtering and algorithm.filter_surplus == "keep"
        return max(algorithm.max_staleness, carried) + kept

    @property
    def longest_sequence(self) -> int:
        """The maximum number of tokens of prompt and completion, in training and validation."""
        validated = self.worker.rollout.val_override_config.max_tokens or 0
        return self.data.max_prompt_length + max(self.data.max_response_length, validated)

    @property
    def context_length(self) -> int:
        """The maximum number of tokens per sequence of the rollout engine."""
        return self.worker.rollout.max_model_len or self.longest_sequence

    # -- workers --

    @property
    def num_workers(self) -> int:
        """The number of workers that train.

        A single worker is the process of the run itself, unless others sample.
        """
        return self.trainer.nnodes * self.trainer.n_gpus_per_node

    @property
    def has_workers(self) -> bool:
        """Whether workers do the work, and not the process of the run itself."""
        return self.num_workers > 1 or not self.worker.hybrid_engine

    @property
    def num_samplers(self) -> int:
        """The number of workers that sample: those that train, unless they are separate."""
        rollout = self.worker.rollout
        return self.num_workers if self.worker.hybrid_engine else rollout.nnodes * rollout.n_gpus_per_node

    @property
    def num_devices(self) -> int:
        """The number of workers, of both pools if they are separate."""
        return self.num_workers + (0 if self.worker.hybrid_engine else self.num_samplers)

    @property
    def workers_per_machine(self) -> int:
        """The number of workers that share a machine: of both pools if each has one machine.

        Two pools of one machine each may be on two machines; each worker then has spare CPUs.
        """
        trainer, rollout = self.trainer, self.worker.rollout
        if self.worker.hybrid_engine:
            return trainer.n_gpus_per_node
        if trainer.nnodes == rollout.nnodes == 1:
            return trainer.n_gpus_per_node + rollout.n_gpus_per_node
        return max(trainer.n_gpus_per_node, rollout.n_gpus_per_node)

    @property
    def workers_per_copy(self) -> int:
        """The number of workers that share one sharded copy of the policy."""
        return self.workers_per_copy_of(self.worker.actor)

    def workers_per_copy_of(self, model: TrainedConfig) -> int:
        """Return how many workers share one sharded copy of a model: fsdp_size, or all."""
        size = model.fsdp.fsdp_size
        return size if 0 < size < self.num_workers else self.num_workers

    @property
    def num_shares(self) -> int:
        """The number of shares into which the groups of an update are divided.

        There is one for each worker, or for the workers that compute their rows together.
        """
        return self.num_workers // self.worker.actor.ulysses_sequence_parallel_size

    def is_on_host(self, fsdp: FsdpConfig) -> bool:
        """Return whether FSDP keeps weights, gradients and optimizer states in host memory.

        It shards nothing for a single worker, and then does not.
        """
        return fsdp.enable_cpu_offload and self.num_workers > 1

    # -- the loss, and what it needs --

    @property
    def needs_reference(self) -> bool:
        """Whether there is a KL term, which needs a reference policy."""
        return self.algorithm.has_kl and not self.trainer.val_only

    @property
    def has_full_kl(self) -> bool:
        """Whether the KL is computed over the whole vocabulary.

        The log-probabilities of the sampled tokens do not suffice for it.
        """
        return self.needs_reference and self.algorithm.kl_penalty == "full"

    @property
    def learns_without_advantage(self) -> bool:
        """Whether the loss of a token whose advantage is zero can have a gradient."""
        actor = self.worker.actor
        regularizes = actor.entropy_coeff > 0 or actor.router_aux_loss_coef > 0
        return self.algorithm.kl_in_loss is not None or regularizes or self.shares_trunk

    @property
    def mismatch_correction(self) -> Literal["off", CorrectionKind]:
        """The importance-sampling correction."""
        may_be_older = self.worker.rollout.oversampling > 0 or self.algorithm.max_staleness > 0
        return self.algorithm.mismatch_correction or ("truncate" if may_be_older else "off")

    @property
    def loss_fixed_length(self) -> int:
        """The tokens by which loss_avg_mode=seq_fixed divides."""
        return self.worker.actor.loss_fixed_length or self.data.max_response_length

    # -- checks and validation --

    @property
    def parity_tolerance(self) -> float:
        """The mean |log-probability difference| in nats above which the run stops.

        It compares rollout engine and trainer on the same tokens. In float32 they agree to about
        1e-5; in 16 bits healthy runs stay near 0.01.
        """
        rollout, actor = self.worker.rollout, self.worker.actor
        all_fp32 = rollout.dtype == actor.fsdp.mp_param_dtype == actor.weight_dtype == "fp32"
        return rollout.parity_tolerance or (1e-3 if all_fp32 else 0.1)

    @property
    def validates_first(self) -> bool:
        """Whether the run validates before its first step."""
        chosen = self.trainer.val_before_train
        return bool(self.data.val_files) if chosen is None else chosen
