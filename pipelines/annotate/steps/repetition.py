"""The step `repetition`: statistics of a text that reveal hallucinations and loops of a recognizer.

Words are those of `audiollm.data.text.words`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from audiollm.data.text.repeated_words import longest_loop
from audiollm.data.text.words import is_unspaced, words_of
from pipelines.annotate.step import Segment, SegmentStep
from pipelines.steps.step import StepConfig, Value

PHRASES = {
    "en": (
        "thank you",
        "thank you very much",
        "thanks for watching",
        "thank you for watching",
        "thank you so much for watching",
        "bye",
        "you",
        "please subscribe",
        "please subscribe to my channel",
        "see you in the next video",
        "i'll see you next time",
        "*subtitles by the amara.org community*",
        "*like and subscribe*",
        "*transcription by castingwords*",
        "*transcribed by otter.ai*",
        "*www.mooji.org*",
    ),
    "de": (
        "vielen dank",
        "vielen dank fürs zuschauen",
        "danke fürs zuschauen",
        "bis zum nächsten mal",
        "*untertitel der amara.org-community*",
        "*untertitelung des zdf*",
        "*untertitel im auftrag des zdf*",
        "*untertitelung aufgrund der amara.org-community*",
        "*swr 2020*",
    ),
    "fr": (
        "merci",
        "merci d'avoir regardé cette vidéo",
        "merci d'avoir regardé la vidéo",
        "abonnez-vous",
        "*sous-titres réalisés par la communauté d'amara.org*",
        "*sous-titres réalisés para la communauté d'amara.org*",
        "*sous-titrage société radio-canada*",
        "*sous-titrage st' 501*",
    ),
    "es": (
        "gracias",
        "gracias por ver el video",
        "muchas gracias por ver el video",
        "suscríbete al canal",
        "*subtítulos realizados por la comunidad de amara.org*",
        "*subtítulos por la comunidad de amara.org*",
    ),
    "it": (
        "grazie",
        "grazie a tutti",
        "grazie per aver guardato il video",
        "*sottotitoli creati dalla comunità amara.org*",
        "*sottotitoli e revisione a cura di qtss*",
    ),
    "pt": (
        "obrigado",
        "obrigado por assistir",
        "*legendas pela comunidade amara.org*",
        "*legendas pela comunidade das amara.org*",
    ),
    "nl": (
        "bedankt voor het kijken",
        "*ondertitels ingediend door de amara.org gemeenschap*",
        "*tv gelderland 2021*",
    ),
    "pl": ("dziękuję za uwagę", "dzięki za oglądanie", "*napisy stworzone przez społeczność amara.org*"),
    "ru": (
        "спасибо за просмотр",
        "продолжение следует",
        "подписывайтесь на канал",
        "*редактор субтитров*",
        "*субтитры сделал dimatorzok*",
        "*субтитры создавал dimatorzok*",
    ),
    "tr": ("izlediğiniz için teşekkür ederim", "*altyazı m.k.*"),
    "zh": (
        "谢谢观看",
        "謝謝觀看",
        "谢谢大家",
        "请不吝点赞 订阅 转发 打赏支持明镜与点点栏目",
        "*明镜与点点*",
        "*明鏡與點點*",
        "*字幕由amara.org社区提供*",
        "*中文字幕志愿者*",
        "*字幕志愿者*",
        "*by索兰娅*",
    ),
    "ja": (
        "ご視聴ありがとうございました",
        "ご視聴ありがとうございます",
        "ご清聴ありがとうございました",
        "最後までご視聴ありがとうございました",
        "チャンネル登録お願いします",
        "チャンネル登録をお願いいたします",
    ),
    "ko": (
        "시청해주셔서 감사합니다",
        "시청해 주셔서 감사합니다",
        "구독과 좋아요 부탁드립니다",
        "다음 영상에서 만나요",
        "*한글자막 by*",
        "*mbc 뉴스*",
    ),
    "ar": ("شكرا على المشاهدة", "*ترجمة نانسي قنقر*"),
}
"""Phrases that Whisper-like models are publicly known to write over silence and music, by language. A phrase matches
the whole text, once or repeated; between asterisks, any part of it."""


class RepetitionConfig(StepConfig):
    """Settings of `repetition`."""

    phrases: Path | None = None
    """A text file with more phrases, one per line: a phrase matches the whole text, `*between asterisks*` any part of
    it. Lines that begin with # are ignored."""
    ngram: int = Field(default=10, ge=1)
    """Length, in words, of the sequences that `max_ngram_count` counts."""


