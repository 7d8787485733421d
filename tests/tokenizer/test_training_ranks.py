"""The tokenizer and the VAE on two ranks over gloo end with the weights and codebooks of one, in float64."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from audiollm.audio import save
from audiollm.codec import load_codec
from audiollm.errors import StageError
from audiollm.files.atomic import read_json, read_jsonl
from audiollm.recipe.ranks import ALONE, Ranks
from audiollm.recipe.runner import Context, run_recipe
from audiollm.recipe.stages import Recipe, load_recipe
from audiollm.train.loop.loop import LoopConfig, train
from tests.audiollm.train.two_ranks import all_tensors, on_two_ranks
from tokenizer.clips import Clip, ClipStore, Crops
from tokenizer.continuous.data import StereoStore
from tokenizer.continuous.model import AudioVAE, VAEConfig
from tokenizer.continuous.task import VAETask, VAETaskConfig
from tokenizer.native.model import AudioTokenizer, TokenizerConfig
from tokenizer.teacher.training import TeacherTrainingConfig
from tokenizer.training import run as stage
from tokenizer.training import task as tokenizer_task
from tokenizer.training.discriminators import DiscriminatorConfig
from tokenizer.training.losses import BatchShare
from tokenizer.training.task import CropBatch, TokenizerTask, TokenizerTaskConfig

CPU = torch.device("cpu")
LEARNING_RATE = 2e-3
STEPS, KINDS = 10, ("rvq", "split_rvq", "fsq", "rvq with a harmonic source")
VAES = ("vae", "vae with a harmonic source", "vae with a phase band")
QUICK = ("rvq", "vae with a phase band")
"""The others are slow proofs; `test_quantizer_ranks` has every quantizer on two ranks."""
GAME = DiscriminatorConfig(periods=(2, 3), stft_windows=(256,), channels=4, max_channels=8)
SHAPE = {
    "mel_hidden_size": 16, "hidden_size": 24, "encoder_layers": (1, 1), "decoder_layers": (1, 1),
    "latent_dim": 8, "num_mels": 40,
}  # fmt: skip


class DoubleTokenizerTask(TokenizerTask):
    """The task in float64: its batches too."""

    def crops(self, generator: torch.Generator) -> Crops:
        crops = super().crops(generator)
        return crops._replace(samples=crops.samples.double())


class DoubleVAETask(VAETask):
    """The task in float64: its batches too."""

    def batch(self, step: int, generator: torch.Generator, ranks: Ranks = ALONE) -> CropBatch:
        batch = super().batch(step, generator, ranks)
        return batch._replace(samples=batch.samples.double())


def write_clips(folder: Path) -> None:
    """Six harmonic tones of 1 to 2 seconds, with noise."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for index in range(6):
        time_N = torch.arange(24_000 + 4_000 * index) / 24_000
        pitch = 110 * 2 ** (index / 4)
        tone_N = torch.stack([torch.sin(2 * math.pi * pitch * k * time_N) / k for k in range(1, 6)]).sum(0)
        noise_N = torch.randn(len(tone_N), generator=generator)
        save(folder / f"{index}.wav", 0.1 * tone_N[None] + 0.01 * noise_N, 24_000)


def train_tokenizer(folder: Path, kind: str, ranks: Ranks = ALONE) -> None:
    """All phases in ten steps: autoencoder, codebooks from 2, dead codes replaced, adversary from 6."""
    torch.manual_seed(0)
    store = ClipStore([Clip(path, 0.0, None) for path in sorted((folder / "clips").glob("*"))], 24_000)
    quantizer, _, source = kind.partition(" with ")
    shape = TokenizerConfig(**SHAPE, codebook_size=16, quantizer=quantizer, harmonic_source=bool(source))  # type: ignore[arg-type]
    config = TokenizerTaskConfig(
        seed=0, batch_size=5, crop_frames=6, autoencoder_share=0.2, adversary_share=0.6, revive_every=1,
        revive_until=1.0, kmeans_batches=13, discriminators=GAME,
        pitch_weight=1.0 if source else 0.0,
    )  # fmt: skip
    task = DoubleTokenizerTask(AudioTokenizer(shape), store, store, config, ranks=ranks)
    run(folder / name_of(kind, ranks), task, ranks)
    task.refit_codebooks()
    torch.save(task.model.state_dict(), folder / f"{name_of(kind, ranks)}-{ranks.rank}.pt")


def train_vae(folder: Path, kind: str, ranks: Ranks = ALONE) -> None:
    torch.manual_seed(0)
    clips = [Clip(path, 0.0, None) for path in sorted((folder / "clips").glob("*"))]
    store = StereoStore(clips, 16_000)
    source = kind == "vae with a harmonic source"
    shape = VAEConfig(
        sample_rate=16_000,
        mel_hop_samples=128,
        n_fft=512,
        harmonic_source=source,
        phase_band_hz=800.0 if kind == "vae with a phase band" else 0.0,
        **SHAPE,  # type: ignore[arg-type]
    )
    config = VAETaskConfig(
        seed=0, batch_size=5, crop_frames=6, adversary_share=0.5, discriminators=GAME,
        pitch_weight=1.0 if source else 0.0,
    )  # fmt: skip
    task = DoubleVAETask(AudioVAE(shape), store, store, config, ranks)
    # from a working codec, each step at the others' rate makes rounding errors 30 times as large
    rate = 2e-4 if kind == "vae with a phase band" else LEARNING_RATE
    run(folder / name_of(kind, ranks), task, ranks, rate)
    torch.save(task.model.state_dict(), folder / f"{name_of(kind, ranks)}-{ranks.rank}.pt")


