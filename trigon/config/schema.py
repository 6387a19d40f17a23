"""Every option once: its type, its default, its bounds and a sentence.

Sections, keys and defaults are EasyR1's, so that its users' files run here; where a default differs, or the key is our
own, the sentence says so. Knows no files and no command line (load.py), no older names (legacy.py) and no arithmetic
between options (load.py, plan.py). A key stands here only if this version reads it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """A frozen group of options that knows no key but its own."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True, hide_input_in_errors=True
    )


_SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def _short_dtype(name: Any) -> Any:
    return _SHORT_DTYPES.get(name, name) if isinstance(name, str) else name


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _as_files(value: Any) -> Any:
    return () if value is None or value == "" else _as_tuple(value)


Dtype = Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(_short_dtype)]
"""A floating-point format; float32, bfloat16 and float16 are accepted and shortened."""

Files = Annotated[tuple[str, ...], BeforeValidator(_as_files)]
"""Datasets; a single one may be written without the brackets of a list."""

Sink = Literal["console", "file", "mlflow", "swanlab", "tensorboard", "wandb"]


class DataConfig(Section):
    """Where prompts come from, and how they are made."""

    train_files: Files = ()
    """Training prompts: a hub id, a file (parquet, json, jsonl, csv) or a folder, `@split` chooses a split (train); or
    a list of such."""

    train_weights: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """How often an epoch goes through each of train_files: 2 is twice, 0.5 a half of it; empty: once. Ours."""

    val_files: Files = ()
    """Validation prompts, written like train_files."""

    prompt_key: str = "prompt"
    """Column with the question; each `<image>` in it stands for one image of the row, in order."""

    answer_key: str = "answer"
    """Column with the ground truth that the reward function is given."""

    image_key: str = "images"
    """Column with a row's images (PIL, bytes, mapping or path); absent or empty means a text-only row."""

    video_key: str = "videos"
    """Column with a row's videos (paths or bytes), each a `<video>` in the question; absent or empty means none."""

    image_dir: str | None = None
    """Folder that relative image and video paths start from; null: the folder of the dataset."""

    video_fps: float = Field(default=2.0, gt=0)
    """Frames taken from each second of a video. Raising it costs prompt tokens."""

    max_video_frames: int = Field(default=768, ge=2)
    """Frames a video gives at most, evenly spread; a longer one is taken more sparsely. Ours."""

    max_prompt_length: int = Field(default=512, ge=1)
    """Tokens a prompt may have, image tokens included. Raising it admits more rows and needs more memory."""

    max_response_length: int = Field(default=512, ge=1)
    """Tokens an answer may have before it is cut. Raising it costs generation time and memory."""

    rollout_batch_size: int = Field(default=512, ge=1)
    """Prompts of one training step. Raising it makes each step longer, its gradient less noisy, and data staler."""

    mini_rollout_batch_size: int | None = Field(default=None, ge=1)
    """Prompts sampled in one round of algorithm.online_filtering; null: rollout_batch_size."""

    val_batch_size: int = Field(default=-1, ge=-1)
    """Prompts validated at a time; -1: all at once. Raising it is faster and needs more host memory for images."""

    format_prompt: str | None = None
    """Jinja template around each question, which it sees as `content`: a file, or the template itself (has `{{`)."""

    system_prompt: str | None = None
    """System message before each question; null: what the chat template does on its own. Ours."""

    override_chat_template: str | None = None
    """Jinja chat template used instead of the model's: a file, or the template itself (has `{{`)."""

    shuffle: bool = True
    """Draw training prompts in a seeded random order, a new one each epoch; false: in the dataset's order."""

    seed: int = Field(default=1, ge=0)
    """Seed of that order."""

    min_pixels: int | None = Field(default=262144, ge=1)
    """Pixels to which smaller images are enlarged; null: the model's own limit. Raising it costs prompt tokens."""

    max_pixels: int | None = Field(default=4194304, ge=1)
    """Pixels to which larger images are reduced; null: the model's own limit. Raising it costs prompt tokens."""

    max_image_pixels: int = Field(default=64_000_000, ge=1)
    """Pixels above which an image is refused before it is decoded, so that no file can exhaust memory. Ours."""

    filter_overlong_prompts: bool = True
    """Set prompts above max_prompt_length aside, with a count; false: one such prompt is an error."""

    filter_overlong_prompts_workers: int = Field(default=16, ge=1)
    """Threads that measure prompts and prepare images. Raising it shortens the start where there are CPU cores."""

    max_bad_row_fraction: float = Field(default=0.01, ge=0, le=1)
    """Share of unusable rows (an unreadable image, markers that do not match) above which the run stops. Ours."""


