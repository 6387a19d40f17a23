"""Any request gets an answer of the viewer, and any rollouts file can be viewed beside others."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Iterator
from urllib.parse import quote, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.view_runs import make_row, served, write_run
from trigon.report.rollouts import row_to_line
from trigon.tools.view.index import RolloutFilter

SECRET = "not to be served"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("view")
    (folder / "secret.txt").write_text(SECRET)
    run = write_run(folder / "run")
    (run / "images" / "link.png").symlink_to(folder / "secret.txt")
    with served([run], folder / "cache") as (address, _):
        yield address


def answer(url: str, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    place = urlsplit(url)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=30)
    try:
        connection.request(method, path, headers=headers or {})
        response = connection.getresponse()
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        return response.status, response.read()
    finally:
        connection.close()


names = st.sampled_from(
    [*RolloutFilter.model_fields, "run", "offset", "limit", "step", "number", "split", "name", "version", "since"]
)
texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["none", "some", "all", "low", "surplus", "ok", "not_ok", "stop", "recorded", "worst", "mismatch"]),
    st.sampled_from(["%", "_", "'; drop table rollouts; --", "../../secret.txt", "\0", "9" * 5000]),
)
paths = st.sampled_from(["state", "metrics", "config", "groups", "group", "history", "nothing"]).map("/api/{}".format)
queries = st.lists(st.tuples(names | texts, texts), max_size=4)


@pytest.mark.faults
@given(path=paths, query=queries)
def test_any_query(url: str, path: str, query: list[tuple[str, str]]):
    start = time.monotonic()
    status, content = answer(url, path + "?" + "&".join(f"{quote(name)}={quote(value)}" for name, value in query))
    assert status in (200, 400, 404)
    if status == 400:
        assert json.loads(content)["error"]
    assert SECRET.encode() not in content
    assert time.monotonic() - start < 20


segments = st.sampled_from(
    ["..", "%2e%2e", "images", "secret.txt", "link.png", "run", "0", "image", "static", "%00", "~", "etc", "passwd"]
)


@pytest.mark.faults
@given(st.lists(segments | st.text(max_size=10).map(lambda text: quote(text.encode("utf-8", "ignore"))), max_size=8))
def test_any_path(url: str, parts: list[str]):
    status, content = answer(url, "/" + "/".join(parts))
    assert status in (200, 307, 400, 404)
    assert SECRET.encode() not in content
    assert b"root:" not in content


@given(
    method=st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"]),
    headers=st.dictionaries(
        st.sampled_from(["Host", "Cookie", "Range", "If-None-Match", "Accept-Encoding", "Content-Length", "X-Odd"]),
        st.from_regex(re.compile(r"[ -~]{0,40}", re.ASCII), fullmatch=True),
        max_size=3,
    ),
)
def test_any_header(url: str, method: str, headers: dict[str, str]):
    place = urlsplit(url)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=30)
    try:
        connection.request(method, "/api/state", headers=headers)
        status = connection.getresponse().status
    except (http.client.HTTPException, ConnectionError):
        return  # the server may end a connection that is no HTTP
    finally:
        connection.close()
    assert status != 500
    assert method in ("GET", "HEAD") or status >= 400


hostile_texts = st.text(max_size=30) | st.sampled_from(
    ["<script>alert(1)</script>", "\x1b[31m", "\u202e", "a" * 10_000]
)
rows = st.builds(
    lambda text, reward, sample: row_to_line(make_row(text, sample, reward, response=text + ".", error=text)),
    hostile_texts,
    st.floats(),
    st.integers(-(2**70), 2**70),
)


@pytest.mark.faults
@settings(max_examples=settings.default.max_examples // 5)
@given(st.lists(rows | st.binary(max_size=30), max_size=5))
def test_any_rollouts(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]):
    folder = tmp_path_factory.mktemp("rollouts")
    run = write_run(folder / "run", num_steps=1)
    (run / "rollouts" / "step_000002.jsonl").write_bytes(b"".join(line.rstrip(b"\n") + b"\n" for line in lines))
    with served([run], folder / "cache") as (url, runs):
        status, content = answer(url, "/api/groups?max_step=1")
        assert status == 200
        assert json.loads(content)["num_groups"] == 3
        status, content = answer(url, "/api/groups")
        assert status == 200
        assert runs[0].state()
