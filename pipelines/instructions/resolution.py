"""Which sounds of a recording, and which seconds, the clauses of an instruction mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from audiollm.data.records.thoughts import ThoughtEvent, ThoughtRecord
from pipelines.instructions.clauses import Moment, NewSound, Place, Target
from pipelines.instructions.events import NamedSounds, named_sounds, sounds_with_names

LATE_S = 0.05
"""A time may lie this much after the end: times are rounded."""
PLACELESS = frozenset({"track", "pointed", "everything", "remaining"})
"""Targets that name no sound."""
_DEFAULT_LENGTH_S = 1.0
"""Length of an edit of which the words name the beginning alone."""
_NEAR_S = 0.25
"""A time names an event that is at most this far."""
_MAX_CHOICES = 5
_OPEN_PLACES = frozenset(
    {"onward", "upto", "half", "between", "during", "stretch", "since_event", "until_event"}
)
"""Places that say among which events to look, where "from 2 to 4 s" says the seconds themselves."""
_SECONDS_PLACES = frozenset({"span", "edge_span", "everywhere", "here"})
"""Places that say from when to when."""


class InstructionQuestion(Exception):
    """Words that are not read as edits without a guess: what is to be answered.

    Args:
        choices: instructions that answer it.
        is_open: whether a model that hears the recording may answer it; else it is for the person alone.
    """

    def __init__(self, sentence: str, choices: Sequence[str] = (), is_open: bool = False) -> None:
        self.choices, self.is_open = tuple(dict.fromkeys(choices))[:_MAX_CHOICES], is_open
        super().__init__(sentence)

    @property
    def sentence(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Hit:
    """A sound that is there, with its seconds."""

    caption: str
    start_s: float
    end_s: float
    event: ThoughtEvent | None = None
    is_background: bool = False


def format_span(start_s: float, end_s: float) -> str:
    """Seconds as a choice names them: "1 to 1.5 s"."""
    start, end = (f"{second:.3f}".rstrip("0").rstrip(".") for second in (start_s, end_s))
    return f"{start} to {end} s"


class SoundResolver:
    """Looks up the sounds and seconds of clauses in a record.

    Args:
        duration_s: seconds of the recording; an extension makes it longer for the clauses after it.
        selection: the selected seconds, which count where the words name neither times nor single events.
        has_object: whether an object in the pictures is pointed at.
    """

    def __init__(
        self,
        record: ThoughtRecord,
        duration_s: float,
        selection: tuple[float, float] | None,
        has_object: bool,
    ) -> None:
        self.duration_s, self.selection = duration_s, selection
        self.nouns: tuple[str, ...] = ()
        """The noun that "the second one" stands for."""
        self._record, self._has_object = record, has_object

    # sounds that are there

    def hits(self, target: Target, everywhere: bool = False) -> list[Hit]:
        """The seconds of each sound that a target names.

        Args:
            everywhere: a sound that is no event may be anywhere.

        Raises:
            InstructionQuestion: there is none of that name, or several may be meant.
        """
        if target.kind in PLACELESS or target.kind == "nothing":
            raise InstructionQuestion("Name the sound, as in “remove the dog”.")
        if target.words:
            self.nouns = target.words
        sounds = self.events(target)
        events = list(sounds.events)
        picks = target.kind in ("ordinal", "both", "counted", "single") or target.excepted
        if picks and (events or not sounds.background):
            return [self._event_hit(event) for event in self._picked(target, events)]
        if target.places:
            return self._placed_hits(target, sounds)
        if not everywhere and self.selection is not None:
            return [Hit(self.name(target), *self.selection)]
        if sounds.background:
            return [Hit(sounds.background, 0.0, self.duration_s, is_background=True)]
        if events:
            return [self._event_hit(event) for event in events]
        if everywhere and self.selection is not None:
            return [Hit(self.name(target), 0.0, self.duration_s)]
        raise self._unknown(target)

    def events(self, target: Target) -> NamedSounds:
        return named_sounds(target.words or self.nouns, self._record)

    def name(self, target: Target) -> str:
        sounds = self.events(target)
        names = list(dict.fromkeys(event.sound for event in sounds.events))
        return sounds.background or (names[0] if len(names) == 1 else target.text)

    def _event_hit(self, event: ThoughtEvent) -> Hit:
        return Hit(event.sound, event.start_s, min(event.end_s, self.duration_s), event)

    def _placed_hits(self, target: Target, sounds: NamedSounds) -> list[Hit]:
        """The hits of a name with places: events beside other events or at a time; else the seconds of the places."""
        hits: list[Hit] = []
        lasting = [place for place in target.places if place.kind == "lasting"]
        for place in target.places:
            if place.kind == "lasting":
                continue
            hits_there = self._hits_there(place, lasting, sounds, target)
            if not hits_there:
                spans = self.spans([place, *lasting], is_there=True)
                if not (lasting or _says_seconds(place, sounds)):
                    raise self._not_there(target, sounds, spans)
                hits_there = [Hit(self.name(target), *span) for span in spans]
            hits += hits_there
        if not hits:
            raise InstructionQuestion("Say from when to when, as in “remove the dog from 2 to 4 s”.")
        return hits

    def _hits_there(
        self, place: Place, lasting: Sequence[Place], sounds: NamedSounds, target: Target
    ) -> list[Hit]:
        """The events of a name that a place picks; none: it picks none, or says the seconds themselves."""
        if place.kind == "points":
            return [self._event_hit(event) for event in sounds.events for time_s in place.times_s
                    if event.start_s - _NEAR_S <= time_s <= event.end_s + _NEAR_S]  # fmt: skip
        if place.kind in ("after", "before") and not place.times_s:
            return [self._event_hit(event) for event in self._beside(place, sounds.events, target)]
        if place.kind == "edge" and not (lasting or place.targets):
            return self._third_hits(place, sounds)
        if place.kind not in (*_OPEN_PLACES, "after", "before"):
            return []
        parts = self.spans([place, *lasting], is_there=True)
        hits = [hit for span in parts for hit in self._hits_inside(sounds.events, span)]
        is_near = place.kind in (
            "after",
            "before",
        )  # "a second before the bell" picks an event, and cuts none
        return [self._event_hit(hit.event) for hit in hits if hit.event] if is_near else hits

    def _third_hits(self, place: Place, sounds: NamedSounds) -> list[Hit]:
        """The only event of a name in the third of the recording that "at the end" means."""
        third = next(n for n, word in enumerate(("START", "MIDDLE", "END")) if word in place.words)
        events = [
            event
            for event in sounds.events
            if third <= 1.5 * (event.start_s + event.end_s) / self.duration_s <= third + 1
        ]
        return [self._event_hit(event) for event in events] if len(events) == 1 else []

    def _not_there(
        self, target: Target, sounds: NamedSounds, spans: Sequence[tuple[float, float]]
    ) -> InstructionQuestion:
        name = self.name(target)
        choices = [f"remove the {name} from {format_span(*span)}" for span in spans]
        if not sounds.events:
            return self._unknown(target, choices)
        return self._which(f"There is no {name} there. Which is meant?", sounds.events, choices)

    def _hits_inside(self, events: Sequence[ThoughtEvent], span: tuple[float, float]) -> list[Hit]:
        """Events in some seconds, cut to them."""
        spans = [(max(event.start_s, span[0]), min(event.end_s, span[1])) for event in events]
        return [
            Hit(event.sound, start_s, end_s, event)
            for event, (start_s, end_s) in zip(events, spans, strict=True)
            if end_s - start_s > LATE_S
        ]

    def _beside(self, place: Place, events: Sequence[ThoughtEvent], target: Target) -> list[ThoughtEvent]:
        """The next events after or before another event.

        Raises:
            InstructionQuestion: there are none.
        """
        (start_s, end_s), *_ = self._reference(place.targets)
        if place.kind == "after":
            beside = [event for event in events if event.start_s >= end_s - LATE_S]
        else:
            beside = [event for event in events if event.end_s <= start_s + LATE_S][::-1]
        if events and not beside:
            raise InstructionQuestion(f"There is no {target.text} {place.kind} it.", self._names_in("remove"))
        is_plural = target.kind == "all_of" or (target.text.endswith("s") and not target.text.endswith("ss"))
        return sorted(beside, key=lambda event: event.start_s) if is_plural else beside[:1]

    def _picked(self, target: Target, events: list[ThoughtEvent]) -> list[ThoughtEvent]:
        """The events that are counted out, by their order or number.

        Raises:
            InstructionQuestion: there are not as many, or several may be meant.
        """
        name = " ".join(target.words or self.nouns) or "sound"
        if not events:
            raise self._unknown(target)
        if target.places:
            spans = self.spans(target.places, is_there=True)
            events = [
                e for e in events if any(e.start_s < end_s and e.end_s > start_s for start_s, end_s in spans)
            ]
        if target.kind == "ordinal":
            if not all(-len(events) <= order < len(events) for order in target.orders):
                raise self._which(f"There are {len(events)} sounds of the name “{name}” there.", events)
            events = [
                events[order] for order in dict.fromkeys(order % len(events) for order in target.orders)
            ]
        count = {"both": 2, "single": 1}.get(target.kind, target.count if target.kind == "counted" else None)
        if count is not None and len(events) != count:
            raise self._which(f"There are {len(events)} sounds of the name “{name}”. Which of them?", events)
        excepted = [
            hit.event
            for excluded in target.excepted
            for hit in self.hits(replace(excluded, words=excluded.words or self.nouns))
        ]
        return [event for event in events if event not in excepted]

    def _which(
        self, sentence: str, events: Sequence[ThoughtEvent], choices: Sequence[str] = ()
    ) -> InstructionQuestion:
        named = [
            f"remove the {event.sound} from {format_span(event.start_s, event.end_s)}" for event in events
        ]
        return InstructionQuestion(sentence, [*choices, *named])

    def _unknown(self, target: Target, choices: Sequence[str] = ()) -> InstructionQuestion:
        name = " ".join(target.words)
        if not name:
            return InstructionQuestion(
                "Which sound? The words do not name it.", self._names_in("remove"), is_open=True
            )
        sounds = ", ".join(sounds_with_names(self._record))
        where = f"say from when to when, or “remove the {name} everywhere”"
        unnamed = [] if sounds else self._record.events
        sentence = (
            f"“{name}” is not among the sounds of the chain of thought ({sounds}). Name one of them, or {where}."
            if sounds
            else f"The chain of thought names no sound: where is “{name}”? Name it there, select its seconds, {where}."
        )
        pointed = ["remove this"] if self._has_object else []
        spans = [f"remove the {name} from {format_span(event.start_s, event.end_s)}" for event in unnamed]
        answers = [*choices, f"remove the {name} everywhere", *pointed, *self._names_in("remove"), *spans]
        return InstructionQuestion(sentence, answers, is_open=True)

    def _names_in(self, verb: str) -> list[str]:
        return [f"{verb} the {sound}" for sound in sounds_with_names(self._record)]

    # seconds

    def area_hits(self, places: Sequence[Place]) -> list[Hit]:
        """The seconds of places, or else the selected ones.

        Raises:
            InstructionQuestion: there are neither.
        """
        lasting = [place for place in places if place.kind == "lasting"]
        if places:
            return [
                Hit(self.name(place.targets[0]) if _is_part(place) else "", *span)
                for place in places
                if place not in lasting or len(lasting) == len(places)
                for span in self.spans([place, *lasting], is_there=True)
            ]
        if self.selection is None:
            raise InstructionQuestion(
                "Which seconds? Say them, as in “fill 2 to 3 s with rain”, or select them on the waveform."
            )
        return [Hit("", *self.selection)]

    def selected_or_all(self) -> tuple[float, float]:
        return self.selection or (0.0, self.duration_s)

    def new_spans(self, sound: NewSound, places: list[Place]) -> list[tuple[float, float]]:
        """The seconds of a sound that comes.

        Raises:
            InstructionQuestion: the words do not say when.
        """
        text = sound.text or "this"
        at_end = any(place.kind == "edge" and "END" in place.words for place in places)
        if sound.length_s is not None and (at_end or not places) and self.selection is None:
            start_s = max(0.0, self.duration_s - sound.length_s) if at_end else 0.0
            raise InstructionQuestion(
                f"Is the recording to become longer, or {text} to be added to what is there?",
                [f"extend it by {sound.length_s:g} s with {text}",
                 f"add {text} from {format_span(start_s, min(start_s + sound.length_s, self.duration_s))}"],
            )  # fmt: skip
        if [place for place in places if place.kind != "lasting"]:
            return self.spans(places, sound.length_s)
        if self.selection is not None:
            length_s = next((place.times_s[0] for place in places), sound.length_s)
            start_s, end_s = self.selection
            return [(start_s, min(start_s + length_s, self.duration_s) if length_s else end_s)]
        if sound.is_single or places or not sound.text:
            raise InstructionQuestion(
                f"When is {text} to be heard? Say “add {text} at 2 s”, or select the seconds on the waveform.",
                [f"add {text} at the start", f"add {text} at the end", f"add {text} everywhere"],
                is_open=True,
            )
        return [(0.0, self.duration_s)]

    def spans(
        self, places: Sequence[Place], length_s: float | None = None, is_there: bool = False
    ) -> list[tuple[float, float]]:
        """The seconds of each place.

        Args:
            length_s: seconds of what begins at a time; None: as a phrase "for two seconds" says, or else a second.
            is_there: whether sounds are meant that are there: "after 3 s" then goes on to the end.

        Raises:
            InstructionQuestion: seconds that the recording does not have.
        """
        lasting = [place.times_s[0] for place in places if place.kind == "lasting"]
        length_s = lasting[0] if lasting else length_s
        spans: list[tuple[float, float]] = []
        for place in places:
            if place.kind != "lasting":
                spans += [self._inside(*span) for span in self._spans_of(place, length_s, is_there)]
        if not spans:
            raise InstructionQuestion("From when on? Say “from 2 to 4 s”, or “at 2 s for two seconds”.")
        return spans

    def _spans_of(self, place: Place, length_s: float | None, is_there: bool) -> list[tuple[float, float]]:
        duration_s, times_s = self.duration_s, place.times_s
        some_s = length_s or _DEFAULT_LENGTH_S
        if _is_part(place):
            return [
                self._part_of(place, span, length_s, is_there)
                for span in self._reference(place.targets, may_be_several=True)
            ]
        match place.kind:
            case "span":
                return [(times_s[0], times_s[1])]
            case "points":
                return [(time_s, self._end_of(time_s, some_s)) for time_s in times_s]
            case "onward":
                goes_on = length_s is None and (is_there or "AFTER" not in place.words)
                return [
                    (
                        times_s[0],
                        max(duration_s, times_s[0] + some_s) if goes_on else self._end_of(times_s[0], some_s),
                    )
                ]
            case "upto":
                return [(0.0, times_s[0])]
            case "stretch":
                begin, end = place.moments
                return [(self._second_of(begin), self._second_of(end))]
            case "since_event":
                return [(self._second_of(place.moments[0]), duration_s)]
            case "until_event":
                return [(0.0, self._second_of(place.moments[0]))]
            case "edge_span":
                return [
                    (0.0, times_s[0])
                    if "FIRST" in place.words
                    else (max(0.0, duration_s - times_s[0]), duration_s)
                ]
            case "half":
                return [(0.0, duration_s / 2) if "FIRST" in place.words else (duration_s / 2, duration_s)]
            case "edge":
                some_s = min(some_s, duration_s)
                start_s = {"START": 0.0, "END": duration_s - some_s}.get(
                    next(iter(place.words & {"START", "END"}), ""), (duration_s - some_s) / 2
                )
                return [(start_s, start_s + some_s)]
            case "before_end":
                return [(duration_s - times_s[0], self._end_of(duration_s - times_s[0], some_s))]
            case "everywhere":
                return [(0.0, duration_s)]
            case "here":
                return [(hit.start_s, hit.end_s) for hit in self.area_hits(())]
        return self._spans_beside(place, length_s, is_there)

    def _second_of(self, moment: Moment) -> float:
        if moment.time_s is not None:
            return moment.time_s
        start_s, end_s = self._reference([moment.target])[0] if moment.target else (0.0, self.duration_s)
        return {"START": start_s, "MIDDLE": (start_s + end_s) / 2, "END": end_s}[moment.edge]

    def _part_of(
        self, place: Place, span: tuple[float, float], length_s: float | None, is_there: bool
    ) -> tuple[float, float]:
        """The seconds at an edge of an event, or a half of it.

        Raises:
            InstructionQuestion: the words do not say how many.
        """
        start_s, end_s = span
        if place.kind == "half":
            middle_s = (start_s + end_s) / 2
            return (start_s, middle_s) if "FIRST" in place.words else (middle_s, end_s)
        some_s = place.times_s[0] if place.times_s else length_s
        if "START" in place.words and not is_there:
            return start_s, self._end_of(start_s, some_s or _DEFAULT_LENGTH_S)
        if some_s is None or "MIDDLE" in place.words:
            name = place.targets[0].text
            raise InstructionQuestion(
                f"From when to when? The {name} lasts from {format_span(start_s, end_s)}.",
                [f"mute {format_span(start_s, end_s)}"] if is_there else [],
            )
        if place.words & {"START", "FIRST"}:
            return start_s, min(start_s + some_s, end_s)
        return max(end_s - some_s, start_s), end_s

    def _spans_beside(
        self, place: Place, length_s: float | None, is_there: bool
    ) -> list[tuple[float, float]]:
        """The seconds after, before, between or during events.

        Of what is there, "the two seconds before the bell" are two seconds; what comes "two seconds before the bell"
        ends as long before it.
        """
        some_s, gap_s = length_s or _DEFAULT_LENGTH_S, sum(place.times_s)
        if gap_s and (is_there or "THE" in place.words):
            some_s, gap_s = gap_s, 0.0
        if place.kind == "between":
            (first_start_s, first_end_s), (second_start_s, second_end_s) = (
                self._reference([target])[0] for target in place.targets
            )
            is_in_order = first_start_s <= second_start_s
            return [(first_end_s, second_start_s) if is_in_order else (second_end_s, first_start_s)]
        references = self._reference(place.targets, may_be_several=place.kind == "during")
        if is_there and length_s is None and not place.times_s:  # as "after 3 s" does, it goes on to the end
            if place.kind == "after":
                return [(end_s, self.duration_s) for _, end_s in references]
            if place.kind == "before":
                return [(0.0, start_s) for start_s, _ in references]
        if place.kind == "after":
            return [(end_s + gap_s, self._end_of(end_s + gap_s, some_s)) for _, end_s in references]
        if place.kind == "before":
            return [(max(0.0, start_s - gap_s - some_s), start_s - gap_s) for start_s, _ in references]
        return [
            (start_s, end_s if length_s is None else self._end_of(start_s, length_s))
            for start_s, end_s in references
        ]

    def _reference(
        self, targets: Sequence[Target], may_be_several: bool = False
    ) -> list[tuple[float, float]]:
        """The seconds of events beside which an edit is.

        Raises:
            InstructionQuestion: there are none of that name, or several.
        """
        nouns, selection = self.nouns, self.selection
        self.selection = None  # the selected seconds are those of the edit
        hits = [hit for target in targets for hit in self.hits(target)]
        self.nouns, self.selection = nouns, selection
        is_all = all(target.kind in ("all_of", "both") for target in targets)
        if not (may_be_several or is_all) and len(hits) != 1:
            raise InstructionQuestion(
                f"There are {len(hits)} sounds of the name “{targets[0].text}”. Say which, as in “after the first "
                f"{targets[0].text}” or “after every {targets[0].text}”."
            )
        return [(hit.start_s, hit.end_s) for hit in hits]

    def _end_of(self, start_s: float, length_s: float) -> float:
        """The end of what begins at a time, cut to the recording."""
        return min(start_s + length_s, self.duration_s) if start_s < self.duration_s else start_s + length_s

    def _inside(self, start_s: float, end_s: float) -> tuple[float, float]:
        """
        Raises:
            InstructionQuestion: the recording does not have these seconds.
        """
        inside_s = min(end_s, self.duration_s) if end_s <= self.duration_s + LATE_S else end_s
        if not 0 <= start_s < inside_s <= self.duration_s:
            raise InstructionQuestion(
                f"The words name {format_span(start_s, end_s)}, and the recording has {self.duration_s:.4g} s: "
                "name times inside of it, or extend it first."
            )
        return start_s, inside_s


# Private


def _is_part(place: Place) -> bool:
    """Whether a place is a part of an event: "the first half of the bell"."""
    is_named = bool(place.targets) and all(target.kind not in PLACELESS for target in place.targets)
    return is_named and place.kind in ("edge", "edge_span", "half")


def _says_seconds(place: Place, sounds: NamedSounds) -> bool:
    """Whether a place says from when to when a sound is meant that no event of that name is in."""
    if sounds.events:
        return place.kind in _SECONDS_PLACES
    return bool(sounds.background or place.times_s or place.kind not in ("after", "before"))
