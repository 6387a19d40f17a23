"""The settings of a phone: the model sees screenshots, and taps until a switch is set as asked.

    worker.rollout.environment=examples/gui/settings.py:Settings

A turn names one action, `tap(x, y)`, in pixels of the screenshot. The first screen lists the
groups of switches; a tap on the arrow in the header goes back to it. The episode ends with the
reward 1 when the switch of the task is set, and with 0 when another one is changed. A turn without
an action has a reward of its own, -0.1, and the model is told what to write.

examples/gui/make.py makes the rows: `seed` (order and state of the switches), `switch`, `state`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from trigon.environments.protocol import action_text

GROUPS = {
    "Network": ("Wi-Fi", "Bluetooth", "Mobile data", "Hotspot", "Flight mode"),
    "Display": ("Dark mode", "Night light", "Auto-rotate", "Always-on clock"),
    "Sound": ("Vibration", "Do not disturb", "Key tones", "Media volume limit"),
    "Battery": ("Power saving", "Battery percentage", "Fast charging"),
    "Privacy": ("Location", "Microphone access", "Camera access", "App tracking"),
}
WIDTH, HEIGHT, ROW = 420, 700, 70  # pixels; multiples of 28, so that Qwen2.5-VL's processor does not resize them

_TAP = re.compile(r"tap\(\s*(\d{1,5})\s*,\s*(\d{1,5})\s*\)")
_GREEN, _GREY, _DARK, _LIGHT = "#34a853", "#c4c7cc", "#202124", "#f1f3f4"


class Settings:
    """One episode."""

    def reset(self, row: Mapping[str, Any]) -> Image.Image:
        rng = random.Random(row["seed"])
        self.groups = {name: rng.sample(GROUPS[name], len(GROUPS[name])) for name in rng.sample(list(GROUPS), 5)}
        self.is_on = {switch: rng.random() < 0.5 for switches in self.groups.values() for switch in switches}
        self.switch, self.state = row["switch"], row["state"] == "on"
        self.is_on[self.switch] = not self.state
        self.shown: str | None = None  # the group on the screen, None for the list of groups
        return self.draw()

    def step(self, action: str) -> tuple[Image.Image | str | None, float, bool]:
        taps = _TAP.findall(action_text(action))
        if len(taps) != 1:
            return "Write one action: tap(x, y), with whole numbers.", -0.1, False
        x, y = map(int, taps[0])
        tapped = self.find(x, y)
        if self.shown is not None and tapped in self.is_on:
            self.is_on[tapped] = not self.is_on[tapped]
            return None, float(tapped == self.switch), True
        self.shown = self.shown if tapped is None else (tapped if tapped in self.groups else None)
        return self.draw(), 0.0, False

    def find(self, x: int, y: int) -> str | None:
        """Return what is at a point: a group, a switch, "back", or None for nothing."""
        lines = list(self.groups) if self.shown is None else self.groups[self.shown]
        if y < ROW:
            return "back" if self.shown is not None and x < ROW else None
        index = y // ROW - 1
        return lines[index] if x < WIDTH and index < len(lines) else None

    def draw(self) -> Image.Image:
        image = Image.new("RGB", (WIDTH, HEIGHT), "white")
        pen, font = ImageDraw.Draw(image), ImageFont.load_default(24)
        pen.rectangle((0, 0, WIDTH, ROW), fill=_LIGHT)
        pen.text((ROW, 20), self.shown or "Settings", fill=_DARK, font=font)
        if self.shown is not None:
            pen.line(((40, 22), (26, 35), (40, 48)), fill=_DARK, width=4)
        for index, name in enumerate(self.groups if self.shown is None else self.groups[self.shown]):
            top = (index + 1) * ROW
            pen.text((26, top + 20), name, fill=_DARK, font=font)
            pen.line(((26, top + ROW - 1), (WIDTH - 26, top + ROW - 1)), fill=_GREY)
            if self.shown is None:
                pen.line(((376, top + 24), (388, top + 35), (376, top + 46)), fill=_GREY, width=4)
            else:
                is_on = self.is_on[name]
                pen.rounded_rectangle((336, top + 20, 392, top + 50), 15, fill=_GREEN if is_on else _GREY)
                left = 364 if is_on else 338
                pen.ellipse((left, top + 22, left + 26, top + 48), fill="white")
        return image
