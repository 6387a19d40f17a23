"""ms-swift's side of whole_step.py: a plug-in for its own command, run with its own environment.

It gives ms-swift the reward, lets each step wait for a line on standard input, and tells it which token of this model's
vocabulary stands for an image, since it knows the published model's alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from shared import lot
from swift.rewards import ORM, orms
from swift.template.templates.qwen import Qwen2VLTemplate
from transformers.trainer_callback import DefaultFlowCallback

Qwen2VLTemplate.image_token_id = int(os.environ["IMAGE_TOKEN_ID"])
started = 0.0


class DrawnLots(ORM):
    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [lot(text) for text in completions]


def on_step_begin(self: Any, args: Any, state: Any, control: Any, **_: Any) -> Any:
    global started
    print("@waits for its turn", flush=True)
    sys.stdin.readline()
    started = time.perf_counter()
    return control


def stepped(on_step_end: Any) -> Any:
    def told(self: Any, args: Any, state: Any, control: Any, **more: Any) -> Any:
        print(f"@step {json.dumps({'seconds': time.perf_counter() - started})}", flush=True)
        return on_step_end(self, args, state, control, **more)

    return told


orms["drawn_lots"] = DrawnLots
# transformers' own callback, which every trainer has.
DefaultFlowCallback.on_step_begin = on_step_begin
DefaultFlowCallback.on_step_end = stepped(DefaultFlowCallback.on_step_end)
