"""Questions with options about recordings: MMAU's layout, AVQA, and MusicBench made into multiple choice.

Each becomes a conversation that ends with the right answer, with the options in `metadata.choices`. What is drawn
depends on the seed and the names of question and recording alone.

Sources: MMAU (arXiv 2410.19168); the rules for AVQA and MusicBench are Ke-Omni-R's (github.com/shuaijiang/Ke-Omni-R),
without its mistakes: an option that is the right answer under another name (F# and Gb), and one that is told by its
capitals.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from audiollm.data.chat.question_prompts import asks_for_tags, question_prompt
from audiollm.data.convert.request import (
    ConversionRequest,
    SourceRows,
    bad_row,
    bad_rows_sample,
    draw_held_out,
    known_split,
)
from audiollm.data.records.sample import Message, Sample, TextPart
from audiollm.data.tables.columns import is_missing
from audiollm.data.tables.question_rows import read_question_rows
from audiollm.data.tables.rows import RowList, read_json_rows
from audiollm.data.tables.table import BadRow
from audiollm.data.text.option_forms import are_told_apart
from audiollm.errors import BadSample, first_problem

TASK = "audio_qa"
NUM_OPTIONS = 4
MMAU_KEYS = (
    "id", "audio_id", "question", "choices", "answer", "task", "difficulty", "category", "sub-category", "split",
    "heard",
)  # fmt: skip
MMAU_SPLITS = ("test-mini", "test_mini")
"""The split of every row of MMAU's public list: it is left to `--held-out`."""
SOUNDS = (".wav", ".flac", ".mp3", ".m4a", ".ogg", ".opus")
NOTES = ("C", "Db", "D", "Eb", "E", "F", "F#", "G", "Ab", "A", "Bb", "B")
"""One name for each of the twelve notes."""
SAME_NOTES = {
    "B#": "C", "C#": "Db", "D#": "Eb", "Fb": "E", "E#": "F", "Gb": "F#", "G#": "Ab", "A#": "Bb", "Cb": "B",
}  # fmt: skip
TEMPOS: Mapping[str, tuple[float, float]] = {
    "Larghissimo": (0, 25), "Grave": (25, 45), "Largo": (40, 60), "Lento": (45, 60), "Larghetto": (60, 66),
    "Adagio": (66, 76), "Adagietto": (72, 76), "Andante": (76, 108), "Andantino": (80, 108),
    "Andante moderato": (92, 112), "Moderato": (108, 120), "Allegretto": (112, 120), "Allegro moderato": (116, 120),
    "Allegro": (120, 168), "Vivace": (140, 176), "Vivacissimo": (172, 176), "Allegrissimo": (172, 176),
    "Presto": (168, 200), "Prestissimo": (200, float("inf")),
}  # fmt: skip
"""Tempo marks and their beats per minute. Marks whose ranges touch are never options of one question."""
TIME_SIGNATURES = ("4/4", "3/4", "2/4", "6/8", "12/8", "5/4", "7/8", "9/8")
ALIKE = {"3/4", "6/8"}
"""Time signatures that are never options of one question: they are heard alike."""
_OPTIONS_FORM = "a list in JSON, texts with | between them in a table"
_TEMPO = re.compile(
    r"\b(" + "|".join(re.escape(name) for name in sorted(TEMPOS, key=len, reverse=True)) + r")\b", re.I
)


@dataclass(frozen=True)
class AskedQuestion:
    """A question with its options and its recording, as a source has it."""

    id: str
    question: str
    choices: Sequence[str]
    answer: str
    recordings: Sequence[str]
    """Names that the recording may have; the first that is there is taken."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """For the metadata: domain, difficulty, ..."""


QuestionResult = AskedQuestion | BadSample


def mmau(request: ConversionRequest) -> SourceRows:
    """MMAU's layout, in JSON or a table: `id`, `audio_id`, `question`, `choices`, `answer`; also `task`, `difficulty`,
    `category`, and `heard`, a list of what can be heard, for rewards of the steps of a thought.

    Other keys go to the metadata as they are, and are named.
    """
    listed = read_question_rows(request.source)
    rows = _without_bad_rows(listed)
    questions = [question for place, row in rows for question in _read_questions(place, row, _of_mmau)]
    notes = _mmau_notes([row for _, row in rows if isinstance(row, dict)])
    return _build_question_samples(request, questions, (*listed.notes, *notes))


def avqa(request: ConversionRequest) -> SourceRows:
    """AVQA's layout: `question_text`, `multi_choice`, `answer` (a number), `video_name`, `question_relation`.

    Questions of what is seen alone, and of colours, are left out.
    """
    questions: list[QuestionResult] = []
    num_visual = num_coloured = 0
    for place, row in _read_question_objects(request):
        if isinstance(row, dict) and row.get("question_relation") == "View":
            num_visual += 1
        elif isinstance(row, dict) and "color" in str(row.get("question_text")):
            num_coloured += 1
        else:
            questions += _read_questions(place, row, _of_avqa)
    note = f"left out: {num_visual} questions of what is seen (question_relation View), {num_coloured} of colours"
    return _build_question_samples(request, questions, (note,) if num_visual or num_coloured else ())


def musicbench(request: ConversionRequest) -> SourceRows:
    """MusicBench's rows (`location`, `key`, `prompt_bpm`, `prompt_bt`): questions for key, tempo and time signature."""
    questions = [
        question
        for place, row in _read_question_objects(request)
        for question in _read_questions(place, row, _of_musicbench(request.seed))
    ]
    return _build_question_samples(request, questions)


