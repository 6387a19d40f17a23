"""Checks across options: problems, missing files and warnings."""

from pathlib import Path

import pytest

from support.options import NEEDED, refusal
from trigon.config.checks import find_device_warnings
from trigon.config.load import load_config
from trigon.config.schema import Config
from trigon.errors import ConfigError

GAE = "algorithm.adv_estimator=gae"
GDPO = "algorithm.adv_estimator=gdpo"
SHARED = f"{GAE} worker.critic.share_trunk=true"
SEPARATE = "worker.hybrid_engine=false"
STREAM = f"{SEPARATE} algorithm.max_staleness=4 worker.rollout.n_gpus_per_node=2"
OVERSAMPLING = "worker.rollout.oversampling=0.25"
ADAPTIVE = "algorithm.kl_type=adaptive data.rollout_batch_size=512 worker.actor.global_batch_size=128"
FILTERING = "algorithm.online_filtering=true"
BF16, FP16 = "worker.actor.fsdp.torch_dtype=bf16", "worker.actor.fsdp.torch_dtype=fp16"
EXACT, EXACT_CRITIC = (f"worker.{model}.fsdp.mp_param_dtype=fp32" for model in ("actor", "critic"))
ADAMW_BF16, LORA = "worker.actor.optim.strategy=adamw_bf16", "worker.actor.model.lora.rank=8"
OFFLOAD, KEEP = "model.enable_activation_offload=true", "model.enable_gradient_checkpointing=false"
SMALL_BATCH, UNSPLIT = "worker.rollout.max_num_batched_tokens=1000", "worker.rollout.enable_chunked_prefill=false"


def problem(overrides: str) -> str:
    return refusal(*overrides.split())


def warnings(overrides: str) -> tuple[str, ...]:
    return load_config(None, (*NEEDED, *overrides.split())).warnings


def test_defaults_alone_report_every_missing_option():
    with pytest.raises(ConfigError) as caught:
        load_config(None, ())
    assert [line.partition(" ")[0] for line in str(caught.value).split("\n  - ")[1:]] == [
        "worker.actor.model.model_path",
        "worker.reward.reward_function",
        "data.train_files",
    ]


