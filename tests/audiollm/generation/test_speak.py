"""Speaking and answering: prompts, references, long texts, and what a person can get wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from audiollm.audio import Waveform, rms_dbfs, save
from audiollm.data.records.sample import AudioPart
from audiollm.errors import ConfigError
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.generation.speaking.generator import Generator
from audiollm.generation.speaking.manner import Manner, SpeakOptions
from audiollm.generation.speaking.speak import SpokenChunk, chunk_request, chunk_seconds, prompt_of
from audiollm.generation.speaking.voice import LEVEL_DBFS, LONGEST_REFERENCE_S, read_voice
from tests.audiollm.generation.toy_speech import HOP, RATE, ToyCodec, a_voice, toy_generator

PLAIN = SamplingConfig(text_guidance=1.0)


@pytest.fixture(scope="module")
def generator() -> Generator:
    return toy_generator()


def written(
    generator: Generator, manner: Manner, text: str = "one", earlier: tuple[SpokenChunk, ...] = ()
) -> list[str]:
    """The prompt's turns: the role, and the text with `<audio>` in the place of recordings."""
    messages, audio = prompt_of(generator, text, manner, earlier)
    turns = [
        f"{m.role}: " + "".join("<audio>" if isinstance(p, AudioPart) else p.text for p in m.content)
        for m in messages
    ]
    assert "".join(turns).count("<audio>") == len(audio)
    generator.template.prompt(messages, audio)  # it can be compiled
    return turns


def test_the_prompts_are_those_of_the_tasks(generator: Generator) -> None:
    instruction = "Generate audio following instruction."
    assert written(generator, Manner(speaker="anna")) == [
        f"system: {instruction}\n\nSpeaker: anna",
        "user: one",
    ]
    assert written(generator, Manner()) == [f"system: {instruction}", "user: one"]
    voice = read_voice(a_voice(1.0), None, generator.codec)
    scene = "<|scene_desc_start|>\n{}<|scene_desc_end|>"
    assert written(generator, Manner(voice=voice, scene="A hall.")) == [
        f"system: {instruction}\n\n" + scene.format("A hall.\n\nSPEAKER0: <audio>\n"),
        "user: one",
    ]
    voice = read_voice(a_voice(1.0), "two 3", generator.codec)
    said = SpokenChunk("three", torch.zeros(3, 4, dtype=torch.long), True, None)
    assert written(generator, Manner(voice=voice), earlier=(said,)) == [
        f"system: {instruction}",
        "user: two three",
        "assistant: <audio>",
        "user: three",
        "assistant: <audio>",
        "user: one",
    ]


def test_the_same_call_says_the_same_and_another_seed_something_else(generator: Generator) -> None:
    one, same = (generator.speak("one", speaker="anna", seed=3, max_duration_s=1) for _ in range(2))
    other = generator.speak("one", speaker="anna", seed=4, max_duration_s=1)
    assert torch.equal(one.samples_1N, same.samples_1N)
    assert not torch.equal(one.samples_1N, other.samples_1N[:, : one.samples_1N.shape[1]])
    assert one.text == "one" and one.first_audio_s is not None and one.first_audio_s < one.seconds
    assert one.duration_s <= 1 and one.waveform.sample_rate == RATE


def test_a_speaker_is_found_by_a_name_that_looks_the_same(generator: Generator) -> None:
    assert generator.manner(speaker="an\u200bna").speaker == "anna"
    assert generator.manner(speaker="Zoe\u0308").speaker == "Zo\u00eb"


def test_numbers_are_read_in_the_language_of_the_text(generator: Generator) -> None:
    assert generator.speak("Nummer 7", language="de", max_duration_s=0.2).text == "Nummer sieben"
    assert generator.voice(a_voice(1.0), "7 Tage", "de").text == "sieben Tage"


def test_numbers_are_spoken_and_sounds_are_tags(generator: Generator) -> None:
    assert generator.speak("Take 7! [laugh]", max_duration_s=0.2).text == "Take seven! <SE>[Laughter]</SE>"


def test_a_long_text_is_said_in_chunks_that_show_the_one_before(generator: Generator) -> None:
    seen: list[float] = []
    manner = Manner(sampling=PLAIN, chunk_s=1.0)
    text = "One two three, one two. Three two one. Hello hello hello."
    from audiollm.generation.speaking.speak import speak

    speech = speak(generator, text, manner, seen.append)
    assert speech.text == text
    assert seen == sorted(seen) and seen[-1] >= speech.duration_s - 1.0
    said = SpokenChunk("before", torch.zeros(3, 10, dtype=torch.long), True, None)
    shown = chunk_request(generator, "one", manner, (said,))
    assert len(shown.audio) == 1 and torch.equal(shown.audio[0], said.codes_KT)


