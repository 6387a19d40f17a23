"""Environments behind OpenEnv's server, in a process of its own on 127.0.0.1, by its client.

`make test-environments` runs these with the package, elsewhere they are skipped without it.
"""

import base64
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from support.packages import require

pytestmark = pytest.mark.filterwarnings("default")  # OpenEnv and what it imports warn of what they will change

require("openenv.core")

from support.pooled_episode import play_in_pool  # noqa: E402
from trigon.environments.openenv import OpenEnvEnvironment  # noqa: E402

SERVER = Path(__file__).parents[1] / "support" / "openenv_server.py"
ROW = {"problem": "Say something.", "seed": 7}


@pytest.fixture(scope="module")
def server():
    """Yield the address of a running echo server, which has two sessions at a time."""
    with subprocess.Popen([sys.executable, str(SERVER)], stdout=subprocess.PIPE, text=True) as process:
        try:
            port = process.stdout.readline().strip()
            assert port, f"the server ended with status {process.wait()}"
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


@pytest.fixture
def connect(server):
    """Return a function that makes an environment, whose session is ended after the test."""
    made = []

    def connect(**options):
        made.append(OpenEnvEnvironment(server, **{"action": {"message": "{action}"}, **options}))
        return made[-1]

    yield connect
    for environment in made:
        environment.close()


def test_messages_are_echoed_until_the_episode_is_done(connect):
    echo = connect()
    assert echo.reset(ROW) == {"text": "echoed: ready, seed 7\ncount: 0", "images": []}
    assert echo.step("hello") == ({"text": "echoed: hello\ncount: 1", "images": []}, 5.0, False)
    assert echo.step("<think>enough</think><action>bye</action>") == (None, 3.0, True)
    assert echo.reset({"seed": 8})["text"] == "echoed: ready, seed 8\ncount: 0"


def test_text_keys_choose_and_a_single_text_has_no_name(connect):
    echo = connect(text_keys=["echoed"])
    assert echo.reset(ROW)["text"] == "ready, seed 7"


def test_two_sessions_are_two_episodes(connect):
    one, other = connect(), connect()
    one.reset({"seed": 1})
    other.reset({"seed": 2})
    one.step("a")
    assert one.step("b")[0]["text"] == "echoed: b\ncount: 2"
    assert other.step("c")[0]["text"] == "echoed: c\ncount: 1"


def test_an_action_may_be_json(connect):
    echo = connect(action=None)
    echo.reset(ROW)
    assert echo.step('<action>{"message": "ha", "times": 2}</action>')[0]["text"] == "echoed: ha ha\ncount: 1"


def test_what_is_no_action_goes_back_to_the_model_and_the_episode_continues(connect):
    echo = connect(action=None, invalid_reward=-1.0)
    echo.reset(ROW)
    reply, reward, done = echo.step("hello")
    assert reply.startswith("The action is not valid JSON: ")
    assert (reward, done) == (-1.0, False)
    assert echo.step("[1]") == ("The action must be a JSON object, not list.", -1.0, False)
    reply, reward, done = echo.step('{"massage": "hello"}')
    assert reply == 'The environment did not accept the action {"massage": "hello"}'
    assert (reward, done) == (-1.0, False)
    assert echo.step('{"message": "hello"}')[0]["text"] == "echoed: hello\ncount: 1"


def test_max_steps_end_the_episode(connect):
    echo = connect(max_steps=2)
    echo.reset(ROW)
    assert echo.step("a")[2] is False
    assert echo.step("b") == (None, 1.0, True)


def test_fields_can_be_pictures(connect):
    echo = connect(image_keys=["file", "pixels"])
    assert echo.reset(ROW)["images"] == []
    observation, _, _ = echo.step("draw")
    file, pixels = observation["images"]
    assert observation["text"] == "count: 0"
    assert (file.size, file.getpixel((0, 0))) == ((5, 4), (200, 0, 0))
    assert np.array_equal(np.asarray(pixels), np.full((2, 3, 3), (0, 0, 255), np.uint8))