class AlgorithmConfig(Section):
    """Advantages, the Kullback-Leibler penalty, which groups are learned from, and what is done about rounding."""

    adv_estimator: Literal[
        "grpo",
        "grpo_passk",
        "rloo",
        "reinforce_plus_plus",
        "remax",
        "dr_grpo",
        "grpo_batch",
        "reinforce_plus_plus_baseline",
        "opo",
        "gdpo",
    ] = "grpo"
    """How rewards become advantages; docs/algorithms.md has a section for each. EasyR1 has the first five."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of a reward for each token before it (reinforce_plus_plus). Lowering it credits the last tokens
    most."""

    reward_weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each part of the reward that gdpo normalizes by itself; empty: 1 for all but `overall`. Ours."""

    disable_kl: bool = False
    """Train without a reference model: no KL term, and the memory of one copy of the weights saved."""

    use_kl_loss: bool = False
    """Put the KL term into the loss; false: subtract it from the reward of each answer."""

    kl_penalty: Literal["kl", "abs", "mse", "low_var_kl", "full"] = "kl"
    """KL estimator of a token: log-ratio, its absolute value, half its square, k3 (unbiased, low variance), or full:
    the exact KL over the whole vocabulary."""

    kl_coef: float = Field(default=1e-3, ge=0)
    """Weight of the KL term. Raising it keeps the policy nearer to the reference and slows learning."""

    kl_type: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: the weight follows kl_target, where the KL is subtracted from the reward."""

    kl_horizon: float = Field(default=10000.0, gt=0)
    """Answers over which the adaptive weight moves by its relative error. Raising it makes it slower."""

    kl_target: float = Field(default=0.1, gt=0)
    """KL in nats per token that the adaptive weight steers to. Raising it lets the policy go further."""

    online_filtering: bool = False
    """Learn only from groups whose mean filter_key lies strictly between filter_low and filter_high, and sample more
    prompts until rollout_batch_size of them are found (DAPO's dynamic sampling)."""

    filter_key: str = "overall"
    """Number of the reward function's reply that online_filtering looks at."""

    filter_low: float = 0.01
    """Mean at or below which a group is filtered out, as all wrong."""

    filter_high: float = 0.99
    """Mean at or above which a group is filtered out, as all right."""

    filter_surplus: Literal["drop", "keep"] = "drop"
    """What becomes of groups found beyond rollout_batch_size: dropped, or kept for the next step, where they are one
    step old. Ours."""

    overlong_filtering: bool = False
    """Leave answers that were cut at max_response_length out of the loss; their rewards still count in their group
    (DAPO, section 3.4). Ours."""

    mismatch_correction: Literal["off", "truncate", "mask", "reject"] = "off"
    """What is done where engine and trainer disagree about a token's probability, whose ratio weighs the loss: truncate
    caps the ratio at mismatch_high, mask leaves out what lies outside mismatch_low and mismatch_high, reject leaves
    whole answers out and weighs nothing. Ours."""

    mismatch_level: Literal["token", "sequence"] = "token"
    """Whose ratio: of each token, or of a whole answer as the geometric mean over its tokens. Ours."""

    mismatch_low: float = Field(default=0.5, ge=0, le=1)
    """Ratio below which mask and reject leave out. Raising it is stricter. Ours."""

    mismatch_high: float = Field(default=2.0, ge=1)
    """Ratio above which truncate caps, and mask and reject leave out. Lowering it is stricter. Ours."""


