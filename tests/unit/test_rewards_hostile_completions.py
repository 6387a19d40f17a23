"""Completions that try to run code or to take long: the shipped rewards run nothing and score 0."""

import ast
import random
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.rewards import requests, reward_pool
from trigon.rewards.load import find_reward
from trigon.rewards.verifiers import android_gui, counting, dapo, geoqa, math, r1v, vqa

VERIFIERS = Path(__file__).parents[2] / "trigon" / "rewards" / "verifiers"
MAX_SECONDS = 0.5
"""CPU time for one completion."""

LONG = [
    *("9**9**9", "9^9^9", "9^{9^{9}}", "9^{9^{9^{9}}}", "2^{99999999}", "2^{2^{2^{2^{2^{2}}}}}", "10^{10^{10}}"),
    *("99999999!", "99999!", "9!!!!!!", "(9!)!", "((9!)!)!", "50!^50!", "1.5!", "(-1)!"),
    *("(x+1)^{1000}", "(x+y)^{999}-(x-y)^{999}", "(1+x)^9^9", "x^x^x^x^x^x^x", "(1/3)^{9999}", "e^{e^{e^{e}}}"),
    *("1e999999999", "1e-999999999", "9e9^9e9", "0.1^{0.1^{0.1}}", "\\sin(10^{100})", "\\tan(\\tan(\\tan(10^6)))"),
    *("\\exp(\\exp(\\exp(10)))", "\\exp(1000000)^1000", "\\ln(\\ln(\\ln(0.1)))", "1/0", "0^{-1}", "0^0", "x/(x-x)"),
    *("\\sqrt[1000000]{2}", "\\sqrt[999]{10^{900}}", "\\sqrt[0]{2}", "\\sqrt[x]{2}", "\\log_1 5", "\\log_{0} 5"),
    "+".join(f"\\sin({n})" for n in range(1, 290)),
    "*".join(["(x+1)"] * 60),
    "+".join(f"x^{{{n}}}" for n in range(90)),
    "^".join(["1.01"] * 400),
    "".join(f"\\sqrt{{{n}+" for n in range(200)) + "1" + "}" * 200,
    "\\exp(" * 35 + "x" + ")" * 35,
    "\\sin(" * 35 + "x" + ")" * 35,
    "\\{" + ",".join(["\\sin 1"] * 250) + "\\}",
    "(" + ",".join(str(n) for n in range(600)) + ")",
    "[" * 900 + "]" * 900,
    "1+" * 900 + "1",
    "-" * 1999 + "1",
    "1" * 1999,
    "0." + "3" * 1990,
    "1/" * 900 + "7",
    "x" * 1999,
    "\\begin{pmatrix}" * 120,
    "a_" * 900,
    "2^" * 900 + "2",
    "2!" * 900,
    "9" + "!" * 298,
    "(" * 39 + "1+" * 100 + "x" + ")" * 39,
    "1+" * 149 + "1",
    "\\frac{1" * 39 + "}{x}" * 39,
    "\\text{" * 300 + "}" * 300,
    "\ufdfa" * 1999,
    "1 " * 900,
    "x=" * 900,
    ",".join("123" for _ in range(450)),
    "\\text{ " * 200,
]
"""Final answers whose values are large, or whose text is nested."""