PROBLEMS = [
    # workers
    ("worker.rollout.tensor_parallel_size=2", "tensor_parallel_size is 2", "1 x 1 = 1 workers", "set it to 1"),
    (
        "trainer.nnodes=3 trainer.n_gpus_per_node=2 worker.rollout.tensor_parallel_size=4",
        "(trainer.nnodes x trainer.n_gpus_per_node)",
        "set it to 1 or 2 or 3 or 6",
    ),
    (
        "trainer.n_gpus_per_node=2 worker.rollout.tensor_parallel_size=2 worker.rollout.name=transformers",
        "only vllm",
    ),
    ("trainer.n_gpus_per_node=4 worker.actor.fsdp.fsdp_size=3", "worker.actor.fsdp.fsdp_size is 3", "1 x 4 = 4"),
    (f"{GAE} trainer.n_gpus_per_node=4 worker.critic.fsdp.fsdp_size=3", "worker.critic.fsdp.fsdp_size is 3"),
    ("trainer.n_gpus_per_node=4 worker.actor.ulysses_sequence_parallel_size=3", "is 3", "set it to 1 or 2 or 4"),
    ("worker.actor.model.use_liger_kernel=true worker.actor.model.compile_layers=true", "set one of them"),
    ("algorithm.max_staleness=1", f"set {SEPARATE}, or max_staleness=0"),
    (f"{SEPARATE} worker.rollout.partial=continue", "Set max_staleness=2, or partial=finish"),
    ("worker.rollout.partial=continue", SEPARATE, "algorithm.max_staleness above 1"),
    (
        f"{SEPARATE} worker.rollout.n_gpus_per_node=3 worker.rollout.tensor_parallel_size=2",
        "1 x 3 = 3 workers (worker.rollout.nnodes x worker.rollout.n_gpus_per_node)",
    ),
    # sizes
    *(
        (
            f"data.rollout_batch_size={per_step} worker.actor.global_batch_size={per_update}",
            f"data.rollout_batch_size ({per_step}",
            f"worker.actor.global_batch_size ({per_update}",
            f"data.rollout_batch_size={steps}, or worker.actor.global_batch_size={updates};",
        )
        for per_step, per_update, steps, updates in ((100, 64, "64 or 128", "50 or 100"), (16, 64, "64", "16"))
    ),
    (f"{GAE} data.rollout_batch_size=512 worker.critic.global_batch_size=100", "worker.critic.global_batch_size (100"),
    (f"{GAE} trainer.critic_warmup=3 trainer.max_steps=3", "trainer.critic_warmup is 3", "would never learn"),
    ("worker.rollout.max_model_len=1000", "prompt (512)", "set it to at least 1024, or leave it out"),
    ("worker.rollout.max_model_len=1000 worker.rollout.name=transformers", "set it to at least 1024"),
    ("worker.rollout.max_model_len=1024 worker.rollout.val_override_config.max_tokens=1012", "at least 1524"),
    (f"{SMALL_BATCH} {UNSPLIT}", "at least 1024, or worker.rollout.enable_chunked_prefill=true"),
    (f"worker.rollout.max_model_len=9000 {UNSPLIT}", "set it to at least 9000"),
    ("worker.rollout.top_k=0", "worker.rollout.top_k is 0", "-1"),
    ("worker.rollout.val_override_config.top_k=0", "worker.rollout.val_override_config.top_k is 0"),
    ("data.val_batch_size=0", "data.val_batch_size is 0; set -1"),
    ("data.min_pixels=5000000 data.max_pixels=4194304", "data.min_pixels (5000000)", "data.max_pixels (4194304)"),
    ("data.train_files=[a/b,a/c] data.train_weights=[1,2,0.5]", "has 3 weights", "data.train_files 2"),
    # number formats
    (BF16, f"{BF16[:-5]} is bf16", "learning rate, 1e-06", ADAMW_BF16, "worker.actor.fsdp.torch_dtype=fp32"),
    *((f"{FP16} {other}", "torch_dtype is fp16", f"{BF16} {ADAMW_BF16}") for other in ("", ADAMW_BF16)),
    *(
        (f"worker.actor.fsdp.mp_param_dtype=fp16 {other}", "mp_param_dtype is fp16", "set worker.actor.fsdp.mp_param")
        for other in ("", LORA)
    ),
    (f"{GAE} worker.critic.fsdp.torch_dtype=bf16", "worker.critic.optim.strategy=adamw_bf16"),
    (f"{GAE} worker.critic.fsdp.mp_param_dtype=fp16", "worker.critic.fsdp.mp_param_dtype is fp16"),
    *(
        (f"{BF16} {EXACT} {other}", "mp_param_dtype is fp32", "weights are in bf16", "torch_dtype=fp32")
        for other in (ADAMW_BF16, LORA)
    ),
    (
        f"{GAE} worker.critic.fsdp.torch_dtype=bf16 worker.critic.optim.strategy=adamw_bf16 {EXACT_CRITIC}",
        "worker.critic.fsdp.mp_param_dtype is fp32",
    ),
    *(
        (
            f"{GAE} worker.{model}.{OFFLOAD} worker.{model}.{KEEP}",
            f"worker.{model}.model.enable_activation_offload is true without worker.{model}.model.enable_gradient",
            "set both to true",
        )
        for model in ("actor", "critic")
    ),
    # algorithms
    *(
        (
            f"worker.rollout.n=1 algorithm.adv_estimator={estimator}",
            f"worker.rollout.n is 1, but {estimator}",
            "at least 2",
            "reinforce_plus_plus or remax",
        )
        for estimator in ("grpo", "opo")
    ),
    (f"{GDPO} algorithm.kl_coef=0.01", "algorithm.use_kl_loss=true, or algorithm.disable_kl=true"),
    (f"{GDPO} algorithm.disable_kl=true algorithm.reward_weights.accuracy=0", "algorithm.reward_weights"),
    ('worker.reward.reward_function=[{"function":math,"weight":0},{"function":r1v,"weight":0}]', "are all 0"),
    (f"{FILTERING} algorithm.filter_low=0.9 algorithm.filter_high=0.9", "filter_low (0.9)", "filter_high (0.9)"),
    *(
        (f"algorithm.mismatch_correction=truncate worker.rollout.{cut}", cut, "top_p=1 and top_k=-1")
        for cut in ("top_p=0.9", "top_k=50")
    ),
    (f"{OVERSAMPLING} worker.rollout.top_p=0.9", "mismatch_correction=truncate, the default with worker.rollout.overs"),
    (f"{SEPARATE} algorithm.max_staleness=1 worker.rollout.top_k=9", "the default with algorithm.max_staleness=1"),
    (f"{ADAPTIVE} algorithm.kl_horizon=100", "algorithm.kl_horizon is 100", "set kl_horizon above 409.6"),
    ("algorithm.overlong_filtering=true worker.rollout.ignore_eos=true", "set one of the two to false"),
    # validation and rewards
    ("data.val_files= trainer.val_before_train=true", "leave out trainer.val_before_train and trainer.val_freq"),
    ("data.val_files=null trainer.val_before_train=false trainer.val_freq=5", "data.val_files is not set"),
    ("data.val_files= trainer.val_before_train=false trainer.val_only=true", "data.val_files is not set"),
    ("data.train_files=", "data.train_files is not set"),
    ("worker.reward.reward_function=environment", "set worker.rollout.environment"),
    ("worker.reward.val_reward_function=[math,environment]", "worker.reward.val_reward_function=environment"),
    # environments and tools
    ("worker.rollout.environment=Maze", "worker.rollout.environment: 'Maze' is not file.py:Class or module:Class"),
    ("worker.rollout.environment=a.py:not-a-name", "'a.py:not-a-name' is not file.py:Class"),
    ("worker.rollout.environment=no/such.py:Maze", "there is no no/such.py (looked for /"),
    ("worker.rollout.environment=python:Maze", "worker.rollout.environment is python:Maze", "trigon.train"),
    ("worker.rollout.tools=[crop,python:search]", "worker.rollout.tools is python:search", "trigon.train"),
    ("worker.rollout.tools=corp", "'corp' is not file.py:function", "crop, python; did you mean crop?"),
    ("worker.rollout.tools=[a.b:search,crop,c.d:crop]", "2 functions of the name 'crop'"),
    ("worker.rollout.tools=crop worker.rollout.ignore_eos=true", "worker.rollout.ignore_eos is true"),
    # a critic on the policy's trunk
    *(
        (
            f"{SHARED} worker.actor.{other} worker.critic.{option}",
            f"worker.critic.{option} (worker.actor.{other})",
            "set worker.critic.share_trunk=false",
        )
        for option, other in (
            ("ppo_epochs=2", "ppo_epochs=1"),
            ("model.lora.rank=8", "model.lora.rank=0"),
            ("offload.offload_params=true", "offload.offload_params=false"),
        )
    ),
    ("algorithm.adv_estimator=grpo_pask", "did you mean grpo_passk?"),
    ("algorithm.kl_penalty=low_var", "did you mean low_var_kl?"),
    ("trainer.logger=[file,wandbb]", "did you mean wandb?"),
    ("worker.actor.cispo_cap=0.2", "worker.actor.cispo_cap is 0.2"),
    ("data.train_weights=[0]", "data.train_weights is [0]"),
]


