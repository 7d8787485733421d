"""Turns of text and sound as the inputs of an audio LLM of transformers, by its own processor and chat template.

Used by the chats of `audiollm evaluate` and by the policies of `audiollm.rl`. No recording is cut silently: it is
taken whole, in the windows that the processor makes, or refused with its name, its length and the limit.
"""

from __future__ import annotations

import base64
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audiollm.audio import Waveform, encode_bytes, resample, to_mono
from audiollm.data.records.sample import AudioPart, Message, TextPart, VideoPart, refuse_video


class Pictures(NamedTuple):
    """Pictures of a clip, in order of time."""

    frames: tuple[NDArray[np.uint8], ...]
    """RGB, each `[H, W, 3]`."""
    times_s: tuple[float, ...]
    """Seconds from the clip's beginning."""

    @property
    def per_second(self) -> float:
        """Pictures per second; 2 for a single one."""
        if len(self.times_s) < 2:
            return 2.0
        return round((len(self.times_s) - 1) / max(self.times_s[-1] - self.times_s[0], 1e-3), 3)


TurnPart = str | Waveform | Pictures
Parts = Sequence[TurnPart]
Turn = tuple[str, Parts]
"""A role (system, user, assistant), and its texts and recordings."""
_EXTRACTORS = ("feature_extractor", "audio_processor")
MIN_RECORDING_S = 0.1
"""Shorter recordings are refused: encoders make no position of the shortest ones, which then leave no trace."""


class InputsError(Exception):
    """Turns that the model cannot take whole.

    Args:
        reason: what is wrong, for a person.
        kind: the few words that it is counted by.
    """

    def __init__(self, reason: str, kind: str) -> None:
        super().__init__(reason, kind)
        self.reason, self.kind = reason, kind

    def __str__(self) -> str:
        return self.reason


def sampling_rate(processor: Any) -> int:
    """Return the rate, in Hz, at which the processor takes recordings; 16 kHz where it tells none, as transformers."""
    return int(getattr(extractor_of(processor), "sampling_rate", 16_000))


def longest_recording_s(processor: Any) -> float | None:
    """Return the longest recording, in seconds, that the processor passes on whole; None: any.

    Audio Flamingo 3 splits a recording into windows up to a limit of its own, Voxtral and Qwen3-Omni split without a
    limit; Qwen2-Audio and Qwen2.5-Omni would cut what is longer than the window of their feature extractor.
    """
    extractor = extractor_of(processor)
    split_up_to = getattr(processor, "max_audio_len", None)
    if split_up_to is not None:
        window_s = float(extractor.chunk_length)
        return split_up_to // window_s * window_s
    if _audio_defaults(processor).get("truncation") is False:
        return None
    cut_at = getattr(extractor, "n_samples", None)
    if cut_at is None:
        parameters = inspect.signature(type(extractor).__call__).parameters
        cuts = "truncation" in parameters and parameters["truncation"].default is True
        cut_at = parameters["max_length"].default if cuts and "max_length" in parameters else None
    return cut_at / sampling_rate(processor) if cut_at else None


def writes_mistral_turns(processor: Any) -> bool:
    """Return whether mistral-common makes the prompts (Voxtral) in place of a chat template.

    It takes recordings as files alone, and no conversation that an assistant's turn ends.
    """
    return any(kind.__name__ == "MistralCommonBackend" for kind in type(processor.tokenizer).__mro__)


def placeholder_ids(config: Any) -> list[int]:
    """Return the ids of the tokens that stand for sound, pictures or video in a model's input.

    A model takes them for places of features wherever they are, in an answer, too: an answer must not have one.
    """
    names = (f"{kind}_token_{end}" for kind in ("audio", "image", "video") for end in ("id", "index"))
    token_ids = (getattr(config, name, None) for name in names)
    return sorted({int(id) for id in token_ids if id is not None and id >= 0})


def turns_of(
    messages: Sequence[Message], recordings: Sequence[Waveform], videos: Sequence[Pictures] = ()
) -> list[Turn]:
    """Return the messages of a sample with `recordings` and `videos` in the places of their parts, in order.

    Raises:
        ValueError: another number of recordings than of audio parts, or of videos than of video parts.
    """
    if not videos:
        refuse_video(messages)
    num_videos = sum(
        isinstance(content_part, VideoPart) for message in messages for content_part in message.content
    )
    if num_videos != len(videos):
        raise ValueError(f"{len(videos)} videos for {num_videos} video parts")
    parts = sum(
        isinstance(content_part, AudioPart) for message in messages for content_part in message.content
    )
    if parts != len(recordings):
        raise ValueError(f"{len(recordings)} recordings for {parts} audio parts")
    remaining_recordings, remaining_videos = iter(recordings), iter(videos)

    def filled(content_part: TextPart | AudioPart | VideoPart) -> TurnPart:
        if isinstance(content_part, TextPart):
            return content_part.text
        return next(remaining_videos) if isinstance(content_part, VideoPart) else next(remaining_recordings)

    return [
        (message.role, [filled(content_part) for content_part in message.content]) for message in messages
    ]


