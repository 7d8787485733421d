"""A page of every suite of `audiollm evaluate`, over clips of which is known what is said, with names that are long."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from audiollm.evaluate.interpret.interpretation_suite import (
    InterpretationBench,
    LogOfSystem,
    evaluate_interpretation,
)
from audiollm.evaluate.interpret.latency_scores import LatencyOptions
from audiollm.evaluate.interpret.logged_outputs import LoggedOutput
from audiollm.evaluate.judges.judging import SpeechJudges
from audiollm.evaluate.listening.asr import TranscribedRecording, evaluate_asr
from audiollm.evaluate.listening.audio_qa import Question, evaluate_audio_qa
from audiollm.evaluate.listening.replies import Reply
from audiollm.evaluate.report.store import RowStore
from audiollm.evaluate.report.suite import SuiteResult, write_page
from audiollm.evaluate.report.text_errors import choose_form
from audiollm.evaluate.sound.generated_sounds import GeneratedSound
from audiollm.evaluate.sound.sound_judges import ClassSpace
from audiollm.evaluate.sound.suite import SuiteJudges, evaluate_sounds
from audiollm.evaluate.speech.dialogues import Dialogue, ScriptedTurn
from audiollm.evaluate.speech.emotion import evaluate_emotion
from audiollm.evaluate.speech.esd import read_esd
from audiollm.evaluate.speech.multi_speaker import evaluate_dialogues
from audiollm.evaluate.speech.pairwise import PairBench, evaluate_pairs
from audiollm.evaluate.speech.scoring import Bench
from audiollm.evaluate.speech.tts import SpeechItem, evaluate_list
from tests.audiollm.evaluate.marked_clips import Book, Compass, Reader
from tests.audiollm.evaluate.sound.test_evaluate_sound import Bands
from tests.audiollm.evaluate.test_evaluate_emotion import Moods, write_esd
from tests.audiollm.evaluate.test_evaluate_judge import Louder, pairs
from tests.pipelines.report.report_run import beep

LONG_PATH = "/data/" + "folder_of_a_judge/" * 6 + "model.tflite"
"""A name that no browser parts by itself."""


def speech_bench(book: Book, voices: Any) -> Bench:
    return Bench(choose_form("seed-tts", "en"), SpeechJudges(Reader(book), voices), "x", RowStore(None))


def asr_outcome(folder: Path) -> SuiteResult:
    rows, replies = [], {}
    for number in range(6):
        path = folder / f"{number}.wav"
        beep(path, 0.6)
        about = {"speaker": f"speaker {number % 2}"}
        rows.append(TranscribedRecording(f"{LONG_PATH}{number}", path, "one two", "en", about=about))
        replies[rows[-1].id] = Reply("one two" if number % 3 else "one three four")
    return evaluate_asr(rows, replies, "whisper", by=["speaker"])


def audio_qa_outcome(folder: Path) -> SuiteResult:
    questions, replies = [], {}
    for number in range(6):
        beep(folder / f"{number}.wav", 0.6)
        facts = {"id": f"q{number}", "audio_id": f"{number}.wav", "question": "What sounds?"}
        facts |= {"choices": ["a bell", "a horn", "rain", "a dog"], "answer": "a bell"}  # type: ignore[dict-item]
        questions.append(Question.model_validate({**facts, "task": "sound", "difficulty": "easy"}))
        replies[f"q{number}"] = Reply("a bell" if number % 2 else "I cannot tell.")
    return evaluate_audio_qa(questions, replies, folder)


def emotion_outcome(folder: Path) -> SuiteResult:
    book = Book()
    write_esd(book, folder / "esd", "0011", per_emotion=2)
    utterances = read_esd(folder / "esd", "en")
    clips = {utterance.id: utterance.request().clip(utterance.path) for utterance in utterances}
    return evaluate_emotion(utterances, clips, speech_bench(book, Moods()))


def dialogue_outcome(folder: Path) -> SuiteResult:
    book, dialogues = Book(), []
    for number in range(3):
        turns = []
        for place in range(4):
            path = book.write(
                folder / f"{number}-{place}.wav", f"words {place % 3}", 90.0 * (place % 2) + place
            )
            turns.append(ScriptedTurn(speaker="ab"[place % 2], text=f"words {place}", audio=path))
        dialogues.append(Dialogue(id=f"talk {number}", turns=tuple(turns)))
    return evaluate_dialogues(dialogues, speech_bench(book, Compass()))


def tts_outcome(folder: Path) -> SuiteResult:
    book, items, clips = Book(), [], {}
    for number in range(4):
        prompt = book.write(folder / f"prompt-{number}.wav", "a prompt", 10.0 * number)
        item = SpeechItem(f"clip {number}", "one two", prompt, "a prompt", prompt)
        items.append(item)
        path = book.write(folder / f"{number}.wav", "one two" if number else "one", 12.0 * number)
        clips[item.id] = item.request().clip(path) if number < 3 else item.request().clip(problem="no clip")
    return evaluate_list(items, clips, speech_bench(book, Compass()), f"clips: {LONG_PATH}")


def judge_outcome(folder: Path) -> SuiteResult:
    levels = [(0.5, 0.1), (0.4, 0.1), (0.1, 0.5), (0.3, 0.3), (0.9, 0.0), (0.9, 0.2)]
    return evaluate_pairs(*pairs(folder, levels), PairBench(Louder()), f"ours: {LONG_PATH}")


def sound_outcome(folder: Path) -> SuiteResult:
    sounds = []
    for number in range(4):
        for name in ("made", "real"):
            beep(folder / f"{name}-{number}.wav", 1.0)
        paths = (folder / f"made-{number}.wav", folder / f"real-{number}.wav")
        sounds.append(GeneratedSound(f"sound {number}", *paths, None, "low", None, None))
    judges = SuiteJudges(Bands(), ClassSpace(Bands()), None, None, {"classes": LONG_PATH, "space": LONG_PATH})
    return evaluate_sounds(sounds, judges)


def interpretation_outcome(folder: Path) -> SuiteResult:
    """The last word comes long after the source, where it was cut."""
    systems = []
    for name, lag in (("ours", 900.0), ("another system", 1700.0)):
        outputs = []
        for index in range(4):
            words = ["ein", "zwei", "drei", "vier", "Donaudampfschifffahrt"][: 4 + (index > 0)]
            delays = [lag + 700.0 * place for place in range(len(words))]
            facts = {"reference": "ein zwei drei vier Donaudampfschifffahrt", "source_length": 3000.0}
            row = {"index": index, "prediction": " ".join(words), "delays": delays, **facts}
            outputs.append(LoggedOutput.model_validate(row))
        systems.append(LogOfSystem(name, folder, outputs))
    bench = InterpretationBench("de", LatencyOptions("word"), choose_form("spoken", "de"))
    return evaluate_interpretation(systems, bench)


OUTCOMES: dict[str, Callable[[Path], SuiteResult]] = {
    "asr": asr_outcome,
    "audio-qa": audio_qa_outcome,
    "emotion": emotion_outcome,
    "multi-speaker": dialogue_outcome,
    "tts": tts_outcome,
    "judge": judge_outcome,
    "sound": sound_outcome,
    "interpret": interpretation_outcome,
}
"""Outcome of each suite by the name of its subcommand; `evaluate codec` has a page of its own."""


def write_suite_pages(folder: Path) -> dict[str, Path]:
    pages = {}
    for name, outcome in OUTCOMES.items():
        (folder / name).mkdir(parents=True)
        suite_result = outcome(folder / name)
        json.dumps(suite_result.result, allow_nan=False)  # the content of results.json
        pages[name] = write_page(folder / name / "report.html", suite_result, 4)
    return pages
