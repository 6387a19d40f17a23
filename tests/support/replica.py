"""What the ranks of a replica with tensor parallelism do together, in tests.

The functions run on the ranks of support.ranks, one of which may be alone.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.builders import make_builder
from support.episodes import Answer, LocalEnvironments, Observed, drawing, make_settings, with_pixels
from support.rollout import drawn, handle_of, make_vllm_settings
from trigon.data.turns import TurnTemplate
from trigon.metrics import values
from trigon.models.load import load_model, load_processors
from trigon.models.policy import Policy
from trigon.rollout.protocol import Interruption, Until
from trigon.rollout.vllm import VllmEngine
from trigon.system.trace import DecodeTracer
from trigon.types import Completion, Prompt, SamplingParams

SAMPLED = SamplingParams(n=3, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=24, ignore_eos=True, seed=5)
GREEDY = replace(SAMPLED, n=2, temperature=0.0)
LONG = replace(SAMPLED, n=2, max_tokens=400)
TRACED_STEP = 99
MAX_MODEL_LEN = 1024
QUESTION = "Which of the shapes in the drawing has the most sides? "
Rows = list[list[Completion]]


def open_engine(
    folder: Path, traces: Path, environments: LocalEnvironments | None, **of_episodes: Any
) -> tuple[VllmEngine, Any, list[Prompt]]:
    """Start the engine of this rank; return it with the weights and with prompts for it.

    environments: of the first rank. The engine ends with its process: closing it would also close
    the process group.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    [name] = _from_first(secrets.token_hex(4))
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # vLLM joins the process group that exists
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "TRIGON_SHARED_MEMORY": f"test-{name}", **address})
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    processors = replace(load_processors(str(folder)), stop_token_ids=tuple(range(0, 1000, 20)))
    settings = make_vllm_settings(folder, max_model_len=MAX_MODEL_LEN, limit_images=2, tensor_parallel_size=size)
    episodes = None
    if environments is not None:
        template = TurnTemplate(processors, max_image_pixels=1_000_000)
        episodes = make_settings(environments, processors, template=template, max_turns=3, **of_episodes)
    tracer = DecodeTracer(traces, rank=rank, steps=(TRACED_STEP,))
    engine = VllmEngine(settings, processors, episodes, tracer=tracer)
    prompts = make_prompts(processors)
    if episodes is None:  # as in a worker
        prompts = [with_pixels(processors, prompt) for prompt in prompts]
    return engine, handle_of(_weights(folder, processors)), prompts


def make_prompts(processors: Any) -> list[Prompt]:
    """Return four prompts, the last two with images as files."""
    builder = make_builder(processors, process_images=False, max_prompt_length=512)
    rows: list[tuple[str, dict[str, Any]]] = [
        (QUESTION * 3, {}),
        ("Find x.", {}),
        (f"<image>{QUESTION}", {"images": [drawing(200)]}),
        ("<image>Find <image>.", {"images": [drawing(90), drawing(91, 140, 56)]}),
    ]
    return [
        builder.build({"problem": text, "answer": "", "number": number, **media}, f"train:{number}")
        for number, (text, media) in enumerate(rows)
    ]


def answer(row: Mapping[str, Any], actions: Sequence[str]) -> Answer:
    """Show an image at every turn; the number of turns differs by row."""
    image = drawing(31 * row["number"] + len(actions), 84, 84 + 28 * len(actions))
    return Answer(0, Observed(f"{len(actions)} of 3.", (image,)), 0.25, len(actions) == 2 + row["number"] % 2)


