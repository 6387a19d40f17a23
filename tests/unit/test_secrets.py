"""What looks like a secret, and that it is left out of what a run writes and shows."""

from __future__ import annotations

import time

import pytest
import yaml

from trigon.config.load import COMMAND_LINE, dump_config, inspect_config, load_config
from trigon.config.options import options
from trigon.errors import ConfigError, RewardError
from trigon.report.run import RunRecord
from trigon.rewards.load import find_reward, resolve_arguments
from trigon.rewards.pool import RewardPool
from trigon.system import secrets
from trigon.system.child import check_passed_variables
from trigon.system.secrets import ARGUMENTS, FREE_MAPPINGS, MASKED, mask, mask_text, masked_names, scrub, secrets_in
from trigon.system.terminal import sanitize
from trigon.tools.plan.call import load_planned

pytestmark = pytest.mark.faults

KEY = "s3cr3t-judge-key-1"
TOKEN = "hf_abcdefghijklmnopQRSTUVWXYZabcdefgh"  # most real ones have no digit


@pytest.fixture(autouse=True)
def no_known_secrets(monkeypatch):
    monkeypatch.setattr(secrets, "_known", set())


@pytest.mark.parametrize(
    ("arguments", "masked"),
    [
        ({"api_key": KEY}, {"api_key": MASKED}),
        ({"judge": {"password": 12345678}}, {"judge": {"password": MASKED}}),
        ({"api_keys": [KEY, "x"]}, {"api_keys": [MASKED, MASKED]}),
        ({"auth": {"user": "me", "value": "x"}}, {"auth": {"user": MASKED, "value": MASKED}}),
        ({"openai_key": "abc123"}, {"openai_key": MASKED}),
        ({"note": f"use {TOKEN} now"}, {"note": f"use {MASKED} now"}),
        ({"url": "https://me:pw@host/v1"}, {"url": f"https://{MASKED}@host/v1"}),
        ({"url": "https://host/v1?token=abc&n=1"}, {"url": f"https://host/v1?token={MASKED}&n=1"}),
        ({"url": "https://s3.org/f?X-Amz-Signature=ab1"}, {"url": f"https://s3.org/f?X-Amz-Signature={MASKED}"}),
        ({"url": "https://hooks.slack.com/services/T0/B0/Xy12"}, {"url": f"https://hooks.slack.com/services/{MASKED}"}),
        ({"header": "Authorization: Bearer abc.def"}, {"header": f"Authorization: Bearer {MASKED}"}),
    ],
)
def test_secrets_among_the_arguments_of_a_reward_function_are_masked(arguments, masked):
    assert mask(ARGUMENTS, arguments) == masked
    assert mask("", {"worker": {"reward": {"reward_function_kwargs": arguments}}}) == {
        "worker": {"reward": {"reward_function_kwargs": masked}}
    }
    assert list(masked_names(ARGUMENTS, masked))
    assert secrets_in(ARGUMENTS, arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"api_key": "env:OPENAI_API_KEY", "keys": ["env:A_1"]},
        {"max_tokens": 512, "token_weight": 0.5, "answer_key": "answer", "pad_token": "<|pad|>", "auth": None},
        {"judge_model": "meta-llama/Llama-3.2-70B-Instruct-hf", "path": "/data/Models/qwen2VL-instruct-abc/v1"},
        {"revision": f"/hub/models--x/snapshots/{'a1' * 20}", "strict": True, "password": ""},
        {"url": "https://judge.org/v1?version=2024-01-01&max_tokens=5&sigma=1&answer_key=a&email=a@b.org"},
        {"api_key": "EMPTY", "judge": {"token": "none", "password": "null", "secret": "not-needed"}, "hf_token": " "},
        {"headers": {"Authorization": "Bearer EMPTY"}, "header": "Authorization: Bearer EMPTY"},
        {"auth_type": "none", "auth": {"type": "basic", "password": "dummy"}, "api_key_env": "OPENAI_API_KEY"},
        {"answer_token": "boxed", "stop_tokens": ["</s>", "\n\n", "<|im_end|>"], "end_token_2": "</think>"},
        {"max_tokens": "512", "num_keys": "5", "token_weight": "0.5x", "author": "me", "tokenizer": "a/b"},
        {"key": "answer.text", "keys": ["reward_model.ground_truth_1", "answer2"], "answer_key": "a 1", "x_key": "a.b"},
        {"model": "Qwen2VL7BInstructAWQ1", "judge": "Qwen2VL7BInstructAWQ1", "judge_name": "Qwen2VL7BInstructAWQ1234"},
        {"path": "/data/Zm9vYmFyMTIzNDU2Nzg5MEFCQ0RF1", "note": "see /data/Zm9vYmFyMTIzNDU2Nzg5MEFCQ0RF1/x.json"},
        {"data": ["a/Qwen2VL7BInstructAWQ1234567", "grpo-Qwen2VL7BInstructAWQ1234567"]},
        {"revision": "a1" * 20, "credentials": "/home/me/key.json"},
        {"prompt": "The Bearer of it solves basic 3-step sums; authorization: none"},
    ],
)
def test_what_a_run_needs_to_be_started_again_is_kept(arguments):
    assert mask(ARGUMENTS, arguments) == arguments
    assert not secrets_in(ARGUMENTS, arguments)


