"""Token streams end to end with no padding, the weight of every target, and which streams share a pack.

The objective of an optimizer step is the same whatever its packs: weights add up to 1 for every sequence (or are
1 for every target), every pack says how many it has in `counts`, and the step divides by their sum once.

Shapes: B sequences, S positions of the pack, X and Y rows of some kind, K codebooks, M mel bins, F mel frames.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from audiollm.data.chat.delay import IGNORE
from audiollm.data.chat.template import Kind, TokenStream
from audiollm.data.hearing.features import FeatureShape, PackedFeatures, silence
from audiollm.data.shared_rows import shared_lengths, without_first_rows
from audiollm.devices import to_device

Normalization = Literal["sequence", "token"]
AudioReduction = Literal["mean", "sum"]
Pack = list[int]
"""Numbers of the samples in it; empty for an idle pack."""


class SilenceWeight(NamedTuple):
    """The weight of a stream's silences among its text targets."""

    end_of_turn: int
    """The token that ends an action; right behind a heard frame it is a silence."""
    weight: float
    """The weight of a silence in the loss, where another text target weighs 1."""


@dataclass(frozen=True)
class PackedBatch:
    """Sequences end to end, their rows sorted into text first, then features, then audio codes.

    The model's feed-forwards then take two slices (features go with the text) and nothing is gathered for them;
    attention, which gathers anyway, finds the order of each sequence in `layout`. Targets are already those of the
    position before (the shift is made in `pack`, once): row p holds what the logits at p must predict.

    There is at least one text row, one audio row and one target of each (of no weight, where no stream has one), and
    for a model with an audio encoder a row of features: no parameter is ever without a gradient.
    """

    text_ids_X: Tensor
    """Token ids of the text rows, which come first."""
    codes_YK: Tensor
    """Codes of the audio rows, heard or spoken."""
    positions_S: Tensor
    row_of_S: Tensor
    """The row of each position, sequence after sequence: `hidden[row_of_S]` is in reading order. Sequences may share
    their first rows: there are then more positions than rows."""
    layout: SegmentLayout
    text_target_index: Tensor
    """Rows whose logits have a text target; several times where sequences that share a row go on differently."""
    text_target_position: Tensor
    """The positions of these targets' logits, end to end."""
    text_targets: Tensor
    text_weights: Tensor
    """Weights of the text targets, float64."""
    text_sequence: Tensor
    """int64: the sequence (number of the stream in `pack`) of each text target; -1 where one only fills up."""
    audio_target_index: Tensor
    """Rows whose logits have at least one audio target."""
    audio_target_position: Tensor
    audio_targets_XK: Tensor
    audio_weights_XK: Tensor
    audio_sequence: Tensor
    """int64: the sequence of each row with audio targets; -1 where one only fills up."""
    counts: Mapping[str, float]
    """Denominators of the losses `text` and `audio`; those of all packs of a step are added up."""
    features: PackedFeatures | None = None
    """Windows of mel frames, whose rows lie between those of text and of audio; None: there are no such rows."""

    @property
    def num_text(self) -> int:
        """The rows that take the text's branch: text, and features after it."""
        return len(self.text_ids_X) + (self.features.num_rows if self.features else 0)

    def to(self, device: torch.device) -> PackedBatch:
        """Copy the batch to a device; to a GPU from pinned memory without waiting for the work before it."""
        moved: dict[str, Any] = {
            key: to_device(value, device) if isinstance(value, Tensor) else value
            for key, value in self.__dict__.items()
        }
        features = None if self.features is None else self.features.to(device)
        return PackedBatch(**{**moved, "layout": self.layout.to(device), "features": features})


