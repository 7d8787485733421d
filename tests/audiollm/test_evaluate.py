"""The judges of generated speech: they learn, do not change from run to run, and do not flatter.

The material is synthesized here: three "texts" are three melodies, two "speakers" are two timbres.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from audiollm.audio import save
from audiollm.data.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.evaluate import judges as judges_module
from audiollm.evaluate.classifier import (
    ClassifierConfig,
    ClipClassifier,
    UntrainableError,
    train_classifier,
)
from audiollm.evaluate.features import estimate_bandwidth, mel_filters, mel_power
from audiollm.evaluate.judges import (
    Heard,
    Judges,
    Take,
    hear,
    why_no_speaker_judge,
    why_no_text_judge,
)
from audiollm.evaluate.stage import STAGE, Config, run
from audiollm.evaluate.statistics import NOTHING, confusion, share, word_error_rate
from audiollm.evaluate.tts import figures, score
from audiollm.files import read_json, read_jsonl, write_jsonl
from audiollm.recipe import StagePlan
from audiollm.runner import Context, StageError

TEXTS = {"one": (1.0, 1.8), "two": (1.8, 1.0), "three": (1.4, 1.4)}
SPEAKERS = ("anna", "bert")
RATE = 16_000
JUDGE_STEPS = 40


def melody(text: str, speaker: str, take: int) -> Tensor:
    """A glide `[1, samples]` with many partials (anna) or few (bert), different from take to take."""
    random = np.random.default_rng([sorted(TEXTS).index(text), SPEAKERS.index(speaker), take])
    seconds = random.uniform(0.3, 0.5)
    low, high = TEXTS[text]
    pitch_hz = random.uniform(180, 220) * np.linspace(low, high, int(seconds * RATE))
    phase = 2 * np.pi * np.cumsum(pitch_hz) / RATE
    decay = 0.85 if speaker == "anna" else 0.4
    partials = np.arange(1, 15)[:, None]
    sound = (decay**partials * np.sin(partials * phase)).sum(axis=0)
    sound *= random.uniform(0.02, 0.08)
    sound += 1e-4 * random.standard_normal(len(sound))
    return torch.tensor(sound, dtype=torch.float32)[None]


def toy_set(takes: Sequence[int]) -> tuple[list[tuple[Tensor, int]], list[str], list[str]]:
    keys = [(text, speaker, take) for text in TEXTS for speaker in SPEAKERS for take in takes]
    return [(melody(*key), RATE) for key in keys], [key[0] for key in keys], [key[1] for key in keys]


def accuracy(judge: ClipClassifier, clips: Sequence[tuple[Tensor, int]], labels: Sequence[str]) -> float:
    return float(
        np.mean([got == label for (got, _), label in zip(judge.predict_many(clips), labels, strict=True)])
    )


# ------------------------------------------------------------------------------------------ classifier


@pytest.fixture(scope="module")
def text_judge() -> ClipClassifier:
    clips, texts, _ = toy_set(range(5, 15))
    return train_classifier(clips, texts, ClassifierConfig(steps=JUDGE_STEPS))


def test_classifier_learns_and_is_not_fooled_by_level_dc_silence_or_the_empty_band(
    text_judge: ClipClassifier,
) -> None:
    clips, texts, _ = toy_set(range(5))
    assert accuracy(text_judge, clips, texts) >= 0.95
    silence_CN = torch.zeros(1, 6000)
    changed = [(torch.cat([silence_CN, 0.05 * x, silence_CN], dim=1) + 0.02, rate) for x, rate in clips]
    assert accuracy(text_judge, changed, texts) >= 0.95
    in_24_khz = [
        (torch.nn.functional.interpolate(x[None], scale_factor=1.5, mode="linear")[0], 24_000)
        for x, _ in clips
    ]
    assert accuracy(text_judge, in_24_khz, texts) >= 0.9


def test_classifier_follows_its_labels() -> None:
    """With labels that the sound does not explain, unseen clips are at chance: the tests above can fail."""
    clips, texts, _ = toy_set(range(5, 15))
    shuffled = [
        texts[i] for i in torch.randperm(len(texts), generator=torch.Generator().manual_seed(1)).tolist()
    ]
    judge = train_classifier(clips, shuffled, ClassifierConfig(steps=20))
    test_clips, test_texts, _ = toy_set(range(5))
    assert accuracy(judge, test_clips, test_texts) < 0.7


def test_classifier_is_deterministic_whatever_the_global_generator(text_judge: ClipClassifier) -> None:
    clips, texts, _ = toy_set(range(5, 9))
    config = ClassifierConfig(steps=6)
    torch.manual_seed(1)
    first = train_classifier(clips, texts, config).network.state_dict()
    torch.manual_seed(2)
    second = train_classifier(clips, texts, config).network.state_dict()
    other = train_classifier(clips, texts, ClassifierConfig(steps=6, seed=1)).network.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_classifier_saved_and_loaded_says_the_same(text_judge: ClipClassifier, tmp_path: Path) -> None:
    clips, _, _ = toy_set(range(3))
    text_judge.save(tmp_path / "judge")
    assert ClipClassifier.load(tmp_path / "judge").predict_many(clips) == text_judge.predict_many(clips)


def test_the_company_of_a_clip_has_no_effect(text_judge: ClipClassifier) -> None:
    clips, _, _ = toy_set(range(2))
    longer = (torch.cat([clips[0][0]] * 4, dim=1), RATE)
    together = text_judge.predict_many([*clips, longer])
    for clip, (label, probability) in zip([*clips, longer], together, strict=True):
        alone = text_judge.predict(*clip)
        assert alone[0] == label
        assert alone[1] == pytest.approx(probability, abs=1e-5)


def test_silence_and_tiny_clips(text_judge: ClipClassifier) -> None:
    assert text_judge.predict(torch.zeros(1, 8000), RATE) == ("", 0.0)
    assert text_judge.predict(torch.full((1, 8000), 0.3), RATE) == ("", 0.0)
    assert text_judge.predict(torch.zeros(1, 0), RATE) == ("", 0.0)
    assert text_judge.predict(0.1 * torch.randn(2, 30), RATE)[0] in TEXTS


def test_untrainable_material_is_refused() -> None:
    clips, texts, _ = toy_set(range(2))
    with pytest.raises(UntrainableError, match="at least 2"):
        train_classifier(clips, ["one"] * len(clips))
    with pytest.raises(UntrainableError, match="'silence' are silent"):
        train_classifier([*clips, (torch.zeros(1, 8000), RATE)], [*texts, "silence"])


def test_bandwidth_is_that_of_the_recording_not_of_its_container() -> None:
    from audiollm.audio import resample

    noise = torch.randn(1, 16_000, generator=torch.Generator().manual_seed(0)) * 0.1
    narrow = resample(resample(noise, 16_000, 8_000), 8_000, 24_000)
    assert estimate_bandwidth([(narrow, 24_000)]) == pytest.approx(4000, rel=0.07)
    assert estimate_bandwidth([(noise, 16_000)]) == pytest.approx(8000, rel=0.02)
    filters_FM = mel_filters(4000)
    high_hz = torch.nonzero(filters_FM.sum(dim=1)).max() * 16_000 / 512
    assert high_hz < 3800


def test_mel_power_trims_silence_and_ignores_level() -> None:
    filters_FM = mel_filters(8000)
    sound = melody("one", "anna", 0)
    power_TM = mel_power(sound, RATE, filters_FM)
    torch.testing.assert_close(mel_power(0.01 * sound, RATE, filters_FM), power_TM, rtol=1e-3, atol=1e-4)
    padded = torch.cat([torch.zeros(1, 4800), sound, torch.zeros(1, 8000)], dim=1)
    padded_TM = mel_power(padded, RATE, filters_FM)
    assert len(power_TM) <= len(padded_TM) <= len(power_TM) + 4
    torch.testing.assert_close(padded_TM.sum(dim=0), power_TM.sum(dim=0), rtol=0.15, atol=1.0)


# ------------------------------------------------------------------------------------------ statistics


def test_share_has_the_wilson_interval() -> None:
    """Wilson (1927): (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)."""
    z, n, p = 1.959963984540054, 180, 172 / 180
    middle, spread = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    table = share([True] * 172 + [False] * 8)
    assert table == {
        "accuracy": pytest.approx(p),
        "low": pytest.approx((middle - spread) / (1 + z**2 / n)),
        "high": pytest.approx((middle + spread) / (1 + z**2 / n)),
        "n": 180,
    }
    assert share([])["accuracy"] is None


def test_confusion_counts_every_clip_once() -> None:
    table = confusion(["a", "a", "b", "b"], ["a", "b", "b", "?"], ["a", "b"])
    assert table == {"asked": ["a", "b"], "heard": ["a", "b", NOTHING], "counts": [[1, 1, 0], [0, 1, 1]]}


def test_word_error_rate_counts_words_not_clips() -> None:
    assert word_error_rate(["one two three", "four"], ["one two", "four five"]) == pytest.approx(2 / 4)
    assert word_error_rate(["one", ""], ["one", "noise"]) == 0.0
    assert word_error_rate([""], ["x"]) is None


# ----------------------------------------------------------------------------------------------- stage


def write_corpus(folder: Path) -> None:
    samples = []
    for text in TEXTS:
        for speaker in SPEAKERS:
            for take in range(13):
                name = f"{text}_{speaker}_{take}"
                path = folder / "real" / f"{name}.wav"
                path.parent.mkdir(parents=True, exist_ok=True)
                save(path, melody(text, speaker, take), RATE)
                split = "test" if take < 3 else "train"
                messages = [
                    Message(role="user", content=[TextPart(text=text)]),
                    Message(role="assistant", content=[AudioPart(path=str(path), speaker=speaker)]),
                ]
                about = {"split": split, "speaker": speaker, "text": text, "segment": name}
                samples.append(Sample(id=name, messages=messages, task="tts", metadata=about))
    write_samples(folder / "samples.jsonl", samples)


def write_generated(folder: Path, name: str, heard_text: dict[str, str]) -> Path:
    """Clips that say `heard_text[text]` where `text` is asked for, in the asked voice."""
    rows = []
    for text in TEXTS:
        for speaker in SPEAKERS:
            for take in range(3):
                path = folder / name / "audio" / f"{text}_{speaker}_{take}.wav"
                path.parent.mkdir(parents=True, exist_ok=True)
                save(path, melody(heard_text[text], speaker, 100 + take), RATE)
                row = {
                    "id": path.stem,
                    "path": f"audio/{path.name}",
                    "text": text.capitalize(),
                    "speaker": speaker,
                }
                rows.append({**row, "prompt_index": take, "duration_s": 0.4, "stopped": True})
    write_jsonl(folder / name / "generated.jsonl", rows)
    return folder / name / "generated.jsonl"


def evaluate(folder: Path, audio: Path, output: str, **settings: Any) -> dict[str, Any]:
    output_folder = folder / output
    output_folder.mkdir(exist_ok=True)
    console = Console(quiet=True)
    context = Context(output_folder, cast(Any, None), console, {})
    config = Config(audio=audio, samples=folder / "samples.jsonl", judge_steps=JUDGE_STEPS, **settings)
    return run(config, context)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    right = {text: text for text in TEXTS}
    evaluate(folder, write_generated(folder, "right", right), "evaluate")
    return folder


def fork(corpus: Path, name: str) -> None:
    """A stage folder in which the judges are trained already."""
    shutil.copytree(corpus / "evaluate" / "judges", corpus / name / "judges")


def test_good_clips_score_like_real_ones(corpus: Path) -> None:
    scores = read_json(corpus / "evaluate" / "scores.json")
    assert scores["judge"] == "classifier"
    assert scores["sets"]["real"]["classifier"]["accuracy"] >= 0.9
    assert 0.9 <= scores["relative"]["classifier"] <= 1.1
    assert scores["sets"]["generated"]["speaker"]["accuracy"] >= 0.9
    generated = scores["sets"]["generated"]
    counts = np.array(generated["classifier"]["confusion"]["counts"])
    assert counts.sum() == generated["n"] == 18
    assert np.trace(counts) == round(generated["classifier"]["accuracy"] * 18)
    assert set(generated["classifier"]["by_text"]) == set(TEXTS)
    assert {table["n"] for table in generated["classifier"]["by_speaker"].values()} == {9}
    assert scores["judges"]["pocketsphinx"]["grammar"] == sorted(TEXTS)


def test_clips_are_listed_with_what_was_heard(corpus: Path) -> None:
    rows = read_jsonl(corpus / "evaluate" / "clips.jsonl")
    assert len(rows) == 18
    scores = read_json(corpus / "evaluate" / "scores.json")["sets"]["generated"]
    for judge in ("classifier", "speaker", "pocketsphinx"):
        assert np.mean([row["correct"][judge] for row in rows]) == pytest.approx(scores[judge]["accuracy"])
    for row in rows:
        assert (corpus / "evaluate" / row["path"]).is_file()
        assert set(row["heard"]) == {"classifier", "pocketsphinx"}
        assert row["correct"]["classifier"] == (row["heard"]["classifier"] == row["text"])
        assert 0 < row["confidence"]["speaker"] <= 1


def test_wrong_clips_score_low(corpus: Path) -> None:
    """Texts rotated by one: everything is said in a good voice, and nothing is what was asked for."""
    rotated = dict(zip(TEXTS, [*list(TEXTS)[1:], next(iter(TEXTS))], strict=True))
    fork(corpus, "wrong_run")
    found = evaluate(corpus, write_generated(corpus, "wrong", rotated), "wrong_run")
    assert found["generated_accuracy"] <= 0.1
    assert found["relative_accuracy"] <= 0.1
    assert found["speaker_generated_accuracy"] >= 0.9


def test_missing_and_broken_clips_count_as_wrong_and_are_named(corpus: Path) -> None:
    audio = write_generated(corpus, "broken", {text: text for text in TEXTS})
    (audio.parent / "audio" / "one_anna_0.wav").unlink()
    (audio.parent / "audio" / "two_bert_1.wav").write_bytes(b"RIFF not at all")
    fork(corpus, "broken_run")
    found = evaluate(corpus, audio, "broken_run", reference_audio=corpus / "right" / "generated.jsonl")
    whole = read_json(corpus / "evaluate" / "scores.json")["sets"]["generated"]
    assert found["n_generated"] == 18
    assert found["unreadable"] == 2
    assert found["generated_accuracy"] == pytest.approx(whole["classifier"]["accuracy"] - 2 / 18)
    assert found["speaker_generated_accuracy"] == pytest.approx(whole["speaker"]["accuracy"] - 2 / 18)
    assert found["reference_accuracy"] == whole["classifier"]["accuracy"]
    table = read_json(corpus / "broken_run" / "scores.json")["sets"]["generated"]
    assert {row["id"] for row in table["unreadable"]} == {"one_anna_0", "two_bert_1"}
    assert sum(row[-1] for row in table["classifier"]["confusion"]["counts"]) == 2
    (row,) = [row for row in read_jsonl(corpus / "broken_run" / "clips.jsonl") if row["id"] == "one_anna_0"]
    assert row["problem"] and row["correct"] == {"classifier": False, "speaker": False, "pocketsphinx": False}


def test_a_killed_run_goes_on_and_ends_the_same(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge that is there is not trained again; one that is not, is, to the same weights bit for bit."""
    fork(corpus, "resumed_run")
    speaker = corpus / "resumed_run" / "judges" / "speaker"
    weights = (speaker / "classifier.safetensors").read_bytes()
    (speaker / "classifier.json").unlink()
    (speaker / "classifier.safetensors").write_bytes(b"cut off")
    trained = []

    def counted(*arguments: Any) -> ClipClassifier:
        trained.append(sorted(set(arguments[1])))
        return train_classifier(*arguments)

    monkeypatch.setattr(judges_module, "train_classifier", counted)
    evaluate(corpus, corpus / "right" / "generated.jsonl", "resumed_run", workers=1)
    assert trained == [list(SPEAKERS)]
    assert (speaker / "classifier.safetensors").read_bytes() == weights
    for name in ("scores.json", "clips.jsonl"):
        assert (corpus / "resumed_run" / name).read_text() == (corpus / "evaluate" / name).read_text()


