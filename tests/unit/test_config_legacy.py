"""EasyR1's files with renamed and ignored keys."""

from pathlib import Path

import pytest

from support.options import NEEDED, refusal
from trigon.config.legacy import IGNORED, RENAMED, UNSUPPORTED_VALUES, VERL_SECTIONS
from trigon.config.load import load_config
from trigon.config.options import options, sections, value_of

ROOT = Path(__file__).parents[2]
FILES = Path(__file__).parent / "data"


FILE_OF_256, DOTTED, CURRENT = "easyr1_total_episodes.yaml", "easyr1_dotted_sections.yaml", "easyr1_current.yaml"
VALUES = {
    FILE_OF_256: {
        "trainer.total_epochs": 15,
        "worker.reward.reward_function": "math",
        "data.rollout_batch_size": 256,
        "data.max_response_length": 2096,
        "data.max_pixels": 2097152,
        "worker.rollout.n": 6,
        "worker.rollout.limit_images": 1,
        "worker.rollout.val_override_config.temperature": 0.2,
        "worker.ref.fsdp.enable_cpu_offload": False,
        "algorithm.kl_coef": 0.01,
        "algorithm.kl_penalty": "low_var_kl",
        "trainer.logger": ("console", "wandb"),
    },
    DOTTED: {
        "worker.actor.global_batch_size": 128,
        "data.rollout_batch_size": 512,
        "worker.rollout.val_override_config.top_p": 0.95,
        "worker.reward.reward_function": "./examples/reward_function/math.py:compute_score",
    },
    CURRENT: {
        "worker.actor.offload.offload_optimizer": True,
        "trainer.logger": ("file", "wandb"),
        "worker.actor.model.lora.exclude_modules": ".*visual.*",
    },
}
WARNED = {
    FILE_OF_256: ["trainer.total_episodes", "worker.ref.fsdp.enable_rank0_init", "worker.reward.compute_score"],
    DOTTED: ["worker.actor.dynamic_batching"],
    CURRENT: ["worker.actor.dynamic_batching", "worker.actor.ulysses_size", "worker.ref.fsdp.enable_rank0_init"],
}
OF_SEVERAL = ["worker.actor.padding_free", "worker.actor.fsdp.enable_rank0_init", "worker.reward.reward_type"]
PROMPT = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the final answer.\n"
    " The reasoning process MUST BE enclosed within <think> </think> tags. "
    "The final answer MUST BE put in \\boxed{}."
)


@pytest.mark.parametrize("name", VALUES)
def test_files_of_easyr1_are_read(monkeypatch, name):
    monkeypatch.chdir(ROOT)  # from which the examples run
    loaded = load_config(FILES / name, ())
    expected = VALUES[name] | {"trainer.n_gpus_per_node": 8, "worker.rollout.tensor_parallel_size": 2}
    assert {key: value_of(loaded.config, key) for key in expected} == expected
    warned = {warning.partition(" ")[0] for warning in loaded.warnings}
    assert len(warned) == len(loaded.warnings)
    assert warned - set(OF_SEVERAL) == set(WARNED[name])
    overrides = (f"data.system_prompt={PROMPT}", "trainer.n_gpus_per_node=1", "worker.rollout.tensor_parallel_size=1")
    assert load_config(FILES / name, overrides).config.data.system_prompt == PROMPT


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
    message = refusal(f"{key}=17")
    assert message.startswith(f"{key} is 17 (command line)")
    assert message.endswith(IGNORED[key].advice)


@pytest.mark.parametrize(("key", "value"), UNSUPPORTED_VALUES)
def test_an_unsupported_choice_is_rejected_with_the_reason(key, value):
    message = refusal(f"{key}={value}")
    assert message.startswith(f"{key} is {value!r} (command line), but must be ")
    assert message.endswith(f": {UNSUPPORTED_VALUES[key, value]}")


@pytest.mark.parametrize("section", VERL_SECTIONS)
def test_a_section_of_verl_is_reported_with_its_replacement(section):
    assert (
        refusal(f"{section}.model.path=x")
        == f"{section}.model.path (command line) is unknown: {VERL_SECTIONS[section]}"
    )


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
