"""Requests that stay open: the live loop does what one forward pass over the whole stream says, token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from test_generation_engine import BOOKS, SIZE, random_model, request
from test_generation_engine import template as template
from torch import Tensor

from audiollm.data.chat.delay import IGNORE
from audiollm.data.chat.template import Template
from audiollm.data.packing import pack
from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.families.dual_ffn.sampled_streams import SampledStream, encode_sampled_contents
from audiollm.families.prompts import PromptedContents
from audiollm.generation.engine.engine import Engine
from audiollm.generation.engine.request import Acted, Finished, Limits, OpenRequest, SampledTokens
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.generation.engine.state import Marks, forbidden_codes, forbidden_words
from audiollm.models.cache import Cache
from audiollm.models.dual_ffn import DualFFN

WINDOW = 20
GREEDY = SamplingConfig(temperature=0, top_p=1.0, text_guidance=1, speaker_guidance=1)
SAMPLED = SamplingConfig(temperature=1, top_p=1.0, text_guidance=1, speaker_guidance=1)
LIMITS = Limits(max_frames=2, max_text_tokens=3)


@pytest.fixture(scope="module")
def model(template: Template) -> DualFFN:
    """Forgets: most streams of these tests are several windows long. It ends its actions often, and opens speech."""
    made = random_model(template, sliding_window=WINDOW)
    with torch.no_grad():
        made.text_lm_head.weight[Marks.of(template).opens_speech] /= 2
    return made


def opened(
    number: int, sampling: SamplingConfig = SAMPLED, answer: str = "any", record: bool = True
) -> OpenRequest:
    system = Message(role="system", content=[TextPart(text="one two " * (1 + number % 3))])
    return OpenRequest([system], number, (), sampling, LIMITS, answer, record)  # type: ignore[arg-type]


def recording(number: int) -> Tensor:
    draw = torch.Generator().manual_seed(number)
    return torch.randint(SIZE, (BOOKS, 8 + int(torch.randint(40, (1,), generator=draw))), generator=draw)


def cut(codes_KT: Tensor, draw: random.Random) -> list[Tensor]:
    """Chunks of random lengths."""
    chunks, start = [], 0
    while start < codes_KT.shape[1]:
        length = draw.randint(1, 12)
        chunks.append(codes_KT[:, start : start + length])
        start += length
    return chunks


def interpret(
    engine: Engine, requests: Sequence[OpenRequest], chunks: Sequence[Sequence[Tensor]]
) -> tuple[list[list[Acted]], list[SampledTokens | None]]:
    """Run streams side by side: each is fed its next chunk as soon as it has acted, and closed after its last."""
    found = interpret_beside(engine, requests, chunks)
    assert not engine.busy
    return found


def interpret_beside(
    engine: Engine, requests: Sequence[OpenRequest], chunks: Sequence[Sequence[Tensor]]
) -> tuple[list[list[Acted]], list[SampledTokens | None]]:
    """Run streams side by side in an engine that may have other requests."""
    numbers = [engine.open(each) for each in requests]
    left = [list(each) for each in chunks]
    done: dict[int, list[Acted]] = {number: [] for number in numbers}
    tokens: dict[int, SampledTokens | None] = {}
    for number, own in zip(numbers, left, strict=True):
        engine.feed(number, own.pop(0))
    while engine.acting:
        for event in engine.step():
            if isinstance(event, Acted):
                done[event.request].append(event)
                own = left[numbers.index(event.request)]
                if own:
                    engine.feed(event.request, own.pop(0))
                else:
                    tokens[event.request] = engine.close(event.request)
    return [done[number] for number in numbers], [tokens[number] for number in numbers]


def offline(template: Template, asked: OpenRequest, tokens: SampledTokens) -> SampledStream:
    """The stream as training lays it out: chunks of the recording, which is the last message, and the actions."""
    heard_KT = torch.cat([heard_KT for _, heard_KT in tokens.input_frames], 1)
    heard = Message(role="user", content=[AudioPart(path="heard.wav")])
    prompted = PromptedContents("a", [*asked.messages, heard], (heard_KT,), (), chunk_frames=1)
    (stream,) = encode_sampled_contents(template, prompted, [tokens], None, 10_000)
    return stream


def offline_logits(
    model: DualFFN, template: Template, stream: SampledStream
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Masked logits and targets of all actions of one forward pass: of text, then of codes."""
    batch = pack([stream])
    with torch.no_grad():
        hidden_SC = model(batch)
    own = batch.text_weights > 0
    words = forbidden_words(template, model.config.vocab_size)[stream.kind]
    text = model.text_logits(hidden_SC[batch.text_target_index[own]]).masked_fill(words, -torch.inf)
    spoken = batch.audio_weights_XK.sum(1) > 0
    audio = model.audio_logits(hidden_SC[batch.audio_target_index[spoken]])
    later_KV, first_KV = forbidden_codes(Marks.of(template), SIZE + 2)
    codes_YK = batch.codes_YK[batch.audio_target_index[spoken] - batch.num_text]
    is_first = (codes_YK == template.audio_bos).all(1)
    masks = torch.where(is_first[:, None, None], first_KV, later_KV)
    return text, batch.text_targets[own], audio.masked_fill(masks, -torch.inf), batch.audio_targets_XK[spoken]


