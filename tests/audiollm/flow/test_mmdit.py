"""The native transformer: packs, absent modalities, positions in seconds, initialisation, context, saving."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from audiollm.data.packing import SegmentLayout
from audiollm.flow.model import blocks
from audiollm.flow.model.blocks import ROTARY_THETA, BlockAttention, TimeEmbedding, rotation, rows_around
from audiollm.flow.model.context import AudioContext, LatentState, hidden_context
from audiollm.flow.model.mmdit import MMDiT, MMDiTConfig, velocity_of_estimate
from audiollm.flow.model.objective import velocity_loss
from audiollm.flow.model.packed import MODALITIES, TIMED, Conditions, Features, Modality, pack_conditions
from audiollm.flow.model.row_convolutions import RowConv
from audiollm.flow.model.rows import rows_of
from audiollm.flow.model.sampling import integrate, schedule_times

CPU = torch.device("cpu")
CONFIG = MMDiTConfig(
    latent_dim=8, hidden_size=32, num_heads=2, multi_stream_blocks=2, single_stream_blocks=2,
    frames_dim=12, sync_dim=10, caption_dim=6, cot_dim=7,
)  # fmt: skip
KINDS: list[tuple[Modality, ...]] = [MODALITIES, ("frames",), (), ("caption", "cot"), ("sync",), MODALITIES]
LENGTHS = [11, 7, 13, 11, 5, 1]


def randomized(model: MMDiT, seed: int = 1) -> MMDiT:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def conditions_of(kinds: tuple[Modality, ...], seed: int, config: MMDiTConfig = CONFIG) -> Conditions:
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name in kinds:
        rows = int(torch.randint(1, 9, (1,), generator=generator))
        values_RC = torch.randn(rows, getattr(config, f"{name}_dim"), generator=generator).double()
        made[name] = Features(values_RC, torch.arange(rows) / 8 + 0.06 if name in TIMED else None)
    return made


@pytest.fixture(scope="module")
def model() -> MMDiT:
    return randomized(MMDiT(CONFIG)).double()


@pytest.fixture(scope="module")
def samples() -> list[tuple[Tensor, Tensor, Conditions]]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for index, (length, kinds) in enumerate(zip(LENGTHS, KINDS, strict=True)):
        x_TD = torch.randn(length, 8, generator=generator).double()
        context_TE = torch.randn(length, 10, generator=generator).double()
        made.append((x_TD, context_TE, conditions_of(kinds, index)))
    return made


TIMES_B = torch.linspace(0.05, 0.95, len(LENGTHS)).double()


def run(model: MMDiT, samples: list[tuple[Tensor, Tensor, Conditions]], t_B: Tensor) -> list[Tensor]:
    lengths = [len(x_TD) for x_TD, _, _ in samples]
    packed = pack_conditions([conditions for _, _, conditions in samples], CPU)
    x_LD, context_LE = (torch.cat([sample[i] for sample in samples]) for i in (0, 1))
    out_LD: Tensor = model(x_LD, t_B, packed, rows_of(lengths, CPU), context_LE)
    return list(out_LD.split(lengths))


def test_a_sample_is_the_same_alone_and_in_any_pack(
    model: MMDiT, samples: list[tuple[Tensor, Tensor, Conditions]]
) -> None:
    together = run(model, samples, TIMES_B)
    order = [3, 0, 5, 4, 2, 1]
    shuffled = run(model, [samples[index] for index in order], TIMES_B[order])
    for index, sample in enumerate(samples):
        alone = run(model, [sample], TIMES_B[index : index + 1])[0]
        torch.testing.assert_close(together[index], alone, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(shuffled[order.index(index)], alone, atol=1e-10, rtol=1e-10)
        assert float(alone.detach().abs().mean()) > 0.5


def test_equal_lengths_take_the_batched_paths(model: MMDiT) -> None:
    """Samples of one shape (broadcast modulation, batched attention) against each alone."""
    generator = torch.Generator().manual_seed(4)
    one = conditions_of(MODALITIES, 9)
    samples = []
    for _ in range(3):
        conditions: Conditions = {
            name: Features(torch.randn(each.values_RC.shape, generator=generator).double(), each.times_R)
            for name, each in one.items()
        }
        x_TD = torch.randn(9, 8, generator=generator).double()
        samples.append((x_TD, torch.zeros(9, 10).double(), conditions))
    together = run(model, samples, TIMES_B[:3])
    for index, sample in enumerate(samples):
        alone = run(model, [sample], TIMES_B[index : index + 1])[0]
        torch.testing.assert_close(together[index], alone, atol=1e-10, rtol=1e-10)


def test_a_pack_is_a_padded_batch_whose_pads_are_masked(
    model: MMDiT, samples: list[tuple[Tensor, Tensor, Conditions]], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = run(model, samples, TIMES_B)

    def padded(qkv: blocks.QKV, layout: SegmentLayout) -> Tensor:
        lengths = list(layout.lengths)
        query, key, value = (
            pad_sequence(list(each.split(lengths)), batch_first=True, padding_value=9.0).transpose(1, 2)
            for each in qkv
        )
        is_key_BT = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        out = scaled_dot_product_attention(query, key, value, attn_mask=is_key_BT[:, None, None])
        return torch.cat(
            [each[:, :length].transpose(0, 1) for each, length in zip(out, lengths, strict=True)]
        )

    monkeypatch.setattr(blocks, "_attend", padded)
    for found, wanted in zip(run(model, samples, TIMES_B), packed, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-10)


def test_a_batch_is_unchanged_after_project(model: MMDiT) -> None:
    """No null is written into the features of samples that lack modalities."""
    packed = pack_conditions([conditions_of(kinds, 6) for kinds in KINDS], CPU)
    before = {name: tuple(each.clone() for each in packed.features[name][:2]) for name in packed.features}
    model.project(packed, rows_of(LENGTHS, CPU))
    for name, (values_RC, times_R) in before.items():
        after = packed.features[name]
        assert torch.equal(after.values_RC, values_RC) and torch.equal(after.times_R, times_R), name


def test_another_sample_changes_nothing_even_where_it_is_not_finite(
    model: MMDiT, samples: list[tuple[Tensor, Tensor, Conditions]]
) -> None:
    before = run(model, samples, TIMES_B)
    spoiled = [(x_TD * torch.nan if i == 1 else x_TD * (1000 if i == 2 else 1), c, f)
               for i, (x_TD, c, f) in enumerate(samples)]  # fmt: skip
    after = run(model, spoiled, TIMES_B)
    for index in (0, 3, 4, 5):
        assert torch.equal(before[index], after[index])
    assert bool(after[1].isnan().any())


def test_loss_and_gradients_do_not_depend_on_the_packs(
    samples: list[tuple[Tensor, Tensor, Conditions]],
) -> None:
    """One pack against two whose losses add up, 1e-9 in float64."""
    found = []
    total = float(sum(LENGTHS))
    for packs in ([samples], [samples[:2], samples[2:]]):
        model, start, losses = randomized(MMDiT(CONFIG)).double(), 0, []
        for each in packs:
            velocity_LD = torch.cat(run(model, each, TIMES_B[start : start + len(each)]))
            target_LD = torch.cat([x_TD for x_TD, _, _ in each]).flip(1)
            losses.append(velocity_loss(velocity_LD, target_LD, torch.ones(len(target_LD)), total))
            start += len(each)
        loss = torch.stack(losses).sum()
        loss.backward()
        found.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-9, rtol=1e-9)
    for name, gradient in found[0][1].items():
        # frames and text are not updated in the last multi-stream block: nothing reads what their queries find
        unread = name.startswith(("joint_blocks.1.clip", "joint_blocks.1.text")) and "q_norm" in name
        assert gradient is not None and (float(gradient.abs().max()) > 0) != unread, name
        torch.testing.assert_close(gradient, found[1][1][name], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("variance", [0.05, 0.35])
def test_the_velocity_of_an_estimate_is_that_of_normal_data_around_it(variance: float) -> None:
    """Data N(estimate, r): Bayes' rule on a grid, and what the flow makes of noise has this mean and variance."""
    estimate, grid = 0.7, torch.linspace(-3, 4, 20_001, dtype=torch.float64)
    prior = torch.exp(-((grid - estimate) ** 2) / (2 * variance))
    for t, x_t in itertools.product((0.0, 0.05, 0.5, 0.9, 0.999), (-1.0, 0.2, 1.5)):
        weights = prior * torch.exp(-((x_t - t * grid) ** 2) / (2 * (1 - t) ** 2))
        data = float((weights * grid).sum() / weights.sum())
        noise = (x_t - t * data) / (1 - t)
        given, wanted = (torch.full((1, 1), value, dtype=torch.float64) for value in (x_t, data - noise))
        found = velocity_of_estimate(
            given, torch.full_like(given, estimate), torch.full_like(given, t), variance
        )
        torch.testing.assert_close(found, wanted, atol=2e-3, rtol=1e-3)
    noise_LD = torch.randn(20_000, 1, generator=torch.Generator().manual_seed(0)).double()

    def velocity(x_LD: Tensor, t: float) -> Tensor:
        return velocity_of_estimate(
            x_LD, torch.full_like(x_LD, estimate), torch.tensor([[t]]).double(), variance
        )

    made_LD = integrate(velocity, noise_LD, schedule_times("cosine", 200), "heun")
    assert abs(float(made_LD.mean()) - estimate) < 0.01
    assert abs(float(made_LD.var()) / variance - 1) < 0.05


