"""The command line: help, errors and --print-config."""

import contextlib
import signal
import subprocess
import sys

import pytest
import yaml

from trigon import __version__
from trigon.assemble import start
from trigon.assemble.start import StopSignals
from trigon.system.hangs import HangWatch
from trigon.system.stopping import Terminated
from trigon.tools.cli.main import COMMANDS, main

COMPLETE = [
    "data.train_files=hiyouga/geometry3k@train",
    "data.val_files=hiyouga/geometry3k@test",
    "worker.actor.model.model_path=Qwen/Qwen2.5-VL-3B-Instruct",
    "worker.reward.reward_function=math",
    "worker.rollout.n=5",
]
HEAVY = ("torch", "vllm", "transformers", "datasets", "pydantic", "rich", "numpy", "yaml", "PIL", "safetensors")


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [line.split()[0] for line in out.splitlines()[2:]] == list(COMMANDS)
    assert max(map(len, out.splitlines())) <= 100
    for arguments, status in (["help"], 0), ([], 2):
        assert main(arguments) == status
        assert capsys.readouterr().out == out

    for flag in ("-V", "version"):
        assert main([flag]) == 0
        assert capsys.readouterr().out == f"trigon {__version__}\n"


def test_the_error_of_an_unknown_command_lists_the_commands(capsys):
    assert main(["trian"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("trigon: unknown command 'trian'; did you mean train?\n")
    assert "  train " in err


@pytest.mark.parametrize(
    ("command", "name", "status", "error"),
    [("train", "missing.yaml", 2, "ConfigError"), ("export", "global_step_5", 1, "CheckpointError")],
)
def test_a_trigon_error_is_one_line_without_a_traceback(capsys, tmp_path, command, name, status, error):
    assert main([command, str(tmp_path / name)]) == status
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith(f"{error}: ")
    assert name in err


ESCAPES = "a\x1b]0;title\x07\x1b[2J\x9b31m\u202e\udcff"
SHOWN = r"a\x1b]0;title\x07\x1b[2J\x9b31m\u202e\udcff"


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", f"{ESCAPES}.yaml"],
        ["train", f"data.image_dir=./{ESCAPES}"],
        ["export", ESCAPES],
        ["export", ESCAPES, ESCAPES],
        ["quickstart", "--seed", ESCAPES],
        [ESCAPES],
    ],
)
def test_control_characters_in_error_messages_are_shown_as_text(capsys, arguments):
    with contextlib.suppress(SystemExit):  # argparse exits so
        assert main(arguments) in (1, 2)
    out, err = capsys.readouterr()
    assert SHOWN in err.replace("\\\\", "\\")
    assert not set("\x1b\x07\x9b\u202e\udcff") & set(out + err)