_PIECES = r"{ } ( ) \frac \sqrt ^ _ \left( - ! \text{ <think> \boxed{ |"
PIECES = [" ", *_PIECES.split()]
REPEATED = [(piece + tail) * (100_000 // len(piece + tail)) for piece in PIECES for tail in ("", "1", "x,", "{")]
"""Texts of 100,000 characters."""


_FRAGMENTS = r"""
    \frac{ \sqrt{ \sqrt[ ^{ _ ^ { } ( ) [ ] 1 99 0.5 x y \pi ! * / + - , ; = \text{ \left( \right) \sin \log_ ' "
    __ . lambda \ \\ \137 && % $ \begin{pmatrix} \end{pmatrix} \cdot ° √ ² ½ million cm or and 9**9 \boxed{
"""
FRAGMENTS = _FRAGMENTS.split()


def code(sentinel):
    """Return programs that write a file, if they are run."""
    write = f"open('{sentinel}','w').close()"
    return [
        write,
        f"__import__('pathlib').Path('{sentinel}').touch()",
        f"__import__('os').system('touch {sentinel}')",
        f'eval("{write}")',
        f'exec("{write}")',
        f"(lambda: {write})()",
        f"[{write} for x in (1,)]",
        f"().__class__.__base__.__subclasses__() and {write}",
        f"getattr(__builtins__, 'op' + 'en')('{sentinel}', 'w')",
        f'sympify("{write}")',
        f"Symbol('x').func.__init__.__globals__['__builtins__']['open']('{sentinel}','w')",
        f"f'{{{write}}}'",
        f"{write} or 7.5",
        f"print({write}) if 1 else 0",
        f"Integer(7.5) if not {write} else 0",
        f'sqrt("{write}")',
    ]


def octal(text):
    return "".join(f"\\{ord(character):03o}" for character in text)


def hidden(program):
    """Return answers that contain a program, in ways that pass filters of letters among others."""
    halves = program[: len(program) // 2], program[len(program) // 2 :]
    nested = "{" * 400 + "}" * 400  # makes a LaTeX parser fail, so that escapes remain
    return [
        program,
        f"({program})",
        rf"\text{{{program}}}",
        rf"\sqrt{{{program}}}",
        rf"\frac{{{program}}}{{1}}",
        f"{nested}{program}",
        f"{nested}sqrt('{octal(program)}')",
        f"{nested}sqrt('{octal(halves[0])}''{octal(halves[1])}')",
        f"{nested}sqrt('{octal(halves[0])}'+'{octal(halves[1])}')",
        f"{nested}frac('{octal(program)}')",
        "{" * 30 + f"sqrt('{octal(program)}')" + "}" * 30,
        rf"\begin{{pmatrix}}{program}\end{{pmatrix}}",
        f"7.5+0*({program})",
        f"{{{program!r}}}",
        program.replace("_", "\\_"),
        "".join(chr(ord(character) + 0xFEE0) if "a" <= character <= "z" else character for character in program),
    ]


def generated(num_answers):
    """Return random answers from pieces of LaTeX, Python and arithmetic."""
    source = random.Random(0)
    return ["".join(source.choices(FRAGMENTS, k=source.randrange(1, 120))) for _ in range(num_answers)]


def responses(answer):
    """Return completions with an answer in the formats of all shipped rewards."""
    yield math, rf"<think>a</think>\boxed{{{answer}}}"
    for verifier in (r1v, geoqa, counting, vqa, android_gui):
        yield verifier, f"<think>a</think><answer>{answer}</answer>"
    yield dapo, f"Answer: {answer}"


def score(verifier, response, truth):
    arguments = {"response": response, "ground_truth": truth, "response_length": 10, "row": {}}
    limits = {"max_response_length": 100, "overlong_buffer_length": 20} if verifier is dapo else {}
    return verifier.compute_score(arguments, **limits)


_events = None
"""The audited events since the list was created; None outside of the tests below."""


def _audit(event, arguments):
    if _events is not None and event.partition(".")[0] in ("compile", "exec", "import", "open", "os", "subprocess"):
        _events.append(f"{event} {arguments!r:.80}")


sys.addaudithook(_audit)


@contextmanager
def recorded_events():
    """Yield a list of what is compiled or run, imported and opened meanwhile."""
    global _events
    for verifier, response in responses("7.25"):  # modules that the first call imports
        score(verifier, response, "7")
    _events = []
    try:
        yield _events
    finally:
        _events = None


def check(answers, truths):
    """Score the answers by every shipped reward; assert that nothing runs and none takes long."""
    right, slow = [], []
    cases = [(answer, verifier, response) for answer in answers for verifier, response in responses(answer)]
    with recorded_events() as events:
        for answer, verifier, response in cases:
            for truth in truths if verifier is math else truths[:1]:  # r1v and geoqa compare as math does
                started = time.thread_time()
                scores = score(verifier, response, truth)
                if time.thread_time() - started > MAX_SECONDS:
                    slow.append((verifier.__name__, answer[:100], truth))
                if scores["accuracy"] > 0:
                    right.append((verifier.__name__, answer[:100], truth))
    assert events == []
    assert slow == []
    assert right == []


def test_no_completion_runs_code(tmp_path):
    sentinel = tmp_path / "executed"
    in_all_ways = [hidden(program) for program in code(sentinel)]
    answers = [answer for ways in in_all_ways for answer in ways[:3]]
    answers += [answer for ways in in_all_ways[::5] for answer in ways[3:]]
    assert len(answers) > 90
    check(answers, ["8.25", "x+1", r"\frac{\sqrt{3}}{2}"])
    assert not sentinel.exists()


def test_random_completions_run_no_code_and_take_no_time():
    check(generated(200), ["8.25", r"x^2+\sqrt{2}"])


@pytest.mark.extended
def test_an_answer_that_is_too_complex_is_wrong_at_once():
    check(LONG, ["8.25", r"\sqrt{2}+x", r"2^{\pi}"])


@pytest.mark.extended
def test_long_completions_take_no_time():
    check(REPEATED, ["8.25", r"\sqrt{2}+x"])


def test_answers_that_are_too_complex_are_scored_rather_than_timed_out(tmp_path):
    """A completion without a score is excluded from the loss, which would be better than wrong."""
    responses = [rf"<think>a</think>\boxed{{{answer}}}" for answer in LONG[:20]]
    with reward_pool(tmp_path, reward=find_reward("math", {}), timeout_seconds=10.0, max_failed_fraction=0.0) as pool:
        scores = pool.score(requests(*responses, ground_truth="8.25"))
    assert [score.outcome for score in scores] == ["ok"] * len(responses)


@pytest.mark.parametrize("file", sorted(VERIFIERS.glob("*.py")), ids=lambda file: file.stem)
def test_the_shipped_rewards_import_only_the_standard_library_and_evaluate_nothing(file):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert {name.partition(".")[0] for name in imported} <= {*sys.stdlib_module_names, "trigon"}
    assert not imported & {"ast", "code", "importlib", "pickle", "runpy", "subprocess"}
    assert not names & {"eval", "exec", "compile", "__import__", "getattr", "open"}
