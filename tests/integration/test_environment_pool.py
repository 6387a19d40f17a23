"""EnvironmentPool with real processes: episodes that hang, crash, print, leave processes behind."""

import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path

import pytest
from PIL import Image

from support.processes import descendants, is_locked, is_running, wait_until
from trigon.environments.pool import EnvironmentPool
from trigon.environments.protocol import Message, Observation, Outcome
from trigon.environments.source import EnvironmentSettings, find_environment, find_tools
from trigon.errors import EpisodeError
from trigon.system.confinement import mechanisms, seccomp
from trigon.system.confinement.options import Confinement

ENVIRONMENT = """
import ctypes, fcntl, os, random, signal, sys, threading, time
from pathlib import Path
from PIL import Image

LOADED = os.getpid()

class NoText(Exception):
    def __str__(self):
        return self.args[1]

class Counter:
    def __init__(self, folder=None, close_seconds=0):
        self.folder, self.close_seconds = folder, close_seconds

    def reset(self, row):
        self.number, self.row = 0, row
        if row.get("reset") == "hang":
            time.sleep(1000)
        if row.get("reset") == "raise":
            raise OSError("no browser")
        if row.get("reset") == "nothing":
            return None
        sizes = [image.size for image in row["images"]]
        return {"text": f"{row.get('goal')} {sizes}", "image": Image.new("RGB", (4, 3), "red")}

    def step(self, action):
        self.number += 1
        match action:
            case "hang":
                time.sleep(1000)
            case "hang in C":
                7 ** (10**9) % 2  # holds the interpreter lock, so no Python signal handler runs
            case "raise":
                raise KeyError("door")
            case "raise without text":
                raise NoText("door")
            case "exit":
                sys.exit("enough")
            case "end at once":
                os._exit(3)
            case "segfault":
                ctypes.string_at(0)
            case "end later":
                threading.Timer(0.2, os._exit, (4,)).start()
            case "eat memory":
                return str(len(bytearray(64 << 30))), False
            case "hold memory":
                self.held = b"x" * (600 << 20)
                time.sleep(1000)
            case "close everything":
                os.closerange(0, 1000)
            case "stop yourself":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "write nonsense":
                for fd in range(3, 100):
                    try:
                        os.write(fd, b"nonsense" * 10)
                    except OSError:
                        pass
            case "reply twice":
                from trigon.system.frames import encode_frame
                for fd in range(3, 100):
                    try:
                        os.write(fd, encode_frame({"messages": None, "reward": None, "done": False}))
                    except OSError:
                        pass
            case "kill the server":
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(1000)
            case "print much":
                for number in range(100_000):
                    print("line", number, "x" * 50)
            case "return nothing":
                return None
            case "return five":
                return "a", 0.0, False, False, {}
            case "reward nan":
                return "a", float("nan"), False
            case "reward huge":
                return "a", 1e30, False
            case "leave processes":
                for detached in (False, True):
                    if os.fork() == 0:
                        if detached and os.fork() != 0:
                            os._exit(0)
                        os.setsid()
                        file = open(f"{self.folder}/{'detached' if detached else 'child'}", "w")
                        fcntl.flock(file, fcntl.LOCK_EX)
                        Path(f"{self.folder}/{detached}").touch()
                        time.sleep(1000)
                while len(list(Path(self.folder).glob("*e"))) < 2:
                    time.sleep(0.01)
            case "together":
                Path(self.folder, f"{self.row['goal']}.here").touch()
                while len(list(Path(self.folder).glob("*.here"))) < 64:
                    time.sleep(0.05)
                return "all were here", True
            case "take a moment":
                Path(self.folder, "began").touch()
                time.sleep(0.3)
            case "draw":
                return str(random.random()), False
            case "process":
                return f"{os.getpid()} {LOADED}", False
        return f"{action} {self.number}", self.number / 2, self.number == 3

    def close(self):
        time.sleep(self.close_seconds)
        if self.folder:
            Path(self.folder, f"closed {self.row.get('goal')}").touch()
"""


def settings_of(folder, **options):
    (folder / "counter.py").write_text(ENVIRONMENT)
    return EnvironmentSettings(environment=find_environment(f"{folder}/counter.py:Counter"), **options)


@contextmanager
def running(settings):
    with closing(EnvironmentPool(settings)) as pool:
        pool.ready()
        yield pool


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with running(settings_of(tmp_path_factory.mktemp("shared"))) as pool:
        yield pool


