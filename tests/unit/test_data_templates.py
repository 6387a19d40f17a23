"""Templates are rendered as transformers and Jinja do it, within limits of time and memory."""

from __future__ import annotations

import copy
import os
import re
import resource
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from support.builders import make_builder
from trigon.data import templates
from trigon.data.prompts import load_format_prompt
from trigon.data.templates import TemplateFailure, TemplateLimitError, render, write_date
from trigon.errors import ConfigError

LONG = "{% set x = content * 10000 %}"
TIME, LENGTH = "more than 0.5 seconds", "more than 10,000,000 characters"
MEMORY = f"more than 512 MiB|{TIME}"  # on a slow machine it takes that long to fill the memory
ENDLESS = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
NESTED = "{% set ns = namespace(l=[content]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}"
DOUBLING = "{% set ns = namespace(x=content) %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
ANY = f"{TIME}|{MEMORY}|{LENGTH}"

# What would run without end or fill the memory, and the limit that it reaches.
REFUSED = [
    (ENDLESS, "without end"),
    (LOOPS, TIME),
    ("{{ 9999999 ** 9999999 ** 2 }}", ANY),
    (DOUBLING, ANY),
    (DOUBLING.replace("~", "+"), ANY),
    ("{% for i in range(99999) %}{{ content * 1000 }}{% endfor %}", ANY),
    ("{% set x = content * 1000 %}{{ x * 99999 }}", MEMORY),
    ("{{ content|lower * 9999999 }}", LENGTH),
    ("{% macro m(x) %}{{ x }}{{ m(x ~ x) }}{% endmacro %}{{ m(content) }}", ANY),
    (LONG + "{{ " + "~".join("x" * 300) + " }}", LENGTH),
    ("{% set l = [content] * 9999 %}{{ l + l }}{{ [l] * 9999 }}", ANY),
    (NESTED + "{{ ns.l }}", ANY),
    ("{% set d = {content: content} %}{{ (d,) * 9999999 }}", ANY),
    ("{{ '%20000000000d' % 1 }}", MEMORY),
    ("{{ '%*d' % (9000000 * 9000, 1) }}", MEMORY),
    ("{{ ('%(a)s' * 100000) % {'a': content * 100000} }}", ANY),
    ("{{ '%20000000000d'|format(1) }}", MEMORY),
    ("{{ '{:20000000000}'.format(1) }}", MEMORY),
    ("{{ '{:{}}'.format(1, 9000000 * 9000) }}", MEMORY),
    ("{{ content|center(9000000 * 9000) }}", MEMORY),
    ("{{ content.center(9000000 * 9000) }}", MEMORY),
    (LONG + "{{ x.replace('q', x) }}", MEMORY),
    (LONG + "{{ x|replace('q', x) }}", MEMORY),
    (LONG + "{{ x|join(x) }}", MEMORY),
    (LONG + "{{ x.join(x) }}", MEMORY),
    ("{{ range(99999)|map('string')|join(content * 99999) }}", MEMORY),
    ("{{ content.translate({113: content * 100000}) * 100 }}", LENGTH),
    ("{{ ('a\n' * 99999)|indent(9999999) }}", ANY),
    ("{{ ([content] * 9999)|tojson(indent=9999999) }}", ANY),
    ("{{ content|batch(9999999 * 9999, 'x')|list }}", MEMORY),
    ("{{ ('\t' * 100000).expandtabs(tabsize=100000) }}", MEMORY),
    ("{{ ('a'|safe * 9000).replace('a', content * 10000) }}", MEMORY),
    (LONG + "".join(f"{{% set x{number} = x * 60 %}}" for number in range(200)), MEMORY),
    (LONG + "{% set y = x * 10 %}{% set z %}{% for i in range(9999) %}{{ y }}{% endfor %}{% endset %}{{ z }}", MEMORY),
    (LONG + "{% set y = x * 10 %}{{ range(9999)|map(attribute='q', default=y)|join }}", MEMORY),
]


@pytest.fixture
def half_a_second(monkeypatch):
    monkeypatch.setattr(templates, "MAX_SECONDS", 0.5)


@pytest.mark.extended
@pytest.mark.faults
def test_templates_are_bounded(processors, half_a_second):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    for source, limit in REFUSED:
        with pytest.raises(TemplateLimitError, match=limit):
            render(source, "plain", {"content": "question"})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # the child's is not counted
    assert time.monotonic() - started < 120
    with pytest.raises(ConfigError, match=r"data\.format_prompt.* without end"):
        load_format_prompt(ENDLESS + "{{ content }}")
    own = replace(processors, tokenizer=copy.deepcopy(processors.tokenizer))
    for template, problem in ((LOOPS, r"0\.5 seconds"), ("\n{{ messages", "line 2"), ("{{ 1|nothing }}", "line 1")):
        own.tokenizer.chat_template = template
        with pytest.raises(ConfigError, match=rf"data\.override_chat_template.*{problem}"):
            make_builder(own)


