"""The cards of models on a hub, in Markdown with front matter: what it is, how to use it, how it scores."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple
from urllib.parse import quote

import yaml

from audiollm.hub_models.needed_files import CODEC_FOLDER
from audiollm.publish.licences import Licence
from audiollm.publish.lineage import GeneratedSample
from audiollm.publish.scores import PublishedEvaluation

PUSH_MARK = "<!-- Written by audiollm push. -->"
SECTIONS_MARK = "<!-- Added by audiollm push. -->"
"""Stands in a card that a person wrote, before the samples and scores."""
INSTALL = "pip install 'audiollm[serve]'"


class CardKind(NamedTuple):
    """What a card says of all models of a kind."""

    task: str
    """The hub's pipeline tag."""
    tags: tuple[str, ...]
    title: str
    summary: str


KINDS = {
    "speech": CardKind(
        "text-to-speech", ("audio", "text-to-speech", "dual-ffn"), "A model that speaks",
        "An audio-text language model: it reads and writes text and audio codes (DualFFN, the structure of Higgs "
        "Audio V2).",
    ),
    "text": CardKind(
        "text-to-speech", ("audio", "text-to-speech", "dual-ffn"), "A model that writes audio codes",
        "An audio-text language model (DualFFN, the structure of Higgs Audio V2). Its codec is not part of this "
        "repository: `--codec FOLDER` names it.",
    ),
    "hearing": CardKind(
        "audio-text-to-text", ("audio", "audio-text-to-text", "dual-ffn"), "A model that understands audio",
        "An audio-text language model with an audio encoder (DualFFN).",
    ),
    "listener": CardKind(
        "audio-text-to-text", ("audio", "audio-text-to-text"), "A model that understands audio",
        "An audio language model of transformers' classes.",
    ),
    "codec": CardKind(
        "feature-extraction", ("audio", "codec", "audio-tokenizer"), "An audio codec",
        "A waveform to codes or latents, and back.",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class ModelFacts:
    """What the card of a model says."""

    name: str
    kind: str
    rows: tuple[tuple[str, str], ...]
    licence: Licence
    languages: tuple[str, ...]
    datasets: tuple[str, ...]
    bases: tuple[str, ...]
    codec_name: str
    """The hub's name of the codec, where others published it."""
    has_codec: bool
    """Whether the codec is in the repository."""
    in_transformers: bool
    """Whether transformers' own classes load the model and the codec."""
    clips: tuple[GeneratedSample, ...]
    evaluations: tuple[PublishedEvaluation, ...]
    prose: tuple[dict[str, Any], str] | None
    """Front matter and text that a person wrote; None: the text is made here."""
    architecture: str
    """Class of transformers in config.json; empty: none."""


def render_model_card(facts: ModelFacts) -> str:
    """Render README.md. A text that a person wrote stays; only its front matter is completed, and scores follow it."""
    front = model_front(facts)
    kind = KINDS[facts.kind]
    sections = [part for part in (_samples_part(facts), _scores_text(facts.evaluations)) if part]
    if facts.prose is None:
        table = [*facts.rows, ("Licence", facts.licence.name)]
        body = (
            f"# {facts.name.partition('/')[2]}: {kind.title[0].lower()}{kind.title[1:]}\n\n{kind.summary}\n\n"
        )
        body += markdown_table(("", ""), table) + "\n\n" + _usage_part(facts)
        return card_text(front, [PUSH_MARK, body, *sections])
    front = {**front, **facts.prose[0], **facts.licence.front}
    return card_text(front, [facts.prose[1].strip(), SECTIONS_MARK, *sections])


def card_text(front: dict[str, Any], parts: Iterable[str]) -> str:
    """Join front matter and parts of a card."""
    fields = yaml.safe_dump(front, sort_keys=False, allow_unicode=True, width=120).strip()
    return f"---\n{fields}\n---\n" + "\n\n".join(parts) + "\n"


def model_front(facts: ModelFacts) -> dict[str, Any]:
    """The front matter that hubs read; what is not known is left out."""
    kind = KINDS[facts.kind]
    front: dict[str, Any] = {
        "library_name": "transformers" if facts.kind == "listener" else "audiollm",
        "pipeline_tag": kind.task,
        "tags": [*kind.tags, *(["audiollm"] if facts.kind == "listener" else [])],
        **facts.licence.front,
        "language": list(facts.languages),
        "datasets": list(facts.datasets),
        "base_model": list(facts.bases),
        "model-index": _model_index(facts),
    }
    return {key: value for key, value in front.items() if value}


def markdown_table(headings: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown; bars and line ends in cells are escaped."""
    lines: list[list[object]] = [list(headings), *(list(row) for row in rows)]
    texts = [[" ".join(str(cell).replace("|", "\\|").split()) for cell in line] for line in lines]
    rendered = ["| " + " | ".join(line) + " |" for line in texts]
    return "\n".join([rendered[0], "|" + "---|" * len(texts[0]), *rendered[1:]])


def _model_index(facts: ModelFacts) -> list[dict[str, Any]]:
    """The scores of the model, not those of real recordings, as hubs read them."""
    results = []
    for evaluation in facts.evaluations:
        metrics = []
        for score in evaluation.scores:
            if score.of_real_recordings:
                continue
            metric: dict[str, Any] = {
                "type": score.metric,
                "value": round(score.value, 6),
                "name": score.name,
            }
            if score.interval:
                metric["name"] += f" (95 % interval {score.interval})"
            bounds = {"low": score.low, "high": score.high, "n": score.count}
            arguments: dict[str, Any] = {
                key: round(value, 6) for key, value in bounds.items() if value is not None
            }
            if evaluation.conditions:
                arguments["conditions"] = evaluation.conditions
            metrics.append({**metric, "args": arguments} if arguments else metric)
        if metrics:
            data = {"name": evaluation.dataset, "type": "held-out"}
            results.append({"task": {"type": KINDS[facts.kind].task}, "dataset": data, "metrics": metrics})
    return [{"name": facts.name.partition("/")[2], "results": results}] if results else []


def _usage_part(facts: ModelFacts) -> str:
    name = facts.name
    codec = f" --codec {facts.codec_name}" if facts.codec_name else ""
    lines = {
        "speech": f'audiollm generate --model {name}{codec} --download --text "Good morning." -o out.wav',
        "text": f'audiollm generate --model {name} --download --codec FOLDER --text "Good morning." -o out.wav',
        "hearing": f'audiollm ask --model {name} --download clip.wav "Please transcribe this audio."',
        "listener": f'audiollm ask --model {name} --download clip.wav "Please transcribe this audio."',
        "codec": f"audiollm tokenize recordings --codec {name} --download -o shards",
    }
    parts = [f"## Use\n\n```console\n$ pip install audiollm\n$ {lines[facts.kind]}\n```"]
    if facts.kind != "codec":
        option = " --codec FOLDER" if facts.kind == "text" else codec
        parts.append(
            "## Serve\n\nSpeech, transcripts and chats for clients of OpenAI's kind:\n\n```console\n"
            f"$ {INSTALL}\n$ audiollm serve {name}{option} --download      # http://127.0.0.1:8000/v1\n```"
        )
    if facts.has_codec:
        parts.append(f"The codec is in `{CODEC_FOLDER}/`.")
    if facts.in_transformers:
        parts.append(_transformers_code(name))
    if facts.kind == "listener" and facts.architecture:
        parts.append(f"transformers loads it as `{facts.architecture}`, with `AutoProcessor`.")
    return "\n\n".join(parts)


def _transformers_code(name: str) -> str:
    classes = "AutoProcessor, HiggsAudioV2ForConditionalGeneration, HiggsAudioV2TokenizerModel"
    lines = [
        f"from transformers import {classes}",
        "",
        f'codec = HiggsAudioV2TokenizerModel.from_pretrained("{name}", subfolder="{CODEC_FOLDER}")',
        f'processor = AutoProcessor.from_pretrained("{name}", audio_tokenizer=codec)',
        f'model = HiggsAudioV2ForConditionalGeneration.from_pretrained("{name}")',
    ]
    return "## In transformers\n\n```python\n" + "\n".join(lines) + "\n```"


def _samples_part(facts: ModelFacts) -> str:
    if not facts.clips:
        return ""
    from huggingface_hub import constants

    place = f"{constants.ENDPOINT}/{facts.name}/resolve/main"
    rows = [
        (
            escape(clip.text),
            escape(clip.speaker),
            f'<audio controls src="{place}/{quote(clip.name)}"></audio>',
        )
        for clip in facts.clips
    ]
    table = markdown_table(("text", "speaker", "generated"), rows)
    return f"## Samples\n\nGenerated by this model, spread over the prompts of its run; none was selected.\n\n{table}"


def _scores_text(evaluations: Iterable[PublishedEvaluation]) -> str:
    parts = []
    for evaluation in evaluations:
        rows = [
            (
                score.name,
                f"{score.value:.3f}",
                score.interval or "–",
                "–" if score.count is None else score.count,
            )
            for score in evaluation.scores
        ]
        table = markdown_table(("score", "value", "95 % interval", "n"), rows)
        lines = [
            f"### {evaluation.name}",
            f"Conditions: {evaluation.conditions}." if evaluation.conditions else "",
        ]
        lines += [f"Note: {warning}" for warning in evaluation.warnings]
        parts.append("\n\n".join([line for line in lines if line] + [table]))
    return "\n\n".join(["## Scores", *parts]) if parts else ""
