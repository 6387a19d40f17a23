"""Reading YAML files and command lines into a configuration."""

from pathlib import Path

import pytest

from support.options import NEEDED, refusal
from trigon.config.load import dump_config, load_config, split_arguments
from trigon.config.names import LOGGERS
from trigon.config.options import value_of
from trigon.config.schema import Config
from trigon.errors import ConfigError


def load(*overrides: str, path: Path | None = None) -> Config:
    return load_config(path, (*NEEDED, *overrides)).config


def written(folder: Path, yaml: str) -> Path:
    (folder / "run.yaml").write_text(yaml, encoding="utf-8")
    return folder / "run.yaml"


KWARGS, OVERRIDE = "worker.reward.reward_function_kwargs", "worker.actor.model.override_config"
DEEP = "worker: {reward: {reward_function_kwargs: {weight: 1e-1, kinds: {a.b: 1, empty: {}}, gone: 1}}}"


@pytest.mark.parametrize(
    ("yaml", "overrides", "name", "expected"),
    [
        ("", [], "data.seed", 1),
        ("data:\nworker:\n  actor:\n", [], "data.seed", 1),
        ("data: {seed: 2}", ["data.seed=3"], "data.seed", 3),
        ("", ["data.seed=3", "data.seed=4"], "data.seed", 4),
        ("trainer: {total_epochs: 9}", ["trainer.total_episodes=2"], "trainer.total_epochs", 2),
        ("trainer: {experiment_name: 0042}", [], "trainer.experiment_name", "0042"),
        ("trainer: {project_name: yes}", [], "trainer.project_name", "yes"),
        ("worker.actor:\n  optim.lr: 2e-6\n", [], "worker.actor.optim.lr", 2e-6),
        ("data: &a {seed: 2}\nworker: {rollout: {<<: *a, seed: 3}}", [], "worker.rollout.seed", 3),
        ("", ["worker.rollout={temperature: 0.5}"], "worker.rollout.n", 4),
        (
            DEEP,
            [f"{KWARGS}.weight=0.5", f"{KWARGS}.kinds.c=[1, x]", f"{KWARGS}.gone=null"],
            KWARGS,
            {"weight": 0.5, "kinds": {"a.b": 1, "empty": {}, "c": [1, "x"]}, "gone": None},
        ),
        (
            f"{KWARGS}: {{a: &a {{x: 1}}, b: *a, c: {{<<: *a, y: 2}}}}",
            [f"{KWARGS}.b.x=3"],
            KWARGS,
            {"a": {"x": 1}, "b": {"x": 3}, "c": {"x": 1, "y": 2}},
        ),
        ("", [f"{OVERRIDE}.a.b=1", f"{OVERRIDE}.a=2"], OVERRIDE, {"a": 2}),
        ("", [f"{OVERRIDE}.a=2", f"{OVERRIDE}.a.b=1"], OVERRIDE, {"a": {"b": 1}}),
        ("", [f"{OVERRIDE}={{}}", f"{OVERRIDE}=null"], OVERRIDE, {}),
        (f"{OVERRIDE}: {{a: {{b: 1}}, c: 2}}", [f"{OVERRIDE}.a={{}}"], OVERRIDE, {"a": {}, "c": 2}),
        (f"{OVERRIDE}: {{a: 1}}\n{OVERRIDE}.b: 2", [], OVERRIDE, {"a": 1, "b": 2}),
    ],
)
def test_the_command_line_overrides_or_joins_yaml_which_overrides_defaults(tmp_path, yaml, overrides, name, expected):
    assert value_of(load(*overrides, path=written(tmp_path, yaml)), name) == expected


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("worker.actor.optim.lr=1e-6", 1e-6),
        ("worker.actor.optim.lr=1", 1.0),
        ("data.max_pixels=4e6", 4_000_000),
        ("data.max_pixels=null", None),
        ("data.shuffle=False", False),
        ("trainer.experiment_name=007", "007"),
        ("trainer.project_name=a=b", "a=b"),
        ('data.system_prompt=Answer: in {braces}, "quoted" # and\nmore', 'Answer: in {braces}, "quoted" # and\nmore'),
        ("data.system_prompt=Write ${x}$ or ${a.b}.", "Write ${x}$ or ${a.b}."),
        (
            f"{KWARGS}={{hint: '${{data.x}}', 'host:port': null, 1: 2}}",
            {"hint": "${data.x}", "host:port": None, "1": 2},
        ),
        ("trainer.logger=wandb", ("wandb",)),
        ("trainer.logger=", ()),
        ("trainer.logger=[console, file]", ("console", "file")),
        ("worker.actor.optim.betas=[0.9, 0.95]", (0.9, 0.95)),
        ("worker.actor.fsdp.torch_dtype=float32", "fp32"),
        ("trainer.val_only='true'", True),
        ('trainer.val_only="Off"', False),
    ],
)
def test_values_of_the_command_line(override, expected):
    value = value_of(load(override), override.partition("=")[0])
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("data.max_promt_length", "did you mean data.max_prompt_length?"),
        ("lr", "did you mean worker.actor.optim.lr?"),
        ("worker.optim.lr", "did you mean worker.actor.optim.lr?"),
        ("workers.actor", "did you mean worker.actor?"),
        ("data.seed.x", "did you mean data.seed?"),
        # Names of other libraries.
        ("num_generations", "worker.rollout.n?"),
        ("worker.actor.optim.learning_rate", "worker.actor.optim.lr?"),
        ("trainer.test_freq", "trainer.val_freq?"),
    ],
)
def test_an_unknown_key_suggests_the_nearest(key, nearest):
    message = refusal(f"{key}=1")
    assert message.startswith(f"{key} (command line)")
    assert message.endswith(nearest)