def pack(
    streams: Sequence[TokenStream],
    multiple: int = 1,
    normalization: Normalization = "sequence",
    audio_reduction: AudioReduction = "mean",
    encoder: FeatureShape | None = None,
    share: bool = False,
    silence: SilenceWeight | None = None,
) -> PackedBatch:
    """Concatenate streams, shift their targets by one inside each, and weigh them.

    Args:
        multiple: fill up with idle rows of no weight, so that the numbers of text rows, audio rows and targets
            are multiples of this. Kernels that are built for a shape (oneDNN's bf16 products on CPU, compiled
            graphs) then meet few shapes in place of a new one at every step.
        normalization: `sequence`: the text targets of a sequence weigh 1 together, however many, and so do its
            audio targets; `token`: every target weighs the same, and so long sequences more.
        audio_reduction: over codebooks, the `mean` or the `sum`.
        encoder: what the model's audio encoder takes, where it has one.
        share: rows that a stream begins with as the one before it does (answers to one prompt) are computed once,
            and windows of features that are the same object in several streams go through the encoder once.
        silence: the weight of the silences of streams (`Message.chunk_frames`); None: they weigh as other targets. A
            sequence weighs 1 all the same, and with `token` the weights are what is counted.

    Raises:
        ValueError: no stream (see `idle_pack`).
    """
    if not streams:
        raise ValueError("nothing to pack; a pack without samples is made by idle_pack")
    num_codebooks = streams[0].codes_SK.shape[1]
    return _assemble_batch(
        streams, num_codebooks, multiple, normalization, audio_reduction, encoder, share, silence
    )


def idle_pack(num_codebooks: int, multiple: int = 1, encoder: FeatureShape | None = None) -> PackedBatch:
    """A pack without samples, for a rank that has none left while others have: all weights and counts are 0."""
    return _assemble_batch([], num_codebooks, multiple, "sequence", "mean", encoder, False)


def pad_streams(streams: Sequence[TokenStream]) -> list[TokenStream]:
    """Streams filled up to the longest with text rows that are no targets: what a padding collator computes."""
    longest = max(len(stream) for stream in streams)
    return [_join_streams(stream, _idle_stream(longest - len(stream), Kind.TEXT, stream.codes_SK.shape[1]))
            for stream in streams]  # fmt: skip


