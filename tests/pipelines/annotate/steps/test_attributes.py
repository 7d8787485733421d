"""Attributes by random classifiers made here, against transformers' own pipeline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from audiollm.audio import save
from audiollm.errors import ConfigError
from pipelines.annotate.step import RecordingMetadata, Segment
from pipelines.annotate.steps.attributes import Attributes, AttributesConfig
from pipelines.steps.step import Listener

RATE = 16000


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`gender` and `years`: wav2vec 2.0 with a mask of two classes and of one output; `mood`: AST of three."""
    from transformers import (
        ASTConfig,
        ASTFeatureExtractor,
        ASTForAudioClassification,
        Wav2Vec2Config,
        Wav2Vec2FeatureExtractor,
        Wav2Vec2ForSequenceClassification,
    )

    folder = tmp_path_factory.mktemp("models")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    for seed, (name, labels) in enumerate({"gender": ["female", "male"], "years": ["age"]}.items()):
        torch.manual_seed(seed)
        config = Wav2Vec2Config(
            **small,
            conv_dim=(8, 8),
            conv_kernel=(10, 8),
            conv_stride=(5, 4),
            num_feat_extract_layers=2,
            feat_extract_norm="layer",
            do_stable_layer_norm=True,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            classifier_proj_size=8,
            id2label=dict(enumerate(labels)),
            label2id={label: index for index, label in enumerate(labels)},
        )
        model = Wav2Vec2ForSequenceClassification(config)
        if name == "years":
            torch.nn.init.zeros_(model.classifier.weight)
            torch.nn.init.constant_(model.classifier.bias, 0.372)
        model.save_pretrained(folder / name)
        Wav2Vec2FeatureExtractor(return_attention_mask=True, do_normalize=True).save_pretrained(folder / name)
    torch.manual_seed(2)
    mood = ASTConfig(
        **small,
        num_mel_bins=32,
        max_length=100,
        id2label={0: "happy", 1: "sad", 2: "calm"},
        label2id={"happy": 0, "sad": 1, "calm": 2},
    )
    ASTForAudioClassification(mood).save_pretrained(folder / "mood")
    ASTFeatureExtractor(num_mel_bins=32, max_length=100).save_pretrained(folder / "mood")
    return folder


@pytest.fixture(scope="module")
def segments(tmp_path_factory: pytest.TempPathFactory) -> list[Segment]:
    """Noise of 0.5, 0.8 and 1 s in one file."""
    path = tmp_path_factory.mktemp("sound") / "noise.wav"
    noise_N = np.random.default_rng(0).normal(0, 0.1, round(2.3 * RATE)).astype(np.float32)
    save(path, torch.from_numpy(noise_N)[None], RATE, "FLOAT")
    listener = Listener(str(path))
    spans = [(0.0, 0.5), (0.5, 1.3), (1.3, 2.3)]
    return [
        Segment(str(path), start, end, "speech", None, RecordingMetadata(), {}, listener)
        for start, end in spans
    ]


@pytest.mark.parametrize(("name", "folder"), [("gender", "gender"), ("emotion", "mood")])
def test_a_label_and_its_probability_are_the_pipelines(
    models: Path, segments: list[Segment], name: str, folder: str
) -> None:
    from transformers import pipeline

    step = Attributes(AttributesConfig(**{name: models / folder}))
    assert step.missing() is None
    step.setup()
    judge = pipeline("audio-classification", model=str(models / folder))
    for item in segments:
        sound = {"raw": np.array(item.samples(RATE)), "sampling_rate": RATE}
        best = max(judge(sound, function_to_apply="softmax"), key=lambda one: one["score"])
        expected = {"label": best["label"], "score": pytest.approx(best["score"], abs=1e-3)}
        assert step.process(item) == {name: expected}


def test_a_batch_gives_what_each_gives_alone(models: Path, segments: list[Segment]) -> None:
    config = AttributesConfig(gender=models / "gender", emotion=models / "mood", batch_size=3)
    step = Attributes(config)
    step.setup()
    assert step.batch_size == 3
    together, alone = step.process_batch(segments), [step.process(item) for item in segments]
    for batched, single in zip(together, alone, strict=True):
        for name in ("gender", "emotion"):
            assert batched[name]["label"] == single[name]["label"]
            assert batched[name]["score"] == pytest.approx(single[name]["score"], abs=1.1e-3)


def test_an_age_in_numbers(models: Path, segments: list[Segment]) -> None:
    step = Attributes(AttributesConfig(age=models / "years", age_scale=100.0))
    step.setup()
    assert step.process(segments[0]) == {"age": {"label": "37", "score": None}}


def test_of_a_long_segment_the_middle_is_heard(models: Path, segments: list[Segment], tmp_path: Path) -> None:
    step = Attributes(AttributesConfig(gender=models / "gender", max_duration_s=0.5))
    step.setup()
    whole = segments[2]
    middle = Segment(whole.path, 1.55, 2.05, "speech", None, RecordingMetadata(), {}, Listener(whole.path))
    assert step.process(whole) == step.process(middle)


def test_a_moment_tells_nothing(models: Path, segments: list[Segment]) -> None:
    step = Attributes(AttributesConfig(gender=models / "gender"))
    step.setup()
    moment = Segment(
        segments[0].path, 0.0, 0.05, "speech", None, RecordingMetadata(), {}, segments[0].listener
    )
    assert step.process(moment) == {"gender": None}


def test_what_is_missing_or_wrong_is_told(models: Path, tmp_path: Path) -> None:
    assert "no model: set attributes.age" in str(Attributes(AttributesConfig()).missing())
    gone = Attributes(AttributesConfig(emotion=tmp_path / "gone"))
    assert "attributes.emotion: no model at" in str(gone.missing())
    with pytest.raises(ConfigError, match="one class"):
        Attributes(AttributesConfig(gender=models / "years")).setup()
    with pytest.raises(ConfigError, match="age_scale"):
        Attributes(AttributesConfig(age=models / "gender", age_scale=100.0)).setup()
    (tmp_path / "config.json").write_text('{"model_type": "wav2vec2"}')
    with pytest.raises(ConfigError, match="no audio classifier loads"):
        Attributes(AttributesConfig(gender=tmp_path)).setup()
