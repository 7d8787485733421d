"""The work of the stage `tokenize`: each sample's audio to codes, several times at random gain, speed and shift."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from audiollm.audio import AudioError, encode_bytes, load
from audiollm.audio.samples import SILENCE_DBFS
from audiollm.codec import Codec, codec_digest, load_codec
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import AudioPart, ContentPart, Sample
from audiollm.data.records.shards import ShardWriter
from audiollm.data.records.source import silent_part, teaches_words
from audiollm.data.tables.splits import is_of_split
from audiollm.devices import one_thread
from audiollm.errors import BadSample
from audiollm.failures import shared_watch
from audiollm.files.atomic import atomic_path
from audiollm.files.json_files import config_folder
from audiollm.files.set_aside import UNREADABLE
from audiollm.recipe.runner import Context
from audiollm.train.loop.loop import step_generator
from tokenizer.clips import DITHER, augment_waveform
from tokenizer.corpus.encoding import begin_set_aside, note_coding, refused_by_codec, stored_codes
from tokenizer.corpus.processes import work_in_processes
from tokenizer.training.encoded_clips import EarlierCodes, encoded_clips
from tokenizer.training.settings import TokenizeConfig


@dataclass(frozen=True)
class EncodedSample:
    """What the shards keep of a sample."""

    sample: Sample
    encodings: list[list[np.ndarray]]
    """Lists of codes `[K, T]`, one an audio part."""
    sound: dict[str, bytes] | None
    """Content of the members that the sample names; see `TokenizeConfig.sound`."""


class SampleEncoder:
    """A codec, the settings, and what an earlier run has encoded; in the main process or in a worker."""

    def __init__(self, config: TokenizeConfig) -> None:
        self.config = config
        self.folder = config_folder(config.codec, "codec", "give the folder of a saved codec")
        self.codec = load_codec(self.folder)
        self._earlier = None if config.codes_from is None else EarlierCodes(config.codes_from, self.codec)

    def encode(self, task: tuple[int, Sample]) -> EncodedSample | BadSample:
        """The codes of a sample, of which the number decides what is drawn; or why it has none."""
        index, sample = task
        try:
            encodings = _encode_sample(self.codec, sample, self.config, index, self._earlier)
            kept, sound = (
                _with_sound(sample, self.config.sound == "all") if self.config.sound else (sample, None)
            )
        except (AudioError, BadSample, ValueError) as error:
            return _refused(sample, error)
        return EncodedSample(kept, encodings, sound)


@shared_watch()
def tokenize_samples(config: TokenizeConfig, context: Context) -> dict[str, Any]:
    """Encode every sample's audio; what cannot be read is named in `set_aside.jsonl` and left out."""
    encoder = SampleEncoder(config)
    codec = encoder.codec
    samples, bad = read_samples(config.samples)
    folder = context.folder / "shards"
    writer = ShardWriter(folder, config.samples_per_shard)
    todo = [index for index in range(len(samples)) if not writer.has(index)]
    set_aside = begin_set_aside(
        context.folder / "set_aside.jsonl", bad, {samples[index].id for index in todo}
    )
    with context.progress("encoding", len(samples)) as bar:
        bar.advance(bar.task_ids[0], len(samples) - len(todo))
        if len(todo) < len(samples):
            note_coding(None)
        for index, encoded in _encode_samples(encoder, samples, todo):
            bar.advance(bar.task_ids[0])
            if isinstance(encoded, BadSample):
                set_aside.add([encoded])
                note_coding(encoded)
                continue
            note_coding(None)
            writer.write(index, encoded.sample, encoded.encodings, encoded.sound)
    with atomic_path(folder / "codebooks.safetensors") as temporary:
        save_file({"vectors_KVD": codec.codebook_vectors_KVD.contiguous()}, temporary)
    shape = {
        key: getattr(codec, key) for key in ("frame_rate", "num_codebooks", "codebook_size", "sample_rate")
    }
    facts = {**shape, "path": str(encoder.folder), "digest": codec_digest(codec)}
    counts = writer.close({"codec": facts})

    context.say(f"{counts['samples']} samples, {counts['frames']} frames in {counts['shards']} shards")
    return {**counts, "set_aside": len(set_aside.rows)}