@pytest.fixture
def pool(shared):
    """Yield a pool whose episodes end with the test."""
    yield shared
    for number in list(shared._episodes):
        shared.stop(number)


def outcomes(pool, count):
    """Return this many outcomes, by the number of their episode."""
    found = []
    deadline = time.monotonic() + 30
    while len(found) < count:
        assert time.monotonic() < deadline, found
        found += pool.poll(1.0)
    assert len(found) == count
    return {outcome.episode: outcome for outcome in found}


def started(pool, count, **row):
    for number in range(count):
        pool.start(number, {"goal": number, **row})
    return outcomes(pool, count)


def step(pool, action, episode=0):
    pool.step(episode, action)
    return outcomes(pool, 1)[episode]


def png(size=(8, 6)):
    file = io.BytesIO()
    Image.new("RGB", size, "blue").save(file, "PNG")
    return file.getvalue()


def test_an_episode_from_reset_to_its_end(tmp_path):
    with running(settings_of(tmp_path, observation_role="tool")) as pool:
        pool.start(7, {"goal": "north"}, [png(), png((2, 2))])
        first = outcomes(pool, 1)[7]
        [message] = first.observation.messages
        assert (message.role, message.text) == ("tool", "<image>north [(8, 6), (2, 2)]")
        assert Image.open(io.BytesIO(message.images[0])).size == (4, 3)
        assert (first.reward, first.done, first.error) == (None, False, "")
        assert [step(pool, text, 7) for text in ("left", "up \ud83d", "go <image>")] == [
            Outcome(7, Observation((Message("tool", "left 1"),)), 0.5, False),
            Outcome(7, Observation((Message("tool", "up ? 2"),)), 1.0, False),
            Outcome(7, Observation((Message("tool", "go < image> 3"),)), 1.5, True),
        ]
        pool.stop(7)
        pool.start(7, {"reset": "nothing"})
        assert outcomes(pool, 1)[7] == Outcome(7, None, None, False)


FAULTS = {
    "hang": "no result of step within 1 s; its process was killed",
    "hang in C": "no result of step within 1 s; its process was killed",
    "stop yourself": "no result of step within 1 s; its process was killed",
    "raise": "KeyError: 'door' (counter.py:",
    "raise without text": "NoText: its text cannot be made",
    "exit": "SystemExit: enough (counter.py:",
    "end at once": "its process exited with code 3",
    "segfault": "its process died of signal 11 (Segmentation fault)",
    "eat memory": "MemoryError (counter.py:",
    "close everything": "its process exited with code 1",
    "write nonsense": "its process sent what is no reply",
    "return nothing": "step returned None; return (observation, reward, done)",
    "return five": "step returned ('a', 0.0, False, False, {}); return (observation, reward, done)",
    "reward nan": "step returned nan for the reward, expected a finite number",
    "reward huge": "step returned 1e+30 for the reward, expected a number from -1e+06 to 1e+06",
}


@pytest.mark.faults
def test_environments_are_closed_however_their_episode_ends(tmp_path):
    with running(settings_of(tmp_path, kwargs={"folder": str(tmp_path), "close_seconds": 0.3})) as pool:
        started(pool, 5)
        for number, failure in enumerate(("raise", "exit", "return nothing")):
            assert step(pool, failure, number).error
        pool.stop(3)
    assert sorted(path.name for path in tmp_path.glob("closed *")) == [f"closed {number}" for number in range(5)]


@pytest.mark.faults
def test_an_environment_is_closed_whose_reply_arrives_while_its_episode_is_stopped(tmp_path):
    with running(settings_of(tmp_path, kwargs={"folder": str(tmp_path)})) as pool:
        started(pool, 1)
        pool.step(0, "take a moment")
        wait_until(lambda: (tmp_path / "began").exists())
        with pool._changed:  # when the thread has the reply, it waits for the lock
            time.sleep(1.0)
            pool.stop(0)
        wait_until(lambda: (tmp_path / "closed 0").exists())


@pytest.mark.faults
def test_the_time_in_which_other_episodes_are_forked_does_not_count(tmp_path):
    # As with gigabytes of memory, whose pages are listed.
    settings = settings_of(tmp_path, timeout_seconds=1.0)
    file = tmp_path / "counter.py"
    file.write_text(f"{ENVIRONMENT}\nos.register_at_fork(before=lambda: time.sleep(0.4))\n")
    with running(settings) as pool:
        assert [outcome.error for outcome in started(pool, 6).values()] == [""] * 6  # the last after two seconds