def test_arguments_of_reset_must_be_columns_of_the_row(connect):
    with pytest.raises(ValueError, match="the row has no 'level', which reset_columns names: only problem, seed"):
        connect(reset_columns=["seed", "level"]).reset(ROW)
    assert connect(reset_columns=[]).reset(ROW)["text"] == "echoed: ready, seed None\ncount: 0"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"action": {"message": "{text}"}}, "must contain '{action}'"),
        ({"timeout_seconds": 0}, "timeout_seconds is 0"),
        ({"max_steps": 0}, "max_steps is 0"),
    ],
)
def test_wrong_options_are_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        OpenEnvEnvironment("http://127.0.0.1:1", **options)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("no base64", "must be a PNG or JPEG file in base64"),
        (base64.b64encode(b"no image").decode(), "must be a PNG or JPEG file in base64"),
        ([[[0, 0, 256]]], "has values from 0 to 256"),
        ([[0, 1], [2, 3]], r"int64 values of shape \[2, 2\]"),
        ([[0, 1], [2]], "is no picture"),
    ],
)
def test_a_field_that_is_no_picture_is_named(field, message):
    environment = OpenEnvEnvironment("http://127.0.0.1:1", image_keys=["screen"])
    with pytest.raises(ValueError, match=message) as raised:
        environment.describe({"screen": field})
    assert "'screen'" in str(raised.value)


def test_an_observation_without_anything_to_show_is_named():
    with pytest.raises(ValueError, match="has neither text nor a picture"):
        OpenEnvEnvironment("http://127.0.0.1:1").describe({"metadata": {"a": 1}, "echoed": ""})


def test_episodes_run_in_processes_as_in_a_run(server):
    environment = "trigon.environments.openenv:OpenEnvEnvironment"
    kwargs = {"base_url": server, "action": {"message": "{action}"}, "text_keys": ["echoed"]}
    one, other = play_in_pool(environment, kwargs, [{"seed": 1}, {"seed": 2}], ["hello", "bye"])
    assert [outcome.error for outcome in (*one, *other)] == [""] * 6
    texts = [outcome.observation.messages[0].text for outcome in (one[0], other[0], one[1])]
    assert texts == ["ready, seed 1", "ready, seed 2", "hello"]
    assert [(outcome.reward, outcome.done) for outcome in one] == [(None, False), (5.0, False), (3.0, True)]


# -- Servers that fail -----------------------------------------------------------------------------


@pytest.mark.faults
def test_a_step_that_fails_ends_the_episode_and_the_next_one_continues(connect):
    echo = connect()
    echo.reset(ROW)
    with pytest.raises(RuntimeError, match=r"failed in a step \(.*the environment is broken"):
        echo.step("fail")
    assert echo.reset(ROW)["text"].startswith("echoed: ready")
    assert echo.step("hello")[1] == 5.0


@pytest.mark.faults
def test_a_server_without_a_free_session_says_so(connect):
    one, two, three = connect(), connect(), connect()
    one.reset(ROW)
    two.reset(ROW)
    with pytest.raises(RuntimeError, match="allows as many sessions at a time"):
        three.reset(ROW)
    one.close()


@pytest.mark.faults
def test_an_address_without_a_server_raises():
    echo = OpenEnvEnvironment("http://127.0.0.1:9", action={"message": "{action}"}, timeout_seconds=5.0)
    with pytest.raises(RuntimeError, match=r"127.0.0.1:9 started no episode \(Connect"):
        echo.reset(ROW)
    echo.close()


# The server cannot end this session before its step is over, so no test after it uses the server.
@pytest.mark.faults
def test_a_step_that_hangs_ends_at_the_time_limit(connect):
    echo = connect(timeout_seconds=1.0)
    echo.reset(ROW)
    with pytest.raises(RuntimeError, match=r"failed in a step \(TimeoutError\)"):
        echo.step("hang")
    echo.timeout_seconds = 20.0
    assert echo.reset(ROW)["text"].startswith("echoed: ready")  # a new session


@pytest.mark.faults
def test_a_server_that_cannot_be_reached_costs_each_episode_with_the_reason():
    environment = "trigon.environments.openenv:OpenEnvEnvironment"
    [[outcome]] = play_in_pool(environment, {"base_url": "http://127.0.0.1:9"}, [{"seed": 1}], [])
    assert outcome.done
    assert "the OpenEnv server http://127.0.0.1:9 started no episode" in outcome.error
