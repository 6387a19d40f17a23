"""Reward functions that look at images: what reaches them, once for each prompt, and confined."""

import io
import json
import resource
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
from PIL import Image, UnidentifiedImageError

from support.builders import make_builder, prompts_of
from support.episodes import Answer, LocalEnvironments, Observed, make_settings
from support.images import odd_files
from support.rewards import reward_pool as pool_of
from support.rollout import NO_WEIGHTS, Phases
from trigon.data.images import open_image
from trigon.data.media_files import MediaSource
from trigon.errors import RewardError
from trigon.report.rollouts import rollout_rows, row_to_line
from trigon.report.run_folder import ImageStore
from trigon.rewards.callables import reward_terms
from trigon.rewards.contract import RewardRequest
from trigon.rewards.scoring import MediaFolder
from trigon.rollout.collect import collect, dummy_requests
from trigon.rollout.fake import FakeEngine
from trigon.system.confinement.options import Confinement
from trigon.system.image_formats import LazyImages
from trigon.tools.eval.score import score
from trigon.types import EncodedMedia, Prompt, SamplingParams

SAMPLING = SamplingParams(n=3, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=30, ignore_eos=False, seed=7)

# The reward is the red value of the first pixel of the first image.
LOOK = """
import os
REWARD_TYPE = "sequential"
REWARD_IMAGES = True

def main(reward_input):
    images = reward_input["images"]
    folder = os.path.dirname(images.files[0]) if len(images) else ""
    return {
        "overall": images[0].convert("RGB").getpixel((0, 0))[0] if len(images) else -1,
        "images": len(images),
        "videos": len(reward_input["videos"]),
        "sizes": sum(sum(size) for size in reward_input["image_sizes"]),
        "files": len([name for name in os.listdir(folder) if name.startswith("media-")]) if folder else 0,
    }
"""
SUM = """
REWARD_IMAGES = True
async def main(reward_inputs): return [len(each["images"]) for each in reward_inputs]
def legacy(response, ground_truth, *, images, scale=1, image_sizes=None):
    return scale * images[-1].size[0] + len(image_sizes)
def plain(response, ground_truth): return 1
"""


def red(value, size=8):
    stream = io.BytesIO()
    Image.new("RGB", (size, size), (value, 0, 0)).save(stream, "PNG")
    return stream.getvalue()


def request(media, response="a"):
    return RewardRequest(response, 1, "4", "?", "stop", {}, media=media)


def media_of(*files, kind="image"):
    return EncodedMedia(files, tuple(str(hash(file)) for file in files), kind)


def test_a_function_gets_the_images_of_its_prompt_and_videos_as_paths(tmp_path):
    with pool_of(tmp_path, LOOK) as pool:
        scores = pool.score(
            [request(media_of(red(7), red(9))), request(None), request(media_of(b"a video", kind="video"))]
        )
    assert [[each.overall, each.parts["images"], each.parts["videos"]] for each in scores] == [
        [7, 2, 0],
        [-1, 0, 0],
        [-1, 0, 1],
    ]


def test_a_function_gets_the_pixels_that_the_model_sees(tmp_path):
    text = """
import hashlib
REWARD_IMAGES = True
def digest(image):
    return int(hashlib.sha256(f"{image.mode}{image.size}".encode() + image.tobytes()).hexdigest()[:8], 16)
def main(reward_inputs): return [{"overall": 0, "digest": digest(each["images"][0])} for each in reward_inputs]
"""
    files = odd_files(60, 50)
    with pool_of(tmp_path, text) as pool:
        scores = pool.score([request(media_of(file)) for file in files.values()])
    digest = {}
    exec(text, digest)
    seen = [open_image(MediaSource(file, "", 10**6)) for file in files.values()]
    assert [each.parts["digest"] for each in scores] == list(map(digest["digest"], seen))


def test_media_are_read_once_for_a_prompt_stored_once_and_removed_after_the_scoring(tmp_path):
    reads = []

    def reader(value):
        def read():
            reads.append(value)
            return media_of(red(value), red(1))

        return read

    with pool_of(tmp_path, LOOK) as pool:
        with pool.scoring(num_completions=12) as scoring:
            for number in range(4):
                media = reader(number)
                if number > 0:  # nothing was sampled of the first group
                    scoring.add(3 * number, [request(media, text) for text in "abc"])
            scores = scoring.result()
        left = list(pool._media.path.glob("media-*"))
        folder = pool._media.path
        assert folder.stat().st_mode & 0o777 == 0o700
    assert [each.overall for each in scores] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert sorted(reads) == [1, 2, 3]
    assert max(each.parts["files"] for each in scores) <= 3  # red(1) is there once
    assert (left, folder.exists()) == ([], False)