@pytest.mark.faults
def test_a_failure_costs_its_episode_and_no_other(tmp_path):
    actions = [action for fault in FAULTS for action in (fault, "go")]
    resets = {
        "hang": "no result of reset within 1 s; its process was killed",
        "raise": "OSError: no browser (counter.py:",
    }
    with running(settings_of(tmp_path, timeout_seconds=1.0)) as pool:
        started(pool, len(actions))
        for number, action in enumerate(actions):
            pool.step(number, action)
        for number, how in enumerate(resets, len(actions)):
            pool.start(number, {"reset": how})
        found = outcomes(pool, len(actions) + len(resets))
        for number, action in enumerate(actions):
            outcome = found[number]
            if action in FAULTS:
                assert outcome.error.startswith(FAULTS[action]), (action, outcome)
                assert (outcome.observation, outcome.reward, outcome.done) == (None, None, True)
                assert step(pool, "go", number).error == outcome.error  # it stays failed
            else:
                assert outcome == Outcome(number, Observation((Message("user", "go 1"),)), 0.5, False)
                assert step(pool, "on", number).reward == 1.0
        for number, error in enumerate(resets.values(), len(actions)):
            assert found[number].error.startswith(error)
        assert step(pool, "end later", 1).error == ""
        time.sleep(1)  # it dies between its turns
        assert step(pool, "go", 1).error == "its process exited with code 4"


@pytest.mark.faults
def test_a_reply_that_was_not_asked_for_ends_its_episode(pool):
    started(pool, 2)
    assert step(pool, "reply twice") == Outcome(0, None, None, False)
    assert pool.poll(1.0) == []
    assert "a reply that was not asked for" in step(pool, "go").error
    assert step(pool, "go", 1).error == ""


@pytest.mark.faults
def test_the_death_of_the_fork_server_costs_the_episodes_that_run(pool):
    started(pool, 3)
    assert "fork server of its process" in step(pool, "kill the server").error
    assert "fork server of its process" in step(pool, "go", 1).error
    for number in range(3):
        pool.stop(number)
    assert {outcome.error for outcome in started(pool, 3).values()} == {""}


@pytest.mark.extended
@pytest.mark.faults
@pytest.mark.skipif(sys.platform != "linux", reason="limits of other processes are set on Linux only")
def test_a_fork_server_without_descriptors_is_started_again(tmp_path):
    with running(settings_of(tmp_path)) as pool:
        started(pool, 2)
        for pid in descendants(pool.process_ids[0]):  # in a process namespace, it has another number
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3))
        for number in range(2, 6):
            pool.start(number, {"goal": number})
        # Those that it could not fork are not its own: the next one forks them.
        assert {outcome.error for outcome in outcomes(pool, 4).values()} == {""}
        assert "fork server of its process" in step(pool, "go", 0).error


@pytest.mark.extended
@pytest.mark.faults
def test_a_fork_server_that_dies_again_and_again_ends_the_run(tmp_path):
    with running(settings_of(tmp_path)) as pool, pytest.raises(EpisodeError, match="died 3 times in a row"):  # noqa: PT012
        for number in range(4):
            pool.start(number, {})
            outcomes(pool, 1)
            pool._num_deaths = number  # as if no episode had given an outcome in between
            step(pool, "kill the server", number)


@pytest.mark.extended
@pytest.mark.faults
def test_the_largest_episode_is_killed_when_memory_runs_out(tmp_path):
    confinement = Confinement(max_memory_bytes=700 << 20)
    with running(settings_of(tmp_path, confinement=confinement)) as pool:
        started(pool, 2)
        pool.step(0, "hold memory")
        assert "of memory, the most of all running forks" in outcomes(pool, 1)[0].error
        assert step(pool, "go", 1).error == ""


@pytest.mark.extended
@pytest.mark.faults
def test_much_output_is_logged_in_part_and_harms_nothing(pool, caplog):
    started(pool, 1)
    assert step(pool, "print much").error == ""
    wait_until(lambda: "more than 65536 bytes printed" in caplog.text)
    assert "[environment] line 0 " in caplog.text
    assert len(caplog.text) < 300_000


CONFINEMENTS = {
    "all": Confinement(),
    "without namespaces": Confinement(without=("namespaces",)),
    "without all": Confinement(without=("namespaces", "fewer capabilities", "landlock", "signal scope", "seccomp")),
    "off": Confinement(level="off"),
}


