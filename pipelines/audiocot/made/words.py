"""Words of made pairs and edits: captions as sound models are trained with, and instructions in everyday words."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

from audiollm.data.records.thoughts import caption_of_record, prose_of
from audiollm.flow.conditions.edit_texts import edit_words
from pipelines.audiocot.made.plans import MadePlan

_REQUESTS = (
    "{asked} {where}.",
    "{where}, {asked}.",
    "please {asked} {where}.",
    "{where}, please {asked}.",
    "can you {asked} {where}?",
    "I want you to {asked} {where}.",
)
_SPANS = ("from {start} to {end} seconds", "between {start} and {end} seconds")


@dataclass(frozen=True)
class _Wordings:
    """Wordings of an operation: ways to ask for it, in several frames, with several ways to say where or how long.

    Of each way to ask some frames are held out, so that a model knows every word of a wording that it is tested with,
    and has never met them together. `unframed` ones fit no frame, and are for training.
    """

    frames: tuple[str, ...]
    requests: tuple[str, ...]
    where: tuple[str, ...]
    unframed: tuple[str, ...]

    def sentences(self, held_out: bool) -> tuple[str, ...]:
        sentences = [
            frame.replace("{asked}", request).replace("{where}", where)
            for frame_number, frame in enumerate(self.frames)
            for request_number, request in enumerate(self.requests)
            if ((frame_number + request_number) % _HELD_OUT_EVERY == 0) == held_out
            for where in self.where
        ]
        return tuple(sentences if held_out else [*sentences, *self.unframed])


_HELD_OUT_EVERY = 4
"""One in so many pairs of a way to ask and a frame is held out."""
_WORDINGS = {
    "extend": _Wordings(
        frames=(
            "let it {asked} {where}.",
            "let {sound} {asked} {where}.",
            "make it {asked} {where}.",
            "please let it {asked} {where}.",
            "can you make it {asked} {where}?",
            "I want it to {asked} {where}.",
        ),
        requests=("go on", "continue", "last", "run on", "keep going"),
        where=(
            "until {end} seconds",
            "to {end} seconds",
            "for {more} more seconds",
            "for {more} seconds more",
            "for another {more} seconds",
        ),
        unframed=(
            "make it {more} seconds longer.",
            "stretch it to {end} seconds.",
            "I need {more} seconds more of this.",
            "add {more} seconds at the end.",
            "it ends too early: go on until {end} seconds.",
        ),
    ),
    "inpaint": _Wordings(
        frames=_REQUESTS,
        requests=(
            "fill the gap",
            "fill in what is missing",
            "fill in {sound}",
            "repair the sound",
            "redo the sound",
            "make the sound anew",
            "replace the part",
            "put {sound} in the gap",
        ),
        where=_SPANS,
        unframed=(
            "there is a gap from {start} to {end} seconds.",
            "something is missing between {start} and {end} seconds: fill it in.",
            "the hole from {start} to {end} seconds should be {sound}.",
        ),
    ),
    "add": _Wordings(
        frames=_REQUESTS,
        requests=(
            "add {sound}",
            "put {sound} in",
            "mix in {sound}",
            "let me hear {sound}",
            "play {sound}",
            "lay {sound} over it",
            "insert {sound}",
        ),
        where=("at {start} seconds", "from {start} seconds on", *_SPANS),
        unframed=(
            "I want to hear {sound} at {start} seconds.",
            "there should be {sound} from {start} to {end} seconds.",
            "also {sound}, from {start} to {end} seconds.",
        ),
    ),
    "remove": _Wordings(
        frames=(
            "{asked}.",
            "{asked}, please.",
            "please {asked}.",
            "can you {asked}?",
            "I want you to {asked}.",
            "you can {asked}.",
        ),
        requests=(
            "take out {sound}",
            "take {sound} away",
            "remove {sound}",
            "get rid of {sound}",
            "mute {sound}",
            "delete {sound}",
            "leave out {sound}",
            "cut {sound} out",
        ),
        where=("",),
        unframed=(
            "no {sound}, please.",
            "I do not want to hear {sound}.",
            "there should be no {sound}.",
            "I could do without {sound}.",
            "I want it without {sound}.",
        ),
    ),
}
_NUMBERS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)
_EXTRACT = "Extract {sound}, avoid introducing {avoid}, according to the audio and video."


def caption_of_plan(plan: MadePlan) -> str:
    """The caption of an operation: "add bell", "extract bell, without rain and dog bark"."""
    sound = caption_of_record(plan.about)
    if plan.operation == "extend" or plan.operation == "inpaint":
        return sound or caption_of_record(plan.record)
    return edit_words(plan.operation, sound, list(plan.avoid))


def instruction_of_plan(plan: MadePlan, held_out: bool = False) -> str:
    """An everyday wording of the operation, as a person would ask for it; one of several, drawn by the plan.

    Args:
        held_out: draw among the wordings that no model is trained on.
    """
    sound = caption_of_record(plan.about) or caption_of_record(plan.record) or "the sound"
    if plan.operation == "extract":
        return _EXTRACT.format(sound=sound, avoid=" and ".join(plan.avoid) or "other sounds")
    start_s, end_s = plan.span
    wording = random.Random(f"wording {plan.seed}").choice(_operation_sentences(plan.operation, held_out))
    instruction = wording.format(
        sound=sound,
        start=_format_spoken_seconds(start_s),
        end=_format_spoken_seconds(end_s),
        more=_format_spoken_seconds(end_s - start_s),
    )
    return instruction[0].upper() + instruction[1:]


def thought_of_plan(plan: MadePlan) -> str:
    """The chain of thought of an operation: what it does, where, and what is heard then."""
    what = caption_of_plan(plan) if plan.operation not in ("extend", "inpaint") else plan.operation
    where = f" from {plan.span[0]:.1f} to {plan.span[1]:.1f} s"
    return f"{what[0].upper()}{what[1:]}{where}. {prose_of(plan.record)}"


# Private


@cache
def _operation_sentences(operation: str, held_out: bool) -> tuple[str, ...]:
    return _WORDINGS[operation].sentences(held_out)


def _format_spoken_seconds(seconds: float) -> str:
    """Seconds to a tenth, as they are spoken: "1.5", and "three" for 3.0."""
    tenths = round(10 * seconds)
    if tenths % 10 == 0 and tenths // 10 < len(_NUMBERS):
        return _NUMBERS[tenths // 10]
    return f"{tenths / 10:.1f}"
