"""The step `language`: the language of a segment, by its text, by the recognizers that detect one, and by its sound.

Shapes: K classes, N samples.
"""

from __future__ import annotations

import importlib.util
import math
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from audiollm.data.text.languages import language_code, languages_of, main_script
from audiollm.errors import ConfigError
from audiollm.evaluate.judges.taggers import AudioClassifier, probabilities
from pipelines.annotate.pretrained_parts import FOLDER, part_path
from pipelines.annotate.recognizers.value import missing_folder
from pipelines.annotate.step import Segment, SegmentStep
from pipelines.steps.step import StepConfig, Value

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

_WIDER = {
    "cmn": "zh",
    "yue": "zh",
    "wuu": "zh",
    "arz": "ar",
    "ary": "ar",
    "jw": "jv",
    "iw": "he",
    "nb": "no",
    "nn": "no",
}
"""Language code of a recognizer -> code of the candidate that it stands for."""
_MAX_PROBABILITY, _DEFAULT_PROBABILITY = 0.99, 0.5
_FILES = ("config.json", "preprocessor_config.json")
_EXPECTED_FOLDER = "an audio classifier of transformers whose classes are languages, with safetensors weights"
_SHORTEST_S = 0.1
SOUND = "sound"
"""Name of the model among the witnesses."""


class LanguageConfig(StepConfig):
    """Settings of `language`."""

    languages: list[str] | None = None
    """The only ones that are possible, as ISO 639 codes; every text is then taken to be in one of them, unless it is
    in a script of none. None: all that py3langid knows by a code of two letters."""
    min_length: int = Field(default=10, ge=1)
    """A shorter text tells nothing but its script: its letters in UTF-8 bytes (of Latin letters 1 each, of Cyrillic
    ones 2, of Chinese ones 3)."""
    model: Annotated[Path, part_path(transformers=FOLDER)] | None = None
    """`transformers=FOLDER`: an audio classifier whose classes are languages (MMS-LID, a Whisper with a classifier's
    head), which hears the segment; one whose text is refused, too. None: text and recognizers tell alone."""
    max_duration_s: float = Field(default=30.0, gt=0)
    """Longest sound given to the model; of a longer segment, the middle."""
    gpus: float = Field(default=0.0, ge=0)
    """Share of a GPU that a worker takes, for the model; 0: the CPU."""


class Language(SegmentStep[LanguageConfig]):
    """The language that text, recognizers and a model that hears the sound make likeliest together.

    Args:
        recognizers: the names of the steps that may tell a language.
    """

    name = "language"
    settings = LanguageConfig
    reads_text = True

    def __init__(self, config: LanguageConfig, recognizers: Sequence[str] = ()) -> None:
        super().__init__(config)
        self._recognizers = tuple(recognizers)
        self.needs: tuple[str, ...] = (*self._recognizers, "consensus")
        self.reads_text = config.model is None
        self.shared = config.model is None

    def missing(self) -> str | None:
        if self.config.model is not None:
            problem = missing_folder("language.model", self.config.model, _FILES, _EXPECTED_FOLDER)
            if problem is not None:
                return problem
        if importlib.util.find_spec("py3langid") is None:
            return "language: the package py3langid is not installed: pip install py3langid"
        return None

    def setup(self) -> None:
        """
        Raises:
            ConfigError: a language that py3langid does not know; a folder without a model of languages.
        """
        from py3langid.langid import MODEL_FILE, LanguageIdentifier

        self._identifier: LanguageIdentifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        supported = set(self._identifier.labels) - {"zxx"}  # py3langid's code for no language
        requested = self.config.languages
        self._candidates = frozenset(requested or {code for code in supported if len(code) == 2})
        if unknown := sorted(self._candidates - supported):
            raise ConfigError(
                f"language.languages: {', '.join(unknown)}: not known to py3langid",
                remedy=f"take it out, or use one of: {', '.join(sorted(supported))}",
            )
        self._model: SpokenLanguageModel | None = None
        if self.config.model is not None:
            device = "cuda" if self.config.gpus else "cpu"
            self._model = SpokenLanguageModel(self.config.model, self.config.max_duration_s, device)

    def process(self, item: Segment) -> Value:
        """`{language, probability, source}`; all None where nothing tells, or what does tells of no candidate.

        `source` says who: `given` (which is believed), `script` (it has one language), `text`, recognizers by name,
        `sound` (the model).
        """
        if item.metadata.language:
            return {"language": item.metadata.language, "probability": 1.0, "source": "given"}
        sound = {} if self._model is None else self._model.language_probabilities(item)
        if sound and self.config.languages is None:
            heard_language = max(sorted(sound), key=lambda code: sound[code])
            if heard_language not in self._candidates:  # of which a text tells nothing
                return {
                    "language": heard_language,
                    "probability": round(sound[heard_language], 4),
                    "source": SOUND,
                }
        recognizers = self._recognizers if self._model is None or _has_trusted_text(item) else ()
        text = _choose_segment_text(item, recognizers)
        script, share = main_script(text)
        possible = (
            self._candidates if script is None else self._candidates & languages_of(script, self._candidates)
        )
        evidence: dict[str, Mapping[str, float]] = {}
        if script is not None and len(possible) == 1 and script != "LATIN":
            evidence["script"] = dict.fromkeys(possible, 1.0)
        elif script is not None and _length(text) >= self.config.min_length:
            evidence["text"] = dict(self._identifier.rank(text))
        for name in recognizers:
            witness = self._language_probabilities(item.values.get(name) or {}, possible)
            if witness is not None and "script" not in evidence:
                evidence[name] = witness
        if sound and "script" not in evidence and (witness := _normalised(sound, possible)):
            evidence[SOUND] = witness
        if not evidence or not possible:
            return {"language": None, "probability": None, "source": None}
        joint = joint_probability(list(evidence.values()), possible)
        language = max(sorted(joint), key=lambda code: joint[code])
        probability = round(joint[language] * (share if script is not None else 1.0), 4)
        return {"language": language, "probability": probability, "source": " and ".join(evidence)}

    def _language_probabilities(
        self, value: Mapping[str, Any], possible: Collection[str]
    ) -> Mapping[str, float] | None:
        """Turn a recognizer's language into probabilities: the other languages share the rest."""
        language = value.get("language")
        if not isinstance(language, str) or not language:
            return None
        code = language.replace("_", "-").partition("-")[0].lower()
        code = code if code in possible else base_code(code)
        if code not in possible:
            return None
        sure = value.get("language_probability")
        sure = min(float(sure), _MAX_PROBABILITY) if isinstance(sure, int | float) else _DEFAULT_PROBABILITY
        other_share = (1.0 - sure) / max(len(possible) - 1, 1)
        return {candidate: sure if candidate == code else other_share for candidate in possible}


