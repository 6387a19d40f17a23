"""`trigon view RUN [RUN ...]`: shows runs in a browser, or writes them as one HTML file."""

from __future__ import annotations

import os
import secrets
import sys
import webbrowser
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from trigon.errors import ConfigError, DataError
from trigon.system.installation import install_command
from trigon.system.terminal import sanitize
from trigon.tools.cli.parser import ArgumentParser, number

if TYPE_CHECKING:
    from trigon.tools.view.index import RolloutFilter
    from trigon.tools.view.runs import ViewedRun

DEFAULT_PORT = 8420


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit status. Raises TrigonError."""
    parser = _parser()
    options = parser.parse_args(arguments)
    # Imported here, so that errors of the command line do not wait for these libraries.
    try:
        from trigon.tools.view.index import parse_filter
        from trigon.tools.view.runs import open_runs
        from trigon.tools.view.server import default_cache, is_loopback
    except ModuleNotFoundError as error:
        raise ConfigError(f"trigon view needs the package {error.name}: {install_command('view')}") from error

    if options.export is None and not is_loopback(options.host) and not options.open_to_network:
        parser.error(
            f"--host {options.host} would show the runs to other machines; add --open-to-network if they may see them "
            "with a token, or leave --host out and use ssh -L"
        )
    try:
        filters = parse_filter(dict(parse_qsl(options.select, keep_blank_values=True)))
    except DataError as error:
        parser.error(f"--select: {error}")
    cache = options.cache or default_cache(Path.home(), os.environ.get("XDG_CACHE_HOME"))
    runs = open_runs(options.run, cache=cache)
    return _serve(runs, options) if options.export is None else _export(runs, options, filters)


def _serve(runs: Sequence[ViewedRun], options: Namespace) -> int:
    from trigon.tools.view.server import address, listen, plotly_script, serve

    plotly_script()  # its absence is an error now, not in the browser
    token = secrets.token_urlsafe(18) if options.token or options.open_to_network else ""
    if options.port is not None:
        listening = listen(options.host, options.port)
    else:
        try:
            listening = listen(options.host, DEFAULT_PORT)
        except ConfigError:
            listening = listen(options.host, 0)
    url = address(listening, options.host, token)
    shown = ", ".join(sanitize(run.name, max_characters=200) for run in runs)
    print(f"trigon view: {shown}\n{url}   (Ctrl-C ends)", flush=True)
    if options.browser and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        webbrowser.open(url)
    # Ctrl-C is how the page ends, and no failure.
    with suppress(KeyboardInterrupt):
        serve(runs, listening, host=options.host, token=token)
    return 0


def _export(runs: Sequence[ViewedRun], options: Namespace, filters: RolloutFilter) -> int:
    from trigon.tools.view.export import export

    written = export(runs, options.export, max_rollouts=options.rollouts, filters=filters)
    for problem in written.problems:
        print(f"warning: {sanitize(problem, max_characters=1000)}", file=sys.stderr)
    images = f"{written.num_images:,} image{'' if written.num_images == 1 else 's'}"
    print(
        f"wrote {sanitize(str(written.path), max_characters=1000)}: {written.num_bytes / 1e6:.1f} MB, "
        f"{written.num_rollouts:,} of {written.num_matching:,} rollouts, {images}"
    )
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="trigon view",
        description="Show runs in a browser: curves, rollouts with images and per-token numbers, times, "
        "configurations. The page is served to this machine only, follows a run while it is written, and never writes "
        "to it.",
        examples=[
            ("trigon view runs/quickstart", "one run, followed while it is written"),
            ("trigon view runs/a runs/b", "runs compared"),
            ("trigon view runs", "all runs in a folder"),
            ("trigon view runs/a --export a.html", "one file, to send"),
        ],
    )
    parser.add_argument("run", nargs="+", type=Path, metavar="RUN", help="the folder of a run, or of several runs")
    parser.add_argument(
        "--port",
        type=number(0, 2**16 - 1, whole=True),
        help=f"port; default: {DEFAULT_PORT}, or a free one if that is in use; 0: a free one",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: %(default)s")
    parser.add_argument(
        "--open-to-network",
        action="store_true",
        help="permit a --host that other machines can reach; the address then has a token. The connection is not "
        "encrypted: prefer ssh -L",
    )
    parser.add_argument(
        "--token",
        action="store_true",
        help="require a token here too: other users of this machine could open the page otherwise",
    )
    parser.add_argument("--no-browser", dest="browser", action="store_false", help="do not open a browser")
    parser.add_argument(
        "--cache", type=Path, metavar="FOLDER", help="folder of the indices; default: ~/.cache/trigon/view"
    )
    parser.add_argument(
        "--export", type=Path, metavar="FILE.html", help="write one HTML file that needs no network, instead of serving"
    )
    parser.add_argument(
        "--rollouts",
        type=number(0, whole=True),
        default=256,
        metavar="N",
        help="at most N rollouts in --export; default: %(default)s",
    )
    parser.add_argument(
        "--select",
        default="",
        metavar="FILTER",
        help="which rollouts --export takes, as in the address of the page: 'split=train&solved=some'",
    )
    return parser
