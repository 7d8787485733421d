"""The origin of a model: the stage and the run that made it, the models that it began from, clips that it generated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from audiollm.files.atomic import DamagedFile, read_whole_lines
from audiollm.hub_models.names import hub_id, snapshot_name
from audiollm.recipe.runner import StageResult, read_result

_BASES = ("start", "language_model", "encoder", "audio_encoder")
"""Settings of stages that name a model whose weights are trained on."""


@dataclass(frozen=True)
class GeneratedSample:
    """A clip that the model generated in its run."""

    name: str
    """In the repository: `samples/STAGE/FILE`."""
    path: Path
    text: str
    speaker: str


@dataclass(frozen=True)
class ModelOrigin:
    """A model's folder, and the stage that made it, where it is within one."""

    folder: Path
    """The folder with config.json."""
    stage_folder: Path | None
    result: StageResult | None

    @property
    def stages(self) -> dict[str, StageResult]:
        """Finished stages of the same run, by the names of their folders."""
        if self.stage_folder is None:
            return {}
        folders = sorted(path for path in self.stage_folder.parent.iterdir() if path.is_dir())
        results = {path.name: _readable_result(path) for path in folders}
        return {name: result for name, result in results.items() if result and result.state == "done"}

    def made(self, setting: Any) -> bool:
        """Whether a stage's setting names this model, by its folder or that of its stage."""
        return any(names_folder(setting, folder) for folder in (self.folder, self.stage_folder) if folder)


def find_origin(folder: Path) -> ModelOrigin:
    """Find the stage around a model's folder.

    Args:
        folder: with config.json.
    """
    stage_folder = folder.resolve().parent
    result = _readable_result(stage_folder)
    return ModelOrigin(folder, stage_folder if result else None, result)


def names_folder(setting: Any, folder: Path) -> bool:
    """Whether a path in a stage's settings, absolute or from a working directory, is that of a folder."""
    if not isinstance(setting, str) or not setting:
        return False
    path, place = Path(setting), folder.resolve()
    if path.is_absolute():
        return path.resolve() == place
    return len(path.parts) > 1 and place.parts[-len(path.parts) :] == path.parts


def base_models(origin: ModelOrigin) -> list[str]:
    """Names on the hub of the models that a model began from, through the stages before its own."""
    names: list[str] = []
    stages, waiting, visited = origin.stages, [origin.result], set()
    while waiting:
        result = waiting.pop()
        if result is None or result.name in visited:
            continue
        visited.add(result.name)
        for setting in _base_settings(result.settings):
            snapshot = snapshot_name(setting)
            name = hub_id(snapshot or setting)
            if name is not None and (snapshot or not Path(setting).exists()):
                names.append(name.repository)
            elif origin.stage_folder is not None:
                run = origin.stage_folder.parent
                waiting += [
                    stage
                    for folder, stage in stages.items()
                    if any(names_folder(setting, run / folder / inner) for inner in ("", "model"))
                ]
    return list(dict.fromkeys(names))


def generated_samples(origin: ModelOrigin, count: int) -> list[GeneratedSample]:
    """Clips of the run's stages `generate` that this model spoke: spread over the prompts, and not selected by ear."""
    clips: list[GeneratedSample] = []
    for name, result in origin.stages.items():
        if (
            result.kind != "generate"
            or not origin.made(result.settings.get("model"))
            or not origin.stage_folder
        ):
            continue
        folder = origin.stage_folder.parent / name
        path = folder / "generated.jsonl"
        for row in read_whole_lines(path, {"path": str, "text": str}).rows if path.is_file() else ():
            clip = folder / row["path"]
            is_inside = clip.resolve().is_relative_to(folder.resolve())
            if clip.is_file() and not clip.is_symlink() and is_inside and clip.suffix in (".wav", ".flac"):
                clips.append(
                    GeneratedSample(
                        f"samples/{name}/{clip.name}", clip, row["text"], str(row.get("speaker") or "")
                    )
                )
    step = max(1, len(clips) // max(1, count))
    return clips[::step][:count]


def _base_settings(settings: Any, key: str = "") -> Iterator[str]:
    if isinstance(settings, dict):
        for name, value in settings.items():
            yield from _base_settings(value, name)
    elif isinstance(settings, str) and key in _BASES:
        yield settings


def _readable_result(folder: Path) -> StageResult | None:
    try:
        return read_result(folder)
    except (DamagedFile, OSError):  # then nothing is said of the stage
        return None
