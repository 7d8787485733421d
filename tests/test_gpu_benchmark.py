"""`benchmarks/gpu.py` at tiny sizes: every case runs with the options that this machine can take, and none too long."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import gpu

SCRIPT = Path(gpu.__file__)

FIGURES: dict[str, list[str]] = {
    "sft": [
        "tokens per step", "packed against padded", "attention sdpa", "adamw foreach", "rank 16", "lora tiny, packed",
    ],
    "generate": ["batch 1", "batch 3", "steps static", "against transformers", "first sound"],
    "grpo": ["rollout", "scoring", "update", "against TRL"],
    "dpo": ["pairs", "against TRL"],
    "codec": ["encode", "decode", "train", "encode, against Mimi", "decode, against Mimi"],
    "flow": ["clips of 9 s", "steps with guidance"],
    "interpret": ["against Kyutai STT", "against Moshi", "text tiny, 2 streams", "speech tiny, real-time streams"],
    "sft_compiled": ["not compiled", ", compiled"],
    "flow_compiled": [", compiled"],
    "grpo_audio": ["s heard, rollout", "s heard, update"],
    "studio_click": ["studio click"],
}  # fmt: skip
"""By case, words of the lines that it must print on a CPU."""
LEFT_OUT = {
    "sft": ["attention flash_attn", "attention varlen", "pinned"], "generate": ["cuda_graph"], "flow": ["thinksound"],
}  # fmt: skip
"""By case, words of what needs a GPU, or a package that is not installed."""
SLOW = (
    "studio_click",
    "sft",
    "sft_compiled",
    "flow",
    "flow_compiled",
    "grpo_audio",
    "interpret",
    "codec",
    "dpo",
)


def printed(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the figures of a CPU are asked for")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in gpu.CASES],
)
def test_a_case_prints_its_figures(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main(["--tiny", "--here", "600", "--only", case])
    lines = printed(capsys.readouterr().out)
    for line in lines:
        assert line["bench"] == "gpu" and line["case"]
        assert "left_out" in line or (line["ours"] > 0 and line["unit"] and {"peer", "ratio"} <= line.keys())
        if line.get("peer"):
            assert line["peer"] > 0 and line["ratio"] > 0
    figures = [line["case"] for line in lines if "ours" in line]
    left_out = [line["case"] for line in lines if "left_out" in line]
    for words in FIGURES[case]:
        assert any(words in title for title in figures), f"{words}: {lines}"
    expected = LEFT_OUT.get(case, [])
    assert all(any(words in title for words in expected) for title in left_out), left_out
    assert len(left_out) == len(expected) or case == "flow"


def test_every_case_has_a_figure_that_is_asked_for() -> None:
    assert gpu.CASES.keys() == FIGURES.keys()
    assert all(
        (SCRIPT.parent / "gpu_cases" / f"{place.split(':')[0]}.py").is_file() for place in gpu.CASES.values()
    )


def test_a_case_that_takes_too_long_is_ended_with_what_it_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the place of the script, one whose case has figures and does not end, has none, or fails."""
    script = tmp_path / "cases.py"
    script.write_text(
        "import subprocess, sys, tempfile, time\n"
        "case = sys.argv[sys.argv.index('--only') + 1]\n"
        "if case == 'sft':\n"
        "    print('in memory:', tempfile.mkdtemp(), flush=True)\n"
        "    subprocess.Popen(['sleep', '60'])\n"
        "    print('{\"case\": \"sft\", \"ours\": 1.0}', flush=True)\n"
        "if case == 'codec':\n"
        "    raise SystemExit('no codec')\n"
        "time.sleep(60)\n"
    )  # fmt: skip
    monkeypatch.setattr(gpu, "__file__", str(script))
    monkeypatch.setattr(gpu, "MAX_CASE_S", 2.0)
    monkeypatch.setattr(gpu, "MIN_CASE_S", 1.0)
    began, ends = time.monotonic(), time.monotonic() + 100
    assert gpu.run_apart("sft", True, ends) and not gpu.run_apart("dpo", True, ends)
    assert not gpu.run_apart("codec", True, ends) and not gpu.run_apart("flow", True, time.monotonic())
    assert time.monotonic() - began < 30
    said = capfd.readouterr()
    assert said.out.splitlines() == ['{"case": "sft", "ours": 1.0}']
    (folder,) = [line.split()[-1] for line in said.err.splitlines() if line.startswith("in memory: ")]
    assert not Path(folder).exists()
    for words in ("sft: 2 s in all, ended after 1 figures", "dpo failed, ended", "no codec", "too few"):
        assert words in said.err


@pytest.mark.slow
def test_the_command_runs_a_case_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--tiny", "--only", "flow"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    header, *lines = printed(run.stdout)
    assert header["torch"] == torch.__version__ and len(lines) >= 3
    wrong = subprocess.run([*command[:-1], "gtp"], capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2 and "invalid choice: 'gtp'" in wrong.stderr
