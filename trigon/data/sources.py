"""Opens a hub dataset, a file, a folder of files, or rows in Python, as one table.

The only module that imports `datasets`. Rows of files stay on disk, and images stay encoded. JSON
and CSV files are read by text_rows.py, since `datasets` would infer a type for each column.
"""

from __future__ import annotations

import glob
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any

from PIL import Image

from trigon.config.paths import local_path, split_dataset
from trigon.data.images import OpenedFile, undecoded_file
from trigon.data.rows import UnusableRow, column_names, column_value
from trigon.data.text_rows import MAX_DEPTH, read_text_rows
from trigon.errors import DataError
from trigon.models.hub import datasets_cache, modelscope_folder, uses_modelscope
from trigon.system.terminal import listed, nearest_file

_LOADERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}

_TEXT_SUFFIXES = (".json", ".jsonl", ".csv")

_SAVED = ("state.json", "dataset_dict.json")
"""Files in the folder of a dataset that `save_to_disk` of `datasets` has written."""

_NUM_JSON_ROWS = 100

_MAX_ARRAY_DIMENSIONS = 2
"""Arrays with more dimensions are pixels."""

MAX_EXPANSION = 100
"""Times the size of a Parquet file, the bytes that its values may take."""

MIN_ALLOWED_BYTES = 2**29
"""The bytes that the values of any Parquet file may take."""

MIN_ALLOWED_ROWS = 1_000_000
"""The rows that any Parquet file may have; one with more has at least a byte for each."""

_BYTES_PER_VALUE = 8  # at least, of a value in a Python list
_BATCH_BYTES = 2**26
_MAX_COUNTED_BYTES = 2**26
"""Larger files are not decoded to count what their values take."""

_SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
"""Words in the names of files and folders, and the split that `datasets` takes them for."""

_NO_DATA = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
"""Files that describe a dataset; `datasets` does not read them as rows either."""

_SHARD = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """An opened table.

    name: prefix of the prompt ids of its rows: "train".
    rows: a datasets.Dataset with undecoded media, TextRows, or a list of dicts; at least one row.
    folder: relative image paths start here, and no path may lead outside it.
    columns: the names of all columns and structs' fields; fields with dots (rows.py).
    image_columns, video_columns: the columns or fields whose feature type is an image, or a video.
    """

    name: str
    rows: Any
    folder: Path
    columns: tuple[str, ...]
    image_columns: tuple[str, ...] = ()
    video_columns: tuple[str, ...] = ()

    def row(self, index: int) -> Mapping[str, Any]:
        """Return a row. Raises: UnusableRow if one of its texts is not UTF-8."""
        try:
            row: Mapping[str, Any] = self.rows[index]
        except UnicodeDecodeError as error:
            raise UnusableRow("encoding", f"{self.name}:{index}: {self._not_utf8(index) or error}") from error
        return row

    def _not_utf8(self, index: int) -> str:
        """Return which column of a row is not UTF-8, and what to do; "" if none is found."""
        for column in self.rows.column_names:
            try:
                self.rows.select_columns([column])[index]
            except UnicodeDecodeError as error:
                byte = error.object[error.start]
                hint = "write the text again as UTF-8, or store bytes as binary"
                return f"column {column!r} is not UTF-8 text: byte 0x{byte:02x} at {error.start}; {hint}"
        return ""

    def first(self, max_rows: int) -> Source:
        """Return the source with the first max_rows rows only."""
        if isinstance(self.rows, list):
            return replace(self, rows=self.rows[:max_rows])
        return replace(self, rows=self.rows.select(range(min(max_rows, len(self.rows)))))


def open_source(spec: str) -> Source:
    """Open `path_or_hub_id[@split]`.

    A path is a Parquet, JSON, JSON-lines or CSV file, a folder that `save_to_disk` of `datasets`
    has written, or a folder that contains files of one of these formats, in which hidden and other
    files are ignored. If file or folder names contain splits ("train-00000-of-00002.parquet",
    "test/a.jsonl"), only the files of the given split are read. Anything else is a hub id
    (models/hub.py). The split defaults to "train", and may be a slice: "train[:100]".
    Raises: DataError if the dataset cannot be found or read, or has no rows, if one of the files of
    a split is missing, and if only some files of a folder have a split in their names.
    """
    location, split = _parse(spec)
    path = local_path(location, suffixes=tuple(_LOADERS))
    if path is None:
        return _open_hub(location, split or "train")
    if _is_saved(path):
        return _open_saved(path, split or "train")
    files, folder, name = _local_files(path, split)
    return _open_files(files, folder, name, split or "train")


