"""The stage `sample_answers`: its settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Discriminator, Field, Tag, ValidationInfo, model_validator

from audiollm.hub_models.folders import hub_source
from audiollm.recipe.stages import InputModel, InputPath, StageConfig, check_input
from pipelines.answers.judge import JudgeEndpoint, check_judge_prompt

ScoreName = Literal["choice", "exact", "reward_model", "words", "voice", "judge"]
MODALITY_OF_SCORE = {"choice": "text", "exact": "text", "words": "speech", "voice": "speech"}
"""Scores that judge answers of one modality alone."""
READ_BY_SCORE = {
    "judge_prompt": "judge",
    "judge_tokens": "judge",
    "recognizer": "words",
    "language": "words",
    "voice_judge": "voice",
}
"""Settings that one score alone reads."""


def _fits_modality(name: str, modality: str) -> bool:
    return MODALITY_OF_SCORE.get(name, modality) == modality


def _is_default(default: Any) -> Any:
    """Settings that stages did not have before are written where they are set: finished stages stay as they are."""
    return lambda value: value == default


def _check_judge(judge: str, info: ValidationInfo) -> str:
    """Check the folder of a judge; `pocketsphinx` and import paths (`package.module:factory`) are none."""
    is_import_path = ":" in judge and not Path(judge).exists()
    if judge == "pocketsphinx" or is_import_path:
        return judge
    judge = hub_source(judge, "recognizer")
    kind, equals, folder = judge.rpartition("=")
    if equals and not Path(judge).exists():  # kind=FOLDER
        return f"{kind}={check_input(Path(folder), info)}"
    return str(check_input(Path(judge), info))


JudgeFolder = Annotated[str, AfterValidator(_check_judge)]
"""A judge as `audiollm evaluate` takes it: a folder, an import path, or a name."""


JudgeChoice = Annotated[
    Annotated[InputModel, Tag("folder")] | Annotated[JudgeEndpoint, Tag("endpoint")],
    Discriminator(lambda value: "folder" if isinstance(value, str | Path) else "endpoint"),
]
"""A language model that judges: its folder, or its endpoint."""


class SampleAnswersConfig(StageConfig):
    """Settings of `sample_answers`."""

    model: InputModel
    """The model that answers: a trained one's folder, or an audio LLM of transformers."""
    codec: InputModel | None = None
    """Folder of the codec, for a model that hears codes or speaks; None: the `train_tokenizer` of the model's run."""
    samples: InputPath
    """A .jsonl of samples; the last message of each, where it is the assistant's, is the right answer."""
    modality: Literal["text", "speech"] = Field("text", exclude_if=_is_default("text"))
    """`text`: answers in words. `speech`: spoken answers of a DualFFN. Their codes are kept as the model said them and
    are trained on without being encoded again; their sound is in `audio`."""
    group_size: int = Field(4, ge=1)
    """Answers to each prompt; equal ones are kept once, and counted."""
    temperature: float = Field(1.0, ge=0)
    """Of the draws; 0: the likeliest answer."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Share of the probability that is drawn from."""
    text_guidance: float | None = Field(None, ge=0, exclude_if=_is_default(None))
    """Speech: classifier-free guidance on the text, 1 is none. None: as the stage `generate` has it."""
    speaker_guidance: float | None = Field(None, ge=0, exclude_if=_is_default(None))
    """Speech: classifier-free guidance on the speaker. None: as the stage `generate` has it."""
    max_answer_tokens: int = Field(64, ge=1)
    """Longest answer, in tokens."""
    max_duration_s: float = Field(30.0, gt=0, exclude_if=_is_default(30.0))
    """Longest spoken answer; the limit follows the samples' recordings where those are shorter."""
    seed: int = 0
    """Seed of the draws; each question and answer has one of its own from it."""
    add_right: bool = True
    """The right answer is one of the answers, whether the model gave it or not; for speech (there by default false) its
    recording, encoded."""
    score: dict[ScoreName, float] = Field({"choice": 1.0}, min_length=1)
    """Weights of the scores whose sum is an answer's `score`. Text: `choice` is 1 where the answer names the right one
    among the sample's `choices` (metadata; else the answers that the samples give to the same question), `exact` where
    it is the right answer, word by word. Speech: `words` is 1 less the word error rate of what `recognizer` hears, at
    least 0 (the default); `voice` the likeness to the voice that was asked for, by `voice_judge`, -1 to 1. Both:
    `reward_model`; `judge`: the points that a language model gives, 0 to 5."""
    reward_model: InputModel | None = None
    """Folder of the stage train_reward."""
    recognizer: JudgeFolder = Field("pocketsphinx", exclude_if=_is_default("pocketsphinx"))
    """Recognizer of `words`: pocketsphinx (English; where few texts are asked for, it chooses among these), the
    folder of a recognizer as `annotate` takes it, or an import path."""
    language: str = Field("en", exclude_if=_is_default("en"))
    """Language of the spoken texts."""
    voice_judge: JudgeFolder | None = Field(None, exclude_if=_is_default(None))
    """Judge of `voice`: the folder of a Hugging Face x-vector model or of a speaker classifier that the stage
    `evaluate` trained, or an import path. None: a classifier of the samples' speakers, trained by this stage."""
    judge: JudgeChoice | None = Field(None, exclude_if=_is_default(None))
    """Judge of `judge`: the folder of a model (the one that answers judges itself), or an endpoint: `url`, `model`,
    `key_variable`."""
    judge_prompt: Annotated[str, AfterValidator(check_judge_prompt)] | None = Field(
        None, exclude_if=_is_default(None)
    )
    """What the judge is asked, with `{question}` and `{answer}`; recordings come before it. It must ask for a verdict
    that holds `Score:` and 0 to 5 points. None: five criteria, a point each."""
    judge_tokens: int = Field(512, ge=1, exclude_if=_is_default(512))
    """Longest verdict, in tokens."""
    max_samples: int | None = Field(None, ge=1)
    """Samples of each split, evenly picked; None: all."""
    strict: bool = False
    """Stop at the first sample that cannot be asked, or answer that cannot be scored; otherwise it is set aside,
    counted and left out."""

    @model_validator(mode="after")
    def _modality_is_read(self) -> SampleAnswersConfig:
        if self.modality == "speech":
            if "add_right" not in self.model_fields_set:
                self.add_right = False
            if "score" not in self.model_fields_set:
                self.score = {"words": 1.0}
        unread = {"text_guidance", "speaker_guidance", "max_duration_s"} & self.model_fields_set
        if self.modality == "text" and unread:
            raise ValueError(f"{min(unread)} is set, but only modality: speech reads it: leave it out")
        fitting = [name for name in get_args(ScoreName) if _fits_modality(name, self.modality)]
        for name in self.score:
            if name not in fitting:
                raise ValueError(
                    f"score.{name} judges no answers in {self.modality}: take {' or '.join(fitting)}"
                )
        return self

    @model_validator(mode="after")
    def _judges_are_read(self) -> SampleAnswersConfig:
        if ("reward_model" in self.score) != (self.reward_model is not None):
            raise ValueError("score.reward_model (its weight) and reward_model (its folder) go together")
        if ("judge" in self.score) != (self.judge is not None):
            raise ValueError("score.judge (its weight) and judge (its folder or endpoint) go together")
        for name, needs in READ_BY_SCORE.items():
            if name in self.model_fields_set and needs not in self.score:
                raise ValueError(f"{name} is set, but score has no {needs}: leave it out")
        return self
