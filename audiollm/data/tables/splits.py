"""Names of splits: which are trained on, which are held out, and the refusal of all others.

A split is named by its words: `dev-clean`, `test_prefs` and `asr_eval2` are held out, `train-clean-100` and `train_sft`
are trained on, and `train_dev` is held out.
"""

from __future__ import annotations

import re
from functools import lru_cache

from audiollm.errors import suggestion

TRAINED_NAMES = ("train", "training", "trn")
"""Words of the names of splits that are trained on."""
HELD_OUT_NAMES = (
    "test", "testing", "tst", "validation", "validate", "valid", "val", "dev", "devel", "development", "eval",
    "evaluation", "holdout", "heldout",
)  # fmt: skip
"""Words of the names of splits that trainings leave out."""
SPLIT_WORDS = (*TRAINED_NAMES, *HELD_OUT_NAMES)
_HOLD_OUT = re.compile(r"(hold|held)[-_ .]+out")
_WORD = re.compile(r"[^\W\d_]+")


def holds_out(split: str) -> bool:
    """Return whether trainings leave a split out: a word of its name is one of `HELD_OUT_NAMES`."""
    return not _split_name_words(split).isdisjoint(HELD_OUT_NAMES)


def is_split(name: str) -> bool:
    """Return whether a split's name says if it is trained on or held out."""
    return not _split_name_words(name).isdisjoint(SPLIT_WORDS)


def split_of(name: str) -> str:
    """Return `test` for the name of a split that is held out, and `train` for one that is trained on.

    Raises:
        ValueError: the name says neither; the known names are in the message.
    """
    if not is_split(name):
        raise ValueError(
            f"split {name!r} is neither trained on nor held out by its name: {_suggest_split(name)}"
        )
    return "test" if holds_out(name) else "train"


def is_of_split(name: object, split: str) -> bool:
    """Return whether a split is the one of a name: `evaluation` is of `evaluation`, and of `test`."""
    if name is None or name == "":
        return False
    return name == split or (is_split(str(name)) and split_of(str(name)) == split)


# Private


@lru_cache(maxsize=256)
def _split_name_words(name: str) -> frozenset[str]:
    return frozenset(_WORD.findall(_HOLD_OUT.sub("holdout", name.lower())))


def _suggest_split(name: str) -> str:
    nearest = suggestion(name.lower(), SPLIT_WORDS)
    known_words = f"known: {', '.join(SPLIT_WORDS)}"
    return f"{nearest} {known_words}" if nearest.startswith("did") else known_words