def test_an_absent_modality_is_a_dropped_one(model: MMDiT) -> None:
    full = conditions_of(MODALITIES, 3)
    latents, x_LD, t_B = rows_of([9], CPU), torch.randn(9, 8).double(), TIMES_B[:1]
    packed = pack_conditions([full], CPU)
    for name in MODALITIES:
        absent = pack_conditions([{key: each for key, each in full.items() if key != name}], CPU)
        dropped, never = model(x_LD, t_B, packed.without([name]), latents), model(x_LD, t_B, absent, latents)
        assert torch.equal(dropped, never)
        assert float((dropped - model(x_LD, t_B, packed, latents)).abs().mean()) > 1e-3, name


def test_hidden_context_is_no_context(model: MMDiT) -> None:
    latents, x_LD = rows_of([9], CPU), torch.randn(9, 8).double()
    packed = pack_conditions([{}], CPU)
    without = model(x_LD, TIMES_B[:1], packed, latents)
    hidden = AudioContext(torch.randn(9, 8).double(), hidden_context(9, 8).state_L)
    assert torch.equal(without, model(x_LD, TIMES_B[:1], packed, latents, hidden.channels()))
    zeros = AudioContext(torch.zeros(9, 8).double(), torch.full((9,), 2))
    kept = model(x_LD, TIMES_B[:1], packed, latents, zeros.channels())
    assert float((without - kept).abs().mean()) > 1e-3  # a kept latent of zeros is not a hidden one


