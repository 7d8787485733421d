"""DeepSpeed's private names: each exists in the installed version, and a missing one is named."""

import ast
import importlib
import inspect
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from audiollm.errors import ConfigError, StageError
from audiollm.recipe.ranks import Ranks
from audiollm.train.parallel import deepspeed_internals, strategy
from audiollm.train.parallel.deepspeed_internals import PRIVATE_NAMES, PrivateName, check_private_names

ROOT = Path(__file__).parents[3]


def is_defined(entry: PrivateName) -> bool:
    """Whether the module sets an attribute of that name, declares it as a field, or defines a method of it."""
    source = inspect.getsource(importlib.import_module(entry.module))
    return re.search(rf"(\.|^ +){entry.name}(:| =)|def {entry.name}\(", source, re.MULTILINE) is not None


@pytest.mark.parametrize("entry", PRIVATE_NAMES, ids=lambda entry: f"{entry.name}-{entry.stages}")
def test_the_installed_deepspeed_defines_every_private_name(entry):
    pytest.importorskip("deepspeed")
    assert is_defined(entry)
    assert not is_defined(replace(entry, name=f"{entry.name}_gone"))


def prepared(stage):
    """A ZeRO optimizer and a trained parameter with the names of the table."""
    owners = {owner: SimpleNamespace() for owner in ("optimizer", "parameter", "fragment")}
    for entry in PRIVATE_NAMES:
        if stage in entry.stages:
            value = owners["fragment"] if entry.name == "_hp_mapping" else None
            setattr(owners[entry.owner], entry.name, value)
    return owners


@pytest.mark.parametrize(
    ("stage", "entry"), [(stage, entry) for entry in PRIVATE_NAMES for stage in entry.stages]
)
def test_a_missing_name_is_reported_with_the_version(stage, entry):
    version = pytest.importorskip("deepspeed").__version__.split("+")[0]
    owners = prepared(stage)
    check_private_names(owners["optimizer"], [owners["parameter"]], stage)
    delattr(owners[entry.owner], entry.name)
    with pytest.raises(StageError, match=rf"DeepSpeed {version}.*zero{stage}.*{entry.name} \("):
        check_private_names(owners["optimizer"], [owners["parameter"]], stage)


def test_no_other_module_uses_a_private_name():
    names = {entry.name for entry in PRIVATE_NAMES} - {
        "optimizer",
        "loss_scale",
    }  # the project has such names too
    names |= {
        "cur_scale",
        "loss_scaler",
        "deepspeed_engine_wrapped",
        "partition_parameters",
    }  # used in the past
    for path in [
        file for room in ("audiollm", "tokenizer", "pipelines") for file in (ROOT / room).rglob("*.py")
    ]:
        if path == Path(deepspeed_internals.__file__):
            continue
        text = path.read_text(encoding="utf-8")
        if not any(name in text for name in names):
            continue
        nodes = list(ast.walk(ast.parse(text)))
        used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        used |= {
            node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert not used & names, path


def test_without_deepspeed_zero_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"zero3 needs DeepSpeed") as caught:
        strategy.choose_strategy("zero3", Ranks(0, 2), torch.device("cpu"), None, 1.0)
    assert "audiollm[deepspeed]" in caught.value.remedy
    alone = strategy.choose_strategy("zero3", Ranks(), torch.device("cpu"), None, 1.0)
    assert isinstance(alone, strategy.TorchStrategy), "a process that is alone needs none"
