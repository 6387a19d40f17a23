"""Finding and checking the user's environments and tools, without a process."""

import io
import json
import socket

import numpy as np
import pytest
from PIL import Image

from support.images import encoded, odd_files, png
from trigon.data.images import open_image
from trigon.data.media_files import MediaSource
from trigon.environments.conversion import to_observation
from trigon.environments.source import (
    EnvironmentSettings,
    check_environment,
    encode_setup,
    find_environment,
    find_tools,
    load_code,
)
from trigon.environments.tools import ToolEnvironment, describe_tools, load_tools
from trigon.errors import EpisodeError
from trigon.system.image_formats import LazyImages

GOOD = """
class Maze:
    def __init__(self, size, seed=0): pass
    def reset(self, row): return "a wall"
    def step(self, action): return "a wall", 0.0, True
"""


def written(folder, text, name="maze.py"):
    (folder / name).write_text(text)
    return folder / name


def check(path, kwargs=None, name="Maze"):
    source = find_environment(f"{path}:{name}")
    check_environment(load_code(source), kwargs or {}, where=source.where)


def test_a_file_that_another_machine_lacks_is_an_error_with_its_name(tmp_path):
    source = find_environment(f"{written(tmp_path, GOOD)}:Maze")
    (tmp_path / "maze.py").unlink()
    with pytest.raises(EpisodeError, match=rf"no file .*maze.py on {socket.gethostname()}: .*\.environment has"):
        load_code(source)


@pytest.mark.parametrize(
    ("old", "new", "kwargs", "error"),
    [
        ("", "", {"size": 3}, None),
        ("class Maze", "class Mase", {"size": 3}, r"there is no environment 'Maze' of .*; did you mean Mase\?"),
        ("def reset", "def resett", {"size": 3}, r"no method reset\(self, row\); did you mean resett\?"),
        ("reset(self, row)", "reset(self)", {"size": 3}, r"reset of .* takes \(self\), and is called with one"),
        ("def step", "async def step", {"size": 3}, "step of .* is async"),
        ("", "", {"sise": 3}, r"does not accept 'sise' .*; did you mean size\?; it accepts size, seed"),
        ("", "", {}, r"missing a required argument: 'size'; .*worker\.rollout\.environment_kwargs"),
        ("class Maze", "Maze = 3\nclass Other", {}, "'Maze' of .* is a int, not a class"),
        ("class Maze", "import minigrit\nclass Maze", {}, "it imports 'minigrit', which is not installed"),
        (
            "class Maze",
            "1 / 0\nclass Maze",
            {},
            r"failed to load:\n.*\n  .*, in <module>\n    1 / 0(.|\n)*ZeroDivisionError",
        ),
        (
            "class Maze:",
            "from trigon.environments.protocol import Environment\nclass Maze(Environment):\n    def other(self): pass",
            {"size": 3},
            None,
        ),
    ],
)
def test_code_that_does_not_fit_the_protocol_says_why(tmp_path, old, new, kwargs, error):
    path = written(tmp_path, GOOD.replace(old, new, 1) if old else GOOD)
    if error is None:
        check(path, kwargs)
        return
    with pytest.raises(EpisodeError, match=error):
        check(path, kwargs)


def test_keyword_arguments_that_cannot_be_sent_are_refused(tmp_path):
    settings = EnvironmentSettings(
        environment=find_environment(f"{written(tmp_path, GOOD)}:Maze"), kwargs={"size": {1}}
    )
    with pytest.raises(EpisodeError, match="environment_kwargs cannot be sent"):
        encode_setup(settings, describe=False)


TOOLS = '''
def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: The first number
        b: The second number
    """
    return a + b

def look(where: str, images: list, timeout_seconds: float) -> str:
    """Look somewhere.

    Args:
        where: The place
    """
    return f"{where}: {len(images)} images, {timeout_seconds:g} s"

def ask(question: str) -> str:
    """Ask.

    Args:
        question: The question
    """
    raise {"KeyError": KeyError, "ValueError": ValueError}[question]("no <image>")
'''


