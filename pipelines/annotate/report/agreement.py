"""Agreement of the recognizers: word errors of each pair, the words that they argue about, texts with the differences
marked. Words are compared in their spoken form, as the consensus does it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from markupsafe import Markup

from audiollm.data.text.languages import language_of
from audiollm.evaluate.alignment.written_words import WrittenWord, written_words
from audiollm.pages.blocks import (
    Content,
    details,
    element,
    facts,
    heading,
    heat,
    isolated,
    join,
    note,
    notice,
    small,
    table,
)  # fmt: skip
from audiollm.pages.formats import percent_or_dash
from audiollm.pages.page import Section
from pipelines.annotate.report.survey import AnnotationSurvey
from pipelines.steps.page.folder import Row, clean_text, finite_number, named
from pipelines.steps.page.numbers import Numbers, histograms

WORDS_SHOWN = 20
MAX_RECOGNIZERS = 8
GIVEN_TEXT = "given text"


class Marked(NamedTuple):
    """A part of a text beside another one: the same, different, or missing here."""

    text: str
    kind: str
    """`same`, `differs` or `missing`."""


def agreement_section(survey: AnnotationSurvey, text_agreement: object) -> Section:
    """The matrix, the words most argued about, and the histograms of what the consensus measured.

    Args:
        text_agreement: of `funnel.json`: how often the recognizers have the given text.
    """
    content = _agreement(survey, finite_number(text_agreement))
    return Section("agreement", "Recognizers", content, "How far the recognizers agree")


def _agreement(survey: AnnotationSurvey, text_agreement: float | None) -> Markup:
    pairs, words = compare_recognizers(survey)
    numbers = [survey.numbers.get(path) for path in ("consensus.pairwise_wer", "consensus.vote_share")]
    listed = _list_agreement_facts(numbers, text_agreement)
    if len(pairs.names) < 2 and not listed:
        return notice("There is one recognizer, or none: nothing to agree with.")
    charts = [of for of in numbers if of is not None]
    beside = element("div", heading("By segment"), histograms(charts)) if charts else None
    return join(
        facts(listed),
        element("div", _matrix(pairs, survey) if len(pairs.names) > 1 else None, beside, class_="pair"),
        _argued_words(words.rows()),
    )


def compare_recognizers(survey: AnnotationSurvey) -> tuple[RecognizerPairs, ArguedWords]:
    """Word errors of each pair of recognizers, and the words in whose place something else was heard."""
    pairs, words = RecognizerPairs(), ArguedWords()
    for row in survey.compared.rows():
        texts = _texts_by_recognizer(row)
        language = _row_language(row)
        forms = {name: _forms(_split_written_words(text, language)) for name, text in texts.items()}
        pairs.add(forms)
        words.add(forms, [name for name in texts if name != GIVEN_TEXT])
    return pairs, words


def _matrix(pairs: RecognizerPairs, survey: AnnotationSurvey) -> Markup:
    """The error rates: one row per reference, one column per recognizer compared with it."""
    names, rates = pairs.ordered_names(), pairs.rates()
    rows = []
    for first in names:
        of_row = [rates.get((first, second)) if first != second else None for second in names]
        cells = [
            ("–" if rate is None else f"{100 * rate:.1f}", min(rate or 0.0, 1.0), False) for rate in of_row
        ]
        rows.append((first, cells))
    count, total = len(survey.compared.rows()), survey.compared.offered
    of = f"Of {count:,} of {total:,} segments with a recognizer's text."
    if count >= total:
        of = f"Of {total:,} segments with a recognizer's text, dropped ones among them."
    return element(
        "div",
        heading("Word errors", "of the column by the words of the row, percent"),
        heat(rows, ["", *names]),
        note(f"{of} Words in their spoken form; characters where there are no spaces."),
    )


def _argued_words(rows: Sequence[Row]) -> Markup | None:
    if not rows:
        return None
    listed = []
    for row in rows:
        instead: list[Content] = []
        for word, count in row["instead"]:
            instead += [", "] if instead else []
            instead += [isolated(word) if word else small("nothing"), " ", small(f"{count:,}")]
        listed.append((isolated(row["word"]), f"{row['times']:,}", percent_or_dash(row["share"]), instead))
    return details(
        f"Words most argued about ({len(rows)})",
        table(("word", "times", "heard so by", "heard in its place"), listed, "words"),
        note("Against the given text, or else the text nearest to all others."),
        is_open=True,
    )


def marked(text: str, transcript: str, language: str) -> list[Marked]:
    """A recognizer's text with its words that differ from `text` marked, and the missing ones."""
    from rapidfuzz.distance import Levenshtein

    ours, theirs = (
        _split_written_words(clean_text(text), language),
        _split_written_words(clean_text(transcript), language),
    )
    ours_forms, owners = _forms(ours), [place for place, word in enumerate(theirs) for _ in word.forms]
    our_owners = [place for place, word in enumerate(ours) for _ in word.forms]
    differing: set[int] = set()
    missing: dict[int, list[int]] = {}
    for edit in Levenshtein.opcodes(ours_forms, _forms(theirs)):
        if edit.tag in ("replace", "insert"):
            differing.update(owners[edit.dest_start : edit.dest_end])
        elif edit.tag == "delete":
            place = owners[edit.dest_start] if edit.dest_start < len(owners) else len(theirs)
            missing.setdefault(place, []).extend(dict.fromkeys(our_owners[edit.src_start : edit.src_end]))
    parts: list[Marked] = []
    for place in range(len(theirs) + 1):
        gone = [ours[index] for index in missing.get(place, ())]
        if gone:
            parts += _separated(_join_spaced(gone), "missing")
        if place < len(theirs):
            parts += _separated(_join_spaced([theirs[place]]), "differs" if place in differing else "same")
    return _merge_marked(parts[1:] if parts and parts[0].text == " " else parts)