def _encode_samples(
    encoder: SampleEncoder, samples: Sequence[Sample], todo: Sequence[int]
) -> Iterator[tuple[int, EncodedSample | BadSample]]:
    """The samples of the numbers `todo` in order, by as many processes as pay."""
    workers = encoder.config.num_workers(len(todo))
    tasks = ((index, (index, samples[index])) for index in todo)
    if workers > 1:
        yield from work_in_processes(
            tasks, _work_on_sample, workers, partial(_start_sample_worker, encoder.config)
        )
        return
    with one_thread():
        for index, task in tasks:
            yield index, encoder.encode(task)


_worker: SampleEncoder
"""The encoder of a worker process, set once at its start."""


def _start_sample_worker(config: TokenizeConfig) -> None:
    global _worker
    _worker = SampleEncoder(config)


def _work_on_sample(task: tuple[int, Sample]) -> EncodedSample | BadSample:
    return _worker.encode(task)


def _refused(sample: Sample, error: AudioError | BadSample | ValueError) -> BadSample:
    if isinstance(error, BadSample):
        return error
    if isinstance(error, AudioError):
        return BadSample(str(error.path), sample.id, error.reason, UNREADABLE)
    return refused_by_codec(sample, error)


def _encode_sample(
    codec: Codec, sample: Sample, config: TokenizeConfig, index: int, earlier: EarlierCodes | None
) -> list[list[np.ndarray]]:
    """`encodings` lists of codes `[K, T]`, one an audio part; a test sample and a stream are encoded once, as they are.

    At another speed the actions of a stream would stand after other words, or be another number than its chunks.
    The parts of a sample are varied alike, so that a voice stays that of its reference. What is there twice is encoded
    once.
    """
    is_stream = any(message.chunk_frames is not None for message in sample.messages)
    count = config.encodings if is_of_split(sample.metadata.get("split"), "train") and not is_stream else 1
    clips = encoded_clips(sample)
    plain = {clip: None if earlier is None else earlier.find(clip) for clip in dict.fromkeys(clips)}
    needed = [clip for clip, earlier_codes in plain.items() if earlier_codes is None or count > 1]
    sounds = {}
    has_words = teaches_words(sample)
    for clip in needed:
        sounds[clip], level_dbfs = clip.load(codec.sample_rate)
        if has_words and level_dbfs < SILENCE_DBFS:
            raise silent_part(sample, str(clip.clip.path), level_dbfs)
    result = []
    for variant in range(count):
        codes = (
            {}
            if variant
            else {clip: earlier_codes for clip, earlier_codes in plain.items() if earlier_codes is not None}
        )
        for clip, sound_N in sounds.items():
            if clip in codes:
                continue
            generator = step_generator(config.seed, index, f"encoding {variant}")
            varied_N = _vary(sound_N, codec, generator) if variant else sound_N
            dithered_N = varied_N + torch.randn(varied_N.shape, generator=generator) * DITHER
            codes[clip] = stored_codes(codec.encode(dithered_N[None]), codec)
        result.append([codes[clip] for clip in clips])
    return result


def _with_sound(sample: Sample, has_speech: bool) -> tuple[Sample, dict[str, bytes]]:
    """The sample with what is heard as members of its own, and their content.

    Args:
        has_speech: what is said is among them, too.

    Raises:
        AudioError: a recording cannot be read.
    """
    sound: dict[str, bytes] = {}

    def named(content_part: ContentPart) -> ContentPart:
        if not isinstance(content_part, AudioPart):
            return content_part
        clip = load(content_part.path, content_part.start_s, content_part.end_s, mono=True)
        name = f"{len(sound)}.flac"
        sound[name] = encode_bytes(clip.samples_CN, clip.sample_rate, "flac")
        return content_part.model_copy(update={"path": name, "start_s": 0.0, "end_s": None})

    messages = [
        message
        if message.role == "assistant" and not has_speech
        else message.model_copy(update={"content": [named(content_part) for content_part in message.content]})
        for message in sample.messages
    ]
    return sample.model_copy(update={"messages": messages}), sound


def _vary(samples_N: Tensor, codec: Codec, generator: torch.Generator) -> Tensor:
    """Gain of +- 3 dB, speed of +- 5 %, and a shift by less than a frame."""
    varied_N = augment_waveform(samples_N, codec.sample_rate, generator, gain_db=3.0, speed=0.05)
    hop = round(codec.sample_rate / codec.frame_rate)
    shift = int(torch.randint(hop, (1,), generator=generator))
    return torch.nn.functional.pad(varied_N, (shift, 0))