@pytest.mark.parametrize(("overrides", "facts"), [(each[0], each[1:]) for each in PROBLEMS], ids=lambda each: str(each))
def test_what_cannot_run_is_refused_with_what_to_do(overrides, facts):
    message = problem(overrides)
    assert "problems in the configuration" not in message
    for fact in facts:
        assert fact in message


NO_WARNING = [
    "",
    *(f"trainer.n_gpus_per_node=4 worker.actor.fsdp.fsdp_size={size}" for size in (-1, 0, 2, 8)),
    *(f"worker.rollout.n=1 algorithm.adv_estimator={name}" for name in ("reinforce_plus_plus", "remax")),
    f"{SMALL_BATCH} worker.rollout.enable_chunked_prefill=true",
    f"{SMALL_BATCH} {UNSPLIT} worker.rollout.name=transformers",
    "trainer.val_only=true algorithm.mismatch_high=3",
    "worker.actor.loss_type=sapo worker.actor.tau_positive=2 worker.actor.model.lora.alpha=64",
    "algorithm.mismatch_correction=mask algorithm.mismatch_low=0.7 algorithm.mismatch_high=3",
    f"{OVERSAMPLING} algorithm.mismatch_high=3",
    "data.val_files= trainer.val_before_train=false trainer.val_freq=-1",
    "data.train_files=missing/train.parquet trainer.val_only=true",
    f"{BF16} {ADAMW_BF16}",
    "worker.actor.fsdp.mp_param_dtype=fp16 trainer.val_only=true",
    f"{BF16} {EXACT} trainer.val_only=true",
    *(f"{dtype} {untrained}" for dtype in (BF16, FP16) for untrained in (LORA, "trainer.val_only=true")),
    *(f"{EXACT} {other}" for other in ("", LORA, f"{BF16} {ADAMW_BF16} trainer.n_gpus_per_node=2")),
    f"{ADAPTIVE} algorithm.kl_horizon=10000",
    f"{ADAPTIVE} algorithm.kl_horizon=100 algorithm.kl_coef=0",
    "worker.actor.loss_type=cispo worker.actor.clip_ratio_low=1 worker.actor.cispo_cap=5",
    "worker.actor.loss_type=gspo_token worker.actor.clip_ratio_low=3e-4 worker.actor.clip_ratio_high=4e-4",
    f"{FILTERING} algorithm.filter_surplus=keep algorithm.mismatch_correction=truncate",
    f"{OVERSAMPLING} worker.rollout.max_carried_steps=2 worker.rollout.tools=[crop] {FILTERING}",
    f"{STREAM} {FILTERING} worker.rollout.oversampling=0.5 worker.rollout.tensor_parallel_size=2",
    f"{STREAM} worker.rollout.tools=[crop] worker.rollout.partial=continue algorithm.adv_estimator=remax",
    "data.format_prompt={{content}}Answer:please. data.override_chat_template={%-for-%}",
]


