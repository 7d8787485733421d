"""Spaces of settings on the command line: `train.learning_rate=log(1e-4,3e-3)`, `shape.qk_norm=[true,false]`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml

from audiollm.commands.run import yaml_text
from audiollm.errors import ConfigError, suggestion

Parameter = float | int | str
"""A number of a range, or a choice as YAML."""
Parameters = Mapping[str, Parameter]
"""Values by the keys of their spaces."""

CHOICES = "choices"
RANGES = ("log", "uniform", "int")
FORMS = "log(LOW,HIGH), uniform(LOW,HIGH), int(LOW,HIGH) or [CHOICE,CHOICE,...]"
_CALL = re.compile(r"(\w+)\s*\((.*)")
_WHERE = "command line"


@dataclass(frozen=True)
class Space:
    """The values that trials give to a recipe's key."""

    key: str
    kind: str
    """One of `RANGES`, or `CHOICES`."""
    text: str
    """As the command line has it."""
    low: float = 0.0
    high: float = 0.0
    choices: tuple[str, ...] = ()
    """YAML of each choice."""

    def probes(self) -> tuple[Parameter, ...]:
        """The values by which a recipe is asked whether it takes the space: the ends of a range, all choices."""
        if self.kind == CHOICES:
            return self.choices
        return (int(self.low), int(self.high)) if self.kind == "int" else (self.low, self.high)

    def override(self, value: Parameter) -> str:
        """`key=value`, as `audiollm run` takes it."""
        return f"{self.key}={value if isinstance(value, str) else yaml_text(value)}"

    def grid(self) -> Sequence[Parameter]:
        """All values.

        Raises:
            ConfigError: it is a range of real numbers.
        """
        if self.kind == CHOICES:
            return self.choices
        if self.kind == "int":
            return range(int(self.low), int(self.high) + 1)
        remedy = f"name the values: {self.key}=[{yaml_text(self.low)},{yaml_text(self.high)}]"
        raise ConfigError(f"{self.key}: a grid has no values of {self.text}", _WHERE, remedy)


def split_overrides(overrides: Sequence[str]) -> tuple[list[Space], list[str]]:
    """Part the overrides of a sweep into spaces and fixed `key=value`.

    `[x]`, a single choice, is a fixed value: so a list is fixed, `key=[[a,b]]`.

    Raises:
        ConfigError: a malformed space, or a key that is there twice.
    """
    spaces: list[Space] = []
    fixed: list[str] = []
    keys: set[str] = set()
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{text!r} is not key=value", _WHERE, "example: train.batch_size=int(4,32)")
        if key in keys:
            raise ConfigError(f"{key}: given twice", _WHERE, "keep one of them")
        keys.add(key)
        space = parse_space(key, value.strip())
        if space is None:
            fixed.append(text)
        elif len(space.choices) == 1:
            fixed.append(space.override(space.choices[0]))
        else:
            spaces.append(space)
    return spaces, fixed


def parse_space(key: str, text: str) -> Space | None:
    """The space that an override's value stands for; None: it is a plain value.

    Raises:
        ConfigError: it begins as a space and is none.
    """
    if text.startswith("["):
        return Space(key, CHOICES, text, choices=_read_choices(key, text))
    call = _CALL.match(text)
    if call is None:
        return None
    kind, inside = call[1], call[2]
    if kind not in RANGES:
        remedy = (
            f"{suggestion(kind, RANGES)}   a text in quotation marks is a plain value: {key}='\"{text}\"'"
        )
        raise ConfigError(f"{key}: no such space: {text}", _WHERE, remedy)
    numbers = [_read_number(word) for word in inside.removesuffix(")").split(",")]
    if not inside.endswith(")") or len(numbers) != 2 or None in numbers:
        raise _malformed(key, text, f"{kind} takes two numbers")
    low, high = (float(number) for number in numbers if number is not None)
    if not low < high:
        raise _malformed(key, text, "the first number must be smaller than the second")
    if kind == "log" and low <= 0:
        raise _malformed(key, text, "log needs numbers above 0")
    if kind == "int" and not (low.is_integer() and high.is_integer()):
        raise _malformed(key, text, "int takes whole numbers")
    return Space(key, kind, text, low, high)


def _read_choices(key: str, text: str) -> tuple[str, ...]:
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError:
        values = None
    if not isinstance(values, list) or not values:
        raise _malformed(key, text, "choices are a list in YAML")
    choices = tuple(yaml_text(_read_exponent(value)) for value in values)
    if len(set(choices)) < len(choices):
        raise _malformed(key, text, "a choice is there twice")
    return choices


def _read_exponent(value: object) -> object:
    """YAML reads `1e-4` as a text, for want of a point."""
    number = _read_number(value) if isinstance(value, str) else None
    return value if number is None else number


def _read_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _malformed(key: str, text: str, reason: str) -> ConfigError:
    return ConfigError(f"{key}: malformed space {text}: {reason}", _WHERE, f"spaces are {FORMS}")