def open_python_rows(data: Any, *, spec: str, name: str) -> Source:
    """Return a list of dicts, or a datasets.Dataset, as a source.

    Values of a list's rows are text, numbers, True, False, None, dates, bytes, paths, PIL images,
    and lists and dicts of these; arrays become lists. A column that a row lacks is None there.
    Relative paths of images start from the working folder, out of which no path may lead.
    spec: names the data in errors. name: prefix of the prompt ids.
    Raises: DataError if it is neither, has no rows, or has a value of another type.
    """
    if type(data).__module__.partition(".")[0] == "datasets":
        return dataset_source(data, spec=spec, name=name, folder=Path.cwd())
    if isinstance(data, str | bytes | Mapping) or not isinstance(data, Sequence):
        kind = f"{type(data).__module__}.{type(data).__name__}".removeprefix("builtins.")
        hint = "; of a table, give datasets.Dataset.from_pandas(table)" if kind.startswith("pandas.") else ""
        if isinstance(data, Iterator):
            hint = "; of an iterator, give list(iterator)"
        raise DataError(f"{spec} is a {kind}; give a list of dicts, a datasets.Dataset or a path{hint}")
    if not data:
        raise DataError(f"{spec} has no rows; it is an empty list")
    columns: dict[str, None] = {}
    for index, row in enumerate(data):
        if not isinstance(row, Mapping):
            raise DataError(f"{spec}: row {index} is a {type(row).__name__}; each row is a dict of its columns")
        _check_keys(row, f"{spec}: row {index}")
        columns |= dict.fromkeys(row)
    rows = [
        {key: _plain(row.get(key), f"{spec}: row {index}, {key!r}", 0) for key in columns}
        for index, row in enumerate(data)
    ]
    names = dict.fromkeys(name for row in rows for name in column_names(row))
    return Source(
        name=name,
        rows=rows,
        folder=Path.cwd(),
        columns=tuple(names),
        image_columns=tuple(key for key in columns if any(_has_image(row[key]) for row in rows)),
    )


def preview_parquet(spec: str, *, max_rows: int) -> Source | None:
    """Return all columns and the first rows of a local dataset of Parquet files, but no media.

    It does without `datasets`, which imports torch. None for other datasets, and where only
    open_source can tell what is in the files, or what is wrong with them.
    Raises: DataError as open_source, if there are no such files.
    """
    import pyarrow
    from pyarrow import parquet

    location, split = _parse(spec)
    path = local_path(location, suffixes=tuple(_LOADERS))
    if path is None or _is_saved(path):
        return None
    files, folder, name = _local_files(path, split)
    if files[0].suffix != ".parquet":
        return None
    _check_parquet_size(files[0])
    try:
        with parquet.ParquetFile(files[0]) as file:
            schema = file.schema_arrow
            plain = [field.name for field in schema if "binary" not in str(field.type)]
            batch = next(file.iter_batches(max_rows, columns=plain), None)
            rows = [] if batch is None else batch.to_pylist()
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException):
        return None
    if not rows or b'"Json"' in (schema.metadata or {}).get(b"huggingface", b""):
        return None
    columns = column_names({field.name: _fields(field.type) for field in schema})
    return Source(name=name, rows=rows, folder=folder, columns=columns)


def _fields(kind: Any) -> Mapping[str, Any] | None:
    """Return the fields of a type of Arrow that is a struct; None for another type."""
    from pyarrow import types

    return {field.name: _fields(field.type) for field in kind} if types.is_struct(kind) else None


def _is_saved(path: Path) -> bool:
    """Return whether `save_to_disk` of `datasets` has written a folder."""
    return any((path / name).is_file() for name in _SAVED)


def _local_files(path: Path, split: str | None) -> tuple[list[Path], Path, str]:
    """Return the files of a split in a file or folder, their folder, and the name of the source."""
    if path.is_file():
        return [path], path.parent, _check_file(path, split)
    if path.is_dir():
        found = _data_files(path)
        files = _files_of(path, found, split or "train")
        _check_all_have_splits(path, found, files[0].suffix)
        return files, path, split or "train"
    raise DataError(f"there is no file or folder {str(path)!r}{_nearest(path)}")


