"""The sound of recordings that a training's files name: from their own files, or by the manifests of the run.

A training on shards knows a recording by its key there. The manifest that the shards were made of has the file.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from audiollm.pages.clips import PageClip
from audiollm.pages.run_record import Row, StageRecord
from audiollm.pages.sections import ReportContext

if TYPE_CHECKING:
    from audiollm.data.records.sample import AudioPart, Sample


class RecordSounds:
    """Finds the recordings of a stage's records.

    Args:
        stage: its `samples`, and those of the stages that it reads, are looked through.
    """

    def __init__(self, context: ReportContext, stage: StageRecord) -> None:
        self._run, self._stage, self._gallery = context.run, stage, context.gallery
        self._parts_by_id: dict[str, list[AudioPart]] = {}
        """All audio parts of a record, in order, with the addresses of their files."""

    def find(self, ids: Iterable[str]) -> None:
        """Look these records up in the manifests, as far as they are still there."""
        remaining = set(ids)
        for path in self._manifests():
            remaining -= self._read(path, remaining)
            if not remaining:
                return

    def clip(self, id: str, audio_part: Row) -> PageClip:
        """The sound of an audio part of a record; says what is missing where there is none."""
        path = Path(str(audio_part.get("path")))
        if path.is_file():
            return self._gallery.clip(
                path, _as_seconds(audio_part.get("start_s")) or 0.0, _as_seconds(audio_part.get("end_s"))
            )
        parts, number = self._parts_by_id.get(id, []), audio_part.get("part")
        if not isinstance(number, int) or not 0 <= number < len(parts):
            return PageClip(problem=f"{path.name}: its file is no longer there, or it is in a shard")
        source_part = parts[number]
        return self._gallery.clip(Path(source_part.path), source_part.start_s, source_part.end_s)

    def _manifests(self) -> list[Path]:
        """Files of samples that this stage and those before it read."""
        stages, paths = [self._stage], []
        names = set(self._stage.upstream)
        kinds = {stage.stage.kind for stage in self._run.recipe.stages}
        stages += [stage for stage in self._run.stages(*kinds) if stage.name in names]
        for stage in stages:
            samples: Any = stage.result.settings.get("samples") if stage.result is not None else None
            for entry in samples if isinstance(samples, list) else [samples]:
                path = entry.get("path") if isinstance(entry, dict) else entry
                if isinstance(path, str) and Path(path).is_file():
                    paths.append(Path(path))
        return list(dict.fromkeys(paths))

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
                self._parts_by_id[sample.id] = _resolve_part_addresses(sample, path)
                read.add(sample.id)
        return read


def _resolve_part_addresses(sample: Sample, manifest: Path) -> list[AudioPart]:
    from audiollm.data.records.storage import audio_address

    return [
        audio_part.model_copy(update={"path": audio_address(str(manifest.parent), audio_part.path)})
        for audio_part in sample.audio_parts()
    ]


def _as_seconds(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
