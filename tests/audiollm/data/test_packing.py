"""Assignment of samples to packs, and the weights of a pack's targets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from audiollm.data.chat.delay import IGNORE
from audiollm.data.chat.template import Kind, TokenStream
from audiollm.data.packing import STRATEGIES, first_fit, idle_pack, pack, pad_streams, plan_step

BOOKS = 2


def speech(frames: int, prompt: int = 2) -> TokenStream:
    """A prompt and audio rows, all of them targets."""
    kinds_S = torch.tensor([int(Kind.TEXT)] * prompt + [int(Kind.AUDIO_OUT)] * frames)
    codes_SK = torch.arange(prompt + frames)[:, None].expand(-1, BOOKS) * (kinds_S != Kind.TEXT)[:, None]
    targets_SK = torch.where((kinds_S != Kind.TEXT)[:, None], codes_SK, IGNORE)
    return TokenStream(
        torch.ones_like(kinds_S), codes_SK, kinds_S, torch.full_like(kinds_S, IGNORE), targets_SK
    )


def chat(words: int, prompt: int = 2) -> TokenStream:
    """A prompt and words that are targets."""
    ids_S = torch.arange(prompt + words)
    zeros_SK = torch.zeros(prompt + words, BOOKS, dtype=torch.long)
    targets_S = torch.where(ids_S >= prompt, ids_S, IGNORE)
    return TokenStream(ids_S, zeros_SK, torch.zeros_like(ids_S), targets_S, zeros_SK + IGNORE)


lengths_and_capacity = st.integers(1, 60).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=40), st.just(capacity))
)


@settings(max_examples=200)
@given(drawn=lengths_and_capacity)
def test_first_fit_loses_nothing_and_overfills_nothing(drawn: tuple[list[int], int]) -> None:
    lengths, capacity = drawn
    packs = first_fit(lengths, capacity)
    assert sorted(index for each in packs for index in each) == list(range(len(lengths)))
    filled = [sum(lengths[index] for index in each) for each in packs]
    assert all(0 < total <= capacity for total in filled)
    # no two packs fit into one
    assert all(one + other > capacity for n, one in enumerate(filled) for other in filled[n + 1 :])


@settings(max_examples=300)
@given(
    drawn=lengths_and_capacity,
    ranks=st.integers(1, 5),
    strategy=st.sampled_from(sorted(STRATEGIES)),
)
def test_a_plan_gives_every_rank_as_many_packs_and_every_sample_once(
    drawn: tuple[list[int], int], ranks: int, strategy: str
) -> None:
    lengths, capacity = drawn
    hands = plan_step(lengths, capacity, ranks, strategy)
    assert len(hands) == ranks and len({len(hand) for hand in hands}) == 1
    assert hands[0]
    packs = [each for hand in hands for each in hand]
    assert sorted(index for each in packs for index in each) == list(range(len(lengths)))
    for each in packs:
        size = [lengths[index] for index in each]
        assert (sum(size) if strategy == "packed" else len(size) * max(size, default=0)) <= capacity
    assert hands == plan_step(list(lengths), capacity, ranks, strategy)


def test_ranks_are_balanced_on_a_long_tail() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randn(400, generator=generator).exp().mul(120).clamp(20, 2048).long().tolist()
    for ranks in (2, 8):
        hands = plan_step(lengths, 2048, ranks)
        totals = [sum(lengths[i] for each in hand for i in each) for hand in hands]
        assert max(totals) / (sum(totals) / ranks) < 1.05
        assert sum(totals) / (len(hands[0]) * ranks * 2048) > 0.8


def test_sorted_puts_like_with_like() -> None:
    lengths = [5, 90, 7, 100, 6, 95]
    assert plan_step(lengths, 300, 1, "sorted") == [[[3, 5, 1], [2, 4, 0]]]


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_a_sample_that_is_too_long_is_named(strategy: str) -> None:
    with pytest.raises(ValueError, match="sample 1 has 11 positions, a pack holds 10"):
        plan_step([3, 11], 10, 1, strategy)


def test_an_unknown_strategy_is_named() -> None:
    with pytest.raises(ValueError, match="packed, sorted, in_order"):
        plan_step([3], 10, 1, "bestfit")


def test_every_sequence_weighs_one() -> None:
    batch = pack([speech(4), chat(3), speech(9), chat(1)])
    assert batch.counts == {"text": 2, "audio": 2}
    assert batch.text_weights.dtype == batch.audio_weights_XK.dtype == torch.float64
    assert batch.text_weights.tolist() == pytest.approx([1 / 3] * 3 + [1])
    assert batch.audio_weights_XK[:, 0].tolist() == pytest.approx([1 / 8] * 4 + [1 / 18] * 9)
    assert float(batch.audio_weights_XK.sum()) == pytest.approx(2)
    summed = pack([speech(4)], audio_reduction="sum")
    assert summed.audio_weights_XK.sum(dim=0).tolist() == pytest.approx([1, 1])


def test_every_target_weighs_one() -> None:
    batch = pack([speech(4), chat(3), speech(9), chat(1)], normalization="token")
    assert batch.counts == {"text": 4, "audio": 13}
    assert batch.text_weights.tolist() == [1] * 4
    assert batch.audio_weights_XK.flatten().tolist() == [0.5] * 26
    summed = pack([speech(4), speech(9)], normalization="token", audio_reduction="sum")
    assert summed.counts["audio"] == 13 and summed.audio_weights_XK.flatten().tolist() == [1] * 26


def test_targets_are_those_of_the_next_position() -> None:
    batch = pack([chat(3), chat(2)])
    inputs = batch.text_ids_X[batch.text_target_index]
    assert torch.equal(batch.text_targets, inputs + 1)  # the ids of a chat count up
    assert batch.text_target_index.tolist() == [1, 2, 3, 6, 7]


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("streams", [[], [chat(5)], [speech(5)], [chat(5), speech(30)]])
def test_there_is_always_a_row_and_a_target_of_each_kind(streams: list[TokenStream], multiple: int) -> None:
    batch = pack(streams, multiple) if streams else idle_pack(BOOKS, multiple)
    for rows in (batch.text_ids_X, batch.codes_YK, batch.text_targets, batch.audio_targets_XK):
        assert len(rows) > 0 and len(rows) % multiple == 0
    assert float(batch.text_weights.sum()) == pytest.approx(batch.counts["text"])
    assert float(batch.audio_weights_XK.sum()) == pytest.approx(batch.counts["audio"])
    kinds = {"text": chat, "audio": speech}
    for key in kinds:
        wanted = sum(1 for s in streams if bool((getattr(s, _TARGETS[key]) != IGNORE).any()))
        assert batch.counts[key] == wanted
    assert len(batch.positions_S) == len(batch.row_of_S) == sum(batch.layout.lengths)


_TARGETS = {"text": "text_targets_S", "audio": "audio_targets_SK"}


def test_nothing_to_pack_is_an_error() -> None:
    with pytest.raises(ValueError, match="idle_pack"):
        pack([])


def test_padding_adds_rows_and_no_targets() -> None:
    streams = [speech(4), chat(11), chat(1)]
    padded = pad_streams(streams)
    assert {len(stream) for stream in padded} == {13}
    before, after = pack(streams), pack(padded)
    assert before.counts == after.counts
    assert torch.equal(before.text_targets, after.text_targets)
    assert torch.equal(before.audio_weights_XK, after.audio_weights_XK)


def test_positions_begin_anew_in_every_sequence() -> None:
    lengths = (4, 7, 5)
    batch = pack([speech(2), chat(5), speech(3)])
    in_order = batch.positions_S[batch.row_of_S]
    assert in_order.tolist() == [place for length in lengths for place in range(length)]
    assert batch.layout.lengths == lengths and batch.layout.cumulative_lengths.tolist() == [0, 4, 11, 16]


def test_a_target_in_the_first_row_is_nobodys() -> None:
    """No row precedes the first, so neither the last row of its stream nor that of another may predict its target."""
    streams = [chat(3, prompt=0), speech(3, prompt=0), chat(2)]
    batch = pack(streams)
    weighed = batch.text_targets[batch.text_weights > 0]
    assert weighed.tolist() == [1, 2, 2, 3]
    spoken_XK = batch.audio_targets_XK[(batch.audio_weights_XK > 0).all(dim=1)]
    assert spoken_XK[:, 0].tolist() == [1, 2]


def test_targets_know_their_sequence() -> None:
    batch = pack([chat(3), speech(4), chat(1), speech(2)], multiple=8)
    assert batch.text_sequence.tolist() == [0, 0, 0, 2] + [-1] * 4
    assert batch.audio_sequence.tolist() == [1] * 4 + [3] * 2 + [-1] * 2
    assert idle_pack(BOOKS).text_sequence.tolist() == [-1]


groups_and_capacity = st.integers(1, 60).flatmap(
    lambda capacity: st.tuples(
        st.lists(st.lists(st.integers(1, max(capacity // 4, 1)), min_size=1, max_size=4), max_size=15),
        st.just(capacity),
    )
)


@settings(max_examples=200)
@given(drawn=groups_and_capacity, ranks=st.integers(1, 4), strategy=st.sampled_from(sorted(STRATEGIES)))
def test_groups_stay_in_one_pack(drawn: tuple[list[list[int]], int], ranks: int, strategy: str) -> None:
    sizes, capacity = drawn
    sizes = [group for group in sizes if len(group) * max(group) <= capacity]
    lengths = [size for group in sizes for size in group]
    numbers = iter(range(len(lengths)))
    groups = [[next(numbers) for _ in group] for group in sizes]
    hands = plan_step(lengths, capacity, ranks, strategy, groups)
    assert len(hands) == ranks and len({len(hand) for hand in hands}) == 1 and hands[0]
    packs = [each for hand in hands for each in hand]
    assert sorted(index for each in packs for index in each) == list(range(len(lengths)))
    for each in packs:
        size = [lengths[index] for index in each]
        assert (sum(size) if strategy == "packed" else len(size) * max(size, default=0)) <= capacity
    for group in groups:
        assert sum(set(group) <= set(each) for each in packs) == 1


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_groups_of_one_are_planned_as_samples(strategy: str) -> None:
    lengths = [5, 90, 7, 100, 6, 95, 40, 41]
    alone = [[index] for index in range(len(lengths))]
    for ranks in (1, 2, 3):
        assert plan_step(lengths, 200, ranks, strategy, alone) == plan_step(lengths, 200, ranks, strategy)


def test_groups_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"group 1 \(samples 1, 2\) has 11 positions, a pack holds 10"):
        plan_step([3, 5, 6], 10, groups=[[0], [1, 2]])
    with pytest.raises(ValueError, match="each of the 3 samples must be in exactly one group"):
        plan_step([3, 5, 6], 20, groups=[[0], [1, 1]])


def test_layouts_of_many_lengths_share_a_compiled_graph() -> None:
    """A kernel is given the longest length: a graph must not depend on all lengths, and not on their number."""
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    scale = torch.compile(lambda rows, layout: rows * layout.longest, backend=count)
    for frames in ([3, 5], [4, 2, 9], [7], [1, 8, 2, 6]):
        layout = pack([speech(number) for number in frames]).layout
        assert layout.longest == max(layout.lengths)
        assert float(scale(torch.ones(1), layout)) == layout.longest
    assert len(graphs) == 2, "one of a number, one of any"