def dataset_source(dataset: Any, *, spec: str, name: str, folder: Path) -> Source:
    """Return a datasets.Dataset as a source. It is not changed.

    Args: as open_python_rows; folder: as in Source. Raises: DataError for another object.
    """
    import datasets

    if isinstance(dataset, datasets.DatasetDict | datasets.IterableDatasetDict):
        splits = " or ".join(f"data[{split!r}]" for split in dataset)
        raise DataError(f"{spec} has the splits {', '.join(dataset)}; give one of them: {splits}")
    if isinstance(dataset, datasets.IterableDataset):
        raise DataError(f"{spec} is streamed, and training draws rows in any order; load it without streaming")
    if not isinstance(dataset, datasets.Dataset):
        raise DataError(f"{spec} is a {type(dataset).__name__}; give a datasets.Dataset")
    # Without the user's format or transform, which would change rows; with_format makes a copy.
    return _source(spec, dataset.with_format(None), name, folder)


def import_ahead() -> None:
    """Import `datasets` now, which takes a second, so that open_source does not have to."""
    import datasets  # noqa: F401


def _parse(spec: str) -> tuple[str, str | None]:
    if not spec.strip():
        raise DataError(
            "no dataset is given; set data.train_files (and data.val_files) to a file, a folder or a hub id"
        )
    return split_dataset(spec)


def _base(split: str) -> str:
    """Return a split without its slice: "train" of "train[:100]"."""
    return split.partition("[")[0]


def _check_file(path: Path, split: str | None) -> str:
    """Return the name of a file's source.

    Raises: DataError for an unknown format, or a split that the file does not have.
    """
    if path.suffix not in _LOADERS:
        raise DataError(f"{path} has suffix {path.suffix!r}; readable are {', '.join(_LOADERS)}")
    own = _split_of(Path(path.name)) or "train"
    if split is not None and _base(split) not in (own, "train"):
        raise DataError(f"{path} is one file with one split; write {path} or {path}@{own}, not @{split}")
    return path.stem


def _files_of(folder: Path, files: Sequence[Path], split: str) -> list[Path]:
    """Return the files of a split among those that _data_files has returned for a folder."""
    found = list(files)
    if not found:
        raise DataError(f"the folder {folder} holds no file that ends in {', '.join(_LOADERS)}")
    splits = {path: _split_of(path.relative_to(folder)) for path in found}
    names = sorted({name for name in splits.values() if name is not None})
    if names:
        canonical = _SPLIT_WORDS.get(_base(split), _base(split))
        found = [path for path in found if splits[path] == canonical]
    elif _base(split) != "train":
        found, names = [], ["train"]
    if not found:
        raise DataError(f"the folder {folder} has no split {_base(split)!r}, only {', '.join(names)}")
    suffixes = sorted({path.suffix for path in found})
    if len({_LOADERS[suffix] for suffix in suffixes}) > 1:
        raise DataError(f"the folder {folder} mixes {', '.join(suffixes)}; keep one kind, or name a file")
    _check_no_shard_is_missing(found)
    return found


