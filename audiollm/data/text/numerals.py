"""Numbers of other languages than English, Chinese and Japanese as words: num2words', with the signs around them.

Separators, names of currencies, units and months are those of the Unicode CLDR (Babel); num2words says the numbers. A
language that num2words does not know keeps its digits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from datetime import date
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from babel import Locale

_NAMES_OF_NUM2WORDS = {"kk": "kz"}
_LEFT_OUT = frozenset(["ce", "te", "kn"])
"""Languages that num2words reads with signs or letters of another one among the words."""
_HIGHEST = {"am": 10**6 - 1}
"""num2words never returns from a number beyond (0.5.14)."""
_POINT = {
    "it": "virgola", "id": "koma", "vi": "phẩy", "cy": "pwynt", "bn": "দশমিক", "ar": "فاصلة", "es": "coma",
    "ca": "coma",
}  # fmt: skip
"""The decimal sign where num2words has no word for it, or another one than the country's sign."""
_WHOLE_DECIMALS = frozenset(["ru", "hu", "fa"])
"""Languages in which the digits behind the point are a fraction: `восемь десятых`."""
_YEARS_IN_HUNDREDS = frozenset(["de", "nl", "da", "no"])
# fmt: off
_CURRENCIES = {
    "€": "EUR", "$": "USD", "£": "GBP", "¥": "JPY", "₽": "RUB", "₹": "INR", "₩": "KRW", "₺": "TRY", "₴": "UAH",
    "₫": "VND", "₪": "ILS", "₦": "NGN", "₱": "PHP", "฿": "THB", "zł": "PLN", "Kč": "CZK", "R$": "BRL", "US$": "USD",
    "A$": "AUD", "AU$": "AUD", "C$": "CAD", "CA$": "CAD", "NZ$": "NZD", "HK$": "HKD", "S$": "SGD", "NT$": "TWD",
    "MX$": "MXN", "USD": "USD", "EUR": "EUR", "GBP": "GBP", "JPY": "JPY", "CHF": "CHF", "AUD": "AUD", "CAD": "CAD",
    "NZD": "NZD", "BRL": "BRL", "INR": "INR", "CNY": "CNY", "SEK": "SEK", "NOK": "NOK", "DKK": "DKK", "PLN": "PLN",
    "CZK": "CZK", "MXN": "MXN", "RUB": "RUB",
}
_UNITS = {
    "%": "concentr-percent", "‰": "concentr-permille", "mm": "length-millimeter", "cm": "length-centimeter",
    "m": "length-meter", "km": "length-kilometer", "m²": "area-square-meter", "km²": "area-square-kilometer",
    "m³": "volume-cubic-meter", "mg": "mass-milligram", "g": "mass-gram", "kg": "mass-kilogram", "t": "mass-metric-ton",
    "ml": "volume-milliliter", "cl": "volume-centiliter", "l": "volume-liter", "L": "volume-liter",
    "ms": "duration-millisecond", "s": "duration-second", "min": "duration-minute", "h": "duration-hour",
    "°C": "temperature-celsius", "°F": "temperature-fahrenheit", "°": "angle-degree", "Hz": "frequency-hertz",
    "kHz": "frequency-kilohertz", "MHz": "frequency-megahertz", "GHz": "frequency-gigahertz", "W": "power-watt",
    "kW": "power-kilowatt", "kWh": "energy-kilowatt-hour", "V": "electric-volt", "A": "electric-ampere",
    "kB": "digital-kilobyte", "MB": "digital-megabyte", "GB": "digital-gigabyte", "TB": "digital-terabyte",
    "km/h": "speed-kilometer-per-hour", "m/s": "speed-meter-per-second", "кг": "mass-kilogram", "г": "mass-gram",
    "км": "length-kilometer", "м": "length-meter", "см": "length-centimeter", "мм": "length-millimeter",
    "л": "volume-liter", "мин": "duration-minute", "км/ч": "speed-kilometer-per-hour",
}
_UNITS_THAT_ARE_WORDS = {"fr": "a A", "es": "a", "it": "A", "pt": "a", "cs": "s", "pl": "l"}
# fmt: on
_OF_WETEXT = frozenset("€$£¥")
"""Signs that the English grammar reads."""
_DATE = re.compile(r"(?<![\d.,/-])(?:(\d{4})-(\d\d)-(\d\d)|(\d{1,2})([./])(\d{1,2})\5(\d{4}))(?![\d/-]|\.\d)")
_CLOCK = re.compile(
    r"(?<![\d:.,])([01]?\d|2[0-3])[:.]([0-5]\d) ?(Uhr)\b|(?<![\d:.,])([01]?\d|2[0-3]):([0-5]\d)(?![\d:])"
)
_HOURS = re.compile(r"(?<![\w.,])([01]?\d|2[0-3]) ?h ?([0-5]\d)(?!\w|[.,]\d)")
_RUSSIAN_YEAR = re.compile(r"(\b[Вв]о? )?\b([12]\d{3}) (год(?:а|у|ом|е)?)\b")
_CASES = {"год": "n", "года": "g", "году": "d", "годом": "i", "годе": "p"}
_LONGEST_NUMBER = 15
"""Digits; what is longer (an account, a telephone) is read digit by digit, as is what begins with a zero."""


