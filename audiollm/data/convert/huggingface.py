"""A dataset of Hugging Face `datasets` on this disk: saved with `save_to_disk`, or its parquet or arrow files.

Nothing is downloaded and no script of a dataset is run. Audio that is stored inside goes to files beside the manifest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from audiollm.data.chat.tasks import FieldValue
from audiollm.data.convert.recordings import is_recording, recording_part
from audiollm.data.convert.request import ConversionRequest, SourceRows, bad_row, find_columns
from audiollm.data.records.sample import HELD_OUT_NAMES, Sample, holds_out
from audiollm.errors import BadSample, ConfigError

_SPLIT = re.compile(rf"((?:train|{HELD_OUT_NAMES})(?:_[a-z]+)*)(?![a-z])", re.IGNORECASE)
"""A split at the beginning of a file's name: `train-00000-of-00002`, `test_prefs-00000-of-00001`."""


def huggingface(request: ConversionRequest) -> SourceRows:
    """The rows of all splits; a sample's split is in its metadata."""
    splits = open_splits(request.source)
    known = [getattr(dataset, "num_rows", None) for dataset in splits.values()]
    total = None if None in known else sum(count for count in known if count is not None)
    return SourceRows(total, _all(request, splits))


def open_splits(source: Path) -> Mapping[str, Any]:
    """The datasets of a folder by split ("" where there are none); audio, nested or not, is given as paths and bytes.

    Raises:
        ConfigError: the package `datasets` is not installed, or the folder holds no dataset.
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
        for name, feature in (dataset.features or {}).items():
            undecoded = _undecoded(feature)
            if undecoded != feature:
                opened[split] = opened[split].cast_column(name, undecoded)
    return opened


def split_of(name: str) -> str:
    """Return `test` for a split that its name holds out (`test_prefs`, `validation`, `dev-clean`), else the name."""
    return "test" if holds_out(name) else name


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
        files: dict[str, list[str]] = {}
        for path in paths:
            named = _SPLIT.match(path.name) or _SPLIT.match(path.parent.name)
            files.setdefault(named[1].lower() if named and path != source else "all", []).append(str(path))
        return kind, files
    remedy = "give a folder of save_to_disk, of .parquet or of .arrow"
    raise ConfigError("not a Hugging Face dataset", str(source), remedy)


def _all(request: ConversionRequest, splits: Mapping[str, Any]) -> Iterator[Sample | BadSample]:
    for split, dataset in splits.items():
        columns: dict[str, str] | None = None
        for number, row in enumerate(dataset):
            columns = columns or find_columns(list(row), request.columns, str(request.source))
            place = f"{request.source} {split}[{number}]".replace(" [", "[")
            label = row_label(request.source, split, number)
            yield _sample(request, place, label, split, {f: row[c] for f, c in columns.items()})


def _sample(
    request: ConversionRequest, place: str, label: str, split: str, values: Mapping[str, Any]
) -> Sample | BadSample:
    id = str(values.get("id") or label)
    try:
        fields: dict[str, FieldValue] = {"split": split_of(split)} if split else {}
        for name, value in values.items():
            if name == "audio" or is_recording(value):
                fields[name] = recording_part(request, label if name == "audio" else f"{label}-{name}", value)
            elif isinstance(value, str | int | float) and name != "id":
                fields[name] = str(value).strip()
    except ValueError as error:
        return bad_row(place, id, str(error))
    return request.sample(place, id, fields)
