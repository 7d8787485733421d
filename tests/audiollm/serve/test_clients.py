"""The published client `openai` over a real socket: everyone gets what the model gives alone."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from audiollm.audio import Waveform, load_bytes
from audiollm.audio.sound_encoder import SOUND_FORMATS, encode_sound, pcm16
from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.families.answering import AnswerError, AnswerRequest, WrittenAnswer
from audiollm.families.answering_engine import AnsweringEngine
from audiollm.generation.engine.request import Limits, Request
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.generation.engine.streaming import stream_audio
from audiollm.generation.service.service import GenerationService
from audiollm.generation.speaking.dialogue import dialogue_stream, parse_script
from audiollm.serve.limits import ServeLimits
from audiollm.serve.model import ServerModel
from audiollm.serve.voices import Reference, VoiceStore
from pipelines.annotate.synthesizers.espeak import SAMPLE_RATE, Espeak
from tests.audiollm.generation.toy_speech import RATE, a_voice
from tests.audiollm.serve.running import RunningServer, running_server, streamed_sound, voice_wav, wait_for

LONG = "One two three. Hello hello hello. Two three one one. Hello one."
LIMITS = ServeLimits(max_length=4096, answer_tokens=40)
SCRIPT = "[SPEAKER0] one two. [SPEAKER1] hello."


class Echo:
    """Answers in words alone, one conversation after the other, and hears."""

    name = fingerprint = "echo"
    hears = True

    def check(self, request: AnswerRequest) -> None:
        if "refuse" in str(request.turns):
            raise AnswerError("the model refuses this")

    def answer(self, requests: Sequence[AnswerRequest], check_stop: Any = None) -> list[WrittenAnswer]:
        check_stop()
        (request,) = requests
        parts = [part for _, parts in request.turns for part in parts]
        words = [f"{part.duration_s:.1f} s" if isinstance(part, Waveform) else str(part) for part in parts]
        if "fail" in words:
            raise AnswerError("the answer failed", "failed")
        return [WrittenAnswer(f" {' '.join(words)} ", 9)]

    def notes_on(self, request: AnswerRequest) -> tuple[str, ...]:
        return ()


def echo_model(service: GenerationService) -> ServerModel:
    echo = Echo()
    return ServerModel("echo", service.add_engine(lambda: AnsweringEngine(echo)), 0, None, echo)


class Scribe(Echo):
    """Hears the same two words in everything."""

    name = fingerprint = "scribe"

    def answer(self, requests: Sequence[AnswerRequest], check_stop: Any = None) -> list[WrittenAnswer]:
        return [WrittenAnswer("Seven, three!", 9) for _ in requests]


def scribe_model(service: GenerationService) -> ServerModel:
    scribe = Scribe()
    lane = service.add_engine(lambda: AnsweringEngine(scribe))
    return ServerModel("scribe", lane, 0, None, scribe, frozenset({"asr"}))


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(LIMITS, more_models=[echo_model, scribe_model]) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return server.client()


def refusal(call: Any, **arguments: Any) -> dict[str, Any]:
    with pytest.raises(openai.APIStatusError) as caught:
        call(**arguments)
    assert caught.value.status_code in (400, 404, 409)
    assert isinstance(caught.value.body, dict)
    return caught.value.body


def test_models_and_what_they_can(client: openai.OpenAI) -> None:
    toy, echo, _ = client.models.list()
    assert (toy.id, toy.speaks, toy.hears, toy.voices) == ("toy", True, True, ["anna", "bruno"])
    assert (echo.id, echo.speaks, echo.hears) == ("echo", False, True)
    assert client.models.retrieve("toy").id == "toy"
    assert (
        refusal(client.models.retrieve, model="toy2")["message"]
        == "there is no such model: did you mean 'toy'?"
    )


@pytest.mark.parametrize("format", SOUND_FORMATS)
def test_speech_whole_and_streamed_in_every_format(
    server: RunningServer, client: openai.OpenAI, format: Any
) -> None:
    options = {"seed": 1, "max_new_tokens": 60}
    whole = client.audio.speech.create(
        model="toy", input=LONG, voice="anna", response_format=format, extra_body={"seed": 3}
    )
    expected = encode_sound(server.generator.speak(LONG, speaker="anna", seed=3).samples_1N, RATE, format)
    streaming = client.audio.speech.with_streaming_response.create(
        model="toy",
        input=LONG,
        voice="default",
        response_format=format,
        stream_format="audio",
        extra_body=options,
    )
    with streaming as response:
        pieces = list(response.iter_bytes())
    sound = streamed_sound(server.generator, LONG, seed=1, max_duration_s=60 / 25)
    joined, expected_stream = b"".join(pieces), encode_sound(sound, RATE, format)
    assert len(pieces) > 3 and response.headers["x-sample-rate"] == str(RATE)
    if format == "opus":  # numbers of its pages' streams are drawn
        pairs = [(whole.content, expected), (joined, expected_stream)]
        for first, second in pairs:
            assert torch.equal(load_bytes(first).samples_CN, load_bytes(second).samples_CN)
    else:
        assert whole.content == expected
        skipped = 44 if format == "wav" else 0  # a stream's header does not know its length
        assert joined[skipped:] == expected_stream[skipped:]
    if format != "pcm":
        assert load_bytes(joined).duration_s >= sound.shape[1] / RATE


def test_a_dialogue_is_streamed_turn_by_turn(server: RunningServer, client: openai.OpenAI) -> None:
    """It is the sound of `dialogue_stream`; turns that are made in one go are refused as a stream."""
    generator = server.generator
    manner = generator.manner(seed=1, max_duration_s=4.0)
    stream = dialogue_stream(generator, parse_script(SCRIPT), {}, manner)
    expected = pcm16(torch.cat([piece.samples_CN for piece in stream], dim=1))
    asked: dict[str, Any] = {"model": "toy", "input": SCRIPT, "voice": openai.omit, "response_format": "pcm"}
    extra = {"dialogue": True, "seed": 1, "max_new_tokens": 100, "stream_format": "audio"}
    streaming = client.audio.speech.with_streaming_response.create(**asked, extra_body=extra)
    with streaming as response:
        pieces = list(response.iter_bytes())
    assert b"".join(pieces) == expected and len(pieces) > 2
    refused = refusal(client.audio.speech.create, **asked, extra_body={**extra, "together": True})
    assert refused["param"] == "together"


def test_events_of_speech(server: RunningServer, client: openai.OpenAI) -> None:
    streaming = client.audio.speech.with_streaming_response.create(
        model="toy", input="one", voice="default", response_format="pcm", stream_format="sse",
        extra_body={"seed": 4, "max_new_tokens": 20},
    )  # fmt: skip
    import json

    with streaming as response:
        events = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]
    assert {event["type"] for event in events[:-1]} == {"speech.audio.delta"}
    sound = b"".join(base64.b64decode(event["audio"]) for event in events[:-1])
    assert sound == pcm16(streamed_sound(server.generator, "one", seed=4, max_duration_s=20 / 25))
    usage = events[-1]["usage"]
    assert events[-1]["type"] == "speech.audio.done"
    assert usage["output_tokens"] == 20 and usage["total_tokens"] == 20 + usage["input_tokens"]


def test_another_sample_rate(server: RunningServer, client: openai.OpenAI) -> None:
    options = {"seed": 1, "max_new_tokens": 30, "sample_rate": 24_000}
    for more in ({}, {"stream_format": "audio"}):
        answer = client.audio.speech.create(
            model="toy", input="one", voice="default", response_format="pcm", extra_body={**options, **more}
        )
        assert answer.response.headers["x-sample-rate"] == "24000"
        assert len(answer.content) == 2 * 3 * 30 * 320


def test_items_of_a_batch_succeed_or_fail_alone(server: RunningServer) -> None:
    speech = {"model": "toy", "input": "one two", "response_format": "wav", "seed": 3}
    bad: list[dict[str, Any]] = [{"input": " "}, {"voice": "nobody"}, {"stream": True}, {"model": "echo"}]
    items = [{**speech, **more} for more in ({}, *bad, {"voice": "anna"})]
    rows = server.post("/v1/audio/speech/batch", json={"items": items}).json()["data"]
    assert [row["status"] for row in rows] == [200, 400, 400, 400, 400, 200]
    assert [row["error"]["param"] for row in rows[1:-1]] == ["input", "voice", "stream_format", "model"]
    for row, speaker in ((rows[0], None), (rows[-1], "anna")):
        expected = server.generator.speak("one two", seed=3, speaker=speaker).samples_1N
        assert base64.b64decode(row["audio"]) == encode_sound(expected, RATE, "wav")


def test_voices_are_added_used_and_removed(server: RunningServer, client: openai.OpenAI) -> None:
    wav = voice_wav()
    added = client.audio.voices.create(
        audio_sample=("me.wav", wav), consent="recorded by myself", name="me", extra_body={"text": "one two"}
    )
    assert (added.id, added.consent, added.text) == ("me", "recorded by myself", "one two")
    listed = server.client().get("/audio/voices", cast_to=object)
    assert [voice["id"] for voice in listed["data"]] == ["default", "anna", "bruno", "me"]
    reference = server.generator.voice(load_bytes(wav), "one two")
    expected = pcm16(server.generator.speak("hello", reference=reference, seed=2).samples_1N)
    spoken = client.audio.speech.create(
        model="toy", input="hello", voice={"id": "me"}, response_format="pcm", extra_body={"seed": 2}
    )
    uri = "data:audio/wav;base64," + base64.b64encode(wav).decode()
    for ref_audio in (uri, uri.partition(",")[2]):
        cloned = client.audio.speech.create(
            model="toy", input="hello", voice=openai.omit, response_format="pcm",
            extra_body={"seed": 2, "ref_audio": ref_audio, "ref_text": "one two"},
        )  # fmt: skip
        assert cloned.content == spoken.content == expected
    assert len(server.state.models["toy"]._voices) == 1  # encoded once
    dialogue = client.audio.speech.create(
        model="toy", input=SCRIPT, voice=openai.omit, response_format="wav",
        extra_body={"seed": 5, "dialogue": True, "voices": {"0": "me"}},
    )  # fmt: skip
    speech = server.generator.dialogue(SCRIPT, references={"0": reference}, seed=5)
    assert dialogue.content == encode_sound(speech.samples_1N, RATE, "wav")
    assert "no reference for SPEAKER1" in dialogue.response.headers["x-notes"]
    again = refusal(client.audio.voices.create, audio_sample=("me.wav", wav), consent="yes", name="me")
    assert again["param"] == "name"
    assert client.delete("/audio/voices/me", cast_to=object) == {
        "id": "me", "object": "audio.voice", "deleted": True,
    }  # fmt: skip
    refused = refusal(client.audio.speech.create, model="toy", input="hello", voice="me")
    assert refused["param"] == "voice" and "known: anna, bruno, default" in refused["message"]


def transcript(server: RunningServer, waveform: Waveform, question: str = "Transcribe the speech.") -> str:
    messages = [Message(role="user", content=[AudioPart(path="a"), TextPart(text=question)])]
    audio = [server.generator.encode_input_audio(waveform)]
    greedy = SamplingConfig(temperature=0.0)
    request = Request(messages, 0, audio, greedy, Limits(750, LIMITS.answer_tokens), "text")
    return server.generator.answer_all([request])[0].text.strip()


def test_transcripts_in_every_form(server: RunningServer, client: openai.OpenAI) -> None:
    wav = voice_wav()
    text = transcript(server, load_bytes(wav))
    create = client.audio.transcriptions.create
    assert text and create(model="toy", file=("a.wav", wav)).text == text
    assert create(model="toy", file=("a.wav", wav), response_format="text") == f"{text}\n"
    verbose = create(
        model="toy", file=("a.wav", wav), response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert verbose.text == text and verbose.duration == 2.0
    assert [(segment.start, segment.end, segment.text) for segment in verbose.segments or ()] == [
        (0.0, 2.0, text)
    ]
    srt = create(model="toy", file=("a.wav", wav), response_format="srt")
    assert srt == f"1\n00:00:00,000 --> 00:00:02,000\n{text}\n"
    vtt = create(model="toy", file=("a.wav", wav), response_format="vtt")
    assert vtt == f"WEBVTT\n\n00:00:00.000 --> 00:00:02.000\n{text}\n"
    events = list(create(model="toy", file=("a.wav", wav), stream=True))
    assert events[-1].type == "transcript.text.done" and events[-1].text == text
    assert "".join(event.delta for event in events[:-1]).strip() == text and len(events) > 3
    german = create(model="toy", file=("a.wav", wav), language="German")
    assert german.text == transcript(server, load_bytes(wav), "Transcribe the speech. Language: German.")
    both = {"response_format": "verbose_json", "timestamp_granularities": ["word"]}
    word = refusal(create, model="toy", file=("a.wav", wav), language="German", **both)
    assert word["param"] == "timestamp_granularities" and word["code"] == "words_not_placed"
    assert "does not know the words of 'de'" in word["message"] and "ask for segment" in word["message"]


def test_words_with_their_times(client: openai.OpenAI) -> None:
    """What Pocketsphinx says of two words that were put into silence by hand."""
    with Espeak() as espeak:
        seven_N, three_N = (torch.from_numpy(espeak.speak(word, "en-us")) for word in ("seven", "three"))
    pause_N = torch.zeros(SAMPLE_RATE // 2)
    wav = encode_sound(torch.cat([pause_N, seven_N, pause_N, three_N, pause_N])[None], SAMPLE_RATE, "wav")
    expected_s = [0.5, 1.0 + len(seven_N) / SAMPLE_RATE]
    create = client.audio.transcriptions.create
    asked: dict[str, Any] = {"model": "scribe", "file": ("a.wav", wav), "response_format": "verbose_json"}
    answer = create(**asked, timestamp_granularities=["word"])
    assert answer.text == "Seven, three!" and not answer.segments
    words = answer.words or []
    assert [word.word for word in words] == ["Seven,", "three!"]
    assert all(abs(word.start - start_s) < 0.1 for word, start_s in zip(words, expected_s, strict=True))
    assert all(word.start < word.end <= answer.duration for word in words)
    both = create(**asked, timestamp_granularities=["word", "segment"])
    assert both.words == words and [segment.text for segment in both.segments or ()] == ["Seven, three!"]
    short = encode_sound(seven_N[None, :1500], SAMPLE_RATE, "wav")
    misfit = refusal(create, **{**asked, "file": ("a.wav", short)}, timestamp_granularities=["word"])
    assert misfit["code"] == "words_not_placed" and "between 0.0 and 0.1 s do not fit" in misfit["message"]


def test_translations(server: RunningServer, client: openai.OpenAI) -> None:
    """The question names the language; a model that was trained for other tasks is refused by name."""
    create, file = client.audio.translations.create, ("a.wav", voice_wav())
    assert create(model="echo", file=file).text == "2.0 s Translate what is said into English."
    other = create(
        model="echo", file=file, response_format="verbose_json", extra_body={"target_language": "Portuguese"}
    )
    assert other.text.endswith("into Portuguese.") and other.language == "Portuguese"
    assert [(segment.start, segment.end) for segment in other.segments or ()] == [(0.0, 2.0)]
    srt = create(model="echo", file=file, response_format="srt")
    assert str(srt).startswith("1\n00:00:00,000 --> 00:00:02,000\n2.0 s Translate")
    refused = refusal(create, model="scribe", file=file)
    assert refused["code"] == "model_cannot_translate" and "scribe was trained for asr" in refused["message"]
    refused = refusal(create, model="echo", file=file, prompt="before")
    assert refused["param"] == "prompt"


def test_a_model_that_learned_to_speak_alone_does_not_hear(server: RunningServer) -> None:
    """It takes recordings as voices, and has no words for them."""
    model = replace(server.state.models["toy"], tasks=frozenset({"tts", "clone"}))
    assert model.speaks and not model.hears
    assert replace(model, tasks=frozenset({"tts", "asr"})).hears


def test_a_long_recording_is_cut_and_joined(server: RunningServer, client: openai.OpenAI) -> None:
    seconds = 27.0
    samples_1N = a_voice(seconds).samples_CN.clone()
    samples_1N[:, 20 * RATE : 20 * RATE + 800] = 0.0
    wav = encode_sound(samples_1N, RATE, "wav")
    cut = client.audio.transcriptions.create(
        model="echo", file=("a.wav", wav), response_format="verbose_json"
    )
    spans = [(segment.start, segment.end) for segment in cut.segments or ()]
    assert spans[0][0] == 0.0 and 20.0 < spans[0][1] == spans[1][0] < 20.1 and spans[1][1] == seconds
    assert cut.text == "20.0 s Transcribe the speech. 7.0 s Transcribe the speech."
    silent = encode_sound(torch.zeros(1, RATE), RATE, "wav")
    assert client.audio.transcriptions.create(model="toy", file=("a.wav", silent)).text == ""


def test_chats_in_words_and_speech(server: RunningServer, client: openai.OpenAI) -> None:
    wav = voice_wav()
    audio = {"data": base64.b64encode(wav).decode(), "format": "wav"}
    content: Any = [{"type": "input_audio", "input_audio": audio}, {"type": "text", "text": "three"}]
    messages: Any = [{"role": "system", "content": "one"}, {"role": "user", "content": content}]
    options: Any = {"model": "toy", "messages": messages, "temperature": 1.0, "seed": 3, "max_tokens": 30}
    words = client.chat.completions.create(**options).choices[0]
    prompt = [
        Message(role="system", content=[TextPart(text="one")]),
        Message(role="user", content=[AudioPart(path="a"), TextPart(text="three")]),
    ]
    heard = [server.generator.encode_input_audio(load_bytes(wav))]
    plain = SamplingConfig(temperature=1.0, top_p=1.0)
    (expected,) = server.generator.answer_all([Request(prompt, 3, heard, plain, Limits(750, 30), "text")])
    assert words.message.content == expected.text.strip() and words.finish_reason == "length"
    deltas = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in deltas[:-1]) == expected.text
    assert deltas[-1].usage is not None and deltas[-1].usage.prompt_tokens > 20
    spoken = client.chat.completions.create(
        **options, modalities=["audio"], extra_body={"audio": {"format": "wav"}}
    ).choices[0]
    defaults = server.generator.defaults.over(temperature=1.0, text_guidance=1.0, speaker_guidance=1.0)
    request = Request(prompt, 3, heard, defaults.sampling, Limits(750, 30), "audio")
    (answer,) = server.generator.answer_all([request])
    assert spoken.message.audio is not None
    sound = load_bytes(base64.b64decode(spoken.message.audio.data))
    decoded_1N = server.generator.codec.decode(answer.codes_KT)
    assert torch.equal(sound.samples_CN, load_bytes(encode_sound(decoded_1N, RATE, "wav")).samples_CN)
    chunks = list(client.chat.completions.create(**options, modalities=["audio"], stream=True))
    pieces = [getattr(chunk.choices[0].delta, "audio", None) for chunk in chunks]
    events = stream_audio(server.generator.engine([request]).stream(request), server.generator.codec)
    sound_1N = torch.cat([piece.samples_1N for piece in events], dim=1)
    assert b"".join(base64.b64decode(piece.data) for piece in pieces if piece) == pcm16(sound_1N)


def test_a_model_that_answers_in_words_alone(client: openai.OpenAI) -> None:
    def ask(text: str) -> Any:
        return client.chat.completions.create(model="echo", messages=[{"role": "user", "content": text}])

    assert ask("hello").choices[0].message.content == "hello"
    chunks = client.chat.completions.create(
        model="echo", messages=[{"role": "user", "content": "hello"}], stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == " hello "
    for text in ("refuse", "fail"):
        assert refusal(lambda text=text: ask(text))["type"] == "invalid_request_error"
    assert ask("again").choices[0].message.content == "again"
    spoken = refusal(client.audio.speech.create, model="echo", input="hello", voice="default")
    assert spoken["param"] == "model" and spoken["code"] == "model_cannot_speak"
    messages: Any = [{"role": "user", "content": "hello"}]
    asked = refusal(
        client.chat.completions.create, model="echo", messages=messages, modalities=["text", "audio"]
    )
    assert asked["code"] == "model_cannot_speak"


@pytest.mark.parametrize("requests", [24, pytest.param(64, marks=pytest.mark.slow)])
def test_many_at_once_get_what_each_gets_alone(server: RunningServer, requests: int) -> None:
    """Speech whole and streamed, dialogues, transcripts and chats beside each other; every sixth is cancelled."""
    wav = voice_wav()

    async def ask(client: openai.AsyncOpenAI, number: int) -> Any:
        kind, options = number % 6, {"seed": number, "max_new_tokens": 50}
        if kind in (0, 1, 2):
            more: dict[str, Any] = [{}, {"stream_format": "audio"}, {"dialogue": True}][kind]
            answer = await client.audio.speech.create(
                model="toy", input=(LONG, LONG, SCRIPT)[kind], voice=openai.omit, response_format="pcm",
                extra_body={**options, **more},
            )  # fmt: skip
            return answer.content
        if kind == 3:
            return (await client.audio.transcriptions.create(model="toy", file=("a.wav", wav))).text
        if kind == 4:
            answer = await client.chat.completions.create(
                model="toy", messages=[{"role": "user", "content": "three"}], seed=number, temperature=1.0,
                max_tokens=20,
            )  # fmt: skip
            return answer.choices[0].message.content
        leaving = asyncio.create_task(ask(client, number - 4))
        await asyncio.sleep(0.05 * (number % 5))
        leaving.cancel()
        return None

    async def ask_all() -> list[Any]:
        async with openai.AsyncOpenAI(**server.client_options()) as client:
            return list(await asyncio.gather(*(ask(client, number) for number in range(requests))))

    answers = asyncio.run(ask_all())
    text = transcript(server, load_bytes(wav))
    generator = server.generator
    for number, answer in enumerate(answers):
        kind, options = number % 6, {"seed": number, "max_duration_s": 2.0}
        if kind == 0:
            assert answer == pcm16(generator.speak(LONG, **options).samples_1N)
        elif kind == 1:
            assert answer == pcm16(streamed_sound(generator, LONG, **options))
        elif kind == 2:
            assert answer == pcm16(generator.dialogue(SCRIPT, **options).samples_1N)
        elif kind == 3:
            assert answer == text
        elif kind == 4:
            messages = [Message(role="user", content=[TextPart(text="three")])]
            sampling = SamplingConfig(temperature=1.0, top_p=1.0)
            request = Request(messages, number, [], sampling, Limits(750, 20), "text")
            assert answer == (generator.answer_all([request])[0].text.strip() or None)
    wait_for(server.is_idle)


def test_added_voices_stay_in_their_folder(tmp_path: Path) -> None:
    store = VoiceStore(tmp_path / "voices")
    store.add("me", Reference.of(a_voice(1.0), "one two", "en"), "by myself")
    (voice,) = VoiceStore(tmp_path / "voices").voices()
    assert (voice.name, voice.consent, voice.reference.text) == ("me", "by myself", "one two")
    assert voice.reference.waveform.duration_s == 1.0
    store.remove("me")
    assert not [*(tmp_path / "voices").iterdir()]