def _data_files(folder: Path) -> list[Path]:
    """Return the files with rows in a folder, sorted; not hidden ones."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix in _LOADERS
        and path.name not in _NO_DATA
        and path.is_file()
        and not any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
    ]


def _check_all_have_splits(folder: Path, files: Sequence[Path], suffix: str) -> None:
    """Raise DataError if some files of a kind have a split in their names and others have none.

    `datasets` reads only those that have one, without a word. files: all that _data_files has
    returned for the folder. suffix: of a file of the kind.
    """
    splits = {path: _split_of(path.relative_to(folder)) for path in files if _LOADERS[path.suffix] == _LOADERS[suffix]}
    without = [str(path.relative_to(folder)) for path, split in splits.items() if split is None]
    if 0 < len(without) < len(splits):
        named = next(str(path.relative_to(folder)) for path, split in splits.items() if split is not None)
        raise DataError(
            f"the folder {folder} has files whose names say their split, such as {named}, and others whose names do "
            f"not: {listed(without)}; move those away, put the split into their names ({without[0]} -> "
            f"train-{Path(without[0]).name}), or list the files themselves"
        )


def _check_no_shard_is_missing(files: Sequence[Path]) -> None:
    """Raise DataError if files are named "train-00000-of-00002.parquet", and one is missing."""
    shards: dict[tuple[Path, str, int], set[int]] = defaultdict(set)
    for path in files:
        # What follows may be a hash: "train-00000-of-00002-5a1b.parquet".
        if match := _SHARD.match(path.stem):
            shards[path.parent, match["name"], int(match["count"])].add(int(match["number"]))
    for (folder, name, count), numbers in shards.items():
        if len(numbers) < count:
            raise DataError(
                f"{folder} has {len(numbers)} of the {count} files of {name!r}; download the others, or list the files "
                "themselves to use only these"
            )


def _split_of(path: Path) -> str | None:
    """Return the split in a relative path, or None: "test" for "data/test-00000.parquet".

    If there are several, the last one is returned. In a folder `data`, where `datasets` writes
    files, a name before the number of a file is the split: "test_mini" for
    "data/test_mini-00000-of-00001.parquet".
    """
    match = _SHARD.match(path.stem)
    if match is not None and path.parent == Path("data") and re.fullmatch(r"\w+", match["name"]):
        return _SPLIT_WORDS.get(match["name"], match["name"])
    for part in reversed((*path.parent.parts, path.stem)):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in _SPLIT_WORDS:
                return _SPLIT_WORDS[word]
    return None


def _open_files(files: Sequence[Path], folder: Path, name: str, split: str) -> Source:
    where = str(files[0]) if len(files) == 1 else f"{len(files)} files in {folder}"
    slice_ = split.removeprefix(_base(split))
    if files[0].suffix in _TEXT_SUFFIXES:
        return _open_text_files(files, folder, name, where, slice_)
    for path in files:
        _check_parquet_size(path)
    patterns = [glob.escape(str(path.resolve())) for path in files]
    rows = _load(where, "parquet", split=f"train{slice_}", data_files=patterns)
    return _source(where, rows, name, folder)


def _open_saved(folder: Path, split: str) -> Source:
    """Open a dataset, or one split of several, that `save_to_disk` has written."""
    import datasets

    where = f"{folder}@{split}"
    try:
        saved = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{where} cannot be read: {error}") from error
    if isinstance(saved, datasets.DatasetDict):
        names = {_SPLIT_WORDS.get(name, name): name for name in saved} | {name: name for name in saved}
        if (name := names.get(_base(split), names.get(_SPLIT_WORDS.get(_base(split), "")))) is None:
            raise DataError(f"the folder {folder} has no split {_base(split)!r}, only {', '.join(sorted(saved))}")
        saved = saved[name]
    if slice_ := split.removeprefix(_base(split)):
        saved = saved.select(_sliced(len(saved), slice_, str(folder)))
    return dataset_source(saved, spec=where, name=_base(split), folder=folder)


def _open_text_files(files: Sequence[Path], folder: Path, name: str, where: str, slice_: str) -> Source:
    """Open JSON or CSV files. slice_: "[:100]" of "train[:100]"; "": all rows."""
    rows = read_text_rows(files, cache_dir=datasets_cache())
    if slice_:
        rows = rows.select(_sliced(len(rows), slice_, where))
    if len(rows) == 0:
        raise DataError(f"{where} has no rows; name another dataset or split")
    return Source(name=name, rows=rows, folder=folder, columns=rows.names)


def _sliced(num_rows: int, slice_: str, where: str) -> list[int]:
    """Return the indices of the rows of a slice, as `datasets` understands it."""
    import datasets

    try:
        parts = datasets.ReadInstruction.from_spec(f"train{slice_}").to_absolute({"train": num_rows})
    except (AssertionError, ValueError) as error:
        raise DataError(f"{where}@train{slice_} cannot be read: {error}") from error
    return [index for part in parts for index in range(num_rows)[slice(part.from_, part.to)]]


def _open_hub(repo_id: str, split: str) -> Source:
    if uses_modelscope():
        folder = modelscope_folder(repo_id, "dataset")
        return _open_files(_files_of(folder, _data_files(folder), split), folder, _base(split), split)
    import datasets

    # Images are in the table, or were downloaded to this cache.
    cache = Path(datasets.config.HF_CACHE_HOME)
    where = f"{datasets.config.HF_ENDPOINT}/datasets/{repo_id}"
    datasets.enable_progress_bars()  # a download may take hours
    with _reading(where, split):
        files = _hub_text_files(repo_id, split)
    if files:
        return _open_text_files(files, cache, _base(split), where, split.removeprefix(_base(split)))
    return _source(where, _load(where, repo_id, split=split, data_files=None), _base(split), cache)


def _hub_text_files(repo_id: str, split: str) -> list[Path]:
    """Return the downloaded files of a split of a hub dataset that consists of JSON or CSV files.

    None for other datasets, and for datasets that are compressed, or have options in the
    repository.
    """
    import datasets
    from datasets.packaged_modules.csv.csv import Csv
    from datasets.packaged_modules.json.json import Json

    if datasets.config.HF_HUB_OFFLINE and (snapshot := _newest_snapshot(repo_id)) is not None:
        found = [path for path in snapshot.rglob("*") if path.suffix in _LOADERS]
        is_text = bool(found) and all(path.suffix in _TEXT_SUFFIXES for path in found)
        return _files_of(snapshot, _data_files(snapshot), split) if is_text else []
    builder = datasets.load_dataset_builder(repo_id)
    config = builder.config
    if not isinstance(builder, Json | Csv) or getattr(config, "field", None) or getattr(config, "sep", ",") != ",":
        return []
    files = list((config.data_files or {}).get(_base(split), ()))
    if any(Path(file).suffix not in _TEXT_SUFFIXES for file in files):
        return []
    return [Path(path) for path in datasets.DownloadManager().download(files)]


def _newest_snapshot(repo_id: str) -> Path | None:
    """Return the folder of a hub dataset's files that were downloaded last, or None."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE) / f"datasets--{repo_id.replace('/', '--')}" / "snapshots"
    snapshots = list(folder.iterdir()) if folder.is_dir() else []
    return max(snapshots, key=lambda path: path.stat().st_mtime, default=None)


