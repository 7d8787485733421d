"""Which CPUs train in bf16 by default."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from audiollm import devices
from audiollm.measured_choices import MeasuredChoices, Ways
from audiollm.train.loop.optim import compute_dtype


@pytest.mark.parametrize(("slower", "dtype"), [("fp32", torch.bfloat16), ("bf16", None)])
def test_bf16_is_taken_where_it_was_measured_to_be_faster(
    slower: str, dtype: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = devices._precisions

    def precisions() -> Ways:
        ways = dict(measured())
        return {**ways, slower: lambda: (time.sleep(0.2), ways[slower]())}

    monkeypatch.setattr(devices, "CHOICES", MeasuredChoices(tmp_path / "fastest.json"))
    monkeypatch.setattr(devices, "_precisions", precisions)
    assert compute_dtype("auto", torch.device("cpu")) == dtype


def test_the_precisions_that_are_compared_compute_the_same() -> None:
    full, half = (compute() for compute in devices._precisions().values())
    assert full.dtype == half.dtype == torch.float32
    torch.testing.assert_close(half, full, rtol=0.02, atol=0.02 * float(full.abs().max()))
