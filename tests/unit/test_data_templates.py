"""Templates are rendered as transformers and Jinja do it, and their errors are of one kind."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from support.builders import make_builder
from trigon.data.prompts import load_format_prompt
from trigon.data.templates import TemplateFailure, render, render_chat
from trigon.errors import ConfigError

ENDLESS = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"


def test_what_is_no_template_is_an_error_of_the_configuration(processors):
    with pytest.raises(ConfigError, match=r"data\.format_prompt.* recursion"):
        load_format_prompt(ENDLESS + "{{ content }}")
    own = replace(processors, tokenizer=copy.deepcopy(processors.tokenizer))
    for template, problem in (("\n{{ messages", "line 2"), ("{{ 1|nothing }}", "line 1")):
        own.tokenizer.chat_template = template
        with pytest.raises(ConfigError, match=rf"data\.override_chat_template.*{problem}"):
            make_builder(own)
    own.tokenizer.chat_template = "{{ raise_exception('alternate\nroles') }}"
    with pytest.raises(TemplateFailure, match=r"^alternate$"):
        render_chat(own.tokenizer, [{"role": "user", "content": "question"}])


@pytest.mark.parametrize("source", ["{{ range(99999999) }}", "{{ content.__class__.__mro__ }}", "{{ unknown }}"])
def test_the_sandbox_refuses_large_ranges_and_internals_and_variables_are_known(source):
    with pytest.raises(TemplateFailure):
        render(source, {"content": "question"})
