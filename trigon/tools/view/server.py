"""Serves the page and what it shows, read-only, to a browser on this machine.

What a run contains is untrusted: models write completions, and datasets come from the network. The
page builds its text as text; the headers below forbid scripts, styles and connections other than
its own. A request must name this machine as its host, so that a website whose name resolves to
127.0.0.1 (DNS rebinding) is refused. The names of images come from rollouts, and are untrusted too.
"""

from __future__ import annotations

import hmac
import os
import re
import socket
import stat
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from io import BytesIO
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from trigon.errors import ConfigError, DataError
from trigon.report.rollouts import row_to_line, to_json_line
from trigon.system import image_formats
from trigon.system.installation import install_command
from trigon.tools.view.index import parse_filter
from trigon.tools.view.runs import ViewedRun, configurations

STATIC = Path(__file__).parent / "static"

# Plotly adds rules to style elements that have no text, which a strict policy has to admit. Rules
# are added by script; a style element with any text is still refused.
EMPTY_STYLE_HASH = f"'sha256-{b64encode(sha256(b'').digest()).decode()}'"

_NAME = re.compile(r"images/[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}")
_MAX_BYTES = 256 * 2**20

# By the first bytes, whatever the name. SVG, which can contain scripts, is not among them.
_IMAGE_TYPES = (
    ("image/png", re.compile(rb"\x89PNG\r\n\x1a\n")),
    ("image/jpeg", re.compile(rb"\xff\xd8\xff")),
    ("image/gif", re.compile(rb"GIF8[79]a")),
    ("image/webp", re.compile(rb"RIFF....WEBP", flags=re.DOTALL)),
    ("image/bmp", re.compile(rb"BM")),
)

PAGE_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        f"style-src 'self' {EMPTY_STYLE_HASH}",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; sandbox",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_MAX_GROUPS = 200


def plotly_script() -> Path:
    """Return the script of the charts, which the package plotly ships. Raises: ConfigError."""
    spec = find_spec("plotly")  # not imported: only its file is needed
    places = spec.submodule_search_locations if spec is not None else None
    if not places:
        raise ConfigError(f"trigon view needs the package plotly: {install_command('view')}")
    return Path(places[0]) / "package_data" / "plotly.min.js"


