"""The work of the stage `generate_sound`: sounds for samples, and their list.

A sound that is there already is kept, so that a killed run goes on; its seed follows from the sample's id and the take.
Sounds of one length are sampled together, always the same ones.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from audiollm.audio import AudioError, load, save
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.mixture import evenly
from audiollm.data.records.sample import AudioPart, Sample
from audiollm.errors import BadSample, ConfigError, StageError
from audiollm.files.atomic import safe_name, write_jsonl
from audiollm.files.set_aside import UNREADABLE, SetAside
from audiollm.flow.conditions.reading import sound_request
from audiollm.flow.editing.levels import below_ceiling
from audiollm.flow.encoding import encode_track, load_track
from audiollm.flow.generator import (
    SoundGenerator,
    SoundSpec,
    check_length,
    fill_latents,
    fits_at_once,
    make_in_windows,
    sampler_settings,
)
from audiollm.flow.model.context import LatentState, span_context
from audiollm.flow.model.packed import Conditions
from audiollm.flow.settings import GenerateSoundConfig
from audiollm.flow.sound_model import check_guidance
from audiollm.recipe.runner import Context


def generate_sounds(config: GenerateSoundConfig, context: Context) -> dict[str, Any]:
    """Make the sounds into `audio`, and list them in `generated.jsonl`.

    Raises:
        StageError: no sample can be used.
        ConfigError: the model, its autoencoder or an encoder cannot be loaded, or do not go together.
    """
    samples, bad = read_samples(config.samples)
    set_aside = SetAside(context.folder / "set_aside.jsonl", "generate_sound")
    set_aside.add(bad)
    selected_samples = chosen_samples(samples, config.split, config.max_samples)
    generator = SoundGenerator.load(config.model, config.autoencoder)
    check_guidance(generator.model.config, sampler_settings(config.sampling), "generate_sound.sampling")
    items = [(sample, take) for sample in selected_samples for take in range(config.takes)]
    rows = []
    with context.progress("making sounds", len(items)) as bar:
        for first in range(0, len(items), config.batch_size):
            batch = items[first : first + config.batch_size]
            batch_rows, bad = _make_batch(batch, config, generator, context.folder)
            rows += batch_rows
            set_aside.add(bad)
            bar.advance(bar.task_ids[0], len(batch))
    if not rows:
        raise StageError(
            "generate_sound: no sample can be used", f"see {context.folder / 'set_aside.jsonl'}", 2
        )
    write_jsonl(context.folder / "generated.jsonl", rows)
    return {"sounds": len(rows), "set_aside": len(set_aside.rows)}


def chosen_samples(samples: Sequence[Sample], split: str, max_samples: int) -> list[Sample]:
    """The samples of a split (`test`, `train` or `all`), at most so many of them, picked evenly."""
    split_samples = [sample for sample in samples if split == "all" or _split_of_sample(sample) == split]
    return [split_samples[place] for place in evenly(len(split_samples), max_samples)]


# Private

_log = logging.getLogger("audiollm.flow")


def _split_of_sample(sample: Sample) -> str:
    return "test" if sample.is_held_out else "train"


class _Planned(NamedTuple):
    """A sound that is to be made."""

    sample: Sample
    place: str
    """Where the sample stands, for errors."""
    row: dict[str, Any]
    key: str
    track: AudioPart | None
    """The track of which an edit is wanted."""


def _make_batch(
    batch: Sequence[tuple[Sample, int]], config: GenerateSoundConfig, generator: SoundGenerator, folder: Path
) -> tuple[list[dict[str, Any]], list[BadSample]]:
    """Make sounds, or keep those that are there. Returns their rows, and the samples that cannot be used."""
    planned: list[_Planned] = []
    bad: dict[str, BadSample] = {}
    together: dict[int, list[_Planned]] = {}
    for sample, take in batch:
        key = f"{config.seed}/{sample.id}/{take}"
        try:
            sound = _plan_sound(sample, take, key, config, generator, folder)
            if sound.track is None and fits_at_once(generator, sound.row["duration_s"]):
                count = generator.latents_of(generator.samples_of(sound.row["duration_s"]))
                together.setdefault(count, []).append(sound)
            elif not (folder / sound.row["audio"]).exists():
                _save_below_full_scale(
                    folder / sound.row["audio"], _make_alone(sound, config, generator), generator.sample_rate
                )
            planned.append(sound)
        except BadSample as error:
            bad[key] = error
    for count, sounds in together.items():
        bad |= _make_together(count, sounds, config, generator, folder)
    return [sound.row for sound in planned if sound.key not in bad], list(bad.values())


def _plan_sound(
    sample: Sample,
    take: int,
    key: str,
    config: GenerateSoundConfig,
    generator: SoundGenerator,
    folder: Path,
) -> _Planned:
    """Plan a sound: its row of the list, the key of its noise, and the track that is edited, if any.

    Raises:
        BadSample: nothing tells its length, or something of it cannot be read.
    """
    place = f"{config.samples}: {sample.id}"
    request = sound_request(sample, place)
    track = request.track if config.edit else None
    given_s = None if track else config.duration_s  # an edit is as long as its track
    row = {
        "id": sample.id,
        "take": take,
        "audio": f"audio/{safe_name(sample.id)}-{take}.wav",
        "caption": request.caption,
        "thought": request.cot,
        "reference": _reference_file(sample.id, request.target, folder, place) if request.target else None,
        "video": request.video.path if request.video else None,
        "video_start_s": request.video.start_s if request.video else 0.0,
        "duration_s": given_s or _requested_duration_s(sample, generator, place),
        "metadata": sample.metadata,
    }
    return _Planned(sample, place, row, key, track)


def _conditions_of_plan(
    sound: _Planned, config: GenerateSoundConfig, generator: SoundGenerator, start_s: float, length_s: float
) -> Conditions:
    only = None if config.conditions is None else set(config.conditions)
    return generator.conditions(sound.sample, length_s, sound.place, only, start_s)


def _make_together(
    count: int,
    sounds: Sequence[_Planned],
    config: GenerateSoundConfig,
    generator: SoundGenerator,
    folder: Path,
) -> dict[str, BadSample]:
    """Make sounds of one length; returns why the conditions of some cannot be read, by their keys."""
    bad: dict[str, BadSample] = {}
    if all((folder / sound.row["audio"]).exists() for sound in sounds):
        return bad
    sounds_to_make: list[tuple[_Planned, SoundSpec]] = []
    for sound in sounds:
        try:
            conditions = _conditions_of_plan(sound, config, generator, 0.0, sound.row["duration_s"])
            sounds_to_make.append((sound, SoundSpec(conditions, sound.key)))
        except BadSample as error:
            bad[sound.key] = error
    if not sounds_to_make:
        return bad
    settings = sampler_settings(config.sampling)
    latents = generator.sample_together([wanted_sound for _, wanted_sound in sounds_to_make], count, settings)
    for (sound, _), latent_TD in zip(sounds_to_make, latents, strict=True):
        path = folder / sound.row["audio"]
        if not path.exists():
            num_samples = generator.samples_of(sound.row["duration_s"])
            _save_below_full_scale(path, generator.decode(latent_TD, num_samples), generator.sample_rate)
    return bad


def _save_below_full_scale(path: Path, made_CN: Tensor, sample_rate: int) -> None:
    """Write a sound; where its peaks are above full scale, it is turned down and logged."""
    made_CN, gain_db = below_ceiling(made_CN, sample_rate)
    if gain_db:
        _log.info("%s: turned down by %.1f dB: its peaks were above full scale", path.name, -gain_db)
    save(path, made_CN, sample_rate)


def _make_alone(sound: _Planned, config: GenerateSoundConfig, generator: SoundGenerator) -> Tensor:
    """An edit of a track, or a sound that is longer than those of the training, `[C, N]`.

    Raises:
        BadSample: the track cannot be read, or the model cannot make such a length.
    """
    settings, duration_s = sampler_settings(config.sampling), sound.row["duration_s"]

    def conditions_at(start_s: float, length_s: float) -> Conditions:
        return _conditions_of_plan(sound, config, generator, start_s, length_s)

    if sound.track is not None:
        track_CN = load_track(sound.track, generator.autoencoder, sound.sample.id, sound.place)
        mean_TD = encode_track(generator.autoencoder, track_CN).mean_DT.T.contiguous()
        context = span_context(mean_TD, 0, len(mean_TD), LatentState.VISIBLE)
        latent_TD = fill_latents(generator, context, 0.0, conditions_at, settings, sound.key)
        return generator.decode(latent_TD, track_CN.shape[1])
    try:
        check_length(generator, duration_s)
    except ConfigError as error:
        raise BadSample(sound.place, sound.sample.id, error.message, "too long for the model") from error
    return make_in_windows(generator, conditions_at, duration_s, settings, sound.key)


def _reference_file(sample_id: str, target: AudioPart, folder: Path, place: str) -> str:
    """The file of the real sound; a part of a longer file is cut out of it.

    Raises:
        BadSample: it cannot be read.
    """
    if not target.start_s and target.end_s is None:
        return target.path
    path = folder / f"audio/{safe_name(sample_id)}-real.wav"
    if not path.exists():
        try:
            cut = load(target.path, target.start_s, target.end_s)
        except AudioError as error:
            raise BadSample(place, sample_id, str(error), UNREADABLE) from error
        save(path, cut.samples_CN, cut.sample_rate, "PCM_24")
    return str(path)


def _requested_duration_s(sample: Sample, generator: SoundGenerator, place: str) -> float:
    """The length of the sample's track, wanted sound or video.

    Raises:
        BadSample: it has none of them.
    """
    from audiollm.video.decoders import VideoError
    from audiollm.video.frames import pictures_end_s

    request = sound_request(sample, place)
    audio_part = request.track or request.target
    if audio_part is not None:
        return (
            load_track(audio_part, generator.autoencoder, sample.id, place).shape[1] / generator.sample_rate
        )
    if request.video is not None:
        try:
            end_s = request.video.end_s or pictures_end_s(request.video.path)
        except VideoError as error:
            raise BadSample(place, sample.id, str(error), "unreadable video") from error
        if end_s > request.video.start_s:
            return end_s - request.video.start_s
    raise BadSample(place, sample.id, "has no sound or video to tell the length: set duration_s", "no length")
