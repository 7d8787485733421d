"""Remedies for measures without a value, shown beside `n/a` in reports."""

from __future__ import annotations

REMEDIES = {
    "no judge given": "give --recognizer for words, --speaker-judge for voices, --emotion-judge for emotions",
    "not known to be speech": "say so with --kind speech, or in the list's column kind",
    "no transcript": "give a --list with a column text",
    "no prompt": "give the list a prompt's recording and text",
    "no space of sounds": "give --space, or --classes auto",
    "no judge of classes": "give --classes auto",
    "no training sounds": "give --training, a folder or samples",
    "no real sounds": "give the list a column reference",
    "no real sound": "give the list a column reference",
    "no text": "give the list captions and thoughts",
    "no video": "give the list a column video",
    "no clip": "give clips of this kind",
    "a backdrop": "onsets are measured in sounds without a backdrop alone",
}
"""By reason; of others nothing is known that would help, or they say it themselves."""


def with_remedy(reason: str) -> str:
    """The reason with its remedy. `KL softmax: no real sound` is a reason, too: what is missing, then why."""
    remedy = REMEDIES.get(reason) or REMEDIES.get(reason.rpartition(": ")[2])
    return f"{reason} ({remedy})" if remedy else reason
