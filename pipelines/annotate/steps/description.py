"""The step `description`: a model that understands audio is asked about scene, speakers and content; what it answers
becomes the system prompt of a training sample, if it fits this sound better than something plainer would.

The gate is relative, as that of AudioSetCaps (Bai et al., 2024): no score is good or bad by itself, and a cut-off that
suits one model suits no other.

Shapes: N samples, D dimensions of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from audiollm.files.json_files import OFFLINE
from audiollm.files.transformers_folders import fit_inputs, open_model, opening
from audiollm.recipe.stages import ModelPath, ModelSource
from pipelines.annotate.step import Segment, SegmentStep
from pipelines.steps.step import StepConfig, Value

if TYPE_CHECKING:
    from audiollm.audio import Waveform
    from audiollm.families.answering import LikelihoodModel
    from audiollm.models.audio_llms.inputs import Turn
    from pipelines.steps.step import Value

ROUNDING = 1e-4
"""Rounding error in nats per token: for a model that ignores sound, likelihoods differ by less."""
_SHORTEST_WINDOW_S = 0.5
_SILENCE = 1e-4
_BUZZ_HZ, _BUZZ_HARMONICS = 110.0, 36

QuestionAnswers = Sequence[tuple[str, str]]
"""Questions, each with its answer."""


class GateResult(NamedTuple):
    """Result of the gate: two numbers of one kind (larger is better), and the reason of a refusal or nothing."""

    ours: float | None
    reference: float | None
    reason: str | None

    @property
    def accepted(self) -> bool:
        return self.reason is None


class Gate(Protocol):
    """Interface of a gate, which compares a description with a plainer one."""

    def judge(
        self, sound: Waveform, question_answers: QuestionAnswers, text: str, values: Mapping[str, Value]
    ) -> GateResult:
        """
        Args:
            question_answers: each question and its answer.
            text: the answers as one.
            values: what other steps found.
        """


class ClapGate:
    """The cosine of sound and description is at least that of the sound and its labels (AudioSetCaps).

    A sound that is longer than the model takes is heard in windows, the embeddings of which are averaged: nothing is
    drawn at random, as the feature extractor would.

    Raises:
        ConfigError: the folder holds no CLAP, or pickled weights only.
    """

    def __init__(self, folder: Path, max_labels: int) -> None:
        from transformers import ClapModel, ClapProcessor

        from audiollm.devices import default_device

        remedy = "give a folder that transformers' ClapModel reads, with safetensors weights"
        with opening(folder, "CLAP", remedy, "description.clap"):
            self._processor = ClapProcessor.from_pretrained(str(folder), **OFFLINE)
            self._model = open_model(ClapModel, folder, default_device())
        self._max_labels = max_labels

    def judge(
        self, sound: Waveform, question_answers: QuestionAnswers, text: str, values: Mapping[str, Value]
    ) -> GateResult:
        labels = labels_of(values.get("events", {}), self._max_labels)
        if not labels:
            return GateResult(
                None, None, "no labels to compare with: the step events found none, or does not run"
            )
        heard_D = self._sound(sound)
        ours, reference = (
            round(float(heard_D @ self._text(caption)), 4)
            for caption in (text, f"The sound of {', '.join(labels)}.")
        )
        refused = ours < reference
        return GateResult(ours, reference, "the labels fit the sound better" if refused else None)

    def _sound(self, sound: Waveform) -> NDArray[np.float64]:
        extractor = self._processor.feature_extractor
        rate, longest = int(extractor.sampling_rate), int(extractor.nb_max_samples)
        samples_N = sound.mono().resample(rate).samples_CN[0].numpy()
        windows = [samples_N[start : start + longest] for start in range(0, len(samples_N), longest)]
        if len(windows) > 1 and len(windows[-1]) < _SHORTEST_WINDOW_S * rate:
            windows.pop()
        total_D = np.sum(
            [self._embed(extractor(w, sampling_rate=rate, return_tensors="pt")) for w in windows], 0
        )
        return _normalize_embedding(total_D)

    def _text(self, text: str) -> NDArray[np.float64]:
        longest = int(self._model.config.text_config.max_position_embeddings) - 2  # Roberta counts from 2
        tokens = self._processor.tokenizer(text, truncation=True, max_length=longest, return_tensors="pt")
        return self._embed(tokens)

    def _embed(self, inputs: Any) -> NDArray[np.float64]:
        import torch

        kind = "audio" if "input_features" in inputs else "text"
        input_names = ("input_features", "is_longer", "input_ids", "attention_mask")
        model_inputs = fit_inputs(self._model, {name: inputs[name] for name in input_names if name in inputs})
        with torch.inference_mode():
            output = getattr(self._model, f"get_{kind}_features")(**model_inputs)
        embedding_D = output if isinstance(output, torch.Tensor) else output.pooler_output
        return _normalize_embedding(embedding_D[0].double().cpu().numpy())


class SelfGate:
    """The mean log-probability a token of the answers, given this sound, is above its mean over four others: this one
    backwards (the same timbre, no words), noise of its spectrum, a buzz of its level, and silence.

    So a model that writes the same whatever it hears is refused, and one that describes what a recording has in common
    with its reverse or with noise, rain, is not. What is tested is that the words come from the sound. Whether they are
    right only another model can tell: a CLAP.
    """

    def __init__(self, model: LikelihoodModel) -> None:
        self._model = model

    def judge(
        self, sound: Waveform, question_answers: QuestionAnswers, text: str, values: Mapping[str, Value]
    ) -> GateResult:
        mono = sound.mono()
        ours = self.log_probability(mono, question_answers)
        reference = float(
            np.mean(
                [
                    self.log_probability(counterfactual, question_answers)
                    for counterfactual in counterfactual_sounds(mono)
                ]
            )
        )
        refused = not ours > reference + ROUNDING
        reason = "as likely with other sounds" if refused else None
        return GateResult(round(ours, 4), round(reference, 4), reason)

    def log_probability(self, sound: Waveform, question_answers: QuestionAnswers) -> float:
        """The mean over all tokens of the answers, their ends included, in nats."""
        conversations = [([_turn(sound, question)], answer) for question, answer in question_answers]
        total, tokens = self._model.log_probability(conversations)
        return total / tokens


def _turn(sound: Waveform, question: str) -> Turn:
    return "user", [sound, question]


def labels_of(events: Mapping[str, Any], max_labels: int) -> list[str]:
    """The labels of a value of the step `events`, the likeliest first: events above their threshold, else tags."""
    detections = events.get("events") or events.get("tags") or ()
    ordered = sorted(detections, key=lambda detection: (-detection["score"], detection["label"]))
    return list(dict.fromkeys(str(detection["label"]) for detection in ordered))[:max_labels]


def counterfactual_sounds(sound: Waveform) -> list[Waveform]:
    """A mono sound backwards, noise of its spectrum, a buzz of its level, and next to nothing; always the same."""
    import torch

    from audiollm.audio import Waveform

    samples_N = sound.samples_CN[0].double().numpy()
    generator = np.random.default_rng(0)
    spectrum = np.fft.rfft(samples_N)
    phases = np.exp(2j * np.pi * generator.random(len(spectrum)))
    noise_N = np.fft.irfft(np.abs(spectrum) * phases, n=len(samples_N))
    silence_N = _SILENCE * generator.standard_normal(len(samples_N))
    phase_N = 2 * np.pi * _BUZZ_HZ * np.arange(len(samples_N)) / sound.sample_rate
    buzz_N = np.sum([np.cos(number * phase_N) for number in range(1, _BUZZ_HARMONICS + 1)], 0)
    level = np.sqrt(np.mean(samples_N**2) / max(np.mean(buzz_N**2), 1e-12))
    sounds = (samples_N[::-1], noise_N, buzz_N * level, silence_N)
    return [
        Waveform(torch.from_numpy(np.clip(sound_N, -1, 1).astype(np.float32))[None], sound.sample_rate)
        for sound_N in sounds
    ]


def _normalize_embedding(vector_D: NDArray[np.float64]) -> NDArray[np.float64]:
    length = float(np.linalg.norm(vector_D))
    return vector_D / length if length else vector_D


OF_SPEECH = frozenset({"speakers"})
"""Not asked about sounds without speech."""


class DescriptionConfig(StepConfig):
    """Settings of `description`."""

    model: ModelSource | None = None
    """Audio LLM that describes: the folder of an audiollm or transformers model, or `package.module:factory`."""
    codec: ModelPath | None = None
    """Codec of an audiollm model that hears codes; null: the codec of its run."""
    questions: dict[str, list[str]] = Field(
        default={
            "scene": ["Describe this recording.", "What can be heard here?"],
            "speakers": [
                "Describe the speaker and the way of speaking.",
                "Who speaks here, and how does it sound?",
            ],
            "content": [
                "What is said, or what happens?",
                "Say in one sentence what this recording is about.",
            ],
        },
        min_length=1,
    )
    """Column -> its question, and other wordings for where the answer is refused."""
    tries: int = Field(2, ge=1)
    """Attempts, each with another wording, before a segment stays without a description."""
    gate: Literal["clap", "self"] = "self"
    """self: a model of ours finds its description likelier with this sound than with others. clap: the description is
    as near to the sound as the labels that the step `events` found, or nearer."""
    clap: ModelPath | None = None
    """The folder of a CLAP of transformers, with safetensors weights."""
    max_labels: int = Field(3, ge=1)
    """Most labels of `events` that are given to the model."""
    max_answer_tokens: int = Field(96, ge=1)
    """Longest answer, in tokens."""
    gpus: float = Field(0.0, ge=0)
    """Share of a GPU for each worker."""

    @field_validator("questions", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            name: [phrasings] if isinstance(phrasings, str) else phrasings
            for name, phrasings in value.items()
        }

    @field_validator("questions")
    @classmethod
    def _can_be_columns(cls, questions: dict[str, list[str]]) -> dict[str, list[str]]:
        for name, phrasings in questions.items():
            if not name.isidentifier() or name in ("text", "gate"):
                raise ValueError(f"{name!r} is not a valid column name for an answer")
            if not phrasings or not all(question.strip() for question in phrasings):
                raise ValueError(f"{name}: the question is empty")
        return questions


class Description(SegmentStep[DescriptionConfig]):
    """`{scene, speakers, content, text, gate: {kind, ours, reference, accepted, tries, reason}}`; of a description
    that is refused the columns and the text are null."""

    name = "description"
    settings = DescriptionConfig
    measures_sounds = True

    def __init__(self, config: DescriptionConfig) -> None:
        super().__init__(config)
        self.needs: tuple[str, ...] = ("events",) if config.gate == "clap" else ()

    def missing(self) -> str | None:
        config = self.config
        if config.model is None:
            return "description.model: no model is given: name the folder of one that understands audio"
        folder = _model_folder(Path(config.model))
        plugged = ":" in config.model and not Path(config.model).exists()
        if folder is None and not plugged:
            return (
                f"description.model: no model in {config.model} (config.json): give a trained model's folder"
            )
        if config.gate == "clap":
            if config.clap is None:
                return "description.clap: no CLAP is given: name its folder, or set gate: self"
            if not (config.clap / "config.json").is_file():
                return f"description.clap: no model in {config.clap} (config.json): give a CLAP's folder"
        elif folder is None or not _has_likelihoods(folder):
            return "description.gate: self needs the folder of a model whose likelihoods can be read: set gate: clap"
        return None

    def setup(self) -> None:
        """Raises: ConfigError: a model that does not load."""
        from audiollm.evaluate.subjects.loading import load_answerer

        config = self.config
        self._model = load_answerer(str(config.model), config.codec, config.max_answer_tokens).model
        self._gate: Gate = (
            ClapGate(Path(str(config.clap)), config.max_labels)
            if config.gate == "clap"
            else SelfGate(self._model.model)
        )

    def process(self, segment: Segment) -> Value:
        sound = segment.waveform()
        phrasings_by_name = {
            name: phrasings
            for name, phrasings in self.config.questions.items()
            if segment.kind == "speech" or name not in OF_SPEECH
        }
        verdict, tries = GateResult(None, None, "nothing was asked"), 0
        refused: set[str] = set()
        # the answer to the same words would be the same
        wordings = max((len(phrasings) for phrasings in phrasings_by_name.values()), default=0)
        for turn in range(min(self.config.tries, wordings)):
            tries = turn + 1
            questions = {
                name: phrasings[turn % len(phrasings)] for name, phrasings in phrasings_by_name.items()
            }
            answers = {name: self._answer(sound, question) for name, question in questions.items()}
            text = joined(answers.values())
            if text in refused:
                continue
            verdict = self._verdict(segment, sound, questions, answers)
            if verdict.accepted:
                break
            refused.add(text)
        gate = {
            "kind": self.config.gate, "ours": verdict.ours, "reference": verdict.reference,
            "accepted": verdict.accepted, "tries": tries, "reason": verdict.reason,
        }  # fmt: skip
        columns = {
            name: answers[name] if verdict.accepted and name in phrasings_by_name else None
            for name in self.config.questions
        }
        return {**columns, "text": text if verdict.accepted else None, "gate": gate}

    def _answer(self, sound: Waveform, question: str) -> str:
        return " ".join(str(self._model.answer(sound, question)).split())

    def _verdict(
        self, segment: Segment, sound: Waveform, questions: dict[str, str], answers: dict[str, str]
    ) -> GateResult:
        for name, answer in answers.items():
            if not answer:
                return GateResult(None, None, f"an empty answer: {name}")
        pairs = [(questions[name], answer) for name, answer in answers.items()]
        return self._gate.judge(sound, pairs, joined(answers.values()), segment.values)


def joined(answers: Any) -> str:
    """Sentences in a row: what does not end as one gets a full stop."""
    return " ".join(text if text[-1] in ".!?。！？…" else f"{text}." for text in answers if text)


def _model_folder(folder: Path) -> Path | None:
    """Find the model's folder, its own or inside that of its training, without loading anything."""
    return next((f for f in (folder, folder / "model") if (f / "config.json").is_file()), None)


def _has_likelihoods(folder: Path) -> bool:
    from audiollm.families.registry import open_model_folder

    return open_model_folder(folder).has_likelihoods