class LoraConfig(Section):
    """Low-rank adapters, which are trained in place of the weights."""

    rank: int = Field(default=0, ge=0)
    """Inner width of an adapter; 0: no adapters, all weights are trained. Raising it learns more, in more memory."""

    alpha: int = Field(default=64, ge=1)
    """An adapter's output is multiplied by alpha / rank. Raising it acts like a higher learning rate."""

    target_modules: str = "all-linear"
    """Layers that get an adapter: all-linear (every one but the head), names separated by commas, or one regular
    expression."""

    exclude_modules: str | None = None
    """Layers that get none, written likewise; `.*visual.*` leaves the vision tower out. null: no exception."""


class ModelConfig(Section):
    """The network that is trained."""

    model_path: str | None = None
    """Model to start from: a hub id or a local folder."""

    tokenizer_path: str | None = None
    """Tokenizer and image processor; null: those of model_path."""

    override_config: dict[str, Any] = Field(default_factory=dict)
    """Values set in the model's own configuration before its weights are loaded."""

    enable_gradient_checkpointing: bool = True
    """Compute activations again in the backward pass: about a third more time for much less memory."""

    trust_remote_code: bool = False
    """Run code that the model's repository brings along. EasyR1's default is true."""

    freeze_vision_tower: bool = False
    """Leave the vision tower as it is and train the rest: less memory and time."""

    vision_cache_gb: float = Field(default=4.0, ge=0)
    """GiB of host memory in which each worker remembers what a frozen vision tower, or one that LoRA leaves out, makes
    of images; 0: none. Raising it computes fewer images again; results do not change. Ours."""

    attention_kernel: Literal["auto", "sdpa", "varlen", "flex", "flash"] = "auto"
    """What computes attention: sdpa, exact and piece by piece; on a GPU also varlen (torch's, one call a layer), flex
    (torch's, compiled) and flash (the package flash-attn). auto: varlen on a GPU in 16 bits, else sdpa. Ours."""

    compile_layers: bool = False
    """Compile the norms and MLPs of each layer (torch.compile), which fuses what is not a matrix product in them; the
    first passes take a minute or more. Off, since its gain has not been measured here. Ours."""

    use_liger_kernel: bool = False
    """Norms and gated activations by liger-kernel's fused functions, on a GPU. Off, since its gain has not been
    measured here. Ours."""

    lora: LoraConfig = Field(default_factory=LoraConfig)


class OptimConfig(Section):
    """The optimizer and its learning rate."""

    lr: float = Field(default=1e-6, gt=0)
    """Learning rate after warm-up. Raising it learns faster until training becomes unstable."""

    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """AdamW's decay rates of the first and the second moment. Raising them smooths over more updates."""

    weight_decay: float = Field(default=1e-2, ge=0)
    """Share of lr by which matrices shrink in each update; vectors never do. Raising it keeps weights smaller."""

    strategy: Literal["adamw", "adamw_bf16"] = "adamw"
    """adamw: states in the weights' own format; adamw_bf16: bfloat16 weights without float32 copies, compensated."""

    lr_warmup_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of all training steps over which the learning rate rises to lr."""

    lr_warmup_steps: int | None = Field(default=None, ge=0)
    """The same as a number of training steps; null: lr_warmup_ratio decides."""

    min_lr_ratio: float | None = Field(default=None, ge=0, le=1)
    """Share of lr at which the cosine ends; null: 0."""

    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    """Learning rate after warm-up: as it is, or down a half cosine to min_lr_ratio at the last update."""


class FsdpConfig(Section):
    """Number formats of the trained model, and how it is sharded over several workers."""

    torch_dtype: Dtype | None = None
    """Format the weights are kept and updated in; null: fp32."""

    mp_param_dtype: Dtype = "bf16"
    """Format the forward and backward passes compute in. bf16 is fast on a GPU; fp32 is exact."""

    mp_reduce_dtype: Dtype = "fp32"
    """Format in which several workers' gradients are summed."""

    enable_full_shard: bool = True
    """Gather each layer again for the backward pass; false keeps it from the forward on: faster, for more memory."""

    fsdp_size: int = Field(default=-1, ge=-1)
    """Workers that share one copy of the model, each copy on as many; -1, 0, or all of them: there is one copy."""

    enable_cpu_offload: bool = False
    """Keep weights, gradients and optimizer states in host memory always: the least device memory, and slow."""


