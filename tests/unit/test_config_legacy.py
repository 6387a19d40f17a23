"""EasyR1's files with renamed and ignored keys."""

from pathlib import Path

import pytest

from trigon.config.legacy import IGNORED, RENAMED, UNSUPPORTED_VALUES, VERL_SECTIONS
from trigon.config.load import LoadedConfig, load_config
from trigon.config.options import options, sections
from trigon.errors import ConfigError

ROOT = Path(__file__).parents[2]
FILES = Path(__file__).parent / "data"
NEEDED = (
    "data.train_files=owner/train",
    "data.val_files=owner/val",
    "worker.actor.model.model_path=owner/model",
    "worker.reward.reward_function=math",
    "worker.rollout.n=4",
)


@pytest.fixture
def at_the_root(monkeypatch):
    """Make the repository root, from which the examples run, the current folder."""
    monkeypatch.chdir(ROOT)


def load(name: str, *overrides: str) -> LoadedConfig:
    return load_config(FILES / name, overrides)


def warned_keys(loaded: LoadedConfig) -> list[str]:
    return sorted(warning.partition(" ")[0] for warning in loaded.warnings)


@pytest.mark.usefixtures("at_the_root")
@pytest.mark.parametrize("name", ["easyr1_total_episodes.yaml", "easyr1_dotted_sections.yaml", "easyr1_current.yaml"])
def test_files_for_eight_devices_give_eight_workers(name):
    config = load(name).config
    assert (config.trainer.n_gpus_per_node, config.worker.rollout.tensor_parallel_size) == (8, 2)


@pytest.mark.usefixtures("at_the_root")
def test_the_file_with_total_episodes_and_compute_score():
    loaded = load("easyr1_total_episodes.yaml")
    config = loaded.config
    assert config.trainer.total_epochs == 15
    assert config.worker.reward.reward_function == "math"
    assert (config.data.rollout_batch_size, config.data.max_response_length, config.data.max_pixels) == (
        256,
        2096,
        2097152,
    )
    assert (config.worker.rollout.n, config.worker.rollout.limit_images) == (6, 1)
    assert config.worker.rollout.val_override_config.temperature == 0.2
    assert config.worker.ref.fsdp.enable_cpu_offload is False
    assert (config.algorithm.kl_coef, config.algorithm.kl_penalty) == (0.01, "low_var_kl")
    assert config.trainer.logger == ("console", "wandb")
    assert warned_keys(loaded) == [
        "trainer.total_episodes",
        "worker.actor.fsdp.enable_rank0_init",
        "worker.actor.padding_free",
        "worker.ref.fsdp.enable_rank0_init",
        "worker.reward.compute_score",
        "worker.reward.reward_type",
    ]


@pytest.mark.usefixtures("at_the_root")
def test_the_command_line_of_that_file_with_a_system_prompt():
    prompt = (
        "You FIRST think about the reasoning process as an internal monologue and then provide the final answer.\n"
        " The reasoning process MUST BE enclosed within <think> </think> tags. "
        "The final answer MUST BE put in \\boxed{}."
    )
    config = load(
        "easyr1_total_episodes.yaml",
        "data.train_files=hiyouga/geometry3k@train",
        "data.val_files=hiyouga/geometry3k@test",
        f"data.system_prompt={prompt}",
        "worker.actor.model.model_path=Qwen/Qwen2.5-VL-3B-Instruct",
        "worker.rollout.tensor_parallel_size=1",
        "trainer.experiment_name=qwen2_5_vl_3b_geo_grpo",
        "trainer.n_gpus_per_node=1",
    ).config
    assert config.data.system_prompt == prompt
    assert config.data.val_files == ("hiyouga/geometry3k@test",)


@pytest.mark.usefixtures("at_the_root")
def test_the_file_with_dotted_sections():
    loaded = load("easyr1_dotted_sections.yaml")
    config = loaded.config
    assert (config.worker.actor.global_batch_size, config.data.rollout_batch_size) == (128, 512)
    assert config.worker.rollout.val_override_config.top_p == 0.95
    assert config.worker.reward.reward_function == "./examples/reward_function/math.py:compute_score"
    assert warned_keys(loaded) == [
        "worker.actor.dynamic_batching",
        "worker.actor.padding_free",
        "worker.reward.reward_type",
    ]


@pytest.mark.usefixtures("at_the_root")
def test_the_current_example_file():
    loaded = load("easyr1_current.yaml")
    assert loaded.config.worker.actor.offload.offload_optimizer is True
    assert loaded.config.trainer.logger == ("file", "wandb")
    assert loaded.config.worker.actor.model.lora.exclude_modules == ".*visual.*"
    assert warned_keys(loaded) == [
        "worker.actor.dynamic_batching",
        "worker.actor.fsdp.enable_rank0_init",
        "worker.actor.padding_free",
        "worker.actor.ulysses_size",
        "worker.ref.fsdp.enable_rank0_init",
    ]


def test_a_renamed_key_gives_one_warning_with_the_new_name():
    loaded = load_config(None, (*NEEDED, "trainer.total_episodes=2", "trainer.total_episodes=3"))
    assert loaded.config.trainer.total_epochs == 3
    assert loaded.warnings == ("trainer.total_episodes (command line) is now trainer.total_epochs",)


