"""`evaluate codec`: every figure against what it is made of, rows kept, failures named, the command and its page."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import entropy
from torch import Tensor
from typer.testing import CliRunner

from audiollm.audio import load, resample, save
from audiollm.codec import Codec
from audiollm.commands.cli import build_app
from audiollm.errors import ConfigError
from audiollm.evaluate.codec.commands import name_codecs, read_clips
from audiollm.evaluate.codec.evaluation import (
    Evaluation,
    EvaluationClip,
    evaluate_codec,
    score_codec,
    split_clips,
)
from audiollm.evaluate.codec.measures import CodecJudges
from audiollm.evaluate.codec.scores import CodecRows, _best_codecs
from audiollm.evaluate.codec.signal_metrics import mel_distance, si_sdr
from audiollm.evaluate.judges.pretrained import PretrainedRecognizer, PretrainedSpeakerJudge
from audiollm.evaluate.report.suite import spread_items
from tokenizer.native.model import AudioTokenizer, TokenizerConfig

CHEAP = ("mel_distance", "si_sdr", "stoi")


def tiny_codec(**settings: Any) -> AudioTokenizer:
    torch.manual_seed(0)
    shape = {
        "num_codebooks": 3,
        "codebook_size": 16,
        "latent_dim": 8,
        "hidden_size": 16,
        "mel_hidden_size": 16,
    }
    layers = {"encoder_layers": (1, 1), "decoder_layers": (1, 1), "num_mels": 40}
    return AudioTokenizer(TokenizerConfig(**{**shape, **layers, **settings})).eval()


def write_clip(path: Path, seconds: float, seed: int, rate: int = 24_000) -> Path:
    noise = torch.randn(1, int(seconds * rate), generator=torch.Generator().manual_seed(seed))
    swell = torch.sin(torch.arange(noise.shape[1]) * 9 / rate).abs()
    save(path, 0.2 * noise * swell, rate)
    return path


@pytest.fixture(scope="module")
def codec() -> AudioTokenizer:
    return tiny_codec()


@pytest.fixture
def clips(tmp_path: Path) -> list[EvaluationClip]:
    return [
        EvaluationClip(write_clip(tmp_path / "a.wav", 1.03, 0), kind="speech", text="one two three four"),
        EvaluationClip(write_clip(tmp_path / "b.wav", 1.5, 1, rate=16_000), kind="speech", text="six"),
        EvaluationClip(write_clip(tmp_path / "c.wav", 1.2, 2), kind="music"),
    ]


class Watched:
    """A codec that counts what it encodes, and refuses clips shorter than it can take."""

    def __init__(self, codec: AudioTokenizer, shortest: int = 0) -> None:
        self.codec, self.shortest, self.encoded = codec, shortest, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.codec, name)

    def encode(self, samples_CN: Tensor) -> Tensor:
        if samples_CN.shape[1] < self.shortest:
            raise RuntimeError("kernel larger than input")
        self.encoded += 1
        return self.codec.encode(samples_CN)


class Fixed:
    """A recognizer that always hears the same."""

    name = "fixed"

    def recognize(self, samples_CN: Tensor, sample_rate: int) -> str:
        return "One, too three four"


def by_hand(codec: Codec, clip: EvaluationClip, books: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, and the reference and the decoded sound at 24 kHz."""
    wave = load(clip.path, mono=True)
    codes_KT = codec.encode(wave.resample(codec.sample_rate).samples_CN)
    reference_1N = wave.resample(24_000).samples_CN
    decoded_1N = resample(codec.decode(codes_KT[:books]), codec.sample_rate, 24_000)[
        :, : reference_1N.shape[1]
    ]
    return codes_KT, reference_1N, decoded_1N.clamp(-1, 1)


@pytest.mark.parametrize("rate", [24_000, 16_000])
def test_scores_are_those_of_the_decoded_sound_for_every_prefix(
    rate: int, clips: list[EvaluationClip]
) -> None:
    shape = {} if rate == 24_000 else {"sample_rate": 16_000, "mel_hop_samples": 160, "n_fft": 640}
    codec = tiny_codec(**shape)
    scores = score_codec(codec, clips, CHEAP, codebooks=[1, 2, 9])
    assert list(scores["prefixes"]) == ["1", "2", "3"]
    assert scores["kinds"] == scores["prefixes"]["3"]
    for books in (1, 2, 3):
        speech = [by_hand(codec, clip, books)[1:] for clip in clips[:2]]
        for metric, name in ((mel_distance, "mel_distance"), (si_sdr, "si_sdr")):
            expected = [metric(*pair, 24_000) for pair in speech]
            table = scores["prefixes"][str(books)]["speech"][name]
            assert table["mean"] == pytest.approx(np.mean(expected), rel=1e-6)
            assert table["median"] == pytest.approx(np.median(expected), rel=1e-6)
            assert (table["n"], table["not_available"]) == (2, 0)
    music = scores["kinds"]["music"]["stoi"]
    assert (music["mean"], music["reasons"]) == (None, {"not speech": 1})


