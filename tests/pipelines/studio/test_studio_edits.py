"""Requests to the studio's models, without a browser: what is made, edited, refused and stopped."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
import torch

from audiollm.audio import Waveform, load
from audiollm.data.records.sample import Region
from audiollm.data.records.thoughts import ThoughtEvent, ThoughtRecord
from audiollm.errors import ConfigError, StageError
from audiollm.flow.generator import SoundGenerator
from audiollm.flow.model.sampling import sample_latents
from audiollm.flow.service import CLIPS_REMEMBERED, JobStopped, SoundService
from audiollm.video import frames
from audiollm.video.writing import lost_by_replacing, write_video
from pipelines.audiocot.thinking import model_thinker
from pipelines.instructions import EditKind
from pipelines.studio.editor import MakeRequest, SoundEditor
from pipelines.studio.limits import StudioLimits, StudioRefusal
from pipelines.studio.regions import PictureClick, RegionFinder, Sam2Tracker, correlation
from pipelines.studio.server import load_editor
from pipelines.studio.store import ProjectStore
from pipelines.studio.waveforms import muted
from tests.audiollm.flow.test_track_files import contents, write_mp3, write_wav
from tests.audiollm.flow.toy import RATE, tone
from tests.pipelines.audiocot.cot_run import ChatServer
from tests.pipelines.audiocot.test_tracking import tracker as tiny_sam2
from tests.pipelines.studio.tiny_studio import (
    ScriptedWriter,
    closing,
    made_editor,
    moving_pictures,
    opened,
    write_film,
    write_recording,
)

# versions that are made


def test_an_edit_is_a_new_version_that_differs_in_its_span_alone(editor: SoundEditor, tmp_path: Path) -> None:
    source = write_recording(tmp_path / "sound.wav")
    project = opened(editor, source)
    (first,) = editor.store.versions(project)
    assert np.array_equal(
        soundfile.read(editor.store.sound(project, first), dtype="int16")[0],
        soundfile.read(source, dtype="int16")[0],
    )
    asked = MakeRequest("a bell", start_s=0.5, end_s=1.0, steps=3)
    for kind in ("add", "remove", "inpaint"):
        editor.edit(project, "alice/w", first, kind, asked).value()  # type: ignore[arg-type]
    editor.edit(project, "alice/w", first, "extend", MakeRequest("rain", end_s=3.0, steps=2)).value()
    editor.edit(
        project, "alice/w", first, "extract", MakeRequest("rain", start_s=0.0, end_s=2.0, steps=2)
    ).value()
    versions = editor.store.versions(project)
    assert [each.kind for each in versions[1:]] == ["add", "remove", "inpaint", "extend", "extract"]
    before = soundfile.read(source, dtype="int16")[0]
    for version in versions[1:4]:
        after = soundfile.read(editor.store.sound(project, version), dtype="int16")[0]
        same = (before == after).all(axis=1)
        assert same[: RATE // 2].all() and same[RATE:].all() and not same[RATE // 2 : RATE].all()
        assert version.parent == 1 and version.is_same_outside and version.checked_samples == 3 * RATE // 2
        assert all(0.5 <= begin < end <= 1.0 for begin, end in version.changed)
    extended = versions[4]
    assert extended.duration_s == 3.0 and extended.is_same_outside and extended.changed[0][0] >= 2.0


def test_a_sound_is_generated_for_a_film_without_sound_and_exported_with_its_picturescopied_version(
    editor: SoundEditor, tmp_path: Path
) -> None:
    film = write_film(tmp_path / "film.mp4", with_sound=False)
    project = opened(editor, film)
    assert editor.store.versions(project) == [] and project.has_pictures
    editor.store.keep_thought(
        project, ThoughtRecord(events=[ThoughtEvent(sound="bell", start_s=1.0, end_s=2.0)])
    )
    result = editor.generate(project, "alice/w", MakeRequest(steps=2)).value()
    version = editor.store.version(project, result["version"])
    assert version.kind == "generate" and abs(version.duration_s - 3.0) < 0.01 and "bell" in version.cot
    editor.export_video(project, version, tmp_path / "out.mkv")
    assert _packets(tmp_path / "out.mkv") == _packets(film)
    heard, made = load(tmp_path / "out.mkv"), load(editor.store.sound(project, version))
    assert np.array_equal(heard.samples_CN.numpy(), made.samples_CN.numpy())


def test_a_sound_is_extracted_from_its_span_and_the_rest_is_silent(
    generator: SoundGenerator, tmp_path: Path
) -> None:
    with closing(made_editor(tmp_path / "s", generator, StudioLimits(made_s=1.0))) as editor:
        project = opened(editor, write_recording(tmp_path / "sound.wav"))
        first = editor.store.version(project, 1)
        with pytest.raises(StudioRefusal, match="the limit is 1 second at once"):
            editor.edit(project, "w", first, "extract", MakeRequest("rain", start_s=0.0, end_s=2.0))
        asked = MakeRequest("rain", start_s=0.5, end_s=1.0, steps=1)
        made = editor.edit(project, "w", first, "extract", asked).value()
        heard, _ = soundfile.read(editor.store.sound(project, editor.store.version(project, made["version"])))
        assert len(heard) == 2 * RATE and heard[RATE // 2 : RATE].any()
        assert not heard[: RATE // 2].any() and not heard[RATE:].any()


def test_a_long_chain_of_thought_loses_no_sound_that_was_made(editor: SoundEditor, tmp_path: Path) -> None:
    project = opened(editor, write_recording(tmp_path / "sound.wav"))
    events = [
        ThoughtEvent(
            sound=f"{n} {'bell ' * 31}", start_s=0.0, end_s=1.0, source="s" * 160, place="p" * 160, manner="m" * 160
        )
        for n in range(32)
    ]  # fmt: skip
    editor.store.keep_thought(project, ThoughtRecord(events=events))
    made = editor.generate(project, "w", MakeRequest(steps=1)).value()
    version = editor.store.version(project, made["version"])
    assert (len(version.caption), len(version.cot)) == (2000, 20_000)


def test_each_window_of_a_long_sound_is_told_its_part_of_the_chain_of_thought(
    editor: SoundEditor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, conditions = {}, SoundGenerator.conditions

    def spied(*given: Any, start_s: float = 0.0, cot: str | None = None, **named: Any) -> Any:
        told[round(start_s, 2)] = cot
        return conditions(*given, start_s=start_s, cot=cot, **named)

    monkeypatch.setattr(SoundGenerator, "conditions", spied)
    project = opened(editor, write_recording(tmp_path / "sound.wav", 6.0))
    events = [
        ThoughtEvent(sound="bell", start_s=0.5, end_s=0.8),
        ThoughtEvent(sound="dog", start_s=5.5, end_s=6.0),
    ]
    editor.store.keep_thought(project, ThoughtRecord(events=events))
    editor.generate(project, "w", MakeRequest(steps=1)).value()
    first, last = told[0.0], told[max(told)]
    assert first is not None and "at 0.5 seconds, bell" in first and "dog" not in first
    assert last is not None and f"at {5.5 - max(told):.1f} seconds, dog" in last and "bell" not in last


def test_a_film_whose_sound_goes_on_after_its_pictures(editor: SoundEditor, tmp_path: Path) -> None:
    write_video(tmp_path / "film.mp4", moving_pictures(), 8, Waveform(tone(100.0, 4.0), RATE))
    project = opened(editor, tmp_path / "film.mp4")
    assert abs(project.pictures_s - 3.0) < 0.01 and project.duration_s >= 4.0
    source = editor.store.source(project)
    assert editor.regions.follow(source, project.shown_s, [PictureClick(3.0, 87, 48)])
    assert editor.think(project, "w").value()["of_object"] is False
    made = editor.generate(project, "w", MakeRequest("a bell", steps=1)).value()
    assert abs(editor.store.version(project, made["version"]).duration_s - 3.0) < 0.01
    first = editor.store.version(project, 1)
    for start_s, end_s in ((2.0, 2.5), (2.5, 3.5), (3.2, 3.8)):
        asked = MakeRequest("rain", start_s=start_s, end_s=end_s, steps=1)
        edited = editor.store.version(
            project, editor.edit(project, "w", first, "add", asked).value()["version"]
        )
        assert edited.is_same_outside and edited.span == (start_s, end_s)


def test_a_part_of_a_track_is_encoded_once_and_only_the_last_are_kept(
    generator: SoundGenerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []
    encode = generator.autoencoder.encode_distribution
    monkeypatch.setattr(
        generator.autoencoder, "encode_distribution", lambda sound: encoded.append(sound) or encode(sound)
    )
    generator._tracks.clear()
    with closing(made_editor(tmp_path / "s", generator)) as editor:
        project = opened(editor, write_recording(tmp_path / "sound.wav"))
        first = editor.store.version(project, 1)

        def edit(words: str, start_s: float = 0.5, seed: int = 0) -> np.ndarray:
            asked = MakeRequest(words, start_s=start_s, end_s=1.0, steps=1, seed=seed)
            number = editor.edit(project, "w", first, "remove", asked).value()["version"]
            return soundfile.read(editor.store.sound(project, editor.store.version(project, number)))[0]

        made = edit("a bell")
        assert not np.array_equal(edit("rain", seed=1), made) and len(encoded) == 1
        generator._tracks.clear()
        assert np.array_equal(edit("a bell"), made) and len(encoded) == 2  # what was kept is what is encoded
        for number in range(CLIPS_REMEMBERED + 2):
            generator.encode(torch.full((1, 800), number / 100))
        assert len(generator._tracks) == CLIPS_REMEMBERED


def test_a_clip_is_encoded_once(
    generator: SoundGenerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(made_editor(tmp_path / "s", generator)) as editor:
        project = opened(editor, write_film(tmp_path / "film.mp4"))
        encoded = []
        encode = generator.encoders._encode_pictures
        monkeypatch.setattr(
            generator.encoders, "_encode_pictures", lambda *given: encoded.append(given) or encode(*given)
        )
        for seed in (1, 2):
            editor.generate(project, "w", MakeRequest("a bell", seed=seed, steps=1)).value()
        assert len(encoded) == 1
        different = [
            load(editor.store.sound(project, v)).samples_CN for v in editor.store.versions(project)[1:]
        ]
        assert not np.array_equal(different[0], different[1])


def test_requests_that_cannot_be_met(editor: SoundEditor, tmp_path: Path) -> None:
    project = opened(editor, write_recording(tmp_path / "sound.wav"))
    first = editor.store.version(project, 1)
    for kind, asked, sentence in (
        ("add", MakeRequest("", end_s=1.0), "Say which sound"),
        ("add", MakeRequest("rain", start_s=1.5, end_s=2.5), "does not lie in the sound"),
        ("inpaint", MakeRequest("rain"), "Select the seconds"),
        ("extend", MakeRequest("rain", end_s=1.0), "an end after"),
        ("add", MakeRequest("rain", end_s=1.0, steps=0), "1 to 500 steps"),
    ):
        with pytest.raises(StudioRefusal, match=sentence):
            editor.edit(project, "w", first, kind, asked)  # type: ignore[arg-type]
    editor.store.keep_thought(
        project, ThoughtRecord(events=[ThoughtEvent(sound="bell", start_s=4.0, end_s=5.0)])
    )
    with pytest.raises(StudioRefusal, match="Change its times"):
        editor.generate(project, "w", MakeRequest("a bell"))
    with pytest.raises(StudioRefusal, match="no pictures"):
        editor.export_video(project, first, tmp_path / "x.mp4")


# requests that are stopped


def test_a_request_stops_within_two_steps_and_the_next_one_runs(editor: SoundEditor, tmp_path: Path) -> None:
    project = opened(editor, write_recording(tmp_path / "sound.wav"))
    first = editor.store.version(project, 1)
    steps: list[int] = []
    job = editor.edit(project, "alice/w", first, "add", MakeRequest("a bell", end_s=1.0, steps=400))
    took = job.took_step

    def watched(done: int) -> None:
        steps.append(done)
        if done == 3:
            editor.service.stop_job(job)
        took(done)

    job.took_step = watched  # type: ignore[method-assign]
    other = editor.edit(project, "bob/w", first, "add", MakeRequest("rain", end_s=1.0, steps=2))
    assert other.value()["version"] == 2
    assert job.state == "stopped" and len(steps) <= 5
    with pytest.raises(JobStopped):
        job.value()
    assert [each.id for each in editor.store.versions(project)] == [1, 2]


def test_a_sound_that_is_stopped_keeps_none_of_its_arrays(
    editor: SoundEditor, generator: SoundGenerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = opened(editor, write_film(tmp_path / "film.mp4"))
    kept: list[weakref.ref[torch.Tensor]] = []

    def seen(model: Any, noise_LD: torch.Tensor, packed: Any, *given: Any) -> Any:
        kept.append(weakref.ref(noise_LD))
        kept.extend(weakref.ref(each.values_RC) for each in packed.features.values())
        return sample_latents(model, noise_LD, packed, *given)

    monkeypatch.setattr("audiollm.flow.generator.sample_latents", seen)
    job = editor.generate(project, "w", MakeRequest("a bell", steps=500))
    while job.step < 2:
        assert job.problem is None, job.problem
        time.sleep(0.005)
    assert len(kept) == 3 and all(each() is not None for each in kept)
    editor.service.stop_all_on(project.id)
    assert job.wait(60) and job.state == "stopped"
    gc.collect()
    assert [each() for each in kept] == [None] * len(kept)
    assert editor.service.jobs("w") == [job]  # the request itself is still listed


def test_a_chain_of_thought_is_stopped_while_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(made_editor(tmp_path / "s", None)) as editor:
        project = opened(editor, write_film(tmp_path / "film.mp4"))
        read, seen = frames.read_frames, []

        def stopped_at_the_first(*given: Any) -> Iterator[Any]:
            for picture in read(*given):
                seen.append(picture)
                editor.service.stop_all_on(project.id)
                yield picture

        monkeypatch.setattr(frames, "read_frames", stopped_at_the_first)
        job = editor.think(project, "w")
        with pytest.raises(JobStopped):
            job.value()
        assert job.state == "stopped" and len(seen) == 1
        assert editor.store.thought(project) == ThoughtRecord()


@pytest.mark.parametrize("what", ["think", "understand"])
def test_a_wait_for_an_endpoint_is_stopped(tmp_path: Path, what: str) -> None:
    asked, may_answer = threading.Event(), threading.Event()

    def reply(request: dict[str, Any]) -> str:
        asked.set()
        assert may_answer.wait(60)
        return "{}"

    server, limits = ChatServer(reply), StudioLimits()
    store, thinker = ProjectStore(tmp_path / "s", limits), model_thinker(f"endpoint=m@{server.url}", 3)
    with closing(SoundEditor(SoundService(), store, RegionFinder(), thinker, True, limits)) as editor:
        project = opened(editor, write_recording(tmp_path / "a.wav", 0.5))
        job = (
            editor.think(project, "w")
            if what == "think"
            else editor.understand(project, "w", store.version(project, 1), "let it rain")
        )
        try:
            assert asked.wait(60)
            editor.service.stop_all_on(project.id)
            assert job.wait(20) and job.state == "stopped"
        finally:
            may_answer.set()
    server.close()


def test_a_request_on_a_project_that_was_deleted_does_not_begin(editor: SoundEditor, tmp_path: Path) -> None:
    project = opened(editor, write_recording(tmp_path / "sound.wav"))
    editor.delete(project)
    with pytest.raises(StudioRefusal, match="project was deleted meanwhile"):
        editor.think(project, "w").value()


# objects and words


def test_a_clicked_object_is_followed_and_corrected(tmp_path: Path) -> None:
    with closing(made_editor(tmp_path / "s", None)) as editor:
        project = opened(editor, write_film(tmp_path / "film.mp4"))
        source = editor.store.source(project)
        region = editor.regions.follow(source, project.duration_s, [PictureClick(1.0, 42, 48)])
        assert len(region) > 20
        for box in region:
            picture = min(23, int(box.at_s * 8 + 1e-6))
            assert (
                abs(box.x + box.width / 2 - (18 + 3 * picture)) < 4 and abs(box.y + box.height / 2 - 48) < 3
            )
            assert 14 <= box.width <= 22
        boxed = editor.regions.follow(
            source, project.duration_s, [PictureClick(1.0, 42, 48), PictureClick(2.0, 50, 30, 30, 40)]
        )
        at_two = min(boxed, key=lambda box: abs(box.at_s - 2.0))
        assert abs(at_two.width - 33) < 1.5 and abs(at_two.height - 44) < 1.5
        for click, sentence in (
            (PictureClick(1.0, 500, 5), "outside"),
            (PictureClick(1.0, 100, 90), "Nothing stands out"),
        ):
            with pytest.raises(StudioRefusal, match=sentence):
                editor.regions.follow(source, project.duration_s, [click])


def test_an_object_of_one_colour_is_followed(tmp_path: Path) -> None:
    pictures = []
    for number in range(40):
        picture = np.full((180, 320, 3), 90, np.uint8)
        picture[60:110, 20 + 4 * number : 70 + 4 * number] = (220, 30, 30)
        pictures.append(picture)
    write_video(tmp_path / "flat.mp4", pictures, 8, None)
    region = RegionFinder().follow(tmp_path / "flat.mp4", 5.0, [PictureClick(2.5, 125, 85)])
    assert len(region) == 40
    for box in region:
        assert abs(box.x + box.width / 2 - (45 + 4 * int(box.at_s * 8 + 1e-6))) < 3


def test_correlations_are_those_of_each_place() -> None:
    dice = np.random.default_rng(0)
    area_HWC, template_hwC = dice.uniform(0, 255, (14, 17, 3)), dice.uniform(0, 255, (5, 6, 3))
    found_YX = correlation(area_HWC, template_hwC)
    assert found_YX.shape == (10, 12)
    for y, x in ((0, 0), (9, 11), (4, 7)):
        part_hwC = area_HWC[y : y + 5, x : x + 6]
        one, other = (each - each.mean(axis=(0, 1)) for each in (part_hwC, template_hwC))
        wanted = (one * other).sum() / np.sqrt((one**2).sum() * (other**2).sum())
        assert found_YX[y, x] == pytest.approx(wanted, abs=1e-9)
    assert np.abs(correlation(np.full((14, 17, 3), 50.0), template_hwC)).max() < 1e-6, "nothing to compare"


def test_an_object_is_followed_by_a_sam_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracked, track = [], Sam2Tracker.track

    def watched(tracker: Sam2Tracker, pictures: Any, first: int, boxes: Any) -> Any:
        found = track(tracker, pictures, first, boxes)
        tracked.append((len(pictures), first, list(boxes), found))
        return found

    monkeypatch.setattr(Sam2Tracker, "track", watched)
    film = write_film(tmp_path / "film.mp4")
    editor = load_editor(tmp_path / "s", StudioLimits(), tracker=tiny_sam2(tmp_path / "sam2"))
    with closing(editor):
        project = opened(editor, film)
        source = editor.store.source(project)
        region = editor.regions.follow(source, project.shown_s, [PictureClick(1.0, 34, 40, 16, 16)])
    # back to the beginning and on to the end from the clicked picture, the ninth of 24
    assert [each[:3] for each in tracked] == [(count, 0, [(34.0, 40.0, 50.0, 56.0)]) for count in (9, 16)]
    own = tracked[1][3][0]
    followed = [box for box in region if box.at_s > 1.0]
    assert len(followed) == max(0, next((n for n in range(16) if n not in own), 16) - 1)  # until it is lost
    for number, box in enumerate(followed, start=1):
        left, _, right, _ = own[number]
        assert abs(box.x + box.width / 2 - (left + right) / 2) <= 0.05 * (right - left) + 0.2
        assert box.y >= 0 and box.y + box.height <= 96.1
    with pytest.raises(ConfigError, match="no SAM 2 loads from"):
        load_editor(tmp_path / "t", StudioLimits(), tracker=tmp_path)


def test_a_model_that_writes_is_asked_what_words_leave_open(tmp_path: Path) -> None:
    limits, writer = StudioLimits(), ScriptedWriter()
    store = ProjectStore(tmp_path / "s", limits)
    with closing(SoundEditor(SoundService(), store, RegionFinder(), writer, True, limits)) as editor:
        film = opened(editor, write_film(tmp_path / "film.mp4"))
        first, box = editor.store.version(film, 1), Region(x=1, y=2, width=8, height=8)
        reading = editor.understand(film, "w", first, "add a bell").value()
        assert reading == {"edits": [{"kind": "add", "caption": "bell", "start_s": 0.5, "end_s": 1.0}]}
        named = editor.think(film, "w", [box]).value()
        assert (named["caption"], named["of_object"]) == ("bell", True)
        assert store.thought(film) == ThoughtRecord()  # an object's sounds are not the clip's
        assert editor.think(film, "w").value()["of_object"] is False and len(store.thought(film).events) == 1
        heard = [store.sound(film, first), store.source(film), store.source(film)]
        assert [asked.source for asked in writer.asked] == heard
        assert writer.asked[0].video == store.source(
            film
        )  # words are about a version, with the film's pictures
        assert list(writer.asked[1].region) == [box]


def test_words_are_read_without_the_model_where_they_say_all(tmp_path: Path) -> None:
    limits, writer = StudioLimits(made_s=30.0), ScriptedWriter()
    store = ProjectStore(tmp_path / "s", limits)
    with closing(SoundEditor(SoundService(), store, RegionFinder(), writer, True, limits)) as editor:
        project = opened(editor, write_recording(tmp_path / "sound.wav"))
        first = editor.store.version(project, 1)

        def reading(words: str, span: tuple[float, float] | None = None) -> dict[str, Any]:
            return dict(editor.understand(project, "w", first, words, span).value())

        def edit(words: str, span: tuple[float, float] | None = None) -> tuple[object, ...]:
            (plan,) = reading(words, span)["edits"]
            return tuple(plan.values())

        assert edit("keep only the bell", (0.5, 1.5)) == ("extract", "bell", 0.5, 1.5)
        assert edit("add a bell at 1 s") == ("add", "a bell", 1.0, 2.0) and not writer.asked
        assert "not to be done" in reading("do not remove the bell")["question"] and not writer.asked
        assert edit("ring ring", (1.0, 1.5)) == ("add", "bell", 1.0, 1.5), "the selected seconds"
        # a span stays selected after an edit
        assert edit("ring ring at 0.5 s", (1.0, 1.5)) == ("add", "bell", 0.5, 1.0)
        writer.problem = StageError("no answer", "train the model longer")
        assert "no answer" in reading("ring ring")["question"]
        requests = len(writer.asked)
        long = opened(editor, write_recording(tmp_path / "long.wav", 40.0))
        version = editor.store.version(long, 1)
        assert "question" in editor.understand(long, "w", version, "ring ring").value()
        assert len(writer.asked) == requests


def test_edits_of_a_sentence_are_carried_out_in_turn(editor: SoundEditor, tmp_path: Path) -> None:
    project = opened(editor, write_recording(tmp_path / "sound.wav"))
    first = editor.store.version(project, 1)
    edits: list[tuple[EditKind, MakeRequest]] = [
        ("mute", MakeRequest(start_s=0.5, end_s=1.0)),
        ("add", MakeRequest("a bell", start_s=1.2, end_s=1.5, steps=2)),
        ("extend", MakeRequest("rain", end_s=2.5, steps=2)),
        ("mute", MakeRequest(start_s=2.2, end_s=2.4)),
    ]
    job = editor.edit_in_turn(project, "w", first, edits)
    assert job.value()["version"] == 5
    versions = editor.store.versions(project)
    assert [(each.request, each.edit_number, each.edit_count) for each in versions[1:]] == [
        (editor.key(job), number, 4) for number in (1, 2, 3, 4)
    ]
    assert [(each.kind, each.parent) for each in versions[1:]] == [
        ("mute", 1), ("add", 2), ("extend", 3), ("mute", 4),
    ]  # fmt: skip
    assert all(version.is_same_outside for version in versions[1:])


def test_edits_that_were_applied_before_an_error_or_a_hold_are_counted(
    editor: SoundEditor, tmp_path: Path
) -> None:
    project = opened(editor, write_recording(tmp_path / "sound.wav"))
    first = editor.store.version(project, 1)
    edits: list[tuple[EditKind, MakeRequest]] = [
        ("mute", MakeRequest(start_s=0.1, end_s=0.2)),
        ("add", MakeRequest("a bell", start_s=1.2, end_s=1.5, steps=300)),
        ("mute", MakeRequest(start_s=0.3, end_s=0.4)),
    ]
    job = editor.edit_in_turn(project, "w", first, edits)
    while job.step < 2:
        time.sleep(0.005)
    editor.service.hold("w")
    while job.state != "held":
        time.sleep(0.005)
    assert job.result == {"version": 2, "applied": 1}
    editor.service.resume("w")
    assert job.value()["version"] == 4
    versions = editor.store.versions(project)
    assert [(each.kind, each.parent, each.edit_number) for each in versions[1:]] == [
        ("mute", 1, 1), ("add", 2, 2), ("mute", 3, 3),
    ]  # fmt: skip
    failing = editor.edit_in_turn(project, "w", first, edits)
    while failing.step < 2:
        time.sleep(0.005)
    editor.store.delete_version(project, editor.store.version(project, 5))
    with pytest.raises(StudioRefusal, match="Version 5 was deleted meanwhile"):
        failing.value()
    assert failing.state == "failed" and failing.result == {"version": 5, "applied": 1}


def test_a_muted_span_is_silent_and_the_rest_is_the_same_without_a_model(tmp_path: Path) -> None:
    with closing(made_editor(tmp_path / "s", None)) as editor:
        project = opened(editor, write_recording(tmp_path / "sound.wav"))
        first = editor.store.version(project, 1)
        before = soundfile.read(editor.store.sound(project, first), dtype="int16")[0]
        for span_s, fades in (
            ((0.5, 1.0), (True, True)),
            ((0.0, 0.5), (False, True)),
            ((1.5, 2.0), (True, False)),
        ):
            editor.edit(project, "w", first, "mute", MakeRequest(start_s=span_s[0], end_s=span_s[1])).value()
            version = editor.store.versions(project)[-1]
            after = soundfile.read(editor.store.sound(project, version), dtype="int16")[0]
            start, end = (round(second * RATE) for second in span_s)
            fade = round(0.005 * RATE)
            assert (after[start + fade * fades[0] : end - fade * fades[1]] == 0).all()
            assert np.array_equal(after[:start], before[:start]) and np.array_equal(after[end:], before[end:])
            assert version.is_same_outside and len(after) == len(before)


def test_a_muted_span_fades_at_its_ends_and_not_at_those_of_the_recording() -> None:
    for samples_NC in (np.full((100, 2), 1000, np.int32), np.ones((100, 2))):
        full = samples_NC[0, 0]
        quiet_NC = muted(samples_NC, 10, (True, False))
        assert quiet_NC.dtype == samples_NC.dtype and not quiet_NC[10:].any()
        assert quiet_NC[0, 0] > 0.9 * full and (np.diff(quiet_NC[:11, 0]) < 0).all()
        assert np.array_equal(muted(samples_NC, 10, (False, True)), quiet_NC[::-1])
        assert not muted(samples_NC, 10, (False, False)).any()


def test_an_edit_without_seconds_or_an_object_is_refused(editor: SoundEditor, tmp_path: Path) -> None:
    project = opened(editor, write_recording(tmp_path / "sound.wav"))
    first = editor.store.version(project, 1)
    for kind in ("add", "remove", "extract", "inpaint", "mute"):
        with pytest.raises(StudioRefusal, match="Select the seconds to"):
            editor.edit(project, "w", first, kind, MakeRequest("a bell"))
    with pytest.raises(StudioRefusal, match="Say which sound to add"):
        editor.edit(project, "w", first, "add", MakeRequest(start_s=0.5, end_s=1.0))
    assert len(editor.store.versions(project)) == 1


@pytest.mark.parametrize("ending", [".wav", ".flac", ".mp3"])
def test_an_exported_wav_has_what_the_opened_file_holds(
    editor: SoundEditor, tmp_path: Path, ending: str
) -> None:
    source, out = tmp_path / f"a{ending}", tmp_path / "out.wav"
    if ending == ".wav":
        write_wav(source, "PCM_24", "WAV")
    elif ending == ".mp3":
        write_mp3(source)
    else:
        with soundfile.SoundFile(source, "w", RATE, 1, "PCM_16", format="FLAC") as file:
            file.title, file.artist = "Title", "Ann"
            file.write(np.zeros(RATE))
    project = opened(editor, source)
    first = editor.store.version(project, 1)
    muting = MakeRequest(start_s=0.1, end_s=0.2)
    version = editor.store.version(
        project, editor.edit(project, "w", first, "mute", muting).value()["version"]
    )
    editor.export_sound(project, version, out)
    stored = soundfile.read(editor.store.sound(project, version), dtype="int32")[0]
    assert np.array_equal(soundfile.read(out, dtype="int32")[0], stored)
    with soundfile.SoundFile(out) as file:
        assert (file.title, file.artist) == ("Street" if ending == ".mp3" else "Title", "Ann")
    lost = editor.lost_by_export(project, version, ".wav")
    assert lost == (["the tag composer"] if ending == ".mp3" else [])
    if ending == ".wav":
        assert contents(out)[b"bext"] == contents(source)[b"bext"]
    # what was made has no artist of the file
    made = editor.generate(project, "w", MakeRequest("rain", steps=1)).value()["version"]
    editor.export_sound(project, editor.store.version(project, made), out)
    with soundfile.SoundFile(out) as file:
        assert not file.title and not file.artist
    assert not list(tmp_path.glob("*.tags"))


def test_what_an_exported_film_cannot_hold_is_named(editor: SoundEditor, tmp_path: Path) -> None:
    film = write_film(tmp_path / "film.mp4")
    project = opened(editor, film)
    first = editor.store.version(project, 1)
    expected = lost_by_replacing(film, Path("film.mkv"), first.sample_rate, first.channels)
    assert editor.lost_by_export(project, first, ".mkv") == expected
    assert editor.lost_by_export(project, first, ".wav") == []


def _packets(path: Path) -> list[bytes]:
    with av.open(str(path)) as container:
        return [bytes(packet) for packet in container.demux(container.streams.video[0]) if packet.size]
