"""Episodes of several turns against the same number of tokens sampled in one turn.

    python benchmarks/episodes.py [--repeats 3]
    python benchmarks/episodes.py --trl [--steps 3]

64 episodes (16 prompts with an image, 4 completions each) of 4 turns, in an environment that takes
50 ms for each step, against as many tokens sampled for each completion in one turn, without an
environment: the 40 M-parameter model of the other benchmarks in vLLM, in float32, with one thread.
Both sides alternate in one process, with other prompts each time; ratios are those of medians. CPU
seconds are those of this process and of all processes of environments.

A model with random weights ends no turn where it should: each turn is cut after the same number of
tokens, and counts as ended.

--trl compares whole training steps with TRL 1.16, on the same tools; see compare_with_trl.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from shared import VOCABULARY, Figure, Shape, figures_table, images_processed, make_data, make_folder, table

TURNS = 4
SHAPE = Shape("episodes", (8, 8), prompt=130, response=0, n=4, prompts=16)
TARGET = 1.3
MAX_COMPUTED = 1.2
ENVIRONMENT = Path(__file__).with_name("slow_environment.py")


@dataclass(frozen=True, slots=True)
class Work:
    """One row of the table. turn_tokens: sampled in each turn. image_grid: of observations."""

    turn_tokens: int
    image_grid: tuple[int, int] | None = None
    target: float | None = None

    @property
    def observation(self) -> str:
        if self.image_grid is None:
            return "a text"
        rows, columns = self.image_grid
        return f"a text, an image of {rows * columns} tokens"

    @property
    def most_observed(self) -> int:
        """At least the tokens of an observation, with what the chat template writes around it."""
        rows, columns = self.image_grid or (0, 0)
        return 64 + rows * columns


WORKS = (Work(64, target=TARGET), Work(16), Work(64, (8, 8)))


@dataclass(slots=True)
class Counts:
    """Tokens by vLLM's counters.

    total: all that it computed. computed: those of the prefills of all turns but the first of each
    episode. new: those of them that vLLM had not held before: the observation, and the token with
    which the turn before ended.
    """

    total: int = 0
    computed: int = 0
    new: int = 0
    held: dict[str, int] = field(default_factory=dict)  # by prompt and sample

    def add(self, output: Any) -> None:
        """Count a finished vllm.RequestOutput."""
        episode, turn, _ = output.request_id.rsplit(".", 2)
        length, sampled = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
        computed = length - output.num_cached_tokens
        self.total += computed + sampled - 1  # the last token is not computed
        if turn != "0":
            self.computed += computed
            self.new += length - (self.held[episode] - 1)
        self.held[episode] = length + sampled


@dataclass(frozen=True, slots=True)
class Measured:
    """One call of generate. waited: seconds in which only environments worked."""

    seconds: float
    cpu_seconds: float
    waited: float
    counts: Counts


@dataclass(frozen=True, slots=True)
class Sides:
    """All calls of one row. observed: tokens of an observation, on average."""

    work: Work
    one_turn: list[Measured]
    episodes: list[Measured]
    processed_per_image: float
    observed: float

    @property
    def computed_per_new(self) -> float:
        """The tokens that prefills of later turns computed, over those that were new."""
        return sum(each.counts.computed for each in self.episodes) / sum(each.counts.new for each in self.episodes)

    def ratio(self, seconds: Callable[[Measured], float]) -> float:
        """Return the median of episodes, divided by that of one turn."""
        return statistics.median(map(seconds, self.episodes)) / statistics.median(map(seconds, self.one_turn))


@contextmanager
def cut_turns_end(on_output: Callable[[Any], None]) -> Iterator[None]:
    """Let each turn sample as many tokens as it may, and then count as ended by the model.

    on_output: gets each finished vllm.RequestOutput.
    """
    from trigon.rollout.vllm import engine
    from trigon.rollout.vllm.turns import VllmTurns

    class EndedTurns(VllmTurns):
        def __init__(self, llm_engine: Any, processors: Any, sampling: Any, **options: Any) -> None:
            super().__init__(llm_engine, processors, replace(sampling, ignore_eos=True), **options)

        def step(self) -> list[Any]:
            step = self._llm_engine.step

            def observed() -> list[Any]:
                outputs = step()
                for output in outputs:
                    if output.finished:
                        on_output(output)
                return outputs

            with mock.patch.object(self._llm_engine, "step", observed):
                ended = super().step()
            return [(name, turn and replace(turn, finish_reason="stop")) for name, turn in ended]

    with mock.patch.object(engine, "VllmTurns", EndedTurns):
        yield


def options(folder: Path, work: Work, shape: Shape) -> list[str]:
    """Return the configuration of the episodes."""
    from side_trigon import options as shared_options

    kwargs = {"turns": TURNS, "image_grid": work.image_grid}
    return [
        *shared_options(folder, shape, 1),
        f"data.max_response_length={TURNS * work.turn_tokens + (TURNS - 1) * work.most_observed}",
        f"worker.rollout.environment={ENVIRONMENT}:SlowEnvironment",
        f"worker.rollout.environment_kwargs={json.dumps(kwargs)}",
        "worker.rollout.ignore_eos=false",  # refused with an environment; see cut_turns_end
        f"worker.rollout.max_turns={TURNS}",
        f"worker.rollout.max_turn_tokens={work.turn_tokens}",
    ]


def measure_work(work: Work, folder: Path, shape: Shape, *, repeats: int) -> Sides:
    """Start an engine with environments, and measure both sides in alternation."""
    from trigon.assemble.data import open_builder, open_images, open_processors
    from trigon.assemble.engines import open_rollout
    from trigon.assemble.episodes import load_episodes, open_episodes
    from trigon.assemble.models import DevicePlacement, choose_device, open_models
    from trigon.assemble.options import make_sampling_params
    from trigon.config.load import load_config
    from trigon.config.plan import make_plan
    from trigon.data.dataset import open_prompts
    from trigon.metrics import values
    from trigon.system import processes
    from trigon.training.parallel import SingleProcess

    config = load_config(None, options(folder, work, shape)).config
    processors = open_processors(config)
    sampled = work.turn_tokens * TURNS
    with ExitStack() as stack:
        found = load_episodes(config, processors, stack)
        assert found is not None
        images = open_images(config, processors)
        settings = open_episodes(config, processors, found, images, schemas=found.schemas)
        prompts = open_prompts(
            str(folder / "data.parquet"),
            open_builder(config, processors),
            num_workers=1,
        )
        place = DevicePlacement(choose_device(config), SingleProcess())
        trainer, *_ = open_models(config, processors, make_plan(config, num_train_prompts=len(prompts)), place)
        stack.enter_context(cut_turns_end(lambda output: counts.add(output)))
        processed = stack.enter_context(images_processed())
        engine = open_rollout(config, processors, place, trainer, shows_videos=False, episodes=settings)
        stack.callback(engine.close)
        stack.enter_context(engine.awake(trainer.weights(), version=0))
        episodes = make_sampling_params(config)
        one_turn = replace(episodes, one_turn=True, max_tokens=sampled)
        rows = iter([prompts[index] for index in range(len(prompts))])
        [server] = found.process_ids
        idle = processes.descendants(server)
        num_observed = num_images = 0
        counts = Counts()

        def generate(num_prompts: int, sampling: Any) -> Measured:
            nonlocal num_observed, num_images, counts
            counts = Counts()
            taken = [next(rows) for _ in range(num_prompts)]
            engine.pop_metrics()
            cpu, start = cpu_seconds(server, idle), time.perf_counter()
            groups = engine.generate(taken, sampling)
            seconds = time.perf_counter() - start
            cpu = cpu_seconds(server, idle) - cpu
            for completion in [completion for group in groups for completion in group]:
                if completion.error or len(completion.sampling_logprobs) != sampled:
                    raise RuntimeError(f"a completion with {len(completion.turns)} turns: {completion.error}")
                num_observed += sum(later.start - turn.end for turn, later in pairwise(completion.turns))
                num_images += sum(turn.num_images for turn in completion.turns)
            num_images += num_prompts
            waited = values(engine.pop_metrics()).get("perf/environment_wait_fraction", 0.0) * seconds
            return Measured(seconds, cpu, waited, counts)

        for sampling in (one_turn, episodes):
            generate(1, sampling)  # warm up
        sides: dict[bool, list[Measured]] = {True: [], False: []}
        num_observed = 0
        for number in range(repeats):
            order = (one_turn, episodes) if number % 2 == 0 else (episodes, one_turn)
            for sampling in order:
                sides[sampling.one_turn].append(generate(shape.prompts, sampling))
    observed = num_observed / (repeats * shape.sequences * (TURNS - 1))
    measured = Sides(work, sides[True], sides[False], len(processed) / num_images, observed)
    print(f"{work}: {measured.ratio(_seconds):.2f}x", file=sys.stderr, flush=True)
    return measured


def cpu_seconds(server: int, idle: Collection[int]) -> float:
    """Return the CPU seconds of this process so far, and of the processes of environments.

    server: the process below which they are. idle: those below it without an episode. Waits until
    the processes of episodes have ended, whose seconds are then those of their parent.
    """
    from trigon.system import processes

    end = time.monotonic() + 10.0
    while not set(processes.descendants(server)) <= set(idle):
        if time.monotonic() > end:
            raise RuntimeError("the processes of episodes have not ended")
        time.sleep(0.01)
    ticks = 0
    for process in (server, *idle):
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15]))  # in user and system mode, own and of children that have ended
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def measure(*, repeats: int, tiny: bool = False) -> tuple[list[Figure], str]:
    """Return the figures of bar 7, and the table behind them.

    tiny: with the embedded tiny model, 8 episodes and turns of 8 tokens, to try the benchmark.
    """
    shape = replace(SHAPE, prompts=2) if tiny else SHAPE
    works = [replace(work, turn_tokens=8, target=None) for work in WORKS] if tiny else WORKS
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder) / "model", vocabulary=VOCABULARY, shape=shape, tiny=tiny)
        rows = 2 + 2 * repeats * shape.prompts
        make_data(Path(folder) / "data.parquet", model=Path(folder) / "model", shape=shape, rows=rows)
        found = [measure_work(work, Path(folder), shape, repeats=repeats) for work in works]
    figures: list[Figure] = []
    for sides in found:
        work = sides.work
        what = f"episodes of {TURNS} turns / one turn, {work.turn_tokens} tokens a turn, observing {work.observation}"
        cpu = f"CPU seconds {sides.ratio(_cpu_seconds):.2f}x"
        figures.append(Figure(7, what, sides.ratio(_seconds), "x", at_most=work.target, note=cpu))
    computed, processed = found[-1].computed_per_new, max(sides.processed_per_image for sides in found)
    figures += [
        Figure(7, "prefills of later turns with images: tokens computed / new", computed, "x", at_most=MAX_COMPUTED),
        Figure(7, "images processed / images", processed, "x", at_most=1.0),
    ]
    return figures, tables_of(found, shape)


def _seconds(measured: Measured) -> float:
    return measured.seconds


def _cpu_seconds(measured: Measured) -> float:
    return measured.cpu_seconds


def _total(measured: Measured) -> float:
    return measured.counts.total


def _waited(measured: Measured) -> float:
    return measured.waited


def tables_of(found: Sequence[Sides], shape: Shape) -> str:
    """Return a table of times, and one of tokens and images."""
    times, tokens = [], []
    for sides in found:
        work, count = sides.work, sides.episodes[0].counts
        cells: list[object] = [work.turn_tokens, work.observation]
        for seconds in (_seconds, _cpu_seconds):
            medians = [statistics.median(map(seconds, side)) for side in (sides.one_turn, sides.episodes)]
            cells += [*(f"{median:.2f}" for median in medians), f"{sides.ratio(seconds):.2f}"]
        times.append((*cells, f"{statistics.median(map(_waited, sides.episodes)):.2f}"))
        tokens.append(
            (
                *cells[:2],
                f"{sides.observed:.1f}",
                f"{sides.ratio(_total):.2f}",
                count.new,
                count.computed,
                f"{sides.computed_per_new:.2f}",
                f"{sides.processed_per_image:.3g}",
            )
        )
    first = ("tokens a turn", "observation")
    measured = ("one turn, s", "episodes, s", "ratio", "one turn, CPU s", "episodes, CPU s", "ratio")
    return "\n\n".join(
        (
            f"{shape.sequences} episodes of {TURNS} turns, medians of {len(found[0].episodes)} runs of each side; "
            "one turn, episodes and their ratio:",
            table(
                times,
                (*first, *measured, "only environments work, s"),
            ),
            "Tokens of an observation with what the chat template writes around it; all tokens computed, episodes / "
            "one turn; prefills of turns after the first, in one run of the episodes:",
            table(
                tokens,
                (*first, "observed", "all computed", "new", "computed", "computed / new", "images processed / images"),
            ),
        )
    )


def compare_with_trl(*, steps: int, tiny: bool = False) -> str:
    """Return a table of whole training steps with tools, TRL's and Trigon's.

    Each side is a process; they alternate step by step, as in whole_step.py. A completion calls a
    tool three times, which takes 50 ms and returns a text or an image. A model with random weights
    calls none, so on both sides each turn is read as a call of the tool (side_trl_episodes.py,
    side_trigon_episodes.py). tiny: as for measure.
    """
    from peers import python_of
    from whole_step import HERE, Side

    rows = []
    shape = replace(SHAPE, image_grid=(8, 8), response=8 if tiny else 32, n=8, prompts=1)
    for tool in ("listen", "look"):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make_folder(folder / "model", vocabulary=1024, shape=shape, tiny=tiny)
            write_chat_template(folder / "model", python_of("trl"))
            make_data(folder / "data.parquet", model=folder / "model", shape=shape, rows=shape.prompts * (steps + 2))
            work = [str(folder), tool, *map(str, (shape.prompts, shape.n, TURNS, shape.response))]
            trl = [str(python_of("trl")), str(HERE / "side_trl_episodes.py"), *work, str(steps)]
            trigon = [sys.executable, str(HERE / "side_trigon_episodes.py"), *work, str(steps + 1)]
            sides = {"TRL": Side(trl, folder / "log.trl"), "Trigon": Side(trigon, folder / "log.trigon")}
            try:
                sides["Trigon"].step()  # with the start of vLLM
                sides["TRL"].wait()
                pairs = [{side: sides[side].report() for side in ("Trigon", "TRL")} for _ in range(steps)]
                sides["Trigon"].finish()
            finally:
                for side in sides.values():
                    side.close()
        medians = {side: statistics.median(pair[side]["seconds"] for pair in pairs) for side in sides}
        print(f"{tool}: TRL {medians['TRL']:.2f} s, Trigon {medians['Trigon']:.2f} s", file=sys.stderr, flush=True)
        cells = [f"{medians['TRL']:.2f}", f"{medians['Trigon']:.2f}", f"{medians['TRL'] / medians['Trigon']:.2f}"]
        for side in ("TRL", "Trigon"):
            total = {key: sum(pair[side][key] for pair in pairs) for key in pairs[0][side]}
            cells.append(f"{total['different']:.0f} of {total['sampled']:.0f}")
            cells.append(f"{total['processed'] / total['images']:.3g}")
        rows.append(({"listen": "a text", "look": "an image"}[tool], *cells))
    of_sides = [
        f"{side}, {what}" for side in ("TRL", "Trigon") for what in ("tokens that differ", "processed / images")
    ]
    return table(rows, ("the tool returns", "TRL, s", "Trigon, s", "TRL / Trigon", *of_sides))


def write_chat_template(model: Path, trl: Path) -> None:
    """Give a model folder the chat template for tools and images that comes with TRL.

    trl: the interpreter of its environment.
    """
    [file] = trl.parents[1].glob("lib/python*/site-packages/trl/chat_templates/qwen3_vl.jinja")
    (model / "chat_template.jinja").write_text(file.read_text(encoding="utf-8"), encoding="utf-8")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="the embedded tiny model and few tokens: seconds")
    parser.add_argument("--trl", action="store_true", help="compare whole steps with tools with TRL instead")
    parser.add_argument("--steps", type=int, default=3, help="with --trl: steps counted on each side (%(default)s)")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
    if arguments.trl:
        print(compare_with_trl(steps=arguments.steps, tiny=arguments.tiny))
        return
    figures, tables = measure(repeats=arguments.repeats, tiny=arguments.tiny)
    print(f"{tables}\n\n{figures_table(figures)}")


if __name__ == "__main__":
    main()
