"""Samples as a listener takes them: messages with their recordings and pictures, and answers in words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from audiollm.data.records.sample import VideoPart, check_without_video
from audiollm.data.records.source import LoadedSample
from audiollm.data.records.video_clips import PictureReader
from audiollm.errors import BadSample, ConfigError
from audiollm.families.policy import PromptedAnswers
from audiollm.models.audio_llms.inputs import Pictures, takes_recordings
from audiollm.video.frames import VideoError


def prompted_answers(
    processor: Any,
    reader: PictureReader | None,
    prompt: LoadedSample,
    loaded: LoadedSample,
    answers: Sequence[int],
    place: str,
) -> PromptedAnswers:
    """Take the messages of a sample, and answers of another or the same one.

    A model that does not hear gets a sample with pictures without its sound.

    Args:
        reader: of the pictures of videos; None: samples with videos are refused.
        answers: numbers of the answers of `loaded`.
        place: where the sample was read, for errors.

    Raises:
        BadSample: a recording or video that cannot be read, or an answer with sound.
    """
    if not takes_recordings(processor) and prompt.sample.video_parts():
        prompt = prompt.without_recordings()
    recordings = [clip.load() for clip in prompt.audio[: prompt.num_asked]]
    contents = [loaded.sample.answers[number].content for number in answers]
    pictures = _pictures_of(reader, prompt, place)
    return PromptedAnswers.of(prompt.sample, recordings, contents, place, pictures)


def end_tokens(generation_config: Any, processor: Any, folder: Path) -> frozenset[int]:
    """Return the ids at which `generate` stops, and the tokenizer's end of a sequence.

    Raises:
        ConfigError: there is none.
    """
    named = getattr(generation_config, "eos_token_id", None)
    ids = named if isinstance(named, list | tuple) else [named]
    ends = frozenset(int(id) for id in (*ids, processor.tokenizer.eos_token_id) if id is not None)
    if not ends:
        raise ConfigError(
            "neither generation_config.json nor the tokenizer names a token that ends an answer",
            str(folder),
            "set eos_token_id in generation_config.json",
        )
    return ends


def _pictures_of(reader: PictureReader | None, prompt: LoadedSample, place: str) -> list[Pictures]:
    """
    Raises:
        BadSample: there are videos, and no pictures are shown, or a video is not there or cannot be decoded.
    """
    if reader is None:
        check_without_video(prompt.sample, place)
        return []
    if len(prompt.sample.video_parts()) != len(prompt.videos):
        reason = "a shard holds no pictures of videos: train on the .jsonl that names their files"
        raise BadSample(place, prompt.sample.id, reason, "missing video")
    return [_read_pictures(reader, video, prompt.sample.id, place) for video in prompt.videos]


def _read_pictures(reader: PictureReader, video: VideoPart, sample_id: str, place: str) -> Pictures:
    try:
        clip = reader.read(video)
    except (VideoError, ValueError) as error:
        raise BadSample(place, sample_id, f"video: {error}", "undecodable video") from error
    return Pictures(clip.frames, clip.times_s)