def tools_of(folder, *names):
    path = written(folder, TOOLS, "tools.py")
    return load_tools(find_tools([f"{path}:{name}" for name in names]))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("def f(x): 'Do it.'", "no type hint for its parameter 'x'"),
        ("def f(x: int): return 1", "no docstring"),
        ("def f(*x: int): 'Do it.'", "models give arguments by name"),
        ("async def f(): 'Do it.'", "is async"),
        ("class f: 'Do it.'", "is a type; tools are functions"),
        ("def f(x: int): 'Do it.'", "no description for the argument 'x'.*give each of its parameters"),
    ],
)
def test_a_tool_that_cannot_be_told_to_a_model_is_refused(tmp_path, text, error):
    with pytest.raises(EpisodeError, match=error):
        describe_tools(load_tools(find_tools([f"{written(tmp_path, text)}:f"])))


def test_tools_are_described_without_the_parameters_of_the_engine_and_have_names_of_their_own(tmp_path):
    add, look = describe_tools(tools_of(tmp_path, "add", "look"))
    assert add["function"]["name"] == "add"
    assert add["function"]["parameters"]["required"] == ["a"]
    assert list(look["function"]["parameters"]["properties"]) == ["where"]
    other = written(tmp_path, TOOLS, "other.py")
    with pytest.raises(EpisodeError, match="two tools named 'add'"):
        load_tools(find_tools([f"{written(tmp_path, TOOLS, 'tools.py')}:add", f"{other}:add"]))


def environment_of(tools, *, files=(), tool_format="hermes"):
    """Return an environment in which an episode with these images has begun."""
    environment = ToolEnvironment(
        tools, tool_format=tool_format, role="tool", timeout_seconds=8.0, max_image_pixels=10**6
    )
    # A row may name tools of another project.
    environment.reset({"images": LazyImages(files), "tools": ["zoom"], "tools_kwargs": {"zoom": {"scale": 2}}})
    return environment


def message_of(environment, call):
    """Return the message with which a turn of one call is answered."""
    observation, reward, done = environment.step(f"<tool_call>{call}</tool_call>")
    assert (reward, done) == (None, False), call
    [message] = observation.messages
    assert message.role == "tool"
    assert to_observation(observation, role="tool", max_image_pixels=10**6) is observation
    return message


def crop_of(*bbox_2d, img_idx=0):
    return json.dumps({"name": "crop", "arguments": {"bbox_2d": bbox_2d, "img_idx": img_idx}})


def shown_in(message):
    [image] = message.images
    return Image.open(io.BytesIO(image))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ('{"name": "add", "arguments": {"a": 1}}', "3"),
        ('{"name": "look", "arguments": {"where": "here"}}', "here: 1 images, 4 s"),
        ('{"name": "ad", "arguments": {}}', "Error: there is no tool 'ad'; did you mean add? (the tools are add,"),
        ('{"name": "add", "arguments": {}}', "Error: add needs a"),
        ('{"name": "add", "arguments": {"a": 1, "bb": 2}}', "Error: add has no argument 'bb'; did you mean b? (it has"),
        ('{"name": "look", "arguments": {"images": []}}', "Error: look has no argument 'images' (it has where)"),
        ('{"name": "add", "arguments": {"a": "x"}}', 'Error: TypeError: can only concatenate str (not "int") to str'),
        ('{"name": "ask", "arguments": {"question": "ValueError"}}', "Error: no < image>"),
        ('{"name": "ask", "arguments": {"question": "KeyError"}}', "Error: KeyError: 'no < image>'"),
        ("{", "Error: the tool call was not carried out: it is not valid JSON: Expecting property name enclosed in"),
    ],
)
def test_what_a_call_returns_or_raises_is_the_reply(tmp_path, call, text):
    message = message_of(environment_of(tools_of(tmp_path, "add", "look", "ask"), files=[png()]), call)
    assert message.text.startswith(text)
    assert message.images == ()


