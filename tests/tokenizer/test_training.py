"""The tokenizer's training task: phases, gradients, the teacher, alarms, and resuming with both optimizers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from audiollm.audio import save
from audiollm.files.atomic import read_jsonl
from audiollm.recipe.ranks import Ranks
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Recipe
from audiollm.train.loop.loop import LoopConfig, train
from audiollm.train.loop.task import step_generator
from tokenizer.clips import Clip, ClipStore, random_crops
from tokenizer.native.model import AudioTokenizer, TokenizerConfig
from tokenizer.teacher.model import MelUnitConfig, MelUnitEncoder, SemanticTeacher
from tokenizer.teacher.training import fit_statistics
from tokenizer.training.discriminators import DiscriminatorConfig
from tokenizer.training.task import SETTLING_STEPS, TokenizerTask, TokenizerTaskConfig

CPU = torch.device("cpu")
SHAPE = TokenizerConfig(
    mel_hidden_size=16, hidden_size=24, encoder_layers=(1, 1), decoder_layers=(1, 1), codebook_size=16,
    latent_dim=8, num_mels=40,
)  # fmt: skip
STEPS = 12


class Killed(Exception):
    pass


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ClipStore:
    """Eight tones with harmonics, two seconds each."""
    folder = tmp_path_factory.mktemp("clips")
    time_N = torch.arange(48_000) / 24_000
    for index in range(8):
        pitch = 110 * 2 ** (index / 4)
        tone_N = torch.stack([torch.sin(2 * math.pi * pitch * k * time_N) / k for k in range(1, 8)]).sum(0)
        save(folder / f"{index}.wav", 0.1 * tone_N[None], 24_000)
    return ClipStore([Clip(path, 0.0, 2.0) for path in sorted(folder.glob("*.wav"))], 24_000)


@pytest.fixture(scope="module")
def teacher(store: ClipStore) -> SemanticTeacher:
    torch.manual_seed(0)
    encoder = MelUnitEncoder(MelUnitConfig(hidden_size=16, layers=1, heads=2, num_units=8))
    teacher = SemanticTeacher(encoder)
    fit_statistics(teacher, store, seed=0, batches=1)
    return teacher


def task_of(store: ClipStore, teacher: SemanticTeacher | None, quantizer: str = "rvq") -> TokenizerTask:
    torch.manual_seed(0)
    shape = TokenizerConfig(
        **{**SHAPE.__dict__, "quantizer": quantizer, "semantic_dim": teacher.feature_dim if teacher else 0}
    )
    config = TokenizerTaskConfig(
        seed=0, batch_size=4, crop_frames=6, autoencoder_share=0.2, adversary_share=0.6, revive_every=2,
        kmeans_batches=2,
        discriminators=DiscriminatorConfig(periods=(2, 3), stft_windows=(256,), channels=4, max_channels=8),
    )  # fmt: skip
    return TokenizerTask(AudioTokenizer(shape), store, store, config, teacher)


def run(folder: Path, task: TokenizerTask, **changes: object) -> Context:
    folder.mkdir(exist_ok=True)
    recipe = Recipe("test", Path("test.yaml"), "tiny", 0, folder, (), {})
    context = Context(folder, recipe, Console(record=True, width=200), {})
    values: dict[str, object] = {
        "seed": 0, "steps": STEPS, "minutes": None, "learning_rate": 2e-3, "warmup_steps": 2, "ema_decay": 0.9,
        "log_every": 1, "checkpoint_seconds": 0.0, "precision": "fp32", "unused_parameters": True,
    }  # fmt: skip
    train(task, LoopConfig(**{**values, **changes}), folder, context, CPU)  # type: ignore[arg-type]
    return context


def states(task: TokenizerTask) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value.clone()
        for name, module in task.modules().items()
        for key, value in module.state_dict().items()
    }


@pytest.mark.parametrize("quantizer", ["rvq", "split_rvq", "fsq"])
def test_every_trainable_parameter_moves_and_the_teacher_does_not(
    tmp_path: Path, store: ClipStore, teacher: SemanticTeacher, quantizer: str
) -> None:
    task = task_of(store, teacher, quantizer)
    before, taught = states(task), {k: v.clone() for k, v in teacher.state_dict().items()}
    probe = torch.randn(1, 9_600, generator=torch.Generator().manual_seed(0)) * 0.1
    features = teacher.features(probe)
    run(tmp_path / "run", task, weight_decay=0.0)
    after = states(task)
    for name, module in task.modules().items():
        for key, parameter in module.named_parameters():
            if name == "discriminators" and key.endswith("bias"):
                continue  # within the hinge's margin real and made audio pull some equally, to either side
            assert not torch.equal(before[f"{name}.{key}"], after[f"{name}.{key}"]), f"{name}.{key}"
            assert parameter.requires_grad
    for key, value in teacher.state_dict().items():
        assert torch.equal(value, taught[key]), key
    assert torch.equal(teacher.features(probe), features)
    assert not any(p.requires_grad for p in teacher.parameters()) and not teacher.train().training


def test_the_phases_begin_where_they_should(
    tmp_path: Path, store: ClipStore, teacher: SemanticTeacher
) -> None:
    run(tmp_path / "run", task_of(store, teacher))
    rows = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    begin, adversary = round(0.2 * STEPS), math.ceil(0.6 * STEPS)
    assert [row["commitment"] > 0 for row in rows] == [step >= begin for step in range(STEPS)]
    assert ["adversarial" in row for row in rows] == [step >= adversary for step in range(STEPS)]
    assert ["loss/discriminator" in row for row in rows] == [step >= adversary for step in range(STEPS)]
    assert all("semantic" in row for row in rows)
    assert rows[-1]["semantic"] < rows[0]["semantic"]
    assert 0 < rows[-1]["codes_alive"] <= 1 and 1 <= rows[-1]["perplexity/7"] <= 16


@pytest.mark.parametrize("kill_at", [2, 5, 9])
def test_killed_in_every_phase_it_resumes_bit_for_bit(
    tmp_path: Path, store: ClipStore, teacher: SemanticTeacher, kill_at: int
) -> None:
    run(tmp_path / "whole", whole := task_of(store, teacher))
    killed = task_of(store, teacher)
    batch = killed.batch

    def batch_until(step: int, generator: torch.Generator, *ranks: Ranks) -> Tensor:
        if step == kill_at:
            raise Killed
        return batch(step, generator)

    killed.batch = batch_until  # type: ignore[method-assign]
    with pytest.raises(Killed):
        run(tmp_path / "killed", killed)
    run(tmp_path / "killed", resumed := task_of(store, teacher))
    for key, value in states(whole).items():
        assert torch.equal(value, states(resumed)[key]), key
    for name in ("optimizers.safetensors", "ema.safetensors"):
        once, twice = (load_file(tmp_path / f / "checkpoint" / name) for f in ("whole", "killed"))
        assert once.keys() == twice.keys() and all(torch.equal(once[key], twice[key]) for key in once)


def test_alarms_name_a_collapse_and_a_dead_discriminator(store: ClipStore) -> None:
    task = task_of(store, None)
    assert task.alarms({"codes_alive": 0.9}, 10) == {}
    assert list(task.alarms({"codes_alive": 0.02}, 10)) == ["codebook collapse"]
    assert list(task.alarms({"perplexity/0": 9.0, "perplexity/7": 0.7}, 10)) == ["codebook collapse"]
    assert task.alarms({"perplexity/0": 9.0, "perplexity/7": 0.9}, 10) == {}
    watch = task.modules()["watch"]
    watch.steps.fill_(10_000)  # a gap of zero for as long
    assert any(kind.startswith("dead discriminator") for kind in task.alarms({}, 10_000))


def test_codebooks_that_have_just_begun_raise_no_alarm(store: ClipStore) -> None:
    task, collapsed = task_of(store, None), {"perplexity/7": 0.7}
    begin = round(task.config.autoencoder_share * 100)
    next(task.updates(task.batch(begin, torch.Generator()), begin, 100))
    assert task.alarms(collapsed, begin + SETTLING_STEPS - 1) == {}
    assert list(task.alarms(collapsed, begin + SETTLING_STEPS)) == ["codebook collapse"]


def test_any_prefix_of_codebooks_decodes_and_more_are_closer(tmp_path: Path, store: ClipStore) -> None:
    task = task_of(store, None)
    run(tmp_path / "run", task, steps=50, log_every=50)
    clip = store[3][None, :24_000]
    model = task.model
    codes = model.encode(clip)
    assert isinstance(model, AudioTokenizer)
    latent = model.latent(clip).detach()
    gaps = [float((model.quantizer.decode(codes[None, :k]) - latent).square().mean()) for k in (1, 2, 4, 8)]
    assert gaps == sorted(gaps, reverse=True) and gaps[-1] < 0.7 * gaps[0]
    assert all(model.decode(codes[:k]).shape == (1, 24_000) for k in (1, 3, 8))


def test_crops_are_drawn_by_duration(tmp_path: Path) -> None:
    """One long clip and fifty short ones of the same length in all: half of the sound comes from each."""
    save(tmp_path / "long.wav", torch.full((1, 24_000 * 10), 0.1), 24_000)
    clips = [Clip(tmp_path / "long.wav", 0.0, 10.0)]
    for index in range(50):
        save(tmp_path / f"{index}.wav", torch.full((1, 4_800), -0.1), 24_000)
        clips.append(Clip(tmp_path / f"{index}.wav", 0.0, 0.2))
    store = ClipStore(clips, 24_000)
    dice = torch.Generator().manual_seed(0)
    drawn = [float(store.draw(dice)[1][0] > 0) for _ in range(600)]
    assert sum(drawn) / 600 == pytest.approx(0.5, abs=0.08)
    assert random_crops(store, 3, 9_600, dice).samples.shape == (3, 9_600)


@pytest.mark.parametrize("name", ["commitment", "semantic"])
def test_the_loss_holds_each_part_by_its_weight(
    store: ClipStore, teacher: SemanticTeacher, name: str
) -> None:
    """Beside the balanced part, which is the same whatever these weights are."""

    def loss_and_part(weight: float) -> tuple[float, float]:
        task = task_of(store, teacher)
        task.config = replace(task.config, trained_codebooks=True, **{f"{name}_weight": weight})
        batch_BN = task.batch(3, step_generator(0, 3))
        update = next(iter(task.updates(batch_BN, 3, STEPS)))
        return float(update.loss.detach()), float(update.figures[name])

    without, part = loss_and_part(0.0)
    assert part > 0.01
    for weight in (1.0, 2.5):
        loss, same = loss_and_part(weight)
        assert same == part and loss - without == pytest.approx(weight * part, rel=1e-3)
