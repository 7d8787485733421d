"""Which clips the preset `thinksound` drops, rule by rule, with a tagger that knows tones; and agreement with texts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from audiollm.audio import Waveform, load
from audiollm.audio.files import save
from audiollm.evaluate.judges.taggers import WindowScores
from audiollm.video.frames import read_frames
from audiollm.video.writing import write_video
from pipelines.audiocot.settings import AudioCotConfig
from tests.audiollm.evaluate.sound.test_evaluate_sound import save_clap
from tests.audiollm.flow.test_condition_encoders import save_clip
from tests.pipelines.audiocot.cot_run import RATE, made, rows, think, tone

PLAIN: dict[str, Any] = {"shards": False, "made": {"edits": [], "pairs": False}}
TONES = {"Speech": 300.0, "Music": 600.0, "Dog": 900.0}
CLIP_S = 9.1


class ToneTagger:
    """Hears the classes of `TONES` by the strongest frequency of a window, and nothing else."""

    labels, sample_rate, window_s = list(TONES), 16_000, 0.975

    def hear(self, windows: Iterable[NDArray[np.float32]]) -> WindowScores:
        scores = []
        for window_N in windows:
            spectrum = np.abs(np.fft.rfft(window_N))
            hertz = np.argmax(spectrum) * self.sample_rate / len(window_N)
            is_loud = spectrum.max() > 1
            scores.append([0.9 * (is_loud and abs(hertz - own) < 20) for own in TONES.values()])
        return WindowScores(self.labels, np.array(scores, np.float32))


@pytest.fixture
def tagger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of the step `tags`."""
    monkeypatch.setattr("pipelines.annotate.steps.events.load_tagger", lambda config: ToneTagger())
    (tmp_path / "tones.onnx").touch()
    return {"model": str(tmp_path / "tones.onnx")}


def hum(hertz: float, seconds: float = CLIP_S, level: float = 0.3) -> torch.Tensor:
    return level * torch.sin(2 * torch.pi * hertz * torch.arange(round(seconds * RATE)) / RATE)[None]


def fates(out: Path) -> dict[str, str]:
    """Why the one clip of each file was dropped; empty: it was kept."""
    return {row["name"]: row["reason"] for row in rows(out, "files.jsonl")}


def test_each_rule_of_the_preset_drops_its_clips(tmp_path: Path, tagger: dict[str, Any]) -> None:
    """Values of clips that break no rule: 9.1 s, loud, without a voice, with a sound that has a name."""
    folder = tmp_path / "in"
    sounds = {
        "voice.wav": hum(300), "music.wav": hum(600), "dog.wav": hum(900), "nameless.wav": hum(1500),
        "silent.wav": hum(900, level=1e-4), "short.wav": hum(900, seconds=9.0),
    }  # fmt: skip
    for name, sound_1N in sounds.items():
        save(made(folder / name), sound_1N, RATE)
    run: dict[str, Any] = {"preset": "thinksound", "steps": {"tags": tagger}, **PLAIN}
    funnel = think(tmp_path / "out", folder, **run)
    assert fates(tmp_path / "out") == {
        "dog.wav": "", "music.wav": "", "nameless.wav": "1 no sound named", "short.wav": "1 too short",
        "silent.wav": "1 silent", "voice.wav": "1 voice",
    }  # fmt: skip
    assert [stage["segments_in"] - stage["segments_out"] for stage in funnel["stages"]].count(1) == 4
    record = rows(tmp_path / "out", "clips.jsonl")[0]["record"]
    assert record["background"] == ["dog"] and record["avoid"] == ["human voice", "music"]
    think(tmp_path / "strict", folder, **run, thresholds={"max_music": 0.3})
    assert fates(tmp_path / "strict")["music.wav"] == "1 music"
    loose = {"max_voice": None, "min_sounds": None, "min_level_dbfs": None, "min_duration_s": 9.0}
    think(tmp_path / "loose", folder, **run, thresholds={**loose, "max_balance": None})
    assert set(fates(tmp_path / "loose").values()) == {""}


def test_the_preset_balances_music_and_effects(tmp_path: Path, tagger: dict[str, Any]) -> None:
    """At most 1.2 to one: of four clips of effects for one of music, one is kept."""
    save(made(tmp_path / "in" / "music.wav"), hum(600), RATE)
    for number in range(4):
        save(tmp_path / "in" / f"dog-{number}.wav", hum(900, level=0.2 + 0.02 * number), RATE)
    funnel = think(tmp_path / "out", tmp_path / "in", preset="thinksound", steps={"tags": tagger}, **PLAIN)
    kept = [name for name, reason in fates(tmp_path / "out").items() if not reason]
    assert len(kept) == 2 and "music.wav" in kept and funnel["reasons"] == {"out of balance": 3}