def test_control_characters_in_warnings_are_shown_as_text(capsys, tmp_path):
    file = tmp_path / "run\x1b[2J.yaml"
    file.write_text('trainer: {total_episodes: 2}\ndata: {system_prompt: "\\e[2J\\x9b"}\n')
    assert main(["train", str(file), *COMPLETE, "--print-config"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("warning: ")  # on standard error, so that the output is a configuration
    assert r"run\x1b[2J.yaml" in err
    assert not set("\x1b\x9b") & set(out + err)


def test_the_configuration_is_checked_before_heavy_libraries_are_imported(tmp_path):
    """By the module of EasyR1, too, which is the train command."""
    script = (
        "import sys\nfrom trigon.trainer import main as easyr1\nfrom trigon.tools.cli import main\n"
        f"main.main(['train', '--print-config', *{COMPLETE!r}])\n"
        f"print('LOADED', *sorted(set(sys.modules) & set({HEAVY!r})))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert set(done.stdout.splitlines()[-1].split()[1:]) <= {"pydantic", "yaml"}
    command = [sys.executable, "-m", "trigon.trainer.main", f"config={tmp_path / 'missing.yaml'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr[:13]) == (2, "", "ConfigError: ")


def test_print_config_prints_every_value_and_where_it_was_written_and_can_be_read_again(capsys, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "data:\n  max_prompt_length: 1024\n  max_response_length: 2048\n"
        f"  system_prompt: |\n    data:\n      max_pixels: {'long ' * 60}\n"
        "worker.actor.optim.betas: [0.9, 0.95]\n"
    )
    arguments = [*COMPLETE, "data.max_response_length=256", "worker.actor.model.override_config={a: {b: 1}}"]
    assert main(["train", str(file), *arguments, "--print-config"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"  max_prompt_length: 1024  # {file}, line 2\n" in out
    assert "  max_response_length: 256  # command line\n" in out
    assert f"  # {file}, line 4\n  system_prompt: " in out  # continues in the next lines
    assert f"      betas:  # {file}, line 7\n      - 0.9\n      - 0.95\n" in out
    assert "      override_config:  # command line\n        a:\n          b: 1\n" in out
    assert out.count("# command line") == len(arguments)
    assert out.count(f"# {file}") == 3
    printed = yaml.safe_load(out)
    assert printed["data"]["system_prompt"].startswith("data:\n  max_pixels: long long")
    assert printed["worker"]["actor"]["optim"]["lr"] == 1e-6  # a default
    assert out.splitlines()[0] == "# Options without a comment have their defaults."
    (tmp_path / "printed.yaml").write_text(out)
    assert main(["train", str(tmp_path / "printed.yaml"), "--print-config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == printed


@pytest.mark.parametrize("unbuffered", [["-u"], []], ids=["unbuffered", "buffered"])
def test_an_output_that_nothing_reads_ends_a_command_quietly(unbuffered):
    command = [sys.executable, *unbuffered, "-m", "trigon", "options", "lr"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode in ({141} if unbuffered else {0, 141})


STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@pytest.mark.parametrize("number", STOPS)
@pytest.mark.parametrize("owns_process", [True, False])
def test_the_first_signal_is_a_request_and_the_second_ends_the_steps_at_once(capfd, monkeypatch, number, owns_process):
    """Some time after a second Ctrl-C, only a process of the run is killed."""
    monkeypatch.setattr(start, "REPEAT_SECONDS", 0.0)
    ends, before = [], [signal.getsignal(each) for each in STOPS]

    class Watch(HangWatch):
        def end_within(self, seconds, *, status):
            ends.append((seconds, status))

    stop = StopSignals(owns_process=owns_process)
    stop.use_hang_watch(Watch())
    with stop.handled(), stop.deferred():
        assert not stop.requested()
        signal.raise_signal(number)
        assert stop.received is number
        assert "finishing and saving the current step" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        signal.raise_signal(number)  # does not interrupt the end of the run's processes
    assert [signal.getsignal(each) for each in STOPS] == before
    kills = owns_process or number != signal.SIGINT
    assert ends == ([(start.AT_ONCE_SECONDS, 128 + number)] if kills else [])


@pytest.mark.parametrize(("first", "second"), [("SIGTERM", "SIGTERM"), ("SIGHUP", "SIGTERM")])
def test_a_signal_that_is_sent_twice_at_once_is_one_request(first, second):
    stop = StopSignals()
    with stop.handled(), stop.deferred():
        signal.raise_signal(signal.Signals[first])
        signal.raise_signal(signal.Signals[second])
        assert stop.received is signal.Signals[first]
        with pytest.raises(KeyboardInterrupt):  # Ctrl-C is always one more
            signal.raise_signal(signal.SIGINT)


def test_before_the_steps_a_signal_ends_the_run_at_once():
    stop = StopSignals()
    with stop.handled(), pytest.raises(Terminated, match="SIGTERM"):
        signal.raise_signal(signal.SIGTERM)
    assert stop.received is signal.SIGTERM


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        stop = StopSignals()
        with stop.deferred():
            signal.raise_signal(signal.SIGINT)
        assert not stop.requested()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
