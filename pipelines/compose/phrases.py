"""Phrases of spoken samples: where the words of a recording are cut, by the word times of the step `alignment`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from audiollm.data.records.sample import PHRASE_WORDS, PRONUNCIATION, AudioPart, RecordedPhrase, Sample
from audiollm.data.text.languages import language_code
from audiollm.data.text.phrases import PhraseLayout, split_into_phrases
from audiollm.data.text.pronunciation import pronounced_language
from audiollm.errors import first_problem
from pipelines.compose.rows import Row


class WordTime(BaseModel):
    """A word's time in seconds from the start of its segment."""

    word: str
    start_s: float = Field(ge=0)
    end_s: float
    score: float | None
    """None: it could not be aligned, and its time is what its neighbours leave."""


_WORD_TIMES = TypeAdapter(list[WordTime])


def with_phrases(sample: Sample, row: Row, layout: PhraseLayout) -> Sample:
    """The sample with the phrases of its last message, where that is the segment's recording; another one unchanged.

    Raises:
        ConfigError: the rules of pronunciation are not there.
        ValueError: no word times, or those of another text.
    """
    last = sample.messages[-1]
    recording = last.content[0]
    if last.role != "assistant" or len(last.content) != 1 or not isinstance(recording, AudioPart):
        return sample
    words = row.words.split()
    if not words:
        return sample
    times = _word_times(row.columns)
    if len(times) != len(words):
        raise ValueError(
            f"no phrases: its text has {len(words)} words, and annotate aligned {len(times)}; give it the text as it "
            "is spoken, or leave phrase_words out"
        )
    assert recording.end_s is not None  # a segment has an end
    phrases = cut_phrases(words, times, recording.end_s - recording.start_s, layout.words)
    metadata: dict[str, Any] = {**sample.metadata, PHRASE_WORDS: layout.words}
    if layout.pronunciation is not None:
        _check_language(sample, layout.pronunciation)
        phrases = [phrase.model_copy(update={"phonemes": layout.reading(phrase.text)}) for phrase in phrases]
        metadata[PRONUNCIATION] = layout.pronunciation
    messages = [*sample.messages[:-1], last.model_copy(update={"phrases": phrases})]
    return sample.model_copy(update={"messages": messages, "metadata": metadata})


def _check_language(sample: Sample, pronunciation: str) -> None:
    """
    Raises:
        ValueError: the text is in another language than the phonemes.
    """
    language = language_code(str(sample.metadata.get("language") or ""))
    spoken = pronounced_language(pronunciation)
    if language is not None and language != spoken:
        raise ValueError(
            f"no phonemes: its language is {language}, and pronunciation {pronunciation} is of {spoken}"
        )


def cut_phrases(
    words: Sequence[str], times: Sequence[WordTime], duration_s: float, phrase_words: int
) -> list[RecordedPhrase]:
    """Cut a recording in the middle between two words; beside a word that was not aligned it is not cut.

    Args:
        duration_s: of the recording, with which the last phrase ends.
    """
    phrases: list[RecordedPhrase] = []
    waiting: list[str] = []
    position = 0
    for phrase in split_into_phrases(words, phrase_words):
        position += len(phrase)
        waiting += phrase
        if position == len(words):
            break
        before, after = times[position - 1], times[position]
        end_s = (before.end_s + after.start_s) / 2
        start_s = phrases[-1].end_s if phrases else 0.0
        if before.score is None or after.score is None or not start_s < end_s < duration_s:
            continue
        phrases.append(RecordedPhrase(text=" ".join(waiting), end_s=round(end_s, 3)))
        waiting = []
    return [*phrases, RecordedPhrase(text=" ".join(waiting), end_s=round(duration_s, 3))]


def _word_times(columns: Mapping[str, Any]) -> list[WordTime]:
    """
    Raises:
        ValueError: the segment has none.
    """
    aligned = (columns.get("measured") or {}).get("alignment") or {}
    try:
        times = _WORD_TIMES.validate_python(aligned.get("words") or [])
    except ValidationError as error:
        raise ValueError(f"no phrases: malformed word times: {first_problem(error)}") from None
    if not times:
        raise ValueError(
            "no phrases: it has no word times; add the step alignment to annotate, or leave phrase_words out"
        )
    return times