def source_hash(text: str) -> str:
    """Return the hash of an inline script or style, as a policy names it."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def read_image(run: Path, name: str) -> tuple[bytes, str] | None:
    """Return the content and the media type of an image of a run; None if there is no such image.

    name: as in RolloutRow.image_files. Only regular files directly in the run's folder `images` are
    read, no links, and only if they begin as an image does.
    """
    if not _NAME.fullmatch(name) or (run / "images").is_symlink():
        return None
    try:
        # O_NONBLOCK: opening a named pipe would wait for its writer.
        descriptor = os.open(run / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
            return None
        content = file.read()
    media_type = next((name for name, start in _IMAGE_TYPES if start.match(content)), None)
    return None if media_type is None else (content, media_type)


def shrink(content: bytes, media_type: str, *, max_bytes: int, max_side: int) -> tuple[bytes, str]:
    """Return an image with at most max_side pixels a side if it has more bytes than max_bytes.

    An image that cannot be decoded is returned as it is.
    """
    if len(content) <= max_bytes:
        return content, media_type
    try:
        image = image_formats.read_image(content)
    except image_formats.DECODING_ERRORS:
        return content, media_type
    image.thumbnail((max_side, max_side))
    smaller = BytesIO()
    image.save(smaller, "JPEG", quality=85)
    return smaller.getvalue(), "image/jpeg"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to an address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def make_app(runs: Sequence[ViewedRun], *, host: str = "127.0.0.1", token: str = "") -> Starlette:
    """Return the page of runs as an ASGI application.

    host: the address that it is served at. Unless token is empty, a browser must open the page
    with ?token=... once. A host other than a loopback address needs a token.
    """
    if not is_loopback(host) and not token:
        raise ConfigError(f"the page would be open to the network at {host}; it needs a token there")
    guard = partial(_guard, any_host=not is_loopback(host), token=token)
    return Starlette(
        routes=[
            Route("/", _page),
            Mount("/static", StaticFiles(directory=STATIC, follow_symlink=True)),
            Route("/plotly.js", _plotly),
            *(Route(f"/api/{name}", partial(answer, runs)) for name, answer in _ANSWERS.items()),
            Route("/image/{run:int}/{name:path}", partial(_image, runs)),
        ],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=guard)],
        exception_handlers={DataError: _bad_request},
    )


async def _guard(request: Request, call_next: RequestResponseEndpoint, *, any_host: bool, token: str) -> Response:
    """Add the security headers to every response; see _refusal."""
    response = _refusal(request, any_host=any_host, token=token) or await call_next(request)
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    return response


def _refusal(request: Request, *, any_host: bool, token: str) -> Response | None:
    """Return the answer to a request for another host, without the token, or that would write."""
    host = request.headers.get("host", "")
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    if not any_host and not is_loopback(name.strip("[]")):
        text = f"This page is served to this machine only, not as {name[:200]!r}.\n"
        return Response(text, 421, media_type="text/plain")
    if request.method not in ("GET", "HEAD"):
        return Response("This page is read-only.\n", 405, media_type="text/plain")
    if not token:
        return None
    # Cookies are separated by host, not by port: another viewer on this machine has its own.
    cookie = f"trigon_view_{sha256(token.encode()).hexdigest()[:16]}"
    if hmac.compare_digest(request.query_params.get("token", "").encode(), token.encode()):
        others = [(key, value) for key, value in request.query_params.multi_items() if key != "token"]
        url = f"{request.url.path}{'?' if others else ''}{urlencode(others)}"
        response = RedirectResponse("/" if url.startswith("//") else url)
        response.set_cookie(cookie, token, httponly=True, samesite="strict")
        return response
    if hmac.compare_digest(request.cookies.get(cookie, "").encode(), token.encode()):
        return None
    return Response("Open the address that `trigon view` printed, with its token.\n", 403, media_type="text/plain")


def _page(request: Request) -> Response:
    return FileResponse(STATIC / "index.html", headers={"Content-Security-Policy": PAGE_POLICY})


def _plotly(request: Request) -> Response:
    return FileResponse(plotly_script(), media_type="text/javascript", headers={"Cache-Control": "max-age=86400"})


def _bad_request(request: Request, error: Exception) -> Response:
    return _json({"error": str(error)}, status=400)


def _json(content: Mapping[str, Any], *, status: int = 200) -> Response:
    return Response(to_json_line(content), status, media_type="application/json")


def _run(runs: Sequence[ViewedRun], request: Request) -> ViewedRun:
    number = _integer(request, "run", 0)
    if not 0 <= number < len(runs):
        raise HTTPException(404)
    return runs[number]


def _integer(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    try:
        return max(-(2**53), min(int(text[:30]), 2**53))
    except ValueError as error:
        raise DataError(f"{name} must be a whole number, not {text[:100]!r}") from error


def _state(runs: Sequence[ViewedRun], request: Request) -> Response:
    return _json({"runs": [run.state() for run in runs]})


def _metrics(runs: Sequence[ViewedRun], request: Request) -> Response:
    metrics = _run(runs, request).metrics
    is_same = _integer(request, "version", 0) == metrics.version
    return _json(metrics.columns(max(_integer(request, "since", 0), 0) if is_same else 0))


def _config(runs: Sequence[ViewedRun], request: Request) -> Response:
    return _json(configurations(runs))


def _groups(runs: Sequence[ViewedRun], request: Request) -> Response:
    rollouts = _run(runs, request).rollouts
    others = ("run", "offset", "limit", "token")
    found = rollouts.find(parse_filter({k: v for k, v in request.query_params.items() if k not in others}))
    offset = max(_integer(request, "offset", 0), 0)
    limit = max(min(_integer(request, "limit", 50), _MAX_GROUPS), 1)
    return _json(
        {
            "num_groups": len(found.ids),
            "num_rollouts": found.num_rollouts,
            "groups": rollouts.summaries(found.ids[offset : offset + limit]),
        }
    )


def _group(runs: Sequence[ViewedRun], request: Request) -> Response:
    rows = _run(runs, request).rollouts.read_group(*_place(request))
    if rows is None:
        raise HTTPException(404)
    lines = b",".join(row_to_line(row).rstrip() for row in rows)
    return Response(b'{"rows": [' + lines + b"]}", media_type="application/json")


def _history(runs: Sequence[ViewedRun], request: Request) -> Response:
    prompt = _run(runs, request).rollouts.prompt_of(*_place(request))
    if prompt is None:
        raise HTTPException(404)
    return _json({"runs": [run.rollouts.history(prompt) for run in runs]})


def _place(request: Request) -> tuple[str, int, int]:
    """Return split, step and number of the group that is asked for."""
    return request.query_params.get("split", ""), _integer(request, "step", 0), _integer(request, "number", 0)


def _image(runs: Sequence[ViewedRun], request: Request) -> Response:
    number = request.path_params["run"]
    image = read_image(runs[number].record.path, request.path_params["name"]) if number < len(runs) else None
    if image is None:
        raise HTTPException(404)
    content, media_type = image
    return Response(content, media_type=media_type, headers={"Cache-Control": "private, max-age=3600"})


_ANSWERS: Mapping[str, Callable[[Sequence[ViewedRun], Request], Response]] = {
    "state": _state,
    "metrics": _metrics,
    "config": _config,
    "groups": _groups,
    "group": _group,
    "history": _history,
}


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address. port: 0 for any. Raises: ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise ConfigError(f"{host}:{port} cannot be listened on ({error.strerror}): choose another --port") from error
    return listening


def make_server(runs: Sequence[ViewedRun], *, host: str = "127.0.0.1", token: str = "") -> uvicorn.Server:
    """Return a server of the page; see make_app. It runs by `run(sockets=[listen(host, port)])`."""
    config = uvicorn.Config(
        make_app(runs, host=host, token=token),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
        ws="none",
    )
    return uvicorn.Server(config)


def serve(runs: Sequence[ViewedRun], listening: socket.socket, *, host: str, token: str = "") -> None:
    """Serve the page of runs at a socket from listen(), until Ctrl-C."""
    server = make_server(runs, host=host, token=token)
    for run in runs:
        run.start()
    try:
        server.run(sockets=[listening])
    finally:
        for run in runs:
            run.close()


def address(listening: socket.socket, host: str, token: str = "") -> str:
    """Return the address of the page, with the token."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listening.getsockname()[1]}/{f'?token={token}' if token else ''}"


def default_cache(home: Path, xdg_cache_home: str | None) -> Path:
    """Return the folder of indices: below the user's cache folder."""
    return (Path(xdg_cache_home) if xdg_cache_home else home / ".cache") / "trigon" / "view"
