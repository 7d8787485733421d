"""The section on scores: tables of the judges' verdicts on real and generated clips, for every stage `evaluate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from markupsafe import Markup

from audiollm.evaluate.speech.settings import POCKETSPHINX, words_prefix
from audiollm.pages.blocks import (
    Content,
    StagePart,
    cell,
    confusion_table,
    details,
    element,
    heading,
    heat,
    join,
    note,
    notice,
    score_cell,
    small,
    stage_parts,
    table,
)  # fmt: skip
from audiollm.pages.formats import percent_or_dash
from audiollm.pages.page import Section, Tile
from audiollm.pages.run_record import Row, StageRecord
from audiollm.pages.sections import ReportContext

JUDGES = {
    "classifier": "a classifier of the texts, trained on the real training takes",
    "pocketsphinx": "CMU Pocketsphinx",
    "speaker": "a classifier of the voices, trained on the real training takes",
}
SETS = {"real": "real", "reference": "real, through the codec", "generated": "generated"}
GROUPS_SHOWN = 60


def scores_section(context: ReportContext) -> Section | None:
    """The tables of every stage `evaluate`, in the order of the recipe, and one that holds them side by side."""
    stages = [JudgedStage(stage) for stage in context.stages("evaluate")]
    if not stages:
        return None
    scored = [stage for stage in stages if not stage.absent]
    overview = _overview(scored) if len(scored) > 1 else None
    content = join(overview, stage_parts([_scores_part(stage) for stage in stages]))
    return Section("scores", "Scores", content, tiles=_voice_tiles([stage.stage for stage in stages]))


@dataclass(frozen=True)
class JudgedStage:
    """A stage `evaluate` and its `scores.json`."""

    stage: StageRecord

    @cached_property
    def scores(self) -> Row:
        content = self.stage.json("scores.json")
        return content if isinstance(content, dict) else {}

    @property
    def absent(self) -> str:
        """Why it has no scores; empty where it has."""
        return self.stage.absent or ("" if self.scores else f"The stage {self.stage.name} left no scores.")

    @cached_property
    def sets(self) -> dict[str, Row]:
        """The scores of real and generated clips."""
        return {name: self.scores["sets"][name] for name in SETS if name in self.scores["sets"]}

    @property
    def facts(self) -> Row:
        """What is known of each judge."""
        return self.scores.get("judges") or {}

    @property
    def recognizer(self) -> str:
        """Name of the recognizer that heard the words; scores of earlier versions do not tell it."""
        return str(self.scores.get("recognizer") or POCKETSPHINX)

    @cached_property
    def judges(self) -> list[str]:
        names = dict.fromkeys([*JUDGES, self.recognizer])
        return [name for name in names if name in self.sets["generated"]]

    def relative(self, judge: str) -> float | None:
        """The score of generated clips over that of real ones."""
        return (self.scores.get("relative") or {}).get(judge)

    def is_open(self, judge: str) -> bool:
        """Whether a judge writes any words, and not one of a list of texts."""
        return judge == self.recognizer and not (self.facts.get(judge) or {}).get("grammar")

    def measure(self, judge: str) -> str:
        """The measure of a judge."""
        return (
            "1 − word error rate"
            if self.is_open(judge)
            else "voice right"
            if judge == "speaker"
            else "text right"
        )

    def score(self, judge: str, name: str) -> Row:
        """A judge's score of a set, as `evaluate` defines it: 1 - word error rate in an open vocabulary."""
        scores = self.sets[name].get(judge)
        if not scores or not scores.get("n"):
            return {}
        if "confusion" in scores:
            return scores
        rate = scores.get("word_error_rate")
        return {"value": None if rate is None else max(0.0, 1.0 - rate), "n": scores["n"]}


def _overview(stages: Sequence[JudgedStage]) -> Markup:
    """One row per stage: each judge's score of the generated clips, and its ratio to the real ones."""
    judges = list(dict.fromkeys(judge for stage in stages for judge in stage.judges))
    titles = [
        next(f"{judge}: {stage.measure(judge)}" for stage in stages if judge in stage.judges)
        for judge in judges
    ]
    rows = [[stage.stage.name, *(_overview_cell(stage, judge) for judge in judges)] for stage in stages]
    return table(["generated clips", *titles], rows, "scores")


