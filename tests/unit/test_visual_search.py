"""The data and the reward of the recipe with the tool `crop`, by hand."""

import hashlib
import importlib.util
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    """Return a module of examples/."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


preprocess, reward = load("data_preprocess/visual_search"), load("reward_function/visual_search")


@pytest.mark.parametrize(
    ("question", "truth", "answer"),
    [
        ("Is the countertop tan or blue?", "The countertop is tan.", "tan"),
        ("Is the car to the left or to the right of the dog?", "To the left of the dog.", "left"),
        ("Is the man to the left or the right of the dog?", "The man is to the RIGHT of it.", "right"),
        ("Is it a bus or a truck?", "It is a bus, not a truck.", None),
        ("Is it red, green or blue?", "It is green.", "green"),
        ("Is it red or blue?", "It is green.", None),
        ("Is there a bus or a truck?", "Yes, there is a truck.", "yes"),
        ("Is the kite brown and large?", "Yes, the kite is brown and large.", "yes"),
        ("Are the spots on a giraffe?", "No, the spots are on a banana.", "no"),
        ("Are the spots on a giraffe?", "Nothing is there.", None),
        ("On which side of the picture is the barrier?", "The barrier is on the left side of the picture.", "left"),
        ("Who is wearing pants?", "The boy is wearing pants.", None),
    ],
)
def test_the_answer_is_the_choice_that_the_ground_truth_names(question, truth, answer):
    assert preprocess.short_answer(question, truth) == answer


def test_rows_without_a_choice_or_an_image_are_left_out_and_no_image_is_in_both_files(tmp_path, capsys):
    images = [f"image {number}".encode() for number in range(60)]
    rows = [
        {
            "images": [{"bytes": image, "path": ""}] * (2 if number == 7 else 1),
            "extra_info": {"question": question, "answer": answer, "index": str(number)},
            "data_source": "vstar",
        }
        for number, image in enumerate(images)
        for question, answer in (("Is it red or blue?", "It is red."), ("Who is it?", "A boy."), ("Is it?", "No."))
    ]
    source = tmp_path / "source.parquet"
    pq.write_table(pa.Table.from_pylist(rows), source)
    folder = tmp_path / "made"
    assert preprocess.main(["--source", str(source), "--local_dir", str(folder)]) == 0
    written = {split: pq.read_table(folder / f"{split}.parquet").to_pylist() for split in ("train", "test")}
    for_test = {image for image in images if hashlib.sha256(image).digest()[0] % preprocess.NUM_PARTS == 0}
    found = {split: {row["images"][0]["bytes"] for row in rows} for split, rows in written.items()}
    assert found == {"train": set(images) - for_test - {images[7]}, "test": for_test}
    assert for_test
    assert len(written["train"]) + len(written["test"]) == 2 * 59
    assert written["train"][0] == {
        "problem": "<image>Is it red or blue?",
        "answer": "red",
        "images": [{"bytes": images[0], "path": None}],
    }
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "left out: 60 rows whose answer names no choice, 2 without one image"
    assert sorted(path.name for path in folder.iterdir()) == ["test.parquet", "train.parquet"]


def test_a_source_that_is_not_there_is_an_error(tmp_path, capsys):
    assert preprocess.main(["--source", str(tmp_path / "none.parquet"), "--local_dir", str(tmp_path / "made")]) == 1
    assert "download it first" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


CALL = '<think>Too small.</think><tool_call>{"name": "crop", "arguments": {"bbox_2d": [0, 0, 9, 9]}}</tool_call>'
RIGHT, WRONG = "<think>I see.</think><answer>tan</answer>", "<think>I see.</think><answer>blue</answer>"


@pytest.mark.parametrize(
    ("texts", "overall", "parts"),
    [
        ([RIGHT], 0.8, {"accuracy": 1.0, "format": 1.0, "closer": 0.0}),
        ([CALL, RIGHT], 1.0, {"accuracy": 1.0, "format": 1.0, "closer": 1.0}),
        ([CALL, "The answer is <answer>tan</answer>"], 0.9, {"accuracy": 1.0, "format": 0.0, "closer": 1.0}),
        ([CALL, WRONG], 0.1, {"accuracy": 0.0, "format": 1.0, "closer": 1.0}),
        # An answer before a call is not the answer.
        ([RIGHT + CALL, WRONG], 0.1, {"accuracy": 0.0, "format": 1.0, "closer": 1.0}),
        ([CALL, CALL], 0.0, {"accuracy": 0.0, "format": 0.0, "closer": 1.0}),
    ],
)
def test_the_reward_reads_the_last_turn_and_adds_a_bonus_for_a_right_one_after_a_call(texts, overall, parts):
    turns = [{"observation": "", "text": text, "reward": None} for text in texts]
    score = reward.compute_score({"response": "".join(texts), "ground_truth": "tan", "turns": turns})
    assert score == {"overall": pytest.approx(overall), **parts}


def test_without_tools_the_reward_reads_the_completion():
    assert reward.compute_score({"response": RIGHT, "ground_truth": "tan", "turns": ()})["overall"] == pytest.approx(
        0.8
    )
