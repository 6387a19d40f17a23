"""What the pages tell a reader to type, and what they quote, exists.

Blocks that are marked as run are run by integration/test_page_sessions.py; here every block is
checked: commands for their flags, options and files, YAML for its keys, Python for its syntax.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

import trigon
from support.pages import PAGES, ROOT, Block, blocks_of, sessions
from support.recipes import arguments_of
from trigon.config.legacy import IGNORED, RENAMED
from trigon.config.load import load_config, split_arguments
from trigon.config.options import options
from trigon.errors import ConfigError
from trigon.tools.cli.main import COMMANDS, find_command
from trigon.tools.cli.parser import parser_of
from trigon.tools.eval.settings import SHORT_NAMES

PROGRAMS = {
    *("apt", "cat", "cd", "chmod", "curl", "docker", "echo", "export", "git", "head", "hf", "kubectl", "ls", "mkdir"),
    *("nvidia-smi", "ray", "rm", "sbatch", "source", "ssh", "tail", "tar", "tee", "uv", "vllm", "wc"),
}
"""Programs of others, whose arguments are not checked."""

PATHS = {
    *("data.train_files", "data.val_files", "data.image_dir", "data.format_prompt", "trainer.load_checkpoint_path"),
    *("worker.actor.model.model_path", "worker.reward.reward_function", "trainer.save_checkpoint_path"),
}
"""Options that name files of the reader, which do not exist here."""

COMPLETE = [
    *("data.train_files=owner/data", "data.val_files=owner/data", "worker.actor.model.model_path=owner/model"),
    *("worker.reward.reward_function=math", "trainer.device=cpu"),
]
SECTIONS = {"data", "algorithm", "worker", "trainer"}
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SHELL = [block for block in BLOCKS if block.language in ("bash", "sh", "shell", "console")]


def commands_of(script: str) -> Iterator[list[str]]:
    """Yield the words of every command of a shell script, without redirections."""
    script = re.sub(r"<<'?(\w+)'?\n.*?^\1$", "", script, flags=re.MULTILINE | re.DOTALL)
    script = re.sub(r"\\\n\s*", " ", script)
    script = re.sub(r"\$\([^()]*\)|\$\w+", "1", script)  # values are not known; a number is good as any
    script = re.sub(r"(?<=\s)\d?>+(?:&\d|\s*\S+)", "", script)
    for line in script.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word.strip(";&|"):
                words.append(word)
                continue
            while words and (words[0] in ("do", "then") or re.fullmatch(r"\w+=.*", words[0], flags=re.DOTALL)):
                words.pop(0)
            if words and words[0] not in ("for", "done", "if", "fi"):
                yield words
            words = []


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_every_command_has_a_program_and_arguments_that_exist(block: Block, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    for program, *arguments in commands_of(block.text):
        match program:
            case "trigon":
                check_trigon(arguments, tmp_path)
            case "make":
                targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE))
                assert {word for word in arguments if "=" not in word} <= targets, arguments
            case "bash" | "sh":
                check_script(arguments, tmp_path)
            case _ if re.fullmatch(r"pip|python3?(\.\d+)?", program):
                check_python(["-m", "pip", *arguments] if program == "pip" else arguments, block.page)
            case _ if "/bin/" in program:  # of an environment that the page has made
                check_python(["-m", "pip", *arguments] if program.endswith("/pip") else arguments, block.page)
            case _ if program.startswith(("scripts/", "benchmarks/", "./scripts")):
                assert (ROOT / program).is_file(), program
            case _:
                assert program in PROGRAMS, f"{block}: an unknown program, {program}"


def check_trigon(arguments: list[str], folder: Path) -> None:
    """Check a command of Trigon as far as this is possible without the reader's files."""
    command, *rest = arguments
    if command == "train":
        check_train(rest, folder)
    elif command not in ("help", "version"):
        assert command in COMMANDS, command
        # Only the arguments are parsed: nothing of the command runs.
        parser_of(find_command(command)).parse_args(rest)


