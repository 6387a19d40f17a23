"""Stored rollouts are scored again in real reward workers, and scores are compared."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from datetime import datetime

import numpy as np
import pytest

from support.samples import ROW
from trigon.errors import ConfigError, DataError, RewardError
from trigon.report.rollouts import RolloutRow, read_rollouts, row_to_line
from trigon.report.run_folder import RunFolder
from trigon.rewards.contract import RewardRequest, encode_request
from trigon.tools.cli.main import main
from trigon.tools.cli.score import draw
from trigon.tools.eval.score import Bin, distribution, score

HOSTILE = "\x1b]0;title\x07[/bold]\u202e"
LENIENT = """
REWARD_TYPE = "sequential"

def main(reward_input, bonus=0.0):
    response = reward_input["response"]
    if response.endswith("raise"):
        raise ValueError(f"cannot read {len(response)}")
    if response.endswith("hang"):
        while True:
            pass
    return {"overall": float(reward_input["ground_truth"] in response) + bonus, "words": len(response.split())}
"""


def make_row(prompt: int, sample: int, response: str, reward: float = 0.0) -> RolloutRow:
    changes = {"prompt_id": f"train:{prompt}", "sample": sample, "response": response, "reward": reward}
    return replace(ROW, parts={"overall": reward}, ground_truth="12", ground_truth_type="str", images=(), **changes)


@pytest.fixture
def lenient(tmp_path):
    (tmp_path / "lenient.py").write_text(LENIENT)
    return str(tmp_path / "lenient.py")


@pytest.fixture
def run(tmp_path):
    """Return a run folder with rollouts of two steps and of a validation."""
    with RunFolder(tmp_path / "run") as folder:
        folder.write_rollouts(1, "train", [make_row(0, 0, "it is 12", 1.0), make_row(0, 1, "it is 13")])
        folder.write_rollouts(2, "train", [make_row(1, 0, r"\boxed{12}", 1.0), make_row(1, 1, "12 or so")])
        folder.write_rollouts(2, "validation", [make_row(2, 0, f"{HOSTILE}12", 0.0)])
        folder.write_config("worker: {reward: {reward_function: math, reward_function_kwargs: {format_weight: 0.5}}}\n")
    return tmp_path / "run"


def test_one_reward_function_is_compared_with_the_stored_scores(run, lenient):
    result = score(run, lenient, num_workers=2)
    [summary], [agreement] = result.rewards, result.with_stored
    assert (summary.num_scored, summary.num_failed, summary.num_timeouts) == (5, 0, 0)
    assert summary.parts["overall"].value == pytest.approx(4 / 5)
    assert summary.parts["words"].num_values == 5
    assert summary.distribution == (Bin(0.0, 0.0, 1), Bin(1.0, 1.0, 4))
    assert agreement.agreement.value == pytest.approx(3 / 5)
    assert (agreement.num_higher, agreement.num_lower) == (2, 0)
    assert [each.place for each in agreement.disagreements] == ["step 2 train:1/1", "step 2 train:2/0"]
    assert agreement.disagreements[0].line == 2
    assert agreement.disagreements[0].file.endswith("step_000002.jsonl")
    assert all(seconds > 0 for each in result.completions for seconds in each.seconds)


def test_two_reward_functions_are_compared_with_each_other(run, lenient):
    result = score(run, [lenient, "math"], num_workers=1)
    assert result.between is not None
    assert (result.between.first, result.between.second) == ("lenient.py", "math")
    assert result.between.num_compared == 5
    # math wants \boxed{}, and gives half of the score for the format.
    assert result.rewards[1].kwargs == {"format_weight": 0.5}, "the run's arguments of its own reward function"
    assert result.between.disagreements[0].difference == 1.0
    assert result.between.num_higher == 4


@pytest.mark.parametrize(
    ("started", "given", "bonus"),
    [
        ("./lenient.py", "lenient.py:main", 0.5),
        ("lenient.py", "{folder}/lenient.py", 0.5),
        ("lenient.py:other", "lenient.py", 0.0),
    ],
)
def test_a_runs_own_reward_function_has_its_arguments_however_it_is_written(
    run, lenient, tmp_path, monkeypatch, started, given, bonus
):
    options = f"{{reward_function: {started}, reward_function_kwargs: {{bonus: 0.5}}}}"
    (run / "config.yaml").write_text(f"worker: {{reward: {options}}}\n")
    given = given.format(folder=tmp_path)
    monkeypatch.chdir(tmp_path)
    assert score(run, given, num_workers=1).rewards[0].kwargs == ({"bonus": bonus} if bonus else {})
    # From another folder the run says where its file was.
    (run / "local_sources.json").write_text(json.dumps({started.partition(":")[0]: lenient}))
    monkeypatch.chdir("/")
    assert score(run, lenient, num_workers=1).rewards[0].kwargs == ({"bonus": bonus} if bonus else {})


def test_rollouts_of_validations_are_scored_with_the_arguments_of_their_function(run, lenient):
    (run / "config.yaml").write_text(
        f"worker: {{reward: {{reward_function: '{lenient}', reward_function_kwargs: {{bonus: 0.5}}, "
        f"val_reward_function: [{{function: '{lenient}:main', kwargs: {{bonus: 0.25}}}}]}}}}\n"
    )
    assert score(run, lenient, num_workers=1, splits=["validation"]).rewards[0].kwargs == {"bonus": 0.25}
    assert score(run, lenient, num_workers=1).rewards[0].kwargs == {"bonus": 0.5}


def test_a_limit_cuts_no_group_that_is_scored_together(run, tmp_path):
    (tmp_path / "group.py").write_text(
        "REWARD_TYPE = 'group'\n\n"
        "def main(reward_inputs):\n    return [float(len(reward_inputs)) for _ in reward_inputs]\n"
    )
    completions = score(run, str(tmp_path / "group.py"), num_workers=1, limit=3).completions
    assert [(each.place, each.scores[0].overall) for each in completions] == [
        *(("step 1 train:0/0", 2.0), ("step 1 train:0/1", 2.0)),
        *(("step 2 train:1/0", 2.0), ("step 2 train:1/1", 2.0)),
    ]


def test_dates_and_arrays_of_a_row_reach_a_reward_function_as_in_training(tmp_path):
    day = datetime(2026, 1, 2, 3, 4)
    columns = {"day": day, "numbers": np.array([1, 2]), "inside": [{"day": day.date()}], "number": np.float32(0.5)}
    row = replace(make_row(0, 0, "12"), row=columns, ground_truth=day)
    request = RewardRequest("12", 1, row.ground_truth, "", "stop", row.row)
    in_training = json.loads(encode_request(request)[0])
    (tmp_path / "rollouts.jsonl").write_bytes(row_to_line(row))
    [stored] = read_rollouts(tmp_path / "rollouts.jsonl")
    assert (stored.row, stored.ground_truth) == (in_training["row"], in_training["ground_truth"])
    assert stored.row["day"] == "2026-01-02T03:04:00"


def test_the_rollouts_are_chosen_by_split_step_and_limit_or_given_as_a_file_or_as_rows(run, lenient):
    def scored(source, **options):
        found = score(source, lenient, num_workers=1, **options).completions
        return [(each.step, each.split, each.line, each.place) for each in found]

    assert [step for step, *_ in scored(run, splits=["validation"])] == [2]
    assert [step for step, *_ in scored(run, steps=[1])] == [1, 1]
    assert [step for step, *_ in scored(run, limit=3)] == [1, 1, 2]
    assert scored(run / "rollouts" / "step_000001.jsonl")[0][:3] == (1, "train", 1)
    [(step, _, _, place)] = scored([make_row(0, 0, "12")])
    assert (step, place) == (None, "train:0/0")
    with pytest.raises(DataError, match="there are 3 files"):
        score(run, lenient, steps=[7])


def test_a_reward_function_may_be_a_python_function_and_keyword_arguments_are_those_of_the_functions_in_order(lenient):
    def is_twelve(reward_input: dict) -> dict:
        return {"overall": float("12" in reward_input["response"])}

    rows = [make_row(0, 0, "12", 1.0), make_row(0, 1, "11")]
    result = score(rows, [is_twelve, lenient], kwargs=[{}, {"bonus": 0.25}], num_workers=1)
    assert [[each.overall for each in row.scores] for row in result.completions] == [[1.0, 1.25], [0.0, 0.25]]
    assert result.with_stored[0].agreement.value == 1.0
    assert "is_twelve" in result.rewards[0].reward


def test_failures_are_counted_by_cause_and_stop_nothing(lenient):
    rows = [make_row(n, 0, "x" * n + " raise") for n in range(3)] + [make_row(5, 0, "hang"), make_row(6, 0, "12")]
    result = score(rows, lenient, num_workers=1, timeout_seconds=0.5)
    [summary] = result.rewards
    assert (summary.num_scored, summary.num_failed, summary.num_timeouts) == (1, 3, 1)
    raised, hung = summary.failures
    assert (raised.count, raised.example) == (3, "train:0/0"), "messages differ in a number, the place is the same"
    assert raised.error.startswith("ValueError: cannot read")
    assert hung.outcome == "timeout"
    assert summary.slowest[0].place == "train:5/0"
    assert summary.slowest[0].seconds == pytest.approx(0.5)
    assert result.with_stored[0].num_compared == 1
    assert result.with_stored[0].num_only_one == 4


def test_wrong_arguments_are_errors(run, lenient, tmp_path):
    with pytest.raises(ConfigError, match="takes one or two"):
        score(run, [lenient] * 3)
    with pytest.raises(SystemExit, match="2"):
        main(["score", str(run), *[lenient] * 3])
    with pytest.raises(DataError, match=r"there is no file or run .*rn; did you mean .*run"):
        score(tmp_path / "rn", lenient)
    with pytest.raises(DataError, match="no rollouts to score"):
        score([], lenient)
    with pytest.raises(RewardError, match="does not accept 'bonsu'"):
        score(run, lenient, kwargs={"bonsu": 1.0})
    (tmp_path / "text.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"text.jsonl, line 1 is not a rollout"):
        score(tmp_path / "text.jsonl", lenient)


def test_many_different_scores_are_counted_in_bins():
    bins = distribution([number / 100 for number in range(101)])
    assert len(bins) == 10
    assert sum(each.count for each in bins) == 101
    assert (bins[0].low, bins[-1].high) == pytest.approx((0.0, 1.0))
    assert bins[-1].count == 11, "the maximum is in the last bin"
    assert distribution([]) == ()
    assert [line.split()[-1] for line in draw(bins)] == [f"{each.count}" for each in bins]


def test_the_command_prints_the_result_without_control_characters(run, lenient, capsys, tmp_path):
    output = tmp_path / "new" / "folder" / "scores.jsonl"  # which are made
    assert main(["score", str(run), lenient, "--workers", "1", "--output", str(output)]) == 0
    out = capsys.readouterr().out
    assert "5 scored, 0 failed" in out
    assert "lenient.py and stored agree on 'overall' for 60.00%" in out
    assert "\x1b" not in out
    assert "\u202e" not in out
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(lines) == 5
    assert lines[0]["scores"][0]["parts"] == {"overall": 1.0, "words": 3.0}


@pytest.mark.parametrize(
    ("output", "num_scored"),
    [("lenient.py/scores.jsonl", 0), ("run", 0), ("/dev/full", 5)],
    ids=["file", "folder", "full"],
)
def test_an_output_that_cannot_be_written_is_an_error_before_scoring_or_after_the_tables_are_printed(
    output, num_scored, run, lenient, tmp_path, capsys
):
    assert main(["score", str(run), lenient, "--workers", "1", "--output", str(tmp_path / output)]) == 2
    out, err = capsys.readouterr()
    assert f"the scores cannot be written to {tmp_path / output}" in err
    assert ("5 scored, 0 failed" in out) == (num_scored == 5)


@pytest.mark.extended
@pytest.mark.faults
def test_the_memory_of_reward_workers_is_an_option_of_the_command(run, tmp_path, capsys):
    (tmp_path / "large.py").write_text("""