def plan_step(
    lengths: Sequence[int],
    capacity: int,
    ranks: int = 1,
    strategy: str = "packed",
    groups: Sequence[Sequence[int]] | None = None,
) -> list[list[Pack]]:
    """Assign the samples of an optimizer step to packs and ranks, by their lengths alone.

    Every rank has the same number of packs and about the same number of positions; the packs of a rank come
    longest first, so that ranks that wait for one another in every pack wait little.

    Args:
        lengths: number of positions of each sample.
        capacity: largest number of positions in a pack.
        strategy: `packed` (first fit), `sorted` (samples of similar length together, as in LongAlign,
            arXiv 2401.18058) or `in_order` (one after the other); the last two hold no more than `capacity`
            positions even where each sample is padded to the longest of its pack.
        groups: samples that stay together in one pack (both answers of a pair, those of a list), every sample in one
            group; an objective over a group is then computed in one pass. None: samples go one by one.

    Returns:
        The packs of each rank, samples of a group side by side. Some packs are empty (`idle_pack`) where there are
        fewer groups than packs.

    Raises:
        ValueError: a sample or group is longer than the capacity, `groups` do not have every sample once, or no
            strategy of that name.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy: no {strategy!r}; there are {', '.join(STRATEGIES)}")
    if groups is not None:
        return _plan_groups(lengths, capacity, ranks, strategy, groups)
    return _plan_hands(STRATEGIES[strategy](lengths, capacity), lengths, capacity, ranks, strategy)


def first_fit(lengths: Sequence[int], capacity: int) -> list[Pack]:
    """First fit, longest first: each sample goes into the first pack that has room.

    Takes at most 11/9 of the fewest packs possible, and 6/9 of one (Dósa 2007).
    """
    order = _longest_first(lengths, capacity)
    packs: list[Pack] = []
    room = np.full(len(lengths), capacity)
    for index in order:
        place = int(np.argmax(room >= lengths[index]))
        if place == len(packs):
            packs.append([])
        packs[place].append(index)
        room[place] -= lengths[index]
    return packs


def sorted_batches(lengths: Sequence[int], capacity: int) -> list[Pack]:
    """Samples of similar length together, longest first; padded to its longest, a pack keeps to the capacity."""
    return _consecutive(_longest_first(lengths, capacity), lengths, capacity)


def batches_in_order(lengths: Sequence[int], capacity: int) -> list[Pack]:
    """Fill packs with samples in order; a pack padded to its longest sample stays within the capacity."""
    _longest_first(lengths, capacity)
    return _consecutive(range(len(lengths)), lengths, capacity)


STRATEGIES: Mapping[str, Callable[[Sequence[int], int], list[Pack]]] = {
    "packed": first_fit,
    "sorted": sorted_batches,
    "in_order": batches_in_order,
}


def _plan_hands(
    packs: list[Pack], lengths: Sequence[int], capacity: int, ranks: int, strategy: str
) -> list[list[Pack]]:
    """Bring packs to a multiple of the ranks, and deal them."""
    num_packs = max(-(-len(packs) // ranks), 1) * ranks
    spread = _spread(lengths, capacity, num_packs) if strategy == "packed" else None
    packs = spread or _split_packs(packs, lengths, num_packs)
    return _deal(packs, lengths, ranks)


def _plan_groups(
    lengths: Sequence[int],
    capacity: int,
    ranks: int,
    strategy: str,
    groups: Sequence[Sequence[int]],
) -> list[list[Pack]]:
    """Plan groups as if each were one sample, and put its samples in its place."""
    if sorted(index for group in groups for index in group) != list(range(len(lengths))):
        raise ValueError(f"groups: each of the {len(lengths)} samples must be in exactly one group")
    totals = [_count_positions(list(group), lengths) for group in groups]
    padded = [len(group) * max((lengths[index] for index in group), default=0) for group in groups]
    for number, size in enumerate(totals if strategy == "packed" else padded):
        if size > capacity:
            raise ValueError(
                f"group {number} (samples {', '.join(map(str, groups[number]))}) has {size} positions, a pack holds "
                f"{capacity}, and a group is never split; leave it out, or give packs more room"
            )
    if strategy == "packed":
        packs = first_fit(totals, capacity)
    else:
        longest = [max((lengths[index] for index in group), default=0) for group in groups]
        order = _longest_first(longest, capacity) if strategy == "sorted" else range(len(groups))
        packs = _consecutive(order, longest, capacity, [len(group) for group in groups])
    hands = _plan_hands(packs, totals, capacity, ranks, strategy)
    return [[[index for group in pack for index in groups[group]] for pack in hand] for hand in hands]


def _assemble_batch(
    streams: Sequence[TokenStream],
    num_codebooks: int,
    multiple: int,
    normalization: Normalization,
    audio_reduction: AudioReduction,
    encoder: FeatureShape | None,
    share: bool,
    silence: SilenceWeight | None = None,
) -> PackedBatch:
    shared = shared_lengths(streams) if share else [0] * len(streams)
    unshared_streams = [
        without_first_rows(stream, rows) for stream, rows in zip(streams, shared, strict=True)
    ]
    idle = _idle_streams(unshared_streams, num_codebooks, multiple, encoder)
    streams, unshared_streams, shared = (
        [*streams, *idle],
        [*unshared_streams, *idle],
        [*shared, *(0 for _ in idle)],
    )
    lengths = [len(stream) for stream in streams]
    kinds_S = torch.cat([stream.kinds_S for stream in unshared_streams])
    is_text_S, is_feature_S = kinds_S == Kind.TEXT, kinds_S == Kind.FEATURE
    is_audio_S = ~(is_text_S | is_feature_S)
    order_S = torch.cat([chosen_S.nonzero()[:, 0] for chosen_S in (is_text_S, is_feature_S, is_audio_S)])
    layout = SegmentLayout.of(lengths, order_S, shared, [stream.pinned_rows for stream in streams])
    positions_S = torch.cat(
        [torch.arange(first, length) for first, length in zip(shared, lengths, strict=True)]
    )
    sequence_P = torch.repeat_interleave(torch.arange(len(streams)), torch.tensor(lengths))
    text_P = torch.cat([_shift(stream.text_targets_S) for stream in streams])
    audio_PK = torch.cat([_shift(stream.audio_targets_SK) for stream in streams])
    text_index = (text_P != IGNORE).nonzero()[:, 0]
    audio_index = (audio_PK != IGNORE).any(dim=1).nonzero()[:, 0]
    weigh = _WEIGHTS[normalization]
    share_X = torch.ones(len(text_index), dtype=torch.float64)
    if silence is not None:
        kinds_P = torch.cat([stream.kinds_S for stream in streams])
        is_heard_P = (kinds_P == Kind.AUDIO_IN) | (kinds_P == Kind.FEATURE)
        is_silence_X = is_heard_P[text_index] & (text_P[text_index] == silence.end_of_turn)
        share_X = torch.where(is_silence_X, silence.weight, share_X)
    text_weights, text_count = weigh(share_X[:, None], sequence_P[text_index])
    present_XK = (audio_PK[audio_index] != IGNORE).double()
    audio_weights_XK, audio_count = weigh(present_XK, sequence_P[audio_index])
    books = num_codebooks if audio_reduction == "mean" else 1
    return PackedBatch(
        text_ids_X=torch.cat([stream.text_ids_S for stream in unshared_streams])[is_text_S],
        codes_YK=torch.cat([stream.codes_SK for stream in unshared_streams])[is_audio_S],
        positions_S=positions_S[order_S],
        row_of_S=layout.row_of_S,
        layout=layout,
        text_target_index=_fill_rows(layout.row_of_S[text_index], multiple),
        text_target_position=_fill_rows(text_index, multiple),
        text_targets=_fill_rows(text_P[text_index], multiple),
        text_weights=_fill_rows(text_weights[:, 0], multiple),
        text_sequence=_fill_rows(sequence_P[text_index], multiple, -1),
        audio_target_index=_fill_rows(layout.row_of_S[audio_index], multiple),
        audio_target_position=_fill_rows(audio_index, multiple),
        audio_targets_XK=_fill_rows(audio_PK[audio_index], multiple),
        audio_weights_XK=_fill_rows(audio_weights_XK / books, multiple),
        audio_sequence=_fill_rows(sequence_P[audio_index], multiple, -1),
        counts={"text": text_count, "audio": audio_count},
        features=PackedFeatures.of(
            [window for stream in unshared_streams for window in stream.features], share
        ),
    )


def _idle_streams(
    streams: Sequence[TokenStream], num_codebooks: int, multiple: int, encoder: FeatureShape | None
) -> list[TokenStream]:
    """Rows without targets, so that there are some of each kind and their number is a multiple.

    Rows of features count by themselves, for the encoder, and together with those of text, whose branch they take.
    Windows that the encoder fills up are added where there is none, and never for the sake of the multiple.
    """
    present = {kind: sum(int((stream.kinds_S == kind).sum()) for stream in streams) for kind in Kind}
    features = present[Kind.FEATURE]
    idle_features = 0
    if encoder is not None:
        fills_windows = encoder.padded and encoder.encoded is None
        idle_features = int(features == 0) if fills_windows else _count_missing_rows(features, multiple)
    idle_text = _count_missing_rows(present[Kind.TEXT] + features + idle_features, multiple)
    if not present[Kind.TEXT] + idle_text:
        idle_text = multiple
    idle_audio = _count_missing_rows(present[Kind.AUDIO_IN] + present[Kind.AUDIO_OUT], multiple)
    idle = [
        _idle_stream(rows, kind, num_codebooks)
        for kind, rows in ((Kind.TEXT, idle_text), (Kind.AUDIO_OUT, idle_audio))
        if rows
    ]
    if encoder is not None and idle_features:
        rows_of_features = _idle_stream(idle_features, Kind.FEATURE, num_codebooks)
        idle.append(replace(rows_of_features, features=silence(idle_features, encoder)))
    return idle


def _count_missing_rows(present: int, multiple: int) -> int:
    """Rows up to the next multiple, the least of which is not 0."""
    return max(present, 1) + -max(present, 1) % multiple - present


def _idle_stream(rows: int, kind: Kind, num_codebooks: int) -> TokenStream:
    zeros = torch.zeros(rows, dtype=torch.long)
    none = torch.full((rows, num_codebooks), IGNORE)
    return TokenStream(zeros, torch.zeros_like(none), zeros + int(kind), zeros + IGNORE, none)


def _join_streams(first: TokenStream, second: TokenStream) -> TokenStream:
    joined: dict[str, Any] = {
        key: torch.cat([value, second.__dict__[key]])
        for key, value in first.__dict__.items()
        if isinstance(value, Tensor)
    }
    return TokenStream(**joined, features=first.features + second.features, pinned_rows=first.pinned_rows)


def _fill_rows(rows: Tensor, multiple: int, value: int = 0) -> Tensor:
    """Rows of `value` at the end, up to the next multiple and at least one: target 0 of row 0, at no weight."""
    missing = -max(len(rows), 1) % multiple + (len(rows) == 0)
    return torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), value)]) if missing else rows


def _shift(targets: Tensor) -> Tensor:
    """Row p gets the target of row p + 1; the last row has none."""
    return torch.cat([targets[1:], torch.full_like(targets[:1], IGNORE)])


def _weigh_sequences(share_XK: Tensor, sequence_X: Tensor) -> tuple[Tensor, float]:
    """Each codebook's targets weigh 1 together in each sequence, by their shares; the sequences with targets."""
    if not len(sequence_X):
        return torch.zeros(share_XK.shape, dtype=torch.float64), 0.0
    sums_BK = torch.zeros(int(sequence_X.max()) + 1, share_XK.shape[1], dtype=torch.float64)
    sums_BK.index_add_(0, sequence_X, share_XK)
    sums_XK = sums_BK[sequence_X]
    return share_XK / torch.where(sums_XK > 0, sums_XK, 1.0), float(len(sequence_X.unique()))


