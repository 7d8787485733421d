"""The step `description`: gates against transformers' CLAP and a likelihood by hand; what is accepted, asked again, or
refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from pydantic import ValidationError
from tokenizers import Tokenizer, models, pre_tokenizers

from audiollm.audio import Waveform, save
from audiollm.data.chat.template import Template
from audiollm.data.hearing.features import mel_features
from audiollm.data.packing import pack
from audiollm.data.records.sample import Message, TextPart
from audiollm.data.text.tokenizer import train_text_tokenizer
from audiollm.errors import ConfigError
from audiollm.families.dual_ffn.answering import DualFFNAnswers
from audiollm.families.dual_ffn.losses import token_losses
from audiollm.generation.speaking.generator import Generator
from audiollm.models.audio_encoder import AudioEncoderConfig
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from pipelines.annotate.step import RecordingMetadata, Segment
from pipelines.annotate.steps.description import (
    ClapGate,
    Description,
    DescriptionConfig,
    GateResult,
    SelfGate,
    counterfactual_sounds,
    joined,
    labels_of,
)
from pipelines.steps.step import Listener

RATE = 16_000
ENCODER = AudioEncoderConfig(32, 2, 2, 48, num_mel_bins=20, max_source_positions=60)
HEARD = {"events": {"events": [], "tags": [{"label": "Dog", "score": 0.7}, {"label": "Rain", "score": 0.2}]}}


def sound(hz: float, seconds: float = 0.5) -> Waveform:
    """A tone; 0: noise."""
    noise = torch.randn(1, round(seconds * RATE), generator=torch.Generator().manual_seed(0))
    tone = torch.sin(2 * math.pi * hz * torch.arange(noise.shape[1]) / RATE)[None]
    return Waveform(0.3 * tone + 0.003 * noise if hz else 0.1 * noise.clamp(-3, 3), RATE)


def segment(wave: Waveform, tmp_path: Path, kind: Any = "speech", values: Any = None) -> Segment:
    path = tmp_path / "clip.wav"
    save(path, wave.samples_CN, wave.sample_rate)
    return Segment(
        str(path), 0.0, wave.duration_s, kind, None, RecordingMetadata(), values or {}, Listener(str(path))
    )


# ---------------------------------------------------------------------------------------------- our own


def untrained() -> Generator:
    texts = ["system user assistant describe this recording what is heard a tone is heard some noise"] * 3
    template = Template(train_text_tokenizer(texts, 300), 3, 16)
    torch.manual_seed(0)
    model = DualFFN(
        DualFFNConfig(
            template.tokenizer.get_vocab_size(),
            num_codebooks=3,
            codebook_size=18,
            hidden_size=32,
            num_layers=2,
            num_heads=2,
            num_kv_heads=2,
            head_dim=16,
            intermediate_size=64,
            audio_encoder=ENCODER,
        )
    )
    return Generator(model, None, template)


def asked(generator: Generator, wave: Waveform, answer: str) -> Any:
    messages = generator.question(wave, "Describe this recording.").messages
    said = Message(role="assistant", content=[TextPart(text=answer)])
    return generator.template.compile([*messages, said], [generator.encode_input_audio(wave)])


@pytest.fixture(scope="module")
def listener() -> Generator:
    """Has learnt to tell tones from noise, and to call silence neither."""
    generator = untrained()
    clips = [(sound(hz), "a tone is heard") for hz in (200, 400, 700, 1500, 3000)]
    clips += [(sound(0, seconds), "some noise") for seconds in (0.4, 0.5, 0.6, 0.7)]
    streams = [asked(generator, wave, text) for wave, text in clips]
    optimizer = torch.optim.Adam(generator.model.parameters(), 3e-3)
    generator.model.train()
    for _ in range(90):
        batch = pack(streams, encoder=ENCODER.features)
        loss = token_losses(generator.model, generator.model(batch), batch)["text"] / len(streams)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    generator.model.eval()
    assert float(loss.detach()) < 0.2, "it has learnt it"
    return generator


def test_a_likelihood_is_that_of_the_logits(listener: Generator) -> None:
    wave, text = sound(500), "a tone is heard"
    batch = pack([asked(listener, wave, text)], normalization="token", encoder=ENCODER.features)
    with torch.no_grad():
        hidden_XC = listener.model(batch)[batch.text_target_index]
        log_probs_XV = torch.log_softmax(hidden_XC @ listener.model.text_lm_head.weight.T, dim=1)
    keep_X = batch.text_weights > 0
    each_X = log_probs_XV.gather(1, batch.text_targets[:, None])[:, 0][keep_X]
    assert len(each_X) > 3
    gate = SelfGate(DualFFNAnswers(listener, Path("listener"), ""))
    pairs = [("Describe this recording.", text)]
    assert gate.log_probability(wave, pairs) == pytest.approx(float(each_X.mean()), abs=1e-5)
    twice = gate.log_probability(wave, [*pairs, *pairs])
    assert twice == pytest.approx(gate.log_probability(wave, pairs), abs=1e-5)


def test_what_fits_is_accepted_and_what_does_not_is_refused(listener: Generator) -> None:
    gate, question = SelfGate(DualFFNAnswers(listener, Path("listener"), "")), "Describe this recording."
    for wave, right, wrong in (
        (sound(900), "a tone is heard", "some noise"),
        (Waveform(sound(0, 0.55).samples_CN, RATE), "some noise", "a tone is heard"),
    ):
        fits = gate.judge(wave, [(question, right)], right, {})
        not_so = gate.judge(wave, [(question, wrong)], wrong, {})
        assert fits.accepted and fits.ours is not None and fits.reference is not None
        assert fits.ours > fits.reference
        assert not not_so.accepted and not_so.reason == "as likely with other sounds"


def test_a_model_that_does_not_listen_is_refused(listener: Generator) -> None:
    deaf = untrained()
    deaf.model.load_state_dict(listener.model.state_dict())
    with torch.no_grad():
        for parameter in deaf.model.audio_encoder_proj.parameters():
            parameter.zero_()
    verdict = SelfGate(DualFFNAnswers(deaf, Path("deaf"), "")).judge(
        sound(900), [("What is heard?", "a tone is heard")], "", {}
    )
    assert not verdict.accepted and verdict.ours == pytest.approx(verdict.reference, abs=1e-3)


def test_the_other_sounds_are_what_they_are_called() -> None:
    wave = sound(900)
    backwards, noise, buzz, silence = counterfactual_sounds(wave)
    assert torch.equal(backwards.samples_CN, wave.samples_CN.flip(1))
    power, noise_power, buzz_power = (float(x.samples_CN.square().mean()) for x in (wave, noise, buzz))
    assert noise_power == pytest.approx(power, rel=0.05) and buzz_power < 1.01 * power
    own, other = (np.abs(np.fft.rfft(x.samples_CN[0].numpy())) for x in (wave, noise))
    assert np.corrcoef(own, other)[0, 1] > 0.99
    assert silence.samples_CN.abs().max() < 1e-3
    assert all(
        torch.equal(a.samples_CN, b.samples_CN)
        for a, b in zip(counterfactual_sounds(wave), counterfactual_sounds(wave), strict=True)
    )


def test_a_checkpoint_of_ours_describes_and_judges_itself(listener: Generator, tmp_path: Path) -> None:
    listener.model.save_pretrained(tmp_path / "model", listener.template.tokenizer)
    questions = {"scene": "Describe this recording."}
    config = DescriptionConfig.model_validate(
        {"model": str(tmp_path / "model"), "questions": questions, "max_answer_tokens": 12}
    )
    step = Description(config)
    assert step.missing() is None and step.needs == ()
    step.setup()
    value = step.process(segment(sound(900), tmp_path))
    assert value["scene"] == "a tone is heard" and value["text"] == "a tone is heard."
    gate = value["gate"]
    assert gate["kind"] == "self" and gate["accepted"] and gate["tries"] == 1 and gate["reason"] is None
    assert gate["ours"] > gate["reference"]
    assert step.process(segment(sound(900), tmp_path)) == value


# ------------------------------------------------------------------------------------------------- CLAP


@pytest.fixture(scope="module")
def clap(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clap")
    words = [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        "dog",
        "rain",
        "the",
        "sound",
        "of",
        "barks",
        "loudly",
        ".",
        ",",
    ]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    marks = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks)
    extractor = transformers.ClapFeatureExtractor(
        feature_size=16, sampling_rate=8000, hop_length=200, fft_window_size=256, max_length_s=1, frequency_max=4000,
        truncation="rand_trunc",
    )  # fmt: skip
    config = transformers.ClapConfig(
        projection_dim=16,
        text_config={
            "vocab_size": len(words), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "max_position_embeddings": 34, "projection_dim": 16,
        },
        audio_config={
            "spec_size": 64, "num_mel_bins": 16, "patch_embeds_hidden_size": 16, "depths": [1, 1],
            "num_attention_heads": [2, 2], "num_hidden_layers": 2, "hidden_size": 32, "window_size": 4,
            "projection_dim": 16, "num_classes": 4,
        },
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.ClapModel(config)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    transformers.ClapProcessor(extractor, fast).save_pretrained(folder)
    return folder


def test_the_cosines_are_those_of_transformers(clap: Path) -> None:
    processor = transformers.ClapProcessor.from_pretrained(clap)
    model = transformers.ClapModel.from_pretrained(clap).eval()
    wave = sound(900, 0.8).resample(8000)
    texts = ["dog barks loudly", "The sound of Dog, Rain."]
    inputs = processor(
        text=texts, audio=wave.samples_CN[0].numpy(), sampling_rate=8000, return_tensors="pt", padding=True
    )
    with torch.no_grad():
        found = model(**inputs)
    cosines = (found.logits_per_audio[0] / model.logit_scale_a.exp()).tolist()
    verdict = ClapGate(clap, 3).judge(wave, [], texts[0], HEARD)
    assert (verdict.ours, verdict.reference) == pytest.approx(cosines, abs=2e-4)
    assert verdict.accepted == (cosines[0] >= cosines[1])
    swapped = ClapGate(clap, 3).judge(wave, [], texts[1], HEARD)
    assert swapped.accepted and swapped.ours == swapped.reference, "what is as good as the labels is accepted"


def test_a_long_sound_is_heard_in_windows_and_nothing_is_drawn(clap: Path) -> None:
    gate = ClapGate(clap, 3)
    wave = sound(900, 3.3)
    assert gate.judge(wave, [], "dog", HEARD) == gate.judge(wave, [], "dog", HEARD)
    repeated = Waveform(sound(900, 1.0).samples_CN.repeat(1, 3), RATE)
    np.testing.assert_allclose(gate._sound(repeated), gate._sound(sound(900, 1.0)), atol=1e-2)


def test_without_labels_there_is_nothing_to_compare_with(clap: Path) -> None:
    for values in ({}, {"events": {"events": [], "tags": []}}):
        verdict = ClapGate(clap, 3).judge(sound(900), [], "dog", values)
        assert not verdict.accepted and "no labels" in str(verdict.reason)
    events = {
        "events": [{"label": "Rain", "score": 0.4}, {"label": "Dog", "score": 0.9}, {"label": "Rain", "score": 0.3}],
        "tags": [{"label": "Cat", "score": 0.1}],
    }  # fmt: skip
    assert labels_of(events, 3) == ["Dog", "Rain"] and labels_of(events, 1) == ["Dog"]
    assert labels_of(HEARD["events"], 3) == ["Dog", "Rain"]


def test_no_clap_and_pickled_weights_are_refused(clap: Path, tmp_path: Path) -> None:
    for name in ("config.json", "processor_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (clap / name).exists():
            (tmp_path / name).write_bytes((clap / name).read_bytes())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="no CLAP loads from"):
        ClapGate(tmp_path, 3)


# ------------------------------------------------------------------------------- what is done with verdicts


class Parrot:
    """Answers with the question; remembers what it was asked."""

    def __init__(self, empty: Sequence[str] = ()) -> None:
        self.asked: list[str] = []
        self._empty = empty

    def answer(self, audio: Waveform, question: str) -> str:
        self.asked.append(question)
        return "" if question in self._empty else f" {question}\n"


class Picky:
    """Accepts descriptions that hold a word."""

    def __init__(self, word: str) -> None:
        self._word = word

    def judge(self, sound: Waveform, asked: Any, text: str, values: Any) -> GateResult:
        return GateResult(1.0, 0.5, None) if self._word in text else GateResult(0.1, 0.5, "poor")


def described(
    tmp_path: Path, word: str, parrot: Parrot, kind: str = "speech", **settings: Any
) -> dict[str, Any]:
    questions = {"scene": ["Where?", "In which place?"], "speakers": ["Who?"]}
    step = Description(DescriptionConfig.model_validate({"questions": questions, **settings}))
    step._model, step._gate = parrot, Picky(word)
    return step.process(segment(sound(300), tmp_path, kind))


def test_what_is_refused_is_asked_in_other_words(tmp_path: Path) -> None:
    parrot = Parrot()
    value = described(tmp_path, "place", parrot)
    assert parrot.asked == ["Where?", "Who?", "In which place?", "Who?"]
    assert value == {
        "scene": "In which place?", "speakers": "Who?", "text": "In which place? Who?",
        "gate": {"kind": "self", "ours": 1.0, "reference": 0.5, "accepted": True, "tries": 2, "reason": None},
    }  # fmt: skip


def test_what_no_try_gets_through_is_no_description(tmp_path: Path) -> None:
    value = described(tmp_path, "never", Parrot(), tries=3)  # there are two ways to ask
    assert (value["scene"], value["speakers"], value["text"]) == (None, None, None)
    assert value["gate"] | {"ours": 0} == {
        "kind": "self", "ours": 0, "reference": 0.5, "accepted": False, "tries": 2, "reason": "poor",
    }  # fmt: skip


def test_an_empty_answer_is_a_reason(tmp_path: Path) -> None:
    gate = described(tmp_path, "Where", Parrot(empty=["Who?"]))["gate"]
    assert not gate["accepted"] and gate["reason"] == "an empty answer: speakers" and gate["ours"] is None


def test_nobody_asks_about_the_speakers_of_a_sound(tmp_path: Path) -> None:
    parrot = Parrot()
    value = described(tmp_path, "Where", parrot, kind="sound")
    assert parrot.asked == ["Where?"] and value["speakers"] is None and value["text"] == "Where?"


def test_settings_that_cannot_be_and_what_is_missing(tmp_path: Path) -> None:
    for questions in ({}, {"text": ["a"]}, {"a b": ["a"]}, {"scene": []}, {"scene": [" "]}):
        with pytest.raises(ValidationError):
            DescriptionConfig(questions=questions)
    other, own, empty = tmp_path / "other", tmp_path / "own", tmp_path / "empty"
    for folder, kind in ((other, "qwen2_audio"), (own, "audiollm_dual_ffn"), (empty, "")):
        folder.mkdir()
        if kind:
            (folder / "config.json").write_text(f'{{"model_type": "{kind}"}}')

    def reason(**settings: Any) -> str:
        return str(Description(DescriptionConfig.model_validate(settings)).missing())

    assert "description.model: no model is given" in reason()
    assert f"no model in {empty}" in reason(model=str(empty))
    assert "self needs the folder of a model" in reason(model="package.module:factory")
    assert "no CLAP is given" in reason(model=str(other), gate="clap")
    assert f"description.clap: no model in {empty}" in reason(model=str(other), gate="clap", clap=str(empty))
    for settings in (
        *({"model": str(folder)} for folder in (own, other)),
        {"model": str(other), "gate": "clap", "clap": str(own)},
    ):
        assert reason(**settings) == "None"
    assert Description(DescriptionConfig(gate="clap")).needs == ("events",)


def test_sentences_in_a_row() -> None:
    assert joined(["A dog", "It barks!", "", "雨。"]) == "A dog. It barks! 雨。"
    assert mel_features(sound(300).samples_CN, ENCODER.features)