class Repetition(SegmentStep[RepetitionConfig]):
    """Statistics by which a hallucinated text stands out, and the known phrase that it is."""

    name = "repetition"
    settings = RepetitionConfig
    reads_text = True
    needs: tuple[str, ...] = ("consensus",)

    def missing(self) -> str | None:
        path = self.config.phrases
        if path is not None and not path.is_file():
            return f"repetition.phrases: {path} is not a file: give a text file with a phrase a line"
        return None

    def setup(self) -> None:
        """
        Raises:
            OSError, UnicodeDecodeError: the file of phrases cannot be read as UTF-8 text.
        """
        path = self.config.phrases
        lines = path.read_text(encoding="utf-8-sig").splitlines() if path is not None else []
        custom_phrases = [line for line in lines if line.strip() and not line.startswith("#")]
        self._phrases = Phrases.of(
            phrase for group in (*PHRASES.values(), custom_phrases) for phrase in group
        )

    def process(self, item: Segment) -> Value:
        """Measure the consensus, else the given text; values that a text without words does not have are None.

        `unique_word_share`: different words over words. `longest_word`: characters. `longest_ratio`: over the second
        longest. `max_ngram_count`: how often the most frequent sequence of `ngram` words occurs. `longest_loop`: how
        often words follow themselves at once ("7 7 7 7": 4; 1: no loop). `characters`: without white space.

        Source: Granary (NVIDIA NeMo-speech-data-processor, `DetectWhisperHallucinationFeatures`) and NeMo Curator.
        """
        text = str((item.values.get("consensus") or {}).get("text") or item.metadata.text or "")
        words = words_of(text)
        lengths = sorted((len(word) for word in words if not is_unspaced(word)), reverse=True)
        characters = len("".join(text.split()))
        seconds = item.duration_s
        return {
            "unique_word_share": round(len(set(words)) / len(words), 4) if words else None,
            "longest_word": lengths[0] if lengths else None,
            "longest_ratio": round(lengths[0] / lengths[1], 4) if len(lengths) > 1 else None,
            "max_ngram_count": max_ngram_count(words, self.config.ngram),
            "longest_loop": longest_loop(words),
            "phrase": self._phrases.found_in(text),
            "characters": characters,
            "characters_per_s": round(characters / seconds, 3) if seconds > 0 else None,
            "words_per_s": round(len(words) / seconds, 3) if seconds > 0 else None,
        }


class Phrases(NamedTuple):
    """Known phrases, as words: those that are a whole text, and those found anywhere in one."""

    exact: dict[tuple[str, ...], str]
    anywhere: dict[tuple[str, ...], str]

    @classmethod
    def of(cls, phrases: Iterable[str]) -> Phrases:
        """Make phrases from lines: `*anywhere*`, or the whole text."""
        result = cls({}, {})
        for phrase in phrases:
            line = phrase.strip()
            anywhere = len(line) > 2 and line[0] == line[-1] == "*"
            if words := tuple(words_of(line.strip("*"))):
                (result.anywhere if anywhere else result.exact).setdefault(words, line.strip("*"))
        return result

    def found_in(self, text: str) -> str | None:
        """The phrase that all of the text is, or the longest that is in it; None where there is none."""
        words = tuple(words_of(text))
        for count in range(1, len(words) + 1):
            unit = words[: len(words) // count]
            if len(words) % count == 0 and unit in self.exact and unit * count == words:
                return self.exact[unit]
        spaced = f" {' '.join(words)} "
        inside = [phrase for phrase in self.anywhere if f" {' '.join(phrase)} " in spaced]
        return self.anywhere[max(inside, key=len)] if inside else None


def max_ngram_count(words: Sequence[str], size: int) -> int:
    """How often the most frequent sequence of `size` words occurs; 0 of fewer words."""
    counts = Counter(tuple(words[start : start + size]) for start in range(len(words) - size + 1))
    return max(counts.values(), default=0)