@pytest.mark.extended(but=["all"])
@pytest.mark.faults
@pytest.mark.parametrize("confinement", CONFINEMENTS.values(), ids=CONFINEMENTS)
def test_what_an_episode_leaves_is_killed_with_it(tmp_path, confinement):
    with running(settings_of(tmp_path, kwargs={"folder": str(tmp_path)}, confinement=confinement)) as pool:
        started(pool, 2)
        assert step(pool, "leave processes").error == ""
        assert is_locked(tmp_path / "child")
        assert is_locked(tmp_path / "detached")
        pool.stop(0)
        wait_until(lambda: not is_locked(tmp_path / "child") and not is_locked(tmp_path / "detached"))
        assert (tmp_path / "closed 0").exists()
        assert step(pool, "go", 1).error == ""


@pytest.mark.extended
def test_64_steps_run_at_the_same_time_in_processes_of_their_own(tmp_path):
    # Each waits until all 64 are in the same call, so one less at a time would never end.
    with running(settings_of(tmp_path, kwargs={"folder": str(tmp_path)})) as pool:
        started(pool, 64)
        for number in range(64):
            pool.step(number, "together")
        found = outcomes(pool, 64)
        assert {outcome.observation.messages[0].text for outcome in found.values()} == {"all were here"}


def test_the_code_is_loaded_once_and_every_episode_starts_from_the_same_state(pool):
    started(pool, 3)
    processes = [step(pool, "process", number).observation.messages[0].text.split() for number in range(3)]
    drawn = {step(pool, "draw", number).observation.messages[0].text for number in range(3)}
    assert len({own for own, _ in processes}) == 3
    assert len({loaded for _, loaded in processes}) == 1
    assert len(drawn) == 1


@pytest.mark.extended
def test_episodes_beyond_the_limit_wait_for_a_process(tmp_path):
    with running(settings_of(tmp_path, max_episodes=2)) as pool:
        for number in range(5):
            pool.start(number, {"goal": number})
        first = {}
        while len(first) < 2:
            first |= {outcome.episode: outcome for outcome in pool.poll(0)}
        time.sleep(0.3)
        assert sorted(first) == [0, 1]
        assert pool.poll(0) == []
        pool.stop(0)
        pool.stop(1)
        assert sorted(outcomes(pool, 2)) == [2, 3]
        # A caller that waits for all gets all: those that run owe it nothing.
        assert sorted(outcomes(pool, 1)) == [4]


def test_a_stopped_episode_says_nothing_more(pool):
    started(pool, 2)
    pool.step(0, "go")
    pool.step(1, "hang")
    pool.stop(0)
    pool.stop(1)
    assert pool.poll(0.5) == []
    with pytest.raises(KeyError):
        pool.step(0, "go")


def described(settings):
    with closing(EnvironmentPool(settings, describe=True)) as pool:
        return pool.schemas


@pytest.mark.extended
def test_tools_are_described_when_the_code_is_loaded(tmp_path):
    assert described(settings_of(tmp_path)) == ()
    [crop] = described(EnvironmentSettings(environment=None, tools=find_tools(["crop"])))
    assert list(crop["function"]["parameters"]["properties"]) == ["bbox_2d", "img_idx"]
    (tmp_path / "tools.py").write_text("def look(place: str): 'Look somewhere.'")
    with pytest.raises(EpisodeError, match="tool 'look' cannot be described to the model"):
        described(EnvironmentSettings(environment=None, tools=find_tools([f"{tmp_path}/tools.py:look"])))


@pytest.mark.extended
def test_a_class_given_in_python_runs_in_processes_of_its_own():
    class Echo:
        def reset(self, row):
            self.pid = os.getpid()

        def step(self, action):
            return f"{action} {self.pid != os.getppid()}", False

    with running(EnvironmentSettings(environment=find_environment(Echo))) as pool:
        started(pool, 1)
        assert step(pool, "hello").observation.messages[0].text == "hello True"


def test_code_that_cannot_be_used_says_so_before_an_episode(tmp_path):
    with closing(EnvironmentPool(settings_of(tmp_path, kwargs={"foldr": "x"}))) as pool:
        for use in (pool.ready, lambda: pool.start(0, {})):
            with pytest.raises(EpisodeError, match=r"does not accept 'foldr'.*did you mean folder\?"):
                use()