# ------------------------------------------------------------------------------------------------ private


def _read_question_objects(request: ConversionRequest) -> list[tuple[str, dict[str, Any] | BadSample]]:
    return _without_bad_rows(read_json_rows(request.source))


def _without_bad_rows(listed: RowList) -> list[tuple[str, dict[str, Any] | BadSample]]:
    return [
        (place, bad_rows_sample(place, row) if isinstance(row, BadRow) else row) for place, row in listed.rows
    ]


def _read_questions(
    place: str, row: dict[str, Any] | BadSample, read: Callable[[dict[str, Any]], Sequence[AskedQuestion]]
) -> Sequence[QuestionResult]:
    if isinstance(row, BadSample):
        return [row]
    id = str(row.get("id") or row.get("location") or "")
    try:
        return read(row)
    except KeyError as error:
        form = f": {_OPTIONS_FORM}" if error.args == ("choices",) else ""
        return [bad_row(place, id, f"has no {error}{form}")]
    except (TypeError, AttributeError, IndexError) as error:
        return [bad_row(place, id, f"has another form than such rows have ({error})")]
    except ValueError as error:
        return [bad_row(place, id, str(error))]


def _of_mmau(row: dict[str, Any]) -> list[AskedQuestion]:
    about = {
        "domain": row.get("task"),
        "difficulty": row.get("difficulty"),
        "category": row.get("category"),
        "sub_category": row.get("sub-category"),
        "split": _read_question_split(row),
    }
    metadata: dict[str, Any] = {key: value for key, value in row.items() if key not in MMAU_KEYS}
    metadata |= {key: value for key, value in about.items() if isinstance(value, str)}
    if sounds := row.get("heard"):
        metadata["heard"] = [str(name) for name in _expect_list(sounds, "what is heard")]
    choices = [str(choice) for choice in _expect_list(row["choices"])]
    name = str(row["audio_id"])
    return [
        AskedQuestion(str(row["id"]), str(row["question"]), choices, str(row["answer"]), [name], metadata)
    ]


def _read_question_split(row: Mapping[str, Any]) -> str | None:
    """`train` or `test`; None where a row says none, or MMAU's own `test-mini`, which all rows of its lists have.

    Raises:
        ConfigError: the split is not known.
    """
    name = row.get("split")
    if is_missing(name, is_name=True) or _is_mmaus(name):
        return None
    return known_split(str(row.get("id") or ""), str(name))


def _is_mmaus(split: object) -> bool:
    return isinstance(split, str) and split.strip().lower() in MMAU_SPLITS


