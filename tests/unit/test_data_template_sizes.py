"""Templates whose operations would fill the memory are refused before they do."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from trigon.data.format_prompt import load_format_prompt
from trigon.data.template_sizes import text_size

DATES = "on 27000000, 36000000.00, 45000000%: question"
LONG = "{% set x = content * 10000 %}"
REFUSED = [
    "{% set x = content * 1000 %}{{ x * 99999 }}",
    "{{ content|lower * 9999999 }}",
    "{% macro m(x) %}{{ x }}{{ m(x ~ x) }}{% endmacro %}{{ m(content) }}",
    LONG + "{{ " + "~".join("x" * 300) + " }}",
    "{% set l = [content] * 9999 %}{{ l + l }}{{ [l] * 9999 }}",
    "{% set ns = namespace(l=[content]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "{% set d = {content: content} %}{{ (d,) * 9999999 }}",
    "{{ '%20000000000d' % 1 }}{{ content }}",
    "{{ '%*d' % (9000000 * 9000, 1) }}{{ content }}",
    "{{ ('%(a)s' * 100000) % {'a': content * 100000} }}",
    "{{ '%20000000000d'|format(1) }}{{ content }}",
    "{{ '{:20000000000}'.format(1) }}{{ content }}",
    "{{ '{:{}}'.format(1, 9000000 * 9000) }}{{ content }}",
    "{{ content|center(9000000 * 9000) }}",
    "{{ content.center(9000000 * 9000) }}",
    LONG + "{{ x.replace('q', x) }}",
    LONG + "{{ x|replace('q', x) }}",
    LONG + "{{ x|join(x) }}",
    LONG + "{{ x.join(x) }}",
    "{{ range(99999)|map('string')|join(content * 99999) }}",
    "{{ content.translate({113: content * 100000}) * 100 }}",
    "{{ ('a\n' * 99999)|indent(9999999) }}{{ content }}",
    "{{ ([content] * 9999)|tojson(indent=9999999) }}",
    "{{ content|batch(9999999 * 9999, 'x')|list }}",
    "{{ ('\t' * 100000).expandtabs(tabsize=100000) }}{{ content }}",
    "{{ ('a'|safe * 9000).replace('a', content * 10000) }}",
    # Jinja catches errors in its test of sequences, and goes on.
    "{% for a in ['x', 'a' * 1000]|map('replace', 'a', 'b' * 100000) %}{% if loop is sequence %}{% endif %}"
    "{{ ('c' * 9999999 * 5)|length }}{% endfor %}{{ content }}",
]
REFUSED_TOGETHER = [
    LONG + "{{ " + "+".join("x" * 80) + " }}",
    LONG + "".join(f"{{% set x{number} = x * 60 %}}" for number in range(200)),
    LONG + "{% set y = x * 10 %}{% set z %}{% for i in range(9999) %}{{ y }}{% endfor %}{% endset %}{{ z }}",
    LONG + "{% set y = x * 10 %}{{ range(9999)|map(attribute='q', default=y)|join }}",
    LONG + "{% set ns = namespace() %}{% for i in range(9999) %}{% set ns.x = x * 10 %}{% endfor %}",
]

# Refused by Trigon, and not by the limit of 4 GiB, which makes an error of another message.
RENDER_ALL = """
import json, resource, sys
from trigon.data.format_prompt import load_format_prompt
from trigon.data.templates import bounded_rendering
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
for source in json.load(sys.stdin):
    try:
        template = load_format_prompt(source)
        with bounded_rendering():
            template.render(content="question")
    except Exception as error:
        print(str(error).replace(chr(10), " "))
    else:
        print("rendered", source)
"""


@pytest.mark.faults
def test_operations_that_would_fill_the_memory_are_refused():
    command = [sys.executable, "-c", RENDER_ALL]
    result = subprocess.run(
        command, input=json.dumps(REFUSED + REFUSED_TOGETHER), capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    messages = result.stdout.splitlines()
    assert len(messages) == len(REFUSED) + len(REFUSED_TOGETHER)
    for source, message in zip(REFUSED, messages, strict=False):
        assert "it makes a text or a list of more than 10,000,000 entries" in message, source
    for source, message in zip(REFUSED_TOGETHER, messages[len(REFUSED) :], strict=True):
        assert "its operations make more than 200,000,000 characters together" in message, source


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ content * 3 }}", "questionquestionquestion"),
        ("{{ 2 * 3 + 7 % 4 }} {{ content }}", "9 question"),
        ("{{ '=' * 5 + content + '!' }}", "=====question!"),
        ("{{ '%03d: %s' % (7, content) }}", "007: question"),
        ("{{ '{:>10}'.format(content) }}", "  question"),
        ("{{ ([content] + ['b'])|join(', ') }}", "question, b"),
        ("{{ content|replace('q', 'Q')|center(10) }}", " Question "),
        ("{{ {'a': [content]}|tojson(indent=1) }}", '{\n "a": [\n  "question"\n ]\n}'),
        ("{{ 400000 * 0.5 }} {{ content }}", "200000.0 question"),
        ("{{ 'on %s, %.2f, %d%%: %s' % (9000000 * 3, 9000000 * 4, 9000000 * 5, content) }}", DATES),
        (
            "{{ '{:,} 18005551234 {}'.format(9000000 * 3, content) }}",
            "27,000,000 18005551234 question",
        ),
        ("{% for i in [1, 2] %}{% set x = content %}{{ loop.index0 % 2 }}{{ x }}{% endfor %}", "0question1question"),
        ("{% set t %}{% for i in [1, 2] %}{{ content }}{% endfor %}{% endset %}{{ t }}", "questionquestion"),
    ],
)
def test_the_results_of_other_operations_stay_as_they_are(source, text):
    assert load_format_prompt(source).render(content="question") == text


def test_shared_parts_of_a_value_count_each_time():
    value: list[object] = ["abc"]
    for _ in range(10):
        value = [value, value]
    assert 1024 * 3 <= text_size(value) <= 4 * len(str(value))
    assert text_size("abc") == 3
    for _ in range(40):
        value = [value, value]
    assert text_size(value) > 10**15  # found in bounded time
