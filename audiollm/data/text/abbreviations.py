"""English abbreviations, roman numbers and signs, and titles of other languages, read only where their context makes
them one.

`No. 5` is `number 5`, and `No.` is an answer; `Dr. Li` is `doctor Li`, and `the Dr.` stays as it is written. Numbers
stay digits here: `audiollm.data.text.normalize` reads them afterwards.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

_NAME = r"(?=[A-Z](?:[a-zà-ÿ'’.-]|[A-Z]))"
_SENTENCE_STARTERS = (
    r"(?:A|An|And|As|At|But|For|He|Her|His|How|I|If|In|Is|It|Its|My|No|Not|Now|Of|On|Our|She|So|That|The|Their|Then"
    r"|There|These|They|This|To|We|What|When|Where|Who|Why|With|Yes|You|Your)\b"
)
_NOT_A_SENTENCE = rf"(?!{_SENTENCE_STARTERS})"
"""Lookahead: the next word begins no sentence, so that it may be the name behind a title."""
_NUMERAL = r"(?=\d|[IVX]{2,6}\b)"
_SENTENCE_START = r"(?:(?<=^)|(?<=[.!?;:] )|(?<=\())"
_SENTENCE_END = re.compile(rf"\s*[\"')\]]*\s*(?:$|\s{_SENTENCE_STARTERS})")
"""Behind a point that is a full stop, too: the text ends there, or the next word begins a sentence."""


class _Rule(NamedTuple):
    pattern: re.Pattern[str]
    replacement: str | Callable[[re.Match[str]], str]


# fmt: off
_TITLES = {
    "Dr": "doctor", "Drs": "doctors", "Mr": "mister", "Mrs": "misses", "Ms": "miss", "Prof": "professor",
    "Rev": "reverend", "Hon": "honorable", "Gen": "general", "Col": "colonel", "Capt": "captain", "Lt": "lieutenant",
    "Sgt": "sergeant", "Maj": "major", "Gov": "governor", "Sen": "senator", "Rep": "representative",
    "Pres": "president", "Cmdr": "commander", "Mt": "Mount", "Ft": "Fort", "St": "Saint",
}
"""With a point, before a name."""
_TITLES_WITHOUT_POINT = ("Dr", "Mr", "Mrs", "Ms", "Prof", "St")
_BEFORE_NUMBERS = {
    "No": "number", "no": "number", "NO": "number", "Nos": "numbers", "nos": "numbers", "Nr": "number", "Fig": "figure",
    "fig": "figure", "Figs": "figures", "figs": "figures", "Vol": "volume", "vol": "volume", "Vols": "volumes",
    "vols": "volumes", "Ch": "chapter", "ch": "chapter", "Chap": "chapter", "chap": "chapter", "Sec": "section",
    "Sect": "section", "sect": "section", "Art": "article", "Eq": "equation", "eq": "equation", "Eqs": "equations",
    "p": "page", "P": "page", "pp": "pages", "pg": "page", "Ref": "reference", "Refs": "references", "Op": "opus",
    "Ver": "version", "ver": "version", "Apt": "apartment", "apt": "apartment", "Rm": "room", "Ext": "extension",
    "ext": "extension", "approx": "approximately", "Approx": "approximately", "ca": "circa", "Ca": "circa",
    "max": "maximum", "min": "minimum", "tel": "telephone", "Tel": "telephone", "Ste": "suite", "Bldg": "building",
    "Hwy": "highway", "Rte": "route",
}
"""With a point, before a number."""
_STREETS = {
    "St": "Street", "Ave": "Avenue", "Blvd": "Boulevard", "Rd": "Road", "Ln": "Lane", "Hwy": "Highway", "Dr": "Drive",
    "Pkwy": "Parkway", "Sq": "Square", "Ct": "Court", "Pl": "Place",
}
_ALWAYS_A_STREET = ("Ave", "Blvd", "Rd", "Hwy", "Pkwy")
_AFTER_NAMES = {
    "Jr": "junior", "Sr": "senior", "Inc": "incorporated", "Ltd": "limited", "Corp": "corporation", "Co": "company",
    "Bros": "brothers", "Esq": "esquire",
}
_DAYS = {
    "Mon": "Monday", "Tue": "Tuesday", "Tues": "Tuesday", "Wed": "Wednesday", "Thu": "Thursday", "Thur": "Thursday",
    "Thurs": "Thursday", "Fri": "Friday", "Sat": "Saturday", "Sun": "Sunday",
}
_DAYS_AND_NO_WORDS = ("Tue", "Tues", "Thu", "Thur", "Thurs", "Fri")
_MONTHS = {
    "Jan": "January", "Feb": "February", "Mar": "March", "Apr": "April", "Jun": "June", "Jul": "July", "Aug": "August",
    "Sep": "September", "Sept": "September", "Oct": "October", "Nov": "November", "Dec": "December",
}
_LONG_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_UNITS = {
    "sec": "seconds", "secs": "seconds", "min": "minutes", "mins": "minutes", "hr": "hours", "hrs": "hours",
    "yr": "years", "yrs": "years", "wk": "weeks", "wks": "weeks", "lb": "pounds", "lbs": "pounds", "oz": "ounces",
    "ft": "feet", "yd": "yards", "yds": "yards", "gal": "gallons", "sq ft": "square feet", "mi": "miles",
}
"""Behind a number, with a point or without."""
_STATES = {
    "AL": "Alabama", "AK": "Alaska", "AZ": "Arizona", "AR": "Arkansas", "CA": "California", "CO": "Colorado",
    "CT": "Connecticut", "DE": "Delaware", "FL": "Florida", "GA": "Georgia", "HI": "Hawaii", "ID": "Idaho",
    "IL": "Illinois", "IN": "Indiana", "IA": "Iowa", "KS": "Kansas", "KY": "Kentucky", "LA": "Louisiana",
    "ME": "Maine", "MD": "Maryland", "MA": "Massachusetts", "MI": "Michigan", "MN": "Minnesota", "MS": "Mississippi",
    "MO": "Missouri", "MT": "Montana", "NE": "Nebraska", "NV": "Nevada", "NH": "New Hampshire", "NJ": "New Jersey",
    "NM": "New Mexico", "NY": "New York", "NC": "North Carolina", "ND": "North Dakota", "OH": "Ohio",
    "OK": "Oklahoma", "OR": "Oregon", "PA": "Pennsylvania", "RI": "Rhode Island", "SC": "South Carolina",
    "SD": "South Dakota", "TN": "Tennessee", "TX": "Texas", "UT": "Utah", "VT": "Vermont", "VA": "Virginia",
    "WA": "Washington", "WV": "West Virginia", "WI": "Wisconsin", "WY": "Wyoming",
}
_CURRENCIES = {"$": "dollars", "£": "pounds", "€": "euros"}
_STATES_AND_WORDS = ("HI", "IN", "ME", "OH", "OK", "OR")
"""Read only before a postal code."""
_DIGITS = {
    "0": " oh", "1": " one", "2": " two", "3": " three", "4": " four", "5": " five", "6": " six", "7": " seven",
    "8": " eight", "9": " nine",
}
_COUNTED = (
    "World War", "Chapter", "Part", "Volume", "Act", "Scene", "Book", "Section", "Type", "Phase", "Stage", "Class",
    "Super Bowl", "Title", "Article", "Appendix", "Figure", "Table", "Level", "Round", "Episode", "Mark", "Division",
    "Schedule", "Group", "Grade", "Unit", "Symphony", "Rocky", "Final Fantasy", "chapter", "volume",
)
_RULERS = (
    "Henry", "Louis", "Elizabeth", "George", "Charles", "Edward", "William", "James", "Richard", "Philip", "Napoleon",
    "Paul", "Benedict", "Pius", "Leo", "Gregory", "Innocent", "Frederick", "Friedrich", "Wilhelm", "Nicholas",
    "Alexander", "Peter", "Catherine", "Ivan", "Ferdinand", "Francis", "Otto", "Ramses", "Ptolemy", "Mary", "John",
    "Clement", "Urban", "Boniface", "Alfonso", "Carlos", "Felipe", "Gustav", "Christian", "Haakon", "Leopold",
    "Joseph", "Rudolf", "Maximilian", "Harald", "Edmund", "Robert", "David", "Malcolm", "Vittorio", "Umberto",
)
_ORDINALS = (
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh",
    "twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth", "seventeenth", "eighteenth", "nineteenth",
    "twentieth", "twenty first", "twenty second", "twenty third", "twenty fourth",
)
_TITLES_BY_LANGUAGE: dict[str, dict[str, str]] = {
    "de": {"Dr": "Doktor", "Prof": "Professor", "Hr": "Herr", "Hrn": "Herrn", "Fr": "Frau", "St": "Sankt"},
    "nl": {"dr": "dokter", "Dr": "Dokter", "prof": "professor", "Prof": "Professor", "mevr": "mevrouw",
           "Mevr": "Mevrouw", "dhr": "de heer", "Dhr": "De heer"},
    "fr": {"Dr": "docteur", "Pr": "professeur", "Mme": "madame", "Mlle": "mademoiselle", "Mgr": "monseigneur"},
    "es": {"Dr": "doctor", "Dra": "doctora", "Sr": "señor", "Sra": "señora", "Srta": "señorita", "Prof": "profesor"},
    "pt": {"Dr": "doutor", "Dra": "doutora", "Sr": "senhor", "Sra": "senhora", "Prof": "professor",
           "Profa": "professora"},
    "it": {"Dr": "dottor", "Dott": "dottor", "Sig": "signor", "Sig.ra": "signora", "Prof": "professor",
           "Ing": "ingegner", "Avv": "avvocato"},
}
"""With a point, or without where `_WITHOUT_POINT` has them, before a name or another title."""
_WITHOUT_POINT = {"fr": ("Dr", "Pr", "Mme", "Mlle", "Mgr"), "de": ("Dr", "Prof"), "it": ("Sig.ra",)}
_SENTENCE_STARTERS_BY_LANGUAGE = {
    "de": "Der|Die|Das|Den|Dem|Des|Ein|Eine|Er|Sie|Es|Ich|Wir|Ihr|Du|Und|Aber|Oder|Wenn|Dann|Als|Im|In|Am|An|Auf|Aus"
    "|Bei|Bis|Mit|Nach|Von|Vor|Zu|Zum|Zur|Für|Ist|Hat|Nun|Nein|Ja|Was|Wer|Wie|Wo|Warum|Diese[rsmn]?|Danach|Da|Hier",
    "nl": "De|Het|Een|Hij|Zij|Ze|Ik|Wij|We|En|Maar|Als|In|Op|Met|Van|Dat|Dit|Er",
    "fr": "Le|La|Les|Un|Une|Il|Elle|Ils|Elles|Je|Nous|Vous|On|Et|Mais|Si|En|Dans|Pour|Ce|Cette|C",
    "es": "El|La|Los|Las|Un|Una|Él|Ella|Yo|Y|Pero|Si|En|Con|Por|Para|No|Es|Se",
    "pt": "O|A|Os|As|Um|Uma|Ele|Ela|Eu|E|Mas|Se|Em|No|Na|Com|Por|Para|Não|É",
    "it": "Il|Lo|La|I|Gli|Le|Un|Una|Lui|Lei|Io|E|Ma|Se|In|Con|Per|Non|È|Si",
}
# fmt: on


def read_titles(text: str, language: str) -> str:
    """Write out the titles before names in a text of another language than English: `Dr. Weber` -> `Doktor Weber`.

    A language without titles here keeps its text.
    """
    titles = _TITLES_BY_LANGUAGE.get(language)
    return _title_pattern(language).sub(lambda match: titles[match[1] or match[2]], text) if titles else text


def read_abbreviations(text: str) -> str:
    """Write out the abbreviations of an English text that their context makes one; all else stays as it is."""
    for rule in _RULES:
        text = rule.pattern.sub(rule.replacement, text)
    return text


# ------------------------------------------------------------------------------------------------ private


@cache
def _title_pattern(language: str) -> re.Pattern[str]:
    titles = _any({title.replace(".", r"\."): "" for title in _TITLES_BY_LANGUAGE[language]})
    bare = _any(_WITHOUT_POINT.get(language, ()) or ("(?!)",))
    starters = _SENTENCE_STARTERS_BY_LANGUAGE[language]
    is_name = rf"(?=\s+(?!(?:{starters})\b)(?:(?:{titles})\b|[A-ZÀ-ÖØ-Þ][\w'’.-]))"
    return re.compile(rf"(?<![\w.-])(?:({titles})\.|({bare})){is_name}")


def _any(words: Mapping[str, str] | tuple[str, ...]) -> str:
    return "|".join(sorted(words, key=len, reverse=True))


def _by(table: Mapping[str, str], after: str = "") -> Callable[[re.Match[str]], str]:
    """The replacement of a match by the entry of its first group."""
    return lambda match: table[match[1]] + after


def _behind_name(match: re.Match[str]) -> str:
    """Read an abbreviation only where the word before is written as a name: with a capital, or `&`."""
    before = match.string[: match.start()].split()
    if not before or not (before[-1][0].isupper() or before[-1] == "&"):
        return match[0]
    return _AFTER_NAMES[match[1]] + "." * (match[2] is not None)


def _say_unit(match: re.Match[str]) -> str:
    unit = _UNITS[match[3]]
    if re.fullmatch(r"0*1", match[1]):
        unit = {"feet": "foot", "square feet": "square foot"}.get(unit, unit.removesuffix("s"))
    return f"{match[1]} {unit}" + "." * (match[4] is not None)


def _ends_sentence(match: re.Match[str]) -> bool:
    """Whether the match ends in a point that is the full stop of a sentence, too."""
    return match[0].endswith(".") and _SENTENCE_END.match(match.string, match.end()) is not None


def _joined_letters(match: re.Match[str]) -> str:
    """`U.S.A.` as `USA`; where the sentence ends there, with its full stop."""
    return match[0].replace(".", "") + "." * _ends_sentence(match)


def _roman_value(numeral: str) -> int | None:
    """Value of a roman number below 90 in its usual form; None for other letters."""
    match = re.fullmatch(r"(XL|L?X{0,3})(IX|IV|V?I{0,3})", numeral)
    if not numeral or match is None:
        return None
    ones = {"": 0, "I": 1, "II": 2, "III": 3, "IV": 4, "V": 5, "VI": 6, "VII": 7, "VIII": 8, "IX": 9}
    tens = 4 if match[1] == "XL" else 5 * match[1].count("L") + match[1].count("X")
    return 10 * tens + ones[match[2]]


def _say_counted(match: re.Match[str]) -> str:
    value = _roman_value(match[2])
    return match[0] if value is None else f"{match[1]} {value}"


def _ruler(match: re.Match[str]) -> str:
    value = _roman_value(match[2])
    if not value or value > len(_ORDINALS):
        return match[0]
    return f"{match[1]} the {_ORDINALS[value - 1]}"


def _greek_letter(match: re.Match[str]) -> str:
    name = unicodedata.name(match[0], "")
    parts = re.fullmatch(r"(?:GREEK (?:SMALL|CAPITAL) LETTER (?:FINAL )?|MICRO SIGN|OHM SIGN)(\w*)", name)
    if parts is None:
        return match[0]
    return {"MICRO SIGN": "mu", "OHM SIGN": "omega"}.get(name, parts[1].lower()).replace("lamda", "lambda")


def _vulgar_fraction(match: re.Match[str]) -> str:
    leading_digits, _, parts = unicodedata.normalize("NFKC", match[0]).partition("\u2044")
    digits = len(leading_digits) - 1  # NFKC writes 2½ as 21⁄2
    return f"{leading_digits[:digits]} {leading_digits[digits:]}/{parts}".lstrip()


def _postal_code(match: re.Match[str]) -> str:
    digits = "".join(_DIGITS[digit] for digit in match[2] + (match[3] or ""))
    return f", {_STATES[match[1]]}{digits}"


def _half_of_day(match: re.Match[str]) -> str:
    return match[1].replace(".", "").replace(" ", "").upper() + "." * _ends_sentence(match)


def _day_of_may(match: re.Match[str]) -> str:
    """Write a date of May out, which the grammars take for the verb."""
    day = int(match[1])
    if not 1 <= day <= 31:
        return match[0]
    ordinal = "thirtieth" if day == 30 else "thirty first" if day == 31 else None
    ordinal = ordinal or (_ORDINALS[day - 1] if day <= 24 else f"twenty {_ORDINALS[day - 21]}")
    return f"the {ordinal} of May"


_CAPITALIZED = r"[A-Z][a-zà-ÿ'’-]+"
_PLACE = rf"(?:[Ii]n|[Ff]rom|[Nn]ear|[Tt]o|[Aa]t|[Oo]f|[Oo]utside|[Aa]round) (?:{_CAPITALIZED} ){{0,2}}{_CAPITALIZED}"
_DAY = _any(_DAYS)
_MONTH = f"(?:{_LONG_MONTHS}|{_any(_MONTHS)})\\b"
_DATE_AHEAD = rf"(?=,? (?:the )?(?:{_MONTH}|\d{{1,2}}(?:(?:st|nd|rd|th)? {_MONTH}| ?[AaPp]\.?[Mm]\b|:\d\d)))"
_STREET_AHEAD = r"(?= ?[,;]|\s*$|\s+[A-Z(])"
_QUANTITY = r"(?<![\w$£€¥.,])(\d+(?:[.,]\d+)*)"

_RULES = (
    # letters with points between: a.m., U.S.A., Ph.D.
    _Rule(re.compile(r"\b([Aa]\. ?[Mm]\b|[Pp]\. ?[Mm]\b)\.?"), _half_of_day),
    _Rule(re.compile(r"\bPh\. ?D\b\.?"), "PhD"),
    _Rule(re.compile(r"\be\. ?g\."), "for example"),
    _Rule(re.compile(r"\bi\. ?e\."), "that is"),
    _Rule(re.compile(r"\b(vs)\.(?= )"), "versus"),
    _Rule(re.compile(r"(?<=[\w,] )etc\b\.(?= [a-z(]|,|;|\))"), "et cetera"),
    _Rule(re.compile(r"(?<=[\w,] )etc\b\.(?=\s*$|\s+[A-Z]|[!?])"), "et cetera."),
    _Rule(
        re.compile(r"(?<![\w.])(?:[A-Z]\.){2,}(?![a-z])|(?<![\w.])(?:[A-Z]\.)+[A-Z](?![\w.])"),
        _joined_letters,
    ),
    # days
    _Rule(re.compile(rf"\b({_DAY})\.? ?[-–] ?({_DAY})\b\.?"), lambda m: f"{_DAYS[m[1]]} to {_DAYS[m[2]]}"),
    _Rule(
        re.compile(rf"\b({_DAY})\. (and|or|to|through|&) ({_DAY})\b\.?"),
        lambda m: f"{_DAYS[m[1]]} {m[2]} {_DAYS[m[3]]}" + "." * _ends_sentence(m),
    ),
    _Rule(re.compile(rf"\b({_DAY})\b\.?{_DATE_AHEAD}"), _by(_DAYS)),
    _Rule(
        re.compile(rf"(?<=\b[Oo]n )({_DAY})\.(?=[ ,])|(?<=\b(?:[Nn]ext|[Ll]ast) )({_DAY})\.(?=[ ,])"),
        lambda m: _DAYS[m[1] or m[2]],
    ),
    _Rule(re.compile(rf"\b({_any(_DAYS_AND_NO_WORDS)})\.(?=[ ,])"), _by(_DAYS)),
    # months; those before a day or a year are read with it
    _Rule(
        re.compile(r"\bMay (\d{1,2})(?:st|nd|rd|th)?\b(?![\d%:,.]\d|\d| [ap]\.?m| (?:percent|people))"),
        _day_of_may,
    ),
    _Rule(re.compile(r"(?<![\d.,:/-])\b(?:the )?(\d{1,2})(?:st|nd|rd|th)? May\b"), _day_of_may),
    _Rule(
        re.compile(
            rf"\b(?:(?<=\b[Ii]n )|(?<=\b[Ss]ince )|(?<=\b[Uu]ntil ))({_any(_MONTHS)})\b\.(?= [a-z]|,)"
        ),
        _by(_MONTHS),
    ),
    # streets and states
    _Rule(
        re.compile(
            rf"(?<=\d )((?:[NSEW]\. )?(?:{_CAPITALIZED} ){{1,3}})({_any(_STREETS)})\b\.?(?= ?[,;]|\s*$|\s+[A-Z(])"
        ),
        lambda m: f"{m[1]}{_STREETS[m[2]]}",
    ),
    _Rule(re.compile(rf"(?<=\d(?:st|nd|rd|th) )({_any(_STREETS)})\b\.?"), _by(_STREETS)),
    _Rule(re.compile(rf"(?<=[a-z] )({_any(_ALWAYS_A_STREET)})\."), _by(_STREETS)),
    _Rule(
        re.compile(rf"\b({_CAPITALIZED}) St\.(?=[,;]| (?:and|at|in|is|was|near|to|on)\b|\s*$)"), r"\1 Street"
    ),
    _Rule(re.compile(rf",? ({_any(_STATES)}),? (\d{{5}})(?:-(\d{{4}}))?\b"), _postal_code),
    _Rule(
        re.compile(
            rf"\b({_PLACE}, )({'|'.join(s for s in _STATES if s not in _STATES_AND_WORDS)})\b(?!['’.])"
        ),
        lambda m: m[1] + _STATES[m[2]],
    ),
    # titles and what follows names
    _Rule(re.compile(rf"\b({_any(_TITLES)})\.(?= (?:and|&) (?:{_any(_TITLES)})\b)"), _by(_TITLES)),
    _Rule(re.compile(rf"\b({_any(_TITLES)})\. ?{_NOT_A_SENTENCE}{_NAME}"), _by(_TITLES, after=" ")),
    _Rule(
        re.compile(rf"\b({_any(_TITLES_WITHOUT_POINT)}) {_NOT_A_SENTENCE}(?=[A-Z][a-zà-ÿ]{{2}})"),
        _by(_TITLES, after=" "),
    ),
    _Rule(
        re.compile(rf"(?<=[\w,&.'’] )({_any(_AFTER_NAMES)})\b\.(?=(\s*$)?)"),
        _behind_name,
    ),
    # before numbers
    _Rule(re.compile(rf"(?<!\? )\b({_any(_BEFORE_NUMBERS)})\. ?{_NUMERAL}"), _by(_BEFORE_NUMBERS, after=" ")),
    _Rule(re.compile(r"\b[Ee]st\. (?=(?:1\d|20)\d\d\b)"), "established "),
    _Rule(re.compile(rf"{_SENTENCE_START}(Max|Min)\. ?(?=\d)"), lambda m: f"{m[1]}imum "),
    _Rule(re.compile(r"(?<![\w#&])#(?=\d)"), "number "),
    # units behind numbers, and signs around them
    _Rule(re.compile(r"\b([4-7])['’′] ?(\d|1[01])(?:''|”|″|(?![\w'’.,]\d|\w))"), r"\1 foot \2"),
    _Rule(re.compile(r"(?<![\w.])([A-G])#(?!\w)"), r"\1 sharp"),
    _Rule(
        re.compile(
            rf"(?<![\w$£€¥.,])(\d+(?:[.,]\d+)*)( ?)({_any(_UNITS)})\b(?!['’]|/)(?:\.(?=(\s*$|\s+[A-Z]))?)?(?!\w)"
        ),
        _say_unit,
    ),
    _Rule(
        re.compile(r"\b(\d+(?:\.\d+)?) ?in\b\.?(?= (?:tall|long|wide|deep|thick|high|x|by) )"), r"\1 inches"
    ),
    _Rule(re.compile(r"\b((?:feet|foot) \d+(?:\.\d+)?) ?in\b"), r"\1 inches"),
    _Rule(re.compile(r"\d*[¼½¾⅐-⅞]"), _vulgar_fraction),
    _Rule(re.compile(rf"{_QUANTITY} ?([€£])(?!\w)"), r"\2\1"),
    _Rule(re.compile(r"\b(\d+(?:\.\d+)?) ?in\.(?= [a-z])"), r"\1 inches"),
    _Rule(re.compile(r"([$£€])(\d+(?:\.\d+)?) ?[kK]\b"), lambda m: f"{m[2]} thousand {_CURRENCIES[m[1]]}"),
    _Rule(re.compile(r"([$£€])(\d[\d,]*) ?[-–] ?(\d[\d,]*)(?![\d.])"), r"\1\2 to \1\3"),
    _Rule(re.compile(r"(?<=\d) ?¢"), " cents"),
    _Rule(re.compile(r"(?<=\d) ?÷ ?(?=\d)"), " divided by "),
    _Rule(re.compile(r"(?<=\d) ?m/s\b"), " meters per second"),
    _Rule(re.compile(r"(?<=\d)[–—](?=\d)"), "-"),
    _Rule(re.compile(r"(?<=\b[vV])(?=\d+\.\d)"), " "),
    _Rule(re.compile(r"(?<=\d)\+(?=[\s,.;!?)]|$)"), " plus"),
    _Rule(re.compile(r"(?<![\w~])~ ?(?=[\d$£€])"), "approximately "),
    _Rule(re.compile(r"(?<![\w<])< ?(?=\d)"), "less than "),
    _Rule(re.compile(r"(?<![\w>])> ?(?=\d)"), "more than "),
    _Rule(re.compile(r"(?<=\w) ?= ?(?=[\w-])"), " equals "),
    _Rule(re.compile(r"(?<=\d)\^(?=\d)"), " to the power of "),
    _Rule(re.compile(r"(?<=[\w.]) & (?=\w)"), " and "),
    _Rule(re.compile(r"\b([A-Z]{1,3})&([A-Z]{1,3})\b"), r"\1 and \2"),
    _Rule(re.compile(r"(?<![^\W\d_])[Α-Ωα-ωµΩ](?![^\W\d_]|['’])"), _greek_letter),
    _Rule(re.compile(r"(?<![\w°])º(?!\w)"), "degree"),
    # roman numbers
    _Rule(re.compile(rf"\b({_any(_COUNTED)}) ([IVXL]{{2,7}}|[VX])\b"), _say_counted),
    _Rule(re.compile(r"\b(World War) (I)\b"), _say_counted),
    _Rule(re.compile(rf"\b({_any(_COUNTED)}) (I)\b(?=[,.:;)!?]|\s*$)"), _say_counted),
    _Rule(re.compile(rf"\b({_any(_RULERS)}) ([IVX]{{2,6}}|V)\b"), _ruler),
)