def test_kept_shown_and_hidden_latents_are_told_apart(model: MMDiT) -> None:
    latents, packed = rows_of([9], CPU), pack_conditions([{}], CPU)
    x_LD, track_LD = torch.randn(2, 9, 8).double().unbind()
    channels = [AudioContext(track_LD, torch.full((9,), int(state))).channels() for state in LatentState]
    velocities = [model(x_LD, TIMES_B[:1], packed, latents, each) for each in channels]
    for one, other in itertools.combinations(range(3), 2):
        assert not torch.equal(channels[one], channels[other])
        assert float((velocities[one] - velocities[other]).detach().abs().mean()) > 1e-3


@pytest.mark.parametrize("beside", [[], [("caption",)]], ids=["alone", "beside a sample without frames"])
def test_at_the_start_half_of_the_frames_is_added_to_the_latents(beside: list[tuple[Modality, ...]]) -> None:
    """z + gate * frames, whose gate is one half at the start; frames are linear in time between their rows."""
    model, times_R = MMDiT(CONFIG).double(), torch.tensor([0.06, 0.13, 0.2, 0.4])
    framed: Conditions = {"frames": Features(torch.randn(4, 12).double(), times_R)}
    lengths = [9, 4][: 1 + len(beside)]
    packed = pack_conditions([framed, *(conditions_of(kinds, 2) for kinds in beside)], CPU)
    fusion = model.project(packed, rows_of(lengths, CPU)).fusion
    frames_RC, z_LC = torch.randn(4, 32).double(), torch.randn(sum(lengths), 32).double()
    times_T = (torch.arange(9) + 0.5) / CONFIG.latent_rate
    at_latents = [np.interp(times_T, times_R, frames_RC[:, channel]) for channel in range(32)]
    wanted_LC = z_LC.clone()
    wanted_LC[:9] += 0.5 * torch.tensor(np.stack(at_latents, axis=1))
    torch.testing.assert_close(model._fused(z_LC, frames_RC, fusion), wanted_LC, atol=1e-5, rtol=0)