class OffloadConfig(Section):
    """What waits in host memory while completions are sampled."""

    offload_params: bool = False
    """Move the weights to the CPU while they are not trained: frees device memory for sampling, costs transfers."""

    offload_optimizer: bool = False
    """Move the optimizer's states to the CPU between updates: frees twice the weights' memory, costs transfers."""


class ActorConfig(Section):
    """The policy's update."""

    global_batch_size: int = Field(default=256, ge=1)
    """Prompts of one optimizer update, each with its n answers. Lowering it makes more updates of a step's data."""

    micro_batch_size_per_device_for_update: int = Field(default=4, ge=1)
    """k: a forward and backward pass takes at most k * (max_prompt_length + max_response_length) tokens, whatever the
    number of answers in them. Raising it is faster and needs more memory; results do not change."""

    micro_batch_size_per_device_for_experience: int = Field(default=16, ge=1)
    """The same token budget, for passes without gradient (old and reference log-probabilities)."""

    max_grad_norm: float = Field(default=1.0, gt=0)
    """Norm to which a larger gradient is scaled down. Raising it lets outliers move the policy more."""

    clip_ratio_low: float = Field(default=0.2, ge=0, le=1)
    """How far below 1 a token's probability ratio still counts; cispo: 1 is no bound. Raising it allows larger updates
    downwards."""

    clip_ratio_high: float = Field(default=0.3, ge=0)
    """How far above 1 a token's probability ratio still counts. Raising it helps rare tokens to rise."""

    clip_ratio_dual: float = Field(default=3.0, gt=1)
    """Bound on the ratio for negative advantages. Raising it lets bad answers pull harder."""

    loss_avg_mode: Literal["token", "seq", "seq_fixed"] = "token"
    """token: each token of the update weighs the same; seq: each answer does, whatever its length; seq_fixed: an
    answer's tokens are added up and divided by loss_fixed_length (Dr.GRPO)."""

    loss_fixed_length: int | None = Field(default=None, ge=1)
    """Tokens that seq_fixed divides by; null: data.max_response_length. Raising it makes updates smaller. Ours."""

    loss_type: Literal["default", "gspo", "gspo_token", "cispo", "sapo"] = "default"
    """The policy loss: default is the clipped ratio with a dual bound; docs/algorithms.md has a section for each."""

    cispo_cap: float | None = Field(default=None, ge=1)
    """Largest weight that cispo gives a token, at least 1: below it, even an unchanged policy's gradient would shrink;
    null: 1 + clip_ratio_high. Ours."""

    tau_positive: float = Field(default=1.0, gt=0)
    """Steepness of sapo's gate for positive advantages. Raising it trusts far-off tokens less."""

    tau_negative: float = Field(default=1.05, gt=0)
    """Steepness of sapo's gate for negative advantages."""

    entropy_coeff: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus in the loss. Raising it keeps answers varied, and costs a little time."""

    ppo_epochs: int = Field(default=1, ge=1)
    """Times that the data of a step are used. Raising it learns more from them, and further off-policy."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    fsdp: FsdpConfig = Field(default_factory=FsdpConfig)
    offload: OffloadConfig = Field(default_factory=OffloadConfig)


