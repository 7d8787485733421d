"""Which CPUs train in bf16 by default."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from audiollm import devices
from audiollm.train.loop.optim import compute_dtype


@pytest.mark.parametrize(
    ("amx", "avx512_bf16", "vendor", "fast"),
    [
        (True, True, "GenuineIntel", True),
        (False, True, "GenuineIntel", False),
        (False, True, "AuthenticAMD", True),
        (False, False, "AuthenticAMD", False),
        (False, True, None, False),
    ],
)
def test_bf16_is_taken_where_it_is_faster(
    amx: bool,
    avx512_bf16: bool,
    vendor: str | None,
    fast: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = tmp_path / "cpuinfo"
    if vendor is not None:
        facts.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    monkeypatch.setattr(devices, "CPU_FACTS", facts)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    devices.is_amd_cpu.cache_clear()
    try:
        assert compute_dtype("auto", torch.device("cpu")) == (torch.bfloat16 if fast else None)
    finally:
        devices.is_amd_cpu.cache_clear()