@pytest.mark.parametrize("overrides", NO_WARNING)
def test_what_fits_together_gives_no_warning(overrides):
    assert warnings(overrides) == ()


KEY = "sk-abcDEF1234567890abcd"
WARNINGS = [
    (
        f"worker.rollout.environment=games:Maze worker.rollout.environment_kwargs.api_key={KEY}",
        "worker.rollout.environment_kwargs has a secret on the command line",
        "env:NAME",
    ),
    ("algorithm.use_kl_loss=true", "low_var_kl"),
    ("algorithm.use_kl_loss=true algorithm.kl_penalty=mse algorithm.kl_type=adaptive", "algorithm.kl_type=adaptive"),
    ("algorithm.disable_kl=true algorithm.kl_type=adaptive", "no effect without algorithm.disable_kl=false"),
    ("worker.rollout.top_p=0.9", "worker.rollout.top_p=0.9"),
    ("algorithm.filter_surplus=keep", "algorithm.filter_surplus=keep has no effect without algorithm.online_filtering"),
    ("algorithm.lam=0.9", "algorithm.lam has no effect without algorithm.adv_estimator=gae"),
    ("worker.critic.ppo_epochs=2", "worker.critic has no effect without algorithm.adv_estimator=gae"),
    (f"{GAE} worker.critic.vf_coef=0.5", "worker.critic.vf_coef has no effect without worker.critic.share_trunk=true"),
    ("worker.actor.cispo_cap=5", "no effect without worker.actor.loss_type=cispo"),
    ("worker.actor.loss_type=cispo", "0.8", "clip_ratio_low=1"),
    ("worker.actor.loss_type=gspo", "0.0003 and 0.0004"),
    ("algorithm.adv_estimator=dr_grpo", "worker.actor.loss_avg_mode=seq_fixed"),
    (f"{FILTERING} algorithm.filter_surplus=keep", "algorithm.mismatch_correction=truncate"),
    (f"{OVERSAMPLING} worker.rollout.name=transformers", "worker.rollout.oversampling"),
    (f"{OVERSAMPLING} algorithm.mismatch_correction=off", "algorithm.mismatch_correction=truncate"),
    ("worker.rollout.nnodes=2", f"worker.rollout.nnodes has no effect without {SEPARATE}"),
    ("worker.rollout.max_turns=3", "no effect without worker.rollout.environment or worker.rollout.tools"),
    ("worker.rollout.tools=crop worker.rollout.environment_kwargs.size=3", "no effect without worker.rollout.env"),
    (
        f"{GAE} algorithm.lam_alpha=0.05 algorithm.lam=0.9",
        "algorithm.lam has no effect without algorithm.lam_alpha=null",
    ),
    ("algorithm.mismatch_high=3", "algorithm.mismatch_correction=truncate or mask or reject"),
    (f"{OVERSAMPLING} algorithm.mismatch_low=0.7", "algorithm.mismatch_correction=mask or reject"),
    ("worker.actor.clip_ratio_dual=5 worker.actor.loss_type=sapo", "worker.actor.loss_type=default or gspo"),
    ("worker.actor.tau_positive=2", "worker.actor.loss_type=sapo"),
    (f"{STREAM} {FILTERING} algorithm.filter_surplus=keep", "algorithm.max_staleness=0 or 1"),
    (f"{STREAM} {OVERSAMPLING} worker.rollout.max_carried_steps=2", "algorithm.max_staleness=0 or 1"),
    ("worker.rollout.environment_workers=3", "worker.rollout.environment or worker.rollout.tools"),
    ("worker.rollout.name=transformers worker.rollout.max_num_seqs=3", "worker.rollout.name=vllm"),
    ("worker.reward.readable=.", "worker.reward.confinement=strict"),
    ("data.val_files= trainer.val_before_train=false worker.reward.val_reward_function=r1v", "data.val_files"),
    ("trainer.save_images=false trainer.saved_image_side=99", "trainer.save_images=true"),
    ("trainer.watch.level=off trainer.watch.ignore=loss", "trainer.watch.level=warn or stop"),
    ("algorithm.filter_low=0.3", "algorithm.online_filtering=true"),
    ("algorithm.disable_kl=true algorithm.kl_coef=0.1", "algorithm.disable_kl=false"),
    ("algorithm.disable_kl=true worker.ref.fsdp.torch_dtype=fp32", "algorithm.disable_kl=false"),
    ("worker.actor.optim.min_lr_ratio=0.1", "worker.actor.optim.lr_scheduler_type=cosine"),
    ("worker.actor.optim.lr_warmup_ratio=0.1 worker.actor.optim.lr_warmup_steps=5", "optim.lr_warmup_steps=null"),
    ("worker.actor.model.lora.target_modules=q_proj", "worker.actor.model.lora.rank"),
    ("worker.rollout.tools=crop worker.rollout.enable_prefix_caching=false", "enable_prefix_caching=false"),
    ("worker.rollout.tools=crop worker.rollout.max_turns=1", "worker.rollout.max_turns=1"),
]


