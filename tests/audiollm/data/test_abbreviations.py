"""English words that look like abbreviations stay words; abbreviations are read where their context makes them one."""

from __future__ import annotations

import pytest

from audiollm.data.text.abbreviations import read_abbreviations
from audiollm.data.text.forms import prompt_form, recognition_form, spoken_form

WORDS = (
    """
Is it raining? No.|NO.|She said no.|He said no. I think so.|I have no.|No, thanks.|Oh no!
He sat in the Sun.|The sun rose.|Sun Microsystems|Sat. is not a word.|He Sat down.|They wed.|Wed. they did.
Mar the surface.|Do not mar it.|You may go.|May I come?|May.|Jan is here.|I met Jan. She left.|Dec the halls.
Bye, PA|Pa said so.|PA systems|Ask your pa.|Nein, DE ist gut.|Come on, ME!|Hi, AL!|We love you, MA|So, OK
I'm in OR|I live in Portland, OR|either this, OR that|Or else.|In.|Come in.|Let me in, or go.
It's me.|Give it to me.|Me too.|Hi.|Hi, Al.|Oh.|Oh, OK|Ok.|OK.|OK?|I told him no, OK?|La la la.|La.|Ma and Pa.
It's on us.|Us too.|us|Al.|Al came.|Co.|St.|Dr.|He saw the Dr.|I saw the Dr. She left.|Is that you, Dr.?
A fig.|Figs are ripe.|A fig. Nice.|Turn the vol. up|ch.|Art.|I love art.|Fine art. It hangs here.|wait a sec.
Just a min.|Max.|Max. Where is he?|Min came.|Est.|est|I am here.|Am I?|Hugo am Meer
Mon amour|Mon.|Fri.|Thu|Tue|Sep|Oct|Nov|Aug|Apr|Feb
Rev.|Hon.|Gen.|Col.|Capt.|Maj.|Gov.|Sen.|Rep.|Ed.|Eq.|Ref.|Op.|Fl.|Gal.|Hr.|Ind.|Id.|Ill.|Inc.|Ms.|Prof.
Brno|Clwyd|Baal|Asa|Adm|Hwy|Assn|Aka|Cadw|Dora and Ali|Eli met Ian.|Ibm|Api|IT|AI|USA|NASA|UNESCO|FBI
MIX|XL|I, II and III|I am|Elizabeth I think|Part I liked|Vitamin C|Malcolm X|DIV|CD|DVD|LIVID|mild|civic
J. K. Rowling|and/or|he/she|well-known|rock 'n' roll|'Tis|o'clock|don't|I'd|we'll
""".replace("\n", "|")
    .strip("|")
    .split("|")
)


@pytest.mark.parametrize("text", WORDS)
def test_a_word_that_is_a_word_stays(text: str) -> None:
    assert spoken_form(text, "en") == text
    assert prompt_form(text, "en") == text


