"""The option that a reply names, as models write it: its text or its letter, alone, declared, or within a sentence."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from audiollm.data.chat.question_prompts import LETTERS
from audiollm.data.text.option_forms import OptionForm, option_form
from audiollm.data.text.words import is_unspaced
from audiollm.evaluate.listening.answer_parts import read_answer
from audiollm.evaluate.listening.inflections import without_inflection
from audiollm.evaluate.listening.reply_wording import (
    FURTHER_LETTER,
    LEAD,
    LETTER_END,
    LETTER_FIRST,
    LETTER_IS_ANSWER,
    LETTER_LEAD,
    MARKED_LETTER,
    THINK_LEAD,
    answer_text,
    is_denied_behind,
    is_stated,
    refuses,
    without_idle_denials,
)

MAX_LEAD_WORDS = 2
"""Words before `answer` in a reply that is nothing but an option: `the correct answer is B`."""
_YES_NO = {"yes", "no", "true", "false"}
# fmt: off
_OTHER_YES_NO = {
    "yeah": "yes", "yep": "yes", "yup": "yes", "oui": "yes", "si": "yes", "sí": "yes", "ja": "yes", "sim": "yes",
    "да": "yes", "是": "yes", "是的": "yes", "对": "yes", "はい": "yes", "네": "yes", "예": "yes", "nope": "no",
    "nah": "no", "non": "no", "nein": "no", "nee": "no", "não": "no", "нет": "no", "否": "no", "不": "no",
    "不是": "no", "没有": "no", "いいえ": "no", "아니요": "no",
}
# fmt: on
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
_BY_PLACE = re.compile(
    rf"\W*(?:(?:option|choice)\s*(?:number\s*)?#?(\d)|(?:the\s+)?({'|'.join(_ORDINALS)})\s+(?:option|choice|one))\W*",
    re.IGNORECASE,
)
"""A reply that tells the place of its option: `Option 3`, `the third one`."""


def read_choice(reply: str, choices: Sequence[str], is_free: bool = True) -> int | None:
    """The option that a reply names; None where it names none or more than one.

    In turn: the reply is an option's text, or its letter; it declares one (`the answer is B`); it begins with a letter
    that is marked (`B.`, `(b) because ...`), or with yes or no where these are options; its sentences name one option
    that they do not deny, an option within a longer one aside. A refusal names none. Of a reply with tags, JSON or
    `\\boxed{}` the answer alone is looked at.

    Args:
        is_free: the reply may be a free text; False: it is the text of an option, or its letter, and nothing else.
    """
    question = _cached_options(tuple(choices))
    answer = read_answer(reply).answer
    for text in dict.fromkeys((answer, answer_text(answer))):
        if named := question.texts.get(question.form(text)):
            return named[0] if len(named) == 1 or _are_equal(named, choices) else None
    text = answer_text(answer)
    for rule in _FREE_RULES if is_free else _STRICT_RULES:
        places = rule(text, question)
        if places:
            return choices.index(choices[min(places)]) if _are_equal(places, choices) else None
    return None


# ------------------------------------------------------------------------------------------------ private


@dataclass(frozen=True)
class _Options:
    """The options of a question, ready to be looked for."""

    choices: tuple[str, ...]

    @cached_property
    def form(self) -> OptionForm:
        return option_form(self.choices)

    @cached_property
    def forms(self) -> list[str]:
        return [self.form(choice) for choice in self.choices]

    @cached_property
    def texts(self) -> dict[str, list[int]]:
        """Places of the options by their forms."""
        places: dict[str, list[int]] = {}
        for place, form in enumerate(self.forms):
            if form:
                places.setdefault(form, []).append(place)
        return places

    @cached_property
    def patterns(self) -> list[tuple[int, re.Pattern[str]]]:
        """Place and pattern of each option, the longest first."""
        order = sorted(range(len(self.forms)), key=lambda place: -len(self.forms[place]))
        return [(place, _pattern(self.forms[place], self.form)) for place in order if self.forms[place]]

    def at(self, letter: str) -> set[int]:
        place = LETTERS.find(letter.upper())
        return {place} if 0 <= place < len(self.choices) else set()

    def beginning(self, text: str) -> tuple[int, int] | None:
        """The longest option whose text stands at the beginning, and its end there."""
        plain = self.form.plain(text)
        for place, pattern in self.patterns:
            if match := pattern.match(plain):
                return place, match.end()
        return None


@lru_cache(maxsize=4096)
def _cached_options(choices: tuple[str, ...]) -> _Options:
    return _Options(choices)


def _are_equal(places: Iterable[int], choices: Sequence[str]) -> bool:
    """Whether all places hold the same option, which may be there twice."""
    return len({choices[place] for place in places}) == 1


def _pattern(form: str, option_form: OptionForm) -> re.Pattern[str]:
    before, gap, after = option_form.edges
    words = form.split()
    body = gap.join(map(re.escape, words))
    return re.compile(
        ("" if is_unspaced(words[0][0]) else before) + body + ("" if is_unspaced(words[-1][-1]) else after)
    )


def _is_letter(text: str, question: _Options) -> set[int]:
    """The reply is a letter, whatever is around it, as the first point of a list, too."""
    match = re.fullmatch(r"(?:[\W_]*1[.)])?[\W_]*([A-Za-z])[\W_]*", text)
    return question.at(match[1]) if match else set()


def _is_lettered(text: str, question: _Options) -> set[int]:
    """The reply is a letter before the text of its option: `(B) a dog`."""
    mark = re.match(r"[\W_]*([A-Za-z])[)\].:]+\s*", text)
    return (
        question.at(mark[1]) & set(question.texts.get(question.form(text[mark.end() :]), ()))
        if mark
        else set()
    )


def _is_declared(text: str, question: _Options) -> set[int]:
    """The reply is a letter, or the text of an option, behind `option` or `the answer is`."""
    lead = LEAD.search(text)
    if lead is None or len(text[: lead.start()].split()) > MAX_LEAD_WORDS:
        return set()
    tail = text[lead.end() :]
    return set(question.texts.get(question.form(tail), ())) or _is_letter(tail, question)


def _declares(text: str, question: _Options) -> set[int]:
    """The reply says which the answer is, by letter or by text; all that it says so of."""
    places: set[int] = set()
    sight = 2 * max(map(len, question.choices), default=0) + 300
    for lead, takes_text in ((LEAD, True), (LETTER_LEAD, False)):
        if not takes_text and refuses(text.lower()):
            continue
        for match in lead.finditer(text):
            places |= _declared(text[match.end() : match.end() + sight], question, takes_text)
    for match in LETTER_IS_ANSWER.finditer(text):
        places |= question.at(match[1])
    return places


def _declared(text: str, question: _Options, takes_text: bool) -> set[int]:
    """The options that stand at the beginning of a text, behind the words that say that an answer follows."""
    letter = re.match(rf"([A-Za-z]){LETTER_END}", text)
    named = question.beginning(text)
    is_article = letter is not None and letter[1] in "Aa" and re.match(r"[Aa]\s+[^\W_]", text) is not None
    if letter and text[1:2].isspace():
        behind = question.beginning(text[1:].lstrip()) if is_article else None
        if named is None and behind is not None:
            return {behind[0]}
        if letter[1].islower() and re.match(r"\s+\w", text[1:]) and is_article:
            letter = None
    if named is not None and takes_text and not (letter and not text[1:2].isspace() and named[1] <= 1):
        return {named[0]} | _alternatives(question.form.plain(text)[named[1] :], question)
    if letter is None or not (takes_text or letter[1].isupper()) or (is_article and not takes_text):
        return set()
    if is_denied_behind(text[1:].lower()):
        return set()
    return question.at(letter[1]) | _further(text[1:], question)


def _alternatives(text: str, question: _Options) -> set[int]:
    """The option that follows on `or`, `and`, `/`."""
    match = re.match(r"[\s\"')]*(?:or|and|/|&)\s+", text)
    named = question.beginning(text[match.end() :]) if match else None
    return {named[0]} if named else set()


def _further(text: str, question: _Options) -> set[int]:
    """The letters that follow on a letter: `B or C`."""
    places: set[int] = set()
    while match := FURTHER_LETTER.match(text):
        places |= question.at(match[1])
        text = text[match.end() :]
    return places


def _begins_with_letter(text: str, question: _Options) -> set[int]:
    """The reply begins with a marked letter, and is no list of options; the text of another option is against it."""
    mark = LETTER_FIRST.match(text)
    if not mark or len(set(re.findall(r"(?m)^\s*\(?([A-Z])[).:]", text))) > 1:
        return set()
    letter, tail = next(filter(None, mark.groups())), text[mark.end() :]
    if is_denied_behind(tail.lower()):
        return set()
    named = question.beginning(tail.strip())
    return question.at(letter) | _further(tail, question) | ({named[0]} if named else set())


def _says_yes_or_no(text: str, question: _Options) -> set[int]:
    """The reply begins with yes or no, where these are the options."""
    if not set(question.forms) <= _YES_NO:
        return set()
    match = re.match(r"\W*(\w+)(?:\s*(?:and|or|/)\s*(\w+))?(?!\w)", without_idle_denials(text.lower()))
    words = [_OTHER_YES_NO.get(word, word) for word in match.groups() if word] if match else []
    return {place for word in words for place in question.texts.get(word, ())}


def _thinks(text: str, question: _Options) -> set[int]:
    """The reply says what its writer takes for the answer: `it could be rain, but I think it's a siren`."""
    places: set[int] = set()
    for match in THINK_LEAD.finditer(text):
        named = question.beginning(text[match.end() :])
        if named is not None and not is_denied_behind(question.form.plain(text[match.end() :])[named[1] :]):
            places |= {named[0]} | _alternatives(
                question.form.plain(text[match.end() :])[named[1] :], question
            )
    return places


def _tells_place(text: str, question: _Options) -> set[int]:
    """The reply is the number of an option, where no option has a number itself."""
    match = _BY_PLACE.fullmatch(text)
    if match is None or any(re.search(r"\d", form) for form in question.forms):
        return set()
    place = int(match[1]) - 1 if match[1] else _ORDINALS.index(match[2].lower())
    return {place} if 0 <= place < len(question.choices) else set()


def _mentions_inflected(text: str, question: _Options) -> set[int]:
    """As `_mentions`, of words in any form: `dogs bark` is `a dog barking`, where the options stay apart so."""
    if question.form.strictness != "loose":
        return set()
    choices = tuple(without_inflection(question.form.plain(choice)) for choice in question.choices)
    inflected = _cached_options(choices)
    plain = without_idle_denials(question.form.plain(text))
    if len(set(inflected.forms) - {""}) < len(choices) or refuses(plain):
        return set()
    stems = {word for form in inflected.forms for word in form.split()}
    return _mentions(without_inflection(plain, stems), inflected)


def _mentions(text: str, question: _Options) -> set[int]:
    """The options that the sentences name and do not deny."""
    plain = without_idle_denials(question.form.plain(text))
    matches: list[tuple[int, re.Match[str]]] = []
    unmatched = plain
    for place, pattern in question.patterns:
        named = list(pattern.finditer(unmatched))
        matches += [(place, match) for match in named]
        unmatched = pattern.sub(lambda match: "\0" * len(match[0]), unmatched) if named else unmatched
    if refuses(unmatched):
        return set()
    places = {place for place, match in matches if is_stated(unmatched, match)}
    lower = text.lower()
    for match in MARKED_LETTER.finditer(text):
        if is_stated(lower, match):
            places |= question.at(next(filter(None, match.groups())))
    return places


_Rule = Callable[[str, _Options], set[int]]
_STRICT_RULES: tuple[_Rule, ...] = (_is_letter, _is_lettered, _is_declared)
_FREE_RULES: tuple[_Rule, ...] = (
    _is_letter, _declares, _begins_with_letter, _says_yes_or_no, _tells_place, _thinks, _mentions,
    _mentions_inflected,
)  # fmt: skip
