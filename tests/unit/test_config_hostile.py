"""Odd and hostile YAML: each gives a configuration or a ConfigError, quickly."""

import time
from pathlib import Path

import pytest

from trigon.config.load import MAX_CHARACTERS, MAX_DEPTH, MAX_NODES, inspect_config, load_config
from trigon.config.options import options
from trigon.errors import ConfigError

KWARGS = "worker.reward.reward_function_kwargs"
IN_KWARGS = "worker:\n  reward:\n    reward_function_kwargs:\n"
SECONDS = 5.0
"""Limit of CPU time. Without limits on what is read, some of these take 40 seconds, or forever."""


def short_id(value: object) -> str:
    return ascii(value)[:40]


def refusal(path: Path | None, *overrides: str) -> str:
    """Return the message of the ConfigError, which must come soon and not be too long to read."""
    start = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert time.process_time() - start < SECONDS
    assert len(str(caught.value)) < 20_000
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("data.shuffle=!!bool maybe", "which is not valid YAML"),
        ("data.seed=2001-99-99", "which is not valid YAML"),
        ("data.seed=9999-12-31T23:59:59-14:00", "data.seed is "),
        ('data.seed="\\UFFFFFFFF"', "which is not valid YAML"),
        ("data.seed=&a [*a]", "which is not valid YAML"),
        (f"{KWARGS}={{<<: &a {{<<: *a}}}}", "which is not valid YAML"),
        ("data.seed=" + "[" * 2000, "which is not valid YAML"),
        (f"{KWARGS}=" + "{a: " * 500 + "1" + "}" * 500, "which is not valid YAML"),
        ("data.seed=" + "1" * 5000, "which is not valid YAML"),
        ("data.seed=0x" + "f" * 5000, "which is not valid YAML"),
        ("worker.actor.optim.lr=1e999", "worker.actor.optim.lr is "),
        ("data.seed=1e308", "data.seed is 1e308 (command line), but must be an integer"),
        ("algorithm.reward_weights={a: 1, b: {c: 2}}", "algorithm.reward_weights is 2 (command line), but must be"),
        ("algorithm.reward_weights=.inf", "algorithm.reward_weights is .inf (command line), but must be a mapping"),
        (f"{KWARGS}..x=1", "has an empty part"),
        ("a." * 20_000 + "b=1", "characters in 20,001 parts"),
        ("k" * 100_000 + "=1", "has 100,000 characters in 1 parts"),
        ("data.image_dir=~no_such_user/images", "data.image_dir: there is no ~no_such_user/images"),
        ("data.image_dir=a\0b", "data.image_dir: there is no"),
        ("data.image_dir=" + "a" * 5000, "data.image_dir: there is no"),
        ("worker.reward.reward_function=" + "a" * 5000 + ".py:f", "reward_function: there is no"),
    ],
    ids=short_id,
)
def test_an_odd_value_on_the_command_line_is_a_configuration_error(override, part):
    assert part in refusal(None, override)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("data: &d\n  seed: *d\n", "an alias (*) refers to a value that contains it"),
        ("data: &d {seed: 1, <<: *d}\n", "an alias (*) refers to a value that contains it"),
        ("".join(" " * i + "a:\n" for i in range(600)), f"it has more than {MAX_DEPTH} levels"),
        ("a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 40)), "levels"),
        (
            "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
            + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)),
            f"it has more than {MAX_NODES:,} keys and values",
        ),
        (
            "a0: &a0 {k: v}\n"
            + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 9)),
            f"it has more than {MAX_NODES:,} keys and values",
        ),
        (
            IN_KWARGS + "".join(f"      k{i}: {i}\n" for i in range(MAX_NODES)),
            f"it has more than {MAX_NODES:,} keys and values",
        ),
        ("".join(f"unknown_{i}: {i}\n" for i in range(1500)), "\n  - and 1,4"),
        ("data: {train_files: [" + ", ".join(f"/no/{i}" for i in range(1500)) + "]}", "\n  - and 1,4"),
        ("data.seed: " + "x" * (MAX_CHARACTERS + 1), f"characters; at most {MAX_CHARACTERS:,} are read"),
        (".: 1\na..b: 1\n", "the key 'a..b' ("),
        ("? [a, b]\n: 1\n", "is not valid YAML"),
        ("%YAML " + "9" * 5000 + ".1\n--- a\n", "is not valid YAML"),
        ("\x00", "is not valid YAML"),
    ],
    ids=short_id,
)
def test_an_odd_file_is_a_configuration_error(text, part, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    assert part in refusal(path)


def test_every_numeric_option_has_an_upper_bound():
    numeric = [option for option in options().values() if option.item in ("integer", "number")]
    rewards = ("algorithm.filter_low", "algorithm.filter_high")  # which have any range
    bounded = [option for option in numeric if option.name not in rewards]
    assert [each.name for each in bounded if "at most" not in each.expected and "below" not in each.expected] == []
    given = [f"{each.name}={[1e300] if each.kind == 'list' else 1e300}" for each in bounded]
    assert {each.name for each in bounded} <= inspect_config(None, given).uncertain
