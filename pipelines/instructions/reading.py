"""An instruction in everyday words as edits: one for each event that it names, or a question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from audiollm.data.records.thoughts import ThoughtEvent, ThoughtRecord
from pipelines.instructions.clauses import Clause, Moment, NewSound, Place, Target, parse_clauses
from pipelines.instructions.events import NamedSounds, name_stems, named_sounds, sounds_with_names
from pipelines.instructions.tokens import instruction_tokens, plain_text

EditKind = Literal["extend", "inpaint", "add", "remove", "extract", "mute"]
_DEFAULT_LENGTH_S = 1.0
"""Length of an edit of which the words name the beginning alone."""
_NEAR_S = 0.25
"""A time names an event that is at most this far."""
_LATE_S = 0.05
"""A time may lie this much after the end: times are rounded."""
_MAX_CHOICES = 5
_OPEN_PLACES = frozenset({"onward", "upto", "half", "between", "during", "stretch", "since_event", "until_event"})
"""Places that say among which events to look, where "from 2 to 4 s" says the seconds themselves."""
_SECONDS_PLACES = frozenset({"span", "edge_span", "everywhere", "here"})
"""Places that say from when to when."""
_PLACELESS = frozenset({"track", "pointed", "everything", "remaining"})
"""Targets that name no sound."""
_WHAT_IS_DONE = (
    "Say what to remove, mute, keep, replace, fill, add or extend, as in “take the dog out”, “mute 2 to 3 s”, “keep "
    "only the rain”, “replace the dog with a cat”, “fill 3 to 4 s with rain”, “add a bell at 2 s” or “let it rain on "
    "for three seconds”."
)


@dataclass(frozen=True)
class EditPlan:
    """An edit that words ask for."""

    kind: EditKind
    caption: str
    """The sound, as words; empty: what is pointed at, or fits around."""
    start_s: float
    end_s: float


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


def read_instruction(
    text: str,
    record: ThoughtRecord,
    duration_s: float,
    span: tuple[float, float] | None = None,
    has_object: bool = False,
) -> list[EditPlan]:
    """Turn words into edits, in the order in which they are carried out.

    Args:
        record: the chain of thought, whose events say where the sounds are that the words name.
        span: the selected seconds, which count where the words name neither times nor single events.
        has_object: whether an object in the pictures is pointed at.

    Raises:
        InstructionQuestion: they fit no operation, say that something is not to be done, name what is not there, or may
            mean several things.
    """
    plain = plain_text(text)
    names = name_stems(record)
    clauses = parse_clauses(plain, names)
    if clauses is None:
        raise _unread(plain, names, record)
    return _Reader(record, duration_s, span, has_object).read(clauses)


def names_times(text: str) -> bool:
    """Whether words say where in a recording something is to be."""
    return any(token.type in _TIME_TOKENS for token in instruction_tokens(plain_text(text), ()))


# Private

_TIME_TOKENS = frozenset(["NUM", "CLOCK", "UNIT", "FIRST", "LAST", "START", "MIDDLE", "END"])


@dataclass(frozen=True)
class _Hit:
    """A sound that is there, with its seconds."""

    caption: str
    start_s: float
    end_s: float
    event: ThoughtEvent | None = None
    is_background: bool = False


def _unread(plain: str, names: frozenset[str], record: ThoughtRecord) -> InstructionQuestion:
    tokens = instruction_tokens(plain, names)
    refused = [str(token) for token in tokens if token.type == "REFUSED"]
    if refused:
        return InstructionQuestion(f"“{refused[0]}” is no edit of the studio. {_WHAT_IS_DONE}")
    choices = [
        f"{verb} the {sound}" for sound in sounds_with_names(record)[:1] for verb in ("remove", "keep only")
    ]
    return InstructionQuestion(f"The words fit no operation. {_WHAT_IS_DONE}", choices, is_open=True)


def _times(start_s: float, end_s: float) -> str:
    start, end = (f"{second:.3f}".rstrip("0").rstrip(".") for second in (start_s, end_s))
    return f"{start} to {end} s"


class _Reader:
    """Resolves clauses by the events of a record."""

    def __init__(
        self, record: ThoughtRecord, duration_s: float, span: tuple[float, float] | None, has_object: bool
    ) -> None:
        self._record, self._duration_s, self._selection, self._has_object = (
            record,
            duration_s,
            span,
            has_object,
        )
        self._protected: list[Target] = []
        self._nouns: tuple[str, ...] = ()
        """The noun that "the second one" stands for."""
        self._last_hits: list[_Hit] = []
        """What "it" stands for."""
        self._edits: list[tuple[EditPlan, _Hit | None]] = []

    def read(self, clauses: Sequence[Clause]) -> list[EditPlan]:
        self._protected = [target for clause in clauses for target in _protected_targets(clause)]
        denials = [clause for clause in clauses if clause.action == "protection" and not clause.targets]
        for clause in clauses:
            handler: Callable[[Clause], None] = getattr(self, f"_{clause.action}")
            handler(clause)
        self._spare_protected()
        if not self._edits or denials:
            raise InstructionQuestion(
                f"The words say what is not to be done, or that something stays. {_WHAT_IS_DONE}"
            )
        return list(dict.fromkeys(plan for plan, _ in self._edits))

    # actions

    def _removal(self, clause: Clause) -> None:
        if not clause.targets:
            self._last_hits = self._area_hits(clause.places)
            for hit in self._last_hits:
                self._add_edits("remove" if hit.caption else "mute", [hit])
            return
        for target in _with_places(clause):
            if target.kind == "nothing":
                continue
            if target.excepted and target.kind in _PLACELESS:
                self._extraction(list(target.excepted), list(target.places))
            elif target.kind in ("remaining", "everything") and self._protected and not target.places:
                self._extraction([replace(kept, places=()) for kept in self._protected], [])
                self._protected = []
            elif target.kind == "remaining":
                raise InstructionQuestion(
                    "Say which sounds are to go, or which alone are to stay, as in “keep only the rain”."
                )
            elif target.kind in _PLACELESS:
                self._placeless_removal(target)
            else:
                self._last_hits = self._hits(target)
                self._add_edits("remove", self._last_hits)

    def _placeless_removal(self, target: Target) -> None:
        if target.kind == "pointed" and self._last_hits and not target.places:
            self._add_edits("remove" if self._last_hits[0].caption else "mute", self._last_hits)
        elif target.kind == "pointed" and self._has_object:
            start_s, end_s = self._spans(target.places)[0] if target.places else self._selected_or_all()
            self._edits.append((EditPlan("remove", "", start_s, end_s), None))
        elif target.kind == "everything" and not target.places and self._selection is None:
            self._add_edits("mute", [_Hit("", 0.0, self._duration_s)])
        else:
            self._last_hits = self._area_hits(target.places)
            self._add_edits("mute", self._last_hits)

    def _keeping(self, clause: Clause) -> None:
        targets = _with_places(clause)
        self._extraction([replace(target, places=()) for target in targets], list(targets[-1].places))

    def _extraction(self, targets: list[Target], places: list[Place]) -> None:
        """One sound alone, with silence around it where events are named.

        Raises:
            InstructionQuestion: several events are named, or no sound is.
        """
        pointed = [target for target in targets if target.kind in _PLACELESS or target.kind == "nothing"]
        if pointed:
            self._pointed_extraction(pointed[0], places)
            return
        hits = [self._hits(target, everywhere=True) for target in targets]
        for target in targets:
            if target.excepted or (self._events(target).events and target.kind not in ("named", "all_of")):
                single = [hit for found_hits in hits for hit in found_hits]
                if len(single) != 1:
                    raise InstructionQuestion(
                        "One stretch at a time can be kept alone: name one event, or all of a kind.",
                        [
                            f"keep only the {hit.caption} from {_times(hit.start_s, hit.end_s)}"
                            for hit in single
                        ],
                    )
                self._add_edits("extract", single)
                return
        names = list(dict.fromkeys(hit.caption for found_hits in hits for hit in found_hits))
        start_s, end_s = self._spans(places)[0] if places else self._selected_or_all()
        self._edits.append((EditPlan("extract", " and ".join(names), start_s, end_s), None))

    def _pointed_extraction(self, target: Target, places: list[Place]) -> None:
        if target.kind == "pointed" and self._has_object:
            start_s, end_s = self._spans(places)[0] if places else self._selected_or_all()
            self._edits.append((EditPlan("extract", "", start_s, end_s), None))
            return
        if places or self._selection is not None:
            start_s, end_s = self._spans(places)[0] if places else self._selected_or_all()
            parts = [(0.0, start_s), (end_s, self._duration_s)]
            choices = [" and ".join(f"mute {_times(*part)}" for part in parts if part[1] - part[0] > _LATE_S)]
            raise InstructionQuestion(
                "The studio does not shorten a recording. What surrounds these seconds can be muted.", choices
            )
        raise InstructionQuestion(
            "Say which sound to keep, as in “keep only the bell”, or click its object in the picture."
        )

    def _protection(self, clause: Clause) -> None:
        self._nouns = next((target.words for target in clause.targets if target.words), self._nouns)
        for target in clause.targets:
            if target.kind in _PLACELESS and target.excepted and "DENY" not in clause.words:
                for excepted in target.excepted:
                    self._add_edits("remove", self._hits(excepted))

    def _replacement(self, clause: Clause) -> None:
        (sound,) = clause.sounds
        if not sound.text:
            raise InstructionQuestion("Name the sound that is to come, as in “replace the dog with a cat”.")
        hits = self._replaced_hits(clause)
        for hit in hits:
            if hit.is_background and hit.end_s - hit.start_s >= self._duration_s - _LATE_S:
                self._add_edits("remove", [hit])
                if sound.text != "silence":
                    self._add_edits("add", [replace(hit, caption=sound.text)])
            else:
                self._add_edits("mute" if sound.text == "silence" else "inpaint", [hit], sound.text)

    _reversed_replacement = _replacement

    def _half_replacement(self, clause: Clause) -> None:
        named = [target.text for target in clause.targets if target.kind not in _PLACELESS]
        if named:
            raise InstructionQuestion(
                f"By what is the {named[0]} to be replaced? Say “replace the {named[0]} with a bell”."
            )
        self._add_edits("inpaint", self._replaced_hits(clause), "")

    def _filling(self, clause: Clause) -> None:
        if clause.sounds and not (clause.targets and clause.targets[0].kind not in _PLACELESS | {"nothing"}):
            self._replacement(replace(clause, targets=[t for t in clause.targets if t.kind in _PLACELESS]))
            return
        if clause.sounds:
            self._replacement(clause)
            return
        named = [target for target in clause.targets if target.kind not in _PLACELESS]
        if named:
            places = list(named[-1].places) or clause.places
            self._add_edits("inpaint", self._area_hits(places), " and ".join(target.text for target in named))
            return
        self._add_edits("inpaint", self._replaced_hits(clause), "")

    def _redoing(self, clause: Clause) -> None:
        if any(target.kind not in _PLACELESS for target in clause.targets):
            hits = [hit for target in _with_places(clause) for hit in self._hits(target)]
            for hit in hits:
                self._add_edits("inpaint", [hit], "" if "REPAIR" in clause.words else hit.caption)
            return
        self._add_edits("inpaint", self._replaced_hits(clause), "")

    def _addition(self, clause: Clause) -> None:
        for sound in clause.sounds:
            places = [*sound.places, *clause.places]
            if sound.text == "silence":
                self._silence(sound, places)
                continue
            if not sound.text and not self._has_object:
                raise InstructionQuestion(
                    "Say which sound to add, as in “add a bell at 2 s”, or click its object in the picture."
                )
            for start_s, end_s in self._new_spans(sound, places):
                self._edits.append((EditPlan("add", sound.text, start_s, end_s), None))

    def _silence(self, sound: NewSound, places: list[Place]) -> None:
        """
        Raises:
            InstructionQuestion: silence would push the rest of the recording back.
        """
        lengths = [
            place for place in places if place.kind in ("span", "edge_span", "half", "everywhere", "here")
        ]
        if lengths or (not places and self._selection is not None and sound.length_s is None):
            self._add_edits(
                "mute", [_Hit("", *part) for part in self._spans(places)] if places else self._area_hits(())
            )
            return
        spans = self._spans(places, sound.length_s) if places else []
        raise InstructionQuestion(
            "Silence cannot be put between two moments: a recording keeps its length. A part of it can be muted.",
            [f"mute {_times(*part)}" for part in spans],
        )

    def _extension(self, clause: Clause) -> None:
        if "START" in {word for place in clause.places for word in place.words}:
            raise InstructionQuestion(
                "A recording is extended at its end: say “extend it by three seconds”.", ["extend it by 3 s"]
            )
        caption = " and ".join(sound.text for sound in clause.sounds)
        named = [target for target in clause.targets if target.kind not in _PLACELESS]
        caption = caption or " and ".join(
            self._events(target).background or self._name(target) for target in named
        )
        if not clause.lengths:
            raise InstructionQuestion("By how much? Say “extend it by three seconds”.", ["extend it by 3 s"])
        length = clause.lengths[0]
        is_end = length.is_end or bool(clause.words & {"LAST", "LASTS"} and not length.is_more)
        end_s = length.seconds if is_end else self._duration_s + length.seconds
        if end_s <= self._duration_s:
            raise InstructionQuestion(
                f"The recording already lasts {self._duration_s:.4g} s: name a later end, or say by how much.",
                ["extend it by 3 s"],
            )
        self._edits.append((EditPlan("extend", caption or self._going_on(), self._duration_s, end_s), None))
        self._duration_s = end_s  # for the clauses after this one

    def _shortening(self, clause: Clause) -> None:
        named = [target for target in _with_places(clause) if target.kind not in _PLACELESS]
        if named:
            for target in named:
                self._add_edits("remove", self._hits(target))
            return
        places = [*(place for target in clause.targets for place in target.places), *clause.places]
        spans = self._spans(places) if places else [self._selection] if self._selection else []
        raise InstructionQuestion(
            "The studio does not shorten a recording. A part of it can be muted, or filled with another sound.",
            [f"{verb} {_times(*part)}" for part in spans for verb in ("mute", "fill")],
        )

    # sounds that are there

    def _hits(self, target: Target, everywhere: bool = False) -> list[_Hit]:
        """The seconds of each sound that a target names.

        Args:
            everywhere: a sound that is no event may be anywhere.

        Raises:
            InstructionQuestion: there is none of that name, or several may be meant.
        """
        if target.kind in _PLACELESS or target.kind == "nothing":
            raise InstructionQuestion("Name the sound, as in “remove the dog”.")
        if target.words:
            self._nouns = target.words
        sounds = self._events(target)
        events = list(sounds.events)
        picks = target.kind in ("ordinal", "both", "counted", "single") or target.excepted
        if picks and (events or not sounds.background):
            return [self._event_hit(event) for event in self._picked(target, events)]
        if target.places:
            return self._placed_hits(target, sounds)
        if not everywhere and self._selection is not None:
            return [_Hit(self._name(target), *self._selection)]
        if sounds.background:
            return [_Hit(sounds.background, 0.0, self._duration_s, is_background=True)]
        if events:
            return [self._event_hit(event) for event in events]
        if everywhere and self._selection is not None:
            return [_Hit(self._name(target), 0.0, self._duration_s)]
        raise self._unknown(target)

    def _events(self, target: Target) -> NamedSounds:
        return named_sounds(target.words or self._nouns, self._record)

    def _name(self, target: Target) -> str:
        sounds = self._events(target)
        names = list(dict.fromkeys(event.sound for event in sounds.events))
        return sounds.background or (names[0] if len(names) == 1 else target.text)

    def _event_hit(self, event: ThoughtEvent) -> _Hit:
        return _Hit(event.sound, event.start_s, min(event.end_s, self._duration_s), event)

    def _placed_hits(self, target: Target, sounds: NamedSounds) -> list[_Hit]:
        """The hits of a name with places: events beside other events or at a time; else the seconds of the places."""
        hits: list[_Hit] = []
        lasting = [place for place in target.places if place.kind == "lasting"]
        for place in target.places:
            if place.kind == "lasting":
                continue
            hits_there = self._hits_there(place, lasting, sounds, target)
            if not hits_there:
                spans = self._spans([place, *lasting], is_there=True)
                if not (lasting or _says_seconds(place, sounds)):
                    raise self._not_there(target, sounds, spans)
                hits_there = [_Hit(self._name(target), *part) for part in spans]
            hits += hits_there
        if not hits:
            raise InstructionQuestion("Say from when to when, as in “remove the dog from 2 to 4 s”.")
        return hits

    def _hits_there(
        self, place: Place, lasting: Sequence[Place], sounds: NamedSounds, target: Target
    ) -> list[_Hit]:
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
        parts = self._spans([place, *lasting], is_there=True)
        hits = [hit for part in parts for hit in self._hits_inside(sounds.events, part)]
        is_near = place.kind in ("after", "before")  # "a second before the bell" picks an event, and cuts none
        return [self._event_hit(hit.event) for hit in hits if hit.event] if is_near else hits

    def _third_hits(self, place: Place, sounds: NamedSounds) -> list[_Hit]:
        """The only event of a name in the third of the recording that "at the end" means."""
        third = next(n for n, word in enumerate(("START", "MIDDLE", "END")) if word in place.words)
        events = [
            event
            for event in sounds.events
            if third <= 1.5 * (event.start_s + event.end_s) / self._duration_s <= third + 1
        ]
        return [self._event_hit(event) for event in events] if len(events) == 1 else []

    def _not_there(
        self, target: Target, sounds: NamedSounds, spans: Sequence[tuple[float, float]]
    ) -> InstructionQuestion:
        name = self._name(target)
        choices = [f"remove the {name} from {_times(*part)}" for part in spans]
        if not sounds.events:
            return self._unknown(target, choices)
        return self._which(f"There is no {name} there. Which is meant?", sounds.events, choices)

    def _hits_inside(self, events: Sequence[ThoughtEvent], part: tuple[float, float]) -> list[_Hit]:
        """Events in some seconds, cut to them."""
        spans = [(max(event.start_s, part[0]), min(event.end_s, part[1])) for event in events]
        return [
            _Hit(event.sound, start_s, end_s, event)
            for event, (start_s, end_s) in zip(events, spans, strict=True)
            if end_s - start_s > _LATE_S
        ]

    def _beside(self, place: Place, events: Sequence[ThoughtEvent], target: Target) -> list[ThoughtEvent]:
        """The next events after or before another event.

        Raises:
            InstructionQuestion: there are none.
        """
        (start_s, end_s), *_ = self._reference(place.targets)
        if place.kind == "after":
            beside = [event for event in events if event.start_s >= end_s - _LATE_S]
        else:
            beside = [event for event in events if event.end_s <= start_s + _LATE_S][::-1]
        if events and not beside:
            raise InstructionQuestion(f"There is no {target.text} {place.kind} it.", self._names_in("remove"))
        is_plural = target.kind == "all_of" or (target.text.endswith("s") and not target.text.endswith("ss"))
        return sorted(beside, key=lambda event: event.start_s) if is_plural else beside[:1]

    def _picked(self, target: Target, events: list[ThoughtEvent]) -> list[ThoughtEvent]:
        """The events that are counted out, by their order or number.

        Raises:
            InstructionQuestion: there are not as many, or several may be meant.
        """
        name = " ".join(target.words or self._nouns) or "sound"
        if not events:
            raise self._unknown(target)
        if target.places:
            spans = self._spans(target.places, is_there=True)
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
            for part in target.excepted
            for hit in self._hits(replace(part, words=part.words or self._nouns))
        ]
        return [event for event in events if event not in excepted]

    def _which(
        self, sentence: str, events: Sequence[ThoughtEvent], choices: Sequence[str] = ()
    ) -> InstructionQuestion:
        named = [f"remove the {event.sound} from {_times(event.start_s, event.end_s)}" for event in events]
        return InstructionQuestion(sentence, [*choices, *named])

    def _unknown(self, target: Target, choices: Sequence[str] = ()) -> InstructionQuestion:
        name = " ".join(target.words)
        if not name:
            return InstructionQuestion(
                "Which sound? The words do not name it.", self._names_in("remove"), is_open=True
            )
        sounds = ", ".join(sounds_with_names(self._record))
        where = f"say from when to when, or “remove the {name} everywhere”"
        sentence = (
            f"“{name}” is not among the sounds of the chain of thought ({sounds}). Name one of them, or {where}."
            if sounds
            else f"The chain of thought names no sound: where is “{name}”? Select its seconds, or {where}."
        )
        pointed = ["remove this"] if self._has_object else []
        answers = [*choices, f"remove the {name} everywhere", *pointed, *self._names_in("remove")]
        return InstructionQuestion(sentence, answers, is_open=True)

    def _names_in(self, verb: str) -> list[str]:
        return [f"{verb} the {sound}" for sound in sounds_with_names(self._record)]

    def _replaced_hits(self, clause: Clause) -> list[_Hit]:
        """What is replaced, filled or made anew: the sounds of targets, or the seconds of places."""
        targets = _with_places(clause)
        hits: list[_Hit] = []
        for target in targets:
            if target.kind == "pointed" and self._last_hits and not target.places:
                self._edits = [edit for edit in self._edits if edit[1] not in self._last_hits]
                hits += self._last_hits
            elif target.kind in _PLACELESS:
                hits += self._area_hits(target.places)
            else:
                hits += self._hits(target)
        hits = hits if targets else self._area_hits(clause.places)
        self._last_hits = hits
        return hits

    # seconds

    def _area_hits(self, places: Sequence[Place]) -> list[_Hit]:
        """The seconds of places, or else the selected ones.

        Raises:
            InstructionQuestion: there are neither.
        """
        lasting = [place for place in places if place.kind == "lasting"]
        if places:
            return [
                _Hit(self._name(place.targets[0]) if _is_part(place) else "", *part)
                for place in places
                if place not in lasting or len(lasting) == len(places)
                for part in self._spans([place, *lasting], is_there=True)
            ]
        if self._selection is None:
            raise InstructionQuestion(
                "Which seconds? Say them, as in “fill 2 to 3 s with rain”, or select them on the waveform."
            )
        return [_Hit("", *self._selection)]

    def _selected_or_all(self) -> tuple[float, float]:
        return self._selection or (0.0, self._duration_s)

    def _new_spans(self, sound: NewSound, places: list[Place]) -> list[tuple[float, float]]:
        """The seconds of a sound that comes.

        Raises:
            InstructionQuestion: the words do not say when.
        """
        text = sound.text or "this"
        at_end = any(place.kind == "edge" and "END" in place.words for place in places)
        if sound.length_s is not None and (at_end or not places) and self._selection is None:
            start_s = max(0.0, self._duration_s - sound.length_s) if at_end else 0.0
            raise InstructionQuestion(
                f"Is the recording to become longer, or {text} to be added to what is there?",
                [f"extend it by {sound.length_s:g} s with {text}",
                 f"add {text} from {_times(start_s, min(start_s + sound.length_s, self._duration_s))}"],
            )  # fmt: skip
        if [place for place in places if place.kind != "lasting"]:
            return self._spans(places, sound.length_s)
        if self._selection is not None:
            length_s = next((place.times_s[0] for place in places), sound.length_s)
            start_s, end_s = self._selection
            return [(start_s, min(start_s + length_s, self._duration_s) if length_s else end_s)]
        if sound.is_single or places or not sound.text:
            raise InstructionQuestion(
                f"When is {text} to be heard? Say “add {text} at 2 s”, or select the seconds on the waveform.",
                [f"add {text} at the start", f"add {text} at the end", f"add {text} everywhere"],
                is_open=True,
            )
        return [(0.0, self._duration_s)]

    def _spans(
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
                spans += [self._inside(*part) for part in self._spans_of(place, length_s, is_there)]
        if not spans:
            raise InstructionQuestion("From when on? Say “from 2 to 4 s”, or “at 2 s for two seconds”.")
        return spans

    def _spans_of(self, place: Place, length_s: float | None, is_there: bool) -> list[tuple[float, float]]:
        duration_s, times_s = self._duration_s, place.times_s
        some_s = length_s or _DEFAULT_LENGTH_S
        if _is_part(place):
            return [
                self._part_of(place, part, length_s, is_there)
                for part in self._reference(place.targets, may_be_several=True)
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
                return [(hit.start_s, hit.end_s) for hit in self._area_hits(())]
        return self._spans_beside(place, length_s, is_there)

    def _second_of(self, moment: Moment) -> float:
        if moment.time_s is not None:
            return moment.time_s
        start_s, end_s = self._reference([moment.target])[0] if moment.target else (0.0, self._duration_s)
        return {"START": start_s, "MIDDLE": (start_s + end_s) / 2, "END": end_s}[moment.edge]

    def _part_of(
        self, place: Place, part: tuple[float, float], length_s: float | None, is_there: bool
    ) -> tuple[float, float]:
        """The seconds at an edge of an event, or a half of it.

        Raises:
            InstructionQuestion: the words do not say how many.
        """
        start_s, end_s = part
        if place.kind == "half":
            middle_s = (start_s + end_s) / 2
            return (start_s, middle_s) if "FIRST" in place.words else (middle_s, end_s)
        some_s = place.times_s[0] if place.times_s else length_s
        if "START" in place.words and not is_there:
            return start_s, self._end_of(start_s, some_s or _DEFAULT_LENGTH_S)
        if some_s is None or "MIDDLE" in place.words:
            name = place.targets[0].text
            raise InstructionQuestion(
                f"From when to when? The {name} lasts from {_times(start_s, end_s)}.",
                [f"mute {_times(start_s, end_s)}"] if is_there else [],
            )
        if place.words & {"START", "FIRST"}:
            return start_s, min(start_s + some_s, end_s)
        return max(end_s - some_s, start_s), end_s

    def _spans_beside(
        self, place: Place, length_s: float | None, is_there: bool
    ) -> list[tuple[float, float]]:
        """The seconds after, before, between or during events.

        Of what is there, "the two seconds before the bell" are two seconds; what comes "two seconds before the bell" ends
        as long before it.
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
                return [(end_s, self._duration_s) for _, end_s in references]
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
        nouns, selection = self._nouns, self._selection
        self._selection = None  # the selected seconds are those of the edit
        hits = [hit for target in targets for hit in self._hits(target)]
        self._nouns, self._selection = nouns, selection
        is_all = all(target.kind in ("all_of", "both") for target in targets)
        if not (may_be_several or is_all) and len(hits) != 1:
            raise InstructionQuestion(
                f"There are {len(hits)} sounds of the name “{targets[0].text}”. Say which, as in “after the first "
                f"{targets[0].text}” or “after every {targets[0].text}”."
            )
        return [(hit.start_s, hit.end_s) for hit in hits]

    def _end_of(self, start_s: float, length_s: float) -> float:
        """The end of what begins at a time, cut to the recording."""
        return min(start_s + length_s, self._duration_s) if start_s < self._duration_s else start_s + length_s

    def _inside(self, start_s: float, end_s: float) -> tuple[float, float]:
        """
        Raises:
            InstructionQuestion: the recording does not have these seconds.
        """
        inside_s = min(end_s, self._duration_s) if end_s <= self._duration_s + _LATE_S else end_s
        if not 0 <= start_s < inside_s <= self._duration_s:
            raise InstructionQuestion(
                f"The words name {_times(start_s, end_s)}, and the recording has {self._duration_s:.4g} s: "
                "name times inside of it, or extend it first."
            )
        return start_s, inside_s

    def _going_on(self) -> str:
        """The sounds that a continuation has: the background, and what sounds at the end."""
        last = [event.sound for event in self._record.events if event.end_s >= self._duration_s - 0.2]
        named = sounds_with_names(
            ThoughtRecord(background=list(dict.fromkeys([*self._record.background, *last]))[:8])
        )
        return " and ".join(named)

    # edits

    def _add_edits(self, kind: EditKind, hits: Sequence[_Hit], caption: str | None = None) -> None:
        for hit in hits:
            text = "" if kind == "mute" else hit.caption if caption is None else caption
            self._edits.append((EditPlan(kind, text, hit.start_s, hit.end_s), hit))

    def _spare_protected(self) -> None:
        """Leave out edits of events that are to stay.

        Raises:
            InstructionQuestion: seconds that are to change hold a sound that is to stay.
        """
        events = [event for target in self._protected if target.kind not in _PLACELESS
                  for event in self._protected_events(target)]  # fmt: skip
        spared = [edit for edit in self._edits if not (edit[1] is not None and edit[1].event in events)]
        for plan, _ in spared:
            inside = [event.sound for event in events if plan.kind in ("mute", "inpaint")
                      and event.start_s < plan.end_s - _LATE_S and event.end_s > plan.start_s + _LATE_S]  # fmt: skip
            if inside:
                raise InstructionQuestion(
                    f"The {inside[0]} in {_times(plan.start_s, plan.end_s)} is to stay: name other seconds."
                )
        self._edits = spared

    def _protected_events(self, target: Target) -> list[ThoughtEvent]:
        events = list(self._events(target).events)
        if target.kind == "ordinal":
            return [events[order] for order in target.orders if -len(events) <= order < len(events)]
        return events


def _is_part(place: Place) -> bool:
    """Whether a place is a part of an event: "the first half of the bell"."""
    is_named = bool(place.targets) and all(target.kind not in _PLACELESS for target in place.targets)
    return is_named and place.kind in ("edge", "edge_span", "half")


def _says_seconds(place: Place, sounds: NamedSounds) -> bool:
    """Whether a place says from when to when a sound is meant that no event of that name is in."""
    if sounds.events:
        return place.kind in _SECONDS_PLACES
    return bool(sounds.background or place.times_s or place.kind not in ("after", "before"))


def _protected_targets(clause: Clause) -> list[Target]:
    if clause.action != "protection":
        return []
    return [target for target in clause.targets if not target.excepted]


def _with_places(clause: Clause) -> list[Target]:
    """The targets of a clause; one without places has those of the next one that has any, or of the clause."""
    targets: list[Target] = []
    places = tuple(clause.places)
    for target in reversed(clause.targets):
        places = target.places or places
        targets.append(replace(target, places=places))
    return targets[::-1]
