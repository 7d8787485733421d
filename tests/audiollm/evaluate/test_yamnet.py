"""YAMNet's file: `auto` takes it from an installed package or from its place, and only a published one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from audiollm.commands.doctor import _yamnet
from audiollm.errors import ConfigError
from audiollm.evaluate.judges import yamnet
from audiollm.evaluate.judges.yamnet import checked_tagger, default_path, find_yamnet
from audiollm.evaluate.sound.stage import EvaluateSoundConfig
from audiollm.files.atomic import file_digest
from pipelines.annotate.steps.events import Events, EventsConfig
from pipelines.audiocot.steps.tags import Tags, TagsConfig
from pipelines.steps.chain import paths_of, settings_hash

SHARED = Path(
    os.environ.get("AUDIOLLM_SHARED_DATA") or Path(__file__).resolve().parents[4] / "shared" / "data"
)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of a user's copy, in an empty data folder."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    default_path().parent.mkdir(parents=True)
    return default_path()


def publish(path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes = b"weights") -> Path:
    """A file whose digest counts as that of a published one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    monkeypatch.setattr(yamnet, "PUBLISHED", {**yamnet.PUBLISHED, file_digest(path): "of this test"})
    return path


def install(folder: Path, name: str, content: bytes) -> Path:
    """A package on the path that ships a file."""
    file = folder / name / "models" / "YAMNet_v1.tflite"
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "RECORD").write_text(
        f"{file.relative_to(folder)},,\n{about.name}/METADATA,,\n{about.name}/RECORD,,\n"
    )
    return file


def test_nothing_is_taken_where_nothing_is(place: Path) -> None:
    assert find_yamnet() is None
    with pytest.raises(ConfigError, match=r"auto: no installed package ships YAMNet.*docs/models.md"):
        checked_tagger("auto")
    with pytest.raises(ConfigError, match="no such file or folder"):
        checked_tagger(place.with_name("other.tflite"))


def test_the_copy_of_a_user_is_taken_by_its_digest(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(place, monkeypatch)
    assert find_yamnet() == checked_tagger("auto") == place
    place.write_bytes(b"weights that were cut off")
    with pytest.raises(ConfigError, match="not a published YAMNet: its SHA-256 is "):
        find_yamnet()
    assert checked_tagger(place) == place, "a tagger that is given by its path may be any"


def test_an_installed_package_goes_before_the_copy_and_another_file_does_not_count(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(place, monkeypatch)
    install(tmp_path / "first", "alien", b"another network")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "first")])
    assert find_yamnet() == place
    shipped = install(tmp_path / "second", "brings_yamnet", b"weights")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "second")])
    assert find_yamnet() == shipped


@pytest.mark.parametrize(("config", "step"), [(EventsConfig, Events), (TagsConfig, Tags)])
def test_a_step_takes_auto(
    config: type[EventsConfig], step: type[Events | Tags], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = config.model_validate({"model": "auto"})
    assert lacking.model == "auto" and paths_of(lacking) == {}
    reason = step(lacking).missing()
    assert reason is not None and reason.startswith(
        f"{step.name}.model: auto: no installed package ships YAMNet"
    )
    publish(place, monkeypatch)
    settings = config.model_validate({"model": "auto"})
    assert settings.model == place and step(settings).missing() is None
    before = settings_hash(step(settings), settings)
    publish(place, monkeypatch, b"weights of another build")
    assert settings_hash(step(settings), settings) != before, "values of another file are not reused"
    place.write_bytes(b"damaged")
    with pytest.raises(ValidationError, match="not a published YAMNet"):
        config.model_validate({"model": "auto"})


def test_the_stage_that_scores_sounds_takes_auto(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sounds = tmp_path / "generated.jsonl"
    sounds.touch()
    settings = {"sounds": sounds, "classes": "auto"}
    with pytest.raises(ValidationError, match="no installed package ships YAMNet"):
        EvaluateSoundConfig.model_validate(settings)
    absent: list[Path] = []
    EvaluateSoundConfig.model_validate(settings, context={"absent": absent})
    assert absent == [place]
    publish(place, monkeypatch)
    assert EvaluateSoundConfig.model_validate(settings).classes == str(place)


def test_the_doctor_looks_for_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = _yamnet()
    assert check.state == "optional" and str(place) in check.remedy and "docs/models.md" in check.remedy
    publish(place, monkeypatch)
    check = _yamnet()
    assert check.state == "ok" and str(place) in check.finding
    place.write_bytes(b"damaged")
    check = _yamnet()
    assert check.state == "warning" and "SHA-256" in check.finding


def test_the_digests_are_in_the_document() -> None:
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    assert all(digest in text for digest in yamnet.PUBLISHED)


def test_the_published_file_is_known() -> None:
    files = list((SHARED / "judge_models").rglob("yamnet*.tflite"))
    if not files:
        pytest.skip(f"no YAMNet under {SHARED / 'judge_models'}")
    assert {file_digest(file) for file in files} <= yamnet.PUBLISHED.keys()
