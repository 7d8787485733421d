"""An editor with a tiny model, and the studio in a real browser, for the tests of the studio."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from audiollm.flow.generator import SoundGenerator
from tests.audiollm.flow.toy import AUTOENCODER
from tests.pipelines.studio.tiny_studio import (
    closing,
    made_editor,
    tiny_generator,
    write_model,
)


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> SoundGenerator:
    return tiny_generator(tmp_path_factory.mktemp("model"))


@pytest.fixture
def editor(generator: SoundGenerator, tmp_path: Path):  # type: ignore[no-untyped-def]
    with closing(made_editor(tmp_path / "studio", generator)) as made:
        yield made


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The studio in a process of its own, with a tiny model, a run and data."""
    from tests.pipelines.annotate.annotation_report_run import annotated
    from tests.pipelines.studio.real_browser import Server, write_data, write_run

    folder = tmp_path_factory.mktemp("studio")
    model = write_model(folder / "model")
    runs = write_run(folder / "runs")
    data = write_data(folder / "cot")
    (folder / "audio").mkdir()
    annotated(folder / "annotated", folder / "audio")
    found = Server(
        folder / "work", "--model", str(model), "--autoencoder", AUTOENCODER, "--runs", str(runs), "--data", str(data),
        "--data", str(folder / "annotated"),
    )  # fmt: skip
    found.runs, found.data = runs, data
    yield found
    found.end()
    assert not (folder / "tried.txt").exists(), (folder / "tried.txt").read_text()


@pytest.fixture(scope="module")  # playwright's event loop must not be there when other modules run theirs
def chromium() -> Iterator[Any]:
    from tests.pipelines.studio.real_browser import launched

    with launched() as found:
        yield found