class ValOverride(Section):
    """What validation samples differently from training; null: as in training."""

    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature; 0 takes the likeliest token each time."""

    top_p: float | None = Field(default=None, gt=0, le=1)
    """Probability mass sampled from."""

    top_k: int | None = Field(default=None, ge=-1)
    """Likeliest tokens sampled from; -1: all."""

    n: int | None = Field(default=None, ge=1)
    """Answers to each prompt. Raising it makes the validation figures less noisy, and dearer."""

    ignore_eos: bool | None = None
    """Sample on after the end-of-sequence token."""

    seed: int | None = Field(default=None, ge=0)
    """Sampling seed."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens an answer may have; null: data.max_response_length."""


class RolloutConfig(Section):
    """How completions are sampled."""

    name: Literal["vllm", "transformers"] = "vllm"
    """Engine that samples: vllm, or transformers, which is slow but needs nothing else."""

    n: int = Field(default=1, ge=1)
    """Answers to each prompt, compared with each other: at least 2 to train. Raising it costs generation and helps
    where few answers are right."""

    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the trainer divides its logits by it too. Raising it makes answers more varied."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Probability mass sampled from; 1: all of it. The trainer's log-probabilities do not know of the cut."""

    top_k: int = Field(default=-1, ge=-1)
    """Likeliest tokens sampled from; -1: all. The trainer's log-probabilities do not know of the cut."""

    seed: int = Field(default=1, ge=0)
    """Sampling seed; each answer gets its own, made of this, the step, the prompt and its number."""

    limit_images: int = Field(default=0, ge=0)
    """Images a prompt may have; 0: as many as the engine allows."""

    dtype: Dtype = "bf16"
    """Format the engine keeps its weights and computes in."""

    gpu_memory_utilization: float = Field(default=0.6, gt=0, le=1)
    """Share of the GPU's memory that vLLM may fill while it samples. Raising it runs more answers at once."""

    ignore_eos: bool = False
    """Sample on after the end-of-sequence token, to the full length; for measuring speed."""

    enforce_eager: bool = False
    """Run vLLM without CUDA graphs: a faster start and less memory, slower sampling."""

    enable_chunked_prefill: bool = False
    """Let vLLM split long prompts over several of its batches."""

    enable_prefix_caching: bool = True
    """Let vLLM compute the shared beginning of prompts once. Ours."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Workers that one copy of the model is spread over for sampling; a divisor of all of them. Raising it leaves more
    memory for each. EasyR1's default is 2."""

    max_model_len: int | None = Field(default=None, ge=1)
    """Tokens that vLLM plans for, prompt and answer together; null: max_prompt_length + max_response_length."""

    max_num_batched_tokens: int = Field(default=8192, ge=1)
    """Tokens in one batch of vLLM. Raising it speeds prompts up and needs more memory."""

    disable_log_stats: bool = True
    """Keep vLLM's own statistics out of the log."""

    disable_tqdm: bool = False
    """Show no progress bar while sampling."""

    parity_tolerance: float | None = Field(default=None, gt=0)
    """Mean |log-probability difference| between engine and trainer at which the run stops, in nats; null: 1e-3 where
    both compute in fp32, else 0.1. Ours."""

    val_override_config: ValOverride = Field(default_factory=ValOverride)


class RefFsdpConfig(Section):
    """Number format and place of the reference model."""

    torch_dtype: Dtype | None = None
    """Format the reference is kept and computed in; null: bf16."""

    enable_full_shard: bool = True
    """Let go of each layer after its part of a pass; false keeps what was gathered to the end of the pass."""

    enable_cpu_offload: bool = True
    """Keep the reference in host memory between its passes: frees device memory, costs one transfer a step."""


class RefOffloadConfig(Section):
    """The second of EasyR1's two names for keeping the reference in host memory."""

    offload_params: bool = False
    """As worker.ref.fsdp.enable_cpu_offload: either suffices."""


class RefConfig(Section):
    """The reference model: the policy as it was at the start."""

    fsdp: RefFsdpConfig = Field(default_factory=RefFsdpConfig)
    offload: RefOffloadConfig = Field(default_factory=RefOffloadConfig)