def _overview_cell(stage: JudgedStage, judge: str) -> Content:
    if judge not in stage.judges:
        return "–"
    relative = stage.relative(judge)
    beside = "" if relative is None else [" ", small(f"{relative:.3f} of real")]
    return [score_cell(stage.score(judge, "generated")), beside]


def _scores_part(stage: JudgedStage) -> StagePart:
    if stage.absent:
        return StagePart(stage.stage.name, stage.absent, stage.absent, notice(stage.absent))
    sets = stage.sets
    titles = [SETS[name] for name in sets]
    left_out = [(name, fact["left_out"]) for name, fact in stage.facts.items() if fact.get("left_out")]
    about = "Real: the held-out recordings. Intervals: 95 %, Wilson."
    groups = [
        _accuracy_table("text", "by_text", [judge for judge in stage.judges if judge != "speaker"], sets),
        _accuracy_table("speaker", "by_speaker", stage.judges, sets),
    ]
    content = join(
        [notice(str(warning)) for warning in stage.scores.get("warnings") or ()],
        table(
            ["judge", *titles, "generated ÷ real"],
            [_judge_row(stage, judge) for judge in stage.judges],
            "scores",
        ),
        note(about, [f" No {name} judge: {reason}." for name, reason in left_out]),
        element("div", groups, class_="pair"),
        _confusions(stage),
        heading("Other measures"),
        table(["", *titles], _voice_measures(stage)),
    )
    return StagePart(stage.stage.name, "", f"{sets['generated'].get('n', 0):,} clips", content)


def _judge_row(stage: JudgedStage, judge: str) -> list[Content]:
    fact, about = stage.facts.get(judge) or {}, JUDGES.get(judge, "a recognizer with published weights")
    if fact.get("training_clips"):
        about += f" ({fact['training_clips']:,} clips)"
    if judge == stage.recognizer:
        grammar = fact.get("grammar")
        about += f" with a grammar of {len(grammar)} texts" if grammar else ", open vocabulary"
    relative = stage.relative(judge)
    ratio = element("b", "–" if relative is None else f"{relative:.3f}", class_="relative")
    cells = [score_cell(stage.score(judge, name)) for name in stage.sets]
    return [[judge, " ", small(f"{stage.measure(judge)} · {about}")], *cells, ratio]


def _confusions(stage: JudgedStage) -> list[Markup]:
    """The main judge's matrix of generated clips, and all others behind a click."""
    main = "classifier" if "classifier" in stage.judges else stage.recognizer
    pairs = [(main, "generated")]
    pairs += [(judge, name) for judge in stage.judges for name in stage.sets if (judge, name) != pairs[0]]
    listed: list[Markup] = []
    for judge, name in pairs:
        matrix = (stage.sets[name].get(judge) or {}).get("confusion")
        if matrix and len(matrix["asked"]) > GROUPS_SHOWN:
            continue
        drawn, title = confusion_table(matrix), f"{judge}, {SETS[name]} clips"
        if drawn:
            first = join(heading("What was heard in place of what", title), drawn)
            listed.append(details(title, drawn) if listed else first)
    return listed


def _accuracy_table(title: str, key: str, judges: Sequence[str], sets: Mapping[str, Row]) -> Markup:
    """Accuracy by text or speaker: a row for each, a pair of columns for each judge."""
    names = [name for name in ("real", "generated") if name in sets]
    columns = [(judge, name) for judge in judges for name in names if key in (sets[name].get(judge) or {})]
    tables = [sets[name][judge][key] for judge, name in columns]
    labels = sorted({label for table in tables for label in table})
    if not labels:
        return Markup()
    rows = []
    for label in labels[:GROUPS_SHOWN]:
        values = [(of.get(label) or {}).get("accuracy") for of in tables]
        rows.append((label, [("–" if v is None else f"{100 * v:.0f}", (v or 0) ** 3, False) for v in values]))
    widths = {judge: sum(column[0] == judge for column in columns) for judge, _ in columns}
    over = ["", *(cell(judge, scope="colgroup", colspan=width) for judge, width in widths.items())]
    headings = ["", *("gen." if name == "generated" else name for _, name in columns)]
    more = len(labels) - GROUPS_SHOWN
    drawn = heat(rows, headings, "heat by", over)
    below = note("Percent right.", f" {more} more are in scores.json." if more > 0 else "")
    return element("div", heading(f"By {title}"), drawn, below)