def regional(language: str | None, code: str) -> str:
    """The code with its country where num2words has words of its own for it (`pt-BR` is `pt_BR`), else as it is."""
    from num2words import CONVERTER_CLASSES

    _, _, country = (language or "").strip().replace("_", "-").partition("-")
    name = f"{code}_{country.upper()}"
    return name if name in CONVERTER_CLASSES else code


def can_read(language: str) -> bool:
    """Whether num2words knows a language."""
    from num2words import CONVERTER_CLASSES

    return _NAMES_OF_NUM2WORDS.get(language, language) in CONVERTER_CLASSES and language not in _LEFT_OUT


def read_numbers(text: str, language: str) -> str:
    """Write numbers, dates, times, money, units, percent and ordinals as the words of a language.

    Args:
        language: one that `can_read`.
    """
    return _reader(language).read(text)


def read_foreign_money(text: str) -> str:
    """Write the money of an English text as words where its grammar does not know the currency: `R$ 5`, `CHF 10`.

    A comma before two digits of money is a decimal point: `€5,50` becomes `€5.50` for the grammar.
    """
    text = _cents_behind_comma().sub(lambda match: match[0].replace(",", "."), text)
    return _reader("en").read_money(text, frozenset(_CURRENCIES) - _OF_WETEXT)


def number_words(value: int, language: str, to: str = "cardinal") -> str | None:
    """An integer in words (num2words); None where it cannot be said."""
    from num2words import num2words

    if abs(value) > _HIGHEST.get(language, 10**_LONGEST_NUMBER):
        return None
    try:
        words = str(num2words(abs(value), lang=_NAMES_OF_NUM2WORDS.get(language, language), to=to)).strip()
    except Exception:  # what it has no words for, it says in many ways
        return None
    if value >= 0 or not words:
        return words or None
    return f"{_negative(language)} {words}"


# ------------------------------------------------------------------------------------------------ private


@cache
def _cents_behind_comma() -> re.Pattern[str]:
    sign, figures = _any_of(_CURRENCIES), r"\d+,\d\d(?![.,]?\d)"
    return re.compile(rf"(?<!\w)(?:{sign}) ?{figures}|(?<![\w.,]){figures}(?= ?(?:{sign})(?![\w$]))")


def _any_of(signs: Collection[str]) -> str:
    """A pattern of any of these signs, the longer ones first."""
    return "|".join(re.escape(sign) for sign in sorted(signs, key=len, reverse=True))


@cache
def _reader(language: str) -> _Reader:
    return _Reader(language)


