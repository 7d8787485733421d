"""An annotated corpus as a release: its segments without paths of this machine, its card, and sound where asked for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from audiollm.audio import load, save
from audiollm.errors import ConfigError
from audiollm.files.atomic import DamagedFile, Kinds, read_json, read_jsonl, read_whole_lines
from audiollm.publish.licences import Licence, front_matter
from audiollm.publish.model_release import LANGUAGE_CODE, Release, ReleaseOptions
from audiollm.publish.published_card import PUSH_MARK, card_text, markdown_table
from audiollm.publish.release_files import README, ReleaseFile, without_machine_paths

MAX_CLIPS = 10_000
"""Most segments whose sound goes up, a file each."""
SEGMENTS, METADATA = "segments.jsonl", "metadata.jsonl"
_WORDS = frozenset(["file", "heard", "id", "speaker", "text", "words"])
"""Fields of segments that people wrote or said: they stay as they are."""
_KEYS: dict[str, Kinds] = {
    "id": str,
    "path": str,
    "start_s": (int, float),
    "end_s": (int, float),
    "duration_s": (int, float),
}
_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))
_UNKNOWN = "not known"
_SAFE_NAME = re.compile(r"[^\w.-]+")


def is_corpus(folder: Path) -> bool:
    """Whether a folder is a run of `annotate`."""
    return (folder / SEGMENTS).is_file()


def corpus_release(folder: Path, licence: Licence, options: ReleaseOptions, clips: Path | None) -> Release:
    """Gather the release of an annotated corpus.

    Args:
        clips: folder to cut the segments' sound into, which then goes up; None: no sound goes up.

    Raises:
        ConfigError: no segments, or corrections that they lack; or, where sound goes up, too many of them or two of
            one id.
        DamagedFile: a row is damaged.
        AudioError: a recording cannot be read.
    """
    segments = read_jsonl(folder / SEGMENTS, "annotate again", _KEYS)
    _refuse_unused_corrections(folder)
    if not segments:
        raise ConfigError("no segment was kept", str(folder / SEGMENTS), "see the report of the annotation")
    if clips is not None and len(segments) > MAX_CLIPS:
        raise ConfigError(
            f"{len(segments):,} segments, and the hub takes {MAX_CLIPS:,} files well",
            "--with-audio",
            "push without it, or annotate the corpus in pieces",
        )
    rows: list[dict[str, Any]] = []
    sounds: list[ReleaseFile] = []
    for segment in segments:
        row = {key: value for key, value in segment.items() if key != "path"}
        if isinstance(correction := row.get("correction"), dict):  # who corrected it stays here
            row["correction"] = {key: value for key, value in correction.items() if key != "by"}
        row = without_machine_paths(row, _WORDS.__contains__)
        if clips is not None:
            sounds.append(_cut_clip(segment, clips))
            row = {"file_name": sounds[-1].name, **row}
        rows.append(row)
    if len({sound.name for sound in sounds}) < len(sounds):
        raise ConfigError("two segments have one id", str(folder / SEGMENTS), "annotate again")
    card = _corpus_card(folder, segments, licence, options, with_audio=clips is not None)
    table = ReleaseFile(METADATA if clips else SEGMENTS, "".join(_json_line(row) for row in rows).encode())
    files = [ReleaseFile(README, card.encode()), table, *sounds]
    files += [licence.file] if licence.file is not None else []
    omitted = [(path.name, "not on the list of files that go up") for path in sorted(folder.iterdir())]
    return Release("dataset", tuple(files), card, tuple(row for row in omitted if row[0] != SEGMENTS))


def _refuse_unused_corrections(folder: Path) -> None:
    """
    Raises:
        ConfigError: people corrected segments after the last annotation.
    """
    corrections = folder / "corrections.jsonl"
    if corrections.is_file() and corrections.stat().st_mtime_ns > (folder / SEGMENTS).stat().st_mtime_ns:
        raise ConfigError(
            f"{SEGMENTS} lacks corrections that were made since",
            str(corrections),
            "run audiollm annotate again with the same options: it measures corrected segments alone",
        )


def _cut_clip(segment: Mapping[str, Any], clips: Path) -> ReleaseFile:
    """Write the sound of a segment as FLAC."""
    name = f"{_SAFE_NAME.sub('_', segment['id']).strip('.')}.flac"
    wave = load(segment["path"], segment["start_s"], segment["end_s"])
    save(clips / name, wave.samples_CN, wave.sample_rate)
    return ReleaseFile(f"audio/{name}", clips / name)


def _corpus_card(
    folder: Path, segments: list[dict[str, Any]], licence: Licence, options: ReleaseOptions, with_audio: bool
) -> str:
    seconds_by_language = _seconds_by_language(segments)
    spoken_languages = [language for language in seconds_by_language if LANGUAGE_CODE.fullmatch(language)]
    tasks = (
        ["automatic-speech-recognition", "text-to-speech"] if any(row.get("text") for row in segments) else []
    )
    front: dict[str, Any] = {
        **licence.front,
        "language": list(options.languages) or spoken_languages,
        "task_categories": tasks or ["audio-classification"],
        "size_categories": [next((name for limit, name in _SIZES if len(segments) < limit), "1M<n<10M")],
        "tags": ["audio", "audiollm"],
        "source_datasets": list(options.datasets),
        "configs": [{"config_name": "default", "data_files": METADATA if with_audio else SEGMENTS}],
    }
    if with_audio:
        del front["configs"]  # the loader of folders of sound reads metadata.jsonl
    front = {key: value for key, value in front.items() if value}
    saved_front, prose = front_matter(folder / README)
    if prose.strip():
        front, body = {**front, **saved_front, **licence.front}, prose.strip()
    else:
        body = _corpus_summary(options.name, with_audio)
    parts = [
        body, _corpus_table(folder, segments, licence), _languages_table(seconds_by_language),
        _refusals_table(folder), _origin_of_texts(segments),
    ]  # fmt: skip
    return card_text(front, [PUSH_MARK, *(part for part in parts if part)])


def _corpus_summary(name: str, with_audio: bool) -> str:
    sound = (
        "The sound of each segment is in `audio/`."
        if with_audio
        else "The recordings are not part of this repository: `file`, `digest`, `start_s` and `end_s` name them."
    )
    table = METADATA if with_audio else SEGMENTS
    return (
        f"# {name.partition('/')[2]}: an annotated corpus\n\nSegments of recordings with text, language, speaker and "
        f"quality, annotated by `audiollm annotate`. One row of `{table}` is one segment. {sound}"
    )


def _corpus_table(folder: Path, segments: list[dict[str, Any]], licence: Licence) -> str:
    seconds = sum(segment["duration_s"] for segment in segments)
    splits = Counter(str(segment["split"]) for segment in segments if segment.get("split"))
    speakers = {segment["speaker"] for segment in segments if segment.get("speaker")}
    settings = _stage_settings(folder)
    recognizers = sorted({str(name) for segment in segments for name in segment.get("heard") or ()})
    rows = [
        ("Hours", f"{seconds / 3600:,.2f}" if seconds >= 36 else f"{seconds / 3600:.4f}"),
        ("Segments", f"{len(segments):,}"),
        ("Recordings", f"{len({segment['path'] for segment in segments}):,}"),
        ("Speakers", f"{len(speakers):,}" if speakers else _UNKNOWN),
        ("Splits", ", ".join(f"{name}: {count:,}" for name, count in sorted(splits.items())) or "none"),
        ("Preset", f"`{settings['preset']}`" if settings.get("preset") else _UNKNOWN),
        ("Recognizers", ", ".join(recognizers) or "none"),
        ("Licence", licence.name),
    ]
    return "## Size\n\n" + markdown_table(("", ""), rows)


def _seconds_by_language(segments: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    seconds: Counter[str] = Counter()
    for segment in segments:
        seconds[str(segment.get("language") or _UNKNOWN)] += segment["duration_s"]
    return dict(seconds.most_common())


def _languages_table(seconds_by_language: Mapping[str, float]) -> str:
    rows = [(language, f"{seconds / 3600:.4f}") for language, seconds in seconds_by_language.items()]
    return "## Languages\n\n" + markdown_table(("language", "hours"), rows)


def _refusals_table(folder: Path) -> str:
    """The reasons of segments and files that were left out, and of recognized texts that were."""
    funnel = _json_mapping(folder / "funnel.json")
    reasons: Counter[str] = Counter()
    for reason, count in (funnel.get("reasons") or {}).items():
        reasons[str(reason)] += count.get("n", 0) if isinstance(count, dict) else int(count)
    texts = (funnel.get("recognized_texts") or {}).get("reasons") or {}
    damaged = folder / "set_aside.jsonl"
    kinds = Counter(
        str(row.get("kind") or row.get("reason"))
        for row in (read_whole_lines(damaged).rows if damaged.is_file() else ())
    )
    rows = [("segments and files", reason, count) for reason, count in reasons.most_common()]
    rows += [("recognized texts", str(reason), _reason_count(count)) for reason, count in texts.items()]
    rows += [
        ("files set aside", _without_paths(kind), count)
        for kind, count in kinds.most_common()
        if kind not in reasons  # what the funnel counts is not counted twice
    ]
    if not funnel and not rows:
        return ""
    if not rows:
        return "## Left out\n\nNothing was left out."
    seen, kept = funnel.get("seconds_seen"), funnel.get("seconds")
    hours = (
        f"Of {seen / 3600:.4f} hours that were read, {kept / 3600:.4f} are kept.\n\n"
        if isinstance(seen, int | float) and isinstance(kept, int | float)
        else ""
    )
    return f"## Left out\n\n{hours}" + markdown_table(("of", "reason", "count"), rows)


def _origin_of_texts(segments: Iterable[Mapping[str, Any]]) -> str:
    sources = Counter(str(segment.get("text_source")) for segment in segments if segment.get("text"))
    if not sources:
        return ""
    meanings = {"given": "given with the recordings", "person": "corrected by people"}
    rows = [(meanings.get(source, source), count) for source, count in sources.most_common()]
    return "## Texts\n\n" + markdown_table(("source", "segments"), rows)


def _reason_count(value: Any) -> int:
    return int(value.get("n", 0)) if isinstance(value, dict) else int(value)


def _without_paths(text: str) -> str:
    return re.sub(r"(?<!\S)(?:/[^\s/]+)+/(?=[^\s/])", "", text)


def _stage_settings(folder: Path) -> dict[str, Any]:
    """Settings of the annotation: of a recipe's stage, or of the command, which writes config.yaml alone."""
    settings = _json_mapping(folder / "stage.json").get("settings")
    if not settings and (folder / "config.yaml").is_file():
        document = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        settings = document.get("annotate") if isinstance(document, dict) else None
    return settings if isinstance(settings, dict) else {}


def _json_mapping(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, DamagedFile):
        return {}
    return value if isinstance(value, dict) else {}


def _json_line(row: Mapping[str, Any]) -> str:
    import json

    return json.dumps(row, ensure_ascii=False) + "\n"