def test_codebook_statistics_are_those_of_all_codes(
    codec: AudioTokenizer, clips: list[EvaluationClip]
) -> None:
    scores = score_codec(codec, clips, ["mel_distance"])
    codes_KT = torch.cat([by_hand(codec, clip, 3)[0] for clip in clips], dim=1)
    for book in range(3):
        _, counts = np.unique(codes_KT[book].numpy(), return_counts=True)
        assert scores["codebooks"]["usage"][book] == len(counts) / 16
        assert scores["codebooks"]["perplexity"][book] == pytest.approx(math.exp(entropy(counts)))
    assert scores["codebooks"]["frames"] == codes_KT.shape[1]
    assert scores["bitrate_bps"] == 25 * 3 * 4
    assert scores["prefix_bitrates_bps"] == {"3": 300.0}
    assert scores["speed"]["audio_s"] == pytest.approx(1.03 + 1.5 + 1.2)
    assert scores["speed"]["encode_cpu_s_per_audio_s"] > 0


def test_failures_are_named_and_the_rest_goes_on(
    codec: AudioTokenizer, clips: list[EvaluationClip], tmp_path: Path
) -> None:
    (tmp_path / "broken.wav").write_bytes(b"RIFF not really")
    broken = EvaluationClip(tmp_path / "broken.wav", kind="speech")
    missing = EvaluationClip(tmp_path / "gone.wav", kind="speech")
    picky = Watched(codec, shortest=25_000)
    scores = score_codec(picky, [broken, *clips, missing], CHEAP)  # type: ignore[arg-type]
    assert [Path(item["path"]).name for item in scores["set_aside"]] == ["broken.wav", "gone.wav"]
    assert all(item["reason"] for item in scores["set_aside"])
    table = scores["kinds"]["speech"]["mel_distance"]
    assert (table["n"], scores["failed_clips"]) == (1, 1)
    assert table["reasons"] == {"the codec failed: RuntimeError: kernel larger than input": 1}


def test_word_errors_are_over_all_words_and_need_judge_and_transcript(
    codec: AudioTokenizer, clips: list[EvaluationClip]
) -> None:
    spoken = [*clips, EvaluationClip(clips[0].path, kind="speech")]
    evaluation = Evaluation(["word_error_rate", "speaker_similarity"], CodecJudges(recognizer=Fixed()))
    result = evaluate_codec({"tiny": codec}, spoken, evaluation)
    words = result["codecs"]["tiny"]["kinds"]["speech"]["word_error_rate"]
    # 1 of 4 words wrong, and 4 errors in a text of one word: 5 errors in 5 words
    assert (words["mean"], words["median"], words["n"]) == (1.0, (0.25 + 4.0) / 2, 2)
    assert words["reasons"] == {"no transcript": 1}
    assert result["original"]["speech"]["word_error_rate"] == words
    voices = result["codecs"]["tiny"]["kinds"]["speech"]["speaker_similarity"]
    assert voices["reasons"] == {"no judge given": 3}


def test_finished_rows_are_kept_by_content(
    codec: AudioTokenizer, clips: list[EvaluationClip], tmp_path: Path
) -> None:
    watched, path = Watched(codec), tmp_path / "out" / "rows.jsonl"

    def run(own: list[EvaluationClip], evaluation: Evaluation, fingerprint: str = "x") -> tuple[int, Any]:
        before = watched.encoded
        store = CodecRows(path, {"tiny": fingerprint, "": ""})
        result = evaluate_codec({"tiny": watched}, own, evaluation, store)  # type: ignore[dict-item]
        return watched.encoded - before, result

    cheap = Evaluation(CHEAP)
    first, whole = run(clips, cheap)
    assert first == 3 + 1  # the warm-up
    assert run(clips, cheap) == (0, whole)
    assert len(path.read_text().splitlines()) == 6  # the originals have rows, too
    # killed in the middle of a line: that row alone is done again
    path.write_text(path.read_text()[:-40])
    again, repeated = run(clips, cheap)
    assert again == 1 + 1
    assert repeated["codecs"]["tiny"]["kinds"] == whole["codecs"]["tiny"]["kinds"]
    moved = clips[0].path.rename(tmp_path / "moved.wav")
    renamed = EvaluationClip(moved, kind="speech", text=clips[0].text)
    assert run([renamed, *clips[1:]], cheap)[0] == 0
    write_clip(moved, 1.03, 9)
    assert run([renamed, *clips[1:]], cheap)[0] == 1 + 1
    assert run(clips[1:], Evaluation(["mel_distance"]))[0] == 2 + 1
    assert run(clips[1:], cheap, "other weights")[0] == 2 + 1