@pytest.mark.parametrize(
    ("key", "value", "reference"),
    [
        ("trainer.experiment_name", "${trainer.project_name}_2", "${trainer.project_name}"),
        ("data.train_files", "[a/b, '${data.val_files}']", "${data.val_files}"),
        ("data.seed", "${.n}", "${.n}"),
        ("worker.reward.reward_function_kwargs.url", "${oc.env:URL,none}", "${oc.env:URL,none}"),
        ("worker.reward.reward_function", "[{function: '${oc.env:HOME}/a.py'}]", "${oc.env:HOME}"),
    ],
)
def test_a_reference_of_omegaconf_is_refused_and_not_taken_for_text(key, value, reference):
    message = refusal(f"{key}={value}")
    assert message.startswith(f"{key.removesuffix('.url')} has {reference} (command line)")


@pytest.mark.parametrize("option", ["worker.rollout.val_override_config", "worker.reward.reward_function_kwargs"])
def test_a_mapping_without_the_space_of_yaml_is_told_so(option):
    assert refusal(f"{option}={{n:4}}").endswith("lacks the space after the colon: {n: 4}")


NUMBER = "a number, above 0 and at most 100"
INTEGER = "an integer, at least 0 and at most 9,223,372,036,854,775,807"
BETAS = "a list of 2, each a number, at least 0 and below 1"
SINKS = f"a list, each one of {', '.join(('console', 'file', *LOGGERS))}"


@pytest.mark.parametrize(
    ("override", "shown", "expected"),
    [
        ("worker.rollout.temperature=hot", "'hot'", NUMBER),
        ("worker.rollout.temperature=.inf", ".inf", NUMBER),
        ("data.seed=0x10", "0x10", INTEGER),
        ("data.seed=1:30", "1:30", INTEGER),
        ("trainer.val_only='maybe'", "'maybe'", "true or false"),
        ("data.train_files=[a/b, null]", "['a/b', None]", "a list, each text, not empty"),
        ("worker.rollout.tools=[crop, '']", "['crop', '']", "a list, each text, not empty"),
        ("data.seed=true", "true", INTEGER),
        ("data.seed=", "null", INTEGER),
        ("data.shuffle=1", "1", "true or false"),
        ("data.max_pixels=0", "0", "an integer, at least 1 and at most 10,000,000,000, or null"),
        ("worker.rollout.dtype=fp8", "'fp8'", "one of fp32, bf16, fp16"),
        ("worker.actor.optim.betas=[0.9, 1]", "[0.9, 1]", BETAS),
        ("trainer.logger=[console,tb]", "['console', 'tb']", SINKS),
        ("trainer.project_name=", "''", "text, not empty"),
        ("worker.reward.reward_function_kwargs=3", "3", "a mapping"),
    ],
)
def test_an_invalid_value_is_reported_with_the_allowed_values(override, shown, expected):
    message = refusal(override)
    assert message.startswith(f"{override.partition('=')[0]} is {shown} (command line)")
    assert message.endswith(f"must be {expected}")


