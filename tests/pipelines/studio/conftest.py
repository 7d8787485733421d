"""An editor with a tiny model, for the tests of the studio."""

from __future__ import annotations

from pathlib import Path

import pytest

from audiollm.flow.generator import SoundGenerator
from tests.pipelines.studio.tiny_studio import (
    closing,
    made_editor,
    tiny_generator,
)


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> SoundGenerator:
    return tiny_generator(tmp_path_factory.mktemp("model"))


@pytest.fixture
def editor(generator: SoundGenerator, tmp_path: Path):  # type: ignore[no-untyped-def]
    with closing(made_editor(tmp_path / "studio", generator)) as made:
        yield made