@pytest.mark.faults
def test_nothing_is_left_after_close(tmp_path):
    pool = EnvironmentPool(settings_of(tmp_path, kwargs={"folder": str(tmp_path)}))
    pool.ready()
    started(pool, 2)
    step(pool, "leave processes")
    pool.step(1, "hang")
    pids = set(pool.process_ids) | set(descendants(pool.process_ids[0]))
    assert len(pids) >= 4
    pool.close()
    assert not any(is_running(pid) for pid in pids)
    assert not is_locked(tmp_path / "detached")
    with pytest.raises(EpisodeError, match="is closed"):
        pool.poll(1.0)


@pytest.mark.extended
@pytest.mark.faults
def test_nothing_is_left_when_the_process_of_the_pool_is_killed(tmp_path):
    settings_of(tmp_path)
    script = f"""
import time
from trigon.environments.pool import EnvironmentPool
from trigon.environments.source import EnvironmentSettings, find_environment
source = find_environment("{tmp_path}/counter.py:Counter")
pool = EnvironmentPool(EnvironmentSettings(environment=source, kwargs={{"folder": "{tmp_path}"}}))
pool.start(0, {{}})
pool.poll(60)
pool.step(0, "leave processes")
pool.poll(60)
print(pool.process_ids[0], flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        supervisor = int(process.stdout.readline())
        pids = {supervisor, *descendants(supervisor)}
        assert len(pids) >= 3
        assert is_locked(tmp_path / "detached")
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(is_running(pid) for pid in pids))
    wait_until(lambda: not is_locked(tmp_path / "detached"))


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@cache
def obstacle_of_python():
    """Return why the tool python cannot be used on this system; "" if it can."""
    try:
        with running(EnvironmentSettings(environment=None, tools=find_tools(["python"]))):
            return ""
    except EpisodeError as error:
        return str(error)


def test_tools_beside_an_environment_answer_turns_with_calls_and_the_environment_all_others(tmp_path):
    settings = settings_of(tmp_path, tools=find_tools(["crop"]), kwargs={"folder": str(tmp_path)})
    with running(settings) as pool:
        pool.start(0, {"goal": 7}, [png((100, 50))])
        [first] = outcomes(pool, 1)[0].observation.messages
        assert first.role == "user"
        cropped = step(pool, call("crop", bbox_2d=[0, 0, 500, 1000]))
        assert (cropped.reward, cropped.done) == (None, False)
        [message] = cropped.observation.messages
        assert (message.role, len(message.images)) == ("tool", 1)
        acted = step(pool, "go")  # its first step
        assert (acted.observation.messages[0].text, acted.reward, acted.done) == ("go 1", 0.5, False)
        assert not step(pool, call("crop", bbox_2d=[0, 0, 500, 1000])).done
        assert [step(pool, "go").done for _ in range(2)] == [False, True]
        pool.stop(0)
        wait_until(lambda: (tmp_path / "closed 7").exists())


@pytest.fixture
def needs_python():
    if obstacle := obstacle_of_python():
        pytest.skip(obstacle)


@pytest.fixture(scope="module", params=["default", "strict"])
def tools(request):
    obstacle = mechanisms.find_landlock_version() == 0 or not seccomp.is_available()
    if request.param == "strict" and obstacle:
        pytest.skip("confinement=strict needs Landlock and seccomp")
    settings = EnvironmentSettings(
        confinement=Confinement(level=request.param),
        environment=None,
        tools=find_tools(["crop"] if obstacle_of_python() else ["crop", "python"]),
        observation_role="tool",
        timeout_seconds=20.0,
    )
    with running(settings) as pool:
        yield pool


@pytest.fixture
def python(needs_python, tools):
    tools.start(0, {"answer": "the ground truth"}, [png((100, 50))])
    assert outcomes(tools, 1)[0] == Outcome(0, None, None, False)

    def run(code):
        outcome = step(tools, call("python", code=code))
        assert outcome.error == ""
        return outcome.observation.messages[0].text

    yield run
    tools.stop(0)


@pytest.mark.extended
def test_a_turn_without_a_call_ends_the_episode_without_a_process(tools):
    before = descendants(tools.process_ids[0])
    tools.start(5, {})
    assert outcomes(tools, 1)[5] == Outcome(5, None, None, False)
    assert step(tools, "The answer is 4.", 5) == Outcome(5, None, None, True)
    assert descendants(tools.process_ids[0]) == before
    tools.stop(5)


SHOWN = {
    "6 * 7": "42",
    "x = 6\nprint(x)\nx * 7": "6\n42",
    "x = 6": "(no output)",
    "print('<image>')": "< image>",
    "import os; sorted(os.listdir())": "['image_0.png']",
    "from PIL import Image; Image.open('image_0.png').size": "(100, 50)",
    "open('a.txt', 'w').write('abc'); open('a.txt').read()": "'abc'",
    "import sys; sys.exit(3)": "(no output)",
    "import asyncio; asyncio.run(asyncio.sleep(0, 7))": "7",
    "import mmap; len(mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE))": "4096",
    "import mmap; file = open('b', 'wb+'); file.truncate(4096); len(mmap.mmap(file.fileno(), 4096))": "4096",
    "from multiprocessing import Array; Array('i', 3)[:]": "[0, 0, 0]",
}


@pytest.mark.extended(cases=["strict"])
def test_python_shows_what_is_printed_and_the_last_value(python):
    assert {code: python(code) for code in SHOWN} == SHOWN


LIMITS = {
    "1 / 0": 'File "code", line 1, in <module>\nZeroDivisionError',
    "x = ": "SyntaxError",
    "bytearray(64 << 30)": "MemoryError",
    "print('x' * 50_000)": "(40,000 characters are left out)",
    "open('big', 'wb').write(bytes(100 << 20))": "File too large",
    "import ctypes; ctypes.string_at(0)": "ended by signal 11",
    "import socket; socket.socket()": "PermissionError",
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:1')": "Operation not permitted",
    "open('/etc/changed', 'w')": "Read-only file system",
    "open('/proc/self/environ').read()": "FileNotFoundError",
    "while True: print('x' * 1000)": "printed more than 16 MiB",
    # Memory that is not counted as a process's.
    "import mmap; mmap.mmap(-1, 4096)": "PermissionError",
    "open('/dev/zero')": "FileNotFoundError",
    "import socket; socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)": "PermissionError",
    # Neither the ground truth nor the variables of the run.
    "import gc, os\n''.join(['the ground ', 'truth']) in str(gc.get_objects()), sorted(os.environ)": (
        "(False, ['HOME', 'LANG', "
    ),
}


@pytest.mark.extended
@pytest.mark.faults
def test_python_keeps_its_limits(python):
    for code, expected in LIMITS.items():
        assert expected in python(code), code
    assert python("1 + 1") == "2"


@pytest.mark.faults
def test_tools_do_not_get_the_row_and_python_reads_no_file_beside_them(needs_python, tmp_path):
    (tmp_path / "tools.py").write_text(
        'def look() -> bool:\n    "Look for the ground truth."\n    import gc\n'
        '    return "".join(["the ground", " truth"]) in str(gc.get_objects())\n'
    )
    (tmp_path / "answers.json").write_text("[42]")
    tools = find_tools(["python", f"{tmp_path}/tools.py:look"])
    with running(EnvironmentSettings(environment=None, tools=tools)) as pool:
        started(pool, 1, answer="the ground truth")
        assert step(pool, call("look")).observation.messages[0].text == "false"
        read = step(pool, call("python", code=f"open('{tmp_path}/answers.json').read()"))
        assert "FileNotFoundError" in read.observation.messages[0].text


@pytest.mark.extended(cases=["strict"])
@pytest.mark.faults
def test_python_leaves_no_process(python, tools):
    assert python("1") == "1"  # from here on, the episode has its process
    before = set(descendants(tools.process_ids[0]))
    assert python("import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\n7") == "7"
    deadline = time.monotonic() + 10  # the kernel takes a moment to end what was killed
    while (left := set(descendants(tools.process_ids[0])) - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == set()


@pytest.mark.extended
@pytest.mark.faults
def test_python_that_takes_too_long_is_ended_and_the_episode_continues(needs_python):
    with running(EnvironmentSettings(environment=None, tools=find_tools(["python"]), timeout_seconds=4.0)) as pool:
        pool.start(0, {})
        outcomes(pool, 1)
        outcome = step(pool, call("python", code="while True: pass") + call("python", code="1 + 1"))
        texts = [message.text for message in outcome.observation.messages]
        assert texts == ["The code took more than 1 s and was ended.", "2"]


# `succeeding` returns the attacks that succeed: on a process and a file, and on the system.
ATTACKS = r"""
import ctypes, errno, fcntl, os, resource, socket, stat, struct, sys, time