def _voice_measures(stage: JudgedStage) -> list[tuple[str, ...]]:
    """Rows of a small table: a measure and its value in each set."""
    sets, voicing = stage.sets, stage.scores.get("voicing") or {}
    tables = list(sets.values())
    lengths = [table.get("durations") or {} for table in tables]

    def seconds(key: str) -> list[str]:
        return ["–" if length.get(key) is None else f"{length[key]:.2f} s" for length in lengths]

    errors = [(table.get(stage.recognizer) or {}).get("word_error_rate") for table in tables]
    stopped = [
        percent_or_dash(table.get("not_stopped")) if name == "generated" else "–"
        for name, table in sets.items()
    ]
    voiced = [voicing.get(name) or {} for name in sets]
    found = stage.scores.get("new_voices") or {"voices": [], "sets": {}}
    of_new = [found["sets"].get(name) or {} for name in sets]
    about_new = f"{len(found['voices'])} voices that no training recording has"
    new_voices = [
        (f"nearest to its own of {about_new}", *(percent_or_dash(of.get("accuracy")) for of in of_new)),
        (f"word error rate in {about_new}", *(percent_or_dash(of.get("word_error_rate")) for of in of_new)),
    ]
    return [
        ("clips", *(f"{table.get('n', 0):,}" for table in tables)),
        *(new_voices if found["voices"] else []),
        ("voiced frames", *(percent_or_dash(of.get("voiced_share")) for of in voiced)),
        (
            "mean pitch within 2 semitones of the speaker's own",
            *(percent_or_dash(of.get("pitch_right")) for of in voiced),
        ),
        ("mean duration", *seconds("mean_s")),
        ("5 % are shorter than", *seconds("p5_s")),
        ("5 % are longer than", *seconds("p95_s")),
        (f"word error rate, {stage.recognizer}", *map(percent_or_dash, errors)),
        ("did not stop by themselves", *stopped),
        ("could not be read", *(f"{len(table.get('unreadable') or []):,}" for table in tables)),
    ]


# ------------------------------------------------------------------------------------------------- tiles


def _voice_tiles(stages: Sequence[StageRecord]) -> list[Tile]:
    """Right texts and voices; where there are several stages, each has one tile with what its main judge says."""
    if len(stages) > 1:
        tiles = [_stage_tile(stage.name, stage.figures) for stage in stages if stage.figures]
    else:
        tiles = [tile for stage in stages if stage.figures for tile in _only_stage_tiles(stage.figures)]
    return [tile for tile in tiles if tile is not None]


def _only_stage_tiles(figures: Row) -> list[Tile | None]:
    main = str(figures.get("judge") or "")
    tiles = [_text_tile(figures, main, "", "relative_accuracy")]
    if main == "classifier":
        recognizer = str(figures.get("recognizer") or POCKETSPHINX)
        prefix = words_prefix(recognizer)
        tiles.append(_text_tile(figures, recognizer, prefix, f"{prefix}relative"))
    voice = figures.get("speaker_generated_accuracy")
    if voice is not None:
        real = percent_or_dash(figures.get("speaker_real_accuracy"))
        about = f"classifier of the voices: {real} on real takes"
        tiles.append(Tile(percent_or_dash(voice), "right voice", about))
    new_voice = figures.get("new_voice_generated_accuracy")
    if new_voice is not None:
        real = percent_or_dash(figures.get("new_voice_real_accuracy"))
        about = (
            f"nearest to its own of {figures.get('new_voices')} voices never trained on: {real} of real takes"
        )
        tiles.append(Tile(percent_or_dash(new_voice), "right new voice", about))
    return tiles


def _text_tile(figures: Row, judge: str, prefix: str, relative: str) -> Tile | None:
    if figures.get(relative) is None:
        return None
    real, generated = figures.get(f"{prefix}real_accuracy"), figures.get(f"{prefix}generated_accuracy")
    about = f"{judge}: {percent_or_dash(generated)} generated, {percent_or_dash(real)} real"
    return Tile(percent_or_dash(figures[relative]), "right text, relative to real", about)


def _stage_tile(name: str, figures: Row) -> Tile | None:
    """The figure of one stage of several: the main judge's score, with the voice in the note."""
    tile = _text_tile(figures, str(figures.get("judge") or ""), "", "relative_accuracy")
    if tile is None:
        return None
    voice = figures.get("speaker_generated_accuracy")
    beside = f"; right voice {percent_or_dash(voice)}" if voice is not None else ""
    return Tile(tile.value, f"{name}: {tile.title}", tile.note + beside)
