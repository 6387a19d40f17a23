"""Finding and loading reward functions, and the errors if that fails."""

import sys

import pytest

from trigon.errors import RewardError
from trigon.rewards.load import find_reward, find_source, load_function, resolve_arguments
from trigon.rewards.worker import load_terms
from trigon.system.user_code import CodeSource


@pytest.fixture(autouse=True)
def _restore_search_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # loading a file appends its folder


def test_a_function_of_a_file_and_a_shipped_name_are_found(tmp_path, monkeypatch):
    (tmp_path / "reward.py").write_text("")
    monkeypatch.chdir(tmp_path)
    expected = CodeSource("reward function", "compute_score", file=str(tmp_path / "reward.py"))
    assert find_source("./reward.py:compute_score") == expected
    assert find_source(f"{tmp_path}/reward.py:compute_score") == expected
    assert find_source(f"{tmp_path}/reward.py").name == "main"
    shipped = CodeSource("reward function", "compute_score", module="trigon.rewards.verifiers.r1v")
    assert find_source("r1v") == shipped


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{folder}/rewadr.py:main", "did you mean {folder}/reward.py?"),
        ("mth", "did you mean the shipped 'math'?"),
        (
            "nothing/at/all.py:main",
            "use file.py:function, or one of the shipped math, r1v, dapo, counting, geoqa, vqa, android_gui",
        ),
        ("{folder}/reward.py:", "'' is not a function name"),
        ("{folder}/reward.py:a b", "'a b' is not a function name"),
    ],
)
def test_an_unknown_source_is_an_error_with_the_nearest_name(tmp_path, spec, message):
    (tmp_path / "reward.py").write_text("")
    with pytest.raises(RewardError) as caught:
        find_source(spec.format(folder=tmp_path))
    assert message.format(folder=tmp_path) in str(caught.value)


def load_text(folder, text, function="main"):
    folder.mkdir(exist_ok=True)
    (folder / "reward.py").write_text(text)
    return load_function(CodeSource("reward function", function, file=str(folder / "reward.py")))


def test_a_file_can_import_files_beside_it_but_does_not_replace_modules(tmp_path):
    (tmp_path / "file_beside_reward.py").write_text("x = 5")
    (tmp_path / "fractions.py").write_text("x = 'not the real one'")
    text = "import file_beside_reward, fractions\ndef main(): return file_beside_reward.x, fractions.Fraction(1, 2)"
    assert load_text(tmp_path, text)[0]() == (5, 0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def compute_scores(): ...", "did you mean compute_scores?"),
        ("def other(): ...", "it has other"),
        ("x = 1", "it has none"),
        ("compute_score = 3", "is a int, not a function"),
        ("def compute_score(: ...", "SyntaxError"),
        ("from no_such_package.parts import x", "it imports 'no_such_package', which is not installed"),
        ("from trigon.errors import RewardError\nraise RewardError('no table')", "line 2"),
        ("raise SystemExit(2)", "SystemExit: 2"),
    ],
)
def test_errors_name_the_file_and_the_problem(tmp_path, text, message):
    with pytest.raises(RewardError) as caught:
        load_text(tmp_path, text, function="compute_score")
    assert message in str(caught.value)
    assert str(tmp_path / "reward.py") in str(caught.value)


def test_functions_of_two_files_do_not_replace_each_other_and_a_file_runs_once(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(
            f"import pickle\nclass Points: pass\ndef main(): return {name!r}, pickle.loads(pickle.dumps(Points()))\n"
        )
    sources = [find_source(f"{tmp_path}/{name}.py:main") for name in ("one", "two", "one")]
    one, two, again = (load_function(source)[0] for source in sources)
    assert [one()[0], two()[0]] == ["one", "two"]  # with the classes of its own module
    assert type(one()[1]) is not type(two()[1])
    assert again is one


LEGACY = "def main(predict_str, ground_truth, format_weight=0.1): return format_weight"


@pytest.mark.parametrize(
    ("text", "kwargs", "result"),
    [
        ("def main(reward_inputs, weight): return [weight]", {"weight": 0.3}, [0.3]),
        ("def main(reward_inputs, **rest): return [rest['weight']]", {"weight": 0.3}, [0.3]),
        (LEGACY, {"format_weight": 0.3}, [0.3]),
        (LEGACY, {"format_wieght": 0.3}, r"does not accept 'format_wieght' .* did you mean format_weight"),
        (LEGACY, {"predict_str": "x"}, "does not accept 'predict_str'"),  # it is the completion
        ("def main(reward_inputs, strictness): ...", {}, r"missing a required argument: 'strictness'"),
    ],
)
def test_keyword_arguments_are_bound_or_named(tmp_path, text, kwargs, result):
    (tmp_path / "reward.py").write_text(text)
    terms = find_reward(f"{tmp_path}/reward.py", kwargs)
    if isinstance(result, str):
        with pytest.raises(RewardError, match=result):
            load_terms(terms, concurrency=1)
        return
    with pytest.raises(StopIteration) as returned:  # it is not async, and never waits
        load_terms(terms, concurrency=1).score([{"response": "a", "ground_truth": "b"}]).send(None)
    assert returned.value.value == result


@pytest.mark.parametrize("key", [1, 0.5, None, True])
def test_arguments_with_keys_that_json_would_change_are_refused(key):
    assert resolve_arguments({"weights": {"1": [{"a": 2}]}}) == {"weights": {"1": [{"a": 2}]}}
    with pytest.raises(RewardError, match=rf"reward_function_kwargs\.weights\[0\] has the key {key!r}, .*'{key}'"):
        resolve_arguments({"weights": [{key: 2}]})