@pytest.mark.parametrize(("overrides", "facts"), [(each[0], each[1:]) for each in WARNINGS], ids=lambda each: str(each))
def test_an_ineffective_or_conflicting_option_gives_one_warning(overrides, facts):
    [warning] = warnings(overrides)
    for fact in facts:
        assert fact in warning


def test_a_file_of_easyr1_may_set_what_has_no_effect_and_a_user_who_sets_it_is_told(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("algorithm: {disable_kl: true, kl_coef: 0.1}\nworker: {actor: {model: {lora: {alpha: 32}}}}\n")
    assert load_config(path, NEEDED).warnings == ()
    [warning] = load_config(path, (*NEEDED, "worker.actor.kl_coef=0.2")).warnings[1:]  # an older name
    assert warning.startswith("algorithm.kl_coef has no effect")


@pytest.mark.parametrize("model", ["actor", "critic"])
def test_cpu_offload_of_a_single_worker_is_ignored_with_a_warning(model):
    given = f"{GAE} worker.{model}.fsdp.enable_cpu_offload=true"
    [warning] = set(warnings(given)) - set(warnings(GAE))
    assert f"worker.{model}.fsdp.enable_cpu_offload=true has no effect" in warning
    assert f"worker.{model}.offload.offload_params=true" in warning
    workers = " trainer.n_gpus_per_node=2"
    assert set(warnings(given + workers)) == set(warnings(GAE + workers))


def test_variables_for_reward_workers_are_names_without_values():
    message = problem("worker.reward.env=[HF_TOKEN,KEY=secret]")
    assert "worker.reward.env has 'KEY'" in message
    assert "secret" not in message
    assert load_config(None, (*NEEDED, "worker.reward.env=A_KEY")).config.worker.reward.env == ("A_KEY",)


def test_a_secret_under_the_older_name_of_an_option_is_exposed_too():
    _, exposed = warnings(f"worker.reward.score_function_kwargs.api_key={KEY}")
    assert "worker.reward.reward_function_kwargs has a secret on the command line" in exposed


ALL = {"model_runner": "v2", "async_scheduling": True, "enable_chunked_prefill": True}


@pytest.mark.parametrize(
    ("device", "rollout", "keys"),
    [
        ("cpu", ALL, ["model_runner=v2", "async_scheduling=true", "enable_chunked_prefill=true"]),
        ("cuda", ALL, []),
        ("cpu", ALL | {"name": "transformers"}, []),
        ("cpu", {"async_scheduling": False, "enable_chunked_prefill": False}, []),
        ("cuda", {"enable_chunked_prefill": False}, ["enable_chunked_prefill=false:"]),
    ],
)
def test_options_of_vllm_that_do_not_suit_the_device_are_warned_about(device, rollout, keys):
    found = find_device_warnings(Config(worker={"rollout": rollout}), device)
    assert [warning.split()[0] for warning in found] == [f"worker.rollout.{key}" for key in keys]


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "missing"),
    [
        ("data.format_prompt", "prompt.jinja", "prompt.jinja"),
        ("data.override_chat_template", "chat.jinja", "chat.jinja"),
        ("data.train_files", "rows/a.jsonl@train", "rows/a.jsonl"),
        ("data.val_files", "a/b/c@test", "a/b/c"),
        ("data.image_dir", "pictures", "pictures"),
        ("worker.actor.model.model_path", "./model", "./model"),
        ("worker.actor.model.tokenizer_path", "/nowhere/model", "/nowhere/model"),
        ("worker.reward.reward_function", "score.py:compute", "score.py"),
        ("worker.reward.val_reward_function", "maths", "maths"),
        ("worker.reward.writable", "judge-cache", "judge-cache"),
        ("trainer.load_checkpoint_path", "runs/global_step_3", "runs/global_step_3"),
    ],
)
def test_a_missing_file_is_reported_with_its_absolute_path(tmp_path, monkeypatch, key, value, missing):
    monkeypatch.chdir(tmp_path)
    assert problem(f"{key}={value}").startswith(f"{key}: there is no {missing} (looked for {tmp_path / missing})")


