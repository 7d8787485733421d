"""`evaluate emotion`: ESD's folder, prompts, labels, accuracy and likeness where the truth is known."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from audiollm.audio import resample
from audiollm.commands.cli import build_app
from audiollm.errors import ConfigError
from audiollm.evaluate.judges.judging import SpeechJudges
from audiollm.evaluate.judges.pretrained import PretrainedEmotionJudge
from audiollm.evaluate.report.text_errors import choose_form
from audiollm.evaluate.speech.emotion import esd_labels, evaluate_emotion
from audiollm.evaluate.speech.esd import read_esd
from audiollm.evaluate.speech.scoring import Bench
from tests.audiollm.evaluate.marked_clips import Book, Compass, Reader

DEGREES = {"Neutral": 0, "Happy": 40, "Angry": 80, "Sad": 120, "Surprise": 160}


class Moods(Compass):
    """Names the emotion whose direction is nearest."""

    name = "moods"
    labels = ("neu", "Happiness", "生气/angry", "sad", "fear")

    def classify(self, samples_1N: Tensor, sample_rate: int) -> str:
        at = math.degrees(math.atan2(float(samples_1N[0, 1]), float(samples_1N[0, 0])))
        return self.labels[min(range(5), key=lambda k: abs(at - 40 * k))]


@pytest.fixture
def book() -> Book:
    return Book()


def write_esd(
    book: Book, folder: Path, speaker: str, per_emotion: int = 3, split: str = "", encoding: str = "utf-8"
) -> None:
    lines = []
    for place, emotion in enumerate(DEGREES):
        for take in range(per_emotion):
            id = f"{speaker}_{place * per_emotion + take + 1:06d}"
            text = f"words {take}" if speaker > "0010" else f"第{take}句"
            path = folder / speaker / emotion / split / f"{id}.wav"
            book.write(path, text, DEGREES[emotion] + take)
            lines.append(f"{id}\t{text}\t{emotion}")
    (folder / speaker / f"{speaker}.txt").write_bytes("\r\n".join(lines).encode(encoding))


def test_the_folder_of_esd_and_prompts_of_the_same_speaker_and_emotion(book: Book, tmp_path: Path) -> None:
    write_esd(book, tmp_path, "0011")
    write_esd(book, tmp_path, "0012")
    write_esd(book, tmp_path, "0003", encoding="gb18030")
    write_esd(book, tmp_path, "0004", encoding="utf-16")
    (tmp_path / "ReadMe.txt").write_text("x")
    english = read_esd(tmp_path, "en")
    assert len(english) == 2 * 5 * 3
    assert {u.speaker for u in english} == {"0011", "0012"}
    for utterance in english:
        assert utterance.prompt is not None and utterance.prompt != utterance.path
        assert utterance.prompt.parent == utterance.path.parent, "same speaker, same emotion"
        assert utterance.prompt_text != utterance.text
    first = english[0]
    assert (first.id, first.emotion, first.text, first.prompt_text) == (
        "0011_000001",
        "Neutral",
        "words 0",
        "words 1",
    )
    assert {u.text for u in read_esd(tmp_path, "zh")} == {"第0句", "第1句", "第2句"}


def test_splits_and_mistakes(book: Book, tmp_path: Path) -> None:
    write_esd(book, tmp_path, "0011", 2, "train")
    write_esd(book, tmp_path, "0012", 1, "test")
    assert len(read_esd(tmp_path, "en", "test")) == 5
    assert all(u.prompt is None for u in read_esd(tmp_path, "en", "test")), "no other text of that emotion"
    assert len(read_esd(tmp_path, "en")) == 15
    with pytest.raises(ConfigError, match="no recordings of ESD"):
        read_esd(tmp_path, "zh")
    with pytest.raises(ConfigError, match="no such split"):
        read_esd(tmp_path, "en", "dev")
    (tmp_path / "0012" / "0012.txt").write_text("0012_000001\tone\tNeutral\n")
    with pytest.raises(ConfigError, match="no text of 0012_000002"):
        read_esd(tmp_path, "en", "test")


def bench(book: Book) -> Bench:
    return Bench(choose_form("seed-tts", "en"), SpeechJudges(Reader(book), Moods()))


def test_accuracy_likeness_and_what_the_judge_does_not_know(book: Book, tmp_path: Path) -> None:
    write_esd(book, tmp_path / "esd", "0011", per_emotion=2)
    utterances = read_esd(tmp_path / "esd", "en")
    clips = {}
    for utterance in utterances:
        said = DEGREES["Sad"] if utterance.emotion == "Angry" else DEGREES[utterance.emotion]
        clips[utterance.id] = utterance.request().clip(
            book.write(tmp_path / f"{utterance.id}.wav", utterance.text, said)
        )
    clips[utterances[0].id] = utterances[0].request().clip(problem="no clip")
    result = evaluate_emotion(utterances, clips, bench(book)).result
    # Neutral 1 of 1, Happy 2 of 2, Angry 0 of 2, Sad 2 of 2; Surprise cannot be judged, one is missing
    assert (result["emotion"]["accuracy"], result["emotion"]["n"]) == (pytest.approx(5 / 7), 7)
    assert result["emotion"]["reasons"] == {"moods knows no Surprise": 2, "no clip": 1}
    assert result["by_emotion"]["Angry"]["accuracy"] == 0
    angry = result["confusion"]["asked"].index("Angry")
    assert result["confusion"]["counts"][angry][result["confusion"]["heard"].index("Sad")] == 2
    assert result["words"]["rate"] == 0 and result["words"]["missing"] == 1
    takes = {"0": 0, "1": 1}
    expected = []
    for u in utterances[1:]:
        assert u.prompt is not None
        other = takes[str(u.prompt_text)[-1]]
        offset = DEGREES["Sad"] - DEGREES["Angry"] if u.emotion == "Angry" else 0
        expected.append(math.cos(math.radians(offset - other)))
    assert result["prompt_similarity"]["mean"] == pytest.approx(sum(expected) / len(expected), abs=3e-4)


def test_real_recordings_are_not_like_themselves(book: Book, tmp_path: Path) -> None:
    write_esd(book, tmp_path, "0011")
    utterances = read_esd(tmp_path, "en")
    result = evaluate_emotion(
        utterances, {u.id: u.request().clip(u.path) for u in utterances}, bench(book)
    ).result
    assert result["real_similarity"]["reasons"] == {"it is the real recording": 15}
    assert result["emotion"]["accuracy"] == 1.0


def test_labels_of_judges() -> None:
    assert esd_labels(["ang", "hap", "neu", "sad"]) == {
        "ang": "Angry",
        "hap": "Happy",
        "neu": "Neutral",
        "sad": "Sad",
    }
    assert esd_labels(["Surprised", "joyful", "fear"]) == {"Surprised": "Surprise", "joyful": "Happy"}
    assert esd_labels(None) == {}
    with pytest.raises(ConfigError, match="no emotion of ESD: LABEL_0"):
        esd_labels(["LABEL_0", "LABEL_1"])


def test_a_pretrained_judge_names_and_embeds_what_its_model_does(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    shape = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
        "conv_dim": (8, 8), "conv_kernel": (10, 8), "conv_stride": (5, 8), "num_conv_pos_embedding_groups": 2,
        "num_conv_pos_embeddings": 4, "classifier_proj_size": 8,
    }  # fmt: skip
    config = transformers.Wav2Vec2Config(
        **shape, id2label={0: "neu", 1: "hap", 2: "ang"}, label2id={"neu": 0}
    )
    model = transformers.Wav2Vec2ForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "moods")
    transformers.Wav2Vec2FeatureExtractor(sampling_rate=16_000).save_pretrained(tmp_path / "moods")
    samples_1N = torch.randn(1, 24_000, generator=torch.Generator().manual_seed(0)) * 0.1
    own = resample(samples_1N, 24_000, 16_000)
    normal = (own - own.mean()) / torch.sqrt(own.var(correction=0) + 1e-7)
    with torch.no_grad():
        hidden = model.wav2vec2(normal).last_hidden_state[0].mean(dim=0)
        label = int(model(normal).logits.argmax())
    judge = PretrainedEmotionJudge(tmp_path / "moods")
    assert judge.labels == ["neu", "hap", "ang"]
    assert judge.classify(samples_1N, 24_000) == judge.labels[label]
    torch.testing.assert_close(judge.embed(samples_1N, 24_000), hidden, atol=1e-5, rtol=0)
    with pytest.raises(ConfigError, match="no emotion judge"):
        PretrainedEmotionJudge(tmp_path / "none")


def test_the_command_scores_the_recordings(book: Book, tmp_path: Path) -> None:
    write_esd(book, tmp_path / "esd", "0011")
    command = [
        "evaluate",
        "emotion",
        str(tmp_path / "esd"),
        "--recordings",
        "--limit",
        "4",
        "-o",
        str(tmp_path / "out"),
    ]
    answer = CliRunner().invoke(build_app(), command, catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    assert result["clips"] == 4 and result["emotion"]["reasons"] == {"no judge given": 4}
    with pytest.raises(ConfigError, match="give one of them"):
        CliRunner().invoke(build_app(), [*command, "--model", "x"], catch_exceptions=False)