@pytest.mark.parametrize(
    "text",
    [
        "/data/hf_datasets/train.parquet", "/models/hf_checkpoints/qwen", "hf_checkpoints2024abcdefGHI", "sk-learn-v2",
        "runs/sk-learn-v2", "sk-geo3k-qwen2-5-vl-7b-instruct-grpo-2", "/data/sk-proj-geometry3kimages2024set/a.json",
        "/ghp_datasets/x", "ghp_geometry_questions", "ASIALANGUAGES", "ASIALANGUAGESINTHEWORLD", "glpat-tests",
        "xoxb-geometry", "AIza-models", "github_pat_results", "https://me@host.org/a.git", "ssh://git@host.org/a.git",
        "abfss://train-2024@account.dfs.core.windows.net/a.parquet", "hf://datasets/me/geo3k@main",
        "git+https://host.org/a.git@v1.2", "https://host.org/a.parquet?key_column=a&max_tokens=3&sigma=2&dataset_keys=4",
        f"/hub/{'a1' * 20}/x", f"model@{'a1' * 20}", "/data/Zm9vYmFyMTIzNDU2Nzg5MEFCQ0RF/x", "hiyouga/geometry3k@test",
        "/scratch/api/webhooks/12/abc", "hf_" + "A1b2" * 9 + "/train", "/data/hf_" + "A1b2" * 9 + ".parquet",
    ],
)  # fmt: skip
def test_paths_models_datasets_and_experiments_are_never_masked(text):
    for name in ("data.train_files", "worker.actor.model.model_path", "trainer.experiment_name"):
        assert mask(name, text) == text
        assert not secrets_in(name, [text])
    assert mask_text(f"cannot read {text}: no such file") == f"cannot read {text}: no such file"
    # Behind a key that names a file it is kept too, also where the reward function has the path.
    assert mask(ARGUMENTS, {"data_path": text, "files": [text]}) == {"data_path": text, "files": [text]}


@pytest.mark.parametrize(
    "secret",
    [
        TOKEN, "hf_" + "aB3" * 12, "api_org_" + "aB" * 17, "sk-" + "a1B2" * 12, "sk-" + "0f" * 16,
        "sk-proj-" + "a_B-" * 5 + "T3BlbkFJ" * 5 + "-a_" * 9, "sk-ant-api03-" + "aB3x" * 20 + "-AA",
        "sk-or-v1-" + "0f" * 32,
        "ghp_" + "a1B" * 12, "ghs_" + "aB1" * 12, "github_pat_11AB" + "c_d3" * 15, "glpat-" + "aB3-x" * 4,
        "AKIA" + "ABCD2345EFGH67XY", "AIza" + "Sy-x1" * 7, "xoxb-123456789012-1234567890123-abcDEF",
        "eyJhbGciOiJI.eyJzdWIi.abc-_1",
    ],
)  # fmt: skip
def test_real_tokens_are_masked_wherever_they_are(secret):
    for text in ("{}", "use {} now", "({}),", "key={}", "https://host.org/v1?x={}&y=1", "{}.", "a: '{}'"):
        assert mask("data.system_prompt", text.format(secret)) == text.format(MASKED), text
        assert secret not in str(mask(ARGUMENTS, {"note": text.format(secret)}))
        assert secret not in mask_text(text.format(secret))
    assert mask("data.train_files", f"https://{secret}@host.org/a.json") == f"https://{MASKED}@host.org/a.json"
    assert mask(ARGUMENTS, {"model": secret, "answer_token": secret}) == {"model": MASKED, "answer_token": MASKED}


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer {}", "authorization: basic {}, next", '{{"token": "{}", "n": 1}}', "password={}&n=1",
        "api_key: '{}", "the header is Token: Bearer {}", "error 401 at 3: secret : {}", "1: x-auth={}",
    ],
)  # fmt: skip
def test_what_a_text_assigns_to_the_name_of_a_secret_is_masked(text):
    masked = mask_text(text.format(KEY))
    assert KEY not in masked
    assert MASKED in masked


