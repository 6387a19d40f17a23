"""The ms-swift side of whole_step.py: a plug-in for its command, run in its environment.

It defines the reward, makes each step wait for a line on standard input, and sets the image token
of this model's vocabulary, since ms-swift knows only that of the published model.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from shared import arbitrary_reward
from swift.rewards import ORM, orms
from swift.template.templates.qwen import Qwen2VLTemplate
from transformers.trainer_callback import DefaultFlowCallback

Qwen2VLTemplate.image_token_id = int(os.environ["IMAGE_TOKEN_ID"])
started = 0.0


class ArbitraryReward(ORM):
    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [arbitrary_reward(text) for text in completions]


def on_step_begin(self: Any, args: Any, state: Any, control: Any, **_: Any) -> Any:
    global started
    print("@waiting", flush=True)
    sys.stdin.readline()
    started = time.perf_counter()
    return control


def report_seconds(on_step_end: Any) -> Any:
    def reporting(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        print(f"@step {json.dumps({'seconds': time.perf_counter() - started})}", flush=True)
        return on_step_end(self, args, state, control, **kwargs)

    return reporting


orms["arbitrary_rewards"] = ArbitraryReward
# The default callback of transformers, which every Trainer has.
DefaultFlowCallback.on_step_begin = on_step_begin
DefaultFlowCallback.on_step_end = report_seconds(DefaultFlowCallback.on_step_end)
