"""The page of `trigon view` is served to this machine only, and nothing but what a run shows."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from support.processes import wait_until
from support.view_runs import make_row, served, write_image, write_run, write_step
from trigon.errors import ConfigError
from trigon.report.run_folder import RunFolder
from trigon.tools.view.export import as_one_script
from trigon.tools.view.server import STATIC, address, is_loopback, listen, make_app, read_image, shrink


class Answer:
    def __init__(self, url: str, path: str, *, method: str = "GET", headers: dict[str, str] | None = None) -> None:
        place = urlsplit(url)
        connection = http.client.HTTPConnection(place.hostname, place.port, timeout=30)
        connection.request(method, path, headers=headers or {})
        response = connection.getresponse()
        self.status, self.headers, self.content = response.status, response.headers, response.read()
        connection.close()

    def json(self):
        return json.loads(self.content)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("view")
    runs = [write_run(folder / "a"), write_run(folder / "b", lr=2e-6, num_steps=1)]
    with served(runs, folder / "cache") as (url, _):
        yield url, runs[0]


def test_the_page_and_its_files_are_served_with_a_strict_policy(page):
    url, _ = page
    policy = Answer(url, "/").headers["Content-Security-Policy"]
    assert "default-src 'none'; script-src 'self'; " in policy
    assert "unsafe" not in policy
    for path, kind in {
        "/": "text/html", "/static/main.js": "text/javascript", "/static/style.css": "text/css",
        "/static/icon.svg": "image/svg+xml", "/plotly.js": "text/javascript", "/api/state": "application/json",
        "/nothing": "text/plain",
    }.items():  # fmt: skip
        answer = Answer(url, path)
        assert answer.status == (404 if path == "/nothing" else 200), path
        assert answer.headers["Content-Type"].partition(";")[0] == kind
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'; ")
        assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        *[({"headers": {"Host": host}}, 421) for host in ("evil.example", "evil.example:80", "localhost.evil.example")],
        *[({"headers": {"Host": host}}, 421) for host in ("0.0.0.0", "10.0.0.1", "")],
        *[({"headers": {"Host": host}}, 200) for host in ("localhost:9000", "127.0.0.1", "[::1]:8420", "127.0.0.2")],
        *[({"method": method}, 405) for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS")],
    ],
)
def test_only_this_machine_may_ask_and_only_to_read(page, request_, status):
    assert Answer(page[0], "/api/state", **request_).status == status


def test_everything_about_the_runs_is_served(page):
    url, _ = page
    [a, b] = Answer(url, "/api/state").json()["runs"]
    assert (a["name"], a["last_step"], b["last_step"]) == ("a", 3, 1)
    assert a["splits"]["train"] == {"num_groups": 9, "num_rollouts": 36, "min_step": 1, "max_step": 3}
    metrics = Answer(url, f"/api/metrics?run=0&since=2&version={a['metrics_version']}").json()
    assert metrics["steps"] == [3]
    assert metrics["metrics"]["timing_s/gen"] == [1.25]
    assert Answer(url, "/api/metrics?run=0&since=2&version=0").json()["steps"] == [1, 2, 3]
    keys = {row["key"]: row["values"] for row in Answer(url, "/api/config").json()["keys"]}
    assert keys == {"trainer.max_steps": ["3", "3"], "worker.actor.optim.lr": ["1e-06", "2e-06"]}
    groups = Answer(url, "/api/groups?run=0&solved=some&limit=2&offset=1").json()
    assert (groups["num_groups"], groups["num_rollouts"], len(groups["groups"])) == (3, 12, 2)
    rows = Answer(url, "/api/group?run=0&split=train&step=2&number=1").json()["rows"]
    assert [row["reward"] for row in rows] == [0, 1, 0, 1]
    history = Answer(url, "/api/history?split=train&step=2&number=1").json()["runs"]
    assert [[group["step"] for group in groups] for groups in history] == [[1, 2, 3], [1]]


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/api/groups?run=0&min_step=a", 400, "min_step cannot be"),
        ("/api/groups?run=7", 404, ""),
        ("/api/groups?run=-1", 404, ""),
        ("/api/groups?run=x", 400, "run must be a whole number"),
        ("/api/groups?run=0&limit=" + "9" * 5000, 200, ""),
        ("/api/group?run=0&split=train&step=2&number=99", 404, ""),
        ("/api/group?run=0&split=train&step=99999999999999999999999&number=0", 404, ""),
        ("/static/../server.py", 404, ""),
        ("/static/..%2fserver.py", 404, ""),
        ("/static/%2e%2e/page.py", 404, ""),
    ],
)
def test_a_wrong_request_has_a_plain_answer(page, path, status, text):
    answer = Answer(page[0], path)
    assert answer.status == status
    assert text in answer.content.decode()


def test_images_come_from_the_images_of_the_run_only(page, tmp_path):
    url, folder = page
    [image] = folder.glob("images/*.png")
    (folder / "secret.png").write_bytes(image.read_bytes())
    (tmp_path / "outside.png").write_bytes(image.read_bytes())
    (folder / "images" / "link.png").symlink_to(tmp_path / "outside.png")
    (folder / "images" / "folder").mkdir()
    (folder / "images" / "folder" / "a.png").write_bytes(image.read_bytes())
    (folder / "images" / "page.png").write_text("<script>alert(1)</script>")
    (folder / "images" / "drawing.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    os.mkfifo(folder / "images" / "pipe.png")
    good = Answer(url, f"/image/0/images/{image.name}")
    assert (good.status, good.headers["Content-Type"], good.content) == (200, "image/png", image.read_bytes())
    assert "sandbox" in good.headers["Content-Security-Policy"]
    for name in (
        "secret.png", "images/../secret.png", "images/%2e%2e/secret.png", "images/..%2fsecret.png", "images/link.png",
        "images/folder/a.png", "images/page.png", "images/drawing.svg", "images/pipe.png", "images/missing.png",
        "images/", "images/.hidden", "%2fetc/passwd", "/etc/passwd", "config.yaml", "images/a%00.png",
    ):  # fmt: skip
        assert Answer(url, f"/image/0/{name}").status == 404, name
    assert Answer(url, f"/image/9/images/{image.name}").status == 404


def test_a_folder_of_images_that_is_a_link_is_not_read(tmp_path):
    name = write_image(tmp_path / "elsewhere", (1, 2, 3))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "images").symlink_to(tmp_path / "elsewhere" / "images")
    assert read_image(tmp_path / "elsewhere", name) is not None
    assert read_image(tmp_path / "run", name) is None


def test_large_images_are_made_smaller_for_an_export(tmp_path):
    content = (tmp_path / write_image(tmp_path, (9, 9, 9))).read_bytes()
    assert shrink(content, "image/png", max_bytes=10**6, max_side=16) == (content, "image/png")
    smaller, media_type = shrink(content, "image/png", max_bytes=10, max_side=16)
    assert (media_type, smaller[:3]) == ("image/jpeg", b"\xff\xd8\xff")
    assert shrink(b"\xff\xd8\xffbroken", "image/jpeg", max_bytes=1, max_side=16)[0] == b"\xff\xd8\xffbroken"


@pytest.mark.extended
def test_new_steps_appear_while_the_page_is_served_also_beside_a_file_that_cannot_be_indexed(tmp_path):
    folder = write_run(tmp_path / "run", num_steps=1)
    with served([folder], tmp_path / "cache") as (url, _), RunFolder(folder) as run:

        def state() -> dict[str, Any]:
            return Answer(url, "/api/state").json()["runs"][0]

        run.write_rollouts(3, "train", [make_row("a", 0, 0.0, num_tokens=2**70)])  # larger than SQLite's integers
        wait_until(lambda: state()["problems"])
        assert "step_000003.jsonl, line 1 is not a rollout (num_tokens" in state()["problems"][0]
        write_step(run, 2, write_image(folder, (0, 0, 0)))
        wait_until(lambda: state()["splits"]["train"]["max_step"] == 2)
        run.append_metrics(1, {"val/reward_score": 0.5})  # a validation of an earlier step
        wait_until(lambda: state()["num_lines"] == 3)
        assert state()["last_step"] == 2
        (folder / "rollouts" / "step_000003.jsonl").unlink()
        wait_until(lambda: state()["problems"] == [])


def test_with_a_token_only_who_has_it_sees_the_page(tmp_path):
    with served([write_run(tmp_path / "run", num_steps=1)], tmp_path / "cache", token="right") as (url, _):
        assert url.endswith("/?token=right")
        for path in ("/", "/api/state", "/static/main.js", "/plotly.js", "/?token=wrong", "/?token="):
            assert Answer(url, path).status == 403, path
        opened = Answer(url, "/?token=right")
        assert (opened.status, opened.headers["Location"]) == (307, "/")
        cookie, *flags = opened.headers["Set-Cookie"].split("; ")
        assert {"HttpOnly", "SameSite=strict"} <= set(flags)
        for sent, status in ((cookie, 200), (f"{cookie.partition('=')[0]}=wrong", 403)):
            assert Answer(url, "/api/state", headers={"Cookie": sent}).status == status


def test_two_pages_with_tokens_on_one_machine_are_open_in_one_browser(tmp_path):
    folder = write_run(tmp_path / "run", num_steps=1)
    with (
        served([folder], tmp_path / "cache", token="first") as (first, _),
        served([folder], tmp_path / "cache", token="second") as (second, _),
    ):
        # As a browser: it keeps one cookie of each name for 127.0.0.1, whatever the port.
        opened = [Answer(url, f"/?{urlsplit(url).query}") for url in (first, second)]
        cookies = dict(each.headers["Set-Cookie"].split(";")[0].split("=") for each in opened)
        header = "; ".join(f"{name}={value}" for name, value in cookies.items())
        assert [Answer(url, "/api/state", headers={"Cookie": header}).status for url in (first, second)] == [200, 200]


def test_an_address_that_others_can_reach_needs_a_token():
    hosts = ("127.0.0.1", "::1", "localhost", "0.0.0.0", "node7", "")
    assert list(map(is_loopback, hosts)) == [True] * 3 + [False] * 3
    with pytest.raises(ConfigError, match=r"open to the network at 0\.0\.0\.0"):
        make_app([], host="0.0.0.0")
    make_app([], host="0.0.0.0", token="secret")


def test_a_port_in_use_is_an_error():
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        assert address(first, "127.0.0.1") == f"http://127.0.0.1:{port}/"
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} cannot be listened on .* choose another --port"):
            listen("127.0.0.1", port)


def test_the_page_never_makes_markup_of_data():
    for path in STATIC.glob("*.js"):
        text = path.read_text(encoding="utf-8")
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert word not in text, f"{path.name} has {word}"
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert "<style" not in page
    assert "<script>" not in page


def test_the_modules_become_one_script_without_imports():
    script = as_one_script()
    assert "\nimport " not in script
    assert "\nexport " not in script
    for path in STATIC.glob("*.js"):
        assert path.read_text(encoding="utf-8").split("\n")[0] in script, path.name


def test_rows_with_any_text_are_served(tmp_path):
    folder = tmp_path / "run"
    text = "\ud800 \x00 </script><!-- \u202e"
    with RunFolder(folder) as run:
        run.write_rollouts(1, "train", [make_row(text, 0, 1.0, response=text, prompt=text)])
    with served([folder], tmp_path / "cache") as (url, _):
        [group] = Answer(url, "/api/groups?run=0").json()["groups"]
        assert group["prompt_id"] == "?   </script><!-- \u202e"
        [row] = Answer(url, "/api/group?run=0&split=train&step=1&number=0").json()["rows"]
        assert row["response"] == text
