r"""Takes the pictures of docs/view.md from the page of `trigon view`, in a headless Chromium.

    PYTHONPATH=tests .venv/bin/python scripts/view_screenshots.py RUN [RUN ...]

The pictures in the docs are of two quickstart runs, the second with another learning rate:

    trigon quickstart --folder runs/a trainer.max_steps=12 worker.rollout.n=8
    trigon quickstart --folder runs/b trainer.max_steps=12 worker.rollout.n=8 \
        worker.actor.optim.lr=3e-4
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from io import BytesIO
from pathlib import Path

from PIL import Image

from support.browser import Browser, find_chromium, open_browser
from support.view_runs import served

MAX_BYTES = 150_000

CURVES = "document.querySelectorAll('.chart .main-svg').length >= 12"
TOKENS = "document.querySelectorAll('.token').length"


def main() -> int:
    """Write the pictures, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    chromium = find_chromium()
    if chromium is None:
        print("needs Chromium or Chrome on PATH", file=sys.stderr)
        return 1
    options.output.mkdir(exist_ok=True, parents=True)
    with (
        tempfile.TemporaryDirectory() as cache,
        served(options.run, Path(cache)) as (url, _),
        open_browser(chromium) as browser,
    ):
        browser.look(width=1360, height=800)
        browser.open(f"{url}#curves")
        browser.wait(CURVES)
        write([picture(browser)], options.output / "view-curves.png")

        rollouts = f"{url}#rollouts?split=train&solved=some&tokens=recorded&sort=spread"
        browser.open(rollouts)
        show_tokens(browser, "entropy")
        write([picture(browser)], options.output / "view-rollouts.png")

        browser.look(width=390, height=780, is_phone=True, dark=True)
        browser.open(f"{url}#curves")
        browser.wait("document.querySelectorAll('.chart .main-svg').length >= 2")
        phones = [picture(browser)]
        browser.open(f"{url}#rollouts?split=train&solved=some&tokens=recorded")
        browser.wait("document.querySelector('.item')")
        phones.append(picture(browser))
        browser.click(".item")
        show_tokens(browser, "mismatch")
        browser.run("document.querySelector('.completion-bar').scrollIntoView(); window.scrollBy(0, -100)")
        write([*phones, picture(browser)], options.output / "view-phone.png")
    return 0


def show_tokens(browser: Browser, color: str) -> None:
    """Colour the tokens, and show the numbers of one."""
    browser.click(f"[aria-label='Colour of tokens'] [data-value={color}]")
    browser.wait(TOKENS)
    browser.hover(".completion:nth-child(2) .token:nth-child(6)")


def picture(browser: Browser) -> Image.Image:
    """Return a picture of the window, once nothing moves any more."""
    time.sleep(1.5)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.png"
        browser.screenshot(path)
        return Image.open(BytesIO(path.read_bytes())).convert("RGB")


def write(pictures: list[Image.Image], path: Path) -> None:
    """Write pictures side by side, with 256 colours."""
    width = sum(each.width for each in pictures) + 16 * (len(pictures) - 1)
    together = Image.new("RGB", (width, max(each.height for each in pictures)), (128, 128, 128))
    place = 0
    for each in pictures:
        together.paste(each, (place, 0))
        place += each.width + 16
    # This method keeps the colours of small areas.
    together.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
    if path.stat().st_size > MAX_BYTES:
        raise SystemExit(f"{path} has more than {MAX_BYTES / 1000:.0f} kB")


if __name__ == "__main__":
    sys.exit(main())