def sample_turns(folder: Path, traces: Path) -> dict[str, Any]:
    """Sample completions of one turn on all ranks; return what each kind of call has returned."""
    found: dict[str, Any] = {}
    is_first = dist.get_rank() == 0
    engine, weights, prompts = open_engine(folder, traces, None)
    with engine.awake(weights, version=0):
        found["sampled"] = engine.generate(prompts, SAMPLED)
        found["greedy"] = engine.generate(prompts, GREEDY)
        found["traced"] = engine.generate(drawn(prompts, TRACED_STEP), SAMPLED)
        ranks, engine._ranks = engine._ranks, None
        found["each by itself"] = engine.generate(prompts, SAMPLED)
        engine._ranks = ranks
        for kind in ("stop", "drain"):
            found[kind], found[f"{kind} seconds"] = _interrupted(engine, prompts, kind)
            begun = _from_first(tuple(map(tuple, found[kind])))[0]
            until = Until(len(prompts), len(prompts), begun)
            found[f"after {kind}"] = engine.generate(prompts, replace(LONG, temperature=0.0), until=until)
        found["uninterrupted"] = engine.generate(prompts, replace(LONG, temperature=0.0))

        def fail(index: int, row: Sequence[Completion]) -> None:
            raise LookupError(f"the listener failed at prompt {index}")

        started = time.monotonic()
        try:
            engine.generate(prompts, SAMPLED, on_group=fail if is_first else None)
        except LookupError as error:
            found["error"] = str(error)
        found["seconds after an error"] = time.monotonic() - started
        found["after an error"] = engine.generate(prompts, SAMPLED)
        engine.pop_metrics()
        _lose_a_request(engine._llm_engine)
        found["after a loss"] = engine.generate(prompts, SAMPLED)
        found["metrics"] = values(engine.pop_metrics())
    return found


def run_episodes(folder: Path, traces: Path, of_episodes: Mapping[str, Any]) -> dict[str, Any]:
    """Run episodes on all ranks; return their completions, and what the environments have seen."""
    environments = LocalEnvironments(answer) if dist.get_rank() == 0 else None
    found: dict[str, Any] = {}
    greedy, sampled = (replace(each, max_tokens=500, ignore_eos=False) for each in (GREEDY, SAMPLED))
    engine, weights, prompts = open_engine(folder, traces, environments, max_turn_tokens=40, **of_episodes)
    with engine.awake(weights, version=0):
        found["greedy"] = engine.generate(prompts, greedy)
        found["sampled"] = engine.generate(prompts, sampled)
        if environments is not None:
            environments.delay = lambda row, number: (row["number"] * 7 + number) % 5
            engine._episodes.turn_by_turn = False
        found["late"] = engine.generate(prompts, greedy)
        found["one turn"] = engine.generate(prompts, replace(sampled, one_turn=True, max_tokens=24))
    found["metrics"] = values(engine.pop_metrics())
    if environments is not None:
        found["num_images"], found["running"] = len(environments.images), len(environments.running)
    return found


def _interrupted(engine: VllmEngine, prompts: Sequence[Prompt], kind: Any) -> tuple[Rows, float]:
    """Return what a call has returned that is interrupted after a while, and its seconds."""
    interruption, has_begun = Interruption(), threading.Event()
    calls: list[int | None] = []

    def count(num_finished: int | None) -> None:
        calls.append(num_finished)
        if len(calls) == 10:
            has_begun.set()

    def interrupt() -> None:
        has_begun.wait()
        interruption.ask(kind)

    started = time.monotonic()
    sampling = replace(LONG, temperature=0.0)
    if dist.get_rank() > 0:
        return engine.generate(prompts, sampling), time.monotonic() - started
    thread = threading.Thread(target=interrupt)
    thread.start()
    until = Until(len(prompts), interruption=interruption)
    rows = engine.generate(prompts, sampling, until=until, on_progress=count)
    thread.join()
    return rows, time.monotonic() - started


def _lose_a_request(llm_engine: Any) -> None:
    """Let vLLM lose a request, on this rank as on the others."""
    step, lost = llm_engine.step, []

    def step_and_lose() -> Any:
        outputs = step()
        if not lost:
            lost.append("1.0.0.1")
            llm_engine.abort_request(lost)
        return outputs

    llm_engine.step = step_and_lose


def _from_first(thing: Any) -> list[Any]:
    """Return what the first rank has, in a list."""
    things = [thing]
    dist.broadcast_object_list(things)
    return things


def _weights(folder: Path, processors: Any) -> dict[str, torch.Tensor]:
    model = load_model(str(folder), dtype=torch.float32, device="cpu")
    policy = Policy(model, processors.family, temperature=1.0, banned_token_ids=processors.banned_token_ids)
    return {name: weight * 1.1 for name, weight in policy.named_weights()}