def _mmau_notes(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    other_keys = dict.fromkeys(key for row in rows for key in row if key not in MMAU_KEYS)
    splits = dict.fromkeys(str(row["split"]) for row in rows if _is_mmaus(row.get("split")))
    notes = [f"keys of no meaning here, kept as metadata: {', '.join(other_keys)}"] if other_keys else []
    unread = f"splits that are not read: {', '.join(splits)}, MMAU's own; --held-out draws one"
    return (*notes, *([unread] if splits else []))


def _of_avqa(row: dict[str, Any]) -> list[AskedQuestion]:
    choices = [str(choice) for choice in _expect_list(row["multi_choice"])]
    number = row["answer"]
    if not isinstance(number, int) or not 0 <= number < len(choices):
        raise ValueError(f"answer must be the number of an option, not {number!r}")
    question = str(row["question_text"]).replace("video", "audio")
    if row.get("audio_path"):
        names = [str(row["audio_path"])]
    else:
        names = [f"{row['video_name']}{ending}" for ending in SOUNDS]
    about = {"domain": "sound", "category": str(row.get("question_type") or "")}
    metadata = {key: value for key, value in about.items() if value}
    return [AskedQuestion(f"avqa_{row['id']}", question, choices, choices[number], names, metadata)]


def _of_musicbench(seed: int) -> Callable[[dict[str, Any]], list[AskedQuestion]]:
    def read(row: dict[str, Any]) -> list[AskedQuestion]:
        location = str(row["location"])
        questions = []
        for kind, question, draw in _MUSIC:
            id = f"{kind}_{Path(location).stem}"
            options = draw(row, random.Random(f"{seed}/{id}"))
            if options is not None:
                answer, choices = options
                about = {"domain": "music", "category": kind}
                questions.append(AskedQuestion(id, question, choices, answer, [location], about))
        return questions

    return read


Options = tuple[str, list[str]]
"""The right answer, and all options."""


def _key_options(row: Mapping[str, Any], rng: random.Random) -> Options | None:
    """Four keys of the same mode."""
    key = row.get("key")
    if not isinstance(key, list) or len(key) != 2:
        return None
    note, mode = SAME_NOTES.get(str(key[0]), str(key[0])), str(key[1]).lower()
    if note not in NOTES or mode not in ("major", "minor"):
        return None
    wrong = rng.sample([candidate for candidate in NOTES if candidate != note], NUM_OPTIONS - 1)
    return _shuffle_options(f"{note} {mode}", [f"{wrong_note} {mode}" for wrong_note in wrong], rng)


def _tempo_options(row: Mapping[str, Any], rng: random.Random) -> Options | None:
    """Four tempo marks, of which none shares a tempo with the right one."""
    match = _TEMPO.search(str(row.get("prompt_bpm") or ""))
    if match is None:
        return None
    right = next(name for name in TEMPOS if name.lower() == match[1].lower())
    low, high = TEMPOS[right]
    apart = [name for name, (lowest, highest) in TEMPOS.items() if highest < low or lowest > high]
    return _shuffle_options(right, rng.sample(apart, NUM_OPTIONS - 1), rng)


def _time_options(row: Mapping[str, Any], rng: random.Random) -> Options | None:
    """Four time signatures, of which 3/4 and 6/8 are not both."""
    match = re.search(r"\d+/\d+", str(row.get("prompt_bt") or ""))
    if match is None:
        return None
    right = match[0]
    left_out = rng.choice(sorted(ALIKE)) if right not in ALIKE else next(iter(ALIKE - {right}))
    wrong = [signature for signature in TIME_SIGNATURES if signature not in (right, left_out)]
    return _shuffle_options(right, rng.sample(wrong, NUM_OPTIONS - 1), rng)


_MUSIC: tuple[tuple[str, str, Callable[[Mapping[str, Any], random.Random], Options | None]], ...] = (
    ("key", "Which of the following keys fits this piece best?", _key_options),
    ("tempo", "Which of the following tempo marks fits the rhythm of this piece best?", _tempo_options),
    ("time", "Which of the following time signatures fits the rhythm of this piece best?", _time_options),
)


def _shuffle_options(right: str, wrong: Sequence[str], rng: random.Random) -> Options:
    return right, rng.sample([right, *wrong], 1 + len(wrong))


def _expect_list(value: Any, what: str = "the options") -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what} must be a list, not {value!r:.60}")
    return value


def _build_question_samples(
    request: ConversionRequest, questions: Sequence[QuestionResult], notes: tuple[str, ...] = ()
) -> SourceRows:
    """The samples; with a count, drawn from all until there are as many."""
    count = request.asking.count
    shuffled = list(questions)
    if count is not None:
        random.Random(request.seed).shuffle(shuffled)

    held_out = _held_out(request, [question for question in shuffled if isinstance(question, AskedQuestion)])

    def results() -> Iterator[Sample | BadSample]:
        num_samples = 0
        for question in shuffled:
            if num_samples == count:
                return
            sample = (
                question
                if isinstance(question, BadSample)
                else sample_of_question(request, question, question.id in held_out)
            )
            num_samples += isinstance(sample, Sample)
            yield sample

    return SourceRows(min(len(shuffled), count or len(shuffled)), results(), notes)


def sample_of_question(
    request: ConversionRequest, question: AskedQuestion, is_held_out: bool
) -> Sample | BadSample:
    place, asking = f"{request.source}: {question.id}", request.asking
    if len(question.choices) < 2 or not are_told_apart(question.choices):
        reason = (
            f"at least two options are needed, all of them different, not {list(question.choices)!r:.120}"
        )
        return bad_row(place, question.id, f"{reason}: {_OPTIONS_FORM}")
    if question.answer not in question.choices:
        return bad_row(place, question.id, f"the answer {question.answer!r} is none of the options")
    text = question_prompt(question.question, question.choices, asking.prompt, asking.max_words)
    right = f"<answer>{question.answer}</answer>" if asks_for_tags(asking.prompt) else question.answer
    try:
        audio_part = request.first_audio_part(question.recordings)
        messages = [
            Message(role="user", content=[audio_part, TextPart(text=text)]),
            Message(role="assistant", content=[TextPart(text=right)]),
        ]
        about = {
            "split": "test" if is_held_out else "train",
            **question.about,
            "choices": list(question.choices),
        }
        return Sample(
            id=question.id,
            messages=messages,
            task=request.task.name if request.task else TASK,
            metadata=about,
        )
    except ValidationError as error:
        return bad_row(place, question.id, first_problem(error))
    except ValueError as error:
        return bad_row(place, question.id, str(error))


def _held_out(request: ConversionRequest, questions: Sequence[AskedQuestion]) -> set[str]:
    """Return the ids of the questions about held-out recordings."""
    pairs = [(question.id, question.recordings[0]) for question in questions]
    return draw_held_out(pairs, request.asking.held_out, request.seed)
