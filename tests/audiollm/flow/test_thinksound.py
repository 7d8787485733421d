"""The released transformer against the class of the package `thinksound`: weights, velocity, nulls, parameter counts.

The package pins another torch: its code is put in a folder of its own (`pip install --no-deps --target FOLDER
thinksound==0.0.19`), which `AUDIOLLM_THINKSOUND` names; the tests that need it skip without.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from audiollm.errors import ConfigError
from audiollm.flow.model.packed import MODALITIES, TIMED, Conditions, Features, Modality, pack_conditions
from audiollm.flow.model.rows import rows_of
from audiollm.flow.model.thinksound import ThinkSound, ThinkSoundConfig, sync_length

CPU = torch.device("cpu")
LATENTS, FRAMES, SYNC = 194, 72, 216
FOLDER = os.environ.get("AUDIOLLM_THINKSOUND", "")


@pytest.fixture(scope="module")
def released() -> Iterator[Any]:
    """The module `ThinkSound.models.mmdit`, loaded without its package's own imports; `dac` is a stand-in."""
    root = Path(FOLDER) / "ThinkSound"
    if not FOLDER or not (root / "models" / "mmdit.py").exists():
        pytest.skip("AUDIOLLM_THINKSOUND does not name a folder with the package thinksound 0.0.19")
    before = dict(sys.modules)
    for name, folder in (("ThinkSound", root), ("ThinkSound.models", root / "models")):
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    for name in ("dac", "dac.nn", "dac.nn.layers"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["dac.nn.layers"].Snake1d = torch.nn.Identity  # type: ignore[attr-defined]
    yield import_module("ThinkSound.models.mmdit")
    for name in set(sys.modules) - set(before):
        if name.split(".")[0] in ("ThinkSound", "dac"):
            del sys.modules[name]


def theirs_of(released: Any, config: ThinkSoundConfig, frames: int = FRAMES) -> Any:
    torch.manual_seed(0)
    return released.MMmodule(
        latent_dim=config.latent_dim,
        clip_dim=config.frames_dim,
        sync_dim=config.sync_dim,
        text_dim=config.text_dim,
        hidden_dim=config.hidden_size,
        depth=config.depth,
        fused_depth=config.fused_depth,
        num_heads=config.num_heads,
        latent_seq_len=LATENTS,
        clip_seq_len=frames,
        sync_seq_len=SYNC,
        v2=True,
        kernel_size=config.kernel_size,
        gated_video=config.fusion == "released",
        add_video=config.fusion == "released",
    ).eval()


def randomized(model: Any) -> Any:
    """Every parameter is random: a zero hides what it multiplies."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def inputs(batch: int, frames: int = FRAMES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = {
        "x": (batch, 64, LATENTS),
        "frames": (batch, frames, 1024),
        "sync": (batch, SYNC, 768),
        "caption": (batch, 77, 1024),
        "cot": (batch, 77, 2048),
    }
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    made["caption"][:, 12:] = 0.01  # real captions end in pads of nearly no variance
    return made


def conditions_of(given: dict[str, Tensor], index: int) -> Conditions:
    return {
        "frames": Features(given["frames"][index], torch.arange(given["frames"].shape[1]) / 8),
        "sync": Features(given["sync"][index], torch.arange(SYNC) / 24),
        "caption": Features(given["caption"][index]),
        "cot": Features(given["cot"][index]),
    }


def velocity_of(
    model: ThinkSound, given: dict[str, Tensor], t_B: Tensor, conditions: list[Conditions]
) -> Tensor:
    """Our velocity at the released model's time, in its layout `[B, D, T]`."""
    batch = len(given["x"])
    x_LD = given["x"].transpose(1, 2).flatten(0, 1)
    packed = pack_conditions(conditions, CPU)
    out_LD = -model(x_LD, 1 - t_B, packed, rows_of([LATENTS] * batch, CPU))
    return out_LD.unflatten(0, (batch, -1)).transpose(1, 2)


@pytest.mark.parametrize(
    "config",
    [
        ThinkSoundConfig(hidden_size=64, depth=4, fused_depth=2, num_heads=4),
        ThinkSoundConfig(hidden_size=64, depth=3, fused_depth=1, num_heads=4, kernel_size=7),
        ThinkSoundConfig(hidden_size=64, depth=3, fused_depth=1, num_heads=4, fusion="released"),
        pytest.param(ThinkSoundConfig(depth=3, fused_depth=1), marks=pytest.mark.slow),
    ],
    ids=["tiny", "wide kernels", "fusion", "full width"],
)
@torch.no_grad()
def test_the_same_weights_give_the_same_velocity(released: Any, config: ThinkSoundConfig) -> None:
    # without frames at the latents' own rate its fusion needs a package that it does not import
    frames = LATENTS if config.fusion == "released" else FRAMES
    theirs = randomized(theirs_of(released, config, frames))
    ours = ThinkSound(config).eval()
    ours.load_state_dict(theirs.state_dict())
    given, t_B = inputs(2, frames), torch.tensor([0.125, 0.875])  # 1 - t is exact
    arguments = (given["frames"], given["sync"], given["caption"], None, given["cot"], None, 1.0, 0.0, 0.0)
    wanted = theirs(given["x"], t_B, *arguments)
    found = velocity_of(ours, given, t_B, [conditions_of(given, index) for index in range(2)])
    assert float(wanted.abs().mean()) > 0.1
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_absent_modalities_are_its_nulls(released: Any) -> None:
    """Guidance of the class, which puts its nulls in, against ours from a branch without conditions."""
    config = ThinkSoundConfig(hidden_size=64, depth=3, fused_depth=1, num_heads=4)
    theirs = randomized(theirs_of(released, config))
    ours = ThinkSound(config).eval()
    ours.load_state_dict(theirs.state_dict())
    given, t_B = inputs(1), torch.tensor([0.375])
    arguments = (given["frames"], given["sync"], given["caption"], None, given["cot"], None, 3.0, 0.0, 0.0)
    wanted = theirs(given["x"], t_B, *arguments)
    with_all = velocity_of(ours, given, t_B, [conditions_of(given, 0)])
    without = velocity_of(ours, given, t_B, [{}])
    torch.testing.assert_close(without + 3 * (with_all - without), wanted, atol=1e-4, rtol=1e-4)
    assert float((with_all - without).abs().mean()) > 0.01


def test_pads_that_are_missing_are_refused() -> None:
    model = ThinkSound(ThinkSoundConfig(hidden_size=32, depth=2, fused_depth=1, num_heads=2))
    short: Conditions = {"caption": Features(torch.randn(5, 1024))}
    latents = rows_of([20], CPU)
    with pytest.raises(ValueError, match="77 rows, pads included"):
        model.project(pack_conditions([short], CPU), latents)
    wrong: Conditions = {"sync": Features(torch.randn(9, 768), torch.arange(9) / 24)}
    with pytest.raises(ValueError, match="segments of 8"):
        model.project(pack_conditions([wrong], CPU), latents)
    x_LD, t_B = torch.zeros(20, 64), torch.zeros(1)
    with pytest.raises(ValueError, match="audio context"):
        model(x_LD, t_B, pack_conditions([{}], CPU), latents, torch.zeros(20, 66))


SMALL = ThinkSoundConfig(
    latent_dim=8, frames_dim=12, sync_dim=10, text_dim=1030, hidden_size=32, depth=3, fused_depth=1, num_heads=2
)  # fmt: skip


def small_conditions(kinds: Sequence[Modality], length: int, seed: int) -> Conditions:
    """Conditions of a sound of so many latents, in the rows that the released structure takes."""
    draw, seconds = torch.Generator().manual_seed(seed), length / SMALL.latent_rate
    shapes = {"frames": (max(1, round(8 * seconds)), 12), "sync": (sync_length(seconds), 10),
              "caption": (77, 1024), "cot": (77, 1030)}  # fmt: skip
    return {
        name: Features(
            torch.randn(shapes[name], generator=draw).double(),
            torch.arange(shapes[name][0]) / 8 if name in TIMED else None,
        )
        for name in kinds
    }


def test_samples_of_other_lengths_and_modalities_change_nothing() -> None:
    """A pack against each sample alone; and the conditions of the pack are unchanged by the nulls beside them."""
    model = randomized(ThinkSound(SMALL)).double()
    kinds: list[tuple[Modality, ...]] = [MODALITIES, (), ("frames", "caption"), ("sync",), ("cot", "frames")]
    lengths, times_B = [43, 20, 64, 33, 20], torch.linspace(0.1, 0.9, 5).double()
    given = [small_conditions(each, lengths[n], n) for n, each in enumerate(kinds)]
    before = [{name: each.values_RC.clone() for name, each in conditions.items()} for conditions in given]
    xs = [
        torch.randn(length, 8, generator=torch.Generator().manual_seed(length)).double() for length in lengths
    ]
    with torch.no_grad():
        packed = pack_conditions(given, CPU)
        values = {name: each.values_RC.clone() for name, each in packed.features.items()}
        together = model(torch.cat(xs), times_B, packed, rows_of(lengths, CPU)).split(lengths)
        for name, each in values.items():
            assert torch.equal(packed.features[name].values_RC, each), name
        for n, (x_LD, conditions) in enumerate(zip(xs, given, strict=True)):
            alone = model(
                x_LD, times_B[n : n + 1], pack_conditions([conditions], CPU), rows_of([lengths[n]], CPU)
            )
            torch.testing.assert_close(together[n], alone, atol=1e-10, rtol=1e-10)
            assert float(alone.abs().mean()) > 1e-2
            assert all(torch.equal(conditions[name].values_RC, each) for name, each in before[n].items())


def test_the_velocity_is_zero_at_the_start() -> None:
    model = ThinkSound(SMALL).double()
    conditions = small_conditions(MODALITIES, 20, 0)
    velocity_LD = model(torch.randn(20, 8).double(), torch.rand(1).double(), pack_conditions([conditions], CPU),
                        rows_of([20], CPU))  # fmt: skip
    assert torch.equal(velocity_LD, torch.zeros(20, 8).double())


def test_the_released_shape() -> None:
    with torch.device("meta"):
        counts = [
            sum(p.numel() for p in ThinkSound(ThinkSoundConfig(fusion=fusion)).parameters())
            for fusion in ("none", "released")
        ]
    assert [round(count / 1e6, 1) for count in counts] == [1277.1, 1289.7]


def test_sync_length() -> None:
    """Synchformer's segments: not 24 rows per second, except by chance (measured on the released extraction)."""
    assert [sync_length(s) for s in (5, 9.009, 16, 30)] == [112, 216, 392, 736]


def test_gates_begin_at_one_half_after_all_initialisation() -> None:
    model = ThinkSound(
        ThinkSoundConfig(hidden_size=32, depth=2, fused_depth=1, num_heads=2, fusion="released")
    )
    gates = model.gated_mlp(torch.randn(50, 64) * 3)
    assert torch.equal(gates, torch.full_like(gates, 0.5))


def test_weights_travel_as_safetensors(tmp_path: Path) -> None:
    config = ThinkSoundConfig(hidden_size=32, depth=2, fused_depth=1, num_heads=2)
    model = randomized(ThinkSound(config))
    model.save_pretrained(tmp_path / "ours")
    assert torch.equal(ThinkSound.from_pretrained(tmp_path / "ours").empty_clip_feat, model.empty_clip_feat)
    (tmp_path / "training").mkdir()
    state = {f"diffusion.model.{name}": each for name, each in model.state_dict().items()}
    extra = {"diffusion.model.latent_rot": torch.zeros(3), "pretransform.weight": torch.zeros(2)}
    save_file({**state, **extra}, tmp_path / "training" / "model.safetensors")
    loaded = ThinkSound.from_released(tmp_path / "training", config)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert torch.equal(loaded.t_embed.freqs, model.t_embed.freqs)
    with pytest.raises(ConfigError, match="config.json"):
        ThinkSound.from_released(tmp_path / "training")
    save_file({"other": torch.zeros(1)}, tmp_path / "training" / "model.safetensors")
    with pytest.raises(ConfigError, match="empty_clip_feat"):
        ThinkSound.from_released(tmp_path / "training", config)
