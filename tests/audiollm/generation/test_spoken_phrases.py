"""Answers in phrases: what the engine says, step by step, is what one forward pass over the layout of training says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_generation_engine import BOOKS, GREEDY, LIMITS, SIZE, random_model, request
from test_generation_engine import template as template
from toy_speech import requests_of, toy_generator

from audiollm.data.chat.conditions import without_conditions
from audiollm.data.chat.delay import IGNORE
from audiollm.data.chat.template import Template
from audiollm.data.packing import pack
from audiollm.data.records.sample import AudioPart, Message, RecordedPhrase
from audiollm.data.text.phrases import PhraseLayout
from audiollm.generation.engine.engine import Engine
from audiollm.generation.engine.request import Answer, Frames, Request, SpokenPhrase
from audiollm.generation.engine.sampling import SamplingConfig, guide
from audiollm.models.dual_ffn import DualFFN

GUIDED = replace(GREEDY, text_guidance=2.0, speaker_guidance=1.5)
PHRASES = (SpokenPhrase("one two", 6), SpokenPhrase("three", 9), SpokenPhrase("two three one", 4))


@pytest.fixture(scope="module")
def model(template: Template) -> DualFFN:
    """Ends its phrases now and then."""
    model = random_model(template)
    with torch.no_grad():
        model.audio_lm_head.weight[SIZE + 1] *= 3  # EOS of the first codebook
    return model


def branch_logits(
    model: DualFFN, template: Template, asked: Request, answer: Answer, hidden: tuple[bool, bool]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `[Y, K, V]` and targets `[Y, K]` of the answer's codes, laid out as in training, without conditions."""
    ends = torch.tensor([part.shape[1] for part in answer.parts if isinstance(part, torch.Tensor)]).cumsum(0)
    phrases = [
        RecordedPhrase(text=phrase.text, end_s=float(end))
        for phrase, end in zip(asked.phrases, ends, strict=True)
    ]
    turn = Message(role="assistant", content=[AudioPart(path="a.wav")], phrases=phrases)
    messages, audio = without_conditions([*asked.messages, turn], [*asked.audio, answer.codes_KT], *hidden)
    batch = pack([template.compile(messages, audio)])
    with torch.no_grad():
        hidden_SC = model(batch)
    is_target = batch.audio_weights_XK.sum(1) > 0
    logits_YKV = model.audio_logits(hidden_SC[batch.audio_target_index[is_target]]).float()
    return logits_YKV, batch.audio_targets_XK[is_target]


@pytest.mark.parametrize("sampling", [GREEDY, GUIDED], ids=["greedy", "guided"])
def test_phrases_are_said_as_one_forward_pass_says_them(
    model: DualFFN, template: Template, sampling: SamplingConfig
) -> None:
    """Beside each other, in few slots, and beside an answer without phrases; each phrase ends for itself."""
    asked = [request(n, sampling=sampling, phrases=PHRASES[n % 2 :]) for n in range(5)]
    plain = request(5, sampling=sampling)
    *answers, beside = Engine(model, template, slots=7, max_length=200).run([*asked, plain])
    alone = Engine.sized_for(model, template, [plain]).run([plain])[0]
    assert torch.equal(beside.codes_KT, alone.codes_KT)
    ended = []
    for one, answer in zip(asked, answers, strict=True):
        assert len(answer.parts) == len(one.phrases)
        sides = [branch_logits(model, template, one, answer, hidden) for hidden in sampling.branches]
        logits_YKV, targets_YK = sides[0]
        if len(sides) > 1:
            logits_YKV = guide(logits_YKV, sides[1][0], sides[2][0], sampling)
        logits_YKV[:, :, SIZE] = -torch.inf
        is_code_YK = (targets_YK != IGNORE) & (targets_YK != SIZE + 1)
        codes_YK = logits_YKV[:, :, :SIZE].argmax(-1)
        assert torch.equal(codes_YK[is_code_YK], targets_YK[is_code_YK])
        frames = [part.shape[1] for part in answer.parts if isinstance(part, torch.Tensor)]
        limits = [phrase.max_frames for phrase in one.phrases]
        assert all(count <= limit for count, limit in zip(frames, limits, strict=True))
        ended += [count < limit for count, limit in zip(frames, limits, strict=True)]
        if answer.stopped:
            last = logits_YKV[targets_YK[:, 0] == SIZE + 1][:, 0].argmax(-1)
            assert (last == SIZE + 1).all()
    assert any(ended) and not all(ended)


def test_phrases_are_one_stretch_of_speech(model: DualFFN, template: Template) -> None:
    """Frames are told as they are made, the same as in the answer, and a limit on all phrases holds."""
    asked = request(1, phrases=PHRASES)
    *events, last = Engine.sized_for(model, template, [asked]).stream(asked)
    frames = [event for event in events if isinstance(event, Frames)]
    assert {event.stretch for event in frames} == {0}
    assert torch.equal(torch.cat([event.codes_KT for event in frames], dim=1), last.answer.codes_KT)  # type: ignore[union-attr]
    short = request(1, phrases=PHRASES, limits=replace(LIMITS, max_frames=3))
    answer = Engine.sized_for(model, template, [short]).run([short])[0]
    assert answer.codes_KT.shape == (BOOKS, 3)
    assert not answer.stopped


@pytest.mark.parametrize(
    "change",
    [{"answer": "any"}, {"record_tokens": True, "sampling": replace(GREEDY, temperature=1, top_p=1)}],
)
def test_phrases_of_other_answers_are_refused(
    model: DualFFN, template: Template, change: dict[str, object]
) -> None:
    with pytest.raises(ValueError, match="phrases are said by an answer in speech alone"):
        Engine(model, template, 1, 200).submit(request(0, phrases=PHRASES, **change))


def test_a_text_is_said_in_the_phrases_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request has them, and a stream is the same speech, decoded as one."""
    toy = toy_generator()
    toy.phrase_layout = PhraseLayout(2)
    asked = requests_of(monkeypatch, toy)
    speech = toy.speak("One two three, [laugh] hello 2.", speaker="anna", seed=3)
    assert [phrase.text for phrase in asked[0].phrases] == ["One", "two three,", "hello two."]
    pieces = [
        piece.samples_CN for piece in toy.stream("One two three, [laugh] hello 2.", speaker="anna", seed=3)
    ]
    streamed_1N = torch.cat(pieces, dim=1)
    inner = slice(200, -200)  # but for the fades at both ends
    assert torch.allclose(streamed_1N[:, inner], speech.samples_1N[:, inner], atol=1e-3)


def test_a_model_of_phonemes_reads_every_text_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that a phrase may take is that of its words, and not of the longer phonemes."""
    toy, limits = toy_generator(), {}
    for pronunciation in (None, "espeak:en-us"):
        toy.phrase_layout = PhraseLayout(2, pronunciation)
        asked = requests_of(monkeypatch, toy)
        toy.speak("One two three", speaker="anna", seed=3)
        limits[pronunciation] = [phrase.max_frames for phrase in asked[0].phrases]
    assert [phrase.text for phrase in asked[0].phrases] == ["w ˌʌ n", "t ˈuː | θ ɹ ˈiː"]
    assert limits[None] == limits["espeak:en-us"]