def test_one_clip_of_twenty_is_reviewed_unless_told_otherwise(tmp_path: Path) -> None:
    save(made(tmp_path / "in" / "a.wav"), hum(500, seconds=20.0), RATE)
    assert AudioCotConfig(input=str(tmp_path)).review_share == 0.05
    funnel = think(tmp_path / "out", tmp_path / "in", clip_s=0.5, **PLAIN)
    assert (funnel["segments"], funnel["review"]["listed"]) == (40, 2)
    listed = [row["id"] for row in rows(tmp_path / "out", "review.jsonl")]
    assert len(set(listed)) == 2 and set(listed) <= {
        row["id"] for row in rows(tmp_path / "out", "clips.jsonl")
    }


# ------------------------------------------------------------------------------------------------- agreement


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    save_clap(folder / "clap")
    save_clip(folder / "clip")
    return {"sound_text": str(folder / "clap"), "picture_text": str(folder / "clip")}


@pytest.fixture
def films(tmp_path: Path) -> Path:
    """A list of two videos, the second of which has no text."""
    for number, name in enumerate(("told.mkv", "untold.mkv")):
        frames = [np.full((32, 48, 3), 20 * n + 5 * number, np.uint8) for n in range(8)]
        write_video(made(tmp_path / "in" / name), frames, 4, Waveform(tone(2.0, 400 + number), RATE))
    listed = [{"path": "told.mkv", "caption": "a low hum"}, {"path": "untold.mkv", "caption": ""}]
    (tmp_path / "in" / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in listed))
    return tmp_path / "in" / "list.jsonl"


def cosine(one: Any, other: Any) -> float:
    return float(torch.nn.functional.cosine_similarity(one, other, dim=-1).mean())


def test_sound_pictures_and_text_are_compared_by_models(
    films: Path, models: dict[str, str], tmp_path: Path
) -> None:
    """The cosines are those of transformers' own models; thresholds at both sides of them keep and drop."""
    from transformers import AutoTokenizer, ClapModel, ClapProcessor, CLIPImageProcessor, CLIPModel

    step = {"agreement": models}
    think(tmp_path / "out", films, steps=step, **PLAIN)
    told, untold = rows(tmp_path / "out", "clips.jsonl")
    found = told["measured"]["agreement"]
    assert set(found) == {"sound_text", "picture_text"} and untold["measured"]["agreement"] == {}

    film = films.parent / "told.mkv"
    with torch.inference_mode():
        clap, processor = (kind.from_pretrained(models["sound_text"]) for kind in (ClapModel, ClapProcessor))
        heard_N = load(film, sample_rate=48_000).samples_CN[0].numpy()
        sound = processor.feature_extractor(heard_N, sampling_rate=48_000, return_tensors="pt")
        both = clap.eval()(**processor.tokenizer("a low hum", return_tensors="pt"), **sound)
        assert found["sound_text"] == pytest.approx(cosine(both.audio_embeds, both.text_embeds), abs=2e-3)
        clip = CLIPModel.from_pretrained(models["picture_text"]).eval()
        pictures = list(read_frames(film, [0.5, 1.5]))
        pixels = CLIPImageProcessor.from_pretrained(models["picture_text"])(pictures, return_tensors="pt")
        both = clip(
            **AutoTokenizer.from_pretrained(models["picture_text"])("a low hum", return_tensors="pt"),
            **pixels,
        )
        assert found["picture_text"] == pytest.approx(cosine(both.image_embeds, both.text_embeds), abs=2e-3)

    for name, title in (
        ("sound_text", "sound and text disagree"),
        ("picture_text", "picture and text disagree"),
    ):
        for shift, reason in ((-0.01, ""), (0.01, f"1 {title}")):
            out = tmp_path / f"{name}{shift}"
            think(out, films, steps=step, thresholds={f"min_{name}": found[name] + shift}, **PLAIN)
            # what has no text disagrees with none
            assert fates(out) == {"told.mkv": reason, "untold.mkv": ""}


def test_a_threshold_without_its_model_is_refused(
    films: Path, models: dict[str, str], tmp_path: Path
) -> None:
    from audiollm.errors import StageError

    step = {"agreement": {"picture_text": models["picture_text"]}}
    with pytest.raises(StageError, match=r"min_sound_text: needs steps\.agreement\.sound_text"):
        think(tmp_path / "out", films, steps=step, thresholds={"min_sound_text": 0.1}, **PLAIN)
    gone = {"agreement": {"picture_text": str(tmp_path)}}
    with pytest.raises(StageError, match=r"agreement\.picture_text: no model in"):
        think(tmp_path / "out", films, steps=gone, **PLAIN)
