"""The suite on generated sounds: from a list to a page, with judges that hear bands of noise."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from audiollm.audio import Waveform, load, save
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.errors import ConfigError, StageError
from audiollm.evaluate.sound.commands import training_sounds
from audiollm.evaluate.sound.edited_sounds import read_edited
from audiollm.evaluate.sound.event_judge import _longest_stretch, event_judge
from audiollm.evaluate.sound.generated_sounds import read_generated
from audiollm.evaluate.sound.sound_judges import ClassSpace, load_sound_classes, load_text_space
from audiollm.evaluate.sound.sound_measures import energy_onsets
from audiollm.evaluate.sound.stage import EvaluateSoundConfig, run_evaluate_sound
from audiollm.evaluate.sound.suite import SuiteJudges, evaluate_sounds
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from audiollm.video.frames import read_frames

RATE = 16_000
HERTZ = {"low": 300.0, "middle": 1_200.0, "high": 4_000.0}


class Bands:
    """Classes by the energy in three bands; silence is refused."""

    def __init__(self) -> None:
        self.labels = list(HERTZ)

    def logits(self, sound: Waveform) -> np.ndarray[Any, Any]:
        power = np.abs(np.fft.rfft(sound.samples_CN.mean(0).numpy())) ** 2
        if power.sum() < 1e-6:
            raise ValueError("silence")
        edges = [0, 700, 2_500, sound.sample_rate / 2]
        places = (np.array(edges) / (sound.sample_rate / 2) * (len(power) - 1)).astype(int)
        shares = np.array([power[a:b].sum() for a, b in itertools.pairwise(places)])
        return np.log(shares / shares.sum() + 1e-4)


class Texts:
    """A space in which a text lies where the band that it names does."""

    def embed(self, sound: Waveform) -> np.ndarray[Any, Any]:
        return np.exp(Bands().logits(sound))

    def embed_text(self, text: str) -> np.ndarray[Any, Any]:
        return np.array([float(label in text) for label in HERTZ])


class Clock:
    """Says that every sound is in time at first and 0.4 s late at the end."""

    def offsets(self, video: Path, sound: Waveform) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        return np.eye(21)[10], np.eye(21)[12]


def tones(*events: tuple[str, float]) -> torch.Tensor:
    """Three seconds with a decaying tone at each time."""
    sound_N = torch.zeros(3 * RATE)
    for label, start_s in events:
        time = torch.arange(round(0.4 * RATE)) / RATE
        start = round(start_s * RATE)
        sound_N[start : start + len(time)] += (
            0.5 * torch.sin(2 * torch.pi * HERTZ[label] * time) * torch.exp(-6 * time)
        )
    return sound_N[None]


@pytest.fixture(scope="module")
def listing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rows = tmp_path_factory.mktemp("sounds"), []
    draw = np.random.default_rng(0)
    for number in range(12):
        labels = [list(HERTZ)[n] for n in draw.permutation(3)[:2]]
        events = list(zip(labels, (0.4 + 0.05 * number, 1.9), strict=True))
        save(folder / f"real-{number}.wav", tones(*events), RATE)
        late = [(label, start_s + (0.5 if number == 3 else 0.04)) for label, start_s in events]
        save(folder / f"made-{number}.wav", tones(*late) if number else torch.zeros(1, 3 * RATE), RATE)
        found = [{"label": label, "start_s": s, "end_s": s + 0.4} for label, s in events]
        facts = {"events": found, "backdrop": {"label": "rain"} if number == 5 else None}
        rows.append(
            {
                "id": f"s{number}",
                "audio": f"made-{number}.wav",
                "reference": f"real-{number}.wav",
                "video": "v.mp4" if number else None,
                "caption": " and ".join(labels),
                "metadata": facts,
            }
        )
    path = folder / "generated.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_what_is_right_scores_well_and_what_is_wrong_is_shown_first(listing: Path) -> None:
    judges = SuiteJudges(Bands(), ClassSpace(Bands()), Texts(), Clock(), {"classes": "bands"})
    training = sorted(listing.parent.glob("made-[1-4].wav"))
    outcome = evaluate_sounds(read_generated(listing), judges, training)
    result = outcome.result
    assert result["recognized"]["n"] == 24 and 0.8 <= result["recognized"]["accuracy"] < 1
    measures = result["measures"]
    assert measures["onsets within 0.2 s"]["n"] == 11, "one has a backdrop"
    assert 0.75 < measures["onsets within 0.2 s"]["mean"] < 0.95
    assert 0.75 < measures["heard onsets that were asked for"]["mean"] <= 1
    assert measures["DeSync"]["mean"] == pytest.approx(0.2) and measures["DeSync"]["not_available"] == 1
    assert measures["CLAP caption"]["mean"] > 0.9 and measures["CLAP CoT"]["n"] == 0
    assert measures["KL softmax"]["n"] == 11 and measures["KL softmax"]["mean"] < 0.3
    assert result["whole"]["Fréchet distance"] < 0.5 and 1 < result["whole"]["inception score"] <= 3
    assert result["whole"]["distance to the nearest training sound"] == pytest.approx(0, abs=1e-6)
    assert outcome.examples[0].title == "s0", "silence"


def test_copies_are_told_beside_the_distance_of_real_sounds(listing: Path) -> None:
    """Two copies of a training sound, whose real sounds are of other classes."""
    (copied, other), folder = read_generated(listing)[1:3], listing.parent
    save(folder / "low.wav", tones(("low", 0.5)), RATE)
    save(folder / "high.wav", tones(("high", 0.5)), RATE)
    sounds = [
        replace(each, path=folder / "low.wav", reference=folder / "high.wav") for each in (copied, other)
    ]
    whole = evaluate_sounds(sounds, SuiteJudges(space=ClassSpace(Bands())), [folder / "low.wav"]).result[
        "whole"
    ]
    low_D, high_D = (
        Bands().logits(load(folder / f"{name}.wav")).astype(np.float64) for name in ("low", "high")
    )
    cosine = low_D @ high_D / np.linalg.norm(low_D) / np.linalg.norm(high_D)
    assert whole["distance to the nearest training sound"] == pytest.approx(0, abs=1e-3)
    assert whole["the same of the real sounds"] == pytest.approx(np.sqrt(2 - 2 * cosine), rel=1e-3)
    assert whole["the same of the real sounds"] > 0.1


def test_measures_without_judges_are_not_available_with_the_reason(listing: Path) -> None:
    sounds = read_generated(listing)[:2]
    result = evaluate_sounds(sounds, SuiteJudges(), [sounds[1].path]).result
    assert result["whole"]["Fréchet distance"] is None
    assert result["whole_reasons"]["Fréchet distance"] == "no space of sounds"
    assert result["whole_reasons"]["distance to the nearest training sound"] == "no space of sounds"
    few = evaluate_sounds(sounds, SuiteJudges(Bands(), ClassSpace(Bands()))).result
    assert "needs 4" in few["whole_reasons"]["Fréchet distance"]


def test_classes_that_cannot_be_compared_have_the_reason(
    listing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, alone, whole = read_generated(listing)[:3]
    alone = replace(alone, reference=None)
    within = evaluate_sounds([replace(whole, video_start_s=1.0)], SuiteJudges(synchrony=Clock())).result[
        "measures"
    ]
    assert within["DeSync"]["reasons"] == {"the sound begins within its video": 1}
    reasons = evaluate_sounds([silent, alone, whole], SuiteJudges(Bands())).result["measures"]["KL softmax"][
        "reasons"
    ]
    assert reasons == {"silence": 1, "no real sound": 1}
    monkeypatch.setattr(Bands, "logits", lambda self, sound: np.full(3, np.nan))
    result = evaluate_sounds([alone, whole], SuiteJudges(Bands())).result
    assert result["measures"]["KL softmax"]["n"] == 0 and result["whole"]["inception score"] is None


def test_training_sounds_are_a_folder_or_samples(listing: Path, tmp_path: Path) -> None:
    config = EvaluateSoundConfig(sounds=listing, training=listing)
    context = Context(tmp_path, Recipe("r", listing, "tiny", 0, tmp_path, (), {}), Console(), {})
    with pytest.raises(ConfigError, match="has no sound to train on.*\n.*give a folder of sound"):
        run_evaluate_sound(config, context)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="empty has no sound to train on"):
        training_sounds(empty, "--training")
    samples = [
        Sample(
            id=f"{split}-{path.stem}",
            task="sound",
            messages=[
                Message(role="user", content=[AudioPart(path=str(listing.parent / "made-0.wav"))]),
                Message(role="assistant", content=[AudioPart(path=str(path))]),
            ],
            metadata={"split": split},
        )
        for path in sorted(listing.parent.glob("made-[1-4].wav"))
        for split in ("train", "test")
    ]
    write_samples(tmp_path / "samples.jsonl", samples)
    of_samples = training_sounds(tmp_path / "samples.jsonl", "training")
    assert of_samples == sorted(listing.parent.glob("made-[1-4].wav"))
    assert set(of_samples) < set(training_sounds(listing.parent, "training"))


class Watcher(Clock):
    """Looks at the first picture."""

    def offsets(self, video: Path, sound: Waveform) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        next(read_frames(video, [0.0]))
        return super().offsets(video, sound)


def test_a_video_that_cannot_be_read_costs_its_own_figure(listing: Path) -> None:
    result = evaluate_sounds(read_generated(listing), SuiteJudges(synchrony=Watcher())).result
    assert result["measures"]["DeSync"]["n"] == 0 and len(result["measures"]) > 1
    reasons = " ".join(result["measures"]["DeSync"]["reasons"])
    assert "v.mp4: does not exist" in reasons


def test_onsets_of_tones_are_found() -> None:
    found = energy_onsets(Waveform(tones(("low", 0.5), ("high", 1.2), ("middle", 2.4)), RATE))
    assert len(found) == 3 and np.abs(found - [0.5, 1.2, 2.4]).max() < 0.05
    assert len(energy_onsets(Waveform(torch.zeros(1, RATE), RATE))) == 0


def test_the_command_writes_a_page(listing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from audiollm.evaluate.sound.commands import sound

    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_judges.py").write_text(
        "from tests.audiollm.evaluate.sound.test_evaluate_sound import Bands, Texts\n"
    )
    import typer

    app = typer.Typer()
    app.command()(sound)
    arguments = [str(listing), "-o", "out", "--classes", "my_judges:Bands", "--clap", "my_judges:Texts"]
    told = CliRunner().invoke(app, [*arguments, "--examples", "2"])
    assert told.exit_code == 0, told.output
    page = (tmp_path / "out/report.html").read_text()
    assert "Fréchet distance" in page and page.count("<audio") == 4
    assert len((tmp_path / "out/rows.jsonl").read_text().splitlines()) == 12


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"id": "a"}, "no sound"),
        ({"id": "a", "audio": "a.wav", "events": [{"label": "x"}]}, "unreadable events"),
    ],
)
def test_rows_that_are_no_sounds_are_named(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    (tmp_path / "l.jsonl").write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=reason) as told:
        read_generated(tmp_path / "l.jsonl")
    assert "l.jsonl:1" in told.value.where


def test_events_without_a_label_go_by_their_name(tmp_path: Path) -> None:
    event = {"name": "a bell", "start_s": 0.1, "end_s": 0.4}
    row = {"id": "a", "audio": "a.wav", "metadata": {"events": [event]}}
    edit = {
        **row,
        "operation": "add",
        "by": "words",
        "before": "b.wav",
        "span": [0, 1],
        "event": event,
        "others": [event],
    }
    (tmp_path / "l.jsonl").write_text(json.dumps(edit))
    (sound,), (edited,) = read_generated(tmp_path / "l.jsonl"), read_edited(tmp_path / "l.jsonl")
    assert sound.events is not None and sound.events[0].label == edited.event.label == "a bell"
    (tmp_path / "l.jsonl").write_text(json.dumps({**row, "metadata": "none"}))
    assert read_generated(tmp_path / "l.jsonl")[0].events is None


def save_clap(folder: Path) -> None:
    """Write a tiny CLAP with its processor, and random weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        ClapAudioConfig,
        ClapConfig,
        ClapFeatureExtractor,
        ClapModel,
        ClapProcessor,
        ClapTextConfig,
        PreTrainedTokenizerFast,
    )

    torch.manual_seed(0)
    text = ClapTextConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    audio = ClapAudioConfig(
        depths=[1, 1],
        num_attention_heads=[1, 2],
        hidden_size=16,
        patch_embeds_hidden_size=8,
        num_hidden_layers=2,
    )
    ClapModel(
        ClapConfig(text_config=text.to_dict(), audio_config=audio.to_dict(), projection_dim=8)
    ).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "<pad>": 1, "rain": 2, "dog": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    plain = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="<pad>", model_max_length=32
    )
    ClapProcessor(ClapFeatureExtractor(truncation="rand_trunc"), plain).save_pretrained(folder)


