"""Questions about real recordings whose answer takes a thought: what is heard is named first.

Which digit, which sound, which digit first, the sum of two, how many, louder or softer, the same speaker or another.
Recordings of several digits are joined from FSDD's takes; those of the test set come from held-out takes, and the
sounds from a held-out fold of ESC-10. Everything depends on the seed and the number of a question alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import soundfile

from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart
from audiollm.evaluate.listening.audio_qa import Question

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NUMBERS = (
    *DIGITS,
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
)
SOUNDS = (
    "baby cry",
    "chainsaw",
    "clock tick",
    "dog bark",
    "fire crackling",
    "helicopter",
    "person sneeze",
    "rain",
    "rooster",
    "sea waves",
)
"""Classes of ESC-10, by the names of its folders."""
NAMES = (*DIGITS, *SOUNDS, "louder", "softer")
"""All that a thought may name."""
HELD_OUT_TAKES, HELD_OUT_FOLD = range(5), "1"
SAMPLE_RATE = 8_000
LOUDER_DB = 12.0


@dataclass(frozen=True)
class Reasoned:
    """A question, with the thought that leads to its answer."""

    question: Question
    thought: str
    names: tuple[str, ...]
    """What the thought names."""

    @property
    def kind(self) -> str:
        return self.question.id.split("-")[0]

    def named(self, is_held_out: bool) -> Sample:
        """The recording alone, and the names of what is heard in it."""
        content = [AudioPart(path=self.question.audio_id), TextPart(text="What do you hear?")]
        return Sample(
            id=f"{self.question.id}-named",
            messages=[
                Message(role="user", content=content),
                Message(role="assistant", content=[TextPart(text=", ".join(self.names))]),
            ],
            task="understanding",
            metadata={"split": "test" if is_held_out else "train"},
        )

    def sample(self, is_held_out: bool) -> Sample:
        """The question as `evaluate audio-qa` asks it, and the answer behind its thought."""
        content = [AudioPart(path=self.question.audio_id), TextPart(text=self.question.prompt())]
        reply = f"<think>{self.thought}</think><answer>{self.question.answer}</answer>"
        return Sample(
            id=self.question.id,
            messages=[
                Message(role="user", content=content),
                Message(role="assistant", content=[TextPart(text=reply)]),
            ],
            task="audio-qa",
            metadata={
                "split": "test" if is_held_out else "train",
                "choices": list(self.question.choices),
                "heard": list(self.names),
            },
        )


class ReasoningMaker:
    """Makes questions of every kind, from the takes of one split.

    Args:
        data: has the folders `fsdd` and `esc10`.
        out: where joined recordings are written.
    """

    def __init__(self, data: Path, out: Path, is_held_out: bool, seed: int = 0) -> None:
        self._out, self._seed, self._split = out, seed, "test" if is_held_out else "train"
        self._clips: dict[str, list[Path]] = {digit: [] for digit in DIGITS}
        for path in sorted((data / "fsdd" / "recordings").glob("*.wav")):
            digit, _, take = path.stem.split("_")
            if (int(take) in HELD_OUT_TAKES) == is_held_out:
                self._clips[DIGITS[int(digit)]].append(path)
        sounds = sorted((data / "esc10").glob("*/*.ogg"))
        self._sounds = [path for path in sounds if (path.name.split("-")[0] == HELD_OUT_FOLD) == is_held_out]
        self._names = sorted({_sound_name(path) for path in sounds})
        out.mkdir(parents=True, exist_ok=True)

    def make(self, kind: str, count: int) -> list[Reasoned]:
        """So many questions of a kind (`KINDS`)."""
        return [
            _KINDS[kind](self, self._make_rng(kind, number), f"{kind}-{self._split}-{number}")
            for number in range(count)
        ]

    def _make_rng(self, kind: str, number: int) -> random.Random:
        return random.Random(f"{self._seed}/{self._split}/{kind}/{number}")

    def _digit(self, rng: random.Random, name: str) -> Reasoned:
        (digit,), path = self._join_digits(rng, name, 1)
        return _reasoned(
            rng, name, path, "Which digit is spoken?", DIGITS, digit, f"I hear {digit}.", (digit,)
        )

    def _sound(self, rng: random.Random, name: str) -> Reasoned:
        path = rng.choice(self._sounds)
        sound = _sound_name(path)
        return _reasoned(
            rng, name, path, "Which sound is this?", self._names, sound, f"I hear {sound}.", (sound,)
        )

    def _first(self, rng: random.Random, name: str) -> Reasoned:
        digits, path = self._join_digits(rng, name, 2)
        thought = f"First {digits[0]}. Then {digits[1]}."
        other_digits = [digit for digit in DIGITS if digit not in digits]
        options = [*digits, *rng.sample(other_digits, 2)]
        return _reasoned(rng, name, path, "Which digit is spoken first?", options, digits[0], thought, digits)

    def _sum(self, rng: random.Random, name: str) -> Reasoned:
        digits, path = self._join_digits(rng, name, 2)
        total = NUMBERS[sum(map(DIGITS.index, digits))]
        thought = f"First {digits[0]}. Then {digits[1]}."
        return _reasoned(
            rng, name, path, "What is the sum of the two digits?", NUMBERS, total, thought, digits
        )

    def _count(self, rng: random.Random, name: str) -> Reasoned:
        number = rng.randint(1, 4)
        digits, path = self._join_digits(rng, name, number)
        thought = "I hear " + ", ".join(digits) + "."
        return _reasoned(
            rng, name, path, "How many digits are spoken?", DIGITS[1:5], DIGITS[number], thought, digits
        )

    def _louder(self, rng: random.Random, name: str) -> Reasoned:
        answer = rng.choice(("louder", "softer"))
        gain = 10 ** ((LOUDER_DB if answer == "louder" else -LOUDER_DB) / 20)
        clip = _read_clip(rng.choice(self._clips[rng.choice(DIGITS)]))
        clip = clip / max(1e-6, float(np.abs(clip).max())) * 0.2
        path = self._write(name, [clip, np.clip(clip * gain, -1, 1)], rng)
        thought = f"The second is {answer}."
        return _reasoned(
            rng,
            name,
            path,
            "Is the second word louder or softer?",
            ("louder", "softer"),
            answer,
            thought,
            (answer,),
        )

    def _same(self, rng: random.Random, name: str) -> Reasoned:
        answer = rng.choice(("yes", "no"))
        digit, other_digit = rng.sample(DIGITS, 2)
        first_clip = rng.choice(self._clips[digit])
        fitting = [
            path
            for path in self._clips[other_digit]
            if (_speaker(path) == _speaker(first_clip)) == (answer == "yes")
        ]
        path = self._write(name, [_read_clip(first_clip), _read_clip(rng.choice(fitting))], rng)
        thought = f"First {digit}. Then {other_digit}."
        return _reasoned(
            rng, name, path, "Is it the same speaker?", ("yes", "no"), answer, thought, (digit, other_digit)
        )

    def _join_digits(self, rng: random.Random, name: str, number: int) -> tuple[tuple[str, ...], Path]:
        digits = tuple(rng.sample(DIGITS, number))
        clips = [rng.choice(self._clips[digit]) for digit in digits]
        return digits, clips[0] if number == 1 else self._write(
            name, [_read_clip(clip) for clip in clips], rng
        )

    def _write(self, name: str, clips: Sequence[np.ndarray], rng: random.Random) -> Path:
        path = self._out / f"{name}.wav"
        gap = np.zeros(int(SAMPLE_RATE * rng.uniform(0.2, 0.4)), np.float32)
        if not path.exists():
            joined = np.concatenate([piece for clip in clips for piece in (clip, gap)])
            soundfile.write(path, joined, SAMPLE_RATE, subtype="PCM_16")
        return path


_KINDS: dict[str, Callable[[ReasoningMaker, random.Random, str], Reasoned]] = {
    "digit": ReasoningMaker._digit,
    "sound": ReasoningMaker._sound,
    "first": ReasoningMaker._first,
    "sum": ReasoningMaker._sum,
    "count": ReasoningMaker._count,
    "louder": ReasoningMaker._louder,
    "same": ReasoningMaker._same,
}
KINDS = tuple(_KINDS)


def exchanged(questions: Sequence[Reasoned], seed: int = 1) -> list[Reasoned]:
    """The same questions and answers, the recordings exchanged among them at random."""
    order = random.Random(seed).sample(range(len(questions)), len(questions))
    return [
        replace(
            reasoned,
            question=reasoned.question.model_copy(update={"audio_id": questions[index].question.audio_id}),
        )
        for reasoned, index in zip(questions, order, strict=True)
    ]


def _reasoned(
    rng: random.Random, name: str, path: Path, question_text: str, options: Sequence[str], answer: str, thought: str,
    names: tuple[str, ...],
) -> Reasoned:  # fmt: skip
    wrong = [option for option in options if option != answer]
    choices = rng.sample([answer, *rng.sample(wrong, min(3, len(wrong)))], min(4, len(options)))
    question = Question(
        id=name, audio_id=str(path.resolve()), question=question_text, choices=tuple(choices), answer=answer,
        task=question_text, category="sound",
    )  # fmt: skip
    return Reasoned(question, thought, names)


def _read_clip(path: Path) -> np.ndarray:
    samples, rate = soundfile.read(path, dtype="float32")
    assert rate == SAMPLE_RATE, f"{path}: {rate} Hz"
    return np.asarray(samples)


def _speaker(path: Path) -> str:
    return path.stem.split("_")[1]


def _sound_name(path: Path) -> str:
    return path.parent.name.split(" - ")[1].lower()