def check_train(arguments: list[str], folder: Path) -> None:
    """Check options and values; files of the reader are replaced by names of hub datasets."""
    words = [word for word in arguments if word not in ("...", "--print-config")]
    overrides = [word for word in words if "=" in word]
    names = [word for word in words if "=" not in word]
    assert len(names) <= 1, names
    known = [word for word in overrides if word.partition("=")[0] not in PATHS]
    for key in ("data.train_files", "data.val_files"):
        for value in (word.partition("=")[2] for word in overrides if word.startswith(f"{key}=[")):
            known.append(f"{key}=[{','.join(['owner/data'] * (value.count(',') + 1))}]")
    file = names[0] if names and (ROOT / names[0]).is_file() else "examples/config.yaml"
    if names and file != names[0]:
        assert "/" not in names[0], f"{names[0]} is no file of the project"
    load_config(*split_arguments([file, *COMPLETE, *known]))


def check_script(arguments: list[str], folder: Path) -> None:
    """Check that a script exists and, of a recipe, that its options do."""
    script, *overrides = arguments
    assert (ROOT / script).is_file(), script
    if "trigon.trainer.main" in (ROOT / script).read_text("utf-8"):
        load_config(*split_arguments(arguments_of(ROOT / script, folder / "recipe", *overrides)))


def check_python(arguments: list[str], page: str) -> None:
    """Check that a module or script exists; of `pip install`, the extras and the constraints."""
    if arguments[:2] == ["-m", "pip"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
        for word in arguments[3:]:
            assert not word.startswith("trigon"), f"{word}: Trigon is on no package index"
            for names in re.findall(r"^\.\[([\w,-]+)\]$", word):
                assert set(names.split(",")) <= extras.keys(), word
            if word.startswith("constraints/"):
                assert (ROOT / word).is_file(), word
    elif arguments[:1] == ["-m"]:
        assert importlib.util.find_spec(arguments[1]) is not None, arguments[1]
    elif arguments and arguments[0].endswith(".py"):
        # Files of the page, and what `trigon init` writes.
        written = {"reward.py", *(block.value for block in blocks_of(page) if block.mark == "file")}
        assert arguments[0] in written or (ROOT / arguments[0]).is_file(), arguments[0]


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml"], ids=str)
def test_every_configuration_has_options_and_values_that_exist(block: Block, tmp_path, monkeypatch) -> None:
    content = yaml.safe_load(block.text)
    if not set(content) <= SECTIONS:
        pytest.skip("not a configuration of Trigon")
    monkeypatch.chdir(ROOT)
    for key in PATHS:  # files of the reader
        *sections, name = key.split(".")
        section = content
        for step in sections:
            section = section.get(step) or {}
        section.pop(name, None)
    rollout, reward = (content.get("worker", {}).get(name) or {} for name in ("rollout", "reward"))
    for code in (rollout.get("environment") or "", *(rollout.get("tools") or ())):  # of the reader, or of the page
        if (file := code.partition(":")[0]).endswith(".py"):
            (tmp_path / file).touch()
    for folder in reward.get("writable") or ():
        (tmp_path / folder).mkdir()
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content), "utf-8")
    monkeypatch.chdir(tmp_path)
    base = ["worker.rollout.n=5"] if "n" not in content.get("worker", {}).get("rollout", {}) else []
    load_config(*split_arguments([str(tmp_path / "run.yaml"), *base, *COMPLETE]))


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language in ("python", "json")], ids=str)
def test_python_and_json_can_be_read(block: Block) -> None:
    if block.language == "python":
        ast.parse(block.text)
        return
    try:
        json.loads(block.text)
    except json.JSONDecodeError:  # one value for each line
        assert [json.loads(line) for line in block.text.splitlines()]


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "python" and "import trigon\n" in block.text], ids=str
)
def test_python_examples_use_names_and_arguments_that_exist(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        match node:
            case ast.Attribute(value=ast.Name(id="trigon"), attr=name):
                assert name in trigon.__all__, f"trigon.{name}"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="trigon"), attr=name), keywords=keywords):
                taken = inspect.signature(getattr(trigon, name)).parameters
                known = taken.keys() | SECTIONS | (SHORT_NAMES.keys() if name == "evaluate" else set())
                assert {keyword.arg for keyword in keywords if keyword.arg} <= known, f"trigon.{name}"