import time

REWARD_TYPE = "sequential"

def main(reward_input):
    memory = b"x" * (1200 << 20)
    time.sleep(1)
    return {"overall": 1.0}
""")
    arguments = ["--workers", "1", "--limit", "1", "--max-memory-gb", "1"]
    assert main(["score", str(run), str(tmp_path / "large.py"), *arguments]) == 0
    out = capsys.readouterr().out
    assert "0 scored, 1 failed" in out
    assert "worker.reward.max_memory_gb allows 1;" in out.replace("\n", "")


def test_the_command_prints_json_alone(run, lenient, capsys):
    arguments = ["--workers", "1", "--json", "--steps", "1-1", "--part", "words"]
    assert main(["score", str(run), lenient, "math", *arguments]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["num_rollouts"] == 2
    assert [each["reward"] for each in content["rewards"]] == [lenient, "math"]
    assert content["between"]["num_compared"] == 0, "math has no such score"


def test_rollouts_are_scored_without_torch(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(row_to_line(make_row(0, 0, "12")))
    code = (
        "import sys\nfrom trigon.tools.cli.main import main\n"
        f"assert main(['score', {str(tmp_path / 'a.jsonl')!r}, 'math', '--workers', '1']) == 0\n"
        "print('LOADED', sorted({'torch', 'transformers', 'datasets', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "LOADED []"
