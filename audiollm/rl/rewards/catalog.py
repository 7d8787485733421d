"""Names of the rewards, their settings and what each needs; errors for what cannot be used. Loads no torch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from audiollm.errors import ConfigError, suggestion
from audiollm.hub_models.folders import hub_source
from audiollm.recipe.plug_ins import Catalog, documented, import_named, is_import_path, source_digest
from audiollm.recipe.stages import checked_path
from audiollm.rl.rewards import settings as s

OWN_FUNCTION = "package.module:function, or my_rewards:brevity of my_rewards.py in the folder where you start"
PLUG_IN_REMEDY = "give package.module:function of a function f(batch) that returns a value per answer"
_ARGUMENTS_OF_OTHERS = ("completions", "prompts")
"""First arguments of rewards of TRL and ms-swift, which are lists of texts."""
_ARGUMENTS_REMEDY = (
    "write f(batch); an answer has TRL's texts as answer.text (completion), answer.key (solution) and "
    "answer.sample.metadata (other columns): [... for answer in batch]"
)


@dataclass(frozen=True)
class RewardEntry:
    """A built-in reward, known before anything is loaded."""

    settings: type[s.RewardSettings]
    speech: bool = False
    """It scores speech: the policy must speak."""
    words: bool = False
    """It scores words: the policy must write."""
    key: bool = False
    """It compares with the answer key."""
    steps: bool = False
    """It scores the steps of an answer."""
    folder: str = ""
    """The setting that names a folder which it reads, or an import path in its place."""


CATALOG: dict[str, RewardEntry] = {
    "accuracy": RewardEntry(s.AccuracySettings, words=True, key=True),
    "format": RewardEntry(s.FormatSettings, words=True),
    "think": RewardEntry(s.ThinkSettings, words=True),
    "cosine": RewardEntry(s.CosineSettings, words=True, key=True),
    "repetition": RewardEntry(s.RepetitionSettings, words=True),
    "language": RewardEntry(s.LanguageSettings, words=True),
    "steps": RewardEntry(s.StepsSettings, words=True, steps=True),
    "step_model": RewardEntry(s.StepModelSettings, words=True, steps=True, folder="folder"),
    "reward_model": RewardEntry(s.ModelSettings, words=True, folder="folder"),
    "overlong": RewardEntry(s.OverlongSettings),
    "judge": RewardEntry(s.JudgeSettings, words=True),
    "words": RewardEntry(s.WordsSettings, speech=True, folder="recognizer"),
    "voice": RewardEntry(s.VoiceSettings, speech=True, folder="judge"),
    "length": RewardEntry(s.LengthSettings, speech=True),
    "quality": RewardEntry(s.RewardSettings, speech=True),
    "ends": RewardEntry(s.RewardSettings, speech=True),
}


def reward_catalog() -> Catalog:
    """Built-in rewards."""
    sentences = documented({name: entry.settings for name, entry in CATALOG.items()})
    return Catalog(sentences, "Your own: `package.module:function` of a `RewardBatch`.")


@dataclass(frozen=True)
class RewardTerm:
    """A reward as a recipe asks for it."""

    name: str
    weight: float
    settings: s.RewardSettings
    """Of a plug-in the empty `RewardSettings`."""
    timeout_s: float | None = None
    """Longest time of a call; None: the default of `RewardSuite`."""

    @property
    def is_plug_in(self) -> bool:
        return self.name not in CATALOG

    @property
    def speech(self) -> bool:
        return not self.is_plug_in and CATALOG[self.name].speech

    @property
    def words(self) -> bool:
        return not self.is_plug_in and CATALOG[self.name].words

    @property
    def scores_steps(self) -> bool:
        """Whether it may score the steps of an answer; a user's function may."""
        return self.is_plug_in or CATALOG[self.name].steps

    @property
    def needs_key(self) -> bool:
        return not self.is_plug_in and CATALOG[self.name].key


def reward_terms(rewards: Mapping[str, Any], where: str = "") -> list[RewardTerm]:
    """Read `rewards: {accuracy: 2.0, think: {weight: 0.5, max_words: 40}, my_rewards:brevity: 0.5}`.

    Raises:
        ConfigError: no reward, a name or a setting that does not exist (with the nearest), a weight that is no number.
    """
    if not rewards:
        raise ConfigError("rewards: there is none", where, "give for example {accuracy: 2.0, format: 1.0}")
    return [_term(name, value, where) for name, value in rewards.items()]