libc = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"

def call(number, *arguments):
    return libc.syscall(number, *[ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]) >= 0

def attacks(pid, path, folder):
    shared = libc.shmget(0x7472, 1 << 16, 0o1666)
    yield "limits", lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (64, 64)) and True
    yield "priority", lambda: os.setpriority(os.PRIO_PROCESS, pid, 19) or True
    yield "processors", lambda: os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))}) or True
    yield "scheduler", lambda: os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0)) or True
    yield "priority of disks", lambda: call(251 if X86 else 30, 1, pid, 3 << 13)
    yield "signals", lambda: os.kill(pid, 0) or True
    yield "pidfd", lambda: os.pidfd_open(pid) > 0
    yield "ptrace", lambda: libc.ptrace(0x4206, pid, None, None) == 0
    vector = b"\0" * 16
    yield "memory", lambda: libc.process_vm_readv(pid, vector, 1, vector, 1, 0) >= 0 or ctypes.get_errno() == 14
    yield "shared memory", lambda: shared >= 0 and libc.shmctl(shared, 0, None) == 0
    yield "message queue", lambda: libc.msgctl(libc.msgget(0x7472, 0o1666), 0, None) == 0
    yield "read", lambda: bool(open(path).read())
    yield "stat", lambda: os.stat(path).st_size > 0
    yield "names", lambda: os.path.basename(path) in os.listdir(folder)
    yield "mode", lambda: os.chmod(path, 0o666) or True
    yield "owner", lambda: os.chown(path, os.getuid(), os.getgid()) or True
    yield "times", lambda: os.utime(path, (1, 1)) or True
    yield "attributes", lambda: os.setxattr(path, "user.trigon", b"1") or True
    yield "write", lambda: open(path, "a").close() or True
    yield "symlink", lambda: os.symlink(path, "link") or bool(open("link").read())
    yield "hard link", lambda: os.link(path, "hard") or True
    yield "programs of Python", lambda: os.utime(sys.executable) or True
    made = os.path.join(sys.prefix, "trigon-attack")
    yield "folders of Python", lambda: open(made, "w").close() or os.unlink(made) or True
    yield "accounts", lambda: len(open("/etc/passwd").readlines()) > 1
    yield "/proc", lambda: bool(os.listdir("/proc"))
    yield "/sys", lambda: bool(os.listdir("/sys"))
    yield "sockets", lambda: socket.socket() and True
    yield "unix sockets", lambda: socket.socket(socket.AF_UNIX) and True
    yield "network interfaces", lambda: len(socket.if_nameindex()) > 0
    yield "files in memory", lambda: os.memfd_create("attack") > 0
    yield "namespaces", lambda: call(272 if X86 else 97, 0x10000000)

