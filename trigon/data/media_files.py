"""Finds and reads the encoded bytes of an image or a video, in a row or in a file.

A dataset may only read files inside one folder; URLs and paths that lead outside it are rejected.
Decoding is in images.py and videos.py.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, cast
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from trigon.data.rows import Reason, UnusableRow
from trigon.system.files import file_digest
from trigon.types import EncodedMedia, MediaKind

_MAX_NAME = 100
"""Characters of a file's name in the name of an image."""

_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")

_NO_IMAGES = {
    rb"....ftyp|\x1a\x45\xdf\xa3": "a video: put it into the column of videos (data.video_key)",
    rb"%pdf": "a PDF document: convert its pages to PNG",
    rb"version https://git-lfs": "a pointer of Git LFS: fetch its file with `git lfs pull`",
    rb"(<\?xml.*)?<svg": "an SVG drawing: convert it to PNG",
    rb"<!doctype html|<html": "a web page: download the image itself",
}
"""Pattern of the first bytes, in lower case -> what such a file is, and what to do."""


_MAX_NESTED = 3
_MAX_PATH = 4096  # characters, of Linux
_MIN_BASE64 = 64
_FILE_BEGINS = re.compile(rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF|BM|II\*\0|MM\0\*|\x1aE\xdf\xa3|....ftyp", re.DOTALL)
"""The first bytes of images and videos, by which base64 differs from paths."""


@dataclass(frozen=True, slots=True, eq=False)
class MediaSource:
    """An image or a video that may be read.

    content: encoded bytes, a {"bytes", "path"} mapping (bytes win), a path, or a PIL image. where:
    its name in errors: "train:17/images/0". max_pixels: the largest allowed width * height of an
    image, or of a frame. image_dir: the folder that relative paths start from and that contains all
    paths; None: no path is allowed.
    """

    content: Any
    where: str
    max_pixels: int
    image_dir: Path | None = None


def plain_source(source: Any, kind: MediaKind, where: str) -> Any:
    """Return an image or a video as a PIL image, bytes, {"bytes", "path"}, a path or a URL.

    Datasets also write {"image": ...}, {"url": ...}, {"image_url": {"url": ...}}, data: and file:
    URLs, and base64 without a URL. A source of no known shape is returned as it is.
    where: the name of the source in errors. Raises: UnusableRow for damaged base64.
    """
    for _ in range(_MAX_NESTED):
        if not isinstance(source, Mapping) or source.get("bytes") is not None or source.get("path") is not None:
            break
        keys = (kind, f"{kind}_url", "url", "base64")
        source = next((source[key] for key in keys if source.get(key) is not None), source)
    if isinstance(source, Mapping):
        text = source.get("path") if source.get("bytes") is None else source["bytes"]
        return plain_source(text, kind, where) if isinstance(text, str) else source
    if not isinstance(source, str):
        return source
    if source[:5].lower() == "data:":
        return _data_of_url(source, kind, where)
    if source[:7].lower() == "file://":
        return unquote(urlsplit(source).path)
    if len(source) >= _MIN_BASE64 and _FILE_BEGINS.match(_decoded_base64(source[:32]) or b""):
        return _decoded_base64(source) or _damaged(source, kind, where)
    if len(source) > _MAX_PATH and not is_url(source):
        raise _unusable(
            kind,
            "missing",
            f"{where}: a text of {len(source):,} characters ({source[:20]!r} ...), which is neither a path nor a file "
            "in base64 that can be read",
        )
    return source


def open_bytes(source: MediaSource, kind: MediaKind) -> io.BytesIO | io.BufferedReader:
    """Return the encoded bytes of a source, at least one, as a stream that the caller must close.

    Raises: UnusableRow.
    """
    where, given = source.where, source.content
    content = given
    if isinstance(given, Mapping):
        content = given["bytes"] if given.get("bytes") is not None else given.get("path")
    if isinstance(content, bytes | bytearray):
        if not content:
            raise _unusable(kind, "unreadable", f"{where}: it has zero bytes; replace or drop it")
        return io.BytesIO(content)
    if not isinstance(content, str | Path) or not str(content):
        found = "nothing" if content is None or content == "" else type(content).__name__
        if isinstance(given, Mapping) and (keys := sorted(set(given) - {"bytes", "path"})):
            found = f"a mapping of {', '.join(map(repr, keys[:5]))}"
        expected = "an image, bytes" if kind == "image" else "bytes"
        raise _unusable(kind, "missing", f"{where}: expected {expected}, a path or {{bytes, path}}, got {found}")
    path = _resolve(str(content), kind, source)
    try:
        if not path.is_file():
            raise _unusable(kind, "missing", f"{where}: no such file: {path}")
        stream = path.open("rb")
    except (OSError, ValueError) as error:
        raise _unusable(kind, "missing", f"{where}: {path} cannot be opened: {in_one_line(error)}") from error
    if not stream.peek(1):
        stream.close()
        raise _unusable(kind, "unreadable", f"{where}: {path} has zero bytes; replace or drop it")
    return stream


def read_bytes(source: MediaSource, kind: MediaKind) -> bytes:
    """Return the encoded bytes of a source. Raises: UnusableRow."""
    with open_bytes(source, kind) as stream:
        try:
            return stream.read()
        except OSError as error:
            raise _unusable(kind, "unreadable", f"{source.where}: {in_one_line(error)}; replace or drop it") from error


def encoded_files(each: Iterable[bytes], kind: MediaKind) -> EncodedMedia | None:
    """Return encoded files with their hashes, None if there are none."""
    files = tuple(each)
    return EncodedMedia(files, tuple(hashlib.sha256(file).hexdigest() for file in files), kind) if files else None


def linked_digests(sources: Sequence[MediaSource], kind: MediaKind) -> str:
    """Return the digests of those sources that are no more than paths of files, joined.

    Raises: UnusableRow if a file is missing or cannot be read.
    """
    digests = []
    for source in sources:
        content = source.content
        if isinstance(content, Mapping):
            content = content.get("path") if content.get("bytes") is None else None
        if not isinstance(content, str | Path) or not str(content):
            continue
        path = _resolve(str(content), kind, source)
        try:
            digests.append(file_digest(path))
        except OSError as error:
            message = f"{source.where}: {path} cannot be read: {in_one_line(error)}"
            raise _unusable(kind, "unreadable", message) from error
    return " ".join(digests)


def media_name(source: Any, name: str) -> str:
    """Return the name of an image or a video in reports: "train:17/images/0 (figure.png)"."""
    path = source.get("path") if isinstance(source, Mapping) else source
    file = Path(path).name if isinstance(path, str | Path) else ""
    if len(file) > _MAX_NAME:
        file = f"{file[:_MAX_NAME]}..."
    return f"{name} ({file})" if file else name


def is_url(reference: str) -> bool:
    """Return whether a text begins as a URL does."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", reference) is not None


def what_bytes_are(stream: io.BytesIO | io.BufferedReader) -> str:
    """Return what a file is that is no readable image, in words, or "" if that is not known."""
    stream.seek(0)
    head = stream.read(512).lstrip().lower()
    if head[4:8] == b"ftyp" and head[8:12] in _HEIC_BRANDS:
        return "a HEIC image, which Pillow does not read: convert it to JPEG or PNG"
    return next((words for pattern, words in _NO_IMAGES.items() if re.match(pattern, head, re.DOTALL)), "")


def in_one_line(error: BaseException) -> str:
    """Return the first line of an error, without the repr of a stream that libraries include."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r" ?<_io\.\w+ .*>", " its bytes", text)


def _data_of_url(url: str, kind: MediaKind, where: str) -> bytes:
    """Return the bytes in a data: URL (RFC 2397)."""
    header, _, payload = url.partition(",")
    if not header.lower().endswith(";base64"):
        return unquote_to_bytes(payload)
    return _decoded_base64(payload) or _damaged(url, kind, where)


def _damaged(text: str, kind: MediaKind, where: str) -> NoReturn:
    raise _unusable(
        kind,
        "unreadable",
        f"{where}: {text[:20]!r} ... has {len(text):,} characters of base64, which are damaged or cut; replace or drop "
        "it",
    )


def _decoded_base64(text: str) -> bytes | None:
    """Return the bytes of base64 text with or without line breaks; None if it is no such text."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError:
        return None


def _unusable(
    kind: MediaKind, fault: Literal["missing", "outside", "unreadable"], message: str, *, folder: Path | None = None
) -> UnusableRow:
    return UnusableRow(cast(Reason, f"{kind}_{fault}"), message, folder=folder)


def _resolve(reference: str, kind: MediaKind, source: MediaSource) -> Path:
    """Return the real path of what a source refers to.

    Raises: UnusableRow if it is a URL, or outside image_dir.
    """
    where, image_dir = source.where, source.image_dir
    if is_url(reference):
        raise _unusable(
            kind, "outside", f"{where}: {reference[:80]!r} is a URL; download the {kind}s and set data.image_dir"
        )
    if image_dir is None:
        folder = Path(reference).parent if Path(reference).is_absolute() else None
        hint = "to be set" if folder is None else f"to be set: data.image_dir={folder}"
        raise _unusable(kind, "outside", f"{where}: the path {reference!r} needs data.image_dir {hint}", folder=folder)
    try:
        folder = image_dir.resolve()
        path = (folder / reference).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links
        message = f"{where}: {reference[:80]!r} is not a path: {in_one_line(error)}"
        raise _unusable(kind, "missing", message) from error
    if not path.is_relative_to(folder):
        message = f"{where}: {reference!r} leads to {path}, outside {folder}"
        if not Path(reference).is_absolute():
            hint = f"move the {kind}s into one folder, write their paths relative to it, and set data.image_dir to it"
            raise _unusable(kind, "outside", f"{message}; {hint}")
        raise _unusable(kind, "outside", f"{message}; set data.image_dir={path.parent}", folder=path.parent)
    return path
