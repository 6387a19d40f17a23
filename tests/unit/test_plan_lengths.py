"""The lengths that a plan measures are those of the prompts that a run trains on."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from PIL import Image

from support.models import processors_of
from support.videos import make_video
from trigon.assemble.data import open_builder
from trigon.config.options import with_options
from trigon.config.schema import Config
from trigon.data.sources import open_source
from trigon.errors import ConfigError
from trigon.models.load import load_hf_config
from trigon.models.sizes import GroupLengths, VisionDimensions, dimensions_of
from trigon.tools.plan.lengths import MAX_MEASURED_ROWS, LengthOptions, find_lengths
from trigon.tools.plan.plan import SHIPPED

SIZES = [(640, 480), (28, 28), (1000, 90), (333, 517), (1920, 1080), (57, 800)]


def vision_of(folder) -> VisionDimensions | None:
    dimensions = dimensions_of(load_hf_config(folder))
    return None if dimensions is None else dimensions.vision


def configured(model, data, **changes):
    return with_options(
        Config(),
        {
            "worker.actor.model.model_path": str(model),
            "data.train_files": [str(data)],
            "data.prompt_key": "problem",
            "data.min_pixels": None,
            "data.max_pixels": None,
            "data.max_prompt_length": 4096,
            **changes,
        },
    )


def write_rows(folder, rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "internvl"])
def test_measured_prompts_are_those_that_are_built(tiny_model, tmp_path, family):
    model = tiny_model(family)
    rows = []
    for number, size in enumerate(SIZES):
        Image.new("RGB", size, (number * 20, 90, 30)).save(tmp_path / f"{number}.png")
        rows.append({"problem": "<image> What is it?", "answer": "a", "images": [f"{number}.png"]})
    rows.append({"problem": "Two of them: <image><image>", "answer": "a", "images": ["0.png", "3.png"]})
    rows.append({"problem": "No image.", "answer": "a", "images": []})
    too_long = {"problem": "long " * 5000, "answer": "a", "images": []}
    data = write_rows(tmp_path, [*rows, too_long])
    config = configured(model, data)
    lengths = find_lengths(config, vision_of(model), LengthOptions())
    builder = open_builder(config, processors_of(model)).with_default_image_dir(tmp_path)
    source = open_source(str(data))
    built = [GroupLengths.of(builder.build(row, "row"), ()) for row in list(source.rows)[:-1]]
    assert [each.prompt for each in lengths.prompts] == [each.prompt for each in built]
    assert [each.grids for each in lengths.prompts] == [each.grids for each in built]
    assert lengths.num_prompts == len(rows)
    assert str(data) in lengths.sources[0]


@pytest.mark.parametrize("family", ["qwen3_vl"])
def test_videos_are_measured_without_decoding_them(tiny_model, tmp_path, family):
    model = tiny_model(family)
    (tmp_path / "a.mp4").write_bytes(make_video(frames=12, fps=4, width=96, height=64))
    data = write_rows(tmp_path, [{"problem": "<video> What happens?", "answer": "a", "videos": ["a.mp4"]}])
    config = configured(model, data)
    [measured] = find_lengths(config, vision_of(model), LengthOptions()).prompts
    builder = open_builder(config, processors_of(model)).with_default_image_dir(tmp_path)
    built = GroupLengths.of(builder.build(open_source(str(data)).rows[0], "row"), ())
    assert (measured.prompt, measured.grids) == (built.prompt, built.grids)


def measure_two(tiny_model, folder, numbers, weights):
    """Return the lengths of short and long prompts in two datasets, and the mean of each alone."""
    model = tiny_model("qwen2")
    files = [folder / "short.jsonl", folder / "long.jsonl"]
    for file, number, text in zip(files, numbers, ("word", "word " * 30), strict=True):
        file.write_text((json.dumps({"problem": text, "answer": "a"}) + "\n") * number)
    alone = [find_lengths(configured(model, file), None, LengthOptions()).mean_prompt for file in files]
    changes = {"data.train_files": [str(file) for file in files], "data.train_weights": weights}
    return find_lengths(configured(model, files[0], **changes), None, LengthOptions()), *alone


@pytest.mark.extended
@pytest.mark.parametrize(
    ("numbers", "weights", "share"),
    [
        ((2 * MAX_MEASURED_ROWS, 500), (), 8 / 9),
        ((20, 20), [0.3, 0.7], 0.3),
        ((5, 15), [1.0, 2.0], 1 / 7),
        ((1, 1), [1.0, 1000.0], 1 / 1001),
    ],
)
def test_datasets_count_by_their_share_of_an_epoch(tiny_model, tmp_path, numbers, weights, share):
    lengths, short, long = measure_two(tiny_model, tmp_path, numbers, weights)
    assert long > short + 20
    assert lengths.mean_prompt == pytest.approx(share * short + (1 - share) * long, abs=2e-4 * (long - short))
    drawn = sum(number * weight for number, weight in zip(numbers, weights or (1, 1), strict=True))
    assert lengths.num_prompts == round(drawn)
    assert len(lengths.prompts) <= MAX_MEASURED_ROWS


def test_what_is_given_comes_first_then_the_data_then_a_finished_run(tiny_model, tmp_path):
    model = tiny_model("qwen2")
    data = write_rows(tmp_path, [{"problem": "Short.", "answer": "a"}])
    config = configured(model, data)
    run = LengthOptions(prompt_tokens=77, response_tokens=33)
    measured = find_lengths(config, None, LengthOptions(), measured=run)
    assert measured.mean_prompt != 77
    assert measured.response_tokens == 33
    remote = with_options(config, {"data.train_files": ["someone/data"]})
    assert find_lengths(remote, None, LengthOptions(), measured=run).mean_prompt == 77
    given = LengthOptions(prompt_tokens=50, response_tokens=500, num_prompts=5)
    lengths = find_lengths(config, None, given, measured=run)
    assert (lengths.mean_prompt, lengths.response_tokens, lengths.num_prompts) == (50, 500, 5)
    fixed = with_options(config, {"worker.rollout.ignore_eos": True})
    assert find_lengths(fixed, None, replace(given, response_tokens=3)).response_tokens == 512


QWEN = vision_of(SHIPPED / "Qwen2.5-VL-7B-Instruct")
REMOTE = {"data.max_prompt_length": 2048, "data.max_response_length": 2048}
MAZE = {"worker.rollout.environment": "games.mazes:Maze"}


def assumed(changes=None, **options):
    config = configured("Qwen/Qwen2.5-VL-7B-Instruct", "someone/data", **REMOTE, **(changes or {}))
    return find_lengths(config, QWEN, LengthOptions(**options))


@pytest.mark.parametrize(
    ("options", "observed", "response", "images"),
    [
        ({}, 0, 1024, 0),  # counted as sampled ones
        ({"observed_tokens": 500}, 500, 774, 0),
        ({"observed_tokens": 1500}, 1500, 274, 0),
        ({"observed_image_tokens": 300}, 300, 874, 1),
        ({"response_tokens": 548, "observed_tokens": 1500}, 1500, 548, 0),
    ],
)
def test_observations_leave_the_rest_of_a_completion(options, observed, response, images):
    lengths = assumed(MAZE, **options)
    assert (lengths.observed_tokens, lengths.response_tokens) == (observed, response)
    assert len(lengths.observed_grids) == images
    assert any(each.startswith("observations") for each in lengths.sources)


@pytest.mark.parametrize(
    ("changes", "options", "facts"),
    [
        (MAZE, {"response_tokens": 2049}, ["2,049", "data.max_response_length=2048"]),
        (MAZE, {"response_tokens": 549, "observed_tokens": 1500}, ["549", "1,500", "data.max_response_length=2048"]),
        (MAZE, {"response_tokens": 549, "observed_image_tokens": 1500}, ["549", "1,500"]),
        (MAZE, {"observed_tokens": 2048}, ["2,048", "data.max_response_length"]),
        ({}, {"observed_tokens": 200}, ["worker.rollout.environment", "worker.rollout.tools"]),
    ],
)
def test_given_tokens_that_no_completion_has_room_for_are_an_error(changes, options, facts):
    with pytest.raises(ConfigError) as refused:
        assumed(changes, **options)
    for fact in facts:
        assert fact in str(refused.value)