def test_all_problems_are_reported_at_once_each_with_its_place(tmp_path):
    path = written(tmp_path, "data:\n  seed: x\n  seed: 2\n  max_pixels: 0\ntrainer: {nodes: 2, val_freq: often}\n")
    overrides = (
        "lr=1",
        "algorithm.reward_weights.format=high",
        "worker.rollout.top_k=0",
        "data.image_dir=/nowhere",
        "data.rollout_batch_size=100",
        "worker.actor.global_batch_size=64",
        "data.train_fils=x",
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    lines = str(caught.value).split("\n  - ")
    assert lines[0] == f"{len(lines) - 1} problems in the configuration:"
    facts = (
        f"data.seed is given twice ({path}, lines 2 and 3)",
        f"trainer.nodes ({path}, line 5)",
        f"data.seed is 'x' ({path}, line 2)",
        f"data.max_pixels is 0 ({path}, line 4)",
        "trainer.val_freq is 'often'",
        "lr (command line)",
        "algorithm.reward_weights is 'high' (command line), but must be a mapping, each value a number",
        "worker.rollout.top_k is 0",
        "data.image_dir: there is no",
        "data.rollout_batch_size (100",
        "data.train_fils",
        "worker.actor.model.model_path is not set",
        "worker.reward.reward_function is not set",
    )
    for fact in facts:  # not that train_files is missing, whose name is misspelt
        assert sum(line.startswith(fact) for line in lines[1:]) == 1, fact
    assert len(lines) - 1 == len(facts)


@pytest.mark.parametrize(
    ("override", "implied"),
    [
        ("worker.rollout.n=many", "worker.rollout.n=1"),
        ("worker.actor.model.model_pth=owner/model", "worker.actor.model.model_path="),
    ],
)
def test_the_default_of_an_invalid_or_misspelt_option_causes_no_further_refusal(override, implied):
    assert "problems" not in refusal(implied, override)


def test_two_names_of_a_key_in_one_file_must_agree(tmp_path):
    same = "trainer: {total_episodes: 3, total_epochs: 3}"
    assert load(path=written(tmp_path, same)).trainer.total_epochs == 3
    message = refusal(path=written(tmp_path, "trainer:\n  total_episodes: 3\n  total_epochs: 4\n"))
    assert "as trainer.total_episodes and as trainer.total_epochs" in message


@pytest.mark.parametrize(
    ("yaml", "part"),
    [
        ("data:\n  seed: 1\ndata.seed: 1\n", "is given twice"),
        (f"{KWARGS}: {{a: {{b: 1, b: 2}}}}\n", f"{KWARGS}.a.b is given twice"),
        (f"{KWARGS}: {{a: 1}}\n{KWARGS}.a: 2\n", f"{KWARGS}.a is given twice"),
        ("data: [1\n", "is not valid YAML: while parsing a flow sequence"),
        ("data: {seed: !!python/name:os.system }\n", "is not valid YAML: could not determine a constructor"),
        ("- data\n", "must hold sections"),
        ("data: 3\n", "data is 3 (/"),
    ],
)
def test_an_invalid_file_is_reported(tmp_path, yaml, part):
    assert part in refusal(path=written(tmp_path, yaml))


def test_a_file_may_be_in_the_home_folder_and_a_missing_one_is_reported_with_its_absolute_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.yaml").write_text("data: {seed: 5}")
    assert load(path=Path("~/config.yaml")).data.seed == 5
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(Path("confg.yaml"), ())
    for fact in ("confg.yaml", f"looked for {tmp_path / 'confg.yaml'}", "there is config.yaml"):
        assert fact in str(caught.value)
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        load_config(tmp_path, ())
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        load_config(Path("config.yaml"), ())


def test_a_dumped_configuration_loads_to_the_same_one(tmp_path):
    config = load(
        "data.system_prompt=Think: {first}\n  and 'then' — answer # here",
        "worker.actor.optim.lr=1e-6",
        "worker.reward.reward_function_kwargs={weight: 0.1, kinds: [a, {b: null}]}",
        "trainer.experiment_name=1e3",
        "worker.rollout.val_override_config.temperature=0",
    )
    loaded = load_config(written(tmp_path, dump_config(config)), ())
    assert loaded.config == config
    assert loaded.warnings == ()


@pytest.mark.parametrize(
    ("argv", "path", "overrides"),
    [
        ([], None, []),
        (["run.yaml", "a.b=1"], "run.yaml", ["a.b=1"]),
        (["a.b=1", "config=x/run.yml"], "x/run.yml", ["a.b=1"]),
        (["runs/lr=1/run.yaml"], "runs/lr=1/run.yaml", []),
        (["data.format_prompt=a b=c"], None, ["data.format_prompt=a b=c"]),
        (["data.train_files=x.yaml"], None, ["data.train_files=x.yaml"]),
    ],
)
def test_arguments_are_split(argv, path, overrides):
    assert split_arguments(argv) == (None if path is None else Path(path), overrides)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["a.b=1", "run.yaml"], "cannot read the argument 'run.yaml': write config=run.yaml, or key=value"),
        (["--lr", "3"], "an equals sign; write worker.actor.optim.lr=3"),
        (["--max-steps", "--lr"], "write trainer.max_steps=..."),
        (["--config", "x.yaml"], "write config=x.yaml"),
        (["=3"], "cannot read the argument '=3'"),
        (["config="], "cannot read the argument 'config='"),
        (["a.b=1", " "], "a line of the script ends in a backslash and a space"),
        (["a.yaml", "config=b.yaml"], "two configuration files are given, a.yaml and b.yaml"),
    ],
)
def test_invalid_arguments_are_reported(argv, message):
    with pytest.raises(ConfigError) as caught:
        split_arguments(argv)
    assert message in str(caught.value)
