"""`audiocot` on composed scenes and on recordings: the truth, made sounds by hand, reasons that add up."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from audiollm.audio.files import load, save
from audiollm.audio.samples import Waveform
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import Sample
from audiollm.data.records.shards import Shards
from audiollm.data.records.thoughts import ThoughtRecord, prose_of
from audiollm.errors import ConfigError, StageError
from audiollm.flow.conditions.reading import sound_request
from audiollm.video.writing import write_video
from pipelines.audiocot.command import audiocot
from pipelines.audiocot.output import in_hundredths
from pipelines.audiocot.settings import AudioCotConfig
from tests.pipelines.audiocot.cot_run import HELD_OUT, RATE, SCENE_S, SCENES, compose, made, rows, think, tone

PLAIN: dict[str, Any] = {"shards": False, "made": {"edits": [], "pairs": False}}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compose(tmp_path_factory.mktemp("scenes"))


@pytest.fixture(scope="module")
def run(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    think(out, scenes, steps={"objects": {}}, samples_per_shard=3)
    return out


@pytest.fixture(scope="module")
def truth(scenes: Path) -> dict[str, Sample]:
    return scenes_by_sound(scenes)


def scenes_by_sound(scenes: Path) -> dict[str, Sample]:
    """Scenes by the file of their sound."""
    return {sample.audio("assistant")[0].path: sample for sample in read_samples(scenes)[0]}


def clips_with_truth(run: Path, truth: dict[str, Sample]) -> list[tuple[dict[str, Any], Sample]]:
    return [(clip, truth[clip["path"]]) for clip in rows(run, "clips.jsonl")]


def units(path: str | Path, start_s: float = 0.0, end_s: float | None = None) -> np.ndarray[Any, Any]:
    """Samples in whole 16-bit units, as the file holds them."""
    return np.round(load(path, start_s, end_s).samples_CN.double().numpy() * 32768).astype(np.int64)


# ----------------------------------------------------------------------------------------------- the record


def test_given_the_truth_the_record_is_the_truth(run: Path, truth: dict[str, Sample]) -> None:
    pairs = clips_with_truth(run, truth)
    assert len(pairs) == len(truth) > 0
    for clip, scene in pairs:
        facts, record = scene.metadata, clip["record"]
        events = sorted(facts["events"], key=lambda event: event["start_s"])
        assert [(e["sound"], e["start_s"], e["end_s"], e["place"]) for e in record["events"]] == [
            (e["name"], e["start_s"], e["end_s"], e["where"]) for e in events
        ]
        assert record["background"] == ([facts["backdrop"]["name"]] if facts["backdrop"] else [])
        assert clip["thought"] == prose_of(ThoughtRecord.model_validate(record)) == facts["thought"]
        assert (clip["caption"], clip["split"]) == (facts["caption"], facts["split"])


def test_objects_have_the_regions_of_their_events(run: Path, truth: dict[str, Sample]) -> None:
    for clip, scene in clips_with_truth(run, truth):
        found = {o["name"]: o for o in clip["measured"]["objects"]["objects"]}
        assert set(found) == {event["name"] for event in scene.metadata["events"]}
        for event in scene.metadata["events"]:
            assert found[event["name"]]["region"] == event["region"]
            assert clip["record"]["events"][found[event["name"]]["event"]]["sound"] == event["name"]


def test_clips_of_a_scene_have_their_part_of_its_truth(
    scenes: Path, truth: dict[str, Sample], tmp_path: Path
) -> None:
    """Times are those of the clip, and what is added or removed is the track of the event that is named."""
    made = {"pairs": False, "edits": ["remove"], "sample_rate": RATE, "channels": 1}
    think(tmp_path, scenes, clip_s=0.5, shards=False, steps={"objects": {}}, made=made)
    clips = {clip["id"]: (clip, scene) for clip, scene in clips_with_truth(tmp_path, truth)}
    cut = 0
    for clip, scene in clips.values():
        start_s, end_s = clip["start_s"], clip["end_s"]
        heard = [
            (e["name"], max(e["start_s"], start_s) - start_s, min(e["end_s"], end_s) - start_s)
            for e in scene.metadata["events"]
            if min(e["end_s"], end_s) - max(e["start_s"], start_s) >= 0.05
        ]
        found = [(e["sound"], e["start_s"], e["end_s"]) for e in clip["record"]["events"]]
        assert [name for name, *_ in found] == [name for name, *_ in heard]
        for (_, *times), (_, *wanted) in zip(found, heard, strict=True):
            assert times == pytest.approx(wanted, abs=0.051) and 0 <= times[0] < times[1] <= 0.55
        cut += sum(begins == 0 or ends == 0.5 for _, begins, ends in found)
        happenings = clip["measured"]["watch"]["happenings"]
        assert [(h["what"], h["start_s"], h["end_s"]) for h in happenings] == found
        events = {o["name"]: o["event"] for o in clip["measured"]["objects"]["objects"]}
        assert {name for name, event in events.items() if event is not None} == {name for name, *_ in found}
    assert cut >= 4 and len(clips) > SCENES + HELD_OUT
    of_scenes = 0
    for sample in read_samples(tmp_path / "edits.jsonl")[0]:
        clip, scene = clips[sample.metadata["clip"]]
        if sample.metadata["reference"] is not None:
            continue
        name = sample.metadata["about"]["events"][0]["sound"]
        (path,) = [e["path"] for e in scene.metadata["events"] if e["name"] == name]
        track = units(scenes.parent / path, clip["start_s"], clip["end_s"])
        assert np.array_equal(units(tmp_path / sample.metadata["layer"]), track)
        of_scenes += 1
    assert of_scenes >= 4


# ---------------------------------------------------------------------------------------------- made sounds


def solo_tracks(scene: Sample, scenes: Path) -> dict[str, np.ndarray[Any, Any]]:
    found = {event["name"]: units(scenes.parent / event["path"]) for event in scene.metadata["events"]}
    if scene.metadata["backdrop"]:
        found["behind"] = units(scenes.parent / scene.metadata["backdrop"]["path"])
    return found


def test_made_sounds_equal_the_operation_done_by_hand(
    run: Path, scenes: Path, truth: dict[str, Sample]
) -> None:
    """Sample for sample, from the scenes' own files."""
    of_clip = {clip["id"]: scene for clip, scene in clips_with_truth(run, truth)}
    triples = {
        sample.id: sample for name in ("edits.jsonl", "cot.jsonl") for sample in read_samples(run / name)[0]
    }
    done = dict[str, int]()
    for sample in triples.values():
        facts = sample.metadata
        if "operation" not in facts:
            continue
        scene, operation = of_clip[facts["clip"]], facts["operation"]
        before, after = (units(sample.audio(role)[0].path) for role in ("user", "assistant"))
        tracks = solo_tracks(scene, scenes)
        whole = sum(tracks.values(), np.zeros_like(units(scene.audio("assistant")[0].path)))
        start, end = (round(second * RATE) for second in facts["span"])
        assert facts["gain"] == 1.0
        if operation == "extend":
            assert np.array_equal(before, whole[:, :start]) and np.array_equal(after, whole)
            assert 0 < start < end == whole.shape[1]
        elif operation == "inpaint":
            by_hand = whole.copy()
            by_hand[:, start:end] = 0
            assert np.array_equal(before, by_hand) and np.array_equal(after, whole) and start < end
        elif operation == "extract":
            reference = of_clip[facts["reference"]]
            name = facts["about"]["events"][0]["sound"]
            other = units(reference.audio("assistant")[0].path)
            assert np.array_equal(after, tracks[name]) and np.array_equal(before, whole + other)
            heard = {event["name"] for event in reference.metadata["events"]}
            assert name not in heard and heard <= set(facts["avoid"]) and name not in facts["avoid"]
        else:
            names = [event["sound"] for event in facts["about"]["events"]]
            if facts["reference"] is None:
                rest = whole - tracks[names[0]]
                longer, shorter = whole, rest
            else:
                longer = whole + units(of_clip[facts["reference"]].audio("assistant")[0].path)
                shorter = whole
            pair = (shorter, longer) if operation == "add" else (longer, shorter)
            assert np.array_equal(before, pair[0]) and np.array_equal(after, pair[1])
            assert np.array_equal(units(run / facts["layer"]), longer - shorter)
        done[operation] = done.get(operation, 0) + 1
    assert set(done) == {"extend", "inpaint", "add", "remove", "extract"} and min(done.values()) >= 2