def test_synchronisation_is_linear_in_time(model: MMDiT) -> None:
    times_R = torch.tensor([0.02, 0.1, 0.15, 0.4])
    ramp_RC = (times_R[:, None] * torch.linspace(-3, 3, 10)).double()
    packed = pack_conditions([{}, {"sync": Features(ramp_RC, times_R)}], CPU)
    rows_RC = model.sync_input_proj(ramp_RC, rows_of([4], CPU)).detach()
    times_T = (torch.arange(12) + 0.5) / CONFIG.latent_rate
    wanted = np.stack([np.interp(times_T, times_R, rows_RC[:, channel]) for channel in range(32)], axis=1)
    found_NC = model.project(packed, rows_of([5, 12], CPU)).sync_NC
    torch.testing.assert_close(found_NC.detach(), torch.tensor(wanted), atol=1e-5, rtol=0)


def test_a_captions_own_summary_is_heard() -> None:
    config = MMDiTConfig(**{**CONFIG.__dict__, "caption_pooled_dim": 5})
    model, latents = randomized(MMDiT(config)).double(), rows_of([6, 6, 6], CPU)
    rows_RC, summary_C = torch.randn(3, 6).double(), torch.randn(5).double()
    given: list[Conditions] = [
        {"caption": Features(rows_RC, None, pooled_C)} for pooled_C in (summary_C, -summary_C, None)
    ]
    x_LD = torch.randn(6, 8).double().repeat(3, 1)
    made = model(x_LD, torch.full((3,), 0.3), pack_conditions(given, CPU), latents).detach().split(6)
    for one, other in itertools.combinations(range(3), 2):
        assert float((made[one] - made[other]).abs().mean()) > 1e-3


def test_rows_are_turned_by_their_seconds() -> None:
    """All rows and channels of latents, frames and text, in two samples, against cos(seconds * 21.53 * frequency)."""
    model = MMDiT(CONFIG).double()
    packed = pack_conditions([conditions_of(MODALITIES, seed) for seed in (1, 2)], CPU)
    cot = packed.features["cot"]
    cot_s = torch.linspace(0.5, 25.0, cot.rows.total)
    packed = replace(packed, features={**packed.features, "cot": cot._replace(times_R=cot_s)})
    projected = model.project(packed, rows_of([7, 5], CPU))
    words = zip(packed.lengths("caption"), cot_s.split(cot.rows.lengths), strict=True)
    text_s = torch.cat([torch.cat([torch.zeros(captions), each_s]) for captions, each_s in words])
    latents_s = torch.cat([torch.arange(7), torch.arange(5)]) / CONFIG.latent_rate + 0.5 / CONFIG.latent_rate
    frequencies_D = ROTARY_THETA ** -(torch.arange(0, 16, 2).double() / 16)
    for seconds_R, (cosine, sine) in (
        (latents_s, projected.latent_rotation),
        (packed.features["frames"].times_R, projected.frame_rotation),
        (text_s, projected.text_rotation),
    ):
        angles = seconds_R.double()[:, None] * (44_100 / 2048) * frequencies_D
        torch.testing.assert_close(cosine[:, 0].double(), angles.cos(), atol=2e-4, rtol=0)
        torch.testing.assert_close(sine[:, 0].double(), angles.sin(), atol=2e-4, rtol=0)


@pytest.mark.parametrize("seconds", [1, 9, 30])
def test_positions_agree_in_seconds(seconds: int) -> None:
    """Attention between a latent and a frame depends on their distance in seconds, not on rates and lengths."""
    for rate in (10.0, 21.5, 43.0):
        model = randomized(MMDiT(MMDiTConfig(**{**CONFIG.__dict__, "latent_rate": rate}))).double()
        count = round(seconds * rate)
        times_R = torch.arange(8 * seconds) / 8
        frames: Conditions = {"frames": Features(torch.randn(8 * seconds, 12).double(), times_R)}
        projected = model.project(pack_conditions([frames], CPU), rows_of([count], CPU))
        angle = projected.latent_rotation[0].double().acos()[:, 0, 0], projected.frame_rotation[0][:, 0, 0]
        middle = count // 2
        place_s = (middle + 0.5) / rate
        assert torch.allclose(
            torch.tensor(place_s * 44_100 / 2048).cos().double(), angle[0][middle].cos(), atol=1e-5
        )
        nearest = int((times_R - place_s).abs().argmin())
        fusion = projected.fusion
        assert fusion is not None
        before, weight = int(fusion.before_N[middle]), float(fusion.weight_N[middle])
        assert (
            abs((before + weight) / 8 - min(place_s, float(times_R[-1]))) < 1e-4
            and abs(before - nearest) <= 1
        )


