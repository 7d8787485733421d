"""Settings of the stage `annotate`: input, steps, thresholds, and the machines that it runs on."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationInfo, field_validator, model_validator

from audiollm.hub_models.names import folder_label
from audiollm.recipe.stages import InputPath, check_input, located
from pipelines.annotate.execution.chain import STEPS
from pipelines.annotate.execution.corpus import DuplicateConfig
from pipelines.annotate.execution.rules import PRESETS, Preset, Thresholds
from pipelines.annotate.input import synthetic
from pipelines.annotate.input.annotated import annotated_corpus
from pipelines.annotate.input.transcripts import compile_pattern, is_pattern, parse_condition
from pipelines.annotate.recognizers.choice import RecognizerChoice
from pipelines.steps.chain import StepCatalog, paths_of
from pipelines.steps.inputs import MANIFESTS
from pipelines.steps.settings import StepsConfig

_RECOGNIZER: TypeAdapter[RecognizerChoice] = TypeAdapter(RecognizerChoice)
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")
PresetName = Literal["quickstart", "small", "emilia", "granary", "curator-asr", "curator-tts", "audioverse"]


class AnnotationConfig(StepsConfig):
    """Settings of the stage `annotate`."""

    catalog: ClassVar[StepCatalog] = STEPS
    incidental: ClassVar[frozenset[str]] = StepsConfig.incidental | {"earlier"}

    input: str | list[str] | None = None
    """A folder, a file, a glob, a list (CSV or JSONL with a column path), a tar or an address; several in a list. In a
    recipe also a corpus that `audiollm annotate` wrote, which is taken as it is. null: speak a corpus."""
    transcripts: str | None = None
    """A CSV or JSONL of path,text[,speaker,split], or a pattern such as '{text}_{speaker}_{take}.wav'."""
    test: str | None = None
    """Condition on the transcripts' fields that selects the test set: 'take<5', 'speaker==theo,take>=3'."""
    untranscribed: Literal["set_aside", "recognize"] = "set_aside"
    """Recordings for which `transcripts` has no text: set aside, or recognized as without transcripts."""
    preset: PresetName = "quickstart"
    """Named set of steps and thresholds, which the settings below change."""
    recognizers: list[Any] = Field(default=["pocketsphinx"])
    """Speech recognizers: kinds, or objects with a `kind` and its settings. Where no text is given, the consensus of
    several is the text."""
    grammar: Literal["auto", "open"] | list[str] = "auto"
    """The texts that pocketsphinx may hear; auto: those given where every recording has one and there are at most
    60, else any."""
    outlier_iqr: float | None = Field(None, gt=0)
    """Drop a segment whose seconds per character lie this many interquartile ranges outside the quartiles of its file;
    null: as the preset says."""
    duplicates: DuplicateConfig | Literal[False] | None = None
    """Criteria of the duplicates to drop; false: drop none; null: as the preset says."""
    link_speakers: float | None = Field(None, gt=0, le=1)
    """Cosine from which voices of two recordings are one speaker; null: 0.83 where the step speakers runs."""
    bins: Path | None = None
    """Bin edges (`bins.json`) of an earlier run for words of pitch, rate and energy; null: fit to this corpus."""
    quality_sample: int = Field(default=60, ge=0)
    """Segments whose quality is measured (DNSMOS, 0.25 s each) where no step does it for all."""
    shards: bool = False
    """Write the kept segments as webdataset shards, too."""
    earlier: InputPath | None = None
    """`ledger/ledger.sqlite` of another annotation: what was measured there, with the same settings on the same
    content, is not measured again."""
    corpus: synthetic.CorpusConfig = Field(default_factory=synthetic.CorpusConfig)
    """The corpus that is spoken where `input` is null."""

    @field_validator("transcripts")
    @classmethod
    def _transcripts_are_usable(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and is_pattern(value):
            compile_pattern(value)
        elif value is not None:
            check_input(Path(value), info)
        return value

    @field_validator("test")
    @classmethod
    def _test_is_a_condition(cls, value: str | None) -> str | None:
        if value is not None:
            parse_condition(value)
        return value

    @model_validator(mode="after")
    def _go_together(self, info: ValidationInfo) -> AnnotationConfig:
        if self.input is None and (self.transcripts or self.test):
            raise ValueError(
                "transcripts and test are for recordings: give `input` as well; a corpus of texts is divided by "
                "corpus.test_voices and corpus.test_texts"
            )
        corpus = annotated_corpus(self.inputs)
        if corpus is not None and (self.transcripts or self.test or self.shards):
            raise ValueError(
                f"{corpus} is an annotated corpus, which is taken as it is: leave out transcripts, test and shards, or "
                "give the recordings that it was made of"
            )
        if self.untranscribed == "recognize" and not (self.transcripts and self.recognizers):
            raise ValueError("untranscribed=recognize needs `transcripts` and a recognizer")
        if self.test and not self.transcripts and not any(t.lower().endswith(MANIFESTS) for t in self.inputs):
            raise ValueError("test is a condition over fields of the transcripts: give `transcripts` as well")
        limits = self.limits
        shortest, longest = limits.min_duration_s, limits.max_duration_s
        if shortest is not None and longest is not None and shortest >= longest:
            raise ValueError("min_duration_s must be below max_duration_s")
        names = [recognizer.name or recognizer.kind for recognizer in self.recognizer_settings()]
        if len(set(names)) < len(names):
            raise ValueError("two recognizers have the same name: give each a `name`")
        step_names = STEPS.value_names(self.step_settings())
        reserved_names = set(names) & {*STEPS.built_in, *step_names}
        if reserved_names:
            raise ValueError(f"a recognizer cannot have the name of the step {reserved_names.pop()}")
        self.check_resources({*STEPS.built_in, *step_names, *names})
        steps = {("steps", name): settings for name, settings in self.step_settings().items()}
        recognizers = {
            ("recognizers", place): settings for place, settings in enumerate(self.recognizer_settings())
        }
        for place, settings in (recognizers | steps).items():
            for name, path in paths_of(settings).items():
                with located(*place, name):
                    check_input(path, info)
        if self.bins is not None:
            check_input(self.bins, info)
        return self

    @model_validator(mode="after")
    def _corpus_is_at_hand(self, info: ValidationInfo) -> AnnotationConfig:
        corpus = self.corpus
        if self.input is None and corpus.texts is not None:
            with located("corpus", "texts"):
                check_input(corpus.texts, info)
            for path in corpus.make_synthesizer().inputs:
                with located("corpus", "synthesizer"):
                    check_input(path, info)
        return self

    @property
    def chosen_preset(self) -> Preset:
        return PRESETS[self.preset]

    @property
    def limits(self) -> Thresholds:
        """Thresholds of the preset, overridden by those set by hand."""
        return Thresholds(**self.merge_thresholds(self.chosen_preset.thresholds))

    def recognizer_settings(self) -> list[RecognizerChoice]:
        """Typed settings of the recognizers; of several of a kind, those with a model have its name."""
        recognizers: list[RecognizerChoice] = []
        for place, choice in enumerate(self.recognizers):
            with located("recognizers", place):
                recognizers.append(
                    _RECOGNIZER.validate_python({"kind": choice} if isinstance(choice, str) else choice)
                )
        kinds = Counter(recognizer.kind for recognizer in recognizers if not recognizer.name)
        return [
            recognizer.model_copy(
                update={"name": _NOT_IN_NAMES.sub("-", folder_label(Path(recognizer.model)))}
            )
            if not recognizer.name and kinds[recognizer.kind] > 1 and hasattr(recognizer, "model")
            else recognizer
            for recognizer in recognizers
        ]

    def step_settings(self, separated: Path = Path("separated")) -> dict[str, BaseModel]:
        """Typed settings of all steps but the recognizers.

        Args:
            separated: where the step `separate` writes.
        """
        step_values = self.merge_steps(
            {**self.chosen_preset.steps, **({"consensus": {}} if self.recognizers else {})}
        )
        if "separate" in step_values:
            step_values["separate"] = {**step_values["separate"], "folder": separated}
        longest = self.limits.max_duration_s
        if longest is not None:
            step_values["segments"] = {"max_duration_s": longest, **step_values["segments"]}
        return STEPS.typed_settings(step_values)