GIVE = '''
import asyncio, math
from PIL import Image

def give(kind: str):
    """Return something odd.

    Args:
        kind: What
    """
    match kind:
        case "ValueError":
            raise ValueError("half a character: \\ud800 " + 1000 * "long ")
        case "cancelled":
            raise asyncio.CancelledError
        case "itself":
            itself = []
            itself.append(itself)
            return itself
    return {
        "empty": "", "spaces": " \\n", "None": None, "no image": {"image": None}, "no text": {"text": ""}, "list": [],
        "dict": {}, "key": {"result": 1}, "more": {"text": "a", "score": 1}, "nan": math.nan,
        "bytes": b"a", "set": {1}, "half": "\\ud800",
        "image": Image.new("RGB", (0, 5)), "thin": Image.new("RGB", (1, 300)), "integers": Image.new("I", (30, 30)),
        "other image": {"shown": Image.new("RGB", (30, 30))}, "long": "a" * 300_000, "generator": (each for each in ()),
    }[kind]
'''

ODD_REPLIES = {
    **dict.fromkeys(["empty", "spaces", "None", "no image", "no text"], "(no output)"),
    **{
        "dict": "{}",
        "key": '{"result": 1}',
        "more": '{"text": "a", "score": 1}',
        "list": "[]",
        "nan": "NaN",
        "half": "\ufffd",
        "long": "Error: the tools returned more than 200,000",
    },
    **dict.fromkeys(["other image", "bytes", "set", "image", "thin", "integers", "generator"], "Error: returned "),
    **{
        "ValueError": "Error: half a char",
        "cancelled": "Error: CancelledError",
        "itself": "Error: ",
        "other": "Error: ",
    },
}
EMPTY_REGION, FOUR_NUMBERS = "Error: the region of bbox_2d is empty", "Error: bbox_2d must have four numbers"
ODD_BOXES = {
    **dict.fromkeys(["[9, 9, 1, 1]", "[9, 1, 1, 9]", "[5, 5, 5, 5]", "[0, 0, 0, 9]"], EMPTY_REGION),
    **dict.fromkeys(["[1000, 1000, 2000, 2000]", "[-9, -9, -1, -1]"], EMPTY_REGION),
    **dict.fromkeys(
        ["[0, 0, NaN, 9]", "[0, 0, -Infinity, 9]", "[0, 0, 1e999, 9]", '["0", "0", "9", "9"]'], FOUR_NUMBERS
    ),
    **dict.fromkeys(["[]", "[1, 2, 3]", "null", "{}", '"[0, 0, 9, 9]"', "[[0, 0], [9, 9]]", "7"], FOUR_NUMBERS),
    **dict.fromkeys(["[0, 0, 1e300, 9]", f"[-{10**400}, 0, {10**400}, 9]"], "<image>"),
}
NOT_READ = "Error: the tool call was not carried out: "
ODD_CALLS = {
    **dict.fromkeys(["{'name': 'crop'}", "", "crop(1, 2)", '{"name": "crop", "arguments": "bbox"}'], NOT_READ),
    **dict.fromkeys(['{"bbox": [0, 0, 9, 9]}', "[0, 0, 9, 9]", "null", '"crop"', '{"name": ["crop"]}'], NOT_READ),
    '{"name": "zoom", "arguments": {}}': "Error: there is no tool 'zoom' (the tools are crop, give)",
    **{'{"name": "\\ud800"}': "Error: there is no tool", f'{{"name": "{9999 * "a"}"}}': "Error: there is no tool"},
    '{"name": "crop", "arguments": {"bbox": [0, 0, 9, 9]}}': "Error: crop has no argument 'bbox'; did you mean bbox_2d",
    **{
        f'{{"name": "crop", "arguments": {{"bbox_2d": [0, 0, 9, 9], "img_idx": {number}}}}}': "Error: img_idx is "
        for number in ("NaN", "-1", "1e30", '"0"', "null", "true", 10**30)
    },
}