@pytest.mark.parametrize("text", WORDS)
def test_a_number_elsewhere_in_the_sentence_changes_no_word(text: str) -> None:
    assert spoken_form(f"We counted 25 times: {text}", "en") == f"We counted twenty five times: {text}"


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        # before numbers
        ("No. 5", "number five"),
        ("see Nos. 5 and 6", "see numbers five and six"),
        ("Did he come? No. 5 is enough.", "Did he come? No. five is enough."),
        ("No 5 people agree.", "No five people agree."),
        ("Fig. 3, vol. 2, ch. 4", "figure three, volume two, chapter four"),
        ("Art. 5, Sec. 2, p. 7, pp. 5-7", "article five, section two, page seven, pages five to seven"),
        ("Op. 27 at approx. 5", "opus twenty seven at approximately five"),
        ("max. 5 people, Est. 1990", "maximum five people, established nineteen ninety"),
        ("#5 is alive", "number five is alive"),
        # titles and names
        ("Dr. Smith saw Prof. Li", "doctor Smith saw professor Li"),
        ("Mr. and Mrs. Jones", "mister and misses Jones"),
        ("Mr. & Mrs. Jones", "mister and misses Jones"),
        ("Mr Jones and Ms. Lee", "mister Jones and miss Lee"),
        ("Lt. Col. Smith", "lieutenant colonel Smith"),
        ("St. Peter, Mt. Everest, Ft. Worth", "Saint Peter, Mount Everest, Fort Worth"),
        ("John Smith Jr. came", "John Smith junior came"),
        ("Smith & Co.", "Smith and company."),
        # streets and states
        ("42 Main St., Boston", "forty two Main Street, Boston"),
        ("12 Elm Dr.", "twelve Elm Drive"),
        ("on 42nd St.", "on forty second Street"),
        ("I live in Stroudsburg, PA", "I live in Stroudsburg, Pennsylvania"),
        ("Portland, OR 97201", "Portland, Oregon nine seven two oh one"),
        # days, months, dates
        ("Mon.-Sun. and Mon-Fri", "Monday to Sunday and Monday to Friday"),
        ("on Sun., Jan. 5", "on Sunday, the fifth of january"),
        ("Sat 5pm, Sun 10:30", "Saturday five PM, Sunday ten thirty"),
        ("He Sat 5 times.", "He Sat five times."),
        ("It rained on Sat. and Sun.", "It rained on Saturday and Sunday."),
        ("the Mar. 5 issue", "the fifth of march issue"),
        ("10 may be enough.", "ten may be enough."),
        ("They march 5 miles.", "They march five miles."),
        ("On May 5, 2020", "On the fifth of May, twenty twenty"),
        ("on 5 May 2020", "on the fifth of May twenty twenty"),
        ("the 5th of May", "the fifth of May"),
        ("Dec. 25", "the twenty fifth of december"),
        ("1984, 1905, 2005", "nineteen eighty four, nineteen oh five, two thousand five"),
        # times
        ("at 10 a.m. today", "at ten AM today"),
        ("at 10 a.m.", "at ten AM."),
        ("5pm", "five PM"),
        # units
        ("5 m", "five meters"),
        ("1 m", "one meter"),
        ("5 m.", "five meters."),
        ("There are 5 in the room.", "There are five in the room."),
        ("He let 5 in.", "He let five in."),
        ("5 in tall or so", "five inches tall or so"),
        ("5 ft 2 in", "five feet two inches"),
        ("5 in. of rain", "five inches of rain"),
        ("5 sec. and 2 min.", "five seconds and two minutes."),
        ("5 lbs. of meat, 1 lb of tea", "five pounds of meat, one pound of tea"),
        ("5 mm, 2 g, 16 GB, 5 hp", "five millimeters, two grams, sixteen gigabytes, five horsepower"),
        ("5 PA systems", "five PA systems"),
        (
            "60 mph, 100 km/h, 20°C",
            "sixty miles per hour, one hundred kilometers per hour, twenty degrees Celsius",
        ),
        # roman numbers
        ("World War II", "World War two"),
        ("World War I ended", "World War one ended"),
        ("Henry VIII and Louis XIV", "Henry the eighth and Louis the fourteenth"),
        ("Chapter IV, Act V, Part I.", "Chapter four, Act five, Part one."),
        # money, fractions, telephones, signs
        ("$5 million, €10, 5€", "five million dollars, ten euros, five euros"),
        ("1/2, 2½ cups, 50/50", "one half, two and a half cups, fifty fifty"),
        ("555-1234", "five five five, one two three four"),
        ("+1 555 123 4567", "plus one, five five five, one two three, four five six seven"),
        ("5 %, 5+, ~5, <5", "five percent, five plus, approximately five, less than five"),
        ("rock & roll, AT&T", "rock and roll, AT and T"),
        (
            "$10k, $100-200, 99¢",
            "ten thousand dollars, one hundred dollars to two hundred dollars, ninety nine cents",
        ),
        ("(555) 123-4567", "five five five, one two three, four five six seven"),
        ("3.2.1, v2.0, 10/10", "three point two point one, v two point oh, ten out of ten"),
        ("5–10, 10÷2, +5, 10 m/s", "five to ten, ten divided by two, plus five, ten meters per second"),
        # letters
        ("the U.S. dollar", "the US dollar"),
        ("in the U.S.", "in the US."),
        (
            "The U.S. Army left the U.S. Now it is 5 p.m. They rest.",
            "The US Army left the US. Now it is five PM. They rest.",
        ),
        ("a Ph.D. student", "a PhD student"),
        ("cats, dogs, etc.", "cats, dogs, et cetera."),
        ("this vs. that", "this versus that"),
        ("www.foo.com", "WWW dot foo dot com"),
        ("a.b@c.org", "a dot b at c dot org"),
        ("B2B, mp3, H2O", "B two B, mp three, H two O"),
        ("Doorbell_buzzing 5", "Doorbell_buzzing five"),
    ],
)
def test_an_abbreviation_is_read_in_its_context(written: str, spoken: str) -> None:
    assert spoken_form(written, "en") == spoken


@pytest.mark.parametrize("text", ["U.S.", "No. 5", "Dr. Li", "5 min.", "Smith & Co.", "cats etc."])
def test_reading_twice_changes_nothing(text: str) -> None:
    once = spoken_form(text, "en")
    assert spoken_form(once, "en") == once
    assert read_abbreviations(once) == once
    assert recognition_form(spoken_form(recognition_form(once), "en")) == recognition_form(once)
