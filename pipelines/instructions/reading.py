"""An instruction in everyday words as edits: one for each event that it names, or a question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from audiollm.data.records.thoughts import ThoughtEvent, ThoughtRecord
from pipelines.instructions.clauses import Clause, NewSound, Place, Target, parse_clauses
from pipelines.instructions.events import name_stems, sounds_with_names
from pipelines.instructions.resolution import (
    LATE_S,
    PLACELESS,
    Hit,
    InstructionQuestion,
    SoundResolver,
    format_span,
)
from pipelines.instructions.tokens import instruction_tokens, plain_text

EditKind = Literal["extend", "inpaint", "add", "remove", "extract", "mute"]
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
        raise _build_unread_question(plain, names, record)
    return _Reader(record, duration_s, span, has_object).read(clauses)


def names_times(text: str) -> bool:
    """Whether words say where in a recording something is to be."""
    return any(token.type in _TIME_TOKENS for token in instruction_tokens(plain_text(text), ()))


# Private

_TIME_TOKENS = frozenset(["NUM", "CLOCK", "UNIT", "FIRST", "LAST", "START", "MIDDLE", "END"])


def _build_unread_question(plain: str, names: frozenset[str], record: ThoughtRecord) -> InstructionQuestion:
    tokens = instruction_tokens(plain, names)
    refused = [str(token) for token in tokens if token.type == "REFUSED"]
    if refused:
        return InstructionQuestion(f"“{refused[0]}” is no edit of the studio. {_WHAT_IS_DONE}")
    choices = [
        f"{verb} the {sound}" for sound in sounds_with_names(record)[:1] for verb in ("remove", "keep only")
    ]
    return InstructionQuestion(f"The words fit no operation. {_WHAT_IS_DONE}", choices, is_open=True)


class _Reader:
    """Carries out clauses one after another."""

    def __init__(
        self, record: ThoughtRecord, duration_s: float, span: tuple[float, float] | None, has_object: bool
    ) -> None:
        self._record, self._has_object = record, has_object
        self._resolver = SoundResolver(record, duration_s, span, has_object)
        self._protected: list[Target] = []
        self._last_hits: list[Hit] = []
        """What "it" stands for."""
        self._edits: list[tuple[EditPlan, Hit | None]] = []

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
            self._last_hits = self._resolver.area_hits(clause.places)
            for hit in self._last_hits:
                self._add_edits("remove" if hit.caption else "mute", [hit])
            return
        for target in _with_places(clause):
            if target.kind == "nothing":
                continue
            if target.excepted and target.kind in PLACELESS:
                self._extraction(list(target.excepted), list(target.places))
            elif target.kind in ("remaining", "everything") and self._protected and not target.places:
                self._extraction([replace(protected, places=()) for protected in self._protected], [])
                self._protected = []
            elif target.kind == "remaining":
                raise InstructionQuestion(
                    "Say which sounds are to go, or which alone are to stay, as in “keep only the rain”."
                )
            elif target.kind in PLACELESS:
                self._placeless_removal(target)
            else:
                self._last_hits = self._resolver.hits(target)
                self._add_edits("remove", self._last_hits)

    def _placeless_removal(self, target: Target) -> None:
        if target.kind == "pointed" and self._last_hits and not target.places:
            self._add_edits("remove" if self._last_hits[0].caption else "mute", self._last_hits)
        elif target.kind == "pointed" and self._has_object:
            start_s, end_s = (
                self._resolver.spans(target.places)[0] if target.places else self._resolver.selected_or_all()
            )
            self._edits.append((EditPlan("remove", "", start_s, end_s), None))
        elif target.kind == "everything" and not target.places and self._resolver.selection is None:
            self._add_edits("mute", [Hit("", 0.0, self._resolver.duration_s)])
        else:
            self._last_hits = self._resolver.area_hits(target.places)
            self._add_edits("mute", self._last_hits)

    def _keeping(self, clause: Clause) -> None:
        targets = _with_places(clause)
        self._extraction([replace(target, places=()) for target in targets], list(targets[-1].places))

    def _extraction(self, targets: list[Target], places: list[Place]) -> None:
        """One sound alone, with silence around it where events are named.

        Raises:
            InstructionQuestion: several events are named, or no sound is.
        """
        pointed = [target for target in targets if target.kind in PLACELESS or target.kind == "nothing"]
        if pointed:
            self._pointed_extraction(pointed[0], places)
            return
        hits = [self._resolver.hits(target, everywhere=True) for target in targets]
        for target in targets:
            if target.excepted or (
                self._resolver.events(target).events and target.kind not in ("named", "all_of")
            ):
                single = [hit for found_hits in hits for hit in found_hits]
                if len(single) != 1:
                    raise InstructionQuestion(
                        "One stretch at a time can be kept alone: name one event, or all of a kind.",
                        [
                            f"keep only the {hit.caption} from {format_span(hit.start_s, hit.end_s)}"
                            for hit in single
                        ],
                    )
                self._add_edits("extract", single)
                return
        names = list(dict.fromkeys(hit.caption for found_hits in hits for hit in found_hits))
        start_s, end_s = self._resolver.spans(places)[0] if places else self._resolver.selected_or_all()
        self._edits.append((EditPlan("extract", " and ".join(names), start_s, end_s), None))

    def _pointed_extraction(self, target: Target, places: list[Place]) -> None:
        if target.kind == "pointed" and self._has_object:
            start_s, end_s = self._resolver.spans(places)[0] if places else self._resolver.selected_or_all()
            self._edits.append((EditPlan("extract", "", start_s, end_s), None))
            return
        if places or self._resolver.selection is not None:
            start_s, end_s = self._resolver.spans(places)[0] if places else self._resolver.selected_or_all()
            parts = [(0.0, start_s), (end_s, self._resolver.duration_s)]
            choices = [
                " and ".join(f"mute {format_span(*span)}" for span in parts if span[1] - span[0] > LATE_S)
            ]
            raise InstructionQuestion(
                "The studio does not shorten a recording. What surrounds these seconds can be muted.", choices
            )
        raise InstructionQuestion(
            "Say which sound to keep, as in “keep only the bell”, or click its object in the picture."
        )

    def _protection(self, clause: Clause) -> None:
        self._resolver.nouns = next(
            (target.words for target in clause.targets if target.words), self._resolver.nouns
        )
        for target in clause.targets:
            if target.kind in PLACELESS and target.excepted and "DENY" not in clause.words:
                for excepted in target.excepted:
                    self._add_edits("remove", self._resolver.hits(excepted))

    def _replacement(self, clause: Clause) -> None:
        (sound,) = clause.sounds
        if not sound.text:
            raise InstructionQuestion("Name the sound that is to come, as in “replace the dog with a cat”.")
        hits = self._replaced_hits(clause)
        for hit in hits:
            if hit.is_background and hit.end_s - hit.start_s >= self._resolver.duration_s - LATE_S:
                self._add_edits("remove", [hit])
                if sound.text != "silence":
                    self._add_edits("add", [replace(hit, caption=sound.text)])
            else:
                self._add_edits("mute" if sound.text == "silence" else "inpaint", [hit], sound.text)

    _reversed_replacement = _replacement

    def _half_replacement(self, clause: Clause) -> None:
        named = [target.text for target in clause.targets if target.kind not in PLACELESS]
        if named:
            raise InstructionQuestion(
                f"By what is the {named[0]} to be replaced? Say “replace the {named[0]} with a bell”."
            )
        self._add_edits("inpaint", self._replaced_hits(clause), "")

    def _filling(self, clause: Clause) -> None:
        if clause.sounds and not (clause.targets and clause.targets[0].kind not in PLACELESS | {"nothing"}):
            self._replacement(replace(clause, targets=[t for t in clause.targets if t.kind in PLACELESS]))
            return
        if clause.sounds:
            self._replacement(clause)
            return
        named = [target for target in clause.targets if target.kind not in PLACELESS]
        if named:
            places = list(named[-1].places) or clause.places
            self._add_edits(
                "inpaint", self._resolver.area_hits(places), " and ".join(target.text for target in named)
            )
            return
        self._add_edits("inpaint", self._replaced_hits(clause), "")

    def _redoing(self, clause: Clause) -> None:
        if any(target.kind not in PLACELESS for target in clause.targets):
            hits = [hit for target in _with_places(clause) for hit in self._resolver.hits(target)]
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
            for start_s, end_s in self._resolver.new_spans(sound, places):
                self._edits.append((EditPlan("add", sound.text, start_s, end_s), None))

    def _silence(self, sound: NewSound, places: list[Place]) -> None:
        """
        Raises:
            InstructionQuestion: silence would push the rest of the recording back.
        """
        lengths = [
            place for place in places if place.kind in ("span", "edge_span", "half", "everywhere", "here")
        ]
        if lengths or (not places and self._resolver.selection is not None and sound.length_s is None):
            self._add_edits(
                "mute",
                [Hit("", *span) for span in self._resolver.spans(places)]
                if places
                else self._resolver.area_hits(()),
            )
            return
        spans = self._resolver.spans(places, sound.length_s) if places else []
        raise InstructionQuestion(
            "Silence cannot be put between two moments: a recording keeps its length. A part of it can be muted.",
            [f"mute {format_span(*span)}" for span in spans],
        )

    def _extension(self, clause: Clause) -> None:
        if "START" in {word for place in clause.places for word in place.words}:
            raise InstructionQuestion(
                "A recording is extended at its end: say “extend it by three seconds”.", ["extend it by 3 s"]
            )
        caption = " and ".join(sound.text for sound in clause.sounds)
        named = [target for target in clause.targets if target.kind not in PLACELESS]
        caption = caption or " and ".join(
            self._resolver.events(target).background or self._resolver.name(target) for target in named
        )
        if not clause.lengths:
            raise InstructionQuestion("By how much? Say “extend it by three seconds”.", ["extend it by 3 s"])
        length = clause.lengths[0]
        is_end = length.is_end or bool(clause.words & {"LAST", "LASTS"} and not length.is_more)
        end_s = length.seconds if is_end else self._resolver.duration_s + length.seconds
        if end_s <= self._resolver.duration_s:
            raise InstructionQuestion(
                f"The recording already lasts {self._resolver.duration_s:.4g} s: name a later end, or say by how much.",
                ["extend it by 3 s"],
            )
        self._edits.append(
            (EditPlan("extend", caption or self._going_on(), self._resolver.duration_s, end_s), None)
        )
        self._resolver.duration_s = end_s  # for the clauses after this one

    def _shortening(self, clause: Clause) -> None:
        named = [target for target in _with_places(clause) if target.kind not in PLACELESS]
        if named:
            for target in named:
                self._add_edits("remove", self._resolver.hits(target))
            return
        places = [*(place for target in clause.targets for place in target.places), *clause.places]
        spans = (
            self._resolver.spans(places)
            if places
            else [self._resolver.selection]
            if self._resolver.selection
            else []
        )
        raise InstructionQuestion(
            "The studio does not shorten a recording. A part of it can be muted, or filled with another sound.",
            [f"{verb} {format_span(*span)}" for span in spans for verb in ("mute", "fill")],
        )

    def _replaced_hits(self, clause: Clause) -> list[Hit]:
        """What is replaced, filled or made anew: the sounds of targets, or the seconds of places."""
        targets = _with_places(clause)
        hits: list[Hit] = []
        for target in targets:
            if target.kind == "pointed" and self._last_hits and not target.places:
                self._edits = [edit for edit in self._edits if edit[1] not in self._last_hits]
                hits += self._last_hits
            elif target.kind in PLACELESS:
                hits += self._resolver.area_hits(target.places)
            else:
                hits += self._resolver.hits(target)
        hits = hits if targets else self._resolver.area_hits(clause.places)
        self._last_hits = hits
        return hits

    def _going_on(self) -> str:
        """The sounds that a continuation has: the background, and what sounds at the end."""
        last = [
            event.sound for event in self._record.events if event.end_s >= self._resolver.duration_s - 0.2
        ]
        named = sounds_with_names(
            ThoughtRecord(background=list(dict.fromkeys([*self._record.background, *last]))[:8])
        )
        return " and ".join(named)

    # edits

    def _add_edits(self, kind: EditKind, hits: Sequence[Hit], caption: str | None = None) -> None:
        for hit in hits:
            text = "" if kind == "mute" else hit.caption if caption is None else caption
            self._edits.append((EditPlan(kind, text, hit.start_s, hit.end_s), hit))

    def _spare_protected(self) -> None:
        """Leave out edits of events that are to stay.

        Raises:
            InstructionQuestion: seconds that are to change hold a sound that is to stay.
        """
        events = [event for target in self._protected if target.kind not in PLACELESS
                  for event in self._protected_events(target)]  # fmt: skip
        spared = [edit for edit in self._edits if not (edit[1] is not None and edit[1].event in events)]
        for plan, _ in spared:
            inside = [event.sound for event in events if plan.kind in ("mute", "inpaint")
                      and event.start_s < plan.end_s - LATE_S and event.end_s > plan.start_s + LATE_S]  # fmt: skip
            if inside:
                raise InstructionQuestion(
                    f"The {inside[0]} in {format_span(plan.start_s, plan.end_s)} is to stay: name other seconds."
                )
        self._edits = spared

    def _protected_events(self, target: Target) -> list[ThoughtEvent]:
        events = list(self._resolver.events(target).events)
        if target.kind == "ordinal":
            return [events[order] for order in target.orders if -len(events) <= order < len(events)]
        return events


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