VALUE_OF = {
    "worker.actor.ulysses_sequence_parallel_size": "1",
    "data.mini_rollout_batch_size": "64",
    "data.rollout_batch_size": "512",
    "trainer.total_epochs": "7",
    "trainer.max_steps": "7",
    "algorithm.disable_kl": "true",
    "algorithm.kl_coef": "0.25",
    "algorithm.kl_penalty": "mse",
    "algorithm.use_kl_loss": "true",
    "worker.actor.global_batch_size": "128",
    "worker.reward.reward_function": "dapo",
    "worker.reward.reward_function_kwargs": "{a: 1}",
}


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_every_renamed_key_sets_the_new_one(old, new):
    by_old = load_config(None, (*NEEDED, f"{old}={VALUE_OF[new]}"))
    by_new = load_config(None, (*NEEDED, f"{new}={VALUE_OF[new]}"))
    assert by_old.config == by_new.config
    assert [w for w in by_old.warnings if w not in by_new.warnings] == [f"{old} (command line) is now {new}"]


def written(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@pytest.mark.parametrize("key", [key for key, entry in IGNORED.items() if entry.allowed != ()])
def test_every_ignored_key_is_accepted_with_one_warning(key):
    entry = IGNORED[key]
    for value in entry.allowed or (3, "text", None):
        loaded = load_config(None, (*NEEDED, f"{key}={written(value)}"))
        assert loaded.warnings == (f"{key} (command line) has no effect: {entry.reason}",)
        assert loaded.config == load_config(None, NEEDED).config


@pytest.mark.parametrize("key", [key for key, entry in IGNORED.items() if entry.allowed is not None])
def test_an_ignored_key_with_an_unsupported_value_is_rejected_with_the_reason(key):
    with pytest.raises(ConfigError) as caught:
        load_config(None, (*NEEDED, f"{key}=17"))
    assert str(caught.value) == f"{key} is 17 (command line): {IGNORED[key].advice}"


@pytest.mark.parametrize(
    "override",
    [
        "worker.actor.ulysses_size=4",
        "worker.reward.reward_type=model",
    ],
)
def test_an_unsupported_value_is_rejected_with_advice(override):
    with pytest.raises(ConfigError, match=r"[;:] (set|leave|worker)"):
        load_config(None, (*NEEDED, override))


def test_the_command_line_can_override_a_rejected_value(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("worker: {reward: {reward_type: model}}", encoding="utf-8")
    loaded = load_config(path, (*NEEDED, "worker.reward.reward_type=function"))
    assert len(loaded.warnings) == 1


def test_a_critic_without_gae_gives_a_warning(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("worker: {critic: {strategy: fsdp, model: {model_path: x}}}", encoding="utf-8")
    loaded = load_config(path, (*NEEDED, "worker.critic.ppo_epochs=2"))
    assert loaded.warnings == (
        f"worker.critic.strategy ({path}, line 1) has no effect: several workers always shard the model with torch's "
        "FSDP2",
        "worker.critic has no effect without algorithm.adv_estimator=gae",
    )


@pytest.mark.parametrize(("key", "value"), UNSUPPORTED_VALUES)
def test_an_unsupported_choice_is_rejected_with_the_reason(key, value):
    with pytest.raises(ConfigError) as caught:
        load_config(None, (*NEEDED, f"{key}={value}"))
    assert str(caught.value).startswith(f"{key} is {value!r} (command line), but must be ")
    assert str(caught.value).endswith(f": {UNSUPPORTED_VALUES[key, value]}")


@pytest.mark.parametrize("section", VERL_SECTIONS)
def test_a_section_of_verl_is_reported_with_its_replacement(section):
    with pytest.raises(ConfigError) as caught:
        load_config(None, (*NEEDED, f"{section}.model.path=x"))
    assert str(caught.value) == f"{section}.model.path (command line) is unknown: {VERL_SECTIONS[section]}"


def test_older_paths_of_shipped_examples_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path, text in (
        ("examples/format_prompt/math.jinja", "{{ content }}"),
        ("examples/reward_function/math.py", "def compute_score(): ..."),
    ):
        Path(path).parent.mkdir(parents=True)
        Path(path).write_text(text, encoding="utf-8")
    overrides = (
        *NEEDED,
        "data.format_prompt=./examples/format_prompt/math_format.jinja",
        "worker.reward.score_function=./examples/score_function/math.py:compute_score",
    )
    loaded = load_config(None, overrides)
    assert loaded.config.data.format_prompt == "./examples/format_prompt/math.jinja"
    assert loaded.config.worker.reward.reward_function == "./examples/reward_function/math.py:compute_score"
    assert len(loaded.warnings) == 3
    Path("examples/format_prompt/math_format.jinja").write_text("{{ content }}", encoding="utf-8")
    assert load_config(None, overrides).config.data.format_prompt == "./examples/format_prompt/math_format.jinja"


def test_renamed_and_ignored_keys_are_not_current_keys():
    today = {option.name for option in options().values()}
    assert not today & {*RENAMED, *IGNORED}
    assert not {".".join(path) for path, _ in sections()} & {*RENAMED, *IGNORED}
    assert not RENAMED.keys() & IGNORED.keys()
    assert set(RENAMED.values()) <= today
    assert {key for key, _ in UNSUPPORTED_VALUES} <= today
