"""Carries out planned pairs and edits: sums of sounds in whole 16-bit units, so that they are equal sample for sample.

Shapes: C channels, N samples.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from audiollm.files.atomic import atomic_path, read_json, write_json
from pipelines.audiocot.made.plans import MadePlan, SoundPart

FULL_SCALE = 32768
_MAX_PEAK = 0.98

Units = NDArray[np.int32]
"""Samples `[C, N]` in units of 16 bits."""


class MadeForm(NamedTuple):
    """Form of the sounds that are made.

    Args:
        folder: each plan has a folder of its own below it.
    """

    folder: Path
    sample_rate: int
    channels: int


class OperatedSounds(NamedTuple):
    """The two sounds of an operation, and what was added to the input, or removed from it."""

    input_CN: Units
    output_CN: Units
    layer_CN: Units | None
    gain: float


def carry_out(plan: MadePlan, form: MadeForm) -> dict[str, Any]:
    """Write `input.flac`, `output.flac` and perhaps `layer.flac` of a plan, or find that they are there already.

    Returns:
        their paths, relative to the folder above `form.folder`, and the gain of all sounds.

    Raises:
        AudioError: a sound cannot be read.
    """
    folder = form.folder / plan.id
    note = folder / "made.json"
    digest = _hash_made_plan(plan, form)
    earlier = _read_made_note(note, digest)
    if earlier is not None:
        return earlier
    note.unlink(missing_ok=True)
    operated = operate(plan, form)
    sounds = {"input": operated.input_CN, "output": operated.output_CN}
    if operated.layer_CN is not None:
        sounds["layer"] = operated.layer_CN
    note_values: dict[str, Any] = {"digest": digest, "gain": round(operated.gain, 9)}
    for name, sound_CN in sounds.items():
        _save_units(folder / f"{name}.flac", sound_CN, form.sample_rate)
        note_values[name] = f"{form.folder.name}/{plan.id}/{name}.flac"
    write_json(note, note_values)
    return note_values


def operate(plan: MadePlan, form: MadeForm) -> OperatedSounds:
    """Do the operation.

    `add` and `remove` differ from each other by the direction alone. `extend` cuts the input at the span's beginning;
    `inpaint` silences the span; `extract` wants one part, or all kept ones, of a sum with the reference.

    Raises:
        AudioError: a sound cannot be read.
    """
    samples = round(plan.duration_s * form.sample_rate)
    parts = [_load_sound_part(sound_part, form, samples) for sound_part in (*plan.shared, *plan.changed)]
    sums = [sum(group) for group in (parts[: len(plan.shared)], parts[len(plan.shared) :], parts) if group]
    highest = max(float(np.abs(sound).max(initial=0.0)) for sound in (*parts, *sums))
    # every part is rounded to whole units before the parts are added
    gain = _MAX_PEAK / highest if highest > 1 - (1 + len(parts)) / FULL_SCALE else 1.0
    units = [np.round(sound_CN * gain * FULL_SCALE).astype(np.int32) for sound_CN in parts]
    zero_CN: Units = np.zeros((form.channels, samples), np.int32)
    kept_CN = sum(units[: len(plan.shared)], zero_CN)
    changed_CN = sum(units[len(plan.shared) :], zero_CN)
    start, end = (min(samples, round(second * form.sample_rate)) for second in plan.span)
    if plan.operation == "extend":
        return OperatedSounds(kept_CN[:, :start], kept_CN, None, gain)
    if plan.operation == "inpaint":
        hidden_CN = kept_CN.copy()
        hidden_CN[:, start:end] = 0
        return OperatedSounds(hidden_CN, kept_CN, None, gain)
    if plan.operation == "extract":
        wanted_CN = kept_CN if plan.target is None else units[plan.target]
        return OperatedSounds(kept_CN + changed_CN, wanted_CN, None, gain)
    whole_CN = kept_CN + changed_CN
    if plan.operation == "add":
        return OperatedSounds(kept_CN, whole_CN, changed_CN, gain)
    return OperatedSounds(whole_CN, kept_CN, changed_CN, gain)


# Private


def _load_sound_part(sound_part: SoundPart, form: MadeForm, samples: int) -> NDArray[np.float64]:
    """A part at the rate and channels of the form, cut or filled up with silence to the length of the clip."""
    from audiollm.audio import load, set_channels

    waveform = load(sound_part.path, sound_part.start_s, sound_part.end_s, sample_rate=form.sample_rate)
    sound_CN = set_channels(waveform.samples_CN, form.channels).double().numpy()[:, :samples]
    return np.pad(sound_CN, ((0, 0), (0, samples - sound_CN.shape[1])))


def _save_units(path: Path, sound_CN: Units, sample_rate: int) -> None:
    import torch

    from audiollm.audio.files import save

    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        save(temporary, torch.from_numpy((sound_CN / FULL_SCALE).astype(np.float32)), sample_rate)


def _hash_made_plan(plan: MadePlan, form: MadeForm) -> str:
    described = [
        plan.operation, plan.shared, plan.changed, plan.target, plan.duration_s, plan.span, plan.seed,
        form.sample_rate, form.channels,
    ]  # fmt: skip
    return sha256(json.dumps(described).encode()).hexdigest()


def _read_made_note(note: Path, digest: str) -> dict[str, Any] | None:
    """Return what was made earlier from the same plan; None where it is absent or of another one."""
    try:
        values = read_json(note)
    except (OSError, ValueError):
        return None
    if not isinstance(values, dict) or values.get("digest") != digest:
        return None
    names = [values.get(name) for name in ("input", "output", "layer") if values.get(name)]
    return values if all((note.parent.parent.parent / str(name)).is_file() for name in names) else None
