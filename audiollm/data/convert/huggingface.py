"""A dataset of Hugging Face `datasets` on this disk: saved with `save_to_disk`, or its parquet or arrow files.

Nothing is downloaded and no script of a dataset is run. Audio that is stored inside goes to files beside the manifest.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from audiollm.data.chat.tasks import FieldValue
from audiollm.data.convert.recordings import is_recording, recording_part
from audiollm.data.convert.request import ConversionRequest, SourceRows, bad_row, known_split
from audiollm.data.records.sample import Sample
from audiollm.data.tables.columns import NAME_FIELDS, columns_note, find_columns, is_missing
from audiollm.data.tables.splits import is_split
from audiollm.errors import BadSample, ConfigError

_SHARD = re.compile(r"([-_.]\d+)?([-_.]of[-_.]\d+)?$")
"""The end of a shard's name: `-00000-of-00002`."""


def huggingface(request: ConversionRequest) -> SourceRows:
    """The rows of all splits; a sample's split is in its metadata."""
    splits = open_splits(request.source)
    split_sizes = [getattr(dataset, "num_rows", None) for dataset in splits.values()]
    total = None if None in split_sizes else sum(count for count in split_sizes if count is not None)
    names = list(dict.fromkeys(name for dataset in splits.values() for name in column_names(dataset)))
    columns = find_columns(names, request.columns, str(request.source))
    return SourceRows(total, _all(request, splits, columns), (columns_note(columns, names),))


def open_splits(source: Path) -> Mapping[str, Any]:
    """The datasets of a folder by split ("" where there are none); audio, nested or not, is given as paths and bytes.

    Raises:
        ConfigError: the package `datasets` is not installed, the folder holds no dataset, or a split's name does not
            say whether it is trained on.
    """
    try:
        import datasets
    except ImportError:
        remedy = "pip install datasets"
        raise ConfigError("the package datasets is not installed", "convert huggingface", remedy) from None
    try:
        if (source / "state.json").exists():
            opened = {"": datasets.load_from_disk(str(source))}
        elif (source / "dataset_dict.json").exists():
            opened = dict(datasets.load_from_disk(str(source)))
        else:
            kind, files = _data_files(source)
            opened = dict(datasets.load_dataset(kind, data_files=files, streaming=True))
            opened = {"" if split == "all" else split: dataset for split, dataset in opened.items()}
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(f"cannot be read ({error})", str(source), "give a dataset's folder") from error
    for split, dataset in opened.items():
        if split:
            known_split(str(source), split)
        for name, feature in (dataset.features or {}).items():
            undecoded = _undecoded(feature)
            if undecoded != feature:
                opened[split] = opened[split].cast_column(name, undecoded)
    return opened


def column_names(dataset: Any) -> list[str]:
    """The columns of a dataset; those of its first row where it does not say them."""
    return list(getattr(dataset, "features", None) or next(iter(dataset), {}))


def named_rows(dataset: Any, numbered: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """The rows of a dataset, with the names of classes in place of their numbers; -1, no class, is None.

    Args:
        numbered: columns whose classes stay numbers.
    """
    features = {
        name: f for name, f in (getattr(dataset, "features", None) or {}).items() if name not in numbered
    }
    classes = {name: feature for name, feature in features.items() if _holds_classes(feature)}
    for row in dataset:
        yield row | {name: _with_names(feature, row[name]) for name, feature in classes.items()}


def row_label(source: Path, split: str, number: int) -> str:
    """The id of a row that has none of its own."""
    return f"{split or source.stem}-{number:08d}"


# Private


def _undecoded(feature: Any) -> Any:
    """The same feature with every audio in it given as it is stored."""
    import datasets

    if isinstance(feature, datasets.Audio):
        return replace(feature, decode=False)
    if isinstance(feature, dict):
        return {name: _undecoded(inner) for name, inner in feature.items()}
    if isinstance(feature, datasets.List | datasets.LargeList):
        return replace(feature, feature=_undecoded(feature.feature))
    return feature


def _data_files(source: Path) -> tuple[str, dict[str, list[str]]]:
    """The format, and the files of each split, by the split's name in theirs."""
    for kind in ("parquet", "arrow"):
        paths = [source] if source.suffix == f".{kind}" else sorted(source.rglob(f"*.{kind}"))
        if not paths:
            continue
        if paths == [source]:
            return kind, {"all": [str(source)]}
        splits = {path: _split_of_file(path) for path in paths}
        files: dict[str, list[str]] = {}
        for path, split in splits.items():
            if not split and any(splits.values()):
                known_split(str(path), _SHARD.sub("", path.stem))
            files.setdefault(split or "all", []).append(str(path))
        return kind, files
    remedy = "give a folder of save_to_disk, of .parquet or of .arrow"
    raise ConfigError("not a Hugging Face dataset", str(source), remedy)


def _split_of_file(path: Path) -> str:
    """The split that a file's name or its folder's says, without the shard; "" where neither does."""
    names = (_SHARD.sub("", path.stem).lower(), path.parent.name.lower())
    return next((name for name in names if is_split(name)), "")


def _holds_classes(feature: Any) -> bool:
    import datasets

    if isinstance(feature, dict):
        return any(map(_holds_classes, feature.values()))
    if isinstance(feature, datasets.List | datasets.LargeList):
        return _holds_classes(feature.feature)
    return isinstance(feature, datasets.ClassLabel)


def _with_names(feature: Any, value: Any) -> Any:
    if value is None or not _holds_classes(feature):
        return value
    if isinstance(feature, dict):
        return {name: _with_names(feature[name], inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_names(feature.feature, inner) for inner in value]
    return feature.int2str(value) if value >= 0 else None


def _all(
    request: ConversionRequest, splits: Mapping[str, Any], columns: Mapping[str, str]
) -> Iterator[Sample | BadSample]:
    for split, dataset in splits.items():
        for number, row in enumerate(named_rows(dataset)):
            place = f"{request.source} {split}[{number}]".replace(" [", "[")
            label = row_label(request.source, split, number)
            values = {field: row.get(column) for field, column in columns.items()}
            yield _convert_dataset_row(request, place, label, split, values)


def _convert_dataset_row(
    request: ConversionRequest, place: str, label: str, split: str, values: Mapping[str, Any]
) -> Sample | BadSample:
    id = label if is_missing(values.get("id"), is_name=True) else str(values["id"])
    try:
        fields: dict[str, FieldValue] = {"split": split} if split else {}
        for name, value in values.items():
            if name == "audio" or is_recording(value):
                fields[name] = recording_part(request, label if name == "audio" else f"{label}-{name}", value)
            elif isinstance(value, str | int | float) and name != "id" and not is_missing(value):
                fields[name] = _value_as_text(name, value)
    except ValueError as error:
        return bad_row(place, id, str(error))
    return request.sample(place, id, fields)


def _value_as_text(name: str, value: str | float) -> str:
    """A value as text; a number among names, such as 7.0 where pandas had numbers and NaN, without its fraction."""
    is_whole = name in NAME_FIELDS and isinstance(value, float) and value.is_integer()
    return str(int(value) if is_whole else value).strip()
