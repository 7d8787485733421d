"""A dataset of Hugging Face `datasets` on this disk: saved with `save_to_disk`, or its parquet or arrow files.

Nothing is downloaded and no script of a dataset is run. Audio that is stored inside goes to files beside the manifest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from audiollm.audio import AUDIO_EXTENSIONS
from audiollm.data.chat.tasks import FieldValue
from audiollm.data.convert.request import ConversionRequest, SourceRows, bad_row, find_columns
from audiollm.data.records.sample import AudioPart, Sample
from audiollm.data.records.storage import write_bytes
from audiollm.errors import BadSample, ConfigError

_SPLIT = re.compile(r"(train|test|validation|valid|dev|eval)\b", re.IGNORECASE)
_MAGIC = {b"fLaC": ".flac", b"RIFF": ".wav", b"OggS": ".ogg", b"ID3": ".mp3"}


def huggingface(request: ConversionRequest) -> SourceRows:
    """The rows of all splits; a sample's split is in its metadata."""
    splits = _open(request.source)
    known = [getattr(dataset, "num_rows", None) for dataset in splits.values()]
    total = None if None in known else sum(count for count in known if count is not None)
    return SourceRows(total, _all(request, splits))


# Private


def _open(source: Path) -> Mapping[str, Any]:
    """Datasets by split; audio columns give the content of files."""
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
            if isinstance(feature, datasets.Audio):
                opened[split] = opened[split].cast_column(name, datasets.Audio(decode=False))
    return opened


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
            label = f"{split or request.source.stem}-{number:08d}"
            yield _sample(request, place, label, split, {f: row[c] for f, c in columns.items()})


def _sample(
    request: ConversionRequest, place: str, label: str, split: str, values: Mapping[str, Any]
) -> Sample | BadSample:
    id = str(values.get("id") or label)
    try:
        fields: dict[str, FieldValue] = {"split": split} if split else {}
        for name, value in values.items():
            if name == "audio" or (isinstance(value, Mapping) and {"bytes", "path"} <= set(value)):
                fields[name] = _audio(request, label if name == "audio" else f"{label}-{name}", value)
            elif isinstance(value, str | int | float) and name != "id":
                fields[name] = str(value).strip()
    except ValueError as error:
        return bad_row(place, id, str(error))
    return request.sample(place, id, fields)


def _audio(request: ConversionRequest, label: str, value: Any) -> AudioPart:
    """A path, or the content of a file, which is written to a folder beside the manifest."""
    content = value.get("bytes") if isinstance(value, Mapping) else None
    name = value.get("path") if isinstance(value, Mapping) else value
    if content is None:
        if not isinstance(name, str) or not name:
            raise ValueError("holds no audio: neither a path nor the content of a file")
        return request.audio_part(name)
    given = Path(name or "").suffix.lower()
    guess = next((ending for magic, ending in _MAGIC.items() if content.startswith(magic)), ".audio")
    folder = request.out.parent / f"{request.out.stem}_audio"
    path = folder / f"{label}{given if given in AUDIO_EXTENSIONS else guess}"
    write_bytes(str(path), content)
    return AudioPart(path=f"{folder.name}/{path.name}")