def test_long_clips_are_cut_evenly(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "long.wav", 5.0, 0)
    pieces, _ = split_clips([EvaluationClip(path, kind="speech", text="all of it")], 2.0)
    lengths = [load(piece.path, piece.start_s, piece.end_s).num_samples for piece in pieces]
    assert lengths == [40_000, 40_000, 40_000]
    assert {piece.text for piece in pieces} == {None}
    assert split_clips([EvaluationClip(path, text="all")], 5.0)[0] == [EvaluationClip(path, text="all")]


def test_pretrained_judges_hear_what_their_models_hear(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    shape = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
        "conv_dim": (8, 8), "conv_kernel": (10, 8), "conv_stride": (5, 8), "num_conv_pos_embedding_groups": 2,
        "num_conv_pos_embeddings": 4, "tdnn_dim": (8, 8, 8, 8, 8), "xvector_output_dim": 8, "vocab_size": 6,
    }  # fmt: skip
    extractor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=16_000)
    voices = transformers.Wav2Vec2ForXVector(transformers.Wav2Vec2Config(**shape)).eval()
    voices.save_pretrained(tmp_path / "voices")
    extractor.save_pretrained(tmp_path / "voices")
    samples_1N = torch.randn(1, 24_000, generator=torch.Generator().manual_seed(0)) * 0.1
    own = resample(samples_1N, 24_000, 16_000)
    normal = (own - own.mean()) / torch.sqrt(own.var(correction=0) + 1e-7)
    with torch.no_grad():
        expected = voices(normal).embeddings[0]
    judge = PretrainedSpeakerJudge(tmp_path / "voices")
    assert torch.allclose(judge.embed(samples_1N, 24_000), expected, atol=1e-5)

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "|": 4, "a": 5}
    (tmp_path / "vocabulary.json").write_text(json.dumps(vocabulary))
    letters = transformers.Wav2Vec2CTCTokenizer(str(tmp_path / "vocabulary.json"))
    words = transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**shape)).eval()
    words.lm_head.bias.data[1:4] = -1000.0  # no special tokens
    for part in (words, letters, extractor):
        part.save_pretrained(tmp_path / "words")
    with torch.no_grad():
        heard = letters.decode(words(normal).logits[0].argmax(dim=1))
    transcript = PretrainedRecognizer(tmp_path / "words").recognize(samples_1N, 24_000)
    assert len(transcript) > 20 and transcript == " ".join(heard.split())
    with pytest.raises(ConfigError, match="no speaker judge"):
        PretrainedSpeakerJudge(tmp_path / "words" / "none")


def test_clips_of_files_folders_and_lists(tmp_path: Path) -> None:
    write_clip(tmp_path / "in" / "a.wav", 0.1, 0)
    write_clip(tmp_path / "in" / "b.wav", 0.1, 1)
    with (tmp_path / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [("path", "kind", "text"), ("in/a.wav", "speech", "go, now"), ("c.wav", "", "")]
        )
    clips = read_clips([tmp_path / "in", tmp_path / "in" / "b.wav"], tmp_path / "list.csv", "music")
    found = [(clip.path.name, clip.kind, clip.text) for clip in clips]
    assert found == [("a.wav", "speech", "go, now"), ("c.wav", "music", None), ("b.wav", "music", None)]
    assert [clip.path.name for clip in spread_items(clips, 2)] == ["a.wav", "c.wav"]
    for line, reason in (
        ("a.wav,noise,", "no such kind"),
        ("a.wav,speech,go, now", "4 fields for 3 columns"),
        (",speech,", "no path"),
    ):
        (tmp_path / "bad.csv").write_text(f"path,kind,text\n{line}\n")
        with pytest.raises(ConfigError, match=rf"bad\.csv:2  .*{reason}"):
            read_clips([], tmp_path / "bad.csv", "unknown")


