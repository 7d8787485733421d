"""`evaluate asr`: errors as jiwer counts them over Whisper's forms, groups, manifests, hypotheses, what is kept."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jiwer
import pytest
from transformers.models.whisper.english_normalizer import BasicTextNormalizer, EnglishTextNormalizer
from typer.testing import CliRunner

from audiollm.audio import Waveform
from audiollm.commands.cli import build_app
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.errors import ConfigError
from audiollm.evaluate.listening.asr import QUESTION, TranscribedRecording, evaluate_asr, read_recordings
from audiollm.evaluate.listening.replies import Reply, ask_all, by_answerer, by_recognizer, read_replies
from audiollm.evaluate.report.store import RowStore
from audiollm.evaluate.subjects.protocols import Subject
from tests.audiollm.evaluate.marked_clips import Book, Reader

SAID = ["Mr. Smith paid $20, didn't he?", "It's the twenty-first of May.", "no", "We will colour it."]
WRITTEN = ["mister smith paid twenty dollars did not he", "it is the 21st of june", "", "we'll color it"]


def recordings(texts: list[str], language: str = "en", **about: list[str]) -> list[TranscribedRecording]:
    return [
        TranscribedRecording(
            f"r{i}", Path(f"{i}.wav"), text, language, about={key: own[i] for key, own in about.items()}
        )
        for i, text in enumerate(texts)
    ]


def replies(texts: list[str]) -> dict[str, Reply]:
    return {f"r{i}": Reply(text) for i, text in enumerate(texts)}


def test_english_is_compared_in_whispers_form() -> None:
    result = evaluate_asr(recordings(SAID), replies(WRITTEN), "whisper").result
    form = EnglishTextNormalizer({})
    pairs = [(form(said), form(written)) for said, written in zip(SAID, WRITTEN, strict=True)]
    expected = jiwer.process_words([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    words = result["words"]["en"]
    assert words["rate"] == pytest.approx(expected.wer)
    assert (words["substitutions"], words["insertions"], words["deletions"]) == (
        expected.substitutions,
        expected.insertions,
        expected.deletions,
    )
    joined = [[text.replace(" ", "") for text in side] for side in zip(*pairs, strict=True)]
    assert result["characters"]["en"]["rate"] == pytest.approx(jiwer.cer(joined[0], joined[1]))


def test_chinese_is_compared_by_characters_and_other_languages_by_words() -> None:
    said, written = ["今天天气很好。", "OK，再见"], ["今天天汽好", "ok再见吧"]
    table = evaluate_asr(recordings(said, "zh"), replies(written), "whisper").result["words"]["zh"]
    form = BasicTextNormalizer(split_letters=True)
    assert table["rate"] == pytest.approx(jiwer.wer([form(t) for t in said], [form(t) for t in written]))
    assert (table["units"], table["unit"]) == (10, "character")  # 6 and 4
    mixed = [*recordings(["guten Tag"], "de"), TranscribedRecording("zh", Path("z.wav"), "你好", "zh")]
    result = evaluate_asr(mixed, {"r0": Reply("guten Abend"), "zh": Reply("你好")}, "whisper").result
    assert {name: table["rate"] for name, table in result["words"].items()} == {"de": 0.5, "zh": 0.0}
    assert list(result["characters"]) == ["de"]


def test_groups_the_worst_first_and_failures() -> None:
    made = recordings(["a b", "a b", "a b", "a b"], speaker=["x", "y", "x", "y"], room=["1", "1", "2", "2"])
    heard = {**replies(["a b", "b", "a c", "a b"]), "r3": Reply(problem="cannot be heard: no such file")}
    outcome = evaluate_asr(made, heard, "whisper", by=["speaker"])
    table = outcome.result["words"]["en"]
    assert (table["rate"], table["n"], table["not_available"]) == (pytest.approx(2 / 6), 3, 1)
    assert table["rate_with_missing"] == pytest.approx((2 + 2) / 8)
    groups = outcome.result["by"]["speaker"]["en"]
    assert {name: group["rate"] for name, group in groups.items()} == {"x": 1 / 4, "y": 1 / 2}
    assert [row[0] for row in outcome.tables[1].rows] == ["y", "x"]
    assert [example.title for example in outcome.examples][:2] == ["r3", "r1"]
    with pytest.raises(ConfigError, match="did you mean 'speaker'"):
        evaluate_asr(made, heard, "whisper", by=["speakr"])


def test_manifests_of_every_form(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text(
        'path,text,speaker,language,snr\na.wav,"one, two",x,de,10\nb.wav,three,,,\n'
    )
    a, b = read_recordings(tmp_path / "m.csv", "en")
    assert (a.id, a.path, a.text, a.language) == ("a.wav", tmp_path / "a.wav", "one, two", "de")
    assert (a.about, b.language, b.about) == ({"speaker": "x", "snr": "10"}, "en", {})
    (tmp_path / "m.jsonl").write_text(
        json.dumps({"id": "q", "audio": "a.wav", "text": "t", "start_s": 1, "end_s": 2.5})
    )
    (only,) = read_recordings(tmp_path / "m.jsonl", "en")
    assert (only.id, only.start_s, only.end_s) == ("q", 1.0, 2.5)
    heard = Message(
        role="user", content=[AudioPart(path="a.wav", speaker="x", end_s=2), TextPart(text="What?")]
    )
    said = Message(role="assistant", content=[TextPart(text="the words")])
    metadata = {"language": "de", "text_recognizers": ["a" * 12]}
    samples = [
        Sample(id=split, messages=[heard, said], task="asr", metadata=metadata | {"split": split})
        for split in ("train", "test")
    ]
    write_samples(tmp_path / "samples.jsonl", samples)
    (sample,) = read_recordings(tmp_path / "samples.jsonl", "en", "test")
    assert (sample.id, sample.text, sample.language, sample.end_s) == ("test", "the words", "de", 2.0)
    assert sample.about == {"speaker": "x", "split": "test"}
    assert sample.text_recognizers == ["a" * 12]
    for content, problem in (
        ("path,text\na.wav,\n", r"m\.csv:2  no path, or no text"),
        ("path,text\na.wav,x\na.wav,y\n", "used twice"),
        ("path,text\n", "no recordings"),
        ("path,text\na.wav,one, two\n", "3 fields for 2 columns"),
    ):
        (tmp_path / "m.csv").write_text(content)
        with pytest.raises(ConfigError, match=problem):
            read_recordings(tmp_path / "m.csv", "en")


def test_an_open_quotation_mark_swallows_no_recording(tmp_path: Path) -> None:
    """With `csv.DictReader` the first and the last row were one recording, and the word error rate was that of one."""
    words = ['"the first begins', "the second", "and the third ends", "the fourth"]
    lines = [f"{name}.wav\t{text}" for name, text in zip("abcd", words, strict=True)]
    (tmp_path / "m.tsv").write_text("\n".join(["path\ttext", *lines]))
    assert [recording.text for recording in read_recordings(tmp_path / "m.tsv", "en")] == words
    (tmp_path / "h.tsv").write_text("\n".join(["id\ttext", *lines]))
    ids = [f"{name}.wav" for name in "abcd"]
    assert [reply.text for reply in read_replies(tmp_path / "h.tsv", ids, ["text"]).values()] == words


def test_exports_of_others_are_manifests_and_hypotheses(tmp_path: Path) -> None:
    notes: list[str] = []
    content = (
        "Datei;File_Name;Sentence;Locale;Split\r\n1;a.wav;Grüße;nan;evaluation\r\n2;b.wav;x;de;train\r\n"
    )
    (tmp_path / "m.csv").write_bytes(content.encode("cp1252"))
    (only,) = read_recordings(tmp_path / "m.csv", "en", "test", notes.append)
    assert (only.id, only.text, only.language, only.about["Datei"]) == ("a.wav", "Grüße", "en", "1")
    assert "Windows-1252" in notes[0] and "File_Name as audio, Sentence as text" in notes[1]
    (tmp_path / "h.jsonl").write_bytes(
        '{"id": "a.wav", "text": "Grüße"}\n{"id": "b.wav", "text": null}'.encode("utf-16")
    )
    replies = read_replies(tmp_path / "h.jsonl", ["a.wav", "b.wav"], ["text"])
    assert replies == {"a.wav": Reply("Grüße"), "b.wav": Reply(problem="no reply")}
    (tmp_path / "h.csv").write_text("ID,Text\na.wav,\na.wav,x\n")
    with pytest.raises(ConfigError, match=r"h\.csv:3  a\.wav: a second reply"):
        read_replies(tmp_path / "h.csv", ["a.wav"], ["text"])


def test_hypotheses_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "h.csv").write_text("id,text\nr0,one\nr9,other\n")
    assert read_replies(tmp_path / "h.csv", ["r0", "r1"], ["text"]) == {
        "r0": Reply("one"),
        "r1": Reply(problem="no reply"),
    }
    with pytest.raises(ConfigError, match="not one of its ids"):
        read_replies(tmp_path / "h.csv", ["x"], ["text"])
    with pytest.raises(ConfigError, match=r"h\.csv:2  no id, or no reply"):
        read_replies(tmp_path / "h.csv", ["r0"], ["hypothesis"])


class Secretary:
    """Answers with what the book says, if it is asked to transcribe."""

    def __init__(self, book: Book) -> None:
        self.reader, self.questions = Reader(book), set[str]()

    def answer(self, audio: Waveform, question: str) -> str:
        self.questions.add(question)
        return self.reader.recognize(audio.samples_CN, audio.sample_rate)


def test_models_and_recognizers_write_and_are_not_asked_twice(tmp_path: Path) -> None:
    book = Book()
    made = [
        TranscribedRecording(name, book.write(tmp_path / f"{name}.wav", text, 0), text, "en")
        for name, text in (("a", "one two"), ("b", "(fails)"))
    ]
    made.append(TranscribedRecording("gone", tmp_path / "gone.wav", "x", "en"))
    secretary = Secretary(book)
    inquiries = [each.inquiry() for each in made]
    subject = Subject("s", "s", secretary)
    for _ in range(2):
        store = RowStore(tmp_path / "kept.jsonl")
        written = ask_all(by_answerer(subject), subject.fingerprint, inquiries, store, lambda _: None)
    assert written["a"] == Reply("one two")
    assert written["b"].problem == "the model failed: RuntimeError: out of breath"
    assert written["gone"].problem.startswith("cannot be heard")
    assert (secretary.reader.asked, secretary.questions) == (3, {QUESTION}), "a failure is tried again"
    reader = Reader(book)
    assert (
        ask_all(by_recognizer(reader), "r", inquiries[:1], RowStore(None), lambda _: None)["a"].text
        == "one two"
    )
    failing = ask_all(by_recognizer(reader), "r", inquiries[1:2], RowStore(None), lambda _: None, "base (/w)")
    assert failing["b"].problem == "base (/w) failed: RuntimeError: out of breath"


def test_the_command(tmp_path: Path) -> None:
    book = Book()
    for name in "ab":
        book.write(tmp_path / f"{name}.wav", f"this is {name}", 0)
    (tmp_path / "m.csv").write_text("path,text,speaker\na.wav,this is a,<x>\nb.wav,this is b,y\n")
    (tmp_path / "h.csv").write_text("id,text\na.wav,this was a\nb.wav,this is b\n")
    command = [
        "evaluate",
        "asr",
        "--list",
        str(tmp_path / "m.csv"),
        "--by",
        "speaker",
        "-o",
        str(tmp_path / "out"),
    ]
    answer = CliRunner().invoke(
        build_app(), [*command, "--hypotheses", str(tmp_path / "h.csv")], catch_exceptions=False
    )
    assert answer.exit_code == 0, answer.output
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    assert result["words"]["en"]["rate"] == pytest.approx(1 / 6)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "&lt;x&gt;" in page and "<x>" not in page and not re.search(r'(?:src|href)="(?!data:|#)', page)
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert [row["heard"] for row in rows] == ["this was a", "this is b"]
    with pytest.raises(ConfigError, match="exactly one of these options"):
        CliRunner().invoke(build_app(), command, catch_exceptions=False)
    with pytest.raises(ConfigError, match="no model named"):
        CliRunner().invoke(build_app(), [*command, "--endpoint", "http://x/v1"], catch_exceptions=False)