@dataclass
class RecognizerPairs:
    """Edits between each two recognizers, and the number of words of the first."""

    names: list[str] = field(default_factory=list)
    edits: Counter[tuple[str, str]] = field(default_factory=Counter)
    words: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, forms: Mapping[str, Sequence[str]]) -> None:
        from rapidfuzz.distance import Levenshtein

        self.names += [name for name in forms if name not in self.names]
        for first, reference in forms.items():
            for second, hypothesis in forms.items():
                if first != second:
                    self.edits[first, second] += Levenshtein.distance(reference, hypothesis)
                    self.words[first, second] += len(reference)

    def ordered_names(self) -> list[str]:
        """The given text first, then the recognizers by name."""
        return sorted(self.names, key=lambda name: (name != GIVEN_TEXT, name))[: MAX_RECOGNIZERS + 1]

    def rates(self) -> dict[tuple[str, str], float]:
        """The error rate of the second of a pair by the words of the first."""
        return {pair: self.edits[pair] / words for pair, words in self.words.items() if words}


@dataclass
class ArguedWords:
    """Counts of the words in whose place something else was heard."""

    times: Counter[str] = field(default_factory=Counter)
    """Occurrences of the word in the text of most recognizers, or in the given text."""
    against: Counter[str] = field(default_factory=Counter)
    """Recognizers that heard something else, summed over all occurrences."""
    voices: Counter[str] = field(default_factory=Counter)
    instead: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, forms: Mapping[str, Sequence[str]], recognizers: Sequence[str]) -> None:
        from rapidfuzz.distance import Levenshtein

        base = GIVEN_TEXT if GIVEN_TEXT in forms else _most_central(forms)
        compared_names = [name for name in recognizers if name != base]
        if base is None or not compared_names:
            return
        for word in forms[base]:
            self.times[word] += 1
            self.voices[word] += len(compared_names)
        for name in compared_names:
            for edit in Levenshtein.opcodes(forms[base], forms[name]):
                if edit.tag in ("replace", "delete"):
                    replacements = [
                        *forms[name][edit.dest_start : edit.dest_end],
                        *[""] * (edit.src_end - edit.src_start),
                    ]
                    for word, replacement in zip(
                        forms[base][edit.src_start : edit.src_end], replacements, strict=False
                    ):
                        self.against[word] += 1
                        self.instead.setdefault(word, Counter())[replacement] += 1

    def rows(self) -> list[Row]:
        """The words most often misheard first, by the number of recognizers that heard something else."""
        ranked = sorted(self.against, key=lambda word: (-self.against[word], word))[:WORDS_SHOWN]
        return [
            {
                "word": named(word, 60),
                "times": self.times[word],
                "share": 1 - self.against[word] / self.voices[word],
                "instead": [
                    (named(replacement, 40), count)
                    for replacement, count in sorted(
                        self.instead[word].items(), key=lambda item: (-item[1], item[0])
                    )[:4]
                ],
            }
            for word in ranked
        ]


def _texts_by_recognizer(row: Row) -> dict[str, str]:
    """Texts by recognizer, and the given text where there is one."""
    transcripts = {
        named(name, 60): clean_text(text)
        for name, text in list(row["heard"].items())[:MAX_RECOGNIZERS]
        if isinstance(text, str)
    }
    given_text = (
        {GIVEN_TEXT: clean_text(row["text"])} if row.get("text_source") == "given" and row.get("text") else {}
    )
    return given_text | transcripts


def _row_language(row: Row) -> str:
    language = row.get("language")
    return language if isinstance(language, str) and language else language_of(str(row.get("text") or ""))


def _list_agreement_facts(
    charts: Sequence[Numbers | None], text_agreement: float | None
) -> list[tuple[str, str]]:
    errors, votes = charts
    facts = []
    if errors is not None and errors.count:
        facts.append(
            ("mean word errors between two recognizers", f"{100 * errors.total / errors.count:.1f} %")
        )
    if votes is not None and votes.count:
        facts.append(("mean vote share of a word", f"{100 * votes.total / votes.count:.1f} %"))
    if text_agreement is not None:
        facts.append(("recognizer has the given text", f"{100 * text_agreement:.1f} %"))
    return facts


@lru_cache(maxsize=4096)
def _split_written_words(text: str, language: str) -> tuple[WrittenWord, ...]:
    return tuple(written_words(text, language))


def _forms(words: Sequence[WrittenWord]) -> list[str]:
    return [form for word in words for form in word.forms]


def _most_central(forms: Mapping[str, Sequence[str]]) -> str | None:
    """The text with the fewest edits to all others, the first by name on a tie; None if there is no text."""
    from rapidfuzz.distance import Levenshtein

    names = sorted(forms)
    return min(
        names,
        key=lambda name: sum(Levenshtein.distance(forms[name], forms[other_name]) for other_name in names),
        default=None,
    )


def _join_spaced(words: Sequence[WrittenWord]) -> str:
    return "".join(" " * word.spaced + word.surface for word in words)


def _separated(text: str, kind: str) -> list[Marked]:
    """Move the space before a marked word out of the mark."""
    return [Marked(" ", "same")] * text.startswith(" ") + [Marked(text.removeprefix(" "), kind)]


def _merge_marked(pieces: Sequence[Marked]) -> list[Marked]:
    """Join neighbouring parts of the same kind."""
    merged: list[Marked] = []
    for piece in pieces:
        if merged and merged[-1].kind == piece.kind:
            merged[-1] = Marked(merged[-1].text + piece.text, piece.kind)
        else:
            merged.append(piece)
    return merged