def _load(where: str, path: str, *, split: str, data_files: list[str] | None) -> Any:
    import datasets

    if data_files:  # reading local files shows its progress as scanned rows
        datasets.disable_progress_bars()
    with _reading(where, split):
        return datasets.load_dataset(path, data_files=data_files, split=split)


@contextmanager
def _reading(where: str, split: str) -> Iterator[None]:
    """Raise the errors of `datasets` as DataError."""
    import datasets

    try:
        yield
    except StopIteration as error:  # raised by the library for a JSON file without rows
        raise DataError(f"{where} has no rows; name another dataset or split") from error
    except DataError:
        raise
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        # The library's own message is often unspecific; the cause has the details.
        reason = str(error.__cause__ or error) or type(error).__name__
        if "corresponds to no data" in reason:
            raise DataError(f"{where}@{split} has no rows; name another split") from error
        raise DataError(f"{where}@{split} cannot be read: {reason}") from error


def _source(where: str, rows: Any, name: str, folder: Path) -> Source:
    import datasets

    if len(rows) == 0:
        raise DataError(f"{where} has no rows; name another dataset or split")
    for column, feature in rows.features.items():
        # Not cast(), which would copy the stored bytes.
        rows.info.features[column] = _undecoded(feature)
    columns = column_names(rows.features)
    image_columns, video_columns = (
        tuple(column for column in columns if isinstance(_inner(column_value(rows.features, column)), kind))
        for kind in (datasets.Image, datasets.Video)
    )
    columns = tuple(dict.fromkeys((*columns, *_names_in_json_columns(rows))))
    return Source(
        name=name,
        rows=rows,
        folder=folder,
        columns=columns,
        image_columns=image_columns,
        video_columns=video_columns,
    )


def _names_in_json_columns(rows: Any) -> list[str]:
    """Return the names of fields of columns that the table keeps as JSON, from its first rows.

    Structs whose fields have several types are such columns; their features do not name the fields.
    """
    import datasets

    columns = [column for column, feature in rows.features.items() if isinstance(feature, datasets.Json)]
    if not columns:
        return []
    first = rows.select_columns(columns).select(range(min(len(rows), _NUM_JSON_ROWS)))
    return [name for row in first for name in column_names(row)]


def _undecoded(feature: Any) -> Any:
    """Return a feature whose media, at any depth, are read as {"bytes", "path"}, not decoded."""
    import datasets

    match feature:
        case datasets.Image() | datasets.Audio() | datasets.Video():
            return replace(feature, decode=False)
        case datasets.List() | datasets.LargeList():
            return replace(feature, feature=_undecoded(feature.feature))
        case dict():
            return {key: _undecoded(part) for key, part in feature.items()}
        case _:
            return feature


def _inner(feature: Any) -> Any:
    """Return the element type of a list feature, or the feature itself."""
    import datasets

    return feature.feature if isinstance(feature, datasets.List | datasets.LargeList) else feature