@pytest.mark.slow
def test_the_truth_and_made_sounds_of_two_hundred_scenes(tmp_path: Path) -> None:
    scenes = compose(tmp_path, 200 - HELD_OUT)
    think(tmp_path / "run", scenes, steps={"objects": {}}, shards=False)
    truth = scenes_by_sound(scenes)
    assert len(truth) == 200
    test_given_the_truth_the_record_is_the_truth(tmp_path / "run", truth)
    test_objects_have_the_regions_of_their_events(tmp_path / "run", truth)
    test_made_sounds_equal_the_operation_done_by_hand(tmp_path / "run", scenes, truth)


def test_sounds_that_would_clip_are_made_with_one_gain(tmp_path: Path) -> None:
    for number, hertz in enumerate((200, 900)):
        save(made(tmp_path / "in" / f"{'ab'[number]}.wav"), tone(1.0, hertz, 0.99), RATE)
    listed = [{"path": "a.wav", "caption": "a"}, {"path": "b.wav", "caption": "b"}]
    (tmp_path / "in" / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in listed))
    funnel = think(
        tmp_path / "out", tmp_path / "in" / "list.jsonl", made={"edits": ["extend"], "sample_rate": RATE}
    )
    assert funnel["made"] == {"extend": 2}
    (first, second) = read_samples(tmp_path / "out" / "edits.jsonl")[0]
    for sample in (first, second):
        assert np.abs(units(sample.audio("assistant")[0].path)).max() <= 0.99 * 32768 + 1