@pytest.mark.parametrize(
    "key",
    [
        "api_key", "apiKey", "OPENAI_API_KEY", "api-key", "token", "hf_token", "HF_TOKEN", "accessToken", "token_2",
        "access_token", "backend_token", "bot_token", "api_tokens", "password", "db_passwd", "passphrase", "secret",
        "client_secret", "authorization", "auth", "x-auth", "auth_header", "private_key", "access_key_id", "cookie",
        "credentials", "webhook_url", "bearer", "openai_key",
    ],
)  # fmt: skip
def test_keys_that_name_a_secret_hide_any_value(key):
    assert mask(ARGUMENTS, {key: "a1-word"}) == {key: MASKED}
    assert mask(ARGUMENTS, {"judge": [{key: "a1-word"}]}) == {"judge": [{key: MASKED}]}


def test_ordinary_names_start_again_from_config_yaml_without_a_warning(tmp_path):
    folder = tmp_path / "hf_datasets" / "sk-learn-v2"
    folder.mkdir(parents=True)
    loaded = inspect_config(
        None, [*runnable(folder), "trainer.experiment_name=sk-learn-v2", f"{ARGUMENTS}.api_key=EMPTY"]
    )
    assert not [each for each in loaded.warnings if "command line" in each]
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(loaded.config))
    assert MASKED not in path.read_text()
    assert load_config(path, []).config == loaded.config


def test_other_options_are_masked_where_their_text_looks_like_a_secret_only():
    values = {
        "data": {"answer_key": "a1", "system_prompt": f"say {TOKEN}", "train_files": ("https://me:pw@h/a.json",)},
        "worker": {
            "actor": {"model": {"model_path": f"/hub/snapshots/{'a1' * 20}", "override_config": {"token_id": 5}}}
        },
    }
    expected = {
        "data": {"answer_key": "a1", "system_prompt": f"say {MASKED}", "train_files": (f"https://{MASKED}@h/a.json",)},
        "worker": values["worker"],
    }
    assert mask("", values) == expected


def test_every_free_mapping_is_known():
    mappings = {option.name for option in options().values() if option.kind == "mapping" and "," not in option.expected}
    assert mappings <= set(FREE_MAPPINGS)
    assert len(mappings) == 4


@pytest.mark.extended
@pytest.mark.parametrize(
    "text",
    [
        "a" * 20_000, "?token" * 3_000, "a-" * 10_000, "eyJ" * 7_000, "://x" * 5_000, "eyJaaaaaaaa-" * 2_000,
        "sk-" * 7_000, "sk-a_ " * 3_000, "://a:" * 4_000, "a1." * 7_000, "Bearer " * 3_000,
    ],
)  # fmt: skip
def test_long_texts_take_no_time(text):
    start = time.process_time()
    mask(ARGUMENTS, {"text": text, "key": text, "token": text})
    mask_text(text)
    assert time.process_time() - start < 2  # in the square of the length it would take longer


def test_config_yaml_has_no_secret_and_is_refused_until_it_is_given_again(tmp_path, monkeypatch):
    written = load_config(
        None, [*runnable(tmp_path), f"{ARGUMENTS}.judge.api_key={KEY}", f"{ARGUMENTS}.n=env:N"]
    ).config
    folder = tmp_path / "run"
    folder.mkdir()
    path = folder / "config.yaml"
    path.write_text(dump_config(written))
    assert KEY not in path.read_text()
    kwargs = RunRecord(folder).config()["worker"]["reward"]["reward_function_kwargs"]
    assert kwargs == {"judge": {"api_key": MASKED}, "n": "env:N"}

    with pytest.raises(ConfigError) as error:
        load_config(path, [])
    assert f"{ARGUMENTS}.judge.api_key ({path}, line " in str(error.value)
    assert "give the value again" in str(error.value)
    assert f"{ARGUMENTS}.judge.api_key=env:NAME" in str(error.value)
    again = load_config(path, [f"{ARGUMENTS}.judge.api_key={KEY}"]).config
    assert again == written
    assert load_planned(path, []).config.worker.reward.reward_function_kwargs == {}  # a plan calls no reward function


def runnable(tmp_path) -> list[str]:
    reward, data, model = tmp_path / "reward.py", tmp_path / "a.jsonl", tmp_path / "model"
    reward.write_text("def main(reward_input, **kwargs): return {'overall': 0.0}")
    data.write_text("{}")
    model.mkdir(exist_ok=True)
    return [
        f"worker.reward.reward_function={reward}:main",
        f"data.train_files={data}",
        "trainer.val_before_train=false",
        f"worker.actor.model.model_path={model}",
        "worker.rollout.n=2",
    ]


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        (f"{ARGUMENTS}=api_key:{KEY}", ""),
        (f"{ARGUMENTS}={{api_key: {KEY}", ""),
        (f"worker.reward={{api_key: {KEY}}}", ""),
        (f"trainer={TOKEN}", ""),
        (f"data.seed={TOKEN}", ""),
        ("", f"worker:\n  api_key: {KEY}\n : :"),
        ("", f"api_key: '{KEY}\n"),
    ],
)
def test_errors_of_options_and_of_yaml_have_no_secret(tmp_path, argument, text):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(path, [argument] if argument else [])
    assert KEY not in str(error.value)
    assert TOKEN not in str(error.value)


