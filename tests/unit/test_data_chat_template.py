"""Prompts with tools, prompts without generation prompt, and templates that take parts only."""

import json

import pytest

from support import chat_templates
from support.builders import make_builder
from support.chat_templates import published_template, with_template
from support.models import processors_of
from trigon.assemble.data import open_builder
from trigon.config.schema import Config
from trigon.data.bad_rows import UnusableRow
from trigon.data.turns import TurnTemplate

SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Return a part of the <image>.",
            "parameters": {"type": "object", "properties": {"left": {"type": "integer", "description": "é"}}},
        },
    }
    for name in ("crop", "zoom")
]


@pytest.fixture(scope="module")
def qwen3(tiny_model):
    return with_template(processors_of(tiny_model("qwen3")), chat_templates.QWEN3)


def text_of(processors, problem="How many?", **changes):
    prompt = make_builder(processors, **({"max_prompt_length": 1024} | changes)).build(
        {"problem": problem, "answer": "4"}, "train:0"
    )
    return processors.tokenizer.decode(prompt.token_ids)


def test_a_template_writes_the_tools(qwen3):
    builder = make_builder(qwen3, tools=SCHEMAS, max_prompt_length=1024)
    assert builder.writes_tools
    text = text_of(qwen3, tools=SCHEMAS, system_prompt="Be brief.")
    tools = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in SCHEMAS)
    assert text == (
        f"<|im_start|>system\nBe brief.\n\n# Tools\n\n<tools>\n{tools}\n</tools><|im_end|>\n"
        "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    )
    row = {"problem": "How many?", "answer": "4"}
    assert builder.count(row) == len(builder.build(row, "train:0").token_ids)


@pytest.mark.parametrize(
    ("system", "shown"), [(None, "You answer questions about pictures."), ("Be brief.", "Be brief.")]
)
def test_tools_that_a_template_does_not_write_are_added_to_the_system_message(processors, system, shown):
    builder = make_builder(processors, tools=SCHEMAS, system_prompt=system, max_prompt_length=1024)
    assert not builder.writes_tools
    text = text_of(processors, tools=SCHEMAS, system_prompt=system)
    assert text.startswith(f"<|im_start|>system\n{shown}\n\n# Tools\n\n")
    tools = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in SCHEMAS)
    assert f"<tools>\n{tools}\n</tools>" in text
    assert '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>' in text
    assert text.count("<|im_start|>") == 3
    assert builder.build({"problem": "How many?", "answer": "4"}, "train:0").text.endswith("How many?")


def test_the_added_section_is_what_published_templates_of_qwen_write(processors, tiny_model):
    template = published_template("qwen2_5")
    if template is None:
        pytest.skip("TRL, which has copies of published chat templates, is not installed")
    published = with_template(processors_of(tiny_model("qwen2")), template)
    by_template, added = (
        text_of(each, tools=SCHEMAS, system_prompt="Be brief.").partition("<|im_end|>")[0]
        for each in (published, processors)
    )
    assert by_template == added


def test_a_template_without_a_system_message_of_its_own(qwen3):
    own = with_template(qwen3, chat_templates.THINKING)
    assert text_of(own, tools=SCHEMAS).startswith("<|im_start|>system\n# Tools")


def test_tools_count_for_the_limit_of_a_prompt(processors):
    with pytest.raises(UnusableRow, match="more than max_prompt_length=64"):
        text_of(processors, tools=SCHEMAS, max_prompt_length=64)
    assert text_of(processors, max_prompt_length=64)


def test_prompts_without_generation_prompt_end_with_the_question(processors):
    text = text_of(processors)
    assert text == f"{text_of(processors, generation_prompt=False)}<|im_start|>assistant\n"


def test_a_template_that_takes_parts_only_gets_parts(tiny_model):
    processors = with_template(processors_of(tiny_model("llava")), chat_templates.LLAVA)
    assert text_of(processors, system_prompt="Be brief.") == "Be brief. USER: How many? ASSISTANT:"
    with_tools = text_of(processors, system_prompt="Be brief.", tools=SCHEMAS)
    assert with_tools.startswith("Be brief. \n\n# Tools\n")
    assert with_tools.endswith("</tool_call> USER: How many? ASSISTANT:")
    assert text_of(processors, tools=SCHEMAS).startswith("# Tools\n")


def test_an_environment_opens_the_conversation(processors):
    def opened(**rollout):
        config = Config(data={"prompt_key": "problem"}, worker={"rollout": rollout})
        prompt = open_builder(config, processors).build({"problem": "Play.", "answer": "4"}, "train:0")
        return processors.tokenizer.decode(prompt.token_ids)

    assert opened().endswith("<|im_start|>assistant\n")
    assert opened(tools=("crop",)).endswith("<|im_start|>assistant\n")
    assert opened(environment="maze.py:Maze").endswith("Play.<|im_end|>\n")


def test_both_makers_of_tokens_render_alike(processors):
    builder = make_builder(processors, tools=SCHEMAS)
    template = TurnTemplate(processors, tools=SCHEMAS, max_image_pixels=1)
    template.check(["user", "tool"], opens=True)
    assert template._chat.writes_tools == builder.writes_tools
