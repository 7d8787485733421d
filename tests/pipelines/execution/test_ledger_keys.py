"""A step's call is found in the ledger only where nothing that its value depends on has changed."""

from __future__ import annotations

from typing import Any

import pytest

from pipelines.annotate.execution.chain import STEPS, Chain, build
from pipelines.annotate.step import RecordingMetadata

SPEECH: dict[str, Any] = {"voice_activity": {"spans": [[0.0, 1.0]], "duration_s": 2.0}}


def chain_of(**of_segments: float) -> Chain:
    names = ("probe", "voice_activity", "segments")
    return build(
        STEPS.typed_settings({name: of_segments if name == "segments" else {} for name in names}), [], {}
    )


def key(
    step: str = "segments",
    digest: str = "sound",
    known: object = RecordingMetadata(),
    values: Any = SPEECH,
    **settings: float,
) -> str:
    chain = chain_of(**settings)
    return chain.key(chain.steps[step], digest, known, values)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "voice_activity"},
        {"digest": "another sound"},
        {"known": RecordingMetadata(text="seven")},
        {"known": (RecordingMetadata(), (0.0, 1.0))},
        {"values": {"voice_activity": {"spans": [[0.0, 1.5]], "duration_s": 2.0}}},
        {"values": {}},
        {"margin_s": 0.3},
    ],
    ids=str,
)
def test_a_call_is_another_where_something_changes_that_it_depends_on(changes: dict[str, Any]) -> None:
    assert key(**changes) != key()


def test_a_call_is_the_same_in_another_run() -> None:
    assert key() == key(values=dict(reversed(SPEECH.items())), margin_s=0.2)