def with_checked_folders(rewards: Mapping[str, Any], context: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rewards with the folders that their settings name checked, and `~` in them expanded.

    Args:
        rewards: as `reward_terms` has them, which has read them.
        context: as `checked_path` has it. The folders are no part of a stage's fingerprint.

    Raises:
        ValueError: a folder is not there.
    """
    context = {key: value for key, value in context.items() if key != "inputs"}
    checked = dict(rewards)
    for name, reward_settings in rewards.items():
        setting = CATALOG[name].folder if name in CATALOG else ""
        folders = reward_settings.get(setting) if isinstance(reward_settings, Mapping) else None
        if folders is None:
            continue
        try:
            checked_folders = (
                [_check_folder(str(folder), context) for folder in folders]
                if isinstance(folders, list)
                else _check_folder(str(folders), context)
            )
            checked[name] = {**reward_settings, setting: checked_folders}
        except ValueError as error:
            raise ValueError(f"{name}.{setting}: {error}") from None
    return checked


def _check_folder(folder: str, context: Mapping[str, Any]) -> str:
    if folder == s.POCKETSPHINX or is_import_path(folder):
        return folder
    kind, equals, place = hub_source(folder, "recognizer").rpartition("=")
    return f"{kind}{equals}{checked_path(Path(place), context)}"


def import_reward(path: str) -> Any:
    """The user's function at `package.module:function`.

    Raises:
        ConfigError: it cannot be imported, is no function, or takes other arguments than one batch.
    """
    function = import_named(path, PLUG_IN_REMEDY)
    if not callable(function):
        raise ConfigError(f"{type(function).__name__} is no function", path, PLUG_IN_REMEDY)
    _check_arguments(function, path)
    return function


def _check_arguments(function: Callable[..., Any], path: str) -> None:
    """
    Raises:
        ConfigError: the function cannot be called with one batch, or has the arguments of TRL's and ms-swift's rewards.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a builtin
        return
    try:
        signature.bind(())
        is_of_trl = next(iter(signature.parameters)) in _ARGUMENTS_OF_OTHERS
    except TypeError:
        is_of_trl = True
    if is_of_trl:
        raise ConfigError(
            f"takes {signature}, and a reward is called with one batch", path, _ARGUMENTS_REMEDY
        )


def source_facts(terms: Sequence[RewardTerm]) -> list[str]:
    """The users' functions with digests of their sources, for the fingerprint of a stage (`Stage.facts`)."""
    return [f"{term.name}={source_digest(term.name)}" for term in terms if term.is_plug_in]


def _term(name: str, value: Any, where: str) -> RewardTerm:
    key = f"rewards.{name}"
    values = dict(value) if isinstance(value, Mapping) else {"weight": value}
    weight = values.pop("weight", 1.0)
    if not _is_number(weight):
        remedy = "write a space behind the colon, as {accuracy: 2.0}" if weight is None else ""
        raise ConfigError(f"{key}: the weight must be a number, not {weight!r}", where, remedy)
    timeout_s = values.pop("timeout_s", None)
    if timeout_s is not None and not (_is_number(timeout_s) and timeout_s > 0):
        raise ConfigError(f"{key}.timeout_s: must be a positive number, not {timeout_s!r}", where)
    if name not in CATALOG:
        if not is_import_path(name):
            remedy = f"{suggestion(name, CATALOG)}; a function of yours is named as {OWN_FUNCTION}"
            raise ConfigError(f"{key}: no such reward", where, remedy)
        if values:
            raise ConfigError(
                f"{key}: a function of yours has a weight and a timeout_s alone",
                where,
                "keep its settings in its module",
            )
        return RewardTerm(name, float(weight), s.RewardSettings(), timeout_s)
    model = CATALOG[name].settings
    try:
        return RewardTerm(name, float(weight), model.model_validate(values), timeout_s)
    except ValidationError as error:
        first = error.errors()[0]
        setting = ".".join(str(key_part) for key_part in first["loc"])
        if first["type"] == "extra_forbidden":
            remedy = suggestion(setting, model.model_fields)
            raise ConfigError(f"{key}: no setting {setting!r}", where, remedy) from None
        what = f"{key}.{setting}" if setting else key
        raise ConfigError(f"{what}: {first['msg'].removeprefix('Value error, ')}", where) from None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
