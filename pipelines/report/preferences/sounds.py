"""The sound of recordings that a training's files name: from their own files, or by the manifests of the run.

A training on shards knows a recording by its key there. The manifest that the shards were made of has the file.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from audiollm.evaluate.report.clips import Gallery, PageClip
from pipelines.report.material import Material, Row, Trace

if TYPE_CHECKING:
    from audiollm.data.records.sample import AudioPart, Sample


class RecordSounds:
    """Finds the recordings of a stage's records.

    Args:
        stage: its `samples`, and those of the stages that it reads, are looked through.
    """

    def __init__(self, material: Material, stage: Trace, gallery: Gallery) -> None:
        self._material, self._stage, self._gallery = material, stage, gallery
        self._found: dict[str, list[AudioPart]] = {}
        """All audio parts of a record, in order, with the addresses of their files."""

    def find(self, ids: Iterable[str]) -> None:
        """Look these records up in the manifests, as far as they are still there."""
        left = set(ids)
        for path in self._manifests():
            left -= self._read(path, left)
            if not left:
                return

    def clip(self, id: str, part: Row) -> PageClip:
        """The sound of an audio part of a record; says what is missing where there is none."""
        path = Path(str(part.get("path")))
        if path.is_file():
            return self._gallery.clip(path, _seconds(part.get("start_s")) or 0.0, _seconds(part.get("end_s")))
        parts, number = self._found.get(id, []), part.get("part")
        if not isinstance(number, int) or not 0 <= number < len(parts):
            return PageClip(problem=f"{path.name}: its file is no longer there, or it is in a shard")
        found = parts[number]
        return self._gallery.clip(Path(found.path), found.start_s, found.end_s)

    def _manifests(self) -> list[Path]:
        """Files of samples that this stage and those before it read."""
        wanted, found = [self._stage], []
        names = set(self._stage.upstream)
        kinds = {stage.stage.kind for stage in self._material.recipe.stages}
        wanted += [stage for stage in self._material.stages(*kinds) if stage.name in names]
        for stage in wanted:
            told: Any = stage.result.settings.get("samples") if stage.result is not None else None
            for one in told if isinstance(told, list) else [told]:
                path = one.get("path") if isinstance(one, dict) else one
                if isinstance(path, str) and Path(path).is_file():
                    found.append(Path(path))
        return list(dict.fromkeys(found))

    def _read(self, path: Path, ids: set[str]) -> set[str]:
        from audiollm.data.records.manifest import Manifest
        from audiollm.errors import BadSample, ConfigError

        read: set[str] = set()
        try:
            manifest = Manifest(path)
        except ConfigError:
            return set()
        for index in range(len(manifest)):
            if read == ids:
                break
            try:
                sample = manifest[index]
            except BadSample:
                continue
            if sample.id in ids:
                self._found[sample.id] = _with_addresses(sample, path)
                read.add(sample.id)
        return read


def _with_addresses(sample: Sample, manifest: Path) -> list[AudioPart]:
    from audiollm.data.records.storage import audio_address

    return [
        part.model_copy(update={"path": audio_address(str(manifest.parent), part.path)})
        for part in sample.audio_parts()
    ]


def _seconds(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