class RewardConfig(Section):
    """How answers are scored."""

    reward_function: str | None = None
    """`file.py:function` (function `main` if left out), or the name of one that is shipped (docs/rewards.md)."""

    reward_function_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the function."""

    skip_special_tokens: bool = True
    """Leave special tokens out of the text that is scored."""

    num_cpus: int = Field(default=1, ge=1)
    """Processes that score. Raising it scores more answers at a time."""

    timeout_seconds: float = Field(default=10.0, gt=0)
    """Seconds an answer may take to score; then its process is killed and the answer left out. Ours."""

    max_failed_fraction: float = Field(default=0.1, ge=0, le=1)
    """Share of a step's answers that may fail to be scored before the run stops. Ours."""


class WorkerConfig(Section):
    """What happens to a batch: sampled, scored, learned from."""

    actor: ActorConfig = Field(default_factory=ActorConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    ref: RefConfig = Field(default_factory=RefConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)


class TrainerConfig(Section):
    """How long, how often, and where to."""

    total_epochs: int = Field(default=15, ge=1)
    """Times that the training prompts are gone through."""

    max_steps: int | None = Field(default=None, ge=1)
    """Training steps, whatever total_epochs says; null: as many as the epochs have."""

    project_name: str = Field(default="easy_r1", min_length=1)
    """Project the run is filed under, in trackers and in the checkpoint folder."""

    experiment_name: str = Field(default="demo", min_length=1)
    """Name of the run; starting again under the same name resumes it."""

    logger: Annotated[tuple[Sink, ...], BeforeValidator(_as_tuple)] = ("console", "file")
    """Where metrics go. EasyR1's default is console and wandb, which wants an account."""

    nnodes: int = Field(default=1, ge=1)
    """Machines; above 1, of a Ray cluster that is already there."""

    n_gpus_per_node: int = Field(default=1, ge=1)
    """Workers on each machine, a GPU each, or, where the machines have none, some CPU cores. EasyR1's default is 8."""

    worker_timeout_seconds: float = Field(default=3600.0, gt=0)
    """Seconds that one call to the workers (sampling a step, one update) may take before the run is ended. Ours."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto: a GPU where there is one. Ours."""

    auto_micro_batch: bool = False
    """Measure before the first step how many tokens a pass may take on this device, and let that decide instead of
    worker.actor.micro_batch_size_per_device_for_update and micro_batch_size_per_device_for_experience. Ours."""

    max_try_make_batch: int = 20
    """Rounds of online_filtering in one step, those that find nothing included; then the step trains on what there is;
    0 or below: no limit."""

    profile_steps: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Training steps of which a trace is written into the run folder's `profile/`, for Perfetto; it makes them slower,
    and takes tens of MB each. Ours."""

    val_freq: int = Field(default=-1, ge=-1)
    """Training steps between validations; 0 or -1: none but before and after."""

    val_before_train: bool = True
    """Validate before the first step."""

    val_only: bool = False
    """Validate once and stop."""

    val_generations_to_log: int = Field(default=0, ge=0)
    """Validation answers shown at each validation."""

    save_freq: int = Field(default=-1, ge=-1)
    """Training steps between checkpoints; 0 or -1: only the last step's."""

    save_limit: int = Field(default=-1, ge=-1)
    """Checkpoints kept, newest first, besides the best; 0 or -1: all. Raising it needs disk."""

    save_model_only: bool = False
    """Save weights without optimizer states: smaller, and training cannot go on from them."""

    save_in_background: bool = True
    """Copy what a checkpoint holds into host memory and write it while training goes on; false: wait. Ours."""

    save_checkpoint_path: str | None = None
    """Folder of the run; null: checkpoints/project_name/experiment_name."""

    load_checkpoint_path: str | None = None
    """Checkpoint to go on from (its global_step folder); null: find_last_checkpoint decides."""

    find_last_checkpoint: bool = True
    """Go on from the last checkpoint in the folder of the run, if there is one."""


class Config(Section):
    """A whole run."""

    data: DataConfig = Field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    worker: WorkerConfig = Field(default_factory=WorkerConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