def names_of(page: str, part: str) -> dict[str, Any]:
    """Run the Python block of a page that contains this text, and return the names it defines."""
    [block] = [block for block in BLOCKS if (block.page, block.language) == (page, "python") and part in block.text]
    names: dict[str, Any] = {}
    exec(compile(block.text, str(block), "exec"), names)
    return names


def test_the_reward_functions_of_the_pages_score_as_the_pages_say() -> None:
    one = {"response": "It is 5", "ground_truth": "5", "response_length": 4, "turns": []}
    brief = names_of("docs/rewards.md", "format_weight")["compute_score"]
    assert brief(one) == {"overall": 1.1, "accuracy": 1.0, "brevity": 1.0}
    diverse = names_of("docs/rewards.md", "texts.count")["compute_score"]
    assert [score["overall"] for score in diverse([one, one, one | {"response": "6"}])] == [0.5, 0.5, 1.0]
    box = names_of("docs/rewards.md", "left <= x")["compute_score"]
    point = {"response": "(100, 50)", "row": {"width": 100, "height": 50}, "image_sizes": [[200, 100]]}
    assert [box(point | {"ground_truth": truth}) for truth in ([40, 20, 60, 30], [60, 20, 80, 30])] == [1.0, 0.0]
    zoomed = names_of("docs/rewards.md", "a tool zoomed in")["compute_score"]
    image, part = Image.new("RGB", (10, 10)), Image.new("RGB", (5, 5))
    assert [zoomed({"images": [image], "turns": [{"images": [seen]}]}) for seen in (part, image)] == [1.0, 0.0]
    discounted = names_of("docs/algorithms.md", "enumerate(rewards)")["compute_score"]
    turns = [{"reward": reward} for reward in (1.0, None, 1.0)]
    assert discounted({"turns": turns})["overall"] == pytest.approx(1.81)


def test_the_tool_and_the_environment_of_the_page_of_agents_work() -> None:
    count_pixels = names_of("docs/agents.md", "def count_pixels")["count_pixels"]
    assert count_pixels("red", [Image.new("RGB", (4, 3), "red")]) == 12
    maze = names_of("docs/agents.md", "class Maze")["Maze"](size=6)
    maze.reset({"goal": [1, 0]})
    assert maze.step("I do not know")[1:] == (-0.1, False)
    assert maze.step("go right")[1:] == (1.0, True)


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/configuration.md"])
def test_every_option_that_a_page_names_exists(page: str) -> None:
    """In the left column of a table, verl and EasyR1 have other names, and checks have codes."""
    text = (ROOT / page).read_text("utf-8")
    if "/from-" in page or page == "docs/check.md":
        text = re.sub(r"^\| [^|]*\|", "|", text, flags=re.MULTILINE)
    names = set(re.findall(r"`((?:data|algorithm|worker|trainer)\.[a-z_0-9.]*[a-z0-9])(?:=[^`]*)?`", text))
    named = {option.name for option in options().values()}
    sections = {name.rpartition(".")[0] for name in named}
    sections |= {section.rpartition(".")[0] for section in sections}
    known = {*named, *RENAMED, *IGNORED, *sections}
    assert sorted(name for name in names if name not in known and not name.endswith(("_key", ".py", ".jsonl"))) == []


METRICS = re.compile(r"[\"'`]((?:actor|critic|data|filter|group|parity|rollout|staleness|timing_s|val)/[a-z_]+)[\"'`]")
"""Metrics in code. What a reward function returns names others, such as those under `reward/`."""


@pytest.mark.parametrize("page", [page for page in PAGES if "/from-" not in page])
def test_every_metric_that_a_page_reads_exists(page: str) -> None:
    known = (ROOT / "docs/metrics.md").read_text("utf-8")
    names = set(METRICS.findall((ROOT / page).read_text("utf-8"))) - {"actor/huggingface", "actor/lora_adapter"}
    names = {re.sub(r"^val/[a-z_]+_reward$", "val/<part>_reward", name) for name in names}
    assert sorted(name for name in names if f"{name}`" not in known and not is_one_of_several(name, known)) == []


def is_one_of_several(name: str, known: str) -> bool:
    """Return whether a page writes a metric as one of several, `filter/{kept,low}_fraction`."""
    several = re.findall(r"`([a-z_]+/)\{([a-z_,]+)\}([a-z_]*)`", known)
    return any(name == f"{start}{each}{end}" for start, all_, end in several for each in all_.split(","))


