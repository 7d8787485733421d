"""Plans of pairs and edits: the tracks of the events that a record names, partners, times and levels that hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from audiollm.audio.files import load, save
from audiollm.data.records.thoughts import ThoughtRecord, check_record_times
from pipelines.audiocot.corpus import Partners
from pipelines.audiocot.made.carrying import MadeForm, carry_out
from pipelines.audiocot.made.plans import MadePlan, SoundPart, plan_edits, plan_pairs

RATE = 8_000


def clip_row(
    name: str, sounds: list[str], background: tuple[str, ...] = (), length_s: float = 2.0, scene: bool = False
) -> dict[str, Any]:
    """A kept clip with an event every 0.5 s, of a composed scene or of a recording."""
    events = [
        {"sound": sound, "start_s": 0.5 * place, "end_s": 0.5 * place + 0.4}
        for place, sound in enumerate(sounds)
    ]
    truth = {
        "events": [
            {"name": e["sound"], "start_s": e["start_s"], "end_s": e["end_s"], "path": f"{n}.flac",
             "region": [{"at_s": 0.0, "x": n, "y": 0, "width": 8, "height": 8}]}
            for n, e in enumerate(events)
        ],
        "backdrop": {"name": background[0], "path": "behind.flac"} if background else None,
    }  # fmt: skip
    return {
        "id": name, "digest": name, "path": f"{name}.flac", "start_s": 0.0, "end_s": length_s, "duration_s": length_s,
        "split": None, "record": {"events": events, "background": list(background)},
        "truth": truth if scene else None, "measured": {},
    }  # fmt: skip


def test_tracks_are_those_of_the_events_that_the_record_names() -> None:
    """A model that wrote the record has left the first event out, and heard one that is not there."""
    clip = clip_row("scene", ["bell", "dog", "horn"], scene=True)
    invented = {"sound": "cat", "start_s": 0.9, "end_s": 1.2}
    clip["record"]["events"][:2] = [clip["record"]["events"][1], invented]
    objects = [{"event": 0, "region": []}, {"event": 1, "region": []}, {"event": 2, "region": []}]
    clip["measured"]["objects"] = {"objects": objects}
    partners = Partners([clip, clip_row("other", ["drum"])], 0)
    dog, cat, horn = plan_pairs(clip, partners, 0)
    assert [plan.target for plan in (dog, cat, horn)] == [1, None, 2]
    assert dog.avoid == ("cat", "horn", "drum") and cat.shared == (SoundPart("scene.flac", 0.0, 2.0),)
    taken = set()
    for seed in range(12):
        for plan in plan_edits(clip, partners, ("add", "remove"), seed):
            (event,) = plan.about.events
            number = {"dog": 1, "horn": 2}[event.sound]
            assert plan.changed == (SoundPart(f"{number}.flac", 0.0, 2.0),) and plan.region[0]["x"] == number
            assert [part.path for part in plan.shared] == [f"{n}.flac" for n in range(3) if n != number]
            taken.add(event.sound)
    assert taken == {"dog", "horn"}


def test_a_sound_that_is_removed_may_go_on_in_the_background() -> None:
    clip = clip_row("scene", ["Rain"], ("rain",), scene=True)
    (plan,) = plan_edits(clip, Partners([clip], 0), ("remove",), 0)
    assert plan.record.sounds() == ["rain"] and not plan.record.avoid


def test_a_name_that_tells_nothing_has_no_partner() -> None:
    """A noise may be any sound, also the one that is to be avoided."""
    bell, noisy = clip_row("a", ["bell"]), clip_row("b", ["dog", "noise"])
    also_noisy, dog = clip_row("c", ["bell", "a sound"]), clip_row("d", ["dog"])
    partners = Partners([bell, noisy, also_noisy, dog], 0)
    found = {row["id"]: partners.find(row) for row in (bell, noisy, also_noisy, dog)}
    assert {name: other and other["id"] for name, other in found.items()} == {
        "a": "d", "b": None, "c": None, "d": "a",
    }  # fmt: skip


def test_an_added_sound_that_is_cut_ends_with_the_clip() -> None:
    clip, longer = clip_row("a", ["bell"], length_s=1.2), clip_row("b", ["dog", "cat", "horn", "drum"])
    for plan in plan_edits(clip, Partners([clip, longer], 0), ("add", "remove"), 0):
        assert [event.sound for event in plan.about.events] == ["dog", "cat", "horn"]
        for record in (plan.about, plan.record):
            check_record_times(record, 1.2)
            ThoughtRecord.model_validate(record.model_dump())


def test_input_and_output_differ_by_the_layer_where_their_sums_are_louder_than_the_whole(
    tmp_path: Path,
) -> None:
    """Two parts that are kept sound alike, and what is removed cancels them in part."""
    tone_1N = torch.sin(2 * torch.pi * 440 * torch.arange(RATE) / RATE)[None]
    for name, level in (("a", 0.7), ("b", 0.7), ("c", -0.9)):
        save(tmp_path / f"{name}.flac", level * tone_1N, RATE)
    a, b, c = (SoundPart(str(tmp_path / f"{name}.flac"), 0.0, 1.0) for name in "abc")
    record = ThoughtRecord()
    plan = MadePlan(
        "x", "remove", "x", None, (a, b), (c,), None, 1.0, (0.0, 1.0), record, record, (), (), "seed"
    )
    found = carry_out(plan, MadeForm(tmp_path / "made", RATE, 1))
    before, after, layer = (
        np.round(load(tmp_path / found[name]).samples_CN.double().numpy() * 32768).astype(np.int64)
        for name in ("input", "output", "layer")
    )
    assert found["gain"] < 1 and np.array_equal(before - after, layer)
