"""What the stage `generate` does: prompts from samples, codes from the model, sound from the codec."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from audiollm.audio import load, save
from audiollm.codec import Codec, load_codec
from audiollm.data.conditions import is_spoken
from audiollm.data.sample import AudioPart, Message, Sample, read_samples
from audiollm.data.template import Template
from audiollm.data.text_tokenizer import SPEAKERS_FILE, header_style_of, load_text_tokenizer
from audiollm.files import read_json, read_jsonl, safe_name, write_jsonl
from audiollm.generation.engine import Prompt, generate_codes
from audiollm.generation.sampling import SamplingConfig
from audiollm.generation.stage import GenerateConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.pretrained import model_folder
from audiollm.runner import Context, StageError
from audiollm.train.optim import default_device


class Generator:
    """A trained model and a codec that speak."""

    def __init__(
        self, model: DualFFN, codec: Codec, template: Template, speakers: Sequence[str] = ()
    ) -> None:
        self.model, self.codec, self.template = model.eval(), codec, template
        self.speakers = list(speakers)
        """The speaker names that the model was trained on."""

    @classmethod
    def from_pretrained(cls, model: Path | str, codec: Path | str) -> Generator:
        """Both from folders (a model's or a stage's)."""
        folder = model_folder(Path(model))
        loaded = DualFFN.from_pretrained(folder).to(default_device())
        loaded_codec = load_codec(model_folder(Path(codec)))
        tokenizer = load_text_tokenizer(folder)
        template = Template(
            tokenizer, loaded_codec.num_codebooks, loaded_codec.codebook_size, header_style_of(tokenizer)
        )
        if (loaded.config.num_codebooks, loaded.config.codebook_size) != (
            template.num_codebooks,
            template.codebook_size + 2,
        ):
            raise StageError(f"{folder} was trained on the codes of another codec than {codec}")
        return cls(loaded, loaded_codec, template, read_json(folder / SPEAKERS_FILE))

    def speak(
        self, prompts: Sequence[Prompt], sampling: SamplingConfig, max_duration_s: float
    ) -> list[tuple[Tensor, bool]]:
        """Each prompt's waveform `[1, N]` at the codec's rate, and whether it ended by itself.

        Recordings in a prompt (a voice to speak with) that come without codes are encoded from their files.
        """
        max_frames = max(1, round(max_duration_s * self.codec.frame_rate))
        heard = [replace(prompt, codes=prompt.codes or self._codes(prompt.messages)) for prompt in prompts]
        spoken = generate_codes(self.model, self.template, heard, sampling, max_frames)
        return [(self.codec.decode(each.codes_KT), each.stopped) for each in spoken]

    def _codes(self, messages: Sequence[Message]) -> list[Tensor]:
        parts = [part for message in messages for part in message.content if isinstance(part, AudioPart)]
        clips = [
            load(part.path, part.start_s, part.end_s, self.codec.sample_rate, mono=True).samples_CN
            for part in parts
        ]
        return [self.codec.encode(samples_1N) for samples_1N in clips]


def generate(config: GenerateConfig, context: Context) -> dict[str, Any]:
    """Speak every chosen prompt; batches that an earlier attempt finished are kept."""
    samples, _ = read_samples(config.samples)
    pairs = _distinct_pairs(
        [s for s in samples if s.metadata.get("split") == config.prompts and is_spoken(s.messages)],
        config.max_prompts,
    )
    if not pairs:
        raise StageError(
            f"{config.samples} has no spoken sample of the split {config.prompts!r}", "see `compose`", 2
        )
    work = [(sample, take) for sample in pairs for take in range(config.takes)]
    generator = Generator.from_pretrained(config.model, config.codec)
    limit_s = min(config.max_duration_s, _longest_s(samples))
    rows: list[dict[str, Any]] = []
    with context.progress("speaking", len(work)) as bar:
        for first in range(0, len(work), config.batch_size):
            done = context.folder / "batches" / f"{first:06d}.jsonl"
            if not done.exists():
                batch = work[first : first + config.batch_size]
                write_jsonl(done, _speak_batch(generator, batch, config, limit_s, context))
            rows += read_jsonl(done)
            bar.update(bar.task_ids[0], completed=len(rows))
    write_jsonl(context.folder / "generated.jsonl", rows)
    stopped = sum(row["stopped"] for row in rows)
    context.say(f"{len(rows)} clips, {stopped} ended by themselves, longest allowed {limit_s:.1f} s")
    return {"clips": len(rows), "stopped": stopped, "prompts": len(pairs)}


def sampling_of(config: GenerateConfig) -> SamplingConfig:
    return SamplingConfig(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        text_guidance=config.text_guidance,
        speaker_guidance=config.speaker_guidance,
    )


def _speak_batch(
    generator: Generator,
    batch: Sequence[tuple[Sample, int]],
    config: GenerateConfig,
    limit_s: float,
    context: Context,
) -> list[dict[str, Any]]:
    prompts = [Prompt(list(sample.messages[:-1]), _seed(config.seed, sample, take)) for sample, take in batch]
    rows = []
    spoken = generator.speak(prompts, sampling_of(config), limit_s)
    for (sample, take), (samples_1N, stopped) in zip(batch, spoken, strict=True):
        text, speaker = _said(sample)
        name = safe_name(f"{sample.id}_{take}")
        save(context.folder / "audio" / f"{name}.wav", samples_1N, generator.codec.sample_rate)
        rows.append(
            {
                "id": name,
                "path": f"audio/{name}.wav",
                "text": text,
                "speaker": speaker,
                "prompt_index": take,
                "duration_s": samples_1N.shape[1] / generator.codec.sample_rate,
                "stopped": stopped,
            }
        )
    return rows


def _distinct_pairs(samples: Sequence[Sample], most: int) -> list[Sample]:
    """One sample for each (text, speaker), in a stable order, at most `most` of them evenly picked."""
    pairs = {_said(sample): sample for sample in reversed(samples)}
    ordered = [pairs[key] for key in sorted(pairs)]
    if len(ordered) <= most:
        return ordered
    return [ordered[i * len(ordered) // most] for i in range(most)]


def _said(sample: Sample) -> tuple[str, str]:
    """Text and speaker; by the metadata where it tells, else what the user wrote, and nobody."""
    text = sample.metadata.get("text", " ".join(sample.texts("user")))
    return str(text), str(sample.metadata.get("speaker", ""))


def _longest_s(samples: Sequence[Sample]) -> float:
    """1.2 times the longest clip of the data, at least 1 s."""
    parts = [part for sample in samples for part in sample.audio("assistant")]
    return max([1.0, *(1.2 * (part.end_s - part.start_s) for part in parts if part.end_s is not None)])


def _seed(seed: int, sample: Sample, take: int) -> int:
    text, speaker = _said(sample)
    digest = hashlib.sha256(f"{seed}/{text}/{speaker}/{take}".encode()).digest()
    return int.from_bytes(digest[:7], "little")
