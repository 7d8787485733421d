"""Languages by their codes, names and scripts, and the numbers of each in words."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from num2words import CONVERTER_CLASSES

from audiollm.data.text import forms
from audiollm.data.text.forms import spoken_form
from audiollm.data.text.languages import (
    is_written_in,
    language_code,
    language_of,
    languages_of,
    main_script,
)
from audiollm.data.text.numerals import can_read

READ = sorted(code for code in CONVERTER_CLASSES if "_" not in code and can_read(code))


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("de", "de"), ("de-AT", "de"), ("de_DE", "de"), ("German", "de"), ("deu", "de"), ("ger", "de"),
        ("zh-CN", "zh"), ("cmn", "zh"), ("Chinese", "zh"), ("mandarin", "zh"), ("en_US", "en"), ("pt-BR", "pt"),
        ("nb", "no"), ("kz", "kk"), ("iw", "he"), ("fil", "fil"),
        (None, None), ("", None), ("und", None), ("unknown", None),
    ],
)  # fmt: skip
def test_codes(language: str | None, code: str | None) -> None:
    assert language_code(language) == code


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Привет", "ru"), ("Привіт, їжак", "uk"), ("안녕하세요", "ko"), ("γειά", "el"), ("שלום", "he"), ("مرحبا", "ar"),
        ("سلام چطوری", "fa"), ("雪の花", "ja"), ("中国的の文化历史", "zh"), ("straße", "en"), ("", "en"), ("12", "en"),
        ("A thought about the sign 好 and nothing else", "en"), ("我用 PyTorch 训练 Transformer 模型", "zh"),
        ("Слово dog по-русски", "ru"),
    ],
)  # fmt: skip
def test_language_of_a_text(text: str, language: str) -> None:
    assert language_of(text) == language
    assert is_written_in(text, language) or not any(map(str.isalpha, text))


def test_scripts() -> None:
    assert main_script("123 !?") == (None, 0.0)
    assert main_script("abcd") == ("LATIN", 1.0)
    assert main_script("ab привет, мир") == ("CYRILLIC", 18 / 20)
    assert main_script("a 好 b 好 c 好 d") == ("LATIN", 4 / 13)
    assert main_script("这家の店真的很好吃")[0] == "CJK" and main_script("今日は雨")[0] == "KANA"
    assert languages_of("LATIN", {"en", "ru", "sr", "zh"}) == {"en", "sr"}
    assert languages_of("CYRILLIC", {"en", "ru", "sr", "zh"}) == {"ru", "sr"}
    assert not is_written_in("Привет", "en") and not is_written_in("hello", "ru")
    assert is_written_in("你好世界", "zh") and not is_written_in("你好世界", "ja")


@pytest.mark.parametrize(
    ("language", "written", "spoken"),
    [
        ("de", "Das kostet 25 Euro.", "Das kostet fünfundzwanzig Euro."),
        ("German", "Nummer 21", "Nummer einundzwanzig"),
        (
            "de",
            "Nein, DE ist gut, und Dr. Maier kommt um 8.30 Uhr.",
            "Nein, DE ist gut, und Doktor Maier kommt um acht Uhr dreißig.",
        ),
        ("de", "am 3. Mai 1999", "am dritten Mai neunzehnhundertneunundneunzig"),
        ("de", "1.234.567 und 3,5 %", "eine Million zweihundertvierunddreißigtausendfünfhundertsiebenundsechzig und "
         "drei Komma fünf Prozent"),
        ("de", "25 €, $5", "fünfundzwanzig Euro, fünf US-Dollar"),
        ("de", "-5 Grad im No. Sun, PA", "minus fünf Grad im No. Sun, PA"),
        ("fr", "Il a 42 ans et mesure 1,80 m.", "Il a quarante-deux ans et mesure un virgule huit zéro mètre."),
        ("fr", "le 1er, la 2e fois, à 8h30", "le premier, la deuxième fois, à huit heures trente"),
        ("fr", "1 200 €", "mille deux cents euros"),
        ("es", "El 3/4/2024 hay 25 %", "El tres de abril de dos mil veinticuatro hay veinticinco por ciento"),
        ("it", "21 anni e 1,5 kg", "ventuno anni e uno virgola cinque chilogrammi"),
        ("pt", "1.000 pessoas, 2ª vez", "mil pessoas, segunda vez"),
        ("ru", "было 25 человек", "было двадцать пять человек"),
        (None, "было 25 человек", "было двадцать пять человек"),
        ("ru", "21 м и 3,5 %", "двадцать один метр и три целых пять десятых процента"),
        ("ru", "В 1999 году, 2024 год, с 2001 года", "В тысяча девятьсот девяносто девятом году, две тысячи двадцать "
         "четвёртый год, с две тысячи первого года"),
        ("ru", "01.02.2024", "один февраля две тысячи двадцать четыре"),
        ("pl", "5 kg i 22 m", "pięć kilogramów i dwadzieścia dwa metry"),
        ("cs", "25 a -3", "dvacet pět a mínus tři"),
        ("nl", "25 euro in 1999", "vijfentwintig euro in negentien honderd negenennegentig"),
        ("tr", "1,5 kg", "bir virgül beş kilogram"),
        ("vi", "1,8", "một phẩy tám"),
        ("ko", "5 kg", "오 킬로그램"),
        ("zh", "50%的人", "百分之五十的人"),
        ("yue", "5個人", "五個人"),
        ("am", "1234567", "አንድ ሁለት ሦስት አራት አምስት ስድስት ሰባት"),
        ("de", "MP3 und A-4", "MP drei und A-vier"),
        ("pt", "R$ 5,00 e US$ 2", "cinco vírgula zero zero reais brasileiros e dois dólares americanos"),
        ("pt", "16 e 17", "dezasseis e dezassete"),
        ("pt-BR", "16 e 17", "dezesseis e dezessete"),
        ("fr_BE", "71", "septante et un"),
        ("de", "CHF 10 oder 5 EUR", "zehn Schweizer Franken oder fünf Euro"),
        ("pl", "25 zł", "dwadzieścia pięć złotych polskich"),
        ("en", "US$10, A$5 and ₹3", "ten US dollars, five Australian dollars and three Indian rupees"),
        ("en", "R$ 5,50 or €2,50", "five point five zero Brazilian reals or two point five euros"),
        ("en", "$1,000 in the CHF, LAUSD 5", "one thousand dollars in the CHF, LAUSD five"),
        ("ar", "٢٥", "خمسة و عشرون"),
        ("fa", "۲۵ کتاب", "بیست و پنج کتاب"),
        ("hi", "२५", "२५"),
    ],
)  # fmt: skip
def test_numbers_of_a_language(language: str | None, written: str, spoken: str) -> None:
    assert spoken_form(written, language) == spoken


@pytest.mark.parametrize(
    ("language", "written", "spoken"),
    [
        ("de", "Dr. Müller und Prof. Dr. Weber", "Doktor Müller und Professor Doktor Weber"),
        ("de", "Frau Dr. Ö. Klein wohnt in St. Gallen", "Frau Doktor Ö. Klein wohnt in Sankt Gallen"),
        ("German", "Hr. Schmidt kam um 8", "Herr Schmidt kam um acht"),
        ("de", "Er ist Dr. Das wissen alle.", "Er ist Dr. Das wissen alle."),
        ("de", "Sie wurde Dr. und kam am Fr. wieder", "Sie wurde Dr. und kam am Fr. wieder"),
        ("fr", "Mme Dupont et le Dr Martin", "madame Dupont et le docteur Martin"),
        ("es", "La Sra. García y el Dr. Ruiz", "La señora García y el doctor Ruiz"),
        ("pt", "A Dra. Lima", "A doutora Lima"),
        ("it", "Il Dott. Rossi e la Sig.ra Bianchi", "Il dottor Rossi e la signora Bianchi"),
        ("nl", "dhr. Jansen en mevr. De Vries", "de heer Jansen en mevr. De Vries"),
        ("ru", "Dr. Weber", "Dr. Weber"),
    ],
)  # fmt: skip
def test_titles_before_names(language: str, written: str, spoken: str) -> None:
    assert spoken_form(written, language) == spoken


@pytest.mark.parametrize("language", ["xx", "hi", "sw"])
def test_an_unknown_language_keeps_its_text_with_one_notice(language: str) -> None:
    forms._warn_of.cache_clear()
    with warnings.catch_warnings(record=True) as notices:
        warnings.simplefilter("always")
        for text in ("Nambari 25, Dr. No. 5, PA", "7 m"):
            assert spoken_form(text, language) == text
    assert [str(notice.message).split(" keep")[0] for notice in notices] == [f"texts in {language!r}"]


@pytest.mark.parametrize("language", READ)
def test_every_language_of_num2words_reads_its_whole_numbers(language: str) -> None:
    spoken = spoken_form("a 0 b 7 c 25 d 1999 e", language)
    assert not any(digit in spoken for digit in "0123456789"), spoken
    assert spoken.split()[0] == "a" and spoken.split()[-1] == "e"


@settings(max_examples=40)
@given(st.sampled_from(READ), st.text(alphabet="0123456789 .,-:/%€$kmhºe°x", max_size=12))
def test_no_signs_around_numbers_raise(language: str, text: str) -> None:
    assert isinstance(spoken_form(text, language), str)