class SpokenLanguageModel:
    """An audio classifier of transformers whose classes are languages, by any of their usual names or codes.

    Args:
        max_duration_s: of a longer segment the model hears the middle.

    Raises:
        ConfigError: no such model, pickled weights only, or classes that are no languages.
    """

    def __init__(self, folder: Path, max_duration_s: float, device: str = "cpu") -> None:
        self._classifier = AudioClassifier.load(folder, device)
        self._codes = [label_language(label) for label in self._classifier.labels]
        if len(set(self._codes) - {None}) < 2:
            raise ConfigError(
                f"language.model: its classes are no languages: {', '.join(self._classifier.labels[:5])}",
                str(folder),
                "give a model of spoken languages, such as facebook/mms-lid-126 (classes eng, deu, ...)",
            )
        self._longest_s = min(max_duration_s, self._classifier.window_s or math.inf)

    def language_probabilities(self, item: Segment) -> dict[str, float]:
        """Language -> its probability; empty for a segment under 0.1 s, and where the model gives no number."""
        if item.duration_s < _SHORTEST_S:
            return {}
        samples_N = item.samples(self._classifier.sample_rate)
        spare = max(len(samples_N) - round(self._longest_s * self._classifier.sample_rate), 0)
        middle_N = samples_N[spare // 2 : len(samples_N) - (spare - spare // 2)]
        logits_K = self._classifier.logits([middle_N])[0]
        if not np.isfinite(logits_K).all():
            return {}
        shares: dict[str, float] = {}
        for code, share in zip(self._codes, probabilities(logits_K[None], exclusive=True)[0], strict=True):
            if code is not None:
                shares[code] = shares.get(code, 0.0) + float(share)
        return shares


def label_language(label: str) -> str | None:
    """The language of a class: `eng`, `en`, `en_us`, `English` and `en: English` are `en`; None of what is none."""
    code = language_code(label.partition(":")[0])
    return code if code is not None and code.isalpha() and len(code) <= 3 else None


def joint_probability(evidence: Sequence[Mapping[str, float]], possible: Collection[str]) -> dict[str, float]:
    """The normalised product of independent witnesses' probabilities over the possible languages.

    One who is not sure (nearly flat) changes little; two who are sure of different ones leave doubt.
    """
    logs = {
        code: sum(math.log(max(witness.get(code, 0.0), 1e-9)) for witness in evidence) for code in possible
    }
    highest = max(logs.values())
    weights = {code: math.exp(value - highest) for code, value in logs.items()}
    total = sum(weights.values())
    return {code: weight / total for code, weight in weights.items()}


def base_code(language: str) -> str:
    """The language of a code such as `en-US`, and for one of a language's varieties that language's."""
    code = language.replace("_", "-").partition("-")[0].lower()
    return _WIDER.get(code, code)


def _has_trusted_text(item: Segment) -> bool:
    """Whether the text is given or was not refused: a refused one is not among the values."""
    return bool(item.metadata.text) or "consensus" in item.values


def _normalised(shares: Mapping[str, float], possible: Collection[str]) -> dict[str, float]:
    """The shares of the possible languages, of a sum of 1; empty where they have none."""
    total = sum(shares.get(code, 0.0) for code in possible)
    return {code: shares.get(code, 0.0) / total for code in possible} if total > 0 else {}


def _choose_segment_text(item: Segment, recognizers: Sequence[str]) -> str:
    """Return the given text, else the consensus, else the text of the first recognizer that heard something."""
    texts = [(item.values.get(name) or {}).get("text") for name in ("consensus", *recognizers)]
    return next((text for text in (item.metadata.text, *texts) if text and text.strip()), "")


def _length(text: str) -> int:
    return sum(len(letter.encode()) for letter in _letters(text))


def _letters(text: str) -> list[str]:
    return [letter for letter in unicodedata.normalize("NFKC", text) if letter.isalpha()]