def test_codecs_are_told_apart_by_the_end_of_their_path(codec: AudioTokenizer, tmp_path: Path) -> None:
    folders = [tmp_path / run / "train" for run in ("one", "two")]
    for folder in folders:
        codec.save_pretrained(folder)
    assert list(name_codecs([str(folders[0])])) == ["train"]
    assert list(name_codecs([str(folder) for folder in folders])) == ["one/train", "two/train"]
    assert name_codecs([f"mine={folders[1]}"]) == {"mine": folders[1]}
    with pytest.raises(ConfigError, match="two codecs of that name"):
        name_codecs([f"a={folders[0]}", f"a={folders[1]}"])


def test_the_command_writes_results_and_a_page_of_its_own(
    codec: AudioTokenizer, clips: list[EvaluationClip], tmp_path: Path
) -> None:
    codec.save_pretrained(tmp_path / "tiny")
    (clips[0].path.parent / "noise.wav").write_bytes(b"nothing")
    arguments = ["evaluate", "codec", f"first={tmp_path / 'tiny'}", f"<b>={tmp_path / 'tiny'}"]
    arguments += [
        "--audio",
        str(clips[0].path.parent),
        "--kind",
        "sound",
        "--codebooks",
        "1,2",
        "--examples",
        "2",
    ]
    arguments += ["--metrics", "mel_distance,si_sdr,stoi", "-o", str(tmp_path / "out")]
    answer = CliRunner().invoke(build_app(), arguments, catch_exceptions=False)
    assert answer.exit_code == 0
    assert "n/a: not speech" in " ".join(answer.output.split())
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    assert result["codecs"]["first"]["kinds"] == result["codecs"]["<b>"]["kinds"]
    assert result["clips"]["sound"]["clips"] == 3
    assert [Path(item["path"]).name for item in result["set_aside"]] == ["noise.wav"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<audio") == 2 * 3
    assert page.count("data:image/png;base64,") == 2 * 3
    assert not re.search(r'(?:src|href)="(?!data:|#)', page)  # nothing from outside
    assert "&lt;b&gt;" in page and "<b></th>" not in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    mean = result["codecs"]["first"]["kinds"]["sound"]["mel_distance"]["mean"]
    assert f"<b>{mean:.3f}</b>" in page


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--metrics", "mel_distence"], "did you mean 'mel_distance'"),
        (["--codebooks", "0,1"], "not numbers of codebooks"),
        (["--kind", "musik"], "did you mean 'music'"),
        (["--audio", "nowhere"], "no such file or folder"),
    ],
)
def test_mistakes_in_the_command_are_named(arguments: list[str], reason: str, tmp_path: Path) -> None:
    command = ["evaluate", "codec", str(tmp_path), "-o", str(tmp_path / "out"), *arguments]
    with pytest.raises(ConfigError, match=reason):
        CliRunner().invoke(build_app(), command, catch_exceptions=False)


def test_another_package_adds_to_a_group_of_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    entries = [EntryPoint("evaluate.doctor", "audiollm.commands.doctor:doctor", "audiollm.commands")]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries)
    answer = CliRunner().invoke(build_app(), ["evaluate", "--help"])
    assert answer.exit_code == 0
    assert "doctor" in answer.output


def _scored(codec: str, clip: int, value: float | str, words: int = 1) -> dict[str, Any]:
    scores = {"stoi": value, "word_error_rate": 1.0 if isinstance(value, str) else 1 - value}
    return {
        "codec": codec, "path": f"{clip}.wav", "start_s": 0.0, "end_s": None, "kind": "speech", "duration_s": 1.0,
        "words": words, "scores": {"8": scores},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("gains", "is_better"),
    [
        ([0.1] * 8, True),
        ([0.3, -0.2, 0.3, -0.2, 0.1, -0.1, 0.2, -0.1], False),  # better in the mean, within chance
        ([0.1] * 7, False),  # of too few clips
        ([0.0] * 8, False),
        ([0.0004] * 8, False),  # equal as they are printed,
    ],
)
def test_a_codec_is_the_best_only_beyond_chance(gains: list[float], is_better: bool) -> None:
    rows = {
        "a": [_scored("a", clip, 0.5 + gain) for clip, gain in enumerate(gains)],
        "b": [_scored("b", clip, 0.5) for clip in range(len(gains))] + [_scored("b", 99, "too short")],
    }
    facts = {name: {"num_codebooks": 8} for name in rows}
    best = dict(_best_codecs(rows, facts, "speech", ["stoi", "word_error_rate"]))
    assert best == ({"stoi": "a", "word_error_rate": "a"} if is_better else {})
    assert dict(_best_codecs({"a": rows["a"]}, {"a": facts["a"]}, "speech", ["stoi"])) == {}
