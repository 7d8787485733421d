"""The work of the stage `generate_sound`: sounds for samples, and their list.

A sound that is there already is kept, so that a killed run goes on; its seed follows from the sample's id and the take.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from audiollm.audio import AudioError, load, save
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.mixture import evenly
from audiollm.data.records.sample import AudioPart, Sample
from audiollm.errors import BadSample, ConfigError, StageError
from audiollm.files.atomic import safe_name, write_jsonl
from audiollm.files.set_aside import UNREADABLE, SetAside
from audiollm.flow.conditions.reading import sound_request
from audiollm.flow.encoding import encode_track, load_track
from audiollm.flow.generator import SoundGenerator, sampler_settings
from audiollm.flow.model.context import LatentState, span_context
from audiollm.flow.model.packed import Conditions
from audiollm.flow.settings import GenerateSoundConfig
from audiollm.flow.sound_model import check_guidance
from audiollm.flow.windows import check_length, fill_latents, make_in_windows
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
    chosen = chosen_samples(samples, config.split, config.max_samples)
    generator = SoundGenerator.load(config.model, config.autoencoder)
    check_guidance(generator.model.config, sampler_settings(config.sampling), "generate_sound.sampling")
    rows = []
    with context.progress("making sounds", len(chosen) * config.takes) as bar:
        for sample in chosen:
            for take in range(config.takes):
                try:
                    rows.append(_make(sample, take, config, generator, context.folder))
                except BadSample as error:
                    set_aside.add([error])
                bar.advance(bar.task_ids[0])
    if not rows:
        raise StageError(
            "generate_sound: no sample can be used", f"see {context.folder / 'set_aside.jsonl'}", 2
        )
    write_jsonl(context.folder / "generated.jsonl", rows)
    return {"sounds": len(rows), "set_aside": len(set_aside.rows)}


def chosen_samples(samples: Sequence[Sample], split: str, most: int) -> list[Sample]:
    """The samples of a split (`test`, `train` or `all`), at most so many of them, picked evenly."""
    chosen = [each for each in samples if split == "all" or _split(each) == split]
    return [chosen[place] for place in evenly(len(chosen), most)]


# Private


def _split(sample: Sample) -> str:
    return "test" if sample.is_held_out else "train"


def _make(
    sample: Sample, take: int, config: GenerateSoundConfig, generator: SoundGenerator, folder: Path
) -> dict[str, Any]:
    """Make one sound, or keep the one that is there. Returns its row."""
    place = f"{config.samples}: {sample.id}"
    request = sound_request(sample, place)
    is_edit = config.edit and request.track is not None
    given_s = None if is_edit else config.duration_s  # an edit is as long as its track
    duration_s = given_s or _duration_s(sample, generator, place)
    name = f"audio/{safe_name(sample.id)}-{take}.wav"
    row = {
        "id": sample.id,
        "take": take,
        "audio": name,
        "caption": request.caption,
        "thought": request.cot,
        "reference": _reference(sample.id, request.wanted, folder, place) if request.wanted else None,
        "video": request.video.path if request.video else None,
        "video_start_s": request.video.start_s if request.video else 0.0,
        "duration_s": duration_s,
        "metadata": sample.metadata,
    }
    if (folder / name).exists():
        return row
    only = None if config.conditions is None else set(config.conditions)
    settings, key = sampler_settings(config.sampling), f"{config.seed}/{sample.id}/{take}"

    def conditions_at(start_s: float, length_s: float) -> Conditions:
        return generator.conditions(sample, length_s, place, only, start_s)

    if is_edit and request.track is not None:
        track_CN = load_track(request.track, generator.autoencoder, sample.id, place)
        mean_TD = encode_track(generator.autoencoder, track_CN).mean_DT.T.contiguous()
        context = span_context(mean_TD, 0, len(mean_TD), LatentState.SHOWN)
        latent_TD = fill_latents(generator, context, 0.0, conditions_at, settings, key)
        made_CN = generator.decode(latent_TD, track_CN.shape[1])
    else:
        try:
            check_length(generator, duration_s)
        except ConfigError as error:
            raise BadSample(place, sample.id, error.message, "too long for the model") from error
        made_CN = make_in_windows(generator, conditions_at, duration_s, settings, key)
    save(folder / name, made_CN, generator.sample_rate)
    return row


def _reference(sample_id: str, wanted: AudioPart, folder: Path, place: str) -> str:
    """The file of the real sound; a part of a longer file is cut out of it.

    Raises:
        BadSample: it cannot be read.
    """
    if not wanted.start_s and wanted.end_s is None:
        return wanted.path
    path = folder / f"audio/{safe_name(sample_id)}-real.wav"
    if not path.exists():
        try:
            part = load(wanted.path, wanted.start_s, wanted.end_s)
        except AudioError as error:
            raise BadSample(place, sample_id, str(error), UNREADABLE) from error
        save(path, part.samples_CN, part.sample_rate, "PCM_24")
    return str(path)


def _duration_s(sample: Sample, generator: SoundGenerator, place: str) -> float:
    """The length of the sample's track, wanted sound or video.

    Raises:
        BadSample: it has none of them.
    """
    from audiollm.video.decoders import VideoError
    from audiollm.video.frames import pictures_end_s

    request = sound_request(sample, place)
    part = request.track or request.wanted
    if part is not None:
        return load_track(part, generator.autoencoder, sample.id, place).shape[1] / generator.sample_rate
    if request.video is not None:
        try:
            end_s = request.video.end_s or pictures_end_s(request.video.path)
        except VideoError as error:
            raise BadSample(place, sample.id, str(error), "unreadable video") from error
        if end_s > request.video.start_s:
            return end_s - request.video.start_s
    raise BadSample(place, sample.id, "has no sound or video to tell the length: set duration_s", "no length")
