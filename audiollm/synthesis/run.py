"""The work of the stage `generate_prompts`: prompts from samples, codes from the model, sound from the codec."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from audiollm.audio import save
from audiollm.codec import Codec
from audiollm.data.chat.conditions import is_spoken
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.mixture import evenly
from audiollm.data.records.sample import AudioPart, Sample, TextPart
from audiollm.data.tables.splits import is_of_split
from audiollm.errors import StageError
from audiollm.families import registry
from audiollm.files.atomic import NUMBER, Kinds, read_whole_lines, safe_name, write_jsonl
from audiollm.generation.engine.defaults import Defaults
from audiollm.generation.engine.request import Answer, AnswerKind, Limits, Request
from audiollm.generation.speaking.phrases import phrases_of
from audiollm.generation.speaking.speech_generator import SpeechGenerator
from audiollm.recipe.runner import Context
from audiollm.synthesis.settings import GenerateConfig

ROW_KEYS: Mapping[str, Kinds] = {
    "id": str, "path": str, "text": str, "speaker": str, "prompt_index": int, "duration_s": NUMBER, "stopped": bool,
}  # fmt: skip
"""Columns that every row of `generated.jsonl` has."""


def generate_prompts(config: GenerateConfig, context: Context) -> dict[str, Any]:
    """Speak every chosen prompt; batches that an earlier attempt finished are kept."""
    samples, _ = read_samples(config.samples)
    pairs = _distinct_pairs(
        [
            s
            for s in samples
            if is_of_split(s.metadata.get("split"), config.prompts) and is_spoken(s.messages)
        ],
        config.max_prompts,
    )
    if not pairs:
        raise StageError(
            f"{config.samples} has no spoken sample of the split {config.prompts!r}", "see `compose`", 2
        )
    work = [(sample, take) for sample in pairs for take in range(config.takes)]
    generator = registry.load_speech_generator(config.model, config.codec)
    context.say(f"drawn with {defaults_of(config, generator)}")
    limit_s = min(config.max_duration_s, longest_allowed_s(samples))
    rows: list[dict[str, Any]] = []
    with context.progress("speaking", len(work)) as bar:
        for first in range(0, len(work), config.batch_size):
            done = context.folder / "batches" / f"{first:06d}.jsonl"
            batch = work[first : first + config.batch_size]
            batch_rows = _kept_batch(done, len(batch), context)
            if batch_rows is None:
                batch_rows = _speak_batch(generator, batch, config, limit_s, context)
                write_jsonl(done, batch_rows)
            rows += batch_rows
            bar.update(bar.task_ids[0], completed=len(rows))
    write_jsonl(context.folder / "generated.jsonl", rows)
    stopped = sum(row["stopped"] for row in rows)
    context.say(f"{len(rows)} clips, {stopped} ended by themselves, longest allowed {limit_s:.1f} s")
    return {"clips": len(rows), "stopped": stopped, "prompts": len(pairs)}


def _kept_batch(path: Path, size: int, context: Context) -> list[dict[str, Any]] | None:
    """The rows of a batch that an earlier attempt has spoken; None where there are none, or not all of them."""
    if not path.exists():
        return None
    rows = read_whole_lines(path, ROW_KEYS).rows
    if len(rows) == size and all((context.folder / row["path"]).is_file() for row in rows):
        return rows
    context.say(f"{path} is damaged: its clips are spoken again")
    return None


def defaults_of(config: GenerateConfig, generator: SpeechGenerator) -> Defaults:
    """Sampling of the stage: the recipe's settings over the defaults of the model's folder."""
    return generator.defaults.over(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        ras_window=config.ras_window,
        text_guidance=config.text_guidance,
        speaker_guidance=config.speaker_guidance,
    )


def _speak_batch(
    generator: SpeechGenerator,
    batch: Sequence[tuple[Sample, int]],
    config: GenerateConfig,
    limit_s: float,
    context: Context,
) -> list[dict[str, Any]]:
    limits = Limits(max_frames=max(1, round(limit_s * generator.codec.frame_rate)))
    requests, sampling = [], defaults_of(config, generator).sampling
    for sample, take in batch:
        messages = sample.messages[:-1]
        seed = _derive_take_seed(config.seed, sample, take)
        audio = generator.audio_of(messages)
        kind: AnswerKind = "any" if isinstance(sample.messages[-1].content[0], TextPart) else "audio"
        layout = generator.phrase_layout if sample.messages[-1].phrases else None
        phrases = phrases_of(text_and_speaker(sample)[0], layout, generator.codec.frame_rate)
        requests.append(Request(messages, seed, audio, sampling, limits, kind, phrases=phrases))
    rows = []
    answers = generator.answer_all(requests)
    for (sample, take), answer in zip(batch, answers, strict=True):
        samples_1N = _decode_answer(generator.codec, answer)
        text, speaker = text_and_speaker(sample)
        name = safe_name(f"{sample.id}_{take}")
        save(context.folder / "audio" / f"{name}.wav", samples_1N, generator.codec.sample_rate)
        rows.append(
            {
                "id": name,
                "path": f"audio/{name}.wav",
                "text": text,
                "speaker": speaker,
                **({"language": sample.language} if sample.language else {}),
                "prompt_index": take,
                "duration_s": samples_1N.shape[1] / generator.codec.sample_rate,
                "stopped": answer.stopped,
            }
        )
    return rows


def _decode_answer(codec: Codec, answer: Answer) -> Tensor:
    """Decode all speech of an answer, `[1, N]`; an answer without speech gives a frame of silence."""
    if answer.codes_KT.shape[1]:
        return codec.decode(answer.codes_KT)
    return torch.zeros(1, round(codec.sample_rate / codec.frame_rate))


def _distinct_pairs(samples: Sequence[Sample], max_pairs: int) -> list[Sample]:
    """One sample for each (text, speaker), in a stable order, at most `max_pairs` of them evenly picked."""
    pairs = {text_and_speaker(sample): sample for sample in reversed(samples)}
    ordered = [pairs[key] for key in sorted(pairs)]
    return [ordered[place] for place in evenly(len(ordered), max_pairs)]


def text_and_speaker(sample: Sample) -> tuple[str, str]:
    """Return a sample's text and speaker from its metadata; else the user's text and no speaker."""
    text = sample.metadata.get("text", " ".join(sample.texts("user")))
    return str(text), str(sample.metadata.get("speaker", ""))


def longest_allowed_s(samples: Sequence[Sample]) -> float:
    """Return 1.2 times the longest speech of a message in the data, at least 1 s."""
    contents = [m.content for sample in samples for m in sample.messages if m.role == "assistant"]
    audio = [
        [content_part for content_part in content if isinstance(content_part, AudioPart)]
        for content in contents
    ]
    return max(
        [1.0, *(1.2 * sum(p.end_s - p.start_s for p in parts if p.end_s is not None) for parts in audio)]
    )


def _derive_take_seed(seed: int, sample: Sample, take: int) -> int:
    text, speaker = text_and_speaker(sample)
    digest = hashlib.sha256(f"{seed}/{text}/{speaker}/{take}".encode()).digest()
    return int.from_bytes(digest[:7], "little")