def run(
    folder: Path, task: TokenizerTask | VAETask, ranks: Ranks, learning_rate: float = LEARNING_RATE
) -> None:
    folder.mkdir(exist_ok=True)
    for module in (*task.modules().values(), task._loss):
        module.double()
    recipe = Recipe("test", Path("test.yaml"), "tiny", 0, folder, (), {})
    context = Context(folder, recipe, Console(quiet=True), {}, ranks)
    loop = LoopConfig(
        seed=0, steps=STEPS, learning_rate=learning_rate, warmup_steps=2, ema_decay=0.9, log_every=1, clip_norm=0.5,
        precision="fp32", unused_parameters=isinstance(task, TokenizerTask), report_to=(), evaluate_every=5,
    )  # fmt: skip
    train(task, loop, folder, context, CPU)


def name_of(kind: str, ranks: Ranks) -> str:
    return f"{kind}-of-{ranks.world}"


def work(folder: Path, ranks: Ranks, kind: str) -> None:
    (train_vae if kind in VAES else train_tokenizer)(folder, kind, ranks)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("ranks")
    write_clips(folder / "clips")
    return folder


@pytest.fixture(
    scope="module",
    params=[
        kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in (*KINDS, *VAES)
    ],
)
def runs(clips: Path, request: pytest.FixtureRequest) -> tuple[Path, str]:
    """The folder of the runs on one rank and on two, and their kind."""
    work(clips, ALONE, request.param)
    on_two_ranks(partial(work, kind=request.param), clips)
    return clips, request.param


def test_two_ranks_end_with_the_weights_of_one(runs: tuple[Path, str]) -> None:
    """Five rows a step: three on one rank and two on the other. Weights, moments, norms and codebooks to 1e-10."""
    folder, kind = runs
    for part in ("modules", "optimizers", "ema"):
        one, two = (all_tensors(folder / f"{kind}-of-{n}" / "checkpoint", part) for n in (1, 2))
        assert one.keys() == two.keys() and one
        for key, value in one.items():
            torch.testing.assert_close(two[key], value, rtol=1e-9, atol=1e-10, msg=f"{kind} {part} {key}")
    last = torch.load(folder / f"{kind}-of-1-0.pt", weights_only=True)
    for rank in (0, 1):
        other = torch.load(folder / f"{kind}-of-2-{rank}.pt", weights_only=True)
        for key, value in last.items():
            torch.testing.assert_close(other[key], value, rtol=1e-9, atol=1e-10, msg=f"{kind} {rank} {key}")


def test_two_ranks_log_the_figures_of_one(runs: tuple[Path, str]) -> None:
    folder, kind = runs
    one, two = (read_jsonl(folder / f"{kind}-of-{n}" / "metrics.jsonl") for n in (1, 2))
    losses = [[row for row in rows if "loss" in row] for rows in (one, two)]
    assert len(losses[0]) == len(losses[1]) == STEPS and "discriminator" in losses[0][-1]
    for first, second in zip(*losses, strict=True):
        assert first.keys() == second.keys()
        for key, value in first.items():
            assert second[key] == pytest.approx(value, rel=1e-6, abs=1e-9), key
    if kind == "rvq":
        assert any(row.get("revived", 0) > 0 for row in losses[0]), "dead codes must be replaced"


def test_rows_are_shared_out_in_order_and_none_is_left() -> None:
    for size, world in ((5, 2), (16, 3), (7, 7)):
        shares = [BatchShare(size, Ranks(rank, world)) for rank in range(world)]
        assert [row for share in shares for row in range(size)[share.rows]] == list(range(size))
        assert sum(share.fraction for share in shares) == pytest.approx(1.0)
        assert [b for share in shares for b in share.own_batches(3)] == [0, 1, 2]
    with pytest.raises(StageError, match="batch_size is 2, and 3 processes train"):
        BatchShare(2, Ranks(0, 3)).check()


RECIPE = """
name: {name}
stages:
  - train_tokenizer:
      audio: {audio}
      teacher: {teacher}
      steps: 10
      batch_size: 3
      crop_frames: 6
      mel_hidden_size: 16
      hidden_size: 16
      blocks: [1, 1, 1, 1]
      precision: fp32
      adversary_share: 0.8
"""


def run_two(folder: Path, ranks: Ranks) -> None:
    """The stage, with few clips for its teacher and its last codebooks; this process runs nothing else."""
    few = {"batch_size": 2, "unit_batches": 2, "statistics_batches": 2}
    stage.TeacherTrainingConfig = partial(TeacherTrainingConfig, **few)  # type: ignore[misc,assignment]
    tokenizer_task.REFIT_FRAMES_PER_CODE = 1
    tokenizer_task.FRAMES_FITTED = 100
    run_recipe(load_recipe(folder / "two.yaml", runs=folder), Console(quiet=True), ranks=ranks)


def test_the_stage_trains_a_tokenizer_on_two_ranks(tmp_path: Path) -> None:
    write_clips(tmp_path / "clips")
    (tmp_path / "clips" / "broken.wav").write_bytes(b"RIFF")
    recipe = tmp_path / "two.yaml"
    recipe.write_text(RECIPE.format(name="two", audio=tmp_path / "clips", teacher="own"))
    on_two_ranks(run_two, tmp_path)
    stage = tmp_path / "two" / "train_tokenizer"
    assert load_codec(stage / "model").encode(torch.randn(1, 5000) * 0.1).shape == (8, 6)
    result = read_json(stage / "stage.json")
    assert result["state"] == "done" and result["figures"]["set_aside"] == 1
    assert 0 < result["figures"]["features_kept"] <= 1
    assert len([row for row in read_jsonl(stage / "metrics.jsonl") if "loss/discriminator" in row]) >= 1
    assert (stage / "teacher" / "model" / "model.safetensors").exists()
