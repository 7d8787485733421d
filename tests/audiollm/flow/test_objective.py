"""Closed forms: the path, densities of time, dropout, guidance, the order of solvers; kept latents."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from audiollm.flow.model.context import (
    CONTEXT_KINDS,
    AudioContext,
    ContextShares,
    LatentState,
    span_context,
    training_context,
)
from audiollm.flow.model.mmdit import MMDiT
from audiollm.flow.model.objective import (
    ConditionDropout,
    TimeDensity,
    losses_by_sample,
    on_path,
    shift_times,
    velocity_loss,
    velocity_target,
)
from audiollm.flow.model.packed import MODALITIES, PackedConditions, pack_conditions
from audiollm.flow.model.rows import SampleRows, rows_of
from audiollm.flow.model.sampling import (
    SamplerSettings,
    guidance_branches,
    guided_velocity,
    integrate,
    rescaled_velocity,
    sample_latents,
    schedule_times,
)
from tests.audiollm.flow.test_mmdit import CONFIG, conditions_of, randomized

CPU = torch.device("cpu")


def dice(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_velocity_is_the_derivative_of_the_path() -> None:
    noise, data = torch.randn(2, 5, 3, dtype=torch.float64, generator=dice()).unbind(0)
    t = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(on_path(noise, data, t)[2, 1], t)
    assert float(slope) == pytest.approx(float(velocity_target(noise, data)[2, 1]), abs=1e-12)
    assert torch.equal(on_path(noise, data, torch.tensor(0.0)), noise)
    torch.testing.assert_close(on_path(noise, data, torch.tensor(1.0)), data)


def test_an_oracle_velocity_gives_the_data_in_one_step() -> None:
    noise, data = torch.randn(2, 7, 4, dtype=torch.float64, generator=dice()).unbind(0)
    made = integrate(lambda x, t: data - noise, noise, [0.0, 1.0])
    torch.testing.assert_close(made, data, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("density", "expected"),
    [
        (TimeDensity("uniform"), lambda t: t),
        (TimeDensity("logit_normal", 0.0, 1.0), lambda t: 0.5 * (1 + math.erf(math.log(t / (1 - t)) / math.sqrt(2)))),
        (
            TimeDensity("logit_normal", 0.5, 0.7),
            lambda t: 0.5 * (1 + math.erf((math.log(t / (1 - t)) - 0.5) / 0.7 / math.sqrt(2))),
        ),
        # 4 times the base length: s' = 2 s / (1 + s), so that P(t' <= t) = P(s >= (1 - t) / (1 + t)) = 2 t / (1 + t)
        (TimeDensity("shifted", base_latents=25), lambda t: 2 * t / (1 + t)),
    ],
)  # fmt: skip
def test_times_have_their_distribution(density: TimeDensity, expected: Any) -> None:
    drawn = density.draw([100] * 40_000, dice())
    assert float(drawn.min()) >= 0 and float(drawn.max()) <= 1
    for t in (0.1, 0.3, 0.5, 0.7, 0.9):
        share = float((drawn <= t).double().mean())
        assert abs(share - expected(t)) < 4 * math.sqrt(0.25 / 40_000), t


def test_a_sample_of_the_base_length_is_not_shifted() -> None:
    t_B = torch.rand(5, generator=dice())
    torch.testing.assert_close(shift_times(t_B, torch.full((5,), 194), 194), t_B)


@pytest.mark.parametrize("present", [MODALITIES, ("caption",), ("frames", "sync")])
def test_every_subset_is_hidden_as_often_as_it_should(present: Any) -> None:
    dropout, generator, draws = ConditionDropout(0.2, 0.15, 0.25, 0.1), dice(3), 30_000
    counts: dict[frozenset[str], int] = {}
    for _ in range(draws):
        hidden = frozenset(dropout.draw(present, generator))
        counts[hidden] = counts.get(hidden, 0) + 1
    total = 0.0
    for size in range(len(present) + 1):
        for subset in itertools.combinations(present, size):
            expected = dropout.probability(subset, present)
            total += expected
            found = counts.get(frozenset(subset), 0) / draws
            assert abs(found - expected) < 4.5 * math.sqrt(expected * (1 - expected) / draws) + 1e-9, subset
    assert total == pytest.approx(1.0)
    if len(present) == 4:
        assert (
            dropout.probability(present, present)
            > 0.1
            > 60 * ConditionDropout(0.2, 0.0, 0.0, 0.0).probability(present, present)
        )


def test_the_loss_counts_wanted_latents_alone() -> None:
    velocity, target = torch.randn(2, 6, 3, generator=dice()).unbind(0)
    wanted = torch.tensor([1, 1, 0, 1, 0, 1]).bool()
    errors = (velocity - target).square().mean(dim=1)
    expected = errors[wanted].sum() / 4
    torch.testing.assert_close(velocity_loss(velocity, target, wanted, 4), expected)
    by_sample = losses_by_sample(velocity, target, wanted, rows_of([3, 3], CPU))
    torch.testing.assert_close(by_sample, torch.stack([errors[:2].mean(), errors[[3, 5]].mean()]))


MEAN, DEVIATION = 1.5, 0.4


def gaussian_velocity(x: Tensor, t: float) -> Tensor:
    """The exact velocity of the flow to N(MEAN, DEVIATION^2): E[data - noise | x_t = x]."""
    variance = (1 - t) ** 2 + (t * DEVIATION) ** 2
    slope = (t * DEVIATION**2 - (1 - t)) / variance
    return MEAN + slope * (x - t * MEAN)


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("midpoint", 3), ("heun", 2)])
def test_a_gaussian_is_followed_at_the_solvers_order(solver: Any, order: int) -> None:
    """The exact flow maps noise z to MEAN + DEVIATION z; twice the steps divide the error by 2^order.

    The second-order term of the midpoint rule vanishes on this path: it is found to be of order 3.
    """
    noise = torch.tensor([[-1.3], [0.2], [1.7]], dtype=torch.float64)
    exact = MEAN + DEVIATION * noise
    errors = []
    for steps in (20, 40, 80):
        made = integrate(gaussian_velocity, noise, schedule_times("uniform", steps), solver)
        errors.append(float((made - exact).abs().max()))
    for coarse, fine in itertools.pairwise(errors):
        assert math.log2(coarse / fine) == pytest.approx(order, abs=0.25)


@pytest.mark.parametrize("name", ["uniform", "cosine", "shifted"])
def test_schedules_rise_from_0_to_1(name: Any) -> None:
    times = schedule_times(name, 8, length=388)
    assert len(times) == 9 and times[0] == 0.0 and times[-1] == 1.0
    assert all(a < b for a, b in itertools.pairwise(times))
    if name != "uniform":
        assert times[1] < 1 / 8  # dense at noise


@pytest.fixture(scope="module")
def guided() -> tuple[MMDiT, PackedConditions]:
    return randomized(MMDiT(CONFIG)).double(), pack_conditions([conditions_of(MODALITIES, 5)], CPU)


def velocity_of(guided: tuple[MMDiT, PackedConditions], **settings: Any) -> Tensor:
    model, packed = guided
    x_LD = torch.randn(9, 8, dtype=torch.float64, generator=dice(1))
    with torch.no_grad():
        return guided_velocity(
            model, packed, rows_of([9], CPU), SamplerSettings(guidance_rescale=0, **settings)
        )(x_LD, 0.25)


def test_guidance(guided: tuple[MMDiT, PackedConditions]) -> None:
    model, packed = guided
    x_LD, latents, t_B = (
        torch.randn(9, 8, dtype=torch.float64, generator=dice(1)),
        rows_of([9], CPU),
        torch.tensor([0.25]),
    )
    with torch.no_grad():
        full, bare = model(x_LD, t_B, packed, latents), model(x_LD, t_B, packed.without(MODALITIES), latents)
        text = model(x_LD, t_B, packed.without(("frames", "sync")), latents)
    close = {"atol": 1e-10, "rtol": 1e-10}
    assert torch.equal(velocity_of(guided, guidance=1.0), full)
    torch.testing.assert_close(velocity_of(guided, guidance=4.5), bare + 4.5 * (full - bare), **close)
    torch.testing.assert_close(velocity_of(guided, guidance=0.0), bare, **close)
    equal = dict.fromkeys(MODALITIES, 3.0)
    torch.testing.assert_close(
        velocity_of(guided, guidance_by=equal), velocity_of(guided, guidance=3.0), **close
    )
    by = {"caption": 2.0, "cot": 2.0, "frames": 5.0}  # sync has the last scale
    torch.testing.assert_close(
        velocity_of(guided, guidance_by=by), bare + 2 * (text - bare) + 5 * (full - text), **close
    )
    branches = guidance_branches(packed, SamplerSettings(guidance_by=by))
    assert sum(weight for weight, _, _ in branches) == pytest.approx(1.0) and len(branches) == 3


@pytest.mark.parametrize("share", [0.7, 1.0])
def test_guidance_keeps_the_deviation_of_the_estimate(share: float) -> None:
    """The estimate of each sample is scaled by share * (own deviation / guided) + 1 - share."""
    guided_LD, full_LD, x_LD = torch.randn(3, 9, 8, dtype=torch.float64, generator=dice(6)).unbind(0)
    guided_LD, t, latents = 5 * guided_LD, 0.25, rows_of([4, 5], CPU)
    found_LD = x_LD + (1 - t) * rescaled_velocity(guided_LD, full_LD, x_LD, t, latents, share)
    for rows in (slice(0, 4), slice(4, 9)):
        wanted, own = (x_LD + (1 - t) * each for each in (guided_LD, full_LD))
        scale = float(own[rows].std() / wanted[rows].std())
        torch.testing.assert_close(found_LD[rows], wanted[rows] * (share * scale + 1 - share))
        if share == 1:
            assert float(found_LD[rows].std()) == pytest.approx(float(own[rows].std()), rel=1e-9)
    assert torch.equal(rescaled_velocity(guided_LD, full_LD, x_LD, 1.0, latents, share), guided_LD)


def test_guidance_is_rescaled_by_default(guided: tuple[MMDiT, PackedConditions]) -> None:
    model, packed = guided
    x_LD, latents = torch.randn(9, 8, dtype=torch.float64, generator=dice(1)), rows_of([9], CPU)
    with torch.no_grad():
        full_LD = model(x_LD, torch.tensor([0.25]), packed, latents)
        found_LD = guided_velocity(model, packed, latents, SamplerSettings(guidance=3.0))(x_LD, 0.25)
    plain_LD = velocity_of(guided, guidance=3.0)
    torch.testing.assert_close(found_LD, rescaled_velocity(plain_LD, full_LD, x_LD, 0.25, latents, 0.7))
    assert not torch.allclose(found_LD, plain_LD)
    with pytest.raises(ValueError, match="guidance_rescale must be from 0 to 1"):
        SamplerSettings(guidance_rescale=1.5)


def test_modalities_without_a_scale_have_the_last_one(guided: tuple[MMDiT, PackedConditions]) -> None:
    _, packed = guided
    text = packed.without(("frames", "sync"))
    by = SamplerSettings(guidance_by={"caption": 2.0, "frames": 5.0}, guide_context=True)
    found = [(weight, list(kept.features)) for weight, kept, _ in guidance_branches(text, by)]
    assert found == [(-1.0, []), (2.0 - 5.0, ["caption"]), (5.0, ["caption", "cot"])]
    bare = packed.without(MODALITIES)
    found_bare = [(weight, is_bare) for weight, _, is_bare in guidance_branches(bare, by)]
    assert found_bare == [(-4.0, True), (5.0, False)], "the context alone is guided by the last scale"


def test_a_bad_scale_is_refused() -> None:
    for settings in ({"guidance": math.nan}, {"guidance_by": {"caption": -1.0}}, {"steps": 0}):
        with pytest.raises(ValueError, match="must be"):
            SamplerSettings(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("solver", ["euler", "midpoint", "heun"])
def test_kept_latents_come_back_bit_for_bit(guided: tuple[MMDiT, PackedConditions], solver: Any) -> None:
    model, packed = guided
    track = torch.randn(9, 8, dtype=torch.float64, generator=dice(2))
    context = span_context(track, 3, 6, LatentState.HIDDEN)
    noise = torch.randn(9, 8, dtype=torch.float64, generator=dice(3))
    settings = SamplerSettings(steps=4, solver=solver)
    made = sample_latents(model, noise, packed, rows_of([9], CPU), settings, context)
    kept = torch.tensor([True] * 3 + [False] * 3 + [True] * 3)
    assert torch.equal(made[kept], track[kept]) and not torch.allclose(made[~kept], track[~kept])
    other = span_context(track + 1, 3, 6, LatentState.HIDDEN)
    assert not torch.equal(
        made[~kept], sample_latents(model, noise, packed, rows_of([9], CPU), settings, other)[~kept]
    )


class Recorder:
    """A model whose velocity is 1 everywhere; it keeps what it is asked with."""

    takes_context = True

    def __init__(self) -> None:
        self.asked: list[tuple[float, Tensor]] = []

    def project(self, conditions: PackedConditions, latents: SampleRows) -> None:
        return None

    def velocity(
        self, x_LD: Tensor, t_B: Tensor, projected: object, context_LE: Tensor | None = None
    ) -> Tensor:
        self.asked.append((float(t_B[0]), x_LD.clone()))
        return torch.ones_like(x_LD)


def test_kept_latents_lie_on_their_path_at_every_step() -> None:
    track, noise = torch.randn(2, 9, 8, dtype=torch.float64, generator=dice(2)).unbind(0)
    recorder, context = Recorder(), span_context(track, 3, 6, LatentState.HIDDEN)
    settings = SamplerSettings(steps=4, guidance=1.0)
    sample_latents(recorder, noise, pack_conditions([{}], CPU), rows_of([9], CPU), settings, context)
    assert [t for t, _ in recorder.asked] == [0.0, 0.25, 0.5, 0.75]
    for t, x in recorder.asked:
        path = on_path(noise, track, torch.tensor(t, dtype=torch.float64))
        assert torch.equal(x[context.fixed_L], path[context.fixed_L]), t
        torch.testing.assert_close(x[3:6], noise[3:6] + t)


@pytest.mark.parametrize("guide_context", [False, True])
def test_the_context_is_in_both_branches_unless_it_is_guided(
    guided: tuple[MMDiT, PackedConditions], guide_context: bool
) -> None:
    model, packed = guided
    track, x = torch.randn(2, 9, 8, dtype=torch.float64, generator=dice(4)).unbind(0)
    context = span_context(track, 3, 6, LatentState.VISIBLE)
    latents, t_B, bare = rows_of([9], CPU), torch.tensor([0.25]), packed.without(MODALITIES)

    def velocity(conditions: PackedConditions, heard: AudioContext) -> Tensor:
        made: Tensor = model(x, t_B, conditions, latents, heard.channels())
        return made

    with torch.no_grad():
        full = velocity(packed, context)
        with_context, without = velocity(bare, context), velocity(bare, context.without())
        settings = SamplerSettings(guidance=3.0, guide_context=guide_context, guidance_rescale=0)
        found = guided_velocity(model, packed, latents, settings, context)(x, 0.25)
    assert float((with_context - without).abs().mean()) > 1e-3
    start = without if guide_context else with_context
    torch.testing.assert_close(found, start + 3 * (full - start), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", CONTEXT_KINDS)
def test_training_contexts(kind: Any) -> None:
    wanted, given = torch.ones(20, 2), torch.zeros(20, 2)
    seen = set()
    for seed in range(60):
        context = training_context(kind, wanted, given, dice(seed))
        states = {LatentState(int(state)) for state in context.state_L.unique()}
        seen |= states
        if kind == "end":
            kept = context.fixed_L.long()
            assert bool(kept[0]) and not bool((kept.diff() > 0).any()) and not bool(kept[-1])
        if kind == "spans":
            assert 0 < int(context.fixed_L.sum()) < 20
        assert torch.equal(
            context.latents_LD[context.fixed_L], wanted[context.fixed_L]
        )  # kept is what is wanted
        if kind == "pair":
            shown = context.state_L == LatentState.VISIBLE
            assert bool(shown.any()) and torch.equal(context.latents_LD[shown], given[shown])
    states_of = {
        "everything": {LatentState.HIDDEN},
        "nothing": {LatentState.VISIBLE},
        "spans": {LatentState.HIDDEN, LatentState.FIXED},
        "end": {LatentState.HIDDEN, LatentState.FIXED},
        "pair": {LatentState.VISIBLE, LatentState.FIXED},
    }
    assert seen == states_of[kind]


def test_kinds_of_context_are_drawn_by_their_shares() -> None:
    shares, generator = ContextShares(everything=1, nothing=1, spans=1, end=1, pair=0.25), dice()
    drawn = [shares.draw(True, generator) for _ in range(8000)]
    for kind, expected in (("pair", 0.25), ("spans", 0.1875), ("nothing", 0.1875)):
        assert abs(drawn.count(kind) / 8000 - expected) < 0.02
    assert "pair" not in {shares.draw(False, generator) for _ in range(200)}


def test_a_span_outside_of_the_track_is_refused() -> None:
    for start, end in ((-1, 3), (3, 3), (4, 12)):
        with pytest.raises(ValueError, match="span of latents"):
            span_context(torch.zeros(10, 2), start, end, LatentState.HIDDEN)
