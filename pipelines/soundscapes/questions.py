"""Kinds of questions, in one table: each plans the events of a clip for an answer that is drawn first.

Right answers are balanced for each kind: the number of a question decides the answer (yes or no, how many, which sound)
and the place of the right option in turn, so that no constant answer beats chance. All else in a clip is drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipelines.soundscapes.settings import ComposeSoundscapesConfig, Kind
from pipelines.soundscapes.takes import SPEECH, Inventory, Take

COUNTS = ("one", "two", "three")
YES_NO = ("yes", "no")


@dataclass(frozen=True)
class ClipEvent:
    """A sound of a clip; it begins when the one before has ended."""

    take: Take
    gain_db: float


@dataclass(frozen=True)
class PlannedQuestion:
    """A question with its right answer, and the events from which the answer follows."""

    kind: Kind
    question: str
    choices: Sequence[str]
    answer: str
    events: Sequence[ClipEvent]
    """In order of time."""
    thought: str


@dataclass(frozen=True)
class Draw:
    """What a question is planned from."""

    inventory: Inventory
    config: ComposeSoundscapesConfig
    number: int
    """Of the question among those of its kind and split."""
    rng: random.Random

    def turn(self, items: Sequence[str]) -> str:
        """Return the item whose turn it is."""
        return items[self.number % len(items)]

    def place(self, right: str, wrong: Sequence[str], num_items: int) -> list[str]:
        """Options with the right one where its turn is.

        Args:
            num_items: of which the right one is drawn in turn.
        """
        options = list(wrong)
        options.insert((self.number + self.number // num_items) % (len(wrong) + 1), right)
        return options

    def names(self, count: int, without: str = "") -> list[str]:
        """Different names of sounds."""
        return self.rng.sample([name for name in self.inventory.names if name != without], count)

    def events(self, names: Sequence[str]) -> list[ClipEvent]:
        """A take of each sound."""
        return [self.event(self.rng.choice(self.inventory.takes[name])) for name in names]

    def event(self, take: Take, gain_db: float = 0.0) -> ClipEvent:
        return ClipEvent(take, gain_db + self.rng.uniform(-2, 2))


@dataclass(frozen=True)
class QuestionKind:
    """A row of the table of kinds."""

    domain: str
    """sound or speech: a row of the scores."""
    question: str
    options: str
    """What the options are, for the documents."""
    plan: Callable[[Draw], PlannedQuestion]
    lack: Callable[[Inventory, ComposeSoundscapesConfig], str]
    """What an inventory lacks for this kind; empty: nothing."""


def plan_question(kind: Kind, draw: Draw) -> PlannedQuestion:
    """Plan a question of a kind, which the inventory must be able to serve."""
    return KINDS[kind].plan(draw)


def describe_sounds(names: Sequence[str]) -> str:
    """Name the sounds of a clip in their order: `I hear dog bark, then rain.`"""
    return f"I hear {', then '.join(names)}."


# Private


def _plan_which(draw: Draw) -> PlannedQuestion:
    names = draw.inventory.names
    right = draw.turn(names)
    wrong = draw.names(min(draw.config.options, len(names)) - 1, without=right)
    takes = draw.inventory.takes[right]
    take = takes[draw.number // len(names) % len(takes)]  # every recording as often as the others
    return _ask("which", [draw.event(take)], draw.place(right, wrong, len(names)), right)


def _plan_presence(draw: Draw) -> PlannedQuestion:
    names, answer = draw.inventory.names, draw.turn(YES_NO)
    name = names[draw.number // 2 % len(names)]
    others = draw.names(2, without=name)
    sounds = [name, others[0]] if answer == "yes" else others
    draw.rng.shuffle(sounds)
    return _ask("presence", draw.events(sounds), YES_NO, answer, name=name)


def _plan_count(draw: Draw) -> PlannedQuestion:
    answer = draw.turn(COUNTS)
    names = draw.names(COUNTS.index(answer) + 1)
    return _ask("count", draw.events(names), COUNTS, answer, conclusion=f"That is {answer}.")


def _plan_order(draw: Draw) -> PlannedQuestion:
    names = draw.inventory.names
    right = draw.turn(names)
    later = draw.names(min(2, len(names) - 1), without=right)
    wrong = draw.rng.sample(later, len(later))
    return _ask("order", draw.events([right, *later]), draw.place(right, wrong, len(names)), right)


def _plan_loudness(draw: Draw) -> PlannedQuestion:
    names = draw.inventory.names
    right = draw.turn(names)
    [softer] = draw.names(1, without=right)
    gains_db = {right: draw.config.loudness_db / 2, softer: -draw.config.loudness_db / 2}
    order = draw.rng.sample([right, softer], 2)
    events = [ClipEvent(draw.rng.choice(draw.inventory.takes[name]), gains_db[name]) for name in order]
    choices = draw.place(right, [softer], len(names))
    return _ask("loudness", events, choices, right, conclusion=f"Louder is {right}.")


def _plan_voice(draw: Draw) -> PlannedQuestion:
    speakers, answer = draw.inventory.speakers, draw.turn(YES_NO)
    with_two_takes = [name for name, takes in speakers.items() if len(takes) > 1]
    speaker = with_two_takes[draw.number // 2 % len(with_two_takes)]
    if answer == "yes":
        takes = draw.rng.sample(speakers[speaker], 2)
    else:
        stranger = draw.rng.choice([name for name in speakers if name != speaker])
        takes = [draw.rng.choice(speakers[speaker]), draw.rng.choice(speakers[stranger])]
        draw.rng.shuffle(takes)
    who = "the same person" if answer == "yes" else "another person"
    events = [draw.event(take) for take in takes]
    return _ask("voice", events, YES_NO, answer, thought=f"I hear {SPEECH}, then {SPEECH} by {who}.")


def _plan_words(draw: Draw) -> PlannedQuestion:
    texts = sorted({take.text for take in draw.inventory.speech})
    take = draw.inventory.speech[draw.number % len(draw.inventory.speech)]
    wrong = draw.rng.sample([text for text in texts if text != take.text], draw.config.options - 1)
    choices = draw.place(take.text, wrong, len(draw.inventory.speech))
    return _ask("words", [draw.event(take)], choices, take.text, thought=f"I hear {SPEECH}: {take.text}")


def _ask(
    kind: Kind,
    events: Sequence[ClipEvent],
    choices: Sequence[str],
    answer: str,
    *,
    name: str = "",
    conclusion: str = "",
    thought: str = "",
) -> PlannedQuestion:
    thought = thought or f"{describe_sounds([event.take.name for event in events])} {conclusion}".strip()
    question = KINDS[kind].question.format(name=name)
    return PlannedQuestion(kind, question, list(choices), answer, events, thought)


def _lack_of_sounds(count: int) -> Callable[[Inventory, ComposeSoundscapesConfig], str]:
    def lack(inventory: Inventory, config: ComposeSoundscapesConfig) -> str:
        names = inventory.names
        return "" if len(names) >= count else f"{count} different sounds are needed, not {len(names)}"

    return lack


def _lack_of_speakers(inventory: Inventory, config: ComposeSoundscapesConfig) -> str:
    speakers = inventory.speakers
    if len(speakers) < 2 or all(len(takes) < 2 for takes in speakers.values()):
        return f"two speakers are needed, and two segments of a speaker; there are {len(speakers)} speakers"
    return ""


def _lack_of_texts(inventory: Inventory, config: ComposeSoundscapesConfig) -> str:
    texts = {take.text for take in inventory.speech}
    return "" if len(texts) >= config.options else f"{config.options} texts are needed, not {len(texts)}"


KINDS: Mapping[Kind, QuestionKind] = {
    "which": QuestionKind(
        "sound", "Which of these sounds is in the recording?", "sounds", _plan_which, _lack_of_sounds(2)
    ),
    "presence": QuestionKind(
        "sound", "Is this sound in the recording: {name}?", "yes, no", _plan_presence, _lack_of_sounds(3)
    ),
    "count": QuestionKind(
        "sound",
        "How many different sounds are in the recording?",
        "one, two, three",
        _plan_count,
        _lack_of_sounds(3),
    ),
    "order": QuestionKind(
        "sound",
        "Which sound comes first?",
        "the three sounds of the clip",
        _plan_order,
        _lack_of_sounds(2),
    ),
    "loudness": QuestionKind(
        "sound", "Which sound is louder?", "the two sounds of the clip", _plan_loudness, _lack_of_sounds(2)
    ),
    "voice": QuestionKind(
        "speech", "Does the same person speak both times?", "yes, no", _plan_voice, _lack_of_speakers
    ),
    "words": QuestionKind(
        "speech", "What does the person say?", "texts of segments", _plan_words, _lack_of_texts
    ),
}
"""Kinds by name: what is asked, what the options are."""