def test_chunks_and_memory_keep_to_the_trained_length() -> None:
    short, long = (toy_generator(longest_positions=n) for n in (160, 10_000))
    assert 1.0 <= chunk_seconds(short, Manner()) < chunk_seconds(long, Manner()) == 12.0
    said = tuple(SpokenChunk("before", torch.zeros(3, 60, dtype=torch.long), True, None) for _ in range(3))
    assert len(chunk_request(long, "one", Manner(), said).audio) == 3
    assert len(chunk_request(short, "one", Manner(), said).audio) < 3


def test_the_limit_holds_for_all_chunks_together(generator: Generator) -> None:
    speech = generator.speak("One two three one two three. " * 8, speaker="anna", max_duration_s=1.5)
    assert speech.duration_s < 1.5 + 8 * 0.3 and not speech.stopped
    assert any("left out" in note for note in speech.notes)


def test_guidance_on_the_speaker_needs_a_speaker(generator: Generator) -> None:
    voice = read_voice(a_voice(1.0), None, generator.codec)
    for by, weight in ((Manner(speaker="anna"), 2.0), (Manner(), 1.0), (Manner(voice=voice), 1.0)):
        manner = replace(by, sampling=SamplingConfig(speaker_guidance=2.0))
        assert chunk_request(generator, "one", manner, ()).sampling.speaker_guidance == weight


# References


def test_a_reference_is_brought_to_one_level_and_one_channel() -> None:
    stereo = Waveform(a_voice(1.0, 0.01).samples_CN.repeat(2, 1), RATE)
    voice = read_voice(stereo.resample(16_000), None, ToyCodec())
    assert rms_dbfs(voice.waveform.samples_CN) == pytest.approx(LEVEL_DBFS, abs=0.5)
    assert voice.codes_KT.shape == (3, 25) and voice.notes == ()


def test_a_long_reference_is_cut_at_a_pause_and_loses_its_text(tmp_path: Path) -> None:
    samples_1N = a_voice(600).samples_CN.clone()
    samples_1N[:, round(12.0 * RATE) : round(12.4 * RATE)] = 0
    save(tmp_path / "long.wav", samples_1N, RATE)
    voice = read_voice(tmp_path / "long.wav", "all its words", ToyCodec())
    assert voice.waveform.duration_s == pytest.approx(12.2, abs=0.15)
    assert voice.text is None
    assert "600 s long; its first 12" in voice.notes[0] and "not used" in voice.notes[0]


def test_a_reference_just_within_the_limit_is_kept_whole() -> None:
    voice = read_voice(a_voice(LONGEST_REFERENCE_S), "its words", ToyCodec())
    assert voice.text == "its words" and voice.notes == ()
    assert voice.waveform.num_samples == round(LONGEST_REFERENCE_S * RATE)


def test_silence_around_a_reference_is_cut_off() -> None:
    quiet = torch.zeros(1, 20 * RATE)
    voice = read_voice(Waveform(torch.cat([quiet, a_voice(2.0).samples_CN], dim=1), RATE), None, ToyCodec())
    assert voice.waveform.duration_s == pytest.approx(2.1, abs=0.03)


