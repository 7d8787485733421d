"""Semantic teachers: Hugging Face encoders against transformers by hand, our own against what it must learn."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import scipy.fft
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor
from torch.nn import functional
from transformers import (
    BertConfig,
    BertModel,
    HubertConfig,
    HubertModel,
    SeamlessM4TFeatureExtractor,
    Wav2Vec2BertConfig,
    Wav2Vec2BertModel,
    Wav2Vec2FeatureExtractor,
    WavLMConfig,
    WavLMModel,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperModel,
)

from audiollm.audio import resample
from audiollm.errors import ConfigError
from audiollm.recipe.runner import Context
from tokenizer.clips import Clip, ClipStore
from tokenizer.native.model import semantic_loss
from tokenizer.teacher.model import (
    MelUnitConfig,
    MelUnitEncoder,
    SemanticTeacher,
    cosine_transform,
    load_teacher,
    save_teacher,
)
from tokenizer.teacher.training import (
    MelUnitTask,
    TeacherTrainingConfig,
    TrainedTeacher,
    span_mask,
    train_teacher,
    unigram_entropy,
)

TINY = MelUnitConfig(num_mels=40, hidden_size=48, layers=2, heads=2, num_units=24)
WAVE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
WAVE |= {"conv_dim": (8,) * 7, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}


def noise(batch: int, frames: int, seed: int = 0) -> Tensor:
    return torch.randn(batch, frames * 960, generator=torch.Generator().manual_seed(seed)) * 0.1


def fitted(teacher: SemanticTeacher) -> SemanticTeacher:
    teacher.fit_statistics([noise(2, 10), noise(3, 7, seed=1)])
    return teacher


def unstandardised(teacher: SemanticTeacher) -> SemanticTeacher:
    teacher.std_RC.fill_(1.0)
    return teacher


@pytest.fixture(scope="module")
def own() -> SemanticTeacher:
    torch.manual_seed(0)
    return fitted(SemanticTeacher(MelUnitEncoder(TINY)))


@pytest.fixture(scope="module", params=["hubert", "wavlm"])
def waveform_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny HuBERT without a feature extractor, and a tiny WavLM whose extractor asks for normalised input."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "hubert":
        HubertModel(HubertConfig(**WAVE)).save_pretrained(folder)
    else:
        WavLMModel(WavLMConfig(**WAVE, feat_extract_norm="layer")).save_pretrained(folder)
        Wav2Vec2FeatureExtractor(do_normalize=True).save_pretrained(folder)
    return folder


def test_waveform_teacher_is_the_mean_of_all_hidden_states(waveform_model: Path) -> None:
    normalised = (waveform_model / "preprocessor_config.json").exists()
    theirs = (WavLMModel if normalised else HubertModel).from_pretrained(waveform_model).eval()
    audio = noise(2, 9)
    at_16k = resample(audio, 24_000, 16_000)
    if normalised:
        made = Wav2Vec2FeatureExtractor(do_normalize=True)(list(at_16k.numpy()), sampling_rate=16_000)
        at_16k = torch.stack([torch.as_tensor(row) for row in made["input_values"]])
    with torch.no_grad():
        states = theirs(functional.pad(at_16k, (40, 40)), output_hidden_states=True).hidden_states
    mean = sum(states) / len(states)
    assert mean.shape[1] == 18
    expected = (mean[:, 0::2] + mean[:, 1::2]) / 2
    ours = unstandardised(load_teacher(waveform_model))
    torch.testing.assert_close(ours.features(audio), expected, atol=1e-5, rtol=1e-4)
    one = unstandardised(load_teacher(waveform_model, layer=1))
    torch.testing.assert_close(
        one.features(audio), (states[1][:, 0::2] + states[1][:, 1::2]) / 2, atol=1e-5, rtol=1e-4
    )


def whisper(folder: Path) -> None:
    config = WhisperConfig(
        d_model=16,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_source_positions=50,
        vocab_size=20,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    WhisperModel(config).save_pretrained(folder)
    WhisperFeatureExtractor(chunk_length=1).save_pretrained(folder)


def wav2vec2_bert(folder: Path) -> None:
    config = Wav2Vec2BertConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        output_hidden_size=16,
    )
    Wav2Vec2BertModel(config).save_pretrained(folder)
    SeamlessM4TFeatureExtractor().save_pretrained(folder)


@pytest.mark.parametrize("build", [whisper, wav2vec2_bert])
def test_teachers_that_take_mel_features(build: object, tmp_path: Path) -> None:
    torch.manual_seed(2)
    build(tmp_path)  # type: ignore[operator]
    teacher = fitted(load_teacher(tmp_path))
    for frames in (1, 24, 31):  # Whisper's second is 24 frames: 31 take two pieces
        assert teacher.features(noise(2, frames)).shape == (2, frames, 16)
    assert bool(torch.isfinite(teacher.features(torch.zeros(1, 9600))).all())


@pytest.mark.parametrize("build", [whisper, wav2vec2_bert])
def test_mel_feature_models_are_fed_what_their_extractor_makes(build: object, tmp_path: Path) -> None:
    torch.manual_seed(2)
    build(tmp_path)  # type: ignore[operator]
    audio = noise(1, 12)
    at_16k = resample(audio, 24_000, 16_000)
    if build is whisper:
        extractor, model = (
            WhisperFeatureExtractor(chunk_length=1),
            WhisperModel.from_pretrained(tmp_path).encoder,
        )
        margins, skip = (160, 0), 1
    else:
        extractor, model = SeamlessM4TFeatureExtractor(), Wav2Vec2BertModel.from_pretrained(tmp_path)
        margins, skip = (120, 120), 0
    made = extractor(functional.pad(at_16k, margins).numpy(), sampling_rate=16_000, return_tensors="pt")
    with torch.no_grad():
        states = model.eval()(made["input_features"], output_hidden_states=True).hidden_states
    mean = (sum(states) / len(states))[:, skip : skip + 24]
    ours = unstandardised(load_teacher(tmp_path)).features(audio)
    torch.testing.assert_close(ours, (mean[:, 0::2] + mean[:, 1::2]) / 2, atol=1e-5, rtol=1e-4)


def test_a_click_moves_the_frame_that_it_is_in(own: SemanticTeacher) -> None:
    quiet = noise(1, 21) * 0.01
    click = quiet.clone()
    click[:, 10 * 960 + 400 : 10 * 960 + 560] += 0.5
    embedding = unstandardised(SemanticTeacher(own.encoder, layer=0))
    moved_T = (embedding.features(click) - embedding.features(quiet)).square().sum(dim=2)[0]
    assert int(moved_T.argmax()) == 10


def test_frames_of_a_waveform_model_are_centred(tmp_path: Path) -> None:
    """The input of two convolutional frames lies evenly around the 40 ms that they stand for."""
    config = WavLMConfig(**WAVE, feat_extract_norm="layer", conv_bias=True)
    WavLMModel(config).save_pretrained(tmp_path)
    encoder = load_teacher(tmp_path).encoder
    audio = torch.randn(1, 10 * 640, requires_grad=True)
    padded = functional.pad(audio, (encoder.timing.left_samples, encoder.timing.right_samples))
    encoder.model.feature_extractor(padded)[:, :, 8:10].sum().backward()
    seen = audio.grad[0].nonzero()[:, 0]
    assert (int(seen[0]) + int(seen[-1]) + 1) / 2 == 4.5 * 640


def test_no_such_layer_and_no_teacher_are_named(waveform_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hidden states are 0..2"):
        load_teacher(waveform_model, layer=3)
    with pytest.raises(ConfigError, match="no such folder"):
        load_teacher(tmp_path / "nowhere")
    config = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    BertModel(BertConfig(**config, vocab_size=8)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="model_type 'bert'"):
        load_teacher(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    HubertConfig(**WAVE).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="pickled weights are not loaded"):
        load_teacher(tmp_path)


def test_frames_that_cannot_be_grouped_to_25_hz(tmp_path: Path) -> None:
    odd = HubertConfig(**{**WAVE, "conv_dim": (8,)}, conv_kernel=(400,), conv_stride=(300,))
    HubertModel(odd).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="every 300 samples"):
        load_teacher(tmp_path)


@given(st.integers(1, 40), st.integers(1, 3))
@settings(max_examples=12)
def test_frames_are_exact(frames: int, batch: int) -> None:
    teacher = unstandardised(SemanticTeacher(MelUnitEncoder(TINY)))
    assert teacher.features(noise(batch, frames)).shape == (batch, frames, 48)


def test_frames_of_a_waveform_model_are_exact(waveform_model: Path) -> None:
    teacher = unstandardised(load_teacher(waveform_model))
    for frames in (1, 2, 7, 25, 38):
        assert teacher.features(noise(1, frames)).shape == (1, frames, 16)


@pytest.mark.parametrize("bad", [torch.zeros(1, 961), torch.zeros(960), torch.zeros(1, 0)])
def test_other_shapes_are_refused(own: SemanticTeacher, bad: Tensor) -> None:
    with pytest.raises(ValueError, match="a multiple of 960 samples"):
        own.features(bad)


def test_a_teacher_without_statistics_is_refused() -> None:
    with pytest.raises(ValueError, match="fit_statistics"):
        SemanticTeacher(MelUnitEncoder(TINY)).features(noise(1, 2))


def test_features_are_standardised_over_what_was_measured(own: SemanticTeacher) -> None:
    batches = (noise(2, 10), noise(3, 7, seed=1))
    features_SC = torch.cat([own.features(batch).flatten(0, 1) for batch in batches])
    torch.testing.assert_close(features_SC.mean(dim=0), torch.zeros(48), atol=1e-4, rtol=0)
    torch.testing.assert_close(features_SC.std(dim=0, unbiased=False), torch.ones(48), atol=1e-3, rtol=0)


def test_a_constant_dimension_is_not_blown_up(waveform_model: Path) -> None:
    teacher = load_teacher(waveform_model)
    teacher.fit_statistics([torch.zeros(1, 9600)])
    assert teacher.is_fitted and bool(torch.isfinite(teacher.features(noise(1, 5))).all())


def test_a_teacher_never_changes(waveform_model: Path, own: SemanticTeacher) -> None:
    audio = noise(2, 12)
    for teacher in (own, fitted(load_teacher(waveform_model))):
        student = torch.nn.Linear(teacher.feature_dim, teacher.feature_dim)
        together = torch.nn.ModuleList([teacher, student])
        before, state = teacher.features(audio), {k: v.clone() for k, v in teacher.state_dict().items()}
        optimizer = torch.optim.AdamW(together.parameters(), lr=0.1)
        for _ in range(3):
            together.train()
            loss = (student(teacher.features(audio)) - 1).square().mean()
            loss.backward()
            optimizer.step()
        assert not any(module.training for module in teacher.modules())
        assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())
        assert all(torch.equal(value, state[key]) for key, value in teacher.state_dict().items())
        assert torch.equal(teacher.features(audio), before) and not before.requires_grad


def test_features_are_float32_under_autocast(own: SemanticTeacher) -> None:
    audio = noise(1, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = own.features(audio)
    assert inside.dtype == torch.float32 and torch.equal(inside, own.features(audio))


def test_silence_gives_finite_features(waveform_model: Path, own: SemanticTeacher) -> None:
    for teacher in (own, fitted(load_teacher(waveform_model))):
        assert bool(torch.isfinite(teacher.features(torch.zeros(2, 4800))).all())


def test_cepstra_are_scipys_dct() -> None:
    log_mel = torch.randn(5, 40)
    theirs = torch.from_numpy(scipy.fft.dct(log_mel.numpy(), type=2, norm="ortho"))[:, :13]
    torch.testing.assert_close(log_mel @ cosine_transform(40, 13), theirs, atol=1e-5, rtol=1e-5)


def test_units_do_not_depend_on_loudness() -> None:
    encoder = MelUnitEncoder(TINY)
    encoder.units_VP.normal_(generator=torch.Generator().manual_seed(0))
    mel = encoder.mel(noise(2, 12))
    assert torch.equal(encoder.units(mel), encoder.units(mel + 1.5))
    assert len(encoder.units(mel).unique()) > 3


def test_hidden_frames_are_not_seen() -> None:
    """Masked input has no way into the logits."""
    torch.manual_seed(0)
    encoder = MelUnitEncoder(TINY).eval()
    mel, other = torch.randn(1, 48, 40), torch.randn(1, 48, 40)
    mask_BT = torch.zeros(1, 12, dtype=torch.bool)
    mask_BT[:, 4:9] = True
    hidden_BL = mask_BT.repeat_interleave(4, dim=1)[:, :, None]
    changed = torch.where(hidden_BL, other, mel)
    logits = encoder.unit_logits(mel, mask_BT)
    torch.testing.assert_close(logits, encoder.unit_logits(changed, mask_BT))
    unmasked = torch.where(hidden_BL, mel, other)
    assert not torch.allclose(logits[mask_BT], encoder.unit_logits(unmasked, mask_BT)[mask_BT])


def test_span_masks_hide_their_share_in_spans() -> None:
    mask_BT = span_mask(400, 75, 0.48, 7, torch.Generator().manual_seed(0))
    assert float(mask_BT.float().mean()) == pytest.approx(0.48, abs=0.02)
    inner = "".join("x" if hidden else "." for hidden in mask_BT[0].tolist()).strip("x")
    assert all(len(run) >= 7 for run in inner.split(".") if run)


def test_unigram_entropy_of_equal_and_of_single_units() -> None:
    assert unigram_entropy(torch.arange(8).repeat(5), 8) == pytest.approx(2.0794, abs=1e-4)
    assert unigram_entropy(torch.zeros(9, dtype=torch.long), 8) == 0


def test_every_trained_parameter_gets_a_gradient() -> None:
    torch.manual_seed(0)
    encoder = MelUnitEncoder(TINY)
    task = MelUnitTask(encoder, [], [], TeacherTrainingConfig(steps=1, model=TINY))  # type: ignore[arg-type]
    mask_BT = span_mask(2, 20, 0.5, 5, torch.Generator().manual_seed(0))
    next(task.updates((noise(2, 20), mask_BT), 0, 1)).loss.backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None and float(parameter.grad.abs().max()) > 0, name


# Learning, on sounds made here


def melodies(folder: Path, count: int, seed: int) -> ClipStore:
    """Sequences of a few sounds in a fixed order, which what is around a hidden frame gives away."""
    dice = torch.Generator().manual_seed(seed)
    clips = []
    for index in range(count):
        start, pieces = int(torch.randint(5, (1,), generator=dice)), []
        for note in range(16):
            time_N = torch.arange(4800) / 24_000
            pitch_hz = 220 * 1.6 ** ((start + note) % 5)
            pieces.append(sum(torch.sin(2 * torch.pi * pitch_hz * k * time_N) / k for k in (1, 2, 3)))
        path = folder / f"{seed}_{index}.wav"
        soundfile.write(path, (torch.cat(pieces) * 0.2).numpy(), 24_000)  # type: ignore[arg-type]
        clips.append(Clip(path, 0.0, None))
    return ClipStore(clips, 24_000)


TRAINING = TeacherTrainingConfig(
    steps=80,
    model=TINY,
    batch_size=4,
    crop_frames=40,
    unit_batches=4,
    statistics_batches=2,
    learning_rate=4e-3,
    precision="fp32",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainedTeacher, Path]:
    folder = tmp_path_factory.mktemp("teacher")
    train, held_out = melodies(folder, 6, seed=1), melodies(folder, 3, seed=2)
    context = Context(folder, None, Console(file=io.StringIO()), {})  # type: ignore[arg-type]
    return train_teacher(train, held_out, TRAINING, folder, context, torch.device("cpu")), folder


def test_training_beats_the_frequencies_of_units(trained: tuple[TrainedTeacher, Path]) -> None:
    figures = trained[0].figures
    assert figures["unigram_entropy"] > 1.0  # there is something to learn
    assert figures["masked_loss"] < 0.8 * figures["unigram_entropy"]


def test_its_figures_are_of_the_saved_weights(trained: tuple[TrainedTeacher, Path]) -> None:
    result, folder = trained
    held_out = melodies(folder, 3, seed=2)
    task = MelUnitTask(load_teacher(folder).encoder, held_out, held_out, TRAINING)
    with torch.no_grad():
        again = task.evaluate(0)
    assert again == pytest.approx(result.figures, rel=1e-5)


def test_a_trained_teacher_survives_saving(trained: tuple[TrainedTeacher, Path]) -> None:
    result, folder = trained
    audio = noise(2, 8)
    again = load_teacher(folder)  # finds the stage folder's `model`
    assert torch.equal(again.features(audio), result.teacher.features(audio))
    last = load_teacher(folder / "model", layer=-1)
    states = last.encoder.hidden_states(audio)
    torch.testing.assert_close(last.features(audio), (states[-1] - last.mean_RC[-2]) / last.std_RC[-2])
    assert result.cpu_seconds > 0


def test_training_again_gives_the_same_teacher(tmp_path: Path) -> None:
    """And a run that finds its checkpoint finishes with the weights that it would have had."""
    store = melodies(tmp_path, 6, seed=1)
    context = Context(tmp_path, None, Console(file=io.StringIO()), {})  # type: ignore[arg-type]
    short = replace(TRAINING, steps=4)
    one = train_teacher(store, store, short, tmp_path / "a", context, torch.device("cpu"))
    two = train_teacher(store, store, short, tmp_path / "b", context, torch.device("cpu"))
    resumed = train_teacher(store, store, short, tmp_path / "a", context, torch.device("cpu"))
    for key, value in one.teacher.state_dict().items():
        assert torch.equal(value, two.teacher.state_dict()[key]), key
        assert torch.equal(value, resumed.teacher.state_dict()[key]), key


def test_a_hugging_face_teacher_is_not_saved(waveform_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="its own folder"):
        save_teacher(load_teacher(waveform_model), tmp_path)


def test_the_semantic_loss_is_least_where_features_are_equal() -> None:
    """Mean squared error and one minus the cosine, in closed form for what is equal, opposite and at right angles."""
    features = torch.tensor([[[2.0, 0.0], [0.0, 2.0]]])
    across = features.flip(dims=(2,))
    for predicted, squared, cosine in ((features, 0.0, 1.0), (-features, 8.0, -1.0), (across, 4.0, 0.0)):
        assert semantic_loss(predicted, features).item() == pytest.approx(squared + 1 - cosine, abs=1e-6)