def test_python_functions_look_by_an_argument_or_an_attribute(tmp_path):
    def width(response, ground_truth, images):
        return images[0].width

    def number(reward_input):
        return len(reward_input["images"])

    number.REWARD_IMAGES = True
    (tmp_path / "reward.py").write_text(SUM)
    files = [f"{tmp_path}/reward.py:{name}" for name in ("main", "legacy", "plain")]
    with pool_of(tmp_path, SUM, reward=reward_terms([width, number, *files], kwargs={})) as pool:
        [scored] = pool.score([request(media_of(red(0, 5), red(0, 6)))])
    assert scored.parts == {"overall": 16, "width": 5, "number": 2, "main": 2, "legacy": 6, "plain": 1}
    number.REWARD_IMAGES = "yes"
    with pytest.raises(RewardError, match="REWARD_IMAGES is 'yes'; it must be True or False"):
        reward_terms(number, kwargs={})


@pytest.mark.faults
def test_an_image_that_cannot_be_read_costs_the_completions_of_its_prompt(tmp_path):
    def read():
        raise FileNotFoundError("no such file: a.png")

    with pool_of(tmp_path, LOOK) as pool, pool.scoring(num_completions=5) as scoring:
        scoring.add(0, [request(read), request(read)])
        scoring.add(2, [request(media_of(b"no image")), request(None)])
        scoring.add(4, [request(media_of(red(5)))])
        scores = scoring.result()
    assert [each.outcome for each in scores] == ["failed", "failed", "failed", "ok", "ok"]
    assert scores[0].error == "the images of the prompt cannot be read: no such file: a.png"
    assert scores[2].error.startswith("UnidentifiedImageError")


@pytest.mark.faults
def test_a_strictly_confined_function_reads_the_images_and_nothing_else_of_the_folder_s_parent(tmp_path):
    text = LOOK + "\n    \ndef spy(reward_input):\n    open(reward_input['row']['file']).read()\n    return 1"
    secret = tmp_path / "other"
    secret.mkdir()
    (secret / "file.txt").write_text("private")
    try:
        with pool_of(tmp_path, text, confinement=Confinement(level="strict")) as pool:
            assert pool.score([request(media_of(red(3)))])[0].overall == 3
    except RewardError as error:
        if "confinement=strict needs" not in str(error):
            raise
        pytest.skip(f"strict confinement is refused here: {error}")
    (tmp_path / "code").mkdir()
    with pool_of(tmp_path / "code", text, function="spy", confinement=Confinement(level="strict")) as pool:
        row = {"file": str(secret / "file.txt")}
        [spied] = pool.score([replace(request(media_of(red(3))), row=row)])
    assert (spied.outcome, "PermissionError" in spied.error) == ("failed", True)