def test_a_clap_model_of_transformers_is_a_space_of_sounds_and_texts(tmp_path: Path) -> None:
    save_clap(tmp_path)
    space = load_text_space(str(tmp_path))
    place = space.embed(Waveform(tones(("low", 0.5)), RATE))
    assert place.shape == space.embed_text("dog rain").shape == (8,) and np.isfinite(place).all()
    assert not np.allclose(place, space.embed(Waveform(tones(("high", 0.5)), RATE)))
    steady_CN = 0.3 * torch.sin(2 * torch.pi * 300 * torch.arange(round(10.05 * 48_000)) / 48_000)[None]
    steady_CN[:, 480_000:] = 0.3 * torch.randn(1, 2_400, generator=torch.Generator().manual_seed(0))
    places = [space.embed(Waveform(each_CN, 48_000)) for each_CN in (steady_CN, steady_CN[:, :480_000])]
    assert np.allclose(*places), "the last 50 ms count as much as the ten seconds before them"
    with pytest.raises(ConfigError, match="no such file"):
        load_sound_classes(str(tmp_path / "none.tflite"))


def test_noise_has_onsets_that_nobody_asked_for(tmp_path: Path) -> None:
    noise_1N = 0.3 * torch.randn(1, 3 * RATE, generator=torch.Generator().manual_seed(0))
    gusts_N = 1 + 0.9 * torch.sign(torch.sin(2 * torch.pi * 3 * torch.arange(3 * RATE) / RATE))
    save(tmp_path / "noise.wav", (noise_1N * gusts_N).clamp(-1, 1), RATE)
    row = {"id": "n", "audio": "noise.wav", "events": [{"label": "low", "start_s": 1.0, "end_s": 1.4}]}
    (tmp_path / "l.jsonl").write_text(json.dumps(row))
    measures = evaluate_sounds(read_generated(tmp_path / "l.jsonl"), SuiteJudges()).result["measures"]
    assert (
        measures["onsets within 0.2 s"]["mean"] == 1
        and measures["heard onsets that were asked for"]["mean"] < 0.3
    )


