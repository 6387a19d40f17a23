"""Times `trigon view` on a run of many rollouts: the index, filters, and the page in Chromium.

    PYTHONPATH=tests .venv/bin/python benchmarks/view.py [--rollouts 100000] [--tokens]

Writes a run of synthetic rollouts (n = 8, 50 prompts a step) to a temporary folder, or with
--folder FOLDER uses the one in FOLDER again. --tokens: every rollout has per-token values, of which
runs by default record those of two groups a step. The page is timed in a headless Chromium, if
there is one: from the request to the first rollouts on the screen.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.browser import find_chromium, open_browser
from support.view_runs import make_row, served, write_image
from trigon.report.rollouts import TokenRecord
from trigon.report.run_folder import RunFolder
from trigon.tools.view.index import IndexedRun, RolloutFilter, index_path
from trigon.tools.view.runs import open_runs

N, PROMPTS = 8, 50
WORDS = 200
RARE = "quokka"

FILTERS = {
    "step 100 to 120": RolloutFilter(min_step=100, max_step=120),
    "solved by some": RolloutFilter(solved="some"),
    "reward 0.4 to 0.6, at least 150 tokens": RolloutFilter(min_reward=0.4, max_reward=0.6, min_tokens=150),
    "a word that one completion has": RolloutFilter(text=RARE),
    "a word that no completion has": RolloutFilter(text="absent from all of them"),
    "a word that all prompts have": RolloutFilter(text="circles"),
    "all, by length": RolloutFilter(sort="longest"),
}


def main() -> None:
    """Write or open the run, and print a table of times."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--tokens", action="store_true")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        run = folder / "run"
        if not run.is_dir():
            write(run, options.rollouts // (N * PROMPTS), with_tokens=options.tokens)
        num_bytes = sum(path.stat().st_size for path in (run / "rollouts").iterdir())
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; rollouts files of {num_bytes / 1e6:,.0f} MB")
        with tempfile.TemporaryDirectory() as cache:
            measure(run, Path(cache))


def measure(run: Path, cache: Path) -> None:
    """Print the times for a run. cache: an empty folder."""
    [viewed] = open_runs([run], cache=cache)
    with timed("index, made once"):
        viewed.update()
    path = index_path(cache, run)
    print(f"{'index file':<62}{path.stat().st_size / 1e6:8,.0f} MB")
    with timed("index, opened again and compared with the files"):
        index = IndexedRun(viewed.record, path)
        index.update()
    for name, filters in FILTERS.items():
        seconds, cpu = [], []
        for _ in range(5):
            fresh = IndexedRun(viewed.record, path)  # each keeps its answers
            start, start_cpu = time.perf_counter(), time.process_time()
            found = fresh.find(filters)
            fresh.summaries(found.ids[:50])
            seconds.append(time.perf_counter() - start)
            cpu.append(time.process_time() - start_cpu)
        report(f"filter: {name} ({found.num_rollouts:,} found)", seconds, f", CPU {statistics.median(cpu):.3f} s")
    if (chromium := find_chromium()) is None:
        print("no Chromium: the page is not timed")
        return
    with served([run], cache) as (url, _), open_browser(chromium) as browser:
        browser.look(width=1440, height=900)
        shown = "document.querySelectorAll('a.item').length >= 50 && document.querySelectorAll('.completion').length"

        def page_seconds(address: str, until: str) -> Iterator[float]:
            for _ in range(5):
                start = time.perf_counter()
                browser.open(address)
                browser.wait(until)
                yield time.perf_counter() - start

        seconds = list(page_seconds(f"{url}#rollouts", shown))
        report("page: opened, 50 groups and the completions of one shown", seconds)
        seconds = list(page_seconds(f"{url}#curves", "document.querySelectorAll('.main-svg').length"))
        report("page: opened, first curve drawn", seconds)
        browser.open(f"{url}#rollouts")
        browser.wait(shown)
        seconds = []
        for value in ("some", "all", "none", "", "some"):
            before = browser.text(".result")
            start = time.perf_counter()
            browser.run(f'document.querySelector(\'[aria-label="Solved by"] [data-value="{value}"]\').click()')
            browser.wait(f"document.querySelector('.result').innerText !== {before!r}")
            seconds.append(time.perf_counter() - start)
        report("page: a filter clicked, the list shown", seconds)


def report(name: str, seconds: Sequence[float], more: str = "") -> None:
    """Print a line of the table."""
    print(f"{name:<62}{statistics.median(seconds):8.3f} s   (longest of 5: {max(seconds):.3f} s{more})")


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Print how long the block took."""
    start = time.perf_counter()
    yield
    print(f"{name:<62}{time.perf_counter() - start:8.3f} s")


def write(folder: Path, num_steps: int, *, with_tokens: bool) -> None:
    """Write a run of synthetic rollouts."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(5000)]
    image = write_image(folder, (200, 60, 40))
    with RunFolder(folder) as run:
        run.write_config("trainer:\n  max_steps: 0\n")
        for step in range(1, num_steps + 1):
            run.append_metrics(
                step, {"reward/overall": draw.random()} | {f"part{k % 6}/metric{k}": draw.random() for k in range(60)}
            )
            rows = []
            for prompt in range(PROMPTS):
                ability = draw.random()
                for sample in range(N):
                    texts = [f"{word} " for word in draw.choices(words, k=draw.randint(WORDS // 2, WORDS * 3 // 2))]
                    if (step, prompt, sample) == (num_steps // 2, 7, 3):
                        texts.append(RARE)
                    tokens = values(draw, texts) if with_tokens else None
                    reward = float(draw.random() < ability)
                    row = make_row(
                        f"train:{(step * PROMPTS + prompt) % 5000}", sample, reward, response="".join(texts),
                        num_tokens=len(texts), image_files=(image,), tokens=tokens,
                    )  # fmt: skip
                    rows.append(row)
            run.write_rollouts(step, "train", rows)


def values(draw: random.Random, texts: list[str]) -> TokenRecord:
    """Return per-token values, random."""

    def numbers(low: float, high: float) -> list[float]:
        return [draw.uniform(low, high) for _ in texts]

    ids = [draw.randrange(150_000) for _ in texts]
    return TokenRecord(ids, texts, numbers(-3, 0), numbers(-1, 1), numbers(-3, 0), numbers(0, 2))


if __name__ == "__main__":
    main()