@pytest.fixture
def prompts(processors, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = []
    for number in range(3):
        Image.new("RGB", (50, 80), (10 * number, 0, 0)).save(tmp_path / f"{number}.png")
        rows.append({"images": [f"{number}.png"], "problem": "<image>How many?", "answer": str(number)})
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(**changes):
        return prompts_of(str(tmp_path / "train.jsonl"), make_builder(processors, **changes))

    return make


@pytest.mark.parametrize("process_images", [True, False])  # in one process, and for workers
def test_sampled_completions_are_scored_with_the_images_of_the_dataset(prompts, processors, tmp_path, process_images):
    tokenizer = processors.tokenizer
    engine = FakeEngine(tokenizer=tokenizer, stop_token_id=tokenizer.eos_token_id, complete=lambda *_: "yes")
    opened = prompts(process_images=process_images)
    if not process_images:
        engine = _Processing(engine, prompts())
    with pool_of(tmp_path, LOOK, max_failed_fraction=0.0) as pool:
        pool.check(dummy_requests(opened[0]), described="a dummy")
        with engine.awake(NO_WEIGHTS, version=0):
            groups = collect([opened[n] for n in range(3)], engine, pool, SAMPLING, phase=Phases())
            blank = []
            if process_images:
                shown = prompts().with_blank_media()[2]
                blank = collect([shown], engine, pool, SAMPLING, phase=Phases())
    assert [[each.score.overall for each in group.rollouts] for group in groups] == [[0] * 3, [10] * 3, [20] * 3]
    # Enlarged from 50 x 60 pixels.
    assert {each.score.parts["sizes"] for group in groups for each in group.rollouts} == {56 + 84}
    assert all(each.score.overall != 20 for group in blank for each in group.rollouts)


class _Processing:
    """An engine that is given files, as workers are, and samples with the pixels of the rows."""

    def __init__(self, engine, prompts):
        self.engine, self.prompts = engine, {each.prompt_id: each for each in (prompts[n] for n in range(len(prompts)))}

    def awake(self, *arguments, **options):
        return self.engine.awake(*arguments, **options)

    def generate(self, prompts, *arguments, **options):
        assert all(isinstance(each.vision, EncodedMedia) for each in prompts)
        return self.engine.generate([self.prompts[each.prompt_id] for each in prompts], *arguments, **options)


# The red value of the first pixel of each observed image, and the sum of those of the prompt.
OBSERVED = """
REWARD_IMAGES = True

def first_red(image): return image.convert("RGB").getpixel((0, 0))[0]

def main(reward_input):
    turns = [[first_red(image) for image in turn["images"]] for turn in reward_input["turns"]]
    parts = {f"{turn}.{number}": red for turn, reds in enumerate(turns) for number, red in enumerate(reds)}
    parts["sizes"] = sum(width * height for turn in reward_input["turns"] for width, height in turn["image_sizes"])
    assert all(len(turn["images"]) == turn["observation"].count("<image>") for turn in reward_input["turns"])
    return {"overall": len(turns), "prompt": sum(map(first_red, reward_input["images"])), **parts}
"""


def play(processors, number):
    """Return an engine with environments, whose row and turns decide the colours, and a prompt."""

    def answer(row, actions):
        images = tuple(red(10 * row["number"] + len(actions), size=28) for _ in range(len(actions) % 3))
        return Answer(0, Observed("Look.", images), 0.5, done=len(actions) == 3)

    tokenizer = processors.tokenizer
    engine = FakeEngine(
        tokenizer=tokenizer,
        stop_token_id=tokenizer.eos_token_id,
        complete=lambda *_: "on",
        episodes=make_settings(LocalEnvironments(answer), processors),
    )
    return engine, Prompt(f"train:{number}", (1, 2), media_of(red(5)), "<image>?", "", {"number": number}, ("a.png",))


def test_a_function_gets_the_images_that_each_turn_observed(processors, tmp_path):
    sampling = replace(SAMPLING, max_tokens=400)
    engine, prompt = play(processors, 7)
    with pool_of(tmp_path, OBSERVED, max_failed_fraction=0.0) as pool, engine.awake(NO_WEIGHTS, version=0):
        [group] = collect([prompt], engine, pool, sampling, phase=Phases())
    # The three turns observed no image, one and two.
    parts = {"overall": 3, "prompt": 5, "1.0": 71, "2.0": 72, "2.1": 72, "sizes": 3 * 56 * 56}
    assert [each.score.parts for each in group.rollouts] == [parts] * 3


def test_stored_turns_are_scored_with_the_images_that_they_observed(processors, tmp_path):
    engine, prompt = play(processors, 7)
    with pool_of(tmp_path, OBSERVED) as pool, engine.awake(NO_WEIGHTS, version=0):
        [group] = collect([prompt], engine, pool, replace(SAMPLING, max_tokens=400), phase=Phases())
    rows = [replace(row, images=()) for row in rollout_rows([group])]
    store, spec = ImageStore(tmp_path, max_side=64), f"{tmp_path}/reward.py:main"
    turns = [
        replace(each, image_files=tuple(store.add(file, where="") for file in each.images)) for each in rows[0].turns
    ]
    (tmp_path / "rollouts").mkdir()
    path = tmp_path / "rollouts" / "train_000001.jsonl"
    path.write_bytes(row_to_line(replace(rows[0], turns=tuple(turns))))
    for stored, num in ((rows, 3), (path, 1)):
        scored = score(stored, spec, num_workers=1).completions
        # Rows have the names of the prompt's images alone.
        assert [each.scores[0].parts for each in scored] == [group.rollouts[0].score.parts | {"prompt": 0}] * num
    path.write_bytes(row_to_line(replace(rows[0], turns=tuple(replace(each, images=()) for each in rows[0].turns))))
    [missing] = score(path, spec, num_workers=1).completions
    assert missing.scores[0].error.endswith("has images, and the run stored none (trainer.save_images)")


@pytest.mark.faults
def test_an_image_that_a_full_disk_has_cut_is_written_again():
    files = MediaFolder()
    image = bytes(range(256)) * 100
    requests = [request(media_of(image))]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # the write fails after 1,000 bytes
    try:
        with pytest.raises(RewardError, match=r"the images of the prompt cannot be read: .*File too large"):
            files.write(requests)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    [written] = files.write(requests)
    assert Path(written.images[0]).read_bytes() == image
    files.close()


def test_a_file_that_another_program_would_have_to_read_is_no_image():
    stream = io.BytesIO()
    Image.new("RGB", (2, 2)).save(stream, "EPS")  # Pillow starts Ghostscript to read it
    with pytest.raises(UnidentifiedImageError):
        LazyImages([stream.getvalue()])[0]
