"""The step `language`: the language of a segment, by its text and by the recognizers that detect one."""

from __future__ import annotations

import importlib.util
import math
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from audiollm.data.text.languages import languages_of, main_script
from audiollm.errors import ConfigError
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


class LanguageConfig(StepConfig):
    """Settings of `language`."""

    languages: list[str] | None = None
    """The only ones that are possible, as ISO 639 codes; every text is then taken to be in one of them, unless it is
    in a script of none. None: all that py3langid knows by a code of two letters."""
    min_length: int = Field(default=10, ge=1)
    """A shorter text tells nothing but its script: its letters in UTF-8 bytes (of Latin letters 1 each, of Cyrillic
    ones 2, of Chinese ones 3)."""


class Language(SegmentStep[LanguageConfig]):
    """The language that text and recognizers make likeliest together.

    Args:
        recognizers: the names of the steps that may tell a language.
    """

    name = "language"
    settings = LanguageConfig
    reads_text = True
    shared: ClassVar[bool] = True

    def __init__(self, config: LanguageConfig, recognizers: Sequence[str] = ()) -> None:
        super().__init__(config)
        self._recognizers = tuple(recognizers)
        self.needs: tuple[str, ...] = (*self._recognizers, "consensus")

    def missing(self) -> str | None:
        if importlib.util.find_spec("py3langid") is None:
            return "language: the package py3langid is not installed: pip install py3langid"
        return None

    def setup(self) -> None:
        """
        Raises:
            ConfigError: a language that py3langid does not know.
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

    def process(self, item: Segment) -> Value:
        """`{language, probability, source}`; all None where nothing tells, or what does tells of no candidate.

        `source` says who: `given` (which is believed), `script` (it has one language), `text`, recognizers by name.
        """
        if item.metadata.language:
            return {"language": item.metadata.language, "probability": 1.0, "source": "given"}
        text = _choose_segment_text(item, self._recognizers)
        script, share = main_script(text)
        possible = (
            self._candidates if script is None else self._candidates & languages_of(script, self._candidates)
        )
        evidence: dict[str, Mapping[str, float]] = {}
        if script is not None and len(possible) == 1 and script != "LATIN":
            evidence["script"] = dict.fromkeys(possible, 1.0)
        elif script is not None and _length(text) >= self.config.min_length:
            evidence["text"] = dict(self._identifier.rank(text))
        for name in self._recognizers:
            probabilities = self._language_probabilities(item.values.get(name) or {}, possible)
            if probabilities is not None and "script" not in evidence:
                evidence[name] = probabilities
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


def _choose_segment_text(item: Segment, recognizers: Sequence[str]) -> str:
    """Return the given text, else the consensus, else the text of the first recognizer that heard something."""
    texts = [(item.values.get(name) or {}).get("text") for name in ("consensus", *recognizers)]
    return next((text for text in (item.metadata.text, *texts) if text and text.strip()), "")


def _length(text: str) -> int:
    return sum(len(letter.encode()) for letter in _letters(text))


def _letters(text: str) -> list[str]:
    return [letter for letter in unicodedata.normalize("NFKC", text) if letter.isalpha()]