def _nearest(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; {path.parent} does not exist either"
    name = nearest_file(path)
    return f"; did you mean {path.parent / name}?" if name else ""


def _check_parquet_size(path: Path) -> None:
    """Raise DataError if the values of a Parquet file take far more memory than the file.

    A damaged file is left to its reader. Decodes columns whose values are repeated, in small
    batches. A file is read once, until it changes.
    """
    status = path.stat()
    _check_size(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1000)
def _check_size(path: Path, num_bytes: int, changed: int) -> None:
    import pyarrow
    from pyarrow import parquet

    allowed = max(MIN_ALLOWED_BYTES, MAX_EXPANSION * num_bytes)
    least = 0
    most: dict[str, int] = defaultdict(int)
    largest = 1
    try:
        file = parquet.ParquetFile(path)
        metadata = file.metadata
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            for chunk in (group.column(column) for column in range(group.num_columns)):
                least += max(chunk.num_values * _BYTES_PER_VALUE, chunk.total_uncompressed_size)
                most[chunk.path_in_schema] += chunk.num_values * chunk.total_uncompressed_size
                largest = max(largest, chunk.total_uncompressed_size)
    except (OSError, pyarrow.ArrowException):
        return
    with file:
        if metadata.num_rows > max(MIN_ALLOWED_ROWS, num_bytes):
            raise DataError(
                f"{path} has {metadata.num_rows:,} rows in {num_bytes:,} bytes, so that most of them are the same; "
                "keep one of each"
            )
        if least > allowed:
            raise _too_large(path, num_bytes, allowed)
        repeated = [column for column, size in most.items() if size > allowed]
        if not repeated or num_bytes > _MAX_COUNTED_BYTES:
            return
        counted = 0
        try:
            for batch in file.iter_batches(max(1, min(10_000, _BATCH_BYTES // largest)), columns=repeated):
                counted += batch.nbytes
                if counted > allowed:
                    raise _too_large(path, num_bytes, allowed)
        except (OSError, pyarrow.ArrowException):
            return


def _too_large(path: Path, num_bytes: int, allowed: int) -> DataError:
    return DataError(
        f"{path} has {num_bytes:,} bytes, and its values take more than {allowed:,} once they are read; they are the "
        "same many times: keep one of each, or use another file"
    )


def _plain(value: Any, where: str, depth: int) -> Any:
    """Return a copy of a value. Raises: DataError if it is of none of the types of a row.

    The content of every type can be compared with the content of another run, so that a resumed run
    notices other data.
    """
    match value:
        case None | bool() | int() | float() | str() | bytes() | date():
            return value
        case Image.Image():
            return _image(value, where)
        case PurePath():
            return str(value)
        case list() | tuple() if depth < MAX_DEPTH:
            return [_plain(item, f"{where}[{number}]", depth + 1) for number, item in enumerate(value)]
        case Mapping() if depth < MAX_DEPTH:
            _check_keys(value, where)
            return {key: _plain(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
        case list() | tuple() | Mapping():
            raise DataError(f"{where[:200]} has more than {MAX_DEPTH} levels")
        case _ if hasattr(value, "tolist"):  # arrays and scalars of numpy and torch
            if getattr(value, "ndim", 0) > _MAX_ARRAY_DIMENSIONS:
                raise DataError(
                    f"{where} is an array of shape {tuple(value.shape)}; give an image as PIL.Image.fromarray(array)"
                )
            return _plain(value.tolist(), where, depth + 1)
        case _:
            raise DataError(
                f"{where} is a {type(value).__module__}.{type(value).__name__}; values are text, numbers, True, "
                "False, None, dates, bytes, PIL images, and lists and dicts of these"
            )


def _check_keys(row: Mapping[Any, Any], where: str) -> None:
    """Raise DataError unless all keys are text."""
    for key in row:
        if not isinstance(key, str):
            raise DataError(f"{where} has the key {key!r}, a {type(key).__name__}; keys are text")


def _image(image: Image.Image, where: str) -> Any:
    """Return an image as its file if it was opened and not yet decoded, otherwise unchanged.

    A dataset of opened files would be decoded in its first scan, and stay in memory.
    Raises: DataError if it cannot be read, as after its file was closed.
    """
    try:
        encoded = undecoded_file(image)
        if encoded is None:
            image.load()  # not thread-safe; prompts are built by several threads
            return image
    except (OSError, ValueError, AssertionError, AttributeError, SyntaxError) as error:  # by Pillow
        raise DataError(
            f"{where}: the image cannot be read ({type(error).__name__}: {error}); open it again, or call "
            "image.load() before its file is closed"
        ) from error
    return OpenedFile(bytes=encoded, path=getattr(image, "filename", None) or None)


def _has_image(value: Any) -> bool:
    if isinstance(value, list):
        return any(_has_image(item) for item in value)
    return isinstance(value, Image.Image) or (isinstance(value, dict) and isinstance(value.get("bytes"), bytes))