def processor_inputs(
    processor: Any, turns: Sequence[Turn], generation_prompt: bool, names: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Make the inputs of one conversation, every key that the processor returns.

    Recordings are mixed to mono and resampled to the processor's rate.

    Args:
        processor: of the model's folder.
        turns: texts and recordings; roles as the chat template knows them.
        generation_prompt: end with the header of the assistant's turn.
        names: of the recordings in their order, for errors (`clip.wav`); by default they are numbered.

    Returns:
        Tensors as the processor makes them: those per token are `[1, tokens]`.

    Raises:
        InputsError: a recording that is too short, too long or not finite, a text that contains the placeholder of
            recordings, or turns that the processor or its template refuses.
    """
    recordings = [turn_part for _, parts in turns for turn_part in parts if isinstance(turn_part, Waveform)]
    _check_recordings(processor, recordings, names)
    _check_texts(processor, turns)
    rate = sampling_rate(processor) if recordings else 0  # VideoLLaMA 3 takes none
    content = _mistral_content if writes_mistral_turns(processor) else _processor_content
    messages = [
        {"role": role, "content": [content(turn_part, rate) for turn_part in parts]} for role, parts in turns
    ]
    with _refusals(), torch.autocast("cpu", enabled=False):  # of a training: features are made in float32
        features = processor.apply_chat_template(
            messages,
            **_picture_arguments(processor, turns),
            add_generation_prompt=generation_prompt,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
    inputs = {str(key): value for key, value in features.items()}
    for key, value in inputs.items():
        if not isinstance(value, Tensor):
            raise InputsError(f"the processor's {key} is no tensor", "refused by processor")
    _check_whole(processor, inputs, recordings)
    return inputs


def _picture_arguments(processor: Any, turns: Sequence[Turn]) -> dict[str, Any]:
    """The rate of pictures, which are taken as they are given; nothing where there are none.

    Raises:
        InputsError: videos of different rates, or a model that takes none.
    """
    videos = [turn_part for _, parts in turns for turn_part in parts if isinstance(turn_part, Pictures)]
    rates = {video.per_second for video in videos}
    if not rates:
        return {}
    if getattr(processor, "video_processor", None) is None:
        raise InputsError(f"{type(processor).__name__} takes no pictures of videos", "refused by processor")
    if len(rates) > 1:
        raise InputsError("videos of one conversation need one rate of pictures", "videos of two rates")
    rate = rates.pop()
    counts = [len(video.frames) for video in videos]
    # VideoLLaMA 3 writes the time of each picture into the prompt
    metadata = [
        {
            "total_num_frames": count,
            "fps": rate,
            "duration": count / rate,
            "frames_indices": list(range(count)),
        }
        for count in counts
    ]
    arguments = {"videos_kwargs": {"fps": rate, "do_sample_frames": False, "video_metadata": metadata}}
    if "processor_kwargs" in inspect.signature(processor.apply_chat_template).parameters:
        return {"processor_kwargs": arguments}
    return arguments  # as earlier versions of transformers take them


def template_text(processor: Any, turns: Sequence[Turn], generation_prompt: bool) -> str:
    """Return a conversation as the chat template writes it, with placeholders for recordings.

    Raises:
        InputsError: the template refuses the turns.
    """
    messages = [
        {
            "role": role,
            "content": [
                {"type": "text", "text": p} if isinstance(p, str) else {"type": _kind_of(p)} for p in parts
            ],
        }
        for role, parts in turns
    ]
    with _refusals():
        return str(
            processor.apply_chat_template(messages, add_generation_prompt=generation_prompt, tokenize=False)
        )


def _kind_of(turn_part: Waveform | Pictures) -> str:
    return "video" if isinstance(turn_part, Pictures) else "audio"


@contextmanager
def _refusals() -> Iterator[None]:
    """Report whatever a processor or its template raises as `InputsError`."""
    try:
        yield
    except Exception as error:
        message = " ".join(str(error).split())[:200]
        raise InputsError(
            f"the processor refuses it: {type(error).__name__}: {message}", "refused by processor"
        ) from error


def takes_recordings(processor: Any) -> bool:
    """Return whether a model hears; VideoLLaMA 3 sees alone."""
    return any(getattr(processor, name, None) is not None for name in _EXTRACTORS)


def extractor_of(processor: Any) -> Any:
    """Return what makes features of recordings; Granite Speech has it under another name.

    Raises:
        InputsError: the processor takes no recordings.
    """
    for name in _EXTRACTORS:
        if (extractor := getattr(processor, name, None)) is not None:
            return extractor
    raise InputsError(f"{type(processor).__name__} takes no recordings", "refused by processor")


def _audio_defaults(processor: Any) -> dict[str, Any]:
    """Return the processor's own arguments for its feature extractor; transformers has kept them in two places."""
    older = getattr(getattr(processor, "valid_processor_kwargs", None), "_defaults", None) or {}
    return {**older.get("audio_kwargs", {}), **(getattr(processor, "audio_kwargs", None) or {})}


def _processor_content(turn_part: TurnPart, rate: int) -> dict[str, Any]:
    if isinstance(turn_part, str):
        return {"type": "text", "text": turn_part}
    if isinstance(turn_part, Pictures):
        return {"type": "video", "video": np.stack(turn_part.frames)}
    return {"type": "audio", "audio": mono_at(turn_part, rate)[0].numpy()}


def _mistral_content(turn_part: TurnPart, rate: int) -> dict[str, Any]:
    if isinstance(turn_part, str):
        return {"type": "text", "text": turn_part}
    if isinstance(turn_part, Pictures):
        raise InputsError("this model takes no pictures", "refused by processor")
    content = encode_bytes(mono_at(turn_part, rate).clamp(-1.0, 1.0), rate, "wav")
    return {"type": "audio", "base64": base64.b64encode(content).decode()}


def mono_at(recording: Waveform, rate: int) -> Tensor:
    """Mix a recording to mono at a sample rate in Hz; float32 `[1, samples]`."""
    return resample(to_mono(recording.samples_CN), recording.sample_rate, rate)


def _check_recordings(processor: Any, recordings: Sequence[Waveform], names: Sequence[str]) -> None:
    limit_s = longest_recording_s(processor) if recordings else None
    for number, recording in enumerate(recordings):
        name = names[number] if number < len(names) else f"recording {number + 1}"
        if recording.duration_s < MIN_RECORDING_S:
            raise InputsError(
                f"{name} is {recording.duration_s:.3f} s long; at least {MIN_RECORDING_S} s are needed",
                "recording too short",
            )
        if limit_s is not None and recording.duration_s > limit_s:
            raise InputsError(
                f"{name} is {recording.duration_s:.2f} s long, and this model hears at most {limit_s:g} s of a "
                "recording: cut it into spans (start_s, end_s)",
                "recording too long",
            )
        if not torch.isfinite(recording.samples_CN).all():
            raise InputsError(f"{name} holds values that are not finite", "broken recording")


def _check_texts(processor: Any, turns: Sequence[Turn]) -> None:
    for name, what in (("audio_token", "recordings"), ("video_token", "videos"), ("image_token", "pictures")):
        placeholder = getattr(processor, name, None)
        for _, parts in turns:
            if placeholder and any(
                isinstance(turn_part, str) and placeholder in turn_part for turn_part in parts
            ):
                raise InputsError(
                    f"a text contains {placeholder}, the placeholder of {what}", "placeholder in text"
                )


def _check_whole(processor: Any, inputs: dict[str, Tensor], recordings: Sequence[Waveform]) -> None:
    """Check that the features cover the recordings: a processor may cut in ways that no setting tells.

    Raises:
        InputsError: they do not.
    """
    from transformers import WhisperFeatureExtractor

    if not recordings:
        return
    extractor = extractor_of(processor)
    if not isinstance(extractor, WhisperFeatureExtractor):
        return
    masks = [inputs[key] for key in ("feature_attention_mask", "input_features_mask") if key in inputs]
    features = inputs.get("input_features")
    if features is None:
        raise InputsError("the processor made no features of the recordings", "refused by processor")
    frames = int(masks[0].sum()) if masks else features.shape[0] * features.shape[-1]
    encoded_s = (frames + len(features)) * extractor.hop_length / sampling_rate(processor)
    recorded_s = sum(recording.duration_s for recording in recordings)
    if encoded_s < recorded_s:
        raise InputsError(
            f"the processor kept {encoded_s:.2f} s of {recorded_s:.2f} s of recordings: give shorter ones",
            "recording too long",
        )
