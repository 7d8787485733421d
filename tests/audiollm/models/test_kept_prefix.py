"""A window with a kept prefix: packed attention against a dense mask, and a cache that continues and forgets."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from audiollm.data.chat.template import Kind, TokenStream
from audiollm.data.packing import SegmentLayout, pack
from audiollm.models.attention import PrefixTurns, rotary_angles, rotate
from audiollm.models.cache import Cache
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.packed_decoder import packed_decoder

WINDOW, BOOKS = 7, 2


def config(**values: object) -> DualFFNConfig:
    made = {"vocab_size": 23, "num_codebooks": BOOKS, "codebook_size": 11, "hidden_size": 32, "num_layers": 2,
            "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 48,
            "sliding_window": WINDOW}  # fmt: skip
    return DualFFNConfig(**{**made, **values})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model() -> DualFFN:
    torch.manual_seed(0)
    made = DualFFN(config()).eval()
    for weight in made.parameters():  # attention that differs from place to place
        torch.nn.init.normal_(weight, std=0.2)
    return made


def stream(length: int, kept: int, seed: int) -> TokenStream:
    draw = torch.Generator().manual_seed(seed)
    kinds_S = torch.where(torch.rand(length, generator=draw) < 0.4, Kind.TEXT, Kind.AUDIO_IN)
    ids_S = torch.randint(23, (length,), generator=draw)
    codes_SK = torch.randint(11, (length, BOOKS), generator=draw)
    none_SK = torch.full((length, BOOKS), -100)
    return TokenStream(ids_S, codes_SK, kinds_S, ids_S, none_SK, pinned_rows=kept)


def dense_scores(q_SHD: Tensor, k_SHD: Tensor, kept: int, window: int) -> Tensor:
    """Scores `[H, S, S]` written out: each pair at its distance, which for a prefix ends at P + W - 1 - p."""
    size, _, dim = q_SHD.shape
    scores = torch.full((q_SHD.shape[1], size, size), -torch.inf, dtype=torch.float64)
    for i in range(size):
        for j in range(i + 1):
            if i - j < window or j < kept:
                at = min(i, kept + window - 1) if j < kept else i
                pair = rotary_angles(torch.tensor([at, j]), dim, 100.0)
                q, k = (rotate(x, c, s) for x, c, s in zip((q_SHD[i], k_SHD[j]), *pair, strict=True))
                scores[:, i, j] = (q * k).sum(-1) / dim**0.5
    return scores


@pytest.mark.parametrize(("kept", "length"), [(3, 40), (0, 20), (5, 12), (4, 11), (6, 5)])
def test_packed_attention_is_that_of_the_written_out_mask(kept: int, length: int) -> None:
    torch.manual_seed(kept)
    q, k, v = (torch.randn(length + 4, 2, 8, dtype=torch.float64) for _ in range(3))
    layout = SegmentLayout.of([length, 4], torch.randperm(length + 4), pinned_rows=[kept or 1, 2])
    kept = kept or 1
    turns = PrefixTurns.of(layout, WINDOW, 8, 100.0, None)
    places = torch.cat([torch.arange(length), torch.arange(4)])
    cosine, sine = (each[:, None].double() for each in rotary_angles(places, 8, 100.0))
    in_rows = [each[layout.order_S] for each in (rotate(q, cosine, sine), rotate(k, cosine, sine), v)]
    found = turns.attend(*in_rows, layout, WINDOW)[layout.row_of_S]
    expected = torch.einsum(
        "hst,thd->shd", dense_scores(q[:length], k[:length], kept, WINDOW).softmax(-1), v[:length]
    )
    assert torch.allclose(found[:length], expected, atol=1e-5)


def hidden_whole(model: DualFFN, made: TokenStream) -> Tensor:
    """One forward pass over the stream, in reading order."""
    batch = pack([made])
    with torch.no_grad():
        return model(batch)[batch.row_of_S][: len(made)]


def appended(
    decoder: object, cache: Cache, streams: list[TokenStream], before: list[int], counts: list[int]
) -> list[Tensor]:
    """Append the next rows of each stream; the hidden states of each, in reading order."""
    ids, codes, text_at, audio_at = [], [], [], []
    number = 0
    for made, begin, count in zip(streams, before, counts, strict=True):
        for place in range(begin, begin + count):
            if made.kinds_S[place] == Kind.TEXT:
                ids.append(made.text_ids_S[place])
                text_at.append(number)
            else:
                codes.append(made.codes_SK[place])
                audio_at.append(number)
            number += 1
    order_X = torch.tensor([*text_at, *audio_at])
    with torch.no_grad():
        hidden_XC = decoder.append(  # type: ignore[attr-defined]
            torch.stack(ids) if ids else torch.zeros(0, dtype=torch.long),
            torch.stack(codes) if codes else torch.zeros(0, BOOKS, dtype=torch.long),
            cache, counts, None if torch.equal(order_X, torch.arange(number)) else order_X,
        )  # fmt: skip
    in_order = torch.empty_like(hidden_XC)
    in_order[order_X] = hidden_XC
    return list(in_order.split(counts))


@pytest.mark.parametrize("packed", [False, True])
def test_a_cache_that_continues_and_forgets_equals_one_forward_pass(model: DualFFN, packed: bool) -> None:
    """Many streams of different lengths and prefixes, cut at random: rows that forget, beside one that does not."""
    decoder = packed_decoder(model) if packed else model
    if decoder is None:
        pytest.skip("this machine's oneDNN has no packed products")
    draw = random.Random(3)
    for attempt in range(6):
        kept = [draw.randint(1, 5) for _ in range(3)] + [0]
        streams = [
            stream(draw.randint(30, 90) if place < 3 else 15, kept[place], 10 * attempt + place)
            for place in range(4)
        ]
        cache = Cache.empty(model.config, 5, 17, torch.device("cpu"))
        done = [draw.randint(max(1, kept[place]), 9) for place in range(4)]
        with torch.no_grad():
            begun = [cut(made, length) for made, length in zip(streams, done, strict=True)]
            decoder.prefill(pack(begun), cache, range(4), done)
        for row in range(3):
            cache.keep_prefix(row, kept[row])
        found: list[list[Tensor]] = [[] for _ in streams]
        while any(length < len(made) for length, made in zip(done, streams, strict=True)):
            counts = [
                min(len(made) - length, draw.choice([0, 1, 2, 5]))
                for length, made in zip(done, streams, strict=True)
            ]
            if not any(counts):
                continue
            for parts, part in zip(found, appended(decoder, cache, streams, done, counts), strict=True):
                parts.append(part)
            done = [length + count for length, count in zip(done, counts, strict=True)]
        for made, parts in zip(streams, found, strict=True):
            live = torch.cat(parts)
            offline = hidden_whole(model, made)[len(made) - len(live) :]
            assert float((live - offline).abs().max()) < 1e-5 * float(offline.abs().max())
        assert cache.lengths[:3] == [len(made) for made in streams[:3]]


def cut(made: TokenStream, length: int) -> TokenStream:
    rows = {name: value[:length] for name, value in made.__dict__.items() if isinstance(value, Tensor)}
    return replace(made, **rows)


def test_a_row_far_into_its_stream_is_exact(model: DualFFN) -> None:
    """After 500,000 positions (5.5 hours) the state is that of the same rows early in a stream: distances decide."""
    made = stream(60, 3, 1)
    whole = hidden_whole(model, made)
    cache = Cache.empty(model.config, 1, 16, torch.device("cpu"))
    with torch.no_grad():
        model.prefill(pack([cut(made, 3)]), cache, [0], [3])
    cache.keep_prefix(0, 3)
    cache.lengths[0] = 500_003  # nothing but the prefix is seen of what came before
    live = []
    for place in range(3, 60):
        counts = [1]
        live += appended(model, cache, [made], [place], counts)
    assert float((torch.cat(live)[30:] - whole[33:]).abs().max()) < 1e-4 * float(whole.abs().max())


def test_what_cannot_be_is_refused(model: DualFFN) -> None:
    cache = Cache.empty(model.config, 2, 12, torch.device("cpu"))
    cache.lengths = [4, 4]
    with pytest.raises(ValueError, match="cannot keep 6"):
        cache.keep_prefix(0, 6)
    cache.keep_prefix(0, 3)
    with pytest.raises(ValueError, match="takes 3"):
        cache.check_room(0, 4)
    with pytest.raises(ValueError, match="one is full"):
        cache.check_room(1, 9)
    endless = Cache.empty(config(sliding_window=None), 1, 12, torch.device("cpu"))
    with pytest.raises(ValueError, match="sliding window in every layer"):
        endless.keep_prefix(0, 0)
    with pytest.raises(ValueError, match="no new positions"):
        appended(model, cache, [stream(5, 1, 0)] * 2, [0, 0], [0, 0])


def test_a_row_that_forgets_moves_with_its_state(model: DualFFN) -> None:
    made = stream(50, 2, 5)
    cache = Cache.empty(model.config, 3, 14, torch.device("cpu"))
    with torch.no_grad():
        model.prefill(pack([cut(made, 4)]), cache, [2], [4])
    cache.keep_prefix(2, 2)
    for place in range(4, 40, 4):
        appended(model, cache, [made] * 3, [0, 0, place], [0, 0, 4])
    cache.move(2, 0)
    last = appended(model, cache, [made], [40], [5])[0]
    whole = hidden_whole(model, made)[40:45]
    assert float((last - whole).abs().max()) < 1e-5 * float(whole.abs().max())