def test_the_model_of_a_critic_is_looked_for_only_if_there_is_one():
    assert "there is no ./no_such_folder" in problem(f"{GAE} worker.critic.model.model_path=./no_such_folder")
    assert "there is no" not in str(warnings("worker.critic.model.model_path=./no_such_folder"))


def test_a_missing_path_is_named_with_its_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "qwen-3b" / "final").mkdir(parents=True)
    (tmp_path / "rows.parquet").touch()
    (tmp_path / "games.py").touch()
    key = "worker.actor.model.model_path"
    for given, meant in (
        (f"{key}=./models/qwen-2b", "models/qwen-3b"),
        (f"{key}=./model/qwen-3b/final", "models/qwen-3b/final"),
        (f"{key}={tmp_path}/models/qwen3b/final", f"{tmp_path}/models/qwen-3b/final"),
        (f"{key}={tmp_path}/models/qwen3b/other", f"{tmp_path}/models/qwen-3b"),
        ("data.train_files=row.parquet", "rows.parquet"),
        ("worker.rollout.environment=game.py:Maze", "games.py"),
    ):
        assert problem(given).endswith(f"; did you mean {meant}?")
    assert "did you mean" not in problem(f"{key}=./nothing/of/this/name")


def test_existing_files_and_hub_ids_pass(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("rows.parquet", "score.py", "prompt.jinja", "odd@name.json"):
        Path(name).touch()
    Path("model").mkdir()
    overrides = (
        "data.train_files=rows.parquet@train data.val_files=odd@name.json data.format_prompt=prompt.jinja "
        "data.override_chat_template={{messages}} worker.actor.model.model_path=~/model "
        "worker.actor.model.tokenizer_path=Qwen/Qwen2.5-VL-3B-Instruct worker.reward.reward_function=score.py:compute"
    )
    assert warnings(overrides) == ()
    assert warnings(f"{overrides} worker.reward.reward_function=score.py data.train_files=owner/data@train") == ()


def test_an_invalid_option_of_a_critic_hides_no_problem_of_the_policy():
    sizes = ("data.rollout_batch_size=100", "worker.actor.global_batch_size=33", "worker.critic.global_batch_size=x")
    assert "is not a multiple of worker.actor.global_batch_size" in refusal("algorithm.adv_estimator=gae", *sizes)