def test_greedy_actions_are_those_of_one_forward_pass(model: DualFFN, template: Template) -> None:
    """Over 100 streams of random lengths, cut at random: what was heard and every token agree."""
    draw = random.Random(0)
    silent = spoke = sounded = 0
    for batch in range(5):
        numbers = range(20 * batch, 20 * batch + 20)
        requests = [opened(number, GREEDY) for number in numbers]
        chunks = [cut(recording(number), draw) for number in numbers]
        engine = Engine(model, template, slots=20, max_length=64)
        actions, tokens = interpret(engine, requests, chunks)
        for number, asked, own, found in zip(numbers, requests, actions, tokens, strict=True):
            assert found is not None
            assert found.logprob_A is None
            assert torch.equal(torch.cat([heard for _, heard in found.input_frames], 1), recording(number))
            stream = offline(template, asked, found)
            text, words, audio, codes = offline_logits(model, template, stream)
            assert torch.equal(text.argmax(-1), words)
            is_code = codes != IGNORE
            assert torch.equal(audio.argmax(-1)[is_code], codes[is_code])
            silent += sum(not each.parts for each in own)
            spoke += sum(bool(each.text) for each in own)
            sounded += sum(any(isinstance(part, Tensor) for part in each.parts) for each in own)
    assert min(silent, spoke, sounded) > 50


def test_behaviour_log_probabilities_are_those_of_the_update(model: DualFFN, template: Template) -> None:
    draw = random.Random(1)
    requests = [opened(number) for number in range(8)]
    beyond = 0
    engine = Engine(model, template, slots=8, max_length=64)
    _, tokens = interpret(engine, requests, [cut(recording(number), draw) for number in range(8)])
    for asked, found in zip(requests, tokens, strict=True):
        assert found is not None
        stream = offline(template, asked, found)
        beyond += len(stream) > stream.pinned_rows + 2 * WINDOW
        text, words, audio, codes = offline_logits(model, template, stream)
        expected = [text.log_softmax(-1).gather(1, words[:, None])[:, 0]]
        is_code = codes != IGNORE
        expected.append(audio.log_softmax(-1).gather(2, codes.clamp(min=0)[..., None])[..., 0][is_code])
        assert found.logprob_A is not None
        assert found.num_actions == len(found.logprob_A)
        # the order differs, the values do not
        assert torch.allclose(found.logprob_A.double().sort()[0], torch.cat(expected).sort()[0], atol=1e-5)
    assert beyond > 1


def test_many_streams_at_once_are_each_as_alone(model: DualFFN, template: Template) -> None:
    draw = random.Random(2)
    requests = [opened(number) for number in range(5)]
    chunks = [cut(recording(number), draw) for number in range(5)]
    together, _ = interpret(Engine(model, template, slots=3, max_length=64), requests, chunks)
    for asked, own, found in zip(requests, chunks, together, strict=True):
        ((alone,), _) = interpret(Engine(model, template, slots=1, max_length=60), [asked], [own])
        assert [said(each) for each in alone] == [said(each) for each in found]