def test_the_estimate_is_zero_and_the_gate_one_half_at_the_start() -> None:
    model = MMDiT(CONFIG)
    packed = pack_conditions(
        [
            {
                name: Features(each.values_RC.float(), each.times_R)
                for name, each in conditions_of(MODALITIES, 0).items()
            }
        ],
        CPU,
    )
    x_LD, t_B = torch.randn(9, 8), torch.rand(1)
    velocity_LD = model(x_LD, t_B, packed, rows_of([9], CPU))
    assert torch.equal(velocity_LD, velocity_of_estimate(x_LD, torch.zeros(9, 8), t_B[:, None], 0.05))
    gates = model.gated_mlp(torch.randn(50, 64) * 3)
    assert torch.equal(gates, torch.full_like(gates, 0.5))


def test_embeddings_of_times_differ() -> None:
    embedding = TimeEmbedding(64)
    angles = torch.tensor([0.0, 0.1, 0.5, 1.0])[:, None] * embedding.freqs
    sinusoids = torch.cat([angles.cos(), angles.sin()], dim=1)
    cosine = torch.nn.functional.cosine_similarity(sinusoids[:1], sinusoids[1:])
    assert float(cosine.max()) < 0.4


def test_half_precision_is_near_full(samples: list[tuple[Tensor, Tensor, Conditions]]) -> None:
    model, single = randomized(MMDiT(CONFIG)), []
    for x_TD, context_TE, conditions in samples:
        found: Conditions = {
            name: Features(each.values_RC.float(), each.times_R) for name, each in conditions.items()
        }
        single.append((x_TD.float(), context_TE.float(), found))
    full = torch.cat(run(model, single, TIMES_B.float()))
    with torch.autocast("cpu", torch.bfloat16):
        half = torch.cat(run(model, single, TIMES_B.float()))
        half.float().square().mean().backward()
    assert float((half.float() - full).abs().mean() / full.abs().mean()) < 0.05
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_row_convolution_equals_conv1d() -> None:
    lengths = [5, 1, 9]
    layer = RowConv(4, 6, 7).double()
    x_RC = torch.randn(15, 4).double()
    results = []
    for ours in (True, False):
        given = x_RC.clone().requires_grad_()
        layer.zero_grad()
        if ours:
            out_RC = layer(given, rows_of(lengths, CPU))
        else:
            pieces = [piece.T[None] for piece in given.split(lengths)]
            made = [torch.nn.functional.conv1d(each, layer.weight, layer.bias, padding=3) for each in pieces]
            out_RC = torch.cat([each[0].T for each in made])
        (out_RC * torch.linspace(-1, 1, out_RC.numel()).view_as(out_RC)).sum().backward()
        assert layer.bias is not None
        results.append([out_RC.detach(), given.grad, layer.weight.grad.clone(), layer.bias.grad.clone()])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-10)