def _weigh_targets(share_XK: Tensor, sequence_X: Tensor) -> tuple[Tensor, float]:
    """Each target weighs its share; the sum of the shares of a codebook (on average, should they differ)."""
    return share_XK, float(share_XK.sum()) / share_XK.shape[1]


_WEIGHTS: Mapping[str, Callable[[Tensor, Tensor], tuple[Tensor, float]]] = {
    "sequence": _weigh_sequences,
    "token": _weigh_targets,
}


def _longest_first(lengths: Sequence[int], capacity: int) -> list[int]:
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    if order and lengths[order[0]] > capacity:
        raise ValueError(
            f"sample {order[0]} has {lengths[order[0]]} positions, a pack holds {capacity}; "
            "cut it, leave it out, or give packs more room"
        )
    return order


def _consecutive(
    order: Sequence[int], lengths: Sequence[int], capacity: int, counts: Sequence[int] | None = None
) -> list[Pack]:
    """Fill one pack after the other; `counts` are the samples of each entry, where entries are groups."""
    packs: list[Pack] = []
    longest = samples = 0
    for index in order:
        count = 1 if counts is None else counts[index]
        longest, samples = max(longest, lengths[index]), samples + count
        if not packs or samples * longest > capacity:
            packs.append([])
            longest, samples = lengths[index], count
        packs[-1].append(index)
    return packs


