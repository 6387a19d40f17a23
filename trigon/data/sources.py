"""Opens a hub dataset, a file, or a folder of files as one table.

The only module that imports `datasets`. Rows stay on disk, memory-mapped, and images stay encoded.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trigon.config.paths import local_path, split_dataset
from trigon.data.columns import column_names, column_value
from trigon.errors import DataError
from trigon.models.hub import modelscope_folder, uses_modelscope
from trigon.suggestions import nearest

_LOADERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}

_NUM_JSON_ROWS = 100

_SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """An opened table.

    name: prefix of the prompt ids of its rows: "train".
    rows: a datasets.Dataset with undecoded media, or a list of dicts; at least one row.
    folder: relative image paths start here, and no path may lead outside it.
    columns: the names of all columns and structs' fields; fields with dots (columns.py).
    image_columns, video_columns: the columns or fields whose feature type is an image, or a video.
    """

    name: str
    rows: Any
    folder: Path
    columns: tuple[str, ...]
    image_columns: tuple[str, ...]
    video_columns: tuple[str, ...]

    def has_column(self, name: str) -> bool:
        """Return whether the table has a column or a field of this name."""
        return name in self.columns

    def first(self, max_rows: int) -> Source:
        """Return the source of the first rows only, at most so many."""
        if isinstance(self.rows, list):
            return replace(self, rows=self.rows[:max_rows])
        return replace(self, rows=self.rows.select(range(min(max_rows, len(self.rows)))))


def open_source(spec: str) -> Source:
    """Open `path_or_hub_id[@split]`.

    A path is a Parquet, JSON, JSON-lines or CSV file, or a folder that contains files of one of
    these formats, in which hidden and other files are ignored. If file or folder names contain
    splits ("train-00000-of-00002.parquet", "test/a.jsonl"), only the files of the given split are
    read. Anything else is a hub id (models/hub.py). The split defaults to "train", and may be a
    slice: "train[:100]".
    Raises: DataError if the dataset cannot be found or read, or has no rows.
    """
    location, split = _parse(spec)
    path = local_path(location, suffixes=tuple(_LOADERS))
    if path is None:
        return _open_hub(location, split or "train")
    if path.is_file():
        return _open_files([path], path.parent, _check_file(path, split), split or "train")
    if path.is_dir():
        split = split or "train"
        return _open_files(_files_of(path, split), path, split, split)
    raise DataError(f"there is no file or folder {location!r}{_nearest(path)}")


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


def _files_of(folder: Path, split: str) -> list[Path]:
    """Return the files of a split in a folder, sorted."""
    found = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix in _LOADERS
        and path.is_file()
        and not any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
    ]
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
    return found


def _split_of(path: Path) -> str | None:
    """Return the split in a relative path, or None: "test" for "data/test-00000.parquet".

    Of several, the last one.
    """
    for part in reversed((*path.parent.parts, path.stem)):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in _SPLIT_WORDS:
                return _SPLIT_WORDS[word]
    return None


def _open_files(files: Sequence[Path], folder: Path, name: str, split: str) -> Source:
    where = str(files[0]) if len(files) == 1 else f"{len(files)} files in {folder}"
    patterns = [glob.escape(str(path.resolve())) for path in files]
    slice_ = split.removeprefix(_base(split))
    rows = _load(where, _LOADERS[files[0].suffix], split=f"train{slice_}", data_files=patterns)
    return _source(where, rows, name, folder)


def _open_hub(repo_id: str, split: str) -> Source:
    if uses_modelscope():
        folder = modelscope_folder(repo_id, "dataset")
        return _open_files(_files_of(folder, split), folder, _base(split), split)
    import datasets

    # Images are in the table, or were downloaded to this cache.
    cache = Path(datasets.config.HF_CACHE_HOME)
    where = f"{datasets.config.HF_ENDPOINT}/datasets/{repo_id}"
    return _source(where, _load(where, repo_id, split=split, data_files=None), _base(split), cache)


def _load(where: str, path: str, *, split: str, data_files: list[str] | None) -> Any:
    import datasets

    # A download may take hours; reading local files shows its progress as scanned rows.
    (datasets.disable_progress_bars if data_files else datasets.enable_progress_bars)()
    try:
        return datasets.load_dataset(path, data_files=data_files, split=split)
    except StopIteration as error:  # raised by the library for a JSON file without rows
        raise DataError(f"{where} has no rows; name another dataset or split") from error
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
    name = nearest(path.name, sorted(entry.name for entry in path.parent.iterdir()))
    return f"; did you mean {path.parent / name}?" if name else ""
