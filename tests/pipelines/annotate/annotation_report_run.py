"""A folder as an annotation leaves it, made up, with hostile names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from audiollm.files.atomic import write_json, write_jsonl
from audiollm.files.set_aside import set_aside_row
from tests.pipelines.report.report_run import beep

SHARED = Path(__file__).parents[4] / "shared" / "data"
HOSTILE = '"><script>alert(1)</script>.wav'
NAMES = [
    HOSTILE,
    "two\nlines.wav",
    "left\u202etfel.wav",
    "long" * 75 + ".wav",
    "bad\udcff.wav",
    "日本語.wav",
    "c.wav",
]
RULES = [
    ("min_duration_s", "segment", "duration_s", ">=", 0.1, "too short", "s"),
    ("min_level_dbfs", "signal", "signal.level_dbfs", ">=", -45.0, "too quiet", "dBFS"),
    ("max_pairwise_wer", "consensus", "consensus.pairwise_wer", "<=", 0.4, "recognizers disagree", ""),
    ("languages", "language", "language.language", "in", ["en"], "other language", ""),
    ("min_utmos", "quality", "quality.utmos", ">=", 3.4, "sounds unnatural", ""),
]
TEXTS = ["the cat sat on the mat", "a dog barked twice", "rain fell all day", "eleven ships sailed"]


def rules_json() -> list[dict[str, Any]]:
    keys = ("rule", "step", "value", "op", "threshold", "title", "unit")
    return [dict(zip(keys, rule, strict=True)) for rule in RULES]


def segment(number: int, path: Path | str, name: str, **columns: Any) -> dict[str, Any]:
    """A row whose values follow from its number."""
    text = TEXTS[number % len(TEXTS)]
    words = text.split()
    return {
        "id": f"s{number:05d}", "path": str(path), "file": name, "digest": "d", "start_s": 0.0, "end_s": 0.15,
        "duration_s": 0.15, "kind": "speech", "speaker": f"S{number % 30}", "split": "train", "text": text,
        "text_source": "consensus", "language": "en", "sample_rate": 24_000, "num_channels": 1,
        "heard": {"first": text, "second": " ".join(words[1:]), "third": " ".join([*words[:-1], "moose"])},
        "measured": {
            "signal": {"level_dbfs": -60.0 + number % 50, "clipped_share": 0.0},
            "quality": {"dnsmos": {"ovr": 2 + number % 20 / 10}, "snr_db": float(number % 40)},
            "consensus": {"pairwise_wer": number % 10 / 20, "vote_share": 0.8},
            "events": {"events": [{"label": f"<i>{name[:9]}", "start_s": 0.0, "end_s": 0.1, "score": 0.5}], "tags": []},
        },
        "pitch": "low",
    } | columns  # fmt: skip


def dropped(row: dict[str, Any], rule: int, value: Any) -> dict[str, Any]:
    name, step, _, _, threshold, title, unit = RULES[rule]
    reason = f"{value} {unit}, the limit is {threshold}"
    return row | {"dropped": {"step": step, "rule": name, "kind": title, "value": value, "threshold": threshold,
                              "reason": reason}}  # fmt: skip


def annotated(folder: Path, audio: Path) -> dict[str, Any]:
    """A folder as an annotation leaves it, of recordings with names that do harm; returns its funnel."""
    paths = [audio / f"{number}.wav" for number in range(len(NAMES))]
    for path in paths:
        beep(path)
    kept = [segment(n, path, name) for n, (path, name) in enumerate(zip(paths, NAMES, strict=True))]
    kept[0] |= {"text": HOSTILE, "text_source": "given", "speaker": HOSTILE}
    kept.append(segment(90, paths[0], "rain.ogg", kind="sound", text="", heard={}))
    filtered = [dropped(segment(10 + n, paths[n], NAMES[n]), 1, -60.0 + n) for n in range(5)]
    filtered += [dropped(segment(20 + n, paths[n], NAMES[n]), 2, 0.45) for n in range(2)]
    files = [
        {"name": name, "path": str(path), "digest": "d", "status": "kept", "reason": "", "segments": 2, "kept": 1,
         "duration_s": 0.2, "kept_s": 0.15} for path, name in zip(paths, NAMES, strict=True)
    ]  # fmt: skip
    files.append(
        files[0] | {"name": "noise.wav", "status": "filtered", "reason": "no speech found", "kept": 0}
    )
    files.append(
        files[0] | {"name": HOSTILE, "status": "failed", "reason": f"{HOSTILE}: no sound", "duration_s": None}
    )
    funnel = {
        "files_seen": 12_345, "not_audio": 12, "audio_files": 12_333, "files_kept": 9_871, "files_filtered": 2_461,
        "files_failed": 1, "segments_found": 23_456, "segments": 17_171, "seconds_seen": 360_000.0,
        "seconds_found": 250_000.0, "seconds": 180_000.0, "reasons": {"too quiet": 6_262, "recognizers disagree": 23},
        "stages": [
            {"step": "signal", "rule": "min_level_dbfs", "title": "too quiet", "threshold": -45.0,
             "segments_in": 23_456, "segments_out": 17_194, "seconds_in": 250_000.0, "seconds_out": 181_000.0},
            {"step": "consensus", "rule": "max_pairwise_wer", "title": "recognizers disagree", "threshold": 0.4,
             "segments_in": 17_194, "segments_out": 17_171, "seconds_in": 181_000.0, "seconds_out": 180_000.0},
        ],
        "errors": {"events": 7}, "text_agreement": 0.8125, "quality": {"n": 0},
    }  # fmt: skip
    put(folder / "segments.jsonl", kept)
    put(folder / "filtered.jsonl", filtered)
    put(folder / "files.jsonl", files)
    write_jsonl(
        folder / "set_aside.jsonl", [set_aside_row("annotate", f"/home/alice/{HOSTILE}", "cannot be read")]
    )
    write_json(folder / "funnel.json", funnel)
    write_json(folder / "rules.json", rules_json())
    write_json(folder / "not_applied.json", [
        {"threshold": "min_utmos", "value": 3.4, "scorer": "quality", "reason": "no UTMOS: give its .onnx file"}
    ])  # fmt: skip
    write_json(folder / "timings.json", {
        "steps": {"signal": {"seconds": 36.0, "calls": 23_456, "audio_s": 250_000.0},
                  "quality": {"seconds": 3564.0, "calls": 17_194, "audio_s": 181_000.0}},
        "audio_s": 360_000.0, "wall_s": 1_860.0, "workers": 2, "engine": "local", "known": 3,
    })  # fmt: skip
    write_json(
        folder / "bins.json",
        {"pitch": {"value": "prosody.pitch_hz", "edges": [120], "names": ["low", "high"]}},
    )
    (folder / "config.yaml").write_text(
        "preset: emilia\nthresholds: {min_utmos: 3.4}\ninput: /home/alice/raw\n"
    )
    return funnel


def put(path: Path, rows: list[dict[str, Any]]) -> None:
    """In ASCII: a name that is no Unicode cannot be written otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="ascii")


def many_rows(folder: Path, count: int) -> None:
    with (folder / "segments.jsonl").open("w") as kept, (folder / "filtered.jsonl").open("w") as filtered:
        for n in range(count):
            row = segment(n, folder / "gone.wav", f"{n}.wav", speaker=f"{n}.wav#S0")
            if n % 3:
                kept.write(json.dumps(row) + "\n")
            else:
                reason = {
                    "step": "s",
                    "rule": f"r{n % 150}",
                    "kind": f"reason {n % 150}",
                    "value": n,
                    "threshold": 0,
                }
                filtered.write(json.dumps(row | {"dropped": reason}) + "\n")
    write_json(folder / "rules.json", rules_json())
