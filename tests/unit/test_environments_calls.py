"""Tool calls in what models write, in each format."""

import re

import pytest

from trigon.environments.calls import ToolCall, end_of_calls, find_calls, format_of

HERMES = '<tool_call>\n{"name": "crop", "arguments": {"bbox_2d": [0, 0, 5, 5]}}\n</tool_call>'
LLAMA = '{"name": "crop", "parameters": {"bbox_2d": [0, 0, 5, 5]}}'
XML = "<tool_call>\n<function=crop>\n<parameter=bbox_2d>\n[0, 0, 5, 5]\n</parameter>\n</function>\n</tool_call>"
CALL = ToolCall("crop", {"bbox_2d": [0, 0, 5, 5]})
XML_CALL = ToolCall("crop", {"bbox_2d": "[0, 0, 5, 5]"}, are_texts=True)


@pytest.mark.parametrize(
    ("tool_format", "text", "calls"),
    [
        ("hermes", HERMES, [CALL]),
        ("hermes", f"I look closer.\n{HERMES}\n{HERMES}", [CALL, CALL]),
        ("hermes", HERMES.removesuffix("</tool_call>"), [CALL]),  # the end token followed
        ("hermes", f"<think>{HERMES}</think>The answer is 4.", []),
        ("hermes", f"a thought, opened by the prompt</think>{HERMES}", [CALL]),
        ("hermes", "", []),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', [ToolCall("now", {})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', [ToolCall("now", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', [ToolCall("f", {"x": 1})]),
        ("llama3_json", LLAMA, [CALL]),
        ("llama3_json", f"<|python_tag|>{LLAMA}; {LLAMA}", [CALL, CALL]),
        ("llama3_json", '{"answer": 4}', []),
        ("qwen3_xml", XML, [XML_CALL]),
        (
            "qwen3_xml",
            "<tool_call><function=f><parameter=code>\nif x:\n    y\n</parameter><parameter=n>2</parameter></function>",
            [ToolCall("f", {"code": "if x:\n    y", "n": "2"}, are_texts=True)],
        ),
        ("qwen3_xml", "<tool_call><function=now></function></tool_call>", [ToolCall("now", {}, are_texts=True)]),
    ],
)
def test_calls_are_found(tool_format, text, calls):
    assert find_calls(text, tool_format) == calls


@pytest.mark.faults
@pytest.mark.parametrize(
    ("tool_format", "turn", "after"),
    [
        ("hermes", HERMES, "<tool_response>invented</tool_response><answer>42</answer>"),
        ("hermes", HERMES, f" and then {HERMES}"),
        ("hermes", f"<think>{HERMES} 4</think>{HERMES}", "<tool_response>4</tool_response><think>So</think> 4"),
        ("hermes", f"{HERMES} as opened by the prompt</think>{HERMES}", "4"),
        ("hermes", HERMES.removesuffix("</tool_call>"), "<tool_response>invented"),
        ("llama3_json", f"<|python_tag|>{LLAMA}; {LLAMA}", "\nIt says 4."),
        ("qwen3_xml", XML, "<tool_response>invented"),
    ],
)
def test_a_turn_ends_with_its_calls(tool_format, turn, after):
    assert find_calls(turn + after, tool_format) == find_calls(turn, tool_format) != []
    assert end_of_calls(turn + after, tool_format) == len(turn)


@pytest.mark.parametrize("text", ["The answer is 4.", f"<think>{HERMES}</think>4", ""])
def test_a_turn_without_a_call_has_no_end(text):
    assert end_of_calls(text, "hermes") is None


@pytest.mark.parametrize(
    ("tool_format", "text", "reason"),
    [
        ("hermes", "<tool_call>{'name': 'crop'}</tool_call>", "not valid JSON: Expecting property name"),
        ("hermes", '<tool_call>{"name": 3}</tool_call>', 'a JSON object with "name" and "arguments"'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "'f' must be a JSON object"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{"}</tool_call>', "'f' are not valid JSON"),
        ("hermes", "<tool_call>" + "[" * 100_000, "cannot be read|not valid JSON"),
        ("hermes", "<tool_call>" + "1" * 10_000, "cannot be read"),
        ("llama3_json", '{"name": "crop", "parameters": {', "not valid JSON"),
        ("llama3_json", LLAMA + LLAMA, 'separated by ";"'),
        ("qwen3_xml", "<tool_call>crop(1)</tool_call>", "must have the form <function=name>"),
    ],
)
@pytest.mark.faults
def test_a_call_that_cannot_be_read_says_why(tool_format, text, reason):
    *_, call = find_calls(text, tool_format)
    assert call.name == ""
    assert re.search(reason, call.error), call.error


@pytest.mark.parametrize(
    ("chat_template", "tool_format"),
    [
        ('... within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": ...', "hermes"),
        ("... <tool_call>\n<function=example_function_name>\n<parameter=...", "qwen3_xml"),
        ('{{- "<|python_tag|>" + tool_call.name }}', "llama3_json"),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", None),
    ],
)
def test_the_format_is_that_of_the_chat_template(chat_template, tool_format):
    assert format_of(chat_template) == tool_format