def test_times_between_frames() -> None:
    """Latents lie between rows of their own sample; beyond the ends, and at a single row, the nearest holds."""
    times = [[0.0, 1.0, 3.0], [], [-0.05], [0.5, 0.6]]
    wanted = [[-1.0, 0.25, 2.0, 9.0], [0.0, 1.0], [0.0, 5.0], [0.1, 0.55, 0.6, 7.0]]
    given, latents = (rows_of([len(each) for each in listed], CPU) for listed in (times, wanted))
    flat, wanted_L = (
        torch.tensor([second for each in listed for second in each]) for listed in (times, wanted)
    )
    latent, before, after, weight = rows_around(given, flat, latents, wanted_L)
    assert latent.tolist() == [0, 1, 2, 3, 6, 7, 8, 9, 10, 11]
    assert before[:4].tolist() == [0, 0, 1, 1] and after[:4].tolist() == [1, 1, 2, 2]
    assert weight[:4].tolist() == [0.0, 0.25, 0.5, 1.0]
    values = torch.tensor([2.0, 5.0, -1.0, 3.0, 7.0, 8.0], dtype=torch.float64)
    found = torch.lerp(values[before], values[after], weight.double()).tolist()
    expected: list[float] = []
    for rows, places, first in zip(times, wanted, (0, 3, 3, 4), strict=True):
        if rows:
            expected += np.interp(places, rows, values[first : first + len(rows)]).tolist()
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kinds", [("cot",), ("sync",), ()])
def test_a_model_without_frames_and_captions_has_no_summary(kinds: tuple[Modality, ...]) -> None:
    widths = {f"{name}_dim": getattr(CONFIG, f"{name}_dim") if name in kinds else 0 for name in MODALITIES}
    config = MMDiTConfig(**{**CONFIG.__dict__, **widths})
    model, given = randomized(MMDiT(config)).double(), conditions_of(kinds, 0)
    packed, latents = pack_conditions([given, {}], CPU), rows_of([3, 4], CPU)
    out_LD = model(torch.randn(7, 8).double(), TIMES_B[:2], packed, latents)
    assert bool(out_LD.isfinite().all())


def test_what_the_model_does_not_take_is_refused() -> None:
    model = MMDiT(MMDiTConfig(**{**CONFIG.__dict__, "sync_dim": 0, "audio_context": False}))
    latents, x_LD, t_B = rows_of([4], CPU), torch.zeros(4, 8), torch.zeros(1)
    for name, width, why in (("sync", 10, "takes no sync"), ("caption", 5, "width 5, and the model takes 6")):
        times_R = torch.arange(3) / 8 if name == "sync" else None
        given = pack_conditions([{name: Features(torch.zeros(3, width), times_R)}], CPU)
        with pytest.raises(ValueError, match=why):
            model(x_LD, t_B, given, latents)
    with pytest.raises(ValueError, match="audio context"):
        model(x_LD, t_B, pack_conditions([{}], CPU), latents, torch.zeros(4, 10))
    for values, times, why in (
        (torch.full((2, 12), torch.nan), torch.arange(2.0), "not finite"),
        (torch.zeros(2, 12), torch.zeros(2), "rising"),
        (torch.zeros(0, 12), torch.zeros(0), "rows >= 1"),
        (torch.zeros(2, 12), None, "no times"),
    ):
        with pytest.raises(ValueError, match=why):
            pack_conditions([{"frames": Features(values, times)}], CPU)


def test_saved_and_loaded(tmp_path: Path, samples: list[tuple[Tensor, Tensor, Conditions]]) -> None:
    model = randomized(MMDiT(CONFIG))
    model.save_pretrained(tmp_path)
    loaded = MMDiT.from_pretrained(tmp_path)
    assert loaded.config == CONFIG
    for name in ("null_frames", "null_sync", "null_caption"):
        assert torch.equal(getattr(loaded, name), getattr(model, name))
    ours, theirs = run(model.double(), samples, TIMES_B), run(loaded.double(), samples, TIMES_B)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_attention_begins_near_in_time() -> None:
    """Before training, rows score highest at their own time: the product of query and key is a sum of cosines."""
    config = MMDiTConfig(latent_dim=4, latent_rate=20.0, hidden_size=64, num_heads=2, multi_stream_blocks=2,
        single_stream_blocks=1, frames_dim=8, sync_dim=0, caption_dim=0, cot_dim=8)  # fmt: skip
    places_R = torch.tensor([0.0, 3.0, 30.0])
    frequencies = 1 / ROTARY_THETA ** (torch.arange(0, 32, 2) / 32)
    wanted_RR = 2 * torch.cos((places_R[:, None] - places_R)[..., None] * frequencies).sum(-1)
    attentions = [each for each in MMDiT(config).modules() if isinstance(each, BlockAttention)]
    assert len(attentions) == 2 * 3 + 1
    for attention in attentions:
        found = attention(torch.zeros(3, 64), rotation(places_R, 32))
        products_HRR = torch.einsum("qhd,khd->hqk", found.query, found.key)
        torch.testing.assert_close(products_HRR, wanted_RR.expand(2, 3, 3), rtol=1e-4, atol=1e-3)
