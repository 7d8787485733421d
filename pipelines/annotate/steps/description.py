"""The step `description`: a model that understands audio is asked about scene, speakers and content; what it answers
becomes the system prompt of a training sample, if it fits this sound better than something plainer would.

The gate is relative, as that of AudioSetCaps (Bai et al., 2024): no score is good or bad by itself, and a cut-off that
suits one model suits no other.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

from pipelines.annotate.measurements.description_gate import ClapGate, Gate, GateResult, SelfGate
from pipelines.annotate.step import Segment
from pipelines.steps.step import Resources, StepConfig, Value

if TYPE_CHECKING:
    from audiollm.audio import Waveform

OF_SPEECH = frozenset({"speakers"})
"""Not asked about sounds without speech."""


class DescriptionConfig(StepConfig):
    """Settings of `description`."""

    model: str | None = None
    """Audio LLM that describes: the folder of an audiollm or transformers model, or `package.module:factory`."""
    codec: Path | None = None
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
    clap: Path | None = None
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


class Description:
    """`{scene, speakers, content, text, gate: {kind, ours, reference, accepted, tries, reason}}`; of a description
    that is refused the columns and the text are null."""

    name = "description"
    level: ClassVar[Literal["segment"]] = "segment"
    version: ClassVar[int] = 1

    def __init__(self, config: DescriptionConfig) -> None:
        self._config = config
        self.needs: tuple[str, ...] = ("events",) if config.gate == "clap" else ()
        self.resources = Resources(gpus=config.gpus)

    def missing(self) -> str | None:
        config = self._config
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
            return (
                "description.gate: self needs a model of ours, whose likelihoods can be read: set gate: clap"
            )
        return None

    def setup(self) -> None:
        """Raises: ConfigError: a model that does not load."""
        from audiollm.evaluate.subjects.loading import load_answerer

        config = self._config
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
            for name, phrasings in self._config.questions.items()
            if segment.kind == "speech" or name not in OF_SPEECH
        }
        verdict, tries = GateResult(None, None, "nothing was asked"), 0
        refused: set[str] = set()
        # the answer to the same words would be the same
        wordings = max((len(phrasings) for phrasings in phrasings_by_name.values()), default=0)
        for turn in range(min(self._config.tries, wordings)):
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
            "kind": self._config.gate, "ours": verdict.ours, "reference": verdict.reference,
            "accepted": verdict.accepted, "tries": tries, "reason": verdict.reason,
        }  # fmt: skip
        columns = {
            name: answers[name] if verdict.accepted and name in phrasings_by_name else None
            for name in self._config.questions
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