def system_attacks():
    yield "secrets", lambda: bool(open("/etc/shadow").read())
    yield "device", lambda: os.mknod("disk", 0o600 | stat.S_IFBLK, os.makedev(8, 0)) or True
    yield "devices", lambda: bool(set(os.listdir("/dev")) - {"null", "full", "random", "urandom", "shm"})
    yield "host name", lambda: socket.sethostname("attacked") or True
    yield "clock", lambda: time.clock_settime(time.CLOCK_REALTIME, time.time()) or True
    yield "root", lambda: os.setuid(0) or True
    yield "init", lambda: os.kill(1, 9) or time.sleep(0.2) or False

def succeeding(found):
    names = []
    for name, attack in found:
        try:
            if attack():
                names.append(name)
        except (OSError, AttributeError):
            pass
    return names
"""


@pytest.mark.extended
@pytest.mark.faults
@pytest.mark.skipif(sys.platform != "linux", reason="the attacks are those of Linux")
def test_python_can_attack_nothing_that_an_ordinary_process_of_the_user_can(python, tools, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("the ground truth")
    secret.chmod(0o600)
    pool = tools.process_ids[0]
    assert python("1 + 1") == "2"  # the processes of earlier calls have ended, but for those that stay
    time.sleep(0.5)
    victims = [os.getpid(), pool, *descendants(pool)]

    def state():
        limits = [resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in victims]
        priorities = [os.getpriority(os.PRIO_PROCESS, pid) for pid in victims]
        processors = [os.sched_getaffinity(pid) for pid in victims]
        shared = len(Path("/proc/sysvipc/shm").read_text().splitlines())
        found = secret.stat()
        return limits, priorities, processors, shared, found.st_mode, found.st_mtime_ns, os.uname().nodename

    before = state()
    for pid in (*victims, 1):
        code = f"{ATTACKS}\nsucceeding([*attacks({pid}, {str(secret)!r}, {str(tmp_path)!r}), *system_attacks()])"
        expected = "['signals', 'pidfd']" if pid == 1 else "[]"  # 1 is the first process of its own namespace
        assert python(code) == expected
    assert state() == before
    assert python("1 + 1") == "2"
    # The same attacks on a process and a file of this test's own, without a sandbox.
    with subprocess.Popen(["sleep", "100"]) as target:
        found = f"attacks({target.pid}, {str(secret)!r}, {str(tmp_path)!r})"
        code = f"{ATTACKS}\nprint(*succeeding({found}), sep=',')"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
        target.kill()
    possible = set(done.stdout.strip().split(","))
    assert {"limits", "priority", "processors", "signals", "shared memory", "read", "mode", "times"} <= possible


BOMBS = {
    "processes": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "took more than"),
    "memory": ("x = []\nwhile True: x.append(b'x' * (64 << 20))", "too much time or memory"),
    "memory of many": (
        "import os\nfor _ in range(6): os.fork()\nx = b'x' * (256 << 20)\nimport time; time.sleep(100)",
        "too much time or memory",
    ),
    "disk": (
        "try:\n    for number in range(99): open(f'/tmp/{number}', 'wb').write(bytes(8 << 20))\n"
        "except OSError as error: print(error)",
        "No space left on device",
    ),
    "files": (
        "try:\n    for number in range(10**6): open(f'/tmp/{number}', 'w').close()\nexcept OSError as e: print(e)",
        "No space left on device",
    ),
    "daemons": (
        "import os, time\nfor _ in range(9):\n    if os.fork() == 0:\n        os.setsid()\n        time.sleep(1000)\n7",
        "7",
    ),
    "output": ("while True: print('x' * 1000)", "printed more than"),
}


@pytest.mark.faults
@pytest.mark.extended
def test_bombs_of_python_cost_no_other_episode(needs_python):
    confinement = Confinement(max_memory_bytes=3 << 30)
    tools = find_tools(["python"])
    settings = EnvironmentSettings(environment=None, tools=tools, timeout_seconds=60.0, confinement=confinement)
    with running(settings) as pool:
        started(pool, len(BOMBS) + 8)
        for number, (code, _) in enumerate(BOMBS.values()):
            pool.step(number, call("python", code=code))
        others = range(len(BOMBS), len(BOMBS) + 8)
        for number in others:
            pool.step(number, call("python", code="sum(range(10**6))"))
        found = outcomes(pool, len(BOMBS) + 8)
        assert {found[number].observation.messages[0].text for number in others} == {"499999500000"}
        for number, (name, (_, expected)) in enumerate(BOMBS.items()):
            assert expected in found[number].observation.messages[0].text, (name, found[number])
        for number in range(len(BOMBS)):  # all episodes continue
            assert step(pool, call("python", code="1 + 1"), number).observation.messages[0].text == "2"
        [supervisor] = pool.process_ids
        expected = len(BOMBS) + 8 + 4  # episodes; code server, process 1, fork server
        wait_until(lambda: len(descendants(supervisor)) <= expected)


@pytest.mark.faults
def test_python_is_refused_with_a_reason_where_it_cannot_be_confined():
    settings = EnvironmentSettings(
        environment=None, tools=find_tools(["python"]), confinement=Confinement(without=("namespaces",))
    )
    with pytest.raises(EpisodeError, match=r"the tool python cannot be confined .*namespaces.*worker\.rollout\.tools"):
        described(settings)


@pytest.mark.extended
@pytest.mark.faults
@pytest.mark.skipif(not seccomp.is_available(), reason="this system has no seccomp")
@pytest.mark.parametrize("forbidden", ["unshare", "mount"])
def test_python_says_what_to_allow_where_a_container_forbids_namespaces(needs_python, forbidden):
    script = f"""
from trigon.environments.pool import EnvironmentPool
from trigon.environments.source import EnvironmentSettings, find_tools
from trigon.system.confinement import seccomp
seccomp.keep_only(seccomp.Profile(seccomp.ALL.keys() - {{"clone3", {forbidden!r}}}))
pool = EnvironmentPool(EnvironmentSettings(environment=None, tools=find_tools(["python"])))
try:
    pool.ready()
except Exception as error:
    print(error)
pool.close()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    for fact in ("the tool python", "Operation not permitted", "--security-opt", "worker.rollout.tools"):
        assert fact in done.stdout, done