def test_odd_calls_and_replies_are_text_for_the_model_and_the_episode_continues(tmp_path, capsys):
    tools = load_tools(find_tools(["crop", f"{written(tmp_path, GIVE, 'give.py')}:give"]))
    environment = environment_of(tools, files=[png()])
    calls = ODD_CALLS | {
        f'{{"name": "crop", "arguments": {{"bbox_2d": {box}}}}}': text for box, text in ODD_BOXES.items()
    }
    calls |= {f'{{"name": "give", "arguments": {{"kind": "{kind}"}}}}': text for kind, text in ODD_REPLIES.items()}
    for call, text in calls.items():
        message = message_of(environment, call)
        assert message.text.startswith(text), (call, message.text)
        assert len(message.text.encode()) < 1000, call
    # Of two calls in a turn, the second is carried out although the first one cannot be.
    both = [f"<tool_call>{call}</tool_call>" for call in ("{", '{"name": "give", "arguments": {"kind": "list"}}')]
    first, second = environment.step("\n".join(both))[0].messages
    assert (first.text.startswith(NOT_READ), second.text) == (True, "[]")


def test_crop_shows_the_region_enlarged_and_counts_its_results_as_images():
    image = Image.new("RGB", (200, 100), "white")
    image.paste("red", (100, 0, 200, 50))  # the top right quarter
    environment = environment_of(load_tools(find_tools(["crop"])), files=[encoded(image, "PNG")])
    message = message_of(environment, crop_of(500, 0, 1000, 500))
    assert message.text == "<image>"
    assert shown_in(message).size == (724, 362)  # 2 : 1, 256 * 1,024 pixels
    assert shown_in(message).getextrema() == ((255, 255), (0, 0), (0, 0))
    assert message_of(environment, crop_of(0, 0, 10, 10, img_idx=1)).images
    assert "img_idx is 3; it must be from 0 to 2" in message_of(environment, crop_of(0, 0, 10, 10, img_idx=3)).text
    assert "must be less than 200 times" in message_of(environment, crop_of(0, 0, 1000, 0.0001)).text


def test_tools_see_the_pixels_that_the_model_sees():
    files = odd_files()
    environment = environment_of(load_tools(find_tools(["crop"])), files=list(files.values()))
    for number, (name, file) in enumerate(files.items()):
        seen = open_image(MediaSource(file, "", 10**6))
        assert np.array_equal(shown_in(message_of(environment, crop_of(0, 0, 1000, 1000, img_idx=number))), seen), name
    # Enlarged as any other image, not by its nearest pixels: with more colours than its palette.
    palette = crop_of(400, 400, 600, 600, img_idx=list(files).index("palette"))
    assert len(shown_in(message_of(environment, palette)).getcolors(1 << 20)) > 16


TYPED = '''
from typing import Literal, Optional

def find(word: str | None = None, year: Optional[int] = None, kind: Literal["1", "2"] = "1", other: int | str = 0):
    """Find something.

    Args:
        word: A word
        year: A year
        kind: A kind
        other: Anything
    """
    return repr((word, year, kind, other))
'''


def test_arguments_that_are_written_as_text_are_read_by_their_types(tmp_path):
    tools = tools_of(tmp_path, "add", "look") | load_tools(find_tools([f"{written(tmp_path, TYPED, 'typed.py')}:find"]))
    environment = environment_of(tools, tool_format="qwen3_xml")

    def result(name, **values):
        parameters = "".join(f"<parameter={name}>{value}</parameter>" for name, value in values.items())
        return message_of(environment, f"<function={name}>{parameters}</function>").text

    assert result("add", a="1") == result("add", a="\n1\n") == "3"
    assert result("look", where="1").startswith("1: ")
    assert result("find", word="2024", year="2024", kind="2", other="3") == "('2024', 2024, '2', 3)"
    assert result("find", word="null", year="null") == "(None, None, '1', 0)"


def test_each_call_of_a_turn_has_its_message_and_too_many_are_refused(tmp_path):
    environment = environment_of(tools_of(tmp_path, "add"))
    calls = [f'<tool_call>{{"name": "add", "arguments": {{"a": {number}}}}}</tool_call>' for number in range(17)]
    observation, _, _ = environment.step("".join(calls))
    sums = [str(number + 2) for number in range(16)]
    texts = [*sums, "Error: only the first 16 of 17 calls were carried out"]
    assert [message.text for message in observation.messages] == texts
    assert environment.step("The answer is 4.") == (None, None, True)