def test_every_command_that_a_page_names_exists() -> None:
    for page in PAGES:
        names = set(re.findall(r"`trigon ([a-z]+)[ `]", (ROOT / page).read_text("utf-8")))
        assert sorted(names - COMMANDS.keys() - {"help", "version"}) == [], page


@cache
def messages() -> tuple[str, ...]:
    """Return every text of the package; `...` stands for what is filled in."""

    def text(node: ast.AST) -> str | None:
        match node:
            case ast.Constant(value=str(value)):
                return value
            case ast.JoinedStr(values=values):
                return "".join((text(value) or "...") for value in values)
        return None

    trees = (ast.parse(path.read_text("utf-8")) for path in (ROOT / "trigon").rglob("*.py"))
    return tuple(found for tree in trees for node in ast.walk(tree) if (found := text(node)) is not None)


TROUBLESHOOTING = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
QUOTED = re.findall(r"^### `(.+)`$", TROUBLESHOOTING.partition("## Messages of EasyR1")[0], flags=re.MULTILINE)


def is_quoted_from(quote: str, message: str) -> bool:
    """Return whether the parts of a quote between ... follow each other in a message."""
    parts = [re.escape(part) for part in re.split(r"\.\.\.", quote)]
    return re.search(".*".join(part for part in parts if part.strip()), message, flags=re.DOTALL) is not None


def test_every_message_of_the_troubleshooting_page_is_one_of_the_package() -> None:
    """Of torch's builds for GPUs: CUDA out of memory. A message that does not exist is found."""
    quotes = [*QUOTED, "... rows are nonsense"]
    unknown = [quote for quote in quotes if not any(is_quoted_from(quote, message) for message in messages())]
    assert unknown == ["CUDA out of memory. Tried to allocate ...", quotes[-1]]


def test_the_marks_of_the_blocks_are_complete() -> None:
    """A mark that no block follows is a misspelling, and its block would not be run."""
    marks = sum(
        len(re.findall(r"^\s*<!-- (?:run|file|background): ", (ROOT / page).read_text("utf-8"), re.M)) for page in PAGES
    )
    found = [block for blocks in sessions().values() for block in blocks]
    assert len(found) == marks
    for blocks in sessions().values():
        assert any(block.mark == "run" for block in blocks)
        assert all(block.value for block in blocks if block.mark != "run")


def test_a_wrong_command_is_found(tmp_path, monkeypatch) -> None:
    for wrong in (
        *("trigon trian x.yaml", "trigon train worker.rollout.m=8", "trigon train worker.rollout.n=many"),
        *("trigon train examples/none.yaml", "trigon export --best", "trigon export run --bst", "make nothing"),
        *("bash examples/none.sh", "pip install -e .[none]", "python none.py", "vlm serve"),
    ):
        block = Block("docs/quickstart.md", 1, "bash", wrong + "\n", "", "", "")
        with pytest.raises((AssertionError, ConfigError, SystemExit)):
            test_every_command_has_a_program_and_arguments_that_exist(block, tmp_path, monkeypatch)


@pytest.mark.parametrize("page", PAGES)
def test_lists_look_the_same_on_the_site_as_on_github(page: str) -> None:
    """The site needs four columns for a list in a list, and an empty line before a list."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^ {1,3}(?:[-*]|\d+\.) .*$", text, flags=re.MULTILINE) == []
    assert re.findall(r"^(?![-*|<#>]|\d+\. | ).+\n(?:[-*]|\d+\.) .*$", text, flags=re.MULTILINE) == []


def test_the_table_of_algorithms_has_every_choice() -> None:
    text = (ROOT / "docs/algorithms.md").read_text("utf-8")
    known = {option.name: option for option in options().values()}
    listed = {}
    for _, _, keys, values, _ in (line.split("|") for line in text.splitlines() if line.count("|") == 4):
        name = keys.strip().split("`")[1:2]
        if name and name[0] in known and known[name[0]].kind == "choice":
            listed[name[0]] = set(re.findall(r"`(\w+)`", values))
    assert listed.keys() >= {"algorithm.adv_estimator", "algorithm.kl_penalty", "worker.actor.loss_type"}
    assert listed == {name: set(known[name].choices) for name in listed}