class _Reader:
    """The rules of one language."""

    def __init__(self, language: str) -> None:
        self._language = language
        self._locale = _locale(language)
        self._comma = self._locale is not None and _decimal_sign(self._locale) == ","
        groups = r"[.\u00a0\u202f '’]" if self._comma else r"[,\u00a0\u202f '’]"
        fraction = r"(?:,\d+|\.\d{1,2}(?![\d.])|\.\d{4,})" if self._comma else r"\.\d+"
        number = rf"(?:\d{{1,3}}(?:{groups}\d{{3}})+(?!\d|\.\d)|\d+)(?:{fraction})?"
        signed = rf"(?<![\w.,-])[-−]?{number}|{number}"
        units = "|".join(re.escape(unit) for unit in sorted(self._units(), key=len, reverse=True))
        self._signed = signed
        money = self._money(frozenset(_CURRENCIES))
        measure = re.compile(rf"(?<![\w.,])({signed})[ \u00a0\u202f]?({units})(?![\w²³/-])")
        plain = re.compile(rf"({signed})(\.ª|\.º|º|ª|°|er\b|re\b|e\b|ème\b|nd\b|de\b|ste\b)?")
        self._steps: list[tuple[re.Pattern[str], Callable[[re.Match[str]], str]]] = [
            (_DATE, self._read_date),
            (_CLOCK, self._read_clock),
            (_HOURS, self._read_hours),
            (money, self._read_money),
            (measure, self._read_measure),
            (plain, self._read_plain),
        ]
        if language == "ru":
            self._steps.insert(1, (_RUSSIAN_YEAR, _russian_year))
        if language == "de":
            self._steps.insert(
                1, (re.compile(rf"(\w+ )?\b(\d{{1,2}})\. (?={self._months()})"), self._read_german_day)
            )

    def _money(self, signs: Collection[str]) -> re.Pattern[str]:
        """A number with the sign of a currency on one side; letters of a sign are no part of a word."""
        sign = _any_of(signs)
        before = rf"(?<!\w)({sign})[ \u00a0\u202f]?({self._signed})(?!\d)"
        return re.compile(rf"{before}|({self._signed})[ \u00a0\u202f]?({sign})(?![\w$])")

    def read_money(self, text: str, signs: Collection[str]) -> str:
        """Read the money of these signs alone."""
        return self._money(signs).sub(lambda match: _pad_words(match, self._read_money(match)), text)

    def read(self, text: str) -> str:
        for pattern, reading in self._steps:
            text = pattern.sub(lambda match, reading=reading: _pad_words(match, reading(match)), text)  # type: ignore[misc]
        return text

    def _units(self) -> list[str]:
        words = _UNITS_THAT_ARE_WORDS.get(self._language, "").split()
        return [unit for unit in _UNITS if unit not in words]

    def _months(self) -> str:
        names = self._locale.months["format"]["wide"].values() if self._locale is not None else ()
        return "|".join(map(re.escape, names)) or "(?!)"

    def _number(self, figures: str) -> tuple[str | None, float]:
        """A number in words, and its value."""
        sign = -1 if figures[0] in "-−" else 1
        digits = figures.lstrip("-−")
        integer, point, fraction = self._split(digits)
        if len(integer) > _LONGEST_NUMBER or (len(integer) > 1 and integer[0] == "0"):
            return self._digits(integer + fraction), 0.0
        value = sign * float(f"{integer}.{fraction or 0}")
        words = number_words(sign * int(integer), self._language)
        if words is None:
            return self._digits(integer + fraction), value
        if not point:
            return words, value
        return self._decimal(words, integer, fraction, sign), value

    def _split(self, digits: str) -> tuple[str, str, str]:
        """Integer part, decimal sign and fraction, all as digits."""
        sign = "," if self._comma else "."
        if sign not in digits and self._comma and re.fullmatch(r"\d+\.(?:\d{1,2}|\d{4,})", digits):
            sign = "."
        integer, point, fraction = digits.partition(sign)
        return re.sub(r"\D", "", integer), point, fraction

    def _decimal(self, words: str, integer: str, fraction: str, sign: int) -> str | None:
        if self._language in _WHOLE_DECIMALS:
            from num2words import num2words

            try:
                number: Any = (
                    f"{integer}.{fraction}" if self._language != "fa" else float(f"{integer}.{fraction}")
                )
                return f"{_negative(self._language)} " * (sign < 0) + str(
                    num2words(number, lang=self._language)
                )
            except Exception:  # as in `number_words`
                return None
        point = _point_word(self._language)
        digits = self._digits(fraction)
        return f"{words} {point} {digits}" if point and digits else None

    def _digits(self, digits: str) -> str | None:
        words = [number_words(int(digit), self._language) for digit in digits]
        return " ".join(word for word in words if word) if all(words) else None

    def _read_plain(self, match: re.Match[str]) -> str:
        figures, suffix = match[1], match[2] or ""
        value = int(figures) if figures.isdigit() else None
        if suffix and value is not None:
            ordinal = number_words(value, self._language, "ordinal")
            if ordinal and (suffix[-1] in "ºª°" or self._language in ("fr", "nl", "ca")):
                return ordinal[:-1] + "a" if suffix[-1] == "ª" and ordinal.endswith("o") else ordinal
        if value is not None and self._is_year(figures):
            return (number_words(value, self._language, "year") or figures) + suffix
        words, _ = self._number(figures)
        return (words or figures) + suffix

    def _is_year(self, figures: str) -> bool:
        return self._language in _YEARS_IN_HUNDREDS and len(figures) == 4 and 1100 <= int(figures) <= 1999

    def _read_date(self, match: re.Match[str]) -> str:
        year, month, day = match.group(1, 2, 3) if match[1] else match.group(7, 6, 4)
        try:
            when = date(int(year), int(month), int(day))
        except ValueError:
            return match[0]
        if self._locale is None:
            return match[0]
        from babel.dates import format_date

        return re.sub(r"\s(?:г|р)\.$", "", format_date(when, "long", locale=self._locale))

    @staticmethod
    def _read_german_day(match: re.Match[str]) -> str:
        """`am 3. Mai` -> `am dritten Mai`, `der 3. Mai` -> `der dritte Mai`, `3. Mai` -> `dritter Mai`."""
        before = match[1] or ""
        ordinal = number_words(int(match[2]), "de", "ordinal") or match[2]
        word = before.strip().lower()
        ending = "" if word in ("der", "die", "das") else "n" if word else "r"
        return f"{before}{ordinal}{ending} "

    def _read_clock(self, match: re.Match[str]) -> str:
        hour, minute = int(match[1] or match[4]), int(match[2] or match[5])
        hour_words, minute_words = number_words(hour, self._language), number_words(minute, self._language)
        if not hour_words or not minute_words:
            return match[0]
        if self._language == "de":
            hour_words = "ein" if hour == 1 else hour_words
            return f"{hour_words} Uhr" + (f" {minute_words}" if minute else "")
        return f"{hour_words} {minute_words}" if minute else hour_words

    def _read_hours(self, match: re.Match[str]) -> str:
        hours = self._with_unit(match[1], "duration-hour")
        return f"{hours} {match[2]}" if hours else match[0]

    def _read_money(self, match: re.Match[str]) -> str:
        sign, figures = (match[1], match[2]) if match[1] else (match[4], match[3])
        words, value = self._number(figures)
        if words is None or self._locale is None:
            return match[0]
        from babel.numbers import get_currency_name

        name = get_currency_name(
            _CURRENCIES[sign], int(value) if value == int(value) else value, self._locale
        )
        return f"{words} {name.lower() if self._language.startswith('pt') else name}"

    def _read_measure(self, match: re.Match[str]) -> str:
        return self._with_unit(match[1], _UNITS[match[2]]) or match[0]

    def _with_unit(self, figures: str, unit: str) -> str | None:
        """A measured value with the form of the unit's name that its number takes."""
        words, value = self._number(figures)
        if words is None or self._locale is None:
            return None
        from babel.numbers import format_decimal
        from babel.units import format_unit

        number: float = int(value) if value == int(value) else value
        try:
            named = format_unit(number, unit, "long", locale=self._locale)
        except Exception:  # CLDR lacks the unit
            return None
        figure = format_decimal(number, locale=self._locale)
        if figure not in named:  # Arabic has forms of their own for one and two
            return named
        before, _, after = re.sub(r"[\u00a0\u202f]", " ", named).partition(figure)
        return f"{before}{words}{' ' * after[:1].isalpha()}{after}"