@pytest.mark.parametrize(
    ("samples_1N", "problem"),
    [
        (torch.zeros(1, 8000), "only silence"),
        (1e-4 * torch.randn(1, 8000), "only silence"),
        (a_voice(0.1).samples_CN, "too short"),
        (torch.zeros(1, 0), "no samples"),
        (torch.full((1, 800), torch.nan), "not finite"),
    ],
)
def test_references_that_cannot_be_used(generator: Generator, samples_1N: torch.Tensor, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        generator.speak("one", reference=Waveform(samples_1N, RATE))


def test_a_reference_that_cannot_be_read(generator: Generator, tmp_path: Path) -> None:
    (tmp_path / "notes.wav").write_text("not a sound")
    for name in ("notes.wav", "missing.wav"):
        with pytest.raises(ConfigError, match=name):
            generator.speak("one", reference=tmp_path / name)


# What else a person can get wrong


@pytest.mark.parametrize(
    ("text", "manner", "problem"),
    [
        ("  \n ", {}, "no text"),
        ("hello <|eot_id|> there", {}, "control token <|eot_id|>"),
        ("hello", {"scene": "a hall <|AUDIO|>"}, "control token <|AUDIO|>"),
        ("hello", {"speaker": "ana"}, "'anna'"),
        ("hello", {"max_duration_s": 0.0}, "not in (0, 600]"),
        ("hello", {"max_duration_s": 1e9}, "not in (0, 600]"),
        ("hello", {"max_duration_s": float("nan")}, "not in (0, 600]"),
    ],
)
def test_clear_errors(generator: Generator, text: str, manner: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        generator.speak(text, **manner)  # type: ignore[arg-type]
    assert problem in str(error.value).replace("|", "|")


def test_speak_and_stream_take_the_same_options_and_no_others(generator: Generator) -> None:
    options = SpeakOptions(
        speaker="anna", scene="A hall.", seed=3, sampling=PLAIN, max_duration_s=0.2, reference=None
    )
    spoken, stream = generator.speak("one", **options), generator.stream("one", **options)
    assert torch.cat([piece.samples_CN for piece in stream], dim=1).shape == spoken.samples_1N.shape
    for call in (generator.speak, generator.stream, generator.manner):
        words = () if call == generator.manner else ("one",)
        with pytest.raises(TypeError, match="chunk_s"):
            call(*words, chunk_s=1.0)  # type: ignore[operator]
        with pytest.raises(ConfigError, match="mutually exclusive"):
            call(*words, speaker="anna", reference="never-read.wav")  # type: ignore[operator]
        with pytest.raises(ConfigError, match=re.escape("not in (0, 600]")):
            call(*words, max_duration_s=601.0)  # type: ignore[operator]


def test_letters_that_the_vocabulary_never_saw_are_named(generator: Generator) -> None:
    speech = generator.speak("hello привет", speaker="anna", max_duration_s=0.2)
    assert any("never saw" in note and "п" in note for note in speech.notes)
    assert generator.speak("hello there", speaker="anna", max_duration_s=0.2).notes == ()


# Streams


def test_a_stream_is_the_same_speech_in_pieces(generator: Generator) -> None:
    whole = generator.speak("one", speaker="anna", seed=3, max_duration_s=1)
    stream = generator.stream("one", speaker="anna", seed=3, max_duration_s=1)
    pieces = [piece.samples_CN for piece in stream]
    joined = torch.cat(pieces, dim=1)
    edge = RATE // 100  # the fades
    assert joined.shape == whole.samples_1N.shape
    assert joined[:, edge:-edge].allclose(whole.samples_1N[:, edge:-edge], atol=1e-6)
    assert len(pieces) > 1 and stream.stopped == whole.stopped
    assert stream.first_audio_s is not None and 0 < stream.first_audio_s < stream.seconds
    assert stream.duration_s == pytest.approx(whole.duration_s)


def test_a_long_stream_has_the_chunks_of_the_speech_and_no_clicks() -> None:
    generator = toy_generator(longest_positions=120)
    text = "One two three one two. Hello hello three two one."
    stream = generator.stream(text, speaker="anna", seed=1)
    joined = torch.cat([piece.samples_CN for piece in stream], dim=1)
    assert stream.text == generator.speak(text, speaker="anna", seed=1).text
    steps = joined.diff().abs().max()
    assert steps < 1.2 * 2 * torch.pi * 200 / RATE  # the slope of a tone of full scale


def test_what_is_wrong_is_said_before_the_first_piece(generator: Generator) -> None:
    with pytest.raises(ConfigError, match="no text"):
        generator.stream(" ")


# Answers


def test_a_question_is_answered_in_words_and_alike_for_file_and_waveform(
    generator: Generator, tmp_path: Path
) -> None:
    save(tmp_path / "door.wav", a_voice(0.5).samples_CN, RATE)
    answer = generator.answer(tmp_path / "door.wav", "How many knocks?", max_tokens=8)
    assert isinstance(answer, str)
    from audiollm.audio import load

    assert answer == generator.answer(load(tmp_path / "door.wav"), "How many knocks?", max_tokens=8)


@pytest.mark.parametrize(
    ("question", "problem"), [(" ", "no question"), ("what <|eot_id|>", "control token")]
)
def test_questions_that_are_none(generator: Generator, question: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        generator.answer(a_voice(0.5), question)


def test_recordings_that_are_too_long_or_cannot_be_read(generator: Generator, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="longer than 600 s"):
        generator.answer(Waveform(torch.zeros(1, 601 * RATE), RATE), "what?")
    with pytest.raises(ConfigError, match="nothing.wav"):
        generator.answer(tmp_path / "nothing.wav", "what?")


def test_the_toy_codec_is_a_codec() -> None:
    assert ToyCodec().decode(torch.zeros(3, 5, dtype=torch.long)).shape == (1, 5 * HOP)