def _spread(lengths: Sequence[int], capacity: int, num_packs: int) -> list[Pack] | None:
    """The samples in as many packs, evenly: longest first into the emptiest. None where one is then too full."""
    packs: list[Pack] = [[] for _ in range(num_packs)]
    emptiest = [(0, place) for place in range(num_packs)]
    for index in _longest_first(lengths, capacity):
        filled, place = heapq.heappop(emptiest)
        if filled + lengths[index] > capacity:
            return None
        packs[place].append(index)
        heapq.heappush(emptiest, (filled + lengths[index], place))
    return packs


def _split_packs(packs: Sequence[Pack], lengths: Sequence[int], num_packs: int) -> list[Pack]:
    """Split packs to the wanted number: halve the fullest, and add idle ones where none has two samples."""
    packs = list(packs)
    while len(packs) < num_packs:
        divisible = [pack for pack in packs if len(pack) > 1]
        if not divisible:
            packs.append([])
            continue
        fullest = max(divisible, key=lambda pack: _count_positions(pack, lengths))
        place, middle = packs.index(fullest), len(fullest) // 2
        packs[place : place + 1] = [fullest[:middle], fullest[middle:]]
    return packs


def _deal(packs: Sequence[Pack], lengths: Sequence[int], ranks: int) -> list[list[Pack]]:
    """Longest first, each to the rank with the fewest positions among those that have the fewest packs."""
    hands: list[list[Pack]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for pack in sorted(packs, key=lambda pack: -_count_positions(pack, lengths)):
        rank = min(range(ranks), key=lambda rank: (len(hands[rank]), totals[rank]))
        hands[rank].append(pack)
        totals[rank] += _count_positions(pack, lengths)
    return hands


def _count_positions(pack: Pack, lengths: Sequence[int]) -> int:
    return sum(lengths[index] for index in pack)


@dataclass(frozen=True)
class SegmentLayout:
    """Layout of B packed sequences among the rows of a pack; sequences may share their first rows."""

    lengths: tuple[int, ...]
    """Sequence lengths, kept on the host so that a loop over sequences needs no device sync."""
    longest: int
    """The largest of them, a number of its own: `torch.compile` would make a graph for every set of lengths."""
    cumulative_lengths: Tensor
    """int32 `[B + 1]`, from 0 to the number of positions, shared ones counted in every sequence."""
    row_of_S: Tensor
    """The row of each position, sequence after sequence: `rows[row_of_S]` is in reading order."""
    order_S: Tensor
    """The position of each row, the first of those that share it: `positions[order_S]` is in the order of rows."""
    pinned_rows: tuple[int, ...] = ()
    """First rows of each sequence that a sliding window never forgets; empty: none of any."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        order_S: Tensor,
        shared: Sequence[int] | None = None,
        pinned_rows: Sequence[int] = (),
    ) -> SegmentLayout:
        """Build a layout of these sequence lengths.

        Args:
            order_S: row r of the pack is number `order_S[r]` of the sequences' own rows, end to end.
            shared: the number of first rows that each sequence has from the one before it; None: all are its own.
            pinned_rows: first rows of each sequence that a sliding window never forgets.
        """
        pinned_rows = tuple(pinned_rows) if any(pinned_rows) else ()
        ends_B = _cumulative(lengths)
        row_of_own = order_S.argsort()
        if shared is None or not any(shared):
            return cls(tuple(lengths), max(lengths), ends_B, row_of_own, order_S, pinned_rows)
        own_P, first_S = _own_rows(lengths, shared)
        rows = row_of_own[own_P], first_S[order_S]
        return cls(tuple(lengths), max(lengths), ends_B, *rows, pinned_rows)

    @classmethod
    def in_order(cls, lengths: Sequence[int], device: torch.device) -> SegmentLayout:
        """Build a layout of rows that stand sequence after sequence already."""
        ends_B = _cumulative(lengths)
        rows_S = torch.arange(sum(lengths), device=device)
        return cls(tuple(lengths), max(lengths), ends_B.to(device), rows_S, rows_S)

    def to(self, device: torch.device) -> SegmentLayout:
        ends_B, row_of_S, order_S = (
            to_device(tensor, device) for tensor in (self.cumulative_lengths, self.row_of_S, self.order_S)
        )
        return SegmentLayout(self.lengths, self.longest, ends_B, row_of_S, order_S, self.pinned_rows)


def _cumulative(lengths: Sequence[int]) -> Tensor:
    """Boundaries of sequences end to end, from 0 on, int32 `[B + 1]`."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def _own_rows(lengths: Sequence[int], shared: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Number the own rows of sequences end to end: that of each position, and the first position of each."""
    row_numbers: list[Tensor] = []
    first: list[Tensor] = []
    rows = positions = 0
    for length, count in zip(lengths, shared, strict=True):
        new = length - count
        before = row_numbers[-1][:count] if count else torch.zeros(0, dtype=torch.long)
        row_numbers.append(torch.cat([before, torch.arange(rows, rows + new)]))
        first.append(torch.arange(positions + count, positions + length))
        rows, positions = rows + new, positions + length
    return torch.cat(row_numbers), torch.cat(first)
