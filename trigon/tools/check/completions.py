r"""Makes completions with a given final answer, in the formats that prompts ask for.

A format is recognized by what the instructions contain: \boxed{, <answer>, "Answer:", ####,
<think>. Where a prompt asks for none of them, all formats are tried. Does not know reward
functions.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from trigon.rewards.verifiers.equivalence import extract_boxed
from trigon.rewards.verifiers.r1v import extract_answer

_THOUGHTS = "<think>A made completion has no thoughts of its own.</think>\n"
_ANSWER_LINE = re.compile(r"\bAnswer\s*:")


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """A format of completions. template: the completion, with %s for the final answer."""

    template: str

    def write(self, answer: str) -> str:
        """Return a completion with this final answer."""
        return self.template.replace("%s", answer, 1)

    def __str__(self) -> str:
        shown = self.template.replace(_THOUGHTS, "<think>...</think> ").replace("%s", "...")
        return "the answer alone" if shown == "..." else " ".join(shown.split())


_BODIES = (
    r"\boxed{%s}",
    "<answer>%s</answer>",
    r"<answer>\boxed{%s}</answer>",
    "Answer: %s",
    r"Answer: \boxed{%s}",
    "#### %s",
    "%s",
)

FORMATS = tuple(AnswerFormat(thoughts + body) for body in _BODIES for thoughts in (_THOUGHTS, ""))
"""All formats, those with thoughts first."""


def markers_in(instructions: str) -> tuple[str, ...]:
    """Return the markers of formats that the text of a prompt contains."""
    markers = [marker for marker in (r"\boxed{", "<answer>", "####", "<think>") if marker in instructions]
    if "<answer>" not in markers and _ANSWER_LINE.search(instructions):
        markers.append("Answer:")
    return tuple(markers)


def asked_formats(instructions: str) -> tuple[AnswerFormat, ...]:
    """Return the formats of the markers in a prompt's text; none if no marker asks for an answer.

    Thoughts may come before an answer where the prompt does not ask for them: many models think.
    """
    asked = set(markers_in(instructions))
    if not asked - {"<think>"}:
        return ()
    return tuple(each for each in reversed(FORMATS) if set(markers_in(each.template)) in (asked, asked | {"<think>"}))


def final_answer(ground_truth: object) -> str:
    r"""Return a ground truth as the text of a final answer, without <answer> tags or a \boxed{}.

    Lists and mappings become JSON.
    """
    if not isinstance(ground_truth, str):
        return str(ground_truth) if isinstance(ground_truth, int | float) else json.dumps(ground_truth, default=str)
    boxed = extract_boxed(ground_truth)
    return extract_answer(ground_truth) if boxed is None else boxed