def test_nothing_is_heard_within_the_sound_of_a_scene() -> None:
    whole = Message(role="assistant", content=[AudioPart(path="long.wav", start_s=10.0, end_s=13.0)])
    scene = Sample(id="a", task="sound", messages=[whole])
    found = _longest_stretch(scene, [{"start_s": 0.2, "end_s": 1.0}, {"start_s": 2.0, "end_s": 2.5}])
    assert found == ("nothing", "long.wav", 11.0, 12.0)


def test_a_judge_is_trained_on_solo_tracks_and_kept(tmp_path: Path) -> None:
    torch.manual_seed(0)
    samples = []
    for number in range(24):
        label, start_s = ("low", "high")[number % 2], 0.2 + 0.05 * number
        solo_CN = tones((label, start_s))
        save(tmp_path / f"{number}.wav", solo_CN, RATE)
        save(tmp_path / f"{number}-whole.wav", solo_CN + 0.02 * torch.randn_like(solo_CN), RATE)
        event = {"label": label, "path": f"{number}.wav", "start_s": start_s, "end_s": start_s + 0.4}
        split = "test" if number >= 18 else "train"
        text = Message(role="user", content=[TextPart(text=label)])
        metadata = {"split": split, "events": [event, {"label": "no track"}]}
        whole = Message(role="assistant", content=[AudioPart(path=f"{number}-whole.wav")])
        samples.append(Sample(id=str(number), task="sound", messages=[text, whole], metadata=metadata))
    write_samples(tmp_path / "scenes.jsonl", samples)
    judge, accuracy = event_judge(tmp_path / "scenes.jsonl", tmp_path / "judge", steps=80)
    assert judge.labels == ["high", "low", "nothing"] and accuracy["n"] == 9 and accuracy["accuracy"] == 1.0
    written = (tmp_path / "judge" / "classifier.safetensors").read_bytes()
    (tmp_path / "scenes.jsonl").write_text("")
    again, kept = event_judge(tmp_path / "scenes.jsonl", tmp_path / "judge", steps=80)
    assert kept == accuracy and again.labels == judge.labels
    assert (tmp_path / "judge" / "classifier.safetensors").read_bytes() == written
    with pytest.raises(StageError, match="no judge can be trained"):
        event_judge(tmp_path / "scenes.jsonl", tmp_path / "other", steps=80)
