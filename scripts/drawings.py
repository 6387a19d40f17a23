#!/usr/bin/env python3
"""Writes the drawings of docs/images: one step, one packed group, driver and workers.

    scripts/drawings.py [FOLDER]

The SVG files have a background of their own and follow the reader's light or dark setting, so that
they can be read on any page. Needs Python only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

STYLE = """
  .panel { fill: #ffffff; stroke: #d0d7de; }
  text { fill: #1f2328; font: 15px system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif; }
  .title { font-weight: 600; font-size: 17px; }
  .small { font-size: 13px; fill: #59636e; }
  .mono { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace; }
  .on { fill: #ffffff; font-weight: 600; }
  .middle { text-anchor: middle; }
  .end { text-anchor: end; }
  .box { fill: #f6f8fa; stroke: #8c959f; stroke-width: 1.5; }
  .inner { fill: #ffffff; stroke: #d0d7de; }
  .line { stroke: #59636e; stroke-width: 1.8; fill: none; }
  .head { fill: #59636e; }
  .grid { stroke: #d0d7de; stroke-width: 1; fill: none; }
  .image { fill: #8250df; } .prompt { fill: #57606a; }
  .c0 { fill: #0969da; } .c1 { fill: #1a7f37; } .c2 { fill: #bc4c00; }
  .pad { fill: none; stroke: #8c959f; stroke-dasharray: 3 3; }
  @media (prefers-color-scheme: dark) {
    .panel { fill: #161b22; stroke: #3d444d; }
    text { fill: #e6edf3; }
    .small { fill: #9aa4af; }
    .on { fill: #0d1117; }
    .box { fill: #21262d; stroke: #7d8590; }
    .inner { fill: #161b22; stroke: #3d444d; }
    .line { stroke: #9aa4af; } .head { fill: #9aa4af; }
    .grid { stroke: #3d444d; }
    .image { fill: #bc8cff; } .prompt { fill: #9aa4af; }
    .c0 { fill: #58a6ff; } .c1 { fill: #3fb950; } .c2 { fill: #f0883e; }
    .pad { stroke: #7d8590; }
  }
"""

IMAGE, TEXT = 6, 3
"""Tokens of the drawn prompt: of its image, and of its text."""

PROMPT = IMAGE + TEXT
COMPLETIONS = (4, 6, 3)
"""Tokens of the drawn completions."""


def main(arguments: Sequence[str]) -> None:
    """Write every drawing. arguments: the folder, or nothing for docs/images."""
    folder = Path(arguments[0]) if arguments else Path(__file__).parents[1] / "docs/images"
    folder.mkdir(parents=True, exist_ok=True)
    for name, drawing in drawings().items():
        (folder / name).write_text(drawing, encoding="utf-8")


def drawings() -> dict[str, str]:
    """Return every drawing by its file name."""
    return {"one-step.svg": one_step(), "packed-group.svg": packed_group(), "workers.svg": workers()}


def svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """Return an SVG file with the parts on a panel. title: for readers who cannot see it."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            ' role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="panel" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def text(x: float, y: float, content: str, kind: str = "") -> str:
    """Return a line of text. kind: its classes."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(content)}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str, rx: float = 2) -> str:
    """Return a rectangle. kind: its class."""
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{rx:g}"/>'


def arrow(points: Sequence[tuple[float, float]]) -> str:
    """Return a line through the points with a head at its end. The last piece is straight."""
    (x0, y0), (x1, y1) = points[-2:]
    dx, dy = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
    path = " ".join(f"{x:g},{y:g}" for x, y in [*points[:-1], (x1 - 6 * dx, y1 - 6 * dy)])
    left, right = (x1 - 10 * dx - 5 * dy, y1 - 10 * dy - 5 * dx), (x1 - 10 * dx + 5 * dy, y1 - 10 * dy + 5 * dx)
    head = f"{x1:g},{y1:g} {left[0]:g},{left[1]:g} {right[0]:g},{right[1]:g}"
    return f'<polyline class="line" points="{path}"/><polygon class="head" points="{head}"/>'


def tokens(x: float, y: float, kinds: Sequence[str], size: float = 20) -> list[str]:
    """Return a row of tokens, one square each. kinds: their classes."""
    return [rect(x + number * size + 1, y + 1, size - 2, size - 2, kind) for number, kind in enumerate(kinds)]


def prompt_kinds() -> list[str]:
    """Return the classes of the prompt's tokens."""
    return ["image"] * IMAGE + ["prompt"] * TEXT


def packed_group() -> str:
    """Return the drawing of a packed group: beside a padded batch, with positions and attention."""
    size, left = 20.0, 34.0
    parts = [text(left, 38, "Padded: the prompt once per completion", "title")]
    longest = max(COMPLETIONS)
    for number, length in enumerate(COMPLETIONS):
        kinds = [*prompt_kinds(), *[f"c{number}"] * length, *["pad"] * (longest - length)]
        parts += tokens(left, 54 + 26 * number, kinds, size)
    padded = len(COMPLETIONS) * (PROMPT + longest)
    parts.append(text(left + (PROMPT + longest) * size + 14, 95, f"{padded} tokens", "small"))

    packed = PROMPT + sum(COMPLETIONS)
    top = 178.0
    parts.append(text(left, top, "Packed: once for the group", "title"))
    kinds = prompt_kinds() + [f"c{number}" for number, length in enumerate(COMPLETIONS) for _ in range(length)]
    parts += tokens(left, top + 16, kinds, size)
    parts.append(text(left + packed * size + 14, top + 31, f"{packed} tokens", "small"))
    positions = list(range(PROMPT)) + [PROMPT + t for length in COMPLETIONS for t in range(length)]
    for number, position in enumerate(positions):
        parts.append(text(left + (number + 0.5) * size, top + 54, str(position), "small middle"))
    parts.append(text(left + packed * size + 14, top + 54, "positions", "small"))
    x = left
    for label, kind, length in [("image", "image", IMAGE), ("text", "prompt", TEXT)] + [
        (f"completion {number + 1}", f"c{number}", length) for number, length in enumerate(COMPLETIONS)
    ]:
        parts.append(rect(x + 1, top + 66, length * size - 2, 4, kind, 2))
        short = label if length > 3 or len(label) < 8 else label.replace("completion", "compl.")
        parts.append(text(x + length * size / 2, top + 88, short, "small middle"))
        x += length * size

    cell, x0, y0 = 13.0, 640.0, 62.0
    parts.append(text(x0, 38, "Who attends to whom", "title"))
    owner = [-1] * PROMPT + [number for number, length in enumerate(COMPLETIONS) for _ in range(length)]
    for row in range(packed):
        for column in range(row + 1):
            if owner[column] in (-1, owner[row]):
                # A row has the colour of its own tokens; what it reads of the prompt, the prompt's.
                kind = kinds[column] if owner[column] == -1 else kinds[row]
                parts.append(rect(x0 + column * cell + 0.5, y0 + row * cell + 0.5, cell - 1, cell - 1, kind, 1.5))
    parts.append(rect(x0, y0, packed * cell, packed * cell, "grid", 0))
    edge = PROMPT
    for length in COMPLETIONS:
        at = edge * cell
        parts.append(
            f'<path class="grid" d="M{x0:g},{y0 + at:g}h{packed * cell:g}M{x0 + at:g},{y0:g}v{packed * cell:g}"/>'
        )
        edge += length
    notes = [
        "Each completion attends to the prompt and to itself, never to another completion.",
        "Its positions continue the prompt's, so it sees what it would see alone: the result is exact.",
        "The prompt's image goes through the vision tower once, forward and backward.",
    ]
    parts += [text(left, 312 + 22 * number, note, "small") for number, note in enumerate(notes)]
    return svg(960, 384, "A group of three completions, padded and packed, with its attention", parts)


def box(x: float, y: float, width: float, title: str, lines: Sequence[str]) -> list[str]:
    """Return a box with a title and lines of small text."""
    middle = x + width / 2
    return [
        rect(x, y, width, 40 + 19 * len(lines), "box", 8),
        text(middle, y + 26, title, "title middle"),
        *(text(middle, y + 47 + 19 * number, line, "small middle") for number, line in enumerate(lines)),
    ]


def one_step() -> str:
    """Return the drawing of one step, from prompts to synced weights."""
    parts = [
        *box(24, 60, 200, "Data", ["rows become prompts", "(token ids, images) while", "the last step still runs"]),
        *box(304, 60, 210, "Sample", ["vLLM: n completions", "of each prompt, with their", "log-probabilities"]),
        *box(594, 60, 210, "Score", ["your reward function,", "in processes of its own,", "while vLLM samples on"]),
        *box(594, 262, 210, "Compare", ["each completion with", "its group: one advantage", "per token"]),
        *box(304, 262, 210, "Learn", ["packed groups, one or", "several optimizer updates", "(FSDP2)"]),
        *box(24, 262, 200, "Verify", ["vLLM has these weights:", "checksums, and the trainer's", "log-probabilities"]),
        arrow([(224, 108), (304, 108)]),
        arrow([(514, 108), (594, 108)]),
        arrow([(699, 157), (699, 262)]),
        arrow([(594, 310), (514, 310)]),
        arrow([(304, 310), (224, 310)]),
        arrow([(124, 262), (124, 210), (370, 210), (370, 157)]),
        text(264, 96, "Prompt", "mono middle"),
        text(554, 96, "Rollout", "mono middle"),
        text(711, 205, "RolloutGroup", "mono"),
        text(711, 225, "its n completions", "small"),
        text(554, 298, "TrainGroup", "mono small middle"),
        text(264, 298, "weights", "mono middle"),
        text(247, 202, "weight sync, at every step", "small middle"),
        text(24, 36, "One step, with the types of trigon/types.py", "title"),
    ]
    return svg(830, 384, "One training step: data, sample, score, compare, learn, verify", parts)


def workers() -> str:
    """Return the drawing of the driver and its workers."""
    parts = [
        text(24, 36, "Driver and workers: the same loop for one GPU and for many machines", "title"),
        *box(24, 60, 782, "Driver: no GPU", ["training loop, dataset, reward workers, metrics, run folder"]),
    ]
    for number, name in enumerate(["worker 0", "worker 1", "worker N - 1"]):
        x = 24 + 276 * number
        parts += [
            rect(x, 206, 230, 150, "box", 8),
            text(x + 115, 232, f"{name}: one GPU", "title middle"),
            rect(x + 16, 246, 198, 44, "inner", 6),
            text(x + 115, 273, "vLLM: samples", "middle"),
            rect(x + 16, 300, 198, 44, "inner", 6),
            text(x + 115, 327, "FSDP2 rank: learns", "middle"),
            arrow([(x + 80, 119), (x + 80, 206)]),
            arrow([(x + 150, 206), (x + 150, 119)]),
        ]
    parts += [
        text(370, 159, "prompts, image files,", "small end"),
        text(370, 176, "advantages", "small end"),
        text(460, 168, "completions", "small"),
        arrow([(254, 322), (300, 322)]),
        arrow([(300, 338), (254, 338)]),
        arrow([(530, 322), (576, 322)]),
        arrow([(576, 338), (530, 338)]),
        text(
            415,
            382,
            "Between workers, over NCCL: layers, gradients, and the weights that vLLM loads. "
            "None of them passes through the driver.",
            "small middle",
        ),
    ]
    return svg(830, 402, "A driver without a GPU, and workers that each sample and learn", parts)


if __name__ == "__main__":
    main(sys.argv[1:])
