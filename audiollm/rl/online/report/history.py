"""What a training on fresh answers left behind: figures by step, greedy answers at evaluations, and rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from audiollm.evaluate.report.statistics import mean_of_normal, mean_of_shares
from audiollm.pages.charts import Series, series_of
from audiollm.pages.run_record import Row, StageRecord
from audiollm.rl.rollouts.records import FOLDER, RolloutRecords, finite

KINDS = ("train_policy", "train_interpreter")
REWARD = "reward"
"""Name of the weighted sum of the rewards, in figures and in tables."""


@dataclass(frozen=True)
class FreshTraining:
    """A stage that was trained on fresh answers."""

    stage: StageRecord

    @cached_property
    def rows(self) -> list[Row]:
        """Figures of the steps and of the evaluations."""
        return self.stage.rows("metrics.jsonl")

    @cached_property
    def answers(self) -> list[Row]:
        """Greedy answers to held-out prompts at every evaluation; step 0 is the model before the training."""
        return [row for row in self.stage.rows("answers.jsonl") if isinstance(row.get("step"), int)]

    @cached_property
    def rollouts(self) -> RolloutRecords:
        return RolloutRecords(self.stage.folder / FOLDER)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the stage, where it has run."""
        return self.stage.result.settings if self.stage.result is not None else {}

    @property
    def method(self) -> str:
        """Advantage and objective with their settings, as they are written in a recipe."""
        objective, advantage = (choice_words(self.settings.get(key)) for key in ("objective", "advantage"))
        fresh = objective.startswith("online_")  # these read no advantages
        return objective if fresh or advantage == objective else f"{objective}, advantages by {advantage}"

    @property
    def reward_names(self) -> list[str]:
        """Names of the reward functions, in the order of the recipe."""
        logged_names = dict.fromkeys(
            key.removeprefix("reward/") for row in self.rows for key in row if key.startswith("reward/")
        )
        configured_names = [str(name) for name in self.settings.get("rewards") or () if name in logged_names]
        return [*configured_names, *(name for name in logged_names if name not in configured_names)]

    @property
    def speaks(self) -> bool:
        """Whether codes of speech have a KL and a coefficient of their own."""
        return any("kl_audio" in row for row in self.rows)

    @property
    def kl_targets(self) -> tuple[float | None, float | None]:
        """The KL that the controllers aim at, of text (or all) and of speech; None where the coefficient is fixed."""
        kl = self.settings.get("kl") or {}
        text, audio = kl.get("controller") or {}, kl.get("audio") or {}
        return finite(text.get("target")), finite(audio.get("target"))

    def held_out(self, name: str) -> Series:
        """The mean of a reward over the greedy answers at every evaluation, the one before the training included."""
        points = [(step, table["mean"]) for step, table in self.tables(name).items()]
        if points:
            return Series("held out", points, dotted=True)
        key = REWARD if name == REWARD else f"reward/{name}"
        return series_of(self.rows, f"evaluation/{key}", "held out", dotted=True)

    def tables(self, name: str) -> dict[int, Row]:
        """By step, the mean of a reward over the greedy answers, its interval and `n`, and whether it is a share."""
        by_step: dict[int, list[float]] = {}
        for row in self.answers:
            value = _read_reward(row, name)
            if value is not None:
                by_step.setdefault(row["step"], []).append(value)
        is_share = all(value in (0.0, 1.0) for values in by_step.values() for value in values)
        table = mean_of_shares if is_share else mean_of_normal
        return {step: {**table(values), "is_share": is_share} for step, values in sorted(by_step.items())}

    def before_and_after(self, name: str) -> list[Row]:
        """The tables of a reward at the start and of the model that is handed over; one where there is only one."""
        tables = self.tables(name)
        if len(tables) < 2:
            return list(tables.values())
        return [tables[min(tables)], tables[self._handed_over(tables)]]

    def _handed_over(self, tables: Mapping[int, Row]) -> int:
        """The evaluation of the model that is handed over: that of the best weights, or the last."""
        best_step = (self.stage.figures or {}).get("best_step")
        return next((step for step in tables if step == best_step), max(tables))

    def gain(self, name: str) -> Row | None:
        """The mean of a reward's change from the start to the model that is handed over, answer by answer."""
        tables = self.tables(name)
        if len(tables) < 2:
            return None
        first, last = min(tables), self._handed_over(tables)
        before, after = (
            {str(row.get("id")): _read_reward(row, name) for row in self.answers if row["step"] == step}
            for step in (first, last)
        )
        changes = [
            then - now
            for id, now in before.items()
            if now is not None and (then := after.get(id)) is not None
        ]
        return {**mean_of_normal(changes), "is_share": tables[last]["is_share"]} if changes else None

    def answers_to(self, id: str) -> list[Row]:
        """The greedy answers to a prompt, by step."""
        return sorted((row for row in self.answers if str(row.get("id")) == id), key=lambda row: row["step"])


def choice_words(setting: object) -> str:
    """A choice of a recipe in words: its name, and its settings in parentheses."""
    if not isinstance(setting, Mapping):
        return str(setting or "")
    text = ", ".join(f"{key} {value}" for key, value in setting.items() if key != "name")
    return f"{setting.get('name')}" + (f" ({text})" if text else "")


def short_name(reward: str) -> str:
    """The name of a reward: of a user's function without its package."""
    return reward.rpartition(":")[2]


def _read_reward(row: Row, name: str) -> float | None:
    if name == REWARD:
        return finite(row.get(REWARD))
    rewards = row.get("rewards")
    return finite(rewards.get(name)) if isinstance(rewards, Mapping) else None