def test_large_ranges_are_refused_by_the_sandbox():
    with pytest.raises(TemplateFailure, match="range"):
        render("{{ range(99999999) }}", "plain", {})


DATES = "on 27000000, 36000000.00, 45000000%: question"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 2 * 3 + 7 % 4 }} {{ content }}", "9 question"),
        ("{{ '=' * 5 + content + '!' }}", "=====question!"),
        ("{{ '{:>10}'.format(content) }}", "  question"),
        ("{{ ([content] + ['b'])|join(', ') }}", "question, b"),
        ("{{ content|replace('q', 'Q')|center(10) }}", " Question "),
        ("{{ {'a': [content]}|tojson(indent=1) }}", '{\n "a": [\n  "question"\n ]\n}'),
        ("{{ 'on %s, %.2f, %d%%: %s' % (9000000 * 3, 9000000 * 4, 9000000 * 5, content) }}", DATES),
        ("{% for i in [1, 2] %}{% set x = content %}{{ loop.index0 % 2 }}{{ x }}{% endfor %}", "0question1question"),
        ("{% set t %}{% for i in [1, 2] %}{{ content }}{% endfor %}{% endset %}{{ t }}", "questionquestion"),
    ],
)
def test_the_results_of_operations_are_those_of_jinja(source, text):
    assert render(load_format_prompt(source), "plain", {"content": "question"}) == text


CHAT = (
    "{%- for m in messages %}\n  {% generation %}<{{ m.role }}>{{ m.content | tojson }}{% endgeneration %}\n"
    "  {%- if loop.index == 2 %}{% break %}{% endif %}\n{% endfor %}{{ tools | tojson(indent=2) }}{{ documents }}"
    "{{ bos_token }}{{ strftime_now('%Y') }}{% if add_generation_prompt %}>{% endif %}{{ nothing }}"
)


def test_chat_templates_are_rendered_as_by_transformers():
    messages = [{"role": "user", "content": text} for text in ("<é & ü>", "line\n\u2028 \U0001f600 \udc80", "unseen")]
    values = {"tools": [{"b": 1, "a": [None, 0.5, "ß"]}], "add_generation_prompt": True, "bos_token": "<s>"}
    [[expected], _] = render_jinja_template([messages], chat_template=CHAT, **values)
    assert render(CHAT, "chat", {"messages": messages, "documents": None, **values}) == expected
    with pytest.raises(TemplateFailure, match=r"^alternate$"):
        render("{{ raise_exception('alternate\nroles') }}", "chat", {})


def test_a_run_writes_the_date_on_which_it_was_started():
    today = render("{{ strftime_now('%Y-%m-%d') }}", "chat", {})
    write_date("2024-02-29T23:59:59")
    try:
        assert render("{{ strftime_now('%d %b %Y, %H:%M') }}", "chat", {}) == "29 Feb 2024, 23:59"
    finally:
        write_date(None)
    assert today <= render("{{ strftime_now('%Y-%m-%d') }}", "chat", {})


@pytest.mark.faults
def test_threads_share_a_process_that_is_started_again_after_it_was_ended():
    answers: dict[int, str] = {}

    def work(number: int) -> None:
        for each in range(number, 200, 4):
            answers[each] = render("{{ n }}", "plain", {"n": each})

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    assert templates._child._process is not None
    os.kill(templates._child._process.pid, signal.SIGKILL)
    for thread in threads:
        thread.join(timeout=60)
    assert answers == {number: str(number) for number in range(200)}
    assert re.fullmatch(r"\d+", render("{{ 17 }}", "plain", {}))


@pytest.mark.faults
def test_an_interrupted_rendering_leaves_no_answer_for_the_next_one():
    assert render("{{ 1 }}", "plain", {}) == "1"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            render(LOOPS, "plain", {})
    finally:
        signal.signal(signal.SIGALRM, before)
    assert render("{{ 2 }}", "plain", {}) == "2"


@pytest.mark.faults
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")
def test_the_process_that_renders_has_no_secrets(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    templates._child.close()  # one that was started before
    assert render("{{ 1 }}", "plain", {}) == "1"
    assert templates._child._process is not None
    variables = Path(f"/proc/{templates._child._process.pid}/environ").read_text().split("\0")
    assert not [each for each in variables if "hf_secret" in each]
    assert [each for each in variables if each.startswith("PATH=")]
