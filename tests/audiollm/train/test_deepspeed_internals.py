"""DeepSpeed's private names: each exists in the installed version, and a missing one is named."""

import importlib
import inspect
from types import SimpleNamespace

import pytest

from audiollm.errors import StageError
from audiollm.train.parallel.deepspeed_internals import PRIVATE_NAMES, check_private_names

ZERO_MODULES = {2: "deepspeed.runtime.zero.stage_1_and_2", 3: "deepspeed.runtime.zero.stage3"}


@pytest.mark.parametrize("stage", [2, 3])
def test_the_installed_deepspeed_defines_every_private_name(stage):
    pytest.importorskip("deepspeed")
    source = inspect.getsource(importlib.import_module(ZERO_MODULES[stage]))
    names = [entry.name for entry in PRIVATE_NAMES if stage in entry.stages]
    gone = [name for name in names if f"self.{name} =" not in source and f"def {name}(" not in source]
    assert not gone


@pytest.mark.parametrize(
    ("stage", "name"), [(stage, entry.name) for entry in PRIVATE_NAMES for stage in entry.stages]
)
def test_a_missing_name_is_reported_with_the_version(stage, name, monkeypatch):
    version = pytest.importorskip("deepspeed").__version__.split("+")[0]
    optimizer = SimpleNamespace(**{entry.name: None for entry in PRIVATE_NAMES})
    check_private_names(optimizer, stage)
    monkeypatch.delattr(optimizer, name)
    with pytest.raises(StageError, match=rf"DeepSpeed {version}.*zero{stage}.*{name} \("):
        check_private_names(optimizer, stage)