def test_nothing_to_compare_with_ends_with_exit_code_2(corpus: Path, tmp_path: Path) -> None:
    lines = (corpus / "samples.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "samples.jsonl").write_text("".join(line for line in lines if '"train"' in line))
    with pytest.raises(StageError, match="no sample of split 'test'") as caught:
        evaluate(tmp_path, corpus / "right" / "generated.jsonl", "run")
    assert caught.value.exit_code == 2


def test_a_bad_row_is_named(corpus: Path, tmp_path: Path) -> None:
    shutil.copy(corpus / "samples.jsonl", tmp_path)
    (tmp_path / "generated.jsonl").write_text(json.dumps({"id": "a", "path": "a.wav"}) + "\n")
    with pytest.raises(StageError, match=r"generated\.jsonl, row 1: text: Field required"):
        evaluate(tmp_path, tmp_path / "generated.jsonl", "run")


def test_a_judge_is_left_out_with_its_reason() -> None:
    def takes(texts: Sequence[str], speaker: str | None = "anna") -> list[Take]:
        return [Take(f"{i}", Path("x.wav"), text, speaker) for i, text in enumerate(texts)]

    train = takes(["one"] * 5 + ["two"] * 5)
    assert why_no_text_judge(train, takes(["one"])) == ""
    assert why_no_text_judge(train, takes(["seven"])) == "'seven' is asked for and was never trained on"
    assert why_no_text_judge(train[:-1], []).startswith("only 4 training clips of 'two'")
    assert "61 different training texts" in why_no_text_judge(takes([str(i) for i in range(61)] * 5), [])
    assert why_no_speaker_judge(train).startswith("1 speakers")
    assert why_no_speaker_judge(train + takes(["one"] * 5, "bert")) == ""
    assert why_no_speaker_judge(train + takes(["one"] * 9, None)).startswith("1 speakers")


class Echo:
    """A recognizer with an open vocabulary that hears the same in every clip."""

    def recognize(self, samples_CN: Tensor, sample_rate: int) -> str:
        return "one two four"


def test_open_vocabulary_is_scored_by_word_errors(tmp_path: Path) -> None:
    save(tmp_path / "a.wav", melody("one", "anna", 0), RATE)
    judges = Judges({}, cast(Any, Echo()), None, {})
    takes = [Take("a", tmp_path / "a.wav", "one two three", None), Take("b", tmp_path / "b.wav", "one", None)]
    context = Context(tmp_path, cast(Any, None), Console(quiet=True), {})
    answers = hear(takes, judges, context, "hearing")
    assert [bool(answer.problem) for answer in answers] == [False, True]
    sets = {
        "real": score(takes, answers, judges, may_fail=False),
        "generated": score(takes, answers, judges, may_fail=True),
    }
    found = figures({"judge": "pocketsphinx", "sets": sets, "relative": {"pocketsphinx": 0.75}})
    assert found["real_accuracy"] == pytest.approx(1 - 1 / 3), "the unreadable real take is left out"
    assert found["generated_accuracy"] == pytest.approx(1 - 2 / 4), "the unreadable clip is one word wrong"
    assert found["speaker_real_accuracy"] is None
    assert (found["n_real"], found["n_generated"]) == (1, 2)


def test_an_unknown_voice_is_not_judged() -> None:
    judge = cast(Any, type("Known", (), {"labels": ["anna", "bert"]}))
    judges = Judges({"speaker": judge}, cast(Any, Echo()), None, {})
    takes = [Take("a", Path("a"), "one", "anna"), Take("b", Path("b"), "one", "carl")]
    heard = [Heard(0.5, "", {"speaker": "anna", "pocketsphinx": ""})] * 2
    table = score(takes, heard, judges, may_fail=True)["speaker"]
    assert (table["accuracy"], table["n"], table["not_judged"]) == (1.0, 1, 1)


def test_the_stage_is_found_fast_and_plans() -> None:
    code = "import sys, audiollm.evaluate.stage; assert not {'torch', 'scipy', 'jiwer'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    plan = STAGE.plan
    assert plan is not None
    config = Config(audio=Path("/"), samples=Path("/"))
    longer = Config(audio=Path("/"), samples=Path("/"), judge_steps=800)
    few, many = (plan(each, {"train": StagePlan()}).seconds or 0 for each in (config, longer))
    assert 0 < few < many


# ------------------------------------------------------------------------------------------- real digits


@pytest.mark.slow
@pytest.mark.parametrize(("field", "needed"), [(0, 0.99), (1, 0.98)], ids=["digit", "speaker"])
def test_judges_of_real_digits(field: int, needed: float, shared_data: Path) -> None:
    """On takes that they were not trained on: right, robust to what a codec does, and not to what ruins speech."""
    from audiollm.audio import load

    files = sorted((shared_data / "fsdd" / "recordings").glob("*.wav"))
    clips = {tuple(path.stem.split("_")): load(path, mono=True) for path in files}
    pairs = {n: (clip.samples_CN, clip.sample_rate) for n, clip in clips.items()}
    train = {n: pair for n, pair in pairs.items() if int(n[2]) >= 5}
    test = {n: pair for n, pair in pairs.items() if int(n[2]) < 5}
    judge = train_classifier(list(train.values()), [n[field] for n in train])
    labels = [n[field] for n in test]
    assert accuracy(judge, list(test.values()), labels) >= needed
    random = torch.Generator().manual_seed(0)

    def noisy(samples_CN: Tensor, decibels: float) -> Tensor:
        noise = torch.randn(samples_CN.shape, generator=random) * samples_CN.square().mean().sqrt()
        return samples_CN + noise * 10 ** (decibels / 20)

    at_24_khz = [(clip.resample(24_000).samples_CN, 24_000) for n, clip in clips.items() if int(n[2]) < 5]
    assert accuracy(judge, at_24_khz, labels) >= needed
    assert accuracy(judge, [(noisy(x, -20), rate) for x, rate in at_24_khz], labels) >= needed - 0.02
    only_noise = [(noisy(x, 40), rate) for x, rate in at_24_khz]
    assert accuracy(judge, only_noise, labels) <= 1 / len(set(labels)) + 0.1
