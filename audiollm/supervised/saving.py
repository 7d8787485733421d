"""The folder that a training ends with: the model with its vocabulary, card, and what generation needs to know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from audiollm.data.chat.template import Template
from audiollm.data.records.sample import Message, TextPart
from audiollm.data.records.source import Source
from audiollm.data.text.tokenizer import SPEAKERS_FILE, TRAINED_FILE
from audiollm.errors import BadSample
from audiollm.families.adapters import save_adapter
from audiollm.families.dual_ffn.adapting import adapt, merge_adapter
from audiollm.families.dual_ffn.saving import codec_of, first_folder
from audiollm.families.dual_ffn.start import start_generation
from audiollm.files.atomic import write_json
from audiollm.generation.engine.defaults import read_trained
from audiollm.models.hub import save_pretrained
from audiollm.models.model_card import ModelCard
from audiollm.models.pretrained import model_folder
from audiollm.supervised.corpus.sources import codec_facts
from audiollm.supervised.corpus.survey import SourceSurvey
from audiollm.supervised.decoder.building import build_decoder
from audiollm.supervised.settings import TrainConfig
from audiollm.train.loop.checkpoint import trained_weights


def save_trained(
    config: TrainConfig,
    stage: str,
    template: Template,
    sources: Sequence[Source],
    survey: SourceSurvey,
    folder: Path,
) -> None:
    """Write the weights that the loop left in `folder` to `folder/model`, in Hugging Face layout.

    An adapter is written to `folder/adapter`, and merged into `model`. Called on the first rank alone.
    """
    model = build_decoder(config, template)
    adapted = adapt(model, config.trained, config.lora)
    weights = trained_weights(folder, "model")
    model.load_state_dict({key.removeprefix("model."): value for key, value in weights.items()})
    if config.trained == "adapter":
        save_adapter(adapted, folder / "adapter")  # type: ignore[arg-type]
        model = merge_adapter(adapted)  # type: ignore[arg-type, assignment]
    card, generation = _make_training_card(config, stage, sources, survey), start_generation(config.start)
    save_pretrained(
        model,
        folder / "model",
        template.tokenizer,
        card,
        generation=generation,
        codec=_codec_folder(config, sources),
    )
    write_json(folder / "model" / SPEAKERS_FILE, list(survey.speakers))
    longest = max(int(rows.max(initial=0)) for rows in survey.rows)
    trained = {
        "longest_positions": longest,
        "text_dropout": config.text_dropout,
        "speaker_dropout": config.speaker_dropout,
        "codec_digest": codec_facts(sources, config.start).get("digest"),
        "words": _read_trained_words(config, survey),
        **_stream_facts(sources, survey),
    }
    write_json(folder / "model" / TRAINED_FILE, trained)


def _read_trained_words(config: TrainConfig, survey: SourceSurvey) -> list[str] | None:
    """The words that the model was trained to say, those of its start included; None: not known, or many."""
    before = read_trained(model_folder(config.start)).words if config.start else []
    return None if before is None or survey.words is None else sorted({*before, *survey.words})


def _stream_facts(sources: Sequence[Source], survey: SourceSurvey) -> dict[str, Any]:
    """Code frames of a chunk, the system message, and whether actions are spoken, of the first source of streams; None:
    none is."""
    for place, source in enumerate(sources):
        messages = _first_messages(source, survey.used(place, held_out=False))
        if not messages or messages[-1].chunk_frames is None:
            continue
        system_texts = [
            content_part.text for content_part in messages[0].content if isinstance(content_part, TextPart)
        ]
        system = "".join(system_texts) if messages[0].role == "system" else ""
        speaks = any(content_part.type == "audio" for content_part in messages[-1].content)
        return {
            "chunk_frames": messages[-1].chunk_frames, "stream_prompt": system, "stream_speaks": speaks,
        }  # fmt: skip
    return dict.fromkeys(("chunk_frames", "stream_prompt", "stream_speaks"))


def _first_messages(source: Source, numbers: Iterable[int]) -> list[Message]:
    """The messages of the first of these samples that can still be read; none where none can."""
    for number in numbers:
        with suppress(BadSample):
            return source[int(number)].sample.messages
    return []


def _codec_folder(config: TrainConfig, sources: Sequence[Source]) -> Path | None:
    """The codec's folder, by the settings, the shards or the model to begin from; None: none of them tells."""
    if config.codec is not None:
        return model_folder(config.codec)
    codec_paths = [(getattr(source, "facts", {}).get("codec") or {}).get("path") for source in sources]
    if config.start is not None:
        codec_paths += codec_of(config.start)
    return first_folder(codec_paths)


def _make_training_card(
    config: TrainConfig, stage: str, sources: Sequence[Source], survey: SourceSurvey
) -> ModelCard:
    codec = codec_facts(sources, config.start)
    samples = sum(len(survey.used(place, held_out=False)) for place in range(len(sources)))
    return ModelCard(
        codec=f"{codec['num_codebooks']} codebooks of {codec['codebook_size']} codes"
        + (f", SHA-256 of its folder {codec['fingerprint']}" if "fingerprint" in codec else ""),
        data=f"{samples:,} samples of {', '.join(sorted({Path(source.name).name for source in sources}))}",
        recipe=f"stage `{stage}`, {config.budget_text()}, {config.batch_size} sequences a step, seed {config.seed}",
        base=Path(config.start).name if config.start else "random weights",
    )