def test_a_prompt_that_another_stream_has_is_copied(
    model: DualFFN, template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long after that stream has forgotten what followed its prompt; another prompt is not copied."""
    copied: list[int] = []
    copy = Cache.copy

    def counted(cache: Cache, source: int, target: int, filled: int) -> None:
        copied.append(filled)
        copy(cache, source, target, filled)

    monkeypatch.setattr(Cache, "copy", counted)
    engine = Engine(model, template, slots=3, max_length=64)
    first = engine.open(opened(1))
    for place in range(12):
        engine.feed(first, recording(place)[:, :8])
        while engine.acting:
            engine.step()
    ((late,), _) = interpret_beside(engine, [opened(4)], [[recording(4)]])
    assert copied == [len(template.stream_prompt(opened(1).messages, ()))]
    ((alone,), _) = interpret(Engine(model, template, slots=1, max_length=64), [opened(4)], [[recording(4)]])
    assert [said(each) for each in late] == [said(each) for each in alone]
    interpret_beside(engine, [opened(2)], [[recording(2)]])
    assert len(copied) == 1


def said(action: Acted) -> list[object]:
    return [part if isinstance(part, str) else part.tolist() for part in action.parts]


def test_another_chunk_changes_no_action_before_it(model: DualFFN, template: Template) -> None:
    chunks = cut(recording(3), random.Random(5))
    engine = Engine(model, template, slots=2, max_length=64)
    ((before,), _) = interpret(engine, [opened(1)], [chunks])
    place = len(chunks) // 2
    changed = [*chunks[:place], (chunks[place] + 1) % SIZE, *chunks[place + 1 :]]
    ((after,), _) = interpret(engine, [opened(1)], [changed])
    assert [said(each) for each in before[:place]] == [said(each) for each in after[:place]]
    assert [said(each) for each in before] != [said(each) for each in after]


def test_answers_to_prompts_run_beside_open_requests(model: DualFFN, template: Template) -> None:
    asked = request(2, sampling=SAMPLED, answer="any", record_tokens=True)
    alone = Engine(model, template, slots=4, max_length=110).run([asked])[0]
    engine = Engine(model, template, slots=4, max_length=110)
    number = engine.submit(asked)
    stream = engine.open(opened(4))
    engine.feed(stream, recording(4))
    answers = []
    while engine.acting:
        answers += [
            each.answer for each in engine.step() if isinstance(each, Finished) and each.request == number
        ]
    assert answers[0].text == alone.text
    assert torch.equal(answers[0].codes_KT, alone.codes_KT)


def test_a_bias_on_silence_silences(model: DualFFN, template: Template) -> None:
    asked = replace(opened(2, record=False), silence_bias=1e4)
    chunks = cut(recording(2), random.Random(1))
    ((actions,), tokens) = interpret(Engine(model, template, slots=1, max_length=64), [asked], [chunks])
    assert all(not each.parts and each.reason == "end" for each in actions)
    assert tokens == [None]


def test_what_cannot_be_is_refused(model: DualFFN, template: Template) -> None:
    engine = Engine(model, template, slots=2, max_length=64)
    with pytest.raises(ValueError, match="guidance"):
        engine.open(opened(0, replace(SAMPLED, text_guidance=2.0), record=False))
    with pytest.raises(ValueError, match="may be silent"):
        engine.open(opened(0, answer="audio"))
    with pytest.raises(ValueError, match="silence_bias"):
        engine.open(replace(opened(0), silence_bias=1.0))
    with pytest.raises(ValueError, match="no open request 7"):
        engine.feed(7, recording(0))
    number = engine.open(opened(0))
    engine.feed(number, recording(0)[:, :3])
    with pytest.raises(ValueError, match="still acting"):
        engine.feed(number, recording(0))
    with pytest.raises(ValueError, match="still acting"):
        engine.close(number)
    engine.cancel(number)
    assert not engine.busy
    full = Engine(random_model(template), template, slots=1, max_length=40)  # no window: nothing is forgotten
    number = full.open(opened(0))
    with pytest.raises(ValueError, match="is full"):
        full.feed(number, torch.zeros(BOOKS, 60, dtype=torch.long))


def test_a_chat_with_a_recording_can_be_the_prefix(model: DualFFN, template: Template) -> None:
    heard = Message(role="user", content=[AudioPart(path="voice.wav")])
    asked = replace(opened(1), messages=[*opened(1).messages, heard], audio=[recording(9)[:, :3]])
    ((actions,), _) = interpret(Engine(model, template, slots=1, max_length=64), [asked], [[recording(1)]])
    assert len(actions) == 1
