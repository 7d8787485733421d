"""Tally of VIP and SVIP from a file of verdicts, by people or by an LLM judge.

VIP is the share of a source's fragments (units of meaning) whose information the output conveys (arXiv 2407.21646,
section 4.3); SVIP asks in addition that it is said in time, at a fair rate, and fluently. Neither can be
computed: this reads verdicts and counts them (`fragment_judge.py` asks an LLM for them).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from audiollm.errors import ConfigError
from audiollm.evaluate.report.lists import read_records
from audiollm.evaluate.report.statistics import share


class FragmentVerdict(BaseModel):
    """A judged fragment."""

    model_config = ConfigDict(extra="allow")

    index: int
    """Number of the source."""
    fragment: str
    system: str | None = None
    """Name of the log; None: there is only one."""
    vip: bool
    """Whether the output conveys it."""
    svip: bool | None = None
    """Whether it also does so in time and fluently; None: not judged."""


def read_verdicts(path: Path) -> list[FragmentVerdict]:
    """Read JSON lines, JSON or CSV with `index`, `fragment`, `vip`, where judged `svip`, of several logs `system`.

    Raises:
        ConfigError: what is wrong, and where.
    """
    return read_records(path, FragmentVerdict)


def of_system(verdicts: Sequence[FragmentVerdict], system: str) -> list[FragmentVerdict]:
    """The verdicts on a system's outputs."""
    return [verdict for verdict in verdicts if verdict.system in (None, system)]


def check_systems(verdicts: Sequence[FragmentVerdict], systems: Sequence[str], path: Path) -> None:
    """Check that it is told which log each verdict is about.

    Raises:
        ConfigError: a verdict without a system, where there are several; or one of a system that is not there.
    """
    named = ", ".join(systems)
    for verdict in verdicts:
        if verdict.system is None and len(systems) > 1:
            raise ConfigError(
                f"{verdict.fragment!r}: of which system?", str(path), f"add a column system: {named}"
            )
        if verdict.system is not None and verdict.system not in systems:
            raise ConfigError(f"{verdict.system}: no log of this name", str(path), f"the logs are {named}")


def tally(verdicts: Sequence[FragmentVerdict]) -> dict[str, Any]:
    """Return the shares of valid fragments with 95 % intervals: `vip`, and `svip` where any fragment has it."""
    judged = [verdict.svip for verdict in verdicts if verdict.svip is not None]
    shares = {"vip": share([verdict.vip for verdict in verdicts])}
    return shares | ({"svip": share(judged)} if judged else {})
