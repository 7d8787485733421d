"""`benchmarks/proof.py` and the chains of `benchmarks/proofs`: typed stages of seeds and arms, overrides, lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import proof as proofs

VALUES: dict[str, Any] = {
    "recordings": "digits", "source": "learn_tts", "segments": "sounds.jsonl", "events": [], "backdrops": [],
    "cpu_minutes": 2.0, "judged": "says_first_1/generated.jsonl", "codec": "codec", "autoencoder": "autoencoder",
    "voices": "segments.jsonl", "codes": "codes", "samples": [{"path": "shards", "weight": 1}], "lookup": "model",
    "texts": "samples.jsonl", "published": "learn_published", "heard_in_room": "in_room",
}  # fmt: skip
"""A value of each key that a program gives a chain."""
BY_SEED = {seed: {"cpu_minutes": 2.0, "flow": "flow"} for seed in (1, 2)}
CHAINS = sorted(path.stem for path in proofs.CHAINS.glob("*.yaml"))


def load(
    folder: Path, chain: str, *overrides: str, arms: list[str] | None = None
) -> dict[str, dict[str, Any]]:
    """The settings of a chain's stages for two seeds, by their names."""
    text = (proofs.CHAINS / f"{chain}.yaml").read_text()
    bases = [line.removeprefix("base: ") for line in text.splitlines() if line.startswith("base: ")]
    while bases:
        text += (base := (proofs.CHAINS / bases.pop()).read_text())
        bases += [line.removeprefix("base: ") for line in base.splitlines() if line.startswith("base: ")]
    values = {key: value for key, value in VALUES.items() if f"\n{key}: ???" in text}
    run = proofs.Proof(folder, (1, 2), overrides, [chain])
    recipe = run.load(
        chain, BY_SEED if "cpu_minutes: 1.0" in text or "${flow}" in text else None, arms, [], **values
    )
    return {stage.name: stage.config.model_dump() for stage in recipe.stages}


@pytest.mark.parametrize("chain", CHAINS)
def test_every_stage_of_a_chain_is_typed(chain: str, tmp_path: Path) -> None:
    assert load(tmp_path / "run", chain)


def test_arms_are_crossed_with_seeds_and_one_of_a_single_seed_is_not(tmp_path: Path) -> None:
    stages = load(tmp_path / "run", "learn_preference")
    arms = ("dpo_1", "shuffled_1", "exchanged_1", "dpo_2", "shuffled_2")
    rewards = ("right_1", "shuffled_1", "right_2", "shuffled_2")
    assert list(stages) == [*(f"aligned_{arm}" for arm in arms), *(f"reward_{arm}" for arm in rewards)]
    assert [stages[f"aligned_{arm}"]["seed"] for arm in arms] == [1, 1, 1, 2, 2]
    (digits, _) = stages["aligned_shuffled_2"]["samples"]
    assert Path(digits["path"]) == tmp_path / "run" / "data" / "shuffled2-digits.jsonl"
    run = proofs.Proof(tmp_path / "run", (1, 2))
    assert run.arm_stages("learn_preference") == list(stages)
    guided = [name for name in load(tmp_path / "run", "learn_flow") if name.startswith("guidance")]
    assert guided == [f"guidance_{scale}_1" for scale in (1, 2, 3, 5, 8)]  # of the first seed alone
    assert list(load(tmp_path / "run", "compare_rl", arms=["grpo", "ppo"])) == [
        "by_grpo_1", "by_ppo_1", "by_grpo_2", "by_ppo_2"
    ]  # fmt: skip


def test_a_setting_is_overridden_for_all_seeds_or_one_and_a_wrong_name_is_refused(tmp_path: Path) -> None:
    stages = load(tmp_path / "run", "learn_preference_first", "first.steps=20", "first_2.batch_size=4")
    assert [stages[f"first_{seed}"]["steps"] for seed in (1, 2)] == [20, 20]
    assert [stages[f"first_{seed}"]["batch_size"] for seed in (1, 2)] == [24, 4]
    with pytest.raises(
        SystemExit, match="frist.steps=20: no stage or key of proofs/learn_preference_first.yaml"
    ):
        load(tmp_path / "run", "learn_preference_first", "frist.steps=20")


def test_a_line_has_the_mean_over_seeds_its_interval_and_its_ratio(
    capsys: pytest.CaptureFixture[str],
) -> None:
    proofs.print_line("x", "a", [0.4, 0.6], peer=0.8)
    proofs.print_line("x", "b", [float("nan")], peer=0.8)
    proofs.print_line("x", "c", [0.5, float("nan")], unit="words")
    first, second, third = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["ours"], first["peer"], first["ratio"]) == (0.5, 0.8, 0.625)
    assert first["interval"] == [-0.7706, 1.7706]  # 0.5 ± 12.706 * 0.1, by a table of Student's t
    assert first["unit"] == "share (peer: the bar)" and first["seeds"] == [0.4, 0.6]
    assert second["ours"] is None and "no such case" in second["unit"]
    assert (third["ours"], third["unit"]) == (0.5, "words") and "interval" not in third
