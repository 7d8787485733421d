"""Multiple choice about recordings whose names say what is heard in them, to train and to test a model that listens.

    python benchmarks/make_questions.py --audio recordings --pattern '{text}_{speaker}_{take}.wav' --held-out 'take<5' \
        --question 'Which digit is spoken?' --out questions

Writes to the folder `--out`:

- `mmau.json`: the held-out questions in MMAU's layout, for `audiollm evaluate audio-qa --list questions/mmau.json`;
- `answered.jsonl`: the other recordings with the question and the right answer, for the stage `train`;
- `preferences.jsonl`: the same with the right answer and a wrong one to choose between, for `train_preference`, and
  the held-out ones, too (metadata `split: test`).

Which options a question has, and their order, depend on the seed and the recording's name alone.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from audiollm.data.records.sample import AudioPart, Message, RatedAnswer, Sample, TextPart, write_samples
from audiollm.evaluate.listening.audio_qa import Question
from audiollm.files.atomic import write_json
from pipelines.annotate.input.transcripts import compile_pattern, match_pattern, parse_condition

SOUNDS = (".wav", ".flac", ".ogg", ".mp3", ".opus", ".m4a")


@dataclass(frozen=True)
class AskedRecording:
    """A recording and its question."""

    path: Path
    question: Question
    wrong: str
    """The option that is offered as the rejected answer."""
    is_held_out: bool


def ask(
    audio: Path, pattern: str, held_out: str, question: str, choices: int = 4, seed: int = 0
) -> list[AskedRecording]:
    """Ask about every recording below a folder whose name fits the pattern.

    Args:
        pattern: with `{text}`, the answer; parts of folders' names are allowed (`{number} - {text}/{clip}.ogg`).
        held_out: condition on the pattern's fields (`take<5`) that holds for the test set.
        choices: options of each question, the right one among them.

    Raises:
        SystemExit: no name fits, or there are fewer different answers than options.
    """
    expression, condition = compile_pattern(pattern), parse_condition(held_out)
    named = []
    for path in sorted(audio.rglob("*")):
        fields = match_pattern(pattern, expression, path.relative_to(audio).as_posix())
        if path.suffix.lower() in SOUNDS and fields is not None:
            named.append((path, fields))
    answers = sorted({fields.text for _, fields in named})
    if len(answers) < choices:
        raise SystemExit(f"{audio}: {len(answers)} different answers by {pattern!r}, {choices} are needed")
    recordings = []
    for path, fields in named:
        name = path.relative_to(audio).as_posix()
        rng = random.Random(f"{seed}/{name}")
        wrong = rng.sample([answer for answer in answers if answer != fields.text], choices - 1)
        options = rng.sample([fields.text, *wrong], choices)
        record = Question(
            id=name, audio_id=str(path.resolve()), question=question, choices=tuple(options),
            answer=fields.text, task=question, category="sound",
        )  # fmt: skip
        recordings.append(AskedRecording(path, record, wrong[0], condition.holds(fields)))
    return recordings


def conversation(recording: AskedRecording) -> list[Message]:
    """The recording, then the question with its options, as `evaluate audio-qa` asks it."""
    audio_part = AudioPart(path=str(recording.path.resolve()))
    return [Message(role="user", content=[audio_part, TextPart(text=recording.question.prompt())])]


def preference(recording: AskedRecording, chosen: str, rejected: str) -> Sample:
    """A record of two answers, the first of them better."""
    answers = [
        RatedAnswer(content=[TextPart(text=text)], rank=rank)
        for rank, text in enumerate((chosen, rejected), start=1)
    ]
    metadata = {"split": "test"} if recording.is_held_out else {}
    return Sample(
        id=recording.question.id,
        messages=conversation(recording),
        task="audio-qa",
        metadata=metadata,
        answers=answers,
    )


def answered(recording: AskedRecording) -> Sample:
    """An ordinary sample with the right answer."""
    last = Message(role="assistant", content=[TextPart(text=recording.question.answer)])
    split = "test" if recording.is_held_out else "train"
    return Sample(
        id=recording.question.id,
        messages=[*conversation(recording), last],
        task="audio-qa",
        metadata={"split": split},
    )


def write_questions(path: Path, recordings: Sequence[AskedRecording]) -> None:
    """Write the questions in MMAU's layout, with absolute paths of the recordings."""
    write_json(path, [recording.question.model_dump(by_alias=True) for recording in recordings])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--audio", type=Path, required=True, help="folder of recordings")
    parser.add_argument("--pattern", required=True, help="of their names; {text} is the answer")
    parser.add_argument("--held-out", required=True, help="condition on the pattern's fields: take<5")
    parser.add_argument("--question", required=True)
    parser.add_argument("--choices", type=int, default=4, help="options of each question")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("questions"))
    arguments = parser.parse_args()
    recordings = ask(
        arguments.audio,
        arguments.pattern,
        arguments.held_out,
        arguments.question,
        arguments.choices,
        arguments.seed,
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    held_out = [recording for recording in recordings if recording.is_held_out]
    write_questions(arguments.out / "mmau.json", held_out)
    write_samples(arguments.out / "answered.jsonl", map(answered, recordings))
    pairs = [preference(recording, recording.question.answer, recording.wrong) for recording in recordings]
    write_samples(arguments.out / "preferences.jsonl", pairs)
    print(json.dumps({"held out": len(held_out), "to train on": len(recordings) - len(held_out)}))


if __name__ == "__main__":
    main()