def _russian_year(match: re.Match[str]) -> str:
    """A year as the ordinal in the case of `год`: `в 1999 году` -> `в тысяча девятьсот девяносто девятом году`."""
    from num2words import num2words

    before, noun = match[1] or "", match[3]
    case = "p" if before and noun == "году" else _CASES[noun]
    return f"{before}{num2words(int(match[2]), lang='ru', to='ordinal', case=case)} {noun}"


def _pad_words(match: re.Match[str], words: str) -> str:
    """What is read, with a space to the letters that stand at its sides."""
    if words == match[0]:
        return words
    before, after = match.string[: match.start()][-1:], match.string[match.end() :][:1]
    return " " * before.isalpha() + words + " " * (after.isalpha() and words[-1:].isalpha())


@cache
def _locale(language: str) -> Locale | None:
    from babel import Locale, UnknownLocaleError

    try:
        return Locale.parse({"no": "nb"}.get(language, language))
    except (UnknownLocaleError, ValueError):
        return None


def _decimal_sign(locale: Locale) -> str:
    from babel.numbers import get_decimal_symbol

    return str(get_decimal_symbol(locale))


@cache
def _converter(language: str) -> Any:
    from num2words import CONVERTER_CLASSES

    return CONVERTER_CLASSES[_NAMES_OF_NUM2WORDS.get(language, language)]


def _point_word(language: str) -> str | None:
    word = _POINT.get(language) or getattr(_converter(language), "pointword", None)
    return word.strip() if isinstance(word, str) else None


def _negative(language: str) -> str:
    word = getattr(_converter(language), "negword", None)
    return word.strip() if isinstance(word, str) and word.strip() else "minus"
