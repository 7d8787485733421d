"""Words of made pairs and edits: captions as sound models are trained with, and instructions in everyday words."""

from __future__ import annotations

import random

from audiollm.data.records.thoughts import caption_of_record, prose_of
from pipelines.audiocot.made.plans import MadePlan

_INSTRUCTIONS = {
    "extend": (
        "Let it go on for {more} seconds.",
        "Make it last until {end} seconds.",
        "Continue the sound to {end} seconds.",
        "Go on for {more} more seconds.",
        "It should last for {more} seconds more.",
        "Make the sound longer, until {end} seconds.",
        "Let {sound} go on for {more} seconds.",
        "Keep it going for {more} more seconds.",
        "Stretch it to {end} seconds.",
        "I need {more} seconds more of this.",
        "Make it {more} seconds longer.",
        "It ends too early: go on until {end} seconds.",
        "Add {more} seconds at the end.",
        "Let {sound} continue until {end} seconds.",
    ),
    "inpaint": (
        "Fill the gap from {start} to {end} seconds.",
        "Make the part between {start} and {end} seconds anew.",
        "Something is missing from {start} to {end} seconds: fill it in.",
        "Fill in what is missing between {start} and {end} seconds.",
        "There is a gap from {start} to {end} seconds.",
        "From {start} to {end} seconds, make it anew.",
        "Fill {start} to {end} seconds with {sound}.",
        "Replace the part from {start} to {end} seconds.",
        "Repair the sound between {start} and {end} seconds.",
        "Between {start} and {end} seconds something is broken: make it anew.",
        "Fill in {sound} where the gap is, from {start} to {end} seconds.",
        "The hole from {start} to {end} seconds should be {sound}.",
        "Make {start} to {end} seconds again, with {sound}.",
    ),
    "add": (
        "Add {sound} at {start} seconds.",
        "I want to hear {sound} from {start} to {end} seconds.",
        "Put {sound} in at {start} seconds.",
        "There should be {sound} from {start} to {end} seconds.",
        "Let me hear {sound} at {start} seconds.",
        "At {start} seconds, add {sound}.",
        "Mix in {sound} from {start} seconds on.",
        "Lay {sound} over it at {start} seconds.",
        "Between {start} and {end} seconds I want to hear {sound} as well.",
        "Give me {sound} at {start} seconds.",
        "Also {sound}, from {start} to {end} seconds.",
    ),
    "remove": (
        "Take out {sound}.",
        "Remove {sound}.",
        "I do not want to hear {sound}.",
        "There should be no {sound}.",
        "Take {sound} away.",
        "Without {sound}, please.",
        "Get rid of {sound}.",
        "Mute {sound}.",
        "Delete {sound}.",
        "No {sound}, please.",
        "Leave out {sound}.",
        "{sound} should be gone.",
    ),
}
_HELD_OUT_INSTRUCTIONS = {
    "extend": (
        "Let the sound last for {more} seconds more.",
        "Go on until {end} seconds.",
        "Let {sound} last for {more} seconds more.",
        "Make it go on until {end} seconds.",
        "{more} seconds longer, please.",
    ),
    "inpaint": (
        "Between {start} and {end} seconds there is a gap: fill it.",
        "What is missing from {start} to {end} seconds, make it anew.",
        "Between {start} and {end} seconds, fill in {sound}.",
        "Redo the sound from {start} to {end} seconds.",
        "From {start} to {end} seconds the sound is lost: put {sound} there.",
    ),
    "add": (
        "Let there be {sound} at {start} seconds.",
        "I want {sound} in it, from {start} to {end} seconds.",
        "Please add {sound} between {start} and {end} seconds.",
        "Have {sound} come in at {start} seconds.",
    ),
    "remove": (
        "Take the {sound} out, please.",
        "I want it without {sound}.",
        "Cut out {sound}.",
        "I could do without {sound}.",
    ),
}
"""Wordings that models are tested with, and not trained on."""
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
    from audiollm.flow.conditions.edits import edit_words

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
    wordings = _HELD_OUT_INSTRUCTIONS if held_out else _INSTRUCTIONS
    wording = random.Random(f"wording {plan.seed}").choice(wordings[plan.operation])
    return wording.format(sound=sound, start=_told(start_s), end=_told(end_s), more=_told(end_s - start_s))


def thought_of_plan(plan: MadePlan) -> str:
    """The chain of thought of an operation: what it does, where, and what is heard then."""
    what = caption_of_plan(plan) if plan.operation not in ("extend", "inpaint") else plan.operation
    where = f" from {plan.span[0]:.1f} to {plan.span[1]:.1f} s"
    return f"{what[0].upper()}{what[1:]}{where}. {prose_of(plan.record)}"


# Private


def _told(seconds: float) -> str:
    """Seconds to a tenth, as they are spoken: "1.5", and "three" for 3.0."""
    tenths = round(10 * seconds)
    if tenths % 10 == 0 and tenths // 10 < len(_NUMBERS):
        return _NUMBERS[tenths // 10]
    return f"{tenths / 10:.1f}"