# ------------------------------------------------------------------------------------------- what reads them


def test_every_sample_is_one_that_sound_models_read(run: Path) -> None:
    samples, bad = read_samples(run / "cot.jsonl")
    assert not bad and len({sample.id for sample in samples}) == len(samples)
    for sample in samples:
        request = sound_request(sample, "cot.jsonl")
        assert request.caption and request.cot and request.video is not None and request.target is not None
        wanted = load(request.target.path, request.target.start_s, request.target.end_s)
        assert wanted.samples_CN.any()
        if request.track is not None:  # `encode_latents` takes two sounds of one length
            assert load(request.track.path).samples_CN.shape == wanted.samples_CN.shape


def test_shards_have_sound_and_record(run: Path) -> None:
    shards = Shards(run / "shards")
    clips = {clip["id"]: clip for clip in rows(run, "clips.jsonl")}
    assert len(shards) == len(clips)
    for number in range(len(shards)):
        loaded = shards[number]
        clip = clips[loaded.sample.metadata["clip"]]
        assert json.loads(loaded.sample.texts("assistant")[0]) == in_hundredths(clip["record"])
        (sound,) = loaded.audio
        assert sound.content is not None
        assert loaded.sample.metadata["split"] == clip["split"]


def test_a_run_that_is_done_does_nothing_again(
    run: Path, scenes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr("pipelines.audiocot.steps.built_in.Levels.process", fails)
    monkeypatch.setattr("pipelines.audiocot.made.carrying.operate", fails)
    before = {path: path.read_bytes() for path in run.glob("*.jsonl")}
    think(run, scenes, steps={"objects": {}}, samples_per_shard=3)
    assert {path: path.read_bytes() for path in run.glob("*.jsonl")} == before


def test_shards_follow_a_sound_that_changed_under_the_same_record(tmp_path: Path) -> None:
    heard, plain = [], {"made": {"edits": [], "pairs": False}}
    for level in (0.4, 0.2):
        save(made(tmp_path / "in" / "a.wav"), tone(1.2, 500, level), RATE)
        think(tmp_path / "out", tmp_path / "in", **plain)
        (sound,) = Shards(tmp_path / "out" / "shards")[0].audio
        assert sound.content is not None
        heard.append(float(np.abs(soundfile.read(io.BytesIO(sound.content))[0]).max()))
    assert heard == pytest.approx([0.4, 0.2], rel=0.02)


def test_no_two_samples_share_an_id(tmp_path: Path) -> None:
    """What is made of `a.wav` by `extend` must not be named as `a-extend.wav` is."""
    for number, name in enumerate(("a", "a-extend", "a-extend-think")):
        save(made(tmp_path / "in" / f"{name}.wav"), tone(0.8, 300 + 100 * number), RATE)
    think(tmp_path / "out", tmp_path / "in", shards=False)
    for name, count in (("thinking.jsonl", 9), ("edits.jsonl", 6)):
        ids = [row["id"] for row in rows(tmp_path / "out", name)]
        assert len(ids) == len(set(ids)) == count, name


def test_questions_of_a_kind_lie_in_files_of_their_own(run: Path) -> None:
    questions = rows(run, "thinking.jsonl")
    for kind in ("clip", "region", "instruction"):
        alone = rows(run, f"thinking_{kind}.jsonl")
        assert alone and alone == [row for row in questions if row["metadata"]["question"] == kind]


# -------------------------------------------------------------------------------------------------- choosing


def test_every_file_is_kept_filtered_or_failed_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    save(made(folder / "good.wav"), torch.cat([tone(0.6, 500), tone(0.6, 700)], dim=1), RATE)
    save(folder / "rest.wav", tone(0.9, 300), RATE)
    save(folder / "silent.wav", torch.zeros(1, RATE), RATE)
    save(folder / "short.wav", tone(0.2, 500), RATE)
    (folder / "twin.wav").write_bytes((folder / "good.wav").read_bytes())
    (folder / "torn.mp4").write_bytes(b"\0\0\0\x18ftypisom" + bytes(20))
    (folder / "notes.txt").write_text("nothing")
    funnel = think(tmp_path / "out", folder, clip_s=0.6, review_share=0.5)
    states = {row["name"]: (row["status"], row["reason"]) for row in rows(tmp_path / "out", "files.jsonl")}
    assert states["good.wav"] == ("kept", "") and states["rest.wav"][0] == "kept"
    assert states["twin.wav"] == ("filtered", "the same as good.wav")
    assert states["silent.wav"][0] == "filtered" and "silent" in states["silent.wav"][1]
    assert states["short.wav"] == ("filtered", "1 too short") and states["torn.mp4"][0] == "failed"
    assert (
        funnel["files_kept"] + funnel["files_filtered"] + funnel["files_failed"] == funnel["audio_files"] == 6
    )
    assert funnel["not_audio"] == 1
    kept, filtered = rows(tmp_path / "out", "clips.jsonl"), rows(tmp_path / "out", "filtered.jsonl")
    assert len(kept) + len(filtered) == funnel["segments_found"] == 7 and len(kept) == funnel["segments"] == 3
    assert sum(stage["segments_in"] - stage["segments_out"] for stage in funnel["stages"]) == len(filtered)
    aside = {row["id"] for row in rows(tmp_path / "out", "set_aside.jsonl") if row["id"]}
    assert aside == {row["id"] for row in filtered}
    page = (tmp_path / "out" / "report.html").read_text()
    assert "could not be made" not in page and "too short" in page


def test_files_without_a_split_are_held_out_by_their_content(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for number in range(12):
        save(made(folder / f"{number}.wav"), tone(0.6, 300 + 20 * number), RATE)
    think(tmp_path / "none", folder, clip_s=0.6)
    assert {row["split"] for row in rows(tmp_path / "none", "clips.jsonl")} == {None}
    think(tmp_path / "third", folder, clip_s=0.6, held_out=0.34)
    drawn = {row["digest"]: row["split"] for row in rows(tmp_path / "third", "clips.jsonl")}
    assert {"train", "test"} == set(drawn.values()) and 1 <= list(drawn.values()).count("test") <= 8
    (folder / "0.wav").unlink()
    think(tmp_path / "fewer", folder, clip_s=0.6, held_out=0.34)
    fewer = {row["digest"]: row["split"] for row in rows(tmp_path / "fewer", "clips.jsonl")}
    assert len(fewer) == 11 and fewer.items() <= drawn.items()


def test_a_moved_video_has_its_pictures_where_it_is(tmp_path: Path) -> None:
    """What was measured is known by content; where the file lies is not."""
    frames = [np.full((32, 32, 3), 20 * n, np.uint8) for n in range(8)]
    write_video(made(tmp_path / "in" / "v.mkv"), frames, 8, Waveform(tone(1.0, 400), RATE))
    think(tmp_path / "out", tmp_path / "in", **PLAIN)
    (tmp_path / "in").rename(tmp_path / "moved")
    think(tmp_path / "out", tmp_path / "moved", **PLAIN)
    (clip,) = rows(tmp_path / "out", "clips.jsonl")
    assert clip["video"] == clip["path"] == str(tmp_path / "moved" / "v.mkv")


def test_files_of_one_name_in_two_tars_are_two_files(tmp_path: Path) -> None:
    for number, folder in enumerate("ab"):
        save(made(tmp_path / folder / "1.wav"), tone(0.6, 300 + 100 * number), RATE)
        with tarfile.open(tmp_path / folder / "all.tar", "w") as tar:
            tar.add(tmp_path / folder / "1.wav", "1.wav")
    funnel = think(tmp_path / "out", tmp_path / "*" / "all.tar", made={"edits": ["inpaint"]})
    names = [row["name"] for row in rows(tmp_path / "out", "files.jsonl")]
    assert names == ["all.tar/1.wav", "all.tar/1.wav (2)"] and funnel["files_kept"] == 2
    assert len({clip["id"] for clip in rows(tmp_path / "out", "clips.jsonl")}) == 2
    assert len(list((tmp_path / "out" / "made").iterdir())) == 2


def test_pictures_that_cannot_be_read_are_an_error_of_their_sound(tmp_path: Path) -> None:
    save(made(tmp_path / "in" / "a.wav"), tone(0.6, 300), RATE)
    (tmp_path / "in" / "list.jsonl").write_text(json.dumps({"path": "a.wav", "video": "gone.mp4"}))
    funnel = think(tmp_path / "out", tmp_path / "in" / "list.jsonl", **PLAIN)
    (row,) = rows(tmp_path / "out", "files.jsonl")
    assert row["name"] == "a.wav" and row["status"] == "failed" and "gone.mp4" in row["reason"]
    assert (funnel["audio_files"], funnel["files_failed"]) == (1, 1)


@pytest.mark.parametrize(
    "content", [b"path,caption\na.wav,\xef\xf0\xe8\xe2\xe5\xf2\n", b"path\n" + b"a" * 200_000 + b"\n"]
)
def test_a_list_that_is_no_text_is_a_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "list.csv").write_bytes(content)
    with pytest.raises(StageError, match=r"list\.csv(:2)?: "):
        think(tmp_path / "out", tmp_path / "list.csv")


def test_a_list_of_parts_of_files_is_refused(tmp_path: Path) -> None:
    save(made(tmp_path / "in" / "a.wav"), tone(1.6, 300), RATE)
    part = {"type": "audio", "path": "a.wav", "start_s": 1.0}
    asked = {"role": "user", "content": [{"type": "text", "text": "a tone"}]}
    row = {"id": "a", "task": "sound", "messages": [asked, {"role": "assistant", "content": [part]}]}
    (tmp_path / "in" / "list.jsonl").write_text(json.dumps(row))
    with pytest.raises(StageError, match=r"list.jsonl:1: a.wav is a part of a file"):
        think(tmp_path / "out", tmp_path / "in" / "list.jsonl")


def test_a_balance_without_a_tagger_is_refused(tmp_path: Path) -> None:
    save(made(tmp_path / "in" / "a.wav"), tone(1.6, 300), RATE)
    settings: dict[str, Any] = {"thresholds": {"max_balance": 1.2}}
    with pytest.raises(StageError, match="max_balance: needs the step tags"):
        think(tmp_path / "out", tmp_path / "in", **settings)
    think(tmp_path / "out", tmp_path / "in", **settings, **PLAIN, missing_scorer="skip")
    (skipped,) = json.loads((tmp_path / "out" / "not_applied.json").read_text())
    assert (skipped["threshold"], skipped["value"]) == ("max_balance", 1.2)


def test_music_and_effects_are_balanced_by_a_draw_of_content() -> None:
    from pipelines.audiocot.corpus import balance_drops

    class Listed:
        def __init__(self, order: list[int]) -> None:
            self.order = order

        def parts(self) -> Any:
            for place in self.order:
                kinds = {"voice": 0.0, "music": 0.9 if place < 2 else 0.1}
                tags = {"tags": {"kinds": kinds, "events": [], "tags": []}}
                measured = tags if place < 10 else {}  # the tagger failed on it
                yield place, 0, {"dropped": None, "digest": f"{place}", "start_s": 0.0, "measured": measured}

    drops = balance_drops(Listed(list(range(11))), 1.5, 0)  # type: ignore[arg-type]
    assert len(drops) == 5 and all(place[0] >= 2 for place in drops)
    assert {drop.value for drop in drops.values()} == {4.0}
    assert set(balance_drops(Listed(list(reversed(range(11)))), 1.5, 0)) == set(drops)  # type: ignore[arg-type]


def test_a_review_keeps_verdicts_while_the_record_is_the_same(
    run: Path, scenes: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    think(out, scenes, review_share=0.5, shards=False, made={"edits": [], "pairs": False})
    listed = rows(out, "review.jsonl")
    assert len(listed) == 4  # half of eight
    listed[0]["verdict"], listed[1]["verdict"], listed[1]["note"] = "accepted", "rejected", "no bell"
    listed[2].update(verdict="accepted", record={})
    (out / "review.jsonl").write_text("".join(json.dumps(row) + "\n" for row in listed))
    funnel = think(out, scenes, review_share=0.5, shards=False, made={"edits": [], "pairs": False})
    assert funnel["review"] == {"listed": 4, "accepted": 1, "rejected": 1, "agreement": 0.5}
    assert [row["verdict"] for row in rows(out, "review.jsonl")] == ["accepted", "rejected", None, None]
    plain = {"shards": False, "made": {"edits": [], "pairs": False}}
    assert think(out, scenes, review_share=0, **plain)["review"] == funnel["review"] | {"listed": 2}
    text = (out / "review.jsonl").read_text()
    for wrong, said in ((text.replace('"accepted"', '"acepted"'), "'acepted'"), (f"{text}{{", "line 3: not")):
        (out / "review.jsonl").write_text(wrong)
        with pytest.raises(StageError, match=said):
            think(out, scenes, review_share=0, **plain)
        assert (out / "review.jsonl").read_text() == wrong


def test_a_verdict_survives_a_run_that_does_not_keep_its_clip(scenes: Path, tmp_path: Path) -> None:
    out, plain = tmp_path / "out", {"shards": False, "made": {"edits": [], "pairs": False}}
    think(out, scenes, review_share=1.0, **plain)
    listed = rows(out, "review.jsonl")
    levels = {row["id"]: row["measured"]["levels"]["level_dbfs"] for row in rows(out, "clips.jsonl")}
    quiet, loud = sorted(listed, key=lambda row: levels[row["id"]])[:: len(listed) - 1]
    quiet |= {"verdict": "rejected", "note": "no bell"}
    loud |= {"verdict": "accepted"}
    (out / "review.jsonl").write_text("".join(json.dumps(row) + "\n" for row in listed))
    strict = {"thresholds": {"min_level_dbfs": levels[loud["id"]]}}
    funnel = think(out, scenes, review_share=1.0, **plain, **strict)
    assert funnel["review"] == {"listed": 1, "accepted": 1, "rejected": 0, "agreement": 1.0}
    funnel = think(out, scenes, review_share=1.0, **plain)
    assert funnel["review"] == {"listed": len(listed), "accepted": 1, "rejected": 1, "agreement": 0.5}
    (again,) = [row for row in rows(out, "review.jsonl") if row["id"] == quiet["id"]]
    assert (again["verdict"], again["note"]) == ("rejected", "no bell")
    text = (out / "review.jsonl").read_text()
    (out / "review.jsonl").write_text(text.replace('"rejected"', "null"))
    assert think(out, scenes, review_share=1.0, **plain)["review"]["rejected"] == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"steps": {"objekts": {}}}, "did you mean 'objects'"),
        ({"steps": {"think": None}}, "always there"),
        ({"thresholds": {"max_voices": 1}}, "max_voice"),
        ({"steps": {"listen": {"by": "endpoint"}}}, "url and endpoint_model"),
        ({"steps": {"objects": {"by": "transformers"}}}, "detector and tracker"),
        ({"steps": {"listen": {"prompt": 'Say {"events": []}'}}}, "braces of JSON are doubled"),
    ],
)
def test_wrong_settings_are_refused_with_a_sentence(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        AudioCotConfig.model_validate({"input": str(tmp_path), **settings})


def test_options_go_beside_empty_groups_of_the_settings_file(tmp_path: Path) -> None:
    save(tmp_path / "a.wav", tone(0.6, 300), RATE)
    (tmp_path / "settings.yaml").write_text("preset: everything\nsteps:\n  watch:\nbudget:\n")
    run_command = {"video": "endpoint=m@http://localhost:1/v1", "max_calls": 3, "dry_run": True}
    audiocot([str(tmp_path / "a.wav")], tmp_path / "out", settings=tmp_path / "settings.yaml", **run_command)
    (tmp_path / "settings.yaml").write_text("steps: [watch]\n")
    with pytest.raises(ConfigError, match="steps is not a group of settings"):
        audiocot(
            [str(tmp_path / "a.wav")], tmp_path / "out", settings=tmp_path / "settings.yaml", **run_command
        )


def test_without_truth_sounds_have_times(scenes: Path, tmp_path: Path) -> None:
    """Onsets alone, without a tagger: the first event of each scene is found within a tenth of a second."""
    think(tmp_path, scenes, use_truth=False, shards=False, made={"edits": [], "pairs": False})
    near = 0
    for clip in rows(tmp_path, "clips.jsonl"):
        scene = json.loads((Path(clip["path"]).parent / "scene.json").read_text())
        wanted = min(event["start_s"] for event in scene["metadata"]["events"])
        near += any(abs(event["start_s"] - wanted) < 0.1 for event in clip["record"]["events"])
    assert near >= SCENES + HELD_OUT - 1
    assert SCENE_S > 1
