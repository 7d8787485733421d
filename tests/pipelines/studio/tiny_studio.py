"""A studio with a tiny random model, for tests: nothing is trained."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from audiollm.audio import Waveform, save
from audiollm.data.records.thoughts import ThoughtEvent, ThoughtRecord
from audiollm.flow.generator import SoundGenerator
from audiollm.flow.model.mmdit import MMDiTConfig
from audiollm.flow.service import SoundService
from audiollm.flow.sound_model import SoundModel, SoundModelConfig, condition_facts
from audiollm.video.writing import write_video
from pipelines.audiocot.thinking import MeasuredThinker, ThoughtAnswer, ThoughtRequest
from pipelines.studio.editor import SoundEditor
from pipelines.studio.limits import StudioLimits
from pipelines.studio.regions import RegionFinder
from pipelines.studio.store import ProjectStore, SoundVersion, StoredProject, owner_of
from tests.audiollm.flow.toy import AUTOENCODER, DIM, HOP, RATE, tone

ALICE, BOB = owner_of("alice"), owner_of("bob")


def write_model(folder: Path) -> Path:
    """Save a model of random weights that takes words and pictures, as `train_flow` does."""
    torch.manual_seed(0)
    shape = MMDiTConfig(
        latent_dim=DIM, latent_rate=RATE / HOP, hidden_size=32, num_heads=2, multi_stream_blocks=1,
        single_stream_blocks=1, frames_dim=32, sync_dim=0, caption_dim=32, cot_dim=32,
    )  # fmt: skip
    config = SoundModelConfig(
        "native",
        vars(shape),
        "toy",
        RATE,
        1,
        HOP,
        {
            "frames": condition_facts(
                kind="pictures", made_by="pictures of 16 x 16 at 8 per second", width=32, rate=8.0, side=16
            ),
            "caption": condition_facts(kind="words", width=32),
            "cot": condition_facts(kind="words", width=32),
        },
        ("�", "a", "bell", "rain", "overlay", "remove"),
        dropout_each=0.2,
        dropout_together=0.1,
        context_trained=True,
        longest_s=3.0,
    )
    model = SoundModel(config)
    with torch.no_grad():
        for weight in model.parameters():
            if not weight.any():  # training begins with zeros in the last layer, which is silence in one step
                weight.normal_(std=0.1)
    model.save_pretrained(folder / "model")
    return folder


def tiny_generator(folder: Path) -> SoundGenerator:
    return SoundGenerator.load(write_model(folder), AUTOENCODER)


def made_editor(
    folder: Path, generator: SoundGenerator | None, limits: StudioLimits | None = None
) -> SoundEditor:
    limits = limits or StudioLimits()
    store = ProjectStore(folder, limits)
    return SoundEditor(SoundService(generator), store, RegionFinder(), MeasuredThinker(None), False, limits)


@contextmanager
def closing(editor: SoundEditor) -> Iterator[SoundEditor]:
    try:
        yield editor
    finally:
        editor.close()


def write_recording(path: Path, seconds: float = 2.0) -> Path:
    sound = torch.cat([tone(60.0, seconds / 2), tone(200.0, seconds / 2, 0.1)], dim=1)
    save(path, sound.repeat(2, 1), RATE)
    return path


def moving_pictures(count: int = 24, height: int = 96, width: int = 128) -> list[np.ndarray]:
    """A red square of 16 pixels that moves to the right by 3 pixels per picture, over slowly changing green."""
    shades = np.repeat(60 + np.arange(width)[None] * 60 // width, height, axis=0).astype(np.uint8)
    pictures = []
    for number in range(count):
        picture = np.stack([shades // 2, shades, shades // 2], axis=2)
        picture[40:56, 10 + 3 * number : 26 + 3 * number] = (220, 30, 30)
        pictures.append(picture)
    return pictures


def write_film(path: Path, with_sound: bool = True) -> Path:
    sound = Waveform(tone(100.0, 3.0).repeat(2, 1), RATE) if with_sound else None
    write_video(path, moving_pictures(), 8, sound)
    return path


def write_still(path: Path, seconds: float) -> Path:
    """A film of one picture, which is shown for as long as the sound lasts."""
    write_video(path, moving_pictures(1), 1 / seconds, Waveform(tone(100.0, seconds), RATE))
    return path


def opened(editor: SoundEditor, path: Path, owner: str = ALICE, name: str = ""):  # type: ignore[no-untyped-def]
    """A project of a copy of a file."""
    upload = editor.store.incoming() / "upload"
    upload.write_bytes(path.read_bytes())
    return editor.store.create(owner, name or path.name, upload)


def copied_version(store: ProjectStore, project: StoredProject, parent: SoundVersion) -> SoundVersion:
    """A version with the sound of its parent, made without a model."""
    with store.new_version(project, parent) as (number, path):
        shutil.copy(store.sound(project, parent), path)
        return store.finish(project, number, parent, "add", "the same", (0, 100), {})


class ScriptedWriter:
    """Answers as a model that writes does, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[ThoughtRequest] = []
        self.problem: Exception | None = None

    def think(self, asked: ThoughtRequest) -> ThoughtAnswer:
        self.asked.append(asked)
        if self.problem is not None:
            raise self.problem
        record = ThoughtRecord(events=[ThoughtEvent(sound="bell", start_s=0.5, end_s=1.0)])
        return ThoughtAnswer(record, "add", (0.5, 1.0)) if asked.instruction else ThoughtAnswer(record)
