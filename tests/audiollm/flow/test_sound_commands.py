"""The commands `sound generate` and `sound edit`, from the command line to the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import typer
from typer.testing import CliRunner

from audiollm.audio import Waveform, load, save
from audiollm.errors import ConfigError
from audiollm.flow.commands import edit_sound, make_sound
from audiollm.flow.corpus import open_corpus, survey_sounds
from audiollm.flow.editing.tracks import read_track
from audiollm.flow.encoding import ConditionEncoders
from audiollm.flow.sound_model import SoundModel
from audiollm.flow.training import sound_model_config
from audiollm.video.frames import frame_times, probe_video, read_frames
from audiollm.video.writing import write_video
from tests.audiollm.flow.toy import AUTOENCODER, RATE, tone, train_config
from tests.audiollm.video.films import film_of_everything

FAST = ["--steps", "1", "--autoencoder", AUTOENCODER]


def sound(*arguments: object) -> str:
    """What the command prints.

    Raises:
        ConfigError: the command refuses.
    """
    app = typer.Typer()
    app.command("generate")(make_sound)
    app.command("edit")(edit_sound)
    told = CliRunner().invoke(app, [str(each) for each in arguments])
    if isinstance(told.exception, ConfigError):
        raise told.exception
    assert told.exit_code == 0, told.output
    return told.output


def test_a_sound_is_made_for_a_video_as_a_file_and_under_its_pictures(
    trained: Path, encoded: Path, tmp_path: Path
) -> None:
    video = encoded / "3.mp4"
    sound("generate", trained, "--video", video, "--caption", "a high tone", "-o", tmp_path / "a.wav", *FAST)
    alone = load(tmp_path / "a.wav")
    assert alone.samples_CN.shape == (1, RATE) and float(alone.samples_CN.abs().max()) > 0
    sound("generate", trained, "--video", video, "--caption", "a high tone", "-o", tmp_path / "a.mkv", *FAST)
    beside = load(tmp_path / "a.mkv").samples_CN
    torch.testing.assert_close(beside, alone.samples_CN, atol=2e-4, rtol=0)
    times = frame_times(0.0, 1.0, 8)
    shown, original = (np.stack(list(read_frames(path, times))) for path in (tmp_path / "a.mkv", video))
    assert np.array_equal(shown, original)
    sound("generate", trained, "--cot", "a low tone", "--duration", 2.5, "-o", tmp_path / "b.flac", *FAST)
    assert load(tmp_path / "b.flac").samples_CN.shape == (1, round(2.5 * RATE)), "longer than the training"


@pytest.mark.parametrize(
    ("operation", "span"),
    [("extend", ",1.4"), ("inpaint", "0.4,0.7"), ("add", "0.4,0.7"), ("remove", "0.4,")],
)
def test_a_track_is_edited(operation: str, span: str, trained: Path, tmp_path: Path) -> None:
    save(tmp_path / "in.flac", torch.cat([tone(60, 1.0), tone(200, 1.0)]), RATE, "PCM_24")
    told = sound(
        "edit", trained, tmp_path / "in.flac", operation, "--span", span, "--caption", "a high tone",
        "-o", tmp_path / "out.flac", "--layer", tmp_path / "layer.wav", *FAST,
    )  # fmt: skip
    assert "all other samples are those of" in told
    before, after = read_track(tmp_path / "in.flac"), read_track(tmp_path / "out.flac")
    assert (after.subtype, after.sample_rate) == ("PCM_24", RATE)
    first, last = {"extend": (RATE, round(1.4 * RATE)), "remove": (3200, RATE)}.get(operation, (3200, 5600))
    assert np.array_equal(after.samples_NC[:first], before.samples_NC[:first])
    assert np.array_equal(after.samples_NC[last:], before.samples_NC[last:])
    assert np.any(after.samples_NC[first:last] != 0)
    restored = after.without(read_track(tmp_path / "layer.wav"))
    assert np.array_equal(restored.samples_NC[: before.num_samples], before.samples_NC)


def test_the_sample_format_of_an_edit_is_told_where_the_files_own_cannot_be_written_back(
    trained: Path, tmp_path: Path
) -> None:
    save(tmp_path / "in.wav", tone(60, 1.0), RATE, "PCM_16")
    samples, rate = soundfile.read(tmp_path / "in.wav")
    soundfile.write(tmp_path / "telephone.wav", samples, rate, "ULAW")
    told = sound(
        "edit", trained, tmp_path / "telephone.wav", "inpaint", "--span", "0.4,0.7", "--caption", "a high tone",
        "-o", tmp_path / "out.wav", *FAST,
    )  # fmt: skip
    assert "as 32-bit floating-point numbers (there they are ULAW)" in told
    assert soundfile.info(tmp_path / "out.wav").subtype == "FLOAT"
    assert "there they are" not in sound(
        "edit", trained, tmp_path / "in.wav", "inpaint", "--span", "0.4,0.7", "-o", tmp_path / "b.wav", *FAST
    )


def test_the_sound_of_a_video_is_edited(trained: Path, encoded: Path, tmp_path: Path) -> None:
    sound("generate", trained, "--video", encoded / "3.mp4", "-o", tmp_path / "in.mp4", *FAST)
    told = sound(
        "edit", trained, tmp_path / "in.mp4", "add", "--span", "0.2,0.6", "--video", tmp_path / "in.mp4",
        "--region", "4,4,16,16", "-o", tmp_path / "out.mp4", *FAST,
    )  # fmt: skip
    assert "encoded anew (AAC): write .mkv" in told
    facts = probe_video(tmp_path / "out.mp4")
    assert facts.has_audio and facts.width == 32
    assert load(tmp_path / "out.mp4").duration_s == pytest.approx(1.0, abs=0.3)


def test_a_video_keeps_the_rest_of_its_sound(trained: Path, encoded: Path, tmp_path: Path) -> None:
    sound("generate", trained, "--video", encoded / "3.mp4", "-o", tmp_path / "in.mp4", *FAST)
    told = sound(
        "edit", trained, tmp_path / "in.mp4", "add", "--span", "0.2,0.6", "--caption", "a bell", "-o",
        tmp_path / "out.mkv", *FAST,
    )  # fmt: skip
    assert "24 bits of all other samples are kept" in told
    before, after = load(tmp_path / "in.mp4"), load(tmp_path / "out.mkv")
    rate, moved = before.sample_rate, (after.samples_CN - before.samples_CN).abs()
    assert moved[:, : round(0.2 * rate)].max() <= 2**-23 and moved[:, round(0.6 * rate) :].max() <= 2**-23
    assert moved[:, round(0.2 * rate) : round(0.6 * rate)].max() > 2**-16


def test_what_a_new_file_does_not_take_is_named_before_the_work(trained: Path, tmp_path: Path) -> None:
    film = tmp_path / "film.mkv"
    film_of_everything(film)
    edit = ["edit", trained, film, "add", "--span", "0.2,0.6", "--caption", "a bell", *FAST]
    told = sound(*edit, "-o", tmp_path / "same.mkv")
    assert "not kept" not in told
    told = sound(*edit, "-o", tmp_path / "new.mp4")
    assert "not kept, as .mp4 does not take it: the attached file (font.ttf)" in told
    assert told.index("not kept") < told.index("add 0.200")
    with soundfile.SoundFile(tmp_path / "tagged.flac", "w", RATE, 1, "PCM_16", format="FLAC") as file:
        file.title = "Street"
        file.write(tone(60, 3.0)[0].numpy())
    edit[2] = tmp_path / "tagged.flac"
    sound(*edit, "-o", tmp_path / "new.flac")
    with soundfile.SoundFile(tmp_path / "new.flac") as file:
        assert file.title == "Street"
    told = sound(*edit, "--video", film, "-o", tmp_path / "both.mkv")
    assert "the tag title of tagged.flac" in told


def test_peaks_above_full_scale_are_kept_under_pictures(trained: Path, encoded: Path, tmp_path: Path) -> None:
    loud = tmp_path / "loud.wav"
    soundfile.write(loud, 5 * tone(60, 1.0)[0].numpy(), RATE, "FLOAT")
    told = sound(
        "edit", trained, loud, "add", "--span", "0.4,0.6", "--caption", "a bell", "--video", encoded / "3.mp4",
        "-o", tmp_path / "out.mkv", *FAST,
    )  # fmt: skip
    assert "32-bit floating-point numbers of all other samples are kept" in " ".join(told.split())
    before, after = read_track(loud), read_track(tmp_path / "out.mkv")
    assert np.array_equal(after.samples_NC[: round(0.4 * RATE)], before.samples_NC[: round(0.4 * RATE)])


def test_an_edit_that_cannot_be_heard_is_said(trained: Path, tmp_path: Path) -> None:
    """From silence nothing can be removed."""
    save(tmp_path / "in.wav", torch.zeros(1, RATE), RATE)
    edit = [
        "edit",
        trained,
        tmp_path / "in.wav",
        "remove",
        "--caption",
        "a high tone",
        "-o",
        tmp_path / "out.wav",
    ]
    assert "the edit cannot be heard" in sound(*edit, *FAST)


def test_a_sound_is_as_long_as_the_pictures(trained: Path, tmp_path: Path) -> None:
    pictures = [np.full((32, 32, 3), 40, np.uint8)] * 8
    write_video(tmp_path / "long.mkv", pictures, 8, Waveform(tone(60, 2.0), RATE))
    sound("generate", trained, "--video", tmp_path / "long.mkv", "-o", tmp_path / "a.wav", *FAST)
    assert load(tmp_path / "a.wav").duration_s == pytest.approx(1.0, abs=0.01), (
        "the sound of the file has 2 s"
    )


def test_conditions_that_a_model_does_not_take_are_named(encoded: Path, tmp_path: Path) -> None:
    shards = encoded / "encode" / "shards"
    sources, facts = open_corpus([shards])
    usable = survey_sounds(sources, facts)._replace(present=("cot",))
    SoundModel(sound_model_config(train_config(shards), facts, usable)).save_pretrained(tmp_path / "model")
    model, video, out = tmp_path / "model", encoded / "3.mp4", tmp_path / "a.wav"
    with pytest.raises(ConfigError, match="--caption, --video: the model takes cot alone"):
        sound("generate", model, "--video", video, "--caption", "a low tone", "-o", out, *FAST)
    told = sound("generate", model, "--video", video, "--cot", "a low tone", "-o", out, *FAST)
    assert "not used: --video: the model takes cot alone" in told and out.exists()
    track, edited = encoded / "0-mix.wav", tmp_path / "b.wav"
    told = sound("edit", model, track, "add", "--caption", "a low tone", "-o", edited, *FAST)
    assert "not used" not in told, "the chain of thought of an edit follows from its caption"


def test_guidance_that_a_model_cannot_have_is_refused_before_it_encodes(
    encoded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: object, **__: object) -> None:
        raise AssertionError("encoded before the refusal")

    monkeypatch.setattr(ConditionEncoders, "encode", encode)
    shards = encoded / "encode" / "shards"
    sources, facts = open_corpus([shards])
    config = train_config(shards, dropout=0.0, dropout_together=0.0)
    made = sound_model_config(config, facts, survey_sounds(sources, facts))
    SoundModel(made).save_pretrained(tmp_path / "model")
    asked = ["--caption", "a low tone", "--guidance", 4, "-o", tmp_path / "a.wav", *FAST]
    for command in (
        ["generate", tmp_path / "model", "--duration", 1],
        ["edit", tmp_path / "model", encoded / "0-mix.wav", "add"],
    ):
        with pytest.raises(
            ConfigError, match="--guidance.*\n?.*without dropout|without dropout.*\n?.*--guidance"
        ):
            sound(*command, *asked)


def test_what_cannot_be_made_is_refused_before_work(
    trained: Path, encoded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sampled(*_: object, **__: object) -> None:
        raise AssertionError("sampled before the refusal")

    monkeypatch.setattr("audiollm.flow.generator.sample_latents", sampled)
    track, video, absent = encoded / "0-mix.wav", encoded / "3.mp4", tmp_path / "absent"
    broken, out, span = tmp_path / "nan.wav", tmp_path / "x.wav", ("--span", "0.1,0.2")
    soundfile.write(broken, np.append(np.zeros(8000), np.nan), RATE, "FLOAT")
    long = tmp_path / "long.wav"
    save(long, tone(60, 3.0), RATE)
    refused: list[tuple[tuple[object, ...], str]] = [
        (("generate", absent, "-o", "x.wav"), "nothing to make a sound from"),
        (("generate", absent, "--caption", "a", "-o", "x.wav"), "no video to tell the length"),
        (("generate", absent, "--caption", "a", "--duration", 1, "-o", "x.txt"), "no format '.txt'"),
        (("generate", absent, "--caption", "a", "--duration", 1, "-o", "x"), "no format 'x'"),
        (("generate", absent, "--caption", "a", "--duration", 1, "-o", "x.mp4"), "is a video, and none"),
        (("generate", absent, "--caption", "a", "--region", "1,2,3,4", "-o", "x.wav"), "there is no video"),
        (("generate", absent, "--video", video, "--region", "1,2,3", "-o", "x.wav"), "not 4 numbers"),
        (("generate", absent, "--video", video, "--region", "1,2,0,4", "-o", "x.wav"), "is no box"),
        (("generate", absent, "--video", video, "-o", video), "is the input"),
        (("generate", absent, "--caption", "a", "--duration", 1, "-o", "/proc/none/x.wav"), "cannot write in /proc"),
        (("edit", absent, track, "inpaint", *span, "-o", "/proc/none/x.wav"), "cannot write in /proc"),
        (("edit", absent, track, "inpaint", *span, "-o", out, "--layer", "/proc/l.wav"), "/proc/l.wav: cannot"),
        (("generate", absent, "--video", track, "-o", "x.wav"), "no pictures"),
        (("generate", absent, "--video", video, "-o", "x.wav"), "no model here"),
        (("generate", trained, "--video", video, "-o", "x.wav"), "one autoencoder is looked for"),
        (("edit", absent, track, "shorten", "-o", "x.wav"), "no operation 'shorten'"),
        (("edit", absent, track, "add", "--span", "0.1,0.2", "-o", "x.wav"), "nothing to make a sound from"),
        (("edit", absent, track, "inpaint", "--span", "0.5,9", "-o", "x.wav"), "does not lie in the track"),
        (("edit", absent, track, "inpaint", "--span", "0.5", "-o", "x.wav"), "not 2 numbers"),
        (("edit", absent, track, "inpaint", "--span", "0.1,0.2", "-o", "x.flac"), "end the name in .wav"),
        (("edit", absent, track, "inpaint", "--span", "0.1,0.2", "-o", track), "is the input"),
        (("edit", absent, track, "inpaint", "--span", "0.1,0.2", "-o", "x.wav", "--layer", "l.mp3"), "written as WAV"),
        (("edit", absent, track, "inpaint", *span, "-o", out, "--layer", track), f"--layer: {track} is the input"),
        (("edit", absent, track, "inpaint", *span, "-o", out, "--layer", out), "is --out"),
        (("edit", absent, track, "inpaint", *span, "-o", out, "--region", "1,2,3,4"), "there is no video"),
        (("edit", absent, track, "inpaint", "--span", "nan,0.2", "-o", out), "not 2 numbers"),
        (("edit", absent, track, "inpaint", "--span", "0.1,inf", "-o", out), "not 2 numbers"),
        (("edit", absent, track, "inpaint", *span, "-o", out, "--guidance", "inf"), "must be finite"),
        (("edit", absent, broken, "inpaint", *span, "-o", out), "NaN or infinite samples"),
        (("edit", absent, absent, "inpaint", "--span", "0.1,0.2", "-o", "x.wav"), "absent"),
        (("edit", absent, video, "inpaint", "--span", "0.1,0.2", "-o", "x.wav"), "3.mp4"),
        (("generate", trained, "--video", video, "--duration", 3, "-o", "x.wav", *FAST), "ends at"),
        (("edit", absent, track, "inpaint", *span, "-o", "x.mp4"), "no pictures"),
        (("edit", trained, long, "add", "--span", "2.6,2.8", "--cot", "low", "-o", out, *FAST), "from 0.80 s on"),
        (("generate", trained, "--video", video, "--region", "90,0,9,9", "-o", "x.wav", *FAST), "outside"),
        (("generate", trained, "--caption", "a", "--duration", 1, "-o", "x.wav", "--solver", "x", *FAST), "no solver"),
    ]  # fmt: skip
    missed = []
    for arguments, why in refused:
        with pytest.raises(ConfigError) as refusal:
            sound(*arguments)
        if why not in str(refusal.value):
            missed.append((arguments, str(refusal.value)))
    assert not missed