def test_a_secret_on_the_command_line_is_warned_of(tmp_path):
    loaded = inspect_config(None, [*runnable(tmp_path), f"{ARGUMENTS}.api_key={KEY}"])
    (warning,) = [each for each in loaded.warnings if "command line" in each]
    assert warning.startswith(f"{ARGUMENTS} has a secret on the {COMMAND_LINE}")
    assert "write env:NAME in its place" in warning
    assert KEY not in warning
    loaded = inspect_config(None, [*runnable(tmp_path), f"data.system_prompt=say {TOKEN}"])
    (warning,) = [each for each in loaded.warnings if "command line" in each]
    assert warning.startswith("data.system_prompt has a secret")
    assert "env:NAME" not in warning  # which is read among the arguments of a reward function only
    loaded = inspect_config(None, [*runnable(tmp_path), f"{ARGUMENTS}.api_key=env:KEY"])
    assert not [each for each in loaded.warnings if "command line" in each]
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"worker": {"reward": {"reward_function_kwargs": {"api_key": KEY}}}}))
    loaded = inspect_config(path, runnable(tmp_path))
    assert not [each for each in loaded.warnings if "command line" in each]


def test_env_names_are_resolved_when_the_arguments_are_sent_and_secrets_are_left_out_of_texts(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.setenv("PIN", "a1")
    monkeypatch.setenv("JUDGE_URL", "http://localhost:8000")
    monkeypatch.setenv("DATABASE_URL", "postgres://me:hunter22@host/rows")
    kwargs = {"judge": {"api_key": "env:JUDGE_KEY"}, "more": ["env:JUDGE_KEY", 1], "n": 2, "pin": "env:PIN"}
    assert resolve_arguments(kwargs) == {"judge": {"api_key": KEY}, "more": [KEY, 1], "n": 2, "pin": "a1"}
    check_passed_variables(["JUDGE_URL", "DATABASE_URL"])
    assert scrub(f"401 for {KEY}") == f"401 for {MASKED}"
    assert sanitize(f"401 for {KEY}", max_characters=12) == f"401 for {MASKED}"[:12] + " ... (17 more characters)"
    assert scrub("postgres://me:hunter22@host/rows") == f"postgres://{MASKED}@host/rows"
    for text in ("data1 is read", "http://localhost:8000"):  # short secrets are not cut out of words
        assert scrub(text) == text


@pytest.mark.parametrize("value", [None, ""])
def test_a_variable_that_is_not_set_is_an_error(monkeypatch, value):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    with pytest.raises(RewardError, match=r"reward_function_kwargs\.api_key is env:JUDGE_KEY, but .* not set"):
        resolve_arguments({"api_key": "env:JUDGE_KEY"})
    with pytest.raises(RewardError, match="is a secret that the run folder does not have"):
        resolve_arguments({"api_key": MASKED})


@pytest.mark.parametrize(
    ("variable", "given_by"),
    [("JUDGE_KEY", "reward_function_kwargs"), ("JUDGE_KEY", "env"), ("SLACK_WEBHOOK_URL", "env")],
)
def test_a_reward_function_that_has_its_key_in_errors_and_output_does_not_show_it(
    tmp_path, monkeypatch, caplog, variable, given_by
):
    from trigon.rewards.contract import RewardRequest

    monkeypatch.setattr("trigon.system.secrets._known", set())
    path = tmp_path / "reward.py"
    path.write_text(
        "import os\n"
        "REWARD_TYPE = 'sequential'\n"
        "def main(reward_input, api_key=''):\n"
        f"    key = api_key or os.environ['{variable}']\n"
        "    print('calling with', key)\n"
        "    raise ValueError(f'401 for {key}')\n"
    )
    monkeypatch.setenv(variable, KEY)
    pool = RewardPool(
        find_reward(f"{path}:main", {"api_key": f"env:{variable}"} if given_by == "reward_function_kwargs" else {}),
        passed_variables=[variable] if given_by == "env" else [],
        num_workers=1,
        timeout_seconds=10,
        max_failed_fraction=1.0,
    )
    try:
        request = RewardRequest(
            response="x", response_length=1, ground_truth="y", prompt="z", finish_reason="stop", row={}
        )
        with pytest.raises(RewardError) as error:
            pool.check([request], described="a dummy completion")
        (score,) = pool.score([request])
    finally:
        pool.close()
    assert f"401 for {MASKED}" in str(error.value)
    assert score.error == f"ValueError: 401 for {MASKED} (reward.py:6)"
    assert f"calling with {MASKED}" in caplog.text
    assert KEY not in str(error.value) + score.error + caplog.text
