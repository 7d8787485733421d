"""Measured values of a segment as fields of tasks: captions, tags, voices, and questions with closed answers.

No model writes here: the questions stand in `tasks.yaml`, and their answers follow from labels and counts. Where there
are few labels all of them are the choices, always in the same order; else the wrong ones are drawn from the labels of
other segments and put in an order that is drawn, too. Neither tells the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

Columns = Mapping[str, Any]
Fields = dict[str, str]

NUM_CHOICES = 4
MAX_CHOICES = 8
"""Most choices of a question that names all labels of the corpus."""
DESCRIPTION = ("scene", "speakers", "content")
VOICE = ("gender", "age", "accent", "emotion", "pitch", "pitch_variation", "rate", "energy")
"""Columns that describe a voice, in the order of the description."""
PHRASE_OF_COLUMN = {
    "pitch": "{} pitch",
    "pitch_variation": "{} intonation",
    "rate": "speaks {}",
    "energy": "speaks {}",
}
COUNTS = ("nobody", "one person", "two people", "three people", "four people")
MEN, WOMEN = frozenset({"m", "male", "man"}), frozenset({"f", "female", "woman"})
# fmt: off
LANGUAGES = {
    "ar": "Arabic", "bn": "Bengali", "cs": "Czech", "da": "Danish", "de": "German", "el": "Greek", "en": "English",
    "es": "Spanish", "fa": "Persian", "fi": "Finnish", "fr": "French", "he": "Hebrew", "hi": "Hindi", "hu": "Hungarian",
    "id": "Indonesian", "it": "Italian", "ja": "Japanese", "ko": "Korean", "nl": "Dutch", "no": "Norwegian",
    "pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "sv": "Swedish", "ta": "Tamil", "th": "Thai",
    "tr": "Turkish", "uk": "Ukrainian", "ur": "Urdu", "vi": "Vietnamese", "yue": "Cantonese", "zh": "Chinese",
}
# fmt: on


class Facts:
    """The labels of a corpus, from which wrong choices are drawn.

    Args:
        columns: of all segments.
    """

    def __init__(self, columns: Iterable[Columns], seed: int) -> None:
        self._seed = seed
        self._first_sounds: list[str] = []
        languages: set[str] = set()
        emotions: set[str] = set()
        for segment_columns in columns:
            self._first_sounds += _sounds(segment_columns)[:1]
            languages.update(_text_in_list(language_name(segment_columns.get("language"))))
            emotions.update(_text_in_list(segment_columns.get("emotion")))
        self._sounds, self._languages, self._emotions = (
            sorted(labels) for labels in (set(self._first_sounds), languages, emotions)
        )
        self._first_sounds.sort()  # whatever the order of the segments

    def of(self, id: str, columns: Columns, speakers: int | None) -> Fields:
        """Derive fields from the columns of a segment or conversation.

        Args:
            speakers: how many people speak; None where that is not known.
        """
        fields = _describe_columns(columns)
        sounds = _sounds(columns)
        present = {*sounds, *_labels(columns.get("tags")), *_labels(columns.get("events"))}
        absent = [label for label in self._sounds if label not in present]
        if sounds and absent:
            fields["sound_choices"] = self._choices(f"{id}:sound", sounds[0], absent)
            fields["sound"] = sounds[0]
            yes = self._hash(f"{id}:asked") % 2 == 0
            fields["asked_sound"] = sounds[0] if yes else self._absent_sound(id, present)
            fields["is_heard"] = "Yes" if yes else "No"
        for name, labels in (("language", self._languages), ("emotion", self._emotions)):
            label = fields.get(name) or (_text_in_list(columns.get(name)) or [""])[0]
            other_labels = [other_label for other_label in labels if other_label != label]
            if label and other_labels:
                fields[f"{name}_choices"] = self._choices(f"{id}:{name}", label, other_labels)
                fields[f"{name}_answer"] = label
        gender = str(columns.get("gender") or "").casefold()
        if gender in MEN | WOMEN:
            fields["gender_choices"] = "a man or a woman"
            fields["gender_answer"] = "A man" if gender in MEN else "A woman"
        if speakers is not None and speakers < len(COUNTS):
            fields["count_choices"] = ", ".join(COUNTS)
            fields["count_answer"] = COUNTS[speakers].capitalize()
        return fields

    def _absent_sound(self, id: str, present: set[str]) -> str:
        """Draw a label of another segment, as often as it occurs, so that a frequent label is no safe answer."""
        start, count = self._hash(f"{id}:absent"), len(self._first_sounds)
        places = ((start + step) % count for step in range(count))
        return next(label for place in places if (label := self._first_sounds[place]) not in present)

    def _choices(self, key: str, right: str, other_labels: Sequence[str]) -> str:
        # labels of AudioSet have commas in them
        if len(other_labels) < MAX_CHOICES:
            return "; ".join(sorted([right, *other_labels]))
        choices = [right, *self._shuffle(key, other_labels)[: NUM_CHOICES - 1]]
        return "; ".join(self._shuffle(f"{key}:order", choices))

    def _shuffle(self, key: str, labels: Sequence[str]) -> list[str]:
        return sorted(labels, key=lambda label: (self._hash(f"{key}:{label}"), label))

    def _hash(self, text: str) -> int:
        return int(sha256(f"{self._seed}:{text}".encode()).hexdigest()[:16], 16)


def language_name(language: Any) -> str | None:
    """Return the name of a language by its ISO 639 code; any other text is returned unchanged."""
    text = str(language or "")
    return LANGUAGES.get(text.casefold().partition("-")[0], text) or None


def _describe_columns(columns: Columns) -> Fields:
    """Captions, tags and voices out of the columns that they are made of."""
    fields: Fields = {}
    sentences = [text for name in DESCRIPTION for text in _text_in_list(columns.get(name))]
    if sentences:
        fields["caption"] = " ".join(
            sentence if sentence[-1] in ".!?。！？" else f"{sentence}." for sentence in sentences
        )
    sounds = _labels(columns.get("events"))
    if sounds:
        fields["tags"] = ("; " if any("," in label for label in sounds) else ", ").join(sounds)
    voice = [
        PHRASE_OF_COLUMN.get(name, "{}").format(text)
        for name in VOICE
        for text in _text_in_list(columns.get(name))
    ]
    if voice:
        fields["attributes"] = fields["voice"] = ", ".join(voice)
    if described := _text_in_list(columns.get("speakers")):
        fields["voice"] = described[0]
    if name := language_name(columns.get("language")):
        fields["language"] = name
    return fields


def _sounds(columns: Columns) -> list[str]:
    """Labels of what is heard for sure, the likeliest first: events above their threshold, else tags as given."""
    measured = (columns.get("measured") or {}).get("events") or {}
    events = sorted(measured.get("events") or (), key=lambda event: (-event["score"], event["label"]))
    labels = [str(event["label"]) for event in events] or ([] if measured else _labels(columns.get("tags")))
    return list(dict.fromkeys(labels))


def _labels(value: Any) -> list[str]:
    if isinstance(value, str):
        return [piece.strip() for piece in value.split(",") if piece.strip()]
    return [str(label) for label in value] if isinstance(value, (list, tuple)) else []


def _text_in_list(value: Any) -> list[str]:
    """The text of a column, alone in a list; nothing where it has none."""
    text = " ".join(str(value).split()) if isinstance(value, (str, int, float)) else ""
    return [text] if text else []
