"""What a stage that was trained on preferences left behind: figures by step, pairs, and its own answers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

from audiollm.hub_models.names import folder_label
from audiollm.pages.charts import Series, series_of
from audiollm.pages.run_record import Row, RunRecord, StageRecord

POLICIES, REWARD_MODELS = "train_preference", "train_reward"
REWARDS = (("reward_chosen", "chosen"), ("reward_rejected", "rejected"))
VERDICTS = (("reward_desirable", "desirable"), ("reward_undesirable", "undesirable"))
INSTEAD = {better: single for (better, _), (single, _) in zip(REWARDS, VERDICTS, strict=True)}
"""Where answers were judged one at a time, the figures that stand for those of pairs."""


@dataclass(frozen=True)
class Training:
    """A stage that was trained on preferences, and what it left behind."""

    stage: StageRecord

    @cached_property
    def rows(self) -> list[Row]:
        """Figures of the steps and of the evaluations."""
        return self.stage.rows("metrics.jsonl")

    @cached_property
    def answers(self) -> list[Row]:
        """The policy's own answers to held-out prompts at every evaluation."""
        return [row for row in self.stage.rows("answers.jsonl") if isinstance(row.get("step"), int)]

    @cached_property
    def pairs(self) -> list[Row]:
        """Held-out groups, the worst ordered first."""
        return [row for row in self.stage.rows("pairs.jsonl") if isinstance(row.get("answers"), list)]

    def answers_to(self, id: str) -> list[Row]:
        """The own answers to a prompt, by step."""
        return sorted(
            (row for row in self.answers if str(row.get("id")) == id), key=lambda row: int(row["step"])
        )

    @property
    def calibration_error(self) -> float | None:
        """How far a reward model's confidence is from the share that it has right, as the stage computed it."""
        calibration = self.stage.json("reliability.json")
        error = calibration.get("error") if isinstance(calibration, dict) else None
        return float(error) if isinstance(error, int | float) else self.figure("calibration_error")

    @property
    def objective(self) -> str:
        """The objectives with their weights and settings, as they are written in a recipe."""
        objective = self.stage.result.settings.get("objective") if self.stage.result is not None else None
        listed = objective if isinstance(objective, list) else [objective] if objective else []
        texts = [_objective(entry, len(listed) > 1) for entry in listed]
        return " + ".join(filter(None, texts))

    def key(self, name: str) -> str:
        """The name of a figure in the rows: in a mix of objectives, the later ones' have theirs before it."""
        names = {key.removeprefix("evaluation/") for row in self.rows for key in row}
        return name if name in names else min((k for k in names if k.endswith(f"/{name}")), default=name)

    @cached_property
    def judges_single(self) -> bool:
        """Whether answers were judged one at a time, and not against one another."""
        return any(key.rpartition("/")[2] == "reward_desirable" for row in self.rows for key in row)

    def figure(self, name: str) -> float | None:
        """A held-out figure of the finished stage; of single answers, the margin is between the means of both kinds."""
        figures = self.stage.figures or {}
        if name == "margin" and self.judges_single:
            better, worse = (self.figure(key) for key, _ in VERDICTS)
            return None if better is None or worse is None else better - worse
        value = figures.get(name, figures.get(self.key(name)))
        return float(value) if isinstance(value, int | float) else None

    def series(self, key: str, name: str) -> Series:
        """The held-out values of a figure, else those in training."""
        if self.judges_single and key in INSTEAD:
            return self.series(INSTEAD[key], name)
        if self.judges_single and key == "margin":
            better, worse = (dict(self.series(verdict_key, name).points) for verdict_key, _ in VERDICTS)
            return Series(
                name, [(step, better[step] - worse[step]) for step in better if step in worse], True
            )
        held_out = series_of(self.rows, f"evaluation/{self.key(key)}", name, dotted=True)
        return held_out if held_out.points else series_of(self.rows, self.key(key), name)

    def lengths(self, key: str, name: str) -> Series:
        """The mean of `tokens` or `seconds` over the policy's own answers, by step."""
        by_step: dict[int, list[float]] = {}
        for row in self.answers:
            if isinstance(row.get(key), int | float):
                by_step.setdefault(row["step"], []).append(float(row[key]))
        return Series(name, sorted((step, fmean(values)) for step, values in by_step.items()), dotted=True)


def origin(run: RunRecord, stage: StageRecord) -> str | None:
    """The stage that made the model that a training begins from, else the folder that it is in."""
    model = stage.result.settings.get("start") if stage.result is not None else None
    if not isinstance(model, str):
        return None
    below = [name for name in stage.upstream if Path(model).is_relative_to(run.recipe.folder / name)]
    if below:
        return below[0]
    path = Path(model)
    return path.parent.name if path.name == "model" and path.parent.name else folder_label(path)


def _objective(objective: object, weighted: bool) -> str:
    if not isinstance(objective, dict):
        return str(objective)
    settings = {key: value for key, value in objective.items() if key not in ("name", "weight")}
    weight = (
        f"{objective['weight']:g} " if weighted and isinstance(objective.get("weight"), int | float) else ""
    )
    text = ", ".join(f"{key} {value}" for key, value in settings.items())
    return f"{weight}{objective.get('name')}" + (f" ({text})" if text else "")
