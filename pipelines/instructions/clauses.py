"""The clauses of an instruction by the grammar: operation, sounds and places, before events are looked up."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from lark import Lark, Token, Transformer
from lark.exceptions import UnexpectedInput

from pipelines.instructions.tokens import MAX_TOKENS, UNIT_SECONDS, InstructionTokens, instruction_tokens

Action = Literal[
    "removal", "keeping", "protection", "replacement", "reversed_replacement", "half_replacement", "filling", "redoing",
    "addition", "extension", "shortening",
]  # fmt: skip
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


@dataclass(frozen=True)
class Time:
    """A time or length."""

    value: float
    unit_s: float | None
    """Seconds of its unit; None: the words name none."""
    is_more: bool = False
    """Whether it is a length to be added: "two more seconds"."""

    def seconds(self, unit_s: float = 1.0) -> float:
        """The time in seconds.

        Args:
            unit_s: seconds of the unit that counts where the words name none.
        """
        return self.value * (unit_s if self.unit_s is None else self.unit_s)


@dataclass(frozen=True)
class Moment:
    """One end of a stretch of time."""

    time_s: float | None = None
    target: Target | None = None
    """The event whose edge it is; None: a time, or an edge of the recording."""
    edge: str = "START"
    """`START`, `MIDDLE` or `END`."""


@dataclass(frozen=True)
class Place:
    """Where an edit is: times, or what stands beside events."""

    kind: str
    """The rule of the grammar: `span`, `points`, `after`."""
    times_s: tuple[float, ...] = ()
    targets: tuple[Target, ...] = ()
    words: frozenset[str] = frozenset()
    """Tokens of the phrase: `END` in "at the end"."""
    moments: tuple[Moment, ...] = ()
    """The ends of a `stretch`, or the only one of `since_event` and `until_event`."""


@dataclass(frozen=True)
class Target:
    """Sounds that are there, as they are named."""

    kind: str
    """The rule of the grammar: `named`, `ordinal`, `everything`."""
    text: str = ""
    words: tuple[str, ...] = ()
    """The name, with misspelt words corrected."""
    orders: tuple[int, ...] = ()
    """Indices among the events of that name: 0 for the first, -1 for the last."""
    count: int | None = None
    places: tuple[Place, ...] = ()
    excepted: tuple[Target, ...] = ()


@dataclass(frozen=True)
class NewSound:
    """A sound to come."""

    text: str
    """Empty: what is pointed at."""
    places: tuple[Place, ...] = ()
    length_s: float | None = None
    is_single: bool = False
    """Whether it is an event, as "a bell" is, and not a sound that goes on, as "rain"."""


@dataclass(frozen=True)
class Length:
    """How far a recording is extended: by seconds, or until a second."""

    is_end: bool
    seconds: float
    is_more: bool = False
    """Whether the words say "more" or "by": "make it last 20 s" does not."""


@dataclass
class Clause:
    """One thing to do."""

    action: Action
    targets: list[Target] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    sounds: list[NewSound] = field(default_factory=list)
    lengths: list[Length] = field(default_factory=list)
    words: frozenset[str] = frozenset()
    """The tokens of its verbs and particles."""


def parse_clauses(text: str, names: frozenset[str]) -> list[Clause] | None:
    """The clauses of a plain text; None: it is no instruction.

    Args:
        names: stems of the words that name sounds of the recording.
    """
    tokens = instruction_tokens(text, names)
    if not 0 < len(tokens) <= MAX_TOKENS:
        return None
    try:
        tree = _parser().parse(tokens)
    except UnexpectedInput:
        return None
    clauses: list[Clause] = _ClauseReader(text).transform(tree)
    return clauses


# Private


@cache
def _parser() -> Lark:
    grammar = Path(__file__).with_name("grammar.lark").read_text(encoding="utf-8")
    parser = Lark(grammar, parser="earley", lexer=InstructionTokens)
    # lark predicts all rules that a rule can begin with, and again for each of them: one level costs a third
    predictions = parser.parser.parser.predictions
    for origin in predictions:
        predictions[origin] = [rule for rule in parser.rules if rule.origin == origin]
    return parser


def _types(children: list[Any]) -> frozenset[str]:
    return frozenset(child.type for child in children if isinstance(child, Token))


def _flatten_children(children: list[Any], kind: type[Any]) -> list[Any]:
    """The children of a kind, those of lists among them included."""
    items = [item for child in children for item in (child if isinstance(child, list) else [child])]
    return [item for item in items if isinstance(item, kind)]


class _ClauseReader(Transformer[Token, Any]):
    """The tree of the grammar as clauses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def __default__(self, rule: str, children: list[Any], meta: Any) -> Any:
        """The rules that are alike: places, targets, clauses."""
        if rule in _PLACES:
            return self._place(rule, children)
        if rule in _TARGETS:
            return self._target(rule, children)
        if rule in _ACTIONS:
            return self._clause(rule, children)
        if len(children) == 1:
            return children[0]
        return children

    def start(self, children: list[Any]) -> list[Clause]:
        return _flatten_children(children, Clause)

    def replacement(self, children: list[Any]) -> list[Clause]:
        return [self._clause("replacement", children), *_flatten_children(children, Clause)]

    def second_replacement(self, children: list[Any]) -> Clause:
        return self._clause("replacement", children)

    def bare_length(self, children: list[Any]) -> Any:
        return children[0]

    def onward_to_end(self, children: list[Any]) -> list[Any]:
        return children

    def order_alone(self, children: list[Any]) -> Any:
        return children[0]

    # sounds

    def noun(self, children: list[Any]) -> list[Token]:
        return _flatten_children(children, Token)

    event_name = noun

    def orders(self, children: list[Any]) -> list[int]:
        orders: list[int] = []
        for token in (child for child in children if isinstance(child, Token)):
            if token.type == "NUM":
                count, is_last = int(float(token)), orders.pop() == -1
                orders += range(-count, 0) if is_last else range(count)
            elif token.type in ("FIRST", "LAST"):
                orders.append(0 if token.type == "FIRST" else -1)
            elif token.type in ("SECOND", "ORDINAL"):
                orders.append(_ORDINALS.index(token) if token in _ORDINALS else int(token[:-2]) - 1)
        return orders

    def targets(self, children: list[Any]) -> list[Target]:
        return _flatten_children(children, Target)

    def target(self, children: list[Any]) -> Target:
        places = [*children[0].places, *_flatten_children(children[1:], Place)]
        return replace(children[0], places=tuple(places))

    def all_but(self, children: list[Any]) -> Target:
        return replace(children[0], excepted=tuple(_flatten_children(children[1:], Target)))

    def _target(self, rule: str, children: list[Any]) -> Target:
        tokens = [child for child in children if isinstance(child, Token) and child.type == "POSSESSIVE"]
        tokens += [
            token
            for child in children
            if isinstance(child, list)
            for token in child
            if isinstance(token, Token)
        ]
        orders = next(
            (child for child in children if isinstance(child, list) and child and isinstance(child[0], int)),
            [],
        )
        number = next(
            (int(float(child)) for child in children if isinstance(child, Token) and child.type == "NUM"),
            None,
        )
        kind = "ordinal" if orders else rule
        return Target(kind, self._slice(tokens), tuple(tokens), tuple(orders), number)

    def known_event(self, children: list[Any]) -> Target:
        types = _types(children)
        rule = "all_of" if "ALL" in types else "both" if "BOTH" in types else "named"
        return self._target(rule, children)

    def sound(self, children: list[Any]) -> NewSound:
        tokens = _flatten_children(children, Token)
        if tokens[0].type == "IT" and len(tokens) == 1:
            return NewSound("")
        text = (
            "silence"
            if tokens[-1].type in ("NOTHING", "SILENCE") and len(tokens) <= 2
            else self._slice(tokens)
        )
        return NewSound(text, is_single=tokens[0].type in ("A", "ONE", "NUM", "THE", "MORE"))

    def item(self, children: list[Any]) -> NewSound:
        sound = _flatten_children(children, NewSound)[0]
        length = next((child.seconds() for child in children if isinstance(child, Time)), sound.length_s)
        return NewSound(sound.text, tuple(_flatten_children(children, Place)), length, sound.is_single)

    timed_item = item

    def _slice(self, tokens: list[Token]) -> str:
        return self._text[tokens[0].start_pos : tokens[-1].end_pos] if tokens else ""

    # times

    def unit(self, children: list[Token]) -> float:
        word = str(children[0])
        return UNIT_SECONDS.get(word) or UNIT_SECONDS[word.removesuffix("s")]

    def amount(self, children: list[Token]) -> float:
        numbers = [
            1.0 if token.type == "ONE" else float(token) for token in children if token.type in ("NUM", "ONE")
        ]
        half = 0.5 if "HALF" in _types(children) else 0.0
        return numbers[0] + half if numbers else half or 1.0

    def duration(self, children: list[Any]) -> Time:
        numbers = _flatten_children(children, float)
        seconds = sum(amount * unit_s for amount, unit_s in zip(numbers[::2], numbers[1::2], strict=True))
        if "HALF" in _types(children):
            seconds += 0.5 * numbers[1]
        return Time(seconds / numbers[1], numbers[1])

    def numbered(self, children: list[Any]) -> Time:
        return Time(float(children[0]), children[1])

    def time(self, children: list[Any]) -> Time:
        if isinstance(children[0], Time):
            return children[0]
        token = children[-1] if children[0].type == "SECOND" else children[0]
        if token.type == "CLOCK":
            seconds = 0.0
            for number in token.split(":"):
                seconds = 60 * seconds + float(number)
            return Time(seconds, 1.0)
        return Time(1.0 if token.type == "ONE" else float(token), 1.0 if len(children) > 1 else None)

    def more(self, children: list[Any]) -> Time:
        times = [child for child in children if isinstance(child, Time)]
        if times:
            return replace(times[0], is_more=True)
        numbers = [1.0 if child.type in ("A", "ONE") else float(child) for child in children
                   if isinstance(child, Token) and child.type in ("A", "ONE", "NUM")]  # fmt: skip
        return Time(
            numbers[0] if numbers else 1.0,
            next(child for child in children if isinstance(child, float)),
            is_more=True,
        )

    def longer_by(self, children: list[Any]) -> Length:
        time = next(child for child in children if isinstance(child, Time))
        return Length(False, time.seconds(), time.is_more or "BY" in _types(children))

    def longer_until(self, children: list[Any]) -> Length:
        return Length(True, next(child for child in children if isinstance(child, Time)).seconds())

    def time_moment(self, children: list[Any]) -> Moment:
        return Moment(children[0].seconds())

    def event_edge(self, children: list[Any]) -> Moment:
        edge = next(iter(_types(children) & {"START", "MIDDLE", "END"}), "START")
        return Moment(None, next(iter(_flatten_children(children, Target)), None), edge)

    event_start = start_edge = end_edge = event_edge

    def the_unit(self, children: list[Any]) -> Time:
        return Time(1.0, children[0])

    def area(self, children: list[Any]) -> list[Place]:
        return _flatten_children(children, Place)

    def _place(self, rule: str, children: list[Any]) -> Place:
        times = _flatten_children(children, Time)
        times += [Time(1.0, child) for child in children if isinstance(child, float)]
        if rule == "points" and not times:
            times = [
                Time(float(child), 1.0)
                for child in children
                if isinstance(child, Token) and child.type == "NUM"
            ]
        units = [time.unit_s for time in times if time.unit_s is not None]
        shared = units[-1] if units else 1.0
        seconds = tuple(time.seconds(shared) for time in times)
        targets, moments = (
            tuple(_flatten_children(children, Target)),
            tuple(_flatten_children(children, Moment)),
        )
        return Place(rule, seconds, targets, _types(children), moments)

    # clauses

    def _clause(self, rule: str, children: list[Any]) -> Clause:
        lengths = _flatten_children(children, Length)
        lengths += [Length(False, time.seconds()) for time in children if isinstance(time, Time)]
        return Clause(
            rule,  # type: ignore[arg-type]
            _flatten_children(children, Target),
            _flatten_children(children, Place),
            _flatten_children(children, NewSound),
            lengths,
            _types(children),
        )


_PLACES = frozenset({
    "span", "stretch", "since_event", "until_event", "onward", "upto", "edge_span", "half", "points", "edge",
    "before_end", "after", "before", "between", "during", "lasting", "everywhere", "here",
})  # fmt: skip
_TARGETS = frozenset({
    "named", "single", "ordinal", "ordered", "both", "all_of", "counted", "everything", "track", "nothing", "pointed",
    "remaining",
})  # fmt: skip
_ACTIONS = frozenset(Action.__args__)  # type: ignore[attr-defined]
