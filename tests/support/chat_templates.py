"""Chat templates that lay out conversations as the published ones of each family do.

Written for the tests: roles, tokens, tool replies, and what happens to earlier turns are those of
the published templates.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

from tokenizers import AddedToken
from transformers import PretrainedConfig

from trigon.models.load import Processors

_PARTS = """\
{%- macro show(content) -%}
  {%- if content is string -%}{{- content -}}{%- else -%}
    {%- for part in content -%}
      {%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
      {%- elif part.type == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
      {%- else -%}{{- part.text -}}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
"""

QWEN2_5_VL = (
    _PARTS
    + """\
{%- if messages[0].role != 'system' -%}
  {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' + show(message.content) + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
)
"""Has no tools, and writes any role."""

_TOOLS = """\
{%- if tools -%}
  {{- '<|im_start|>system\\n' -}}
  {%- if messages[0].role == 'system' -%}{{- show(messages[0].content) + '\\n\\n' -}}{%- endif -%}
  {{- '# Tools\\n\\n<tools>' -}}
  {%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
  {{- '\\n</tools><|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
  {{- '<|im_start|>system\\n' + show(messages[0].content) + '<|im_end|>\\n' -}}
{%- endif -%}
"""

_QWEN3_MESSAGES = """\
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {{- '<|im_start|>user\\n' + show(message.content) + '<|im_end|>\\n' -}}
  {%- elif message.role == 'assistant' -%}
    {{- '<|im_start|>assistant\\n' -}}
    ASSISTANT
    {{- '<|im_end|>\\n' -}}
  {%- elif message.role == 'tool' -%}
    {%- if messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\\n<tool_response>\\n' + show(message.content) + '\\n</tool_response>' -}}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

QWEN3_VL = _PARTS + _TOOLS + _QWEN3_MESSAGES.replace("ASSISTANT", "{{- show(message.content) -}}")
"""Consecutive tool replies are one message of the user."""

QWEN3 = (
    _PARTS
    + _TOOLS
    + """\
{%- set last = namespace(question=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set last.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
"""
    + _QWEN3_MESSAGES.replace(
        "ASSISTANT",
        """\
    {%- set pieces = message.content.split('</think>') -%}
    {%- if pieces | length > 1 and loop.index0 > last.question -%}
      {%- set thought = pieces[0].split('<think>')[-1].strip('\\n') -%}
      {{- '<think>\\n' + thought + '\\n</think>\\n\\n' + pieces[-1].lstrip('\\n') -}}
    {%- else -%}
      {{- pieces[-1].lstrip('\\n') -}}
    {%- endif -%}
""",
    )
)
"""Removes the thoughts of all turns before the last message of the user."""

LLAMA3_1 = """\
{%- if tools -%}
  {{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + (tools | tojson) + '<|eot_id|>' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' -}}
  {%- else -%}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""
"""Tool replies are JSON."""

INTERNVL = """\
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' -}}
  {%- if message.content is string -%}{{- message.content -}}{%- else -%}
    {%- for part in message.content -%}
      {%- if part.type == 'image' -%}{{- '<|image_pad|>\\n' -}}{%- else -%}{{- part.text -}}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""Writes one token for an image; its processor adds those around it."""

LLAVA = """\
{%- for message in messages -%}
  {%- if message.role != 'system' -%}{{- message.role | upper + ': ' -}}{%- endif -%}
  {%- for part in message.content | selectattr('type', 'equalto', 'image') -%}{{- '<|image_pad|>\\n' -}}{%- endfor -%}
  {%- for part in message.content | selectattr('type', 'equalto', 'text') -%}{{- part.text + ' ' -}}{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}
"""
"""Writes no token at the end of a turn, and no content that is not a list of parts."""

GEMMA = """\
{%- for message in messages -%}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
    {{- raise_exception('Conversation roles must alternate user/assistant/...') -}}
  {%- endif -%}
  {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' -}}
  {{- message.content | trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""
"""Refuses tools, system messages, and two messages of the user in a row."""

DEEPSEEK_R1 = """\
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' -}}
  {{- (message.content.split('</think>')[-1] if message.role == 'assistant' else message.content) -}}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}
"""
"""Begins the thought of a turn, and removes all earlier thoughts."""

THINKING = DEEPSEEK_R1.replace(".split('</think>')[-1]", "")
"""Begins the thought of a turn, and keeps all thoughts."""

MISTRAL = """\
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {%- if loop.last and tools -%}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' -}}{%- endif -%}
    {{- '[INST]' + message.content + '[/INST]' -}}
  {%- else -%}
    {{- ' ' + message.content + '<|im_end|>' -}}
  {%- endif -%}
{%- endfor -%}
"""
"""Moves the tools to the last message of the user, and writes a space before each turn."""

_SPECIAL = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>")
_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>")


def with_template(processors: Processors, template: str, *, special: Sequence[str] = ()) -> Processors:
    """Return processors with another chat template, the special tokens of all, and their ends."""
    tokenizer = copy.deepcopy(processors.tokenizer)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in (*_SPECIAL, *special)])
    tokenizer.chat_template = template
    return replace(
        processors,
        hf_config=resized(processors.hf_config, len(tokenizer)),
        tokenizer=tokenizer,
        stop_token_ids=tuple(tokenizer.convert_tokens_to_ids(end) for end in _ENDS),
    )


def resized(config: PretrainedConfig, num_embeddings: int) -> PretrainedConfig:
    """Return the config of a model that was resized for the tokens added to its tokenizer."""
    changed = copy.deepcopy(config)
    changed.get_text_config().vocab_size = num_embeddings
    return changed
