"""The page of `trigon view` in a real browser: what one sees, clicks and types."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.browser import Browser, find_chromium, open_browser
from support.view_runs import make_row, served, write_image, write_run, write_step
from trigon.report.rollouts import TurnRecord
from trigon.report.run_folder import RunFolder
from trigon.tools.view.export import export
from trigon.tools.view.runs import open_runs

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium or Chrome on PATH")

# Plotly's script has one style element with text, for maps, which the policy refuses as it should.
REFUSED_STYLE = "Applying inline style violates"

HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script><b>bold</b>'
CHARTS = "document.querySelectorAll('.chart .main-svg').length >= 2"
COMPLETIONS = "document.querySelectorAll('.completion').length"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser(str(CHROMIUM)) as browser:
        browser.look(width=1280, height=800)
        yield browser


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("view")
    runs = [write_run(folder / "first", num_steps=4), write_run(folder / "second", lr=5e-6, num_steps=2)]
    with RunFolder(runs[0]) as run:
        cut = make_row("train:cut", 1, 0.25, response="and so on", finish_reason="length", image_files=())
        failed = replace(make_row("train:cut", 0, 0.0), outcome="failed", error="ValueError: no number")
        run.write_rollouts(4, "filtered", [replace(row, filtered="low", tokens=None) for row in (failed, cut)])
    return runs


@pytest.fixture(scope="module")
def page(folders: list[Path]) -> Iterator[str]:
    with served(folders, folders[0].parent / "cache") as (url, _):
        yield url


def errors(browser: Browser) -> list[str]:
    return [error for error in browser.errors if not error.startswith(REFUSED_STYLE)]


def rewards(browser: Browser) -> list[str]:
    return browser.run("[...document.querySelectorAll('.completion .reward b')].map(e => e.textContent)")


@pytest.mark.extended
def test_curves_of_all_runs_are_in_one_chart(browser, page):
    browser.open(page)
    browser.wait(CHARTS)
    names = browser.run("[...document.querySelectorAll('.chart .name')].map(e => e.textContent)")
    assert names == ["reward/overall", "actor/entropy", "timing_s/step"]
    assert browser.run("document.querySelectorAll('.chart')[0].querySelector('.latest').innerText").split() == [
        "0.4",
        "1",
    ]
    # Each run has its smoothed curve; one with more than two steps the raw one too.
    assert browser.run("document.querySelectorAll('.chart')[0].querySelectorAll('.scatterlayer .trace').length") == 3
    browser.click(".runs .run:nth-child(2)")
    browser.wait("document.querySelectorAll('.chart')[0].querySelectorAll('.scatterlayer .trace').length === 2")
    browser.click("[data-search]")
    browser.type("timing_s/g")
    browser.wait("document.querySelectorAll('.chart').length === 1")
    assert browser.text(".chart .name") == "timing_s/gen"
    assert errors(browser) == []


def test_completions_are_side_by_side_with_rewards_image_and_history(browser, page):
    browser.open(f"{page}#rollouts?run=0&solved=some")
    browser.wait(COMPLETIONS)
    assert rewards(browser) == ["0", "1", "0", "1"]
    assert "null" not in browser.text("main")
    assert "undefined" not in browser.text("main")
    first, second = browser.run("[...document.querySelectorAll('.completion')].slice(0, 2).map(e => e.offsetTop)")
    assert first == second
    assert browser.wait("document.querySelector('.image img').naturalWidth") == 64
    assert "accuracy 1" in browser.text(".completion.solved")
    assert "+0.5" in browser.text(".completion.solved .advantage")
    assert browser.text(".prompt .text") == "<image>How many circles are in train:1?"
    assert browser.run("document.querySelectorAll('.mark').length") == 4 + 2
    browser.click(".marks:nth-of-type(2) .mark:nth-child(2), .marks .mark:nth-child(2)")
    browser.wait("document.querySelector('.group-head .badge').textContent === 'step 2'")
    browser.click(".image")
    browser.wait("document.querySelector('dialog.viewer').open")
    browser.press("Escape")
    browser.wait("!document.querySelector('dialog.viewer').open")
    assert errors(browser) == []


def test_filters_are_clicked_and_typed_and_kept_in_the_address(browser, page):
    browser.open(f"{page}#rollouts")
    browser.wait(COMPLETIONS)
    assert browser.text(".result") == "13 groups, 50 completions"
    browser.click(".filter-row [aria-expanded]")
    browser.wait("document.querySelector('.more-filters').checkVisibility()")
    assert "null" not in browser.text(".more-filters")
    browser.press("f")
    browser.click("[aria-label='Solved by'] [data-value=all]")
    browser.wait("document.querySelector('.result').innerText.startsWith('4 groups')")
    assert "solved=all" in browser.run("location.hash")
    browser.click("[aria-label='Solved by'] [data-value='']")
    browser.press("/")
    browser.type("SO ON")
    browser.wait("document.querySelector('.result').innerText === '1 group, 1 completion'")
    browser.wait("document.querySelector('.item .badge.filtered')")
    browser.press("Escape")
    browser.press("j")
    assert browser.wait("document.querySelector('mark')?.textContent") == "so on"
    browser.click(".failed")
    browser.wait("document.querySelector('.result').innerText.startsWith('0 groups')")
    assert browser.text(".list .empty") == "No completion matches the filters."
    browser.run("history.back()")
    browser.open(f"{page}#rollouts?outcome=failed")
    browser.wait(COMPLETIONS)
    assert "ValueError: no number" in browser.text(".completion .problem")
    browser.open(f"{page}#rollouts?min_step=nonsense")
    browser.wait("document.querySelector('.result').innerText.includes('min_step cannot be')")


def test_tokens_have_colours_and_numbers(browser, page):
    browser.open(f"{page}#rollouts?solved=some")
    browser.wait(COMPLETIONS)
    browser.click("[aria-label='Colour of tokens'] [data-value=entropy]")
    browser.wait("document.querySelectorAll('.token').length === 12")
    shown = browser.run(
        "[...document.querySelectorAll('.token')].slice(0, 3).map(e => e.style.getPropertyValue('--strength'))"
    )
    assert shown == ["0%", "25%", "50%"]
    browser.hover(".completion:nth-child(2) .token:nth-child(3)")
    browser.wait("document.querySelector('.inspector').innerText.includes('token 3 of 3, completion 1')")
    facts = " ".join(browser.text(".inspector").split())
    assert (
        "engine log-prob −0.5 probability 0.607 trainer log-prob −0.51 mismatch −0.01 entropy 0.5 advantage +0.5"
        in facts
    )
    browser.run("document.querySelector('.tokens').focus()")
    browser.press("ArrowRight")
    browser.wait("document.querySelector('.inspector').innerText.includes('token 2 of 3, completion 0')")
    browser.press("Escape")
    browser.run("document.activeElement.blur()")
    browser.press("c")
    browser.wait("document.querySelector('[data-value=mismatch]').getAttribute('aria-pressed') === 'true'")
    assert "−0.03" in browser.text(".legend")
    browser.open(f"{page}#rollouts?split=filtered")
    browser.wait(COMPLETIONS)
    assert browser.run("document.querySelector('[data-value=mismatch]').disabled")


def test_coloured_tokens_stay_in_their_turns_beside_what_was_observed(browser, tmp_path):
    folder = tmp_path / "run"
    image = write_image(folder, (0, 90, 200))
    turns = (
        TurnRecord("A map. What next?", "I count", 2, 0.5, image_files=(image,)),
        TurnRecord("Then answer.", " 1.", 1, 1.0),
    )
    with RunFolder(folder) as run:
        run.write_rollouts(1, "train", [replace(make_row("train:0", 0, 1.0), turns=turns)])
    with served([folder], tmp_path / "cache") as (url, _):
        browser.open(f"{url}#rollouts")
        browser.wait(COMPLETIONS)
        browser.click("[aria-label='Colour of tokens'] [data-value=entropy]")
        browser.wait("document.querySelectorAll('.token').length === 3")
        each = "[...document.querySelectorAll('.turn')].map(e => e.querySelectorAll('.token').length)"
        assert browser.run(each) == [2, 1]
        assert "A map. What next?" in browser.text(".turn")
        assert "Then answer." in browser.text(".turn:nth-child(2)")
        assert browser.wait("document.querySelector('.turn img').naturalWidth") == 64
        browser.click("[aria-label='Colour of tokens'] [data-value=plain]")


@pytest.mark.extended
def test_a_run_is_live_while_a_process_writes_to_it(browser, tmp_path):
    folder = write_run(tmp_path / "run", num_steps=1)
    with served([folder], tmp_path / "cache") as (url, _):
        browser.open(url)
        browser.wait("document.querySelector('.right .live').innerText === 'not running'")
        with RunFolder(folder):
            browser.wait("document.querySelector('.right .live').innerText === 'live'")
        browser.wait("document.querySelector('.right .live').innerText === 'not running'")


@pytest.mark.extended
def test_a_validation_that_was_added_for_an_earlier_step_is_not_the_latest(browser, tmp_path):
    folder = write_run(tmp_path / "run", num_steps=1)
    with RunFolder(folder) as run:
        for step, value in ((4, 0.5), (2, 0.125)):
            run.append_metrics(step, {"val/reward_score": value})
    with served([folder], tmp_path / "cache") as (url, _):
        browser.open(url)
        browser.wait("document.querySelectorAll('.chart .main-svg').length >= 1")
        shown = "[...document.querySelectorAll('.plot')].map(e => e.getAttribute('aria-label'))"
        assert f"val/reward_score: {folder.parent.name}/run 0.5" in browser.run(shown)


@pytest.mark.extended
def test_the_time_per_step_leaves_out_lines_that_are_no_step(browser, tmp_path):
    folder = write_run(tmp_path / "run", num_steps=2)
    with RunFolder(folder) as run:
        for step in (0, 2):  # a validation before training, and one that was added
            run.append_metrics(step, {"timing_s/validation": 4.0, "val/reward_score": 0.5})
    with served([folder], tmp_path / "cache") as (url, _):
        browser.open(f"{url}#time")
        browser.wait("document.querySelector('.phases')")
        rows = browser.run("[...document.querySelectorAll('.phases tbody tr')].map(e => e.innerText)")
        assert [row.split("\t")[1:] for row in rows if "sampling" in row] == [["2.5 s", "20.8 %", "1.25 s"]]
        assert "in 2 steps" in browser.text(".card header")


def test_the_keyboard_reaches_everything(browser, page):
    browser.open(f"{page}#rollouts?split=train&sort=oldest")
    browser.wait(COMPLETIONS)
    current = "document.querySelector('.item[aria-current] code').textContent"
    assert browser.run(current) == "train:0"
    browser.press("j")
    browser.wait(f"{current} === 'train:1'")
    browser.press("k")
    browser.wait(f"{current} === 'train:0'")
    browser.press("ArrowRight")
    browser.wait("document.querySelector('.group-head .badge').textContent === 'step 2'")
    browser.press("?")
    browser.wait("document.querySelector('dialog.help').open")
    browser.press("Escape")
    browser.press("3")
    browser.wait("document.querySelector('.phases')")
    assert "sampling" in browser.text(".phases")
    browser.press("4")
    browser.wait("document.querySelectorAll('.config tbody tr').length === 1")
    assert "1e-06\t5e-06" in browser.text(".config tbody tr")
    before = browser.run("getComputedStyle(document.body).backgroundColor")
    browser.press("t")
    browser.wait(f"getComputedStyle(document.body).backgroundColor !== {before!r}")
    browser.press("t")
    assert errors(browser) == []


def test_new_steps_appear_without_a_reload(browser, tmp_path):
    folder = write_run(tmp_path / "run", num_steps=1)
    with served([folder], tmp_path / "cache") as (url, _), RunFolder(folder) as run:
        browser.open(f"{url}#rollouts?split=train")
        browser.wait(COMPLETIONS)
        assert browser.text(".result") == "3 groups, 12 completions"
        write_step(run, 2, write_image(folder, (0, 0, 0)))
        browser.wait("document.querySelector('.result').innerText === '6 groups, 24 completions'")
        browser.wait("document.querySelector('.run').innerText.includes('step 2')")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / HOSTILE.replace("/", "-")[:60]
    with RunFolder(folder) as run:
        run.write_config(f"trainer:\n  name: '{HOSTILE}'\n'{HOSTILE}': 1\n")
        for step in (1, 2, 3):
            link = '<a href="javascript:window.hacked=1">x</a>'
            names = (f"reward/{HOSTILE}", link, "__proto__", f"timing_s/{HOSTILE}")
            run.append_metrics(step, {name: float(step) for name in names})
        names = ("../../secret.png", "images/../../x.png", "javascript:window.hacked=1", 'images/"><script>.png')
        row = make_row(
            HOSTILE, 0, 1.0, response=f"{HOSTILE} \u202e \x1b[31m", prompt=HOSTILE, ground_truth=HOSTILE,
            row={HOSTILE: HOSTILE}, parts={HOSTILE: 1.0, "overall": 1.0}, outcome="failed", error=HOSTILE,
            images=(HOSTILE,) * 4, image_files=names,
        )  # fmt: skip
        run.write_rollouts(1, "train", [row, replace(row, sample=1, tokens=None)])
        with (folder / "rollouts" / "step_000001.jsonl").open("a") as file:
            file.write('{"prompt_id": "' + HOSTILE.replace('"', "'") + '"}\n')
    return folder


def check_hostile_page(browser: Browser, url: str) -> None:
    """Look at every view of the hostile run."""
    for view, shown in (
        ("curves", "document.querySelector('.main-svg')"),
        ("rollouts", COMPLETIONS),
        ("time", "document.querySelector('.main-svg')"),
        ("configuration", "document.querySelector('.config')"),
    ):
        browser.open(f"{url}#{view}")
        browser.wait(shown)
        if view == "rollouts":
            assert HOSTILE in browser.text(".completion")
            assert "\\u202e \\u001b[31m" in browser.text(".completion .text")
            browser.click("[aria-label='Colour of tokens'] [data-value=entropy]")
            browser.wait("document.querySelector('.token')")
            browser.hover(".token")
            browser.click("[aria-label='Colour of tokens'] [data-value=plain]")
        if view == "curves":
            browser.hover(".main-svg")
            assert browser.run("document.querySelectorAll('.plot a').length") == 0
        time.sleep(0.2)
        assert browser.run("window.hacked === undefined")
        assert browser.run("document.querySelectorAll('main script, main img[onerror], main b b').length") == 0
        assert errors(browser) == []
        assert not any("secret" in request or "x.png" in request for request in browser.requests)
        requests = {request for request in browser.requests if not request.startswith((url, "data:"))}
        assert requests == set()


@pytest.mark.extended
def test_what_models_and_datasets_write_stays_text(browser, hostile, tmp_path):
    with served([hostile], tmp_path / "cache") as (url, _):
        check_hostile_page(browser, url)
        browser.open(f"{url}#rollouts")
        assert "is not a rollout" in browser.text(".problem")


@pytest.mark.extended
def test_a_hostile_run_stays_text_in_an_exported_file(browser, hostile, tmp_path):
    export(open_runs([hostile], cache=tmp_path / "cache"), tmp_path / "run.html")
    check_hostile_page(browser, (tmp_path / "run.html").as_uri())


@pytest.mark.extended
def test_an_exported_file_shows_the_run_without_a_network(browser, folders, tmp_path):
    runs = open_runs(folders, cache=tmp_path / "cache")
    written = export(runs, tmp_path / "runs.html", max_rollouts=40)
    assert (written.num_rollouts, written.num_matching, written.num_images) == (38, 74, 2)
    url = written.path.as_uri()
    browser.open(url)
    browser.wait(CHARTS)
    assert browser.text(".notice").startswith("Exported file: all metrics, the configuration, and 38 of 74 rollouts.")
    browser.open(f"{url}#rollouts?solved=some")
    browser.wait(COMPLETIONS)
    assert rewards(browser) == ["0", "1", "0", "1"]
    assert browser.wait("document.querySelector('.image img').naturalWidth") == 64
    browser.press("/")
    browser.type("in TRAIN:1")
    browser.wait("document.querySelector('.item-text')?.innerText.includes('train:1')")
    assert errors(browser) == []
    assert {request.split(":")[0] for request in browser.requests} <= {"file", "data"}
    assert str(folders[0].parent) not in written.path.read_text(encoding="utf-8"), "paths of the machine are private"


@pytest.mark.extended
@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_has_the_list_then_the_group_and_nothing_is_too_wide(browser, page, dark):
    browser.look(width=390, height=844, is_phone=True, dark=dark)
    try:
        for view, shown in (
            ("curves", CHARTS),
            ("time", "document.querySelector('.phases')"),
            ("configuration", "document.querySelector('.config')"),
            ("rollouts", "document.querySelector('.item')"),
        ):
            browser.open(f"{page}#{view}")
            browser.wait(shown)
            assert browser.run("document.documentElement.scrollWidth") == 390, view
            if view == "configuration":  # the values of all runs are on the screen
                right = "[...document.querySelectorAll('.config td code')].map(e => e.getBoundingClientRect().right)"
                assert len(browser.run(right)) == 2
                assert max(browser.run(right)) <= 390
        assert browser.run(COMPLETIONS) == 0
        browser.click(".item")
        browser.wait(COMPLETIONS)
        assert browser.run("document.documentElement.scrollWidth") == 390
        assert not browser.run("document.querySelector('.list').checkVisibility()")
        browser.click(".back")
        browser.wait("document.querySelector('.list').checkVisibility()")
    finally:
        browser.look(width=1280, height=800)


# Contrast as WCAG 2 computes it, of text against the backgrounds behind it.
CONTRAST = """
(() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgba = (color) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    const d = canvas.getImageData(0, 0, 1, 1).data; return [d[0], d[1], d[2], d[3] / 255]; };
  const over = (top, bottom) => [0, 1, 2].map((i) => top[i] * top[3] + bottom[i] * (1 - top[3]));
  const light = (c) => c.map((v) => v / 255).map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => { const b = e ? behind(e.parentElement) : [255, 255, 255];
    return e ? over(rgba(getComputedStyle(e).backgroundColor), b) : b; };
  const low = [];
  for (const e of document.querySelectorAll('body *')) {
    if (!e.checkVisibility() || e.closest('svg, :disabled, select')) continue;
    if (![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
    const back = behind(e);
    const [a, b] = [light(over(rgba(getComputedStyle(e).color), back)), light(back)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) low.push([e.className || e.tagName, e.textContent.slice(0, 30), ratio.toFixed(2)]);
  }
  return low;
})()
"""


@pytest.mark.extended
@pytest.mark.parametrize("dark", [False, True])
def test_text_has_contrast_and_controls_have_names(browser, page, dark):
    browser.look(width=1280, height=800, dark=dark)
    try:
        for view, shown in (
            ("curves", CHARTS),
            ("rollouts?outcome=failed", COMPLETIONS),
            ("rollouts?solved=some", COMPLETIONS),
            ("time", "document.querySelector('.phases')"),
            ("configuration", "document.querySelector('.config')"),
        ):
            browser.open(f"{page}#{view}")
            browser.wait(shown)
            if "some" in view:
                browser.click("[aria-label='Colour of tokens'] [data-value=advantage]")
                browser.wait("document.querySelector('.token')")
            assert browser.run(CONTRAST) == [], view
            unnamed = """[...document.querySelectorAll('button, input, select, a, [role=img], img')].filter(
                (e) => !e.textContent.trim() && !e.ariaLabel && !e.closest('label') && !e.hasAttribute('alt'))"""
            assert browser.run(f"{unnamed}.map((e) => e.outerHTML)") == [], view
    finally:
        browser.look(width=1280, height=800)
