"""The chunked loss against the dense one, and the objective of a step against one sample at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from audiollm.data.chat.delay import IGNORE
from audiollm.data.chat.template import Kind, TokenStream
from audiollm.data.packing import PackedBatch, idle_pack, pack, pad_streams, plan_step
from audiollm.families.dual_ffn.losses import TokenLosses, linear_cross_entropy
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN

BOOKS, CODES = 3, 18
CONFIG = DualFFNConfig(
    vocab_size=61,
    num_codebooks=BOOKS,
    codebook_size=CODES,
    hidden_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=40,
)
TEXT_WEIGHT, AUDIO_WEIGHT = 0.7, 1.3


def dense_loss(hidden: Tensor, weight: Tensor, targets_XK: Tensor, weights_XK: Tensor) -> Tensor:
    logits = (hidden @ weight.T).unflatten(1, (targets_XK.shape[1], -1))
    each = functional.cross_entropy(logits.flatten(0, 1), targets_XK.flatten(), reduction="none")
    return (each * weights_XK.flatten()).sum()


def problem(rows: int, books: int, vocabulary: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 6, generator=generator, dtype=dtype)
    weight = torch.randn(books * vocabulary, 6, generator=generator, dtype=dtype)
    targets = torch.randint(vocabulary, (rows, books), generator=generator)
    targets[torch.rand(rows, books, generator=generator) < 0.2] = IGNORE
    weights = torch.rand(rows, books, generator=generator, dtype=torch.float64)
    return hidden, weight, targets, weights


@settings(max_examples=40)
@given(rows=st.integers(1, 17), books=st.integers(1, 3), chunk=st.integers(1, 20))
def test_chunked_equals_dense(rows: int, books: int, chunk: int) -> None:
    hidden, weight, targets, weights = problem(rows, books, 11)
    results = []
    for loss in (
        lambda h, w: linear_cross_entropy(h, w, targets, weights, chunk).total,
        lambda h, w: dense_loss(h, w, targets, weights),
    ):
        inputs = [each.clone().requires_grad_() for each in (hidden, weight)]
        value = loss(*inputs)
        (3 * value).backward()
        results.append([value.detach(), *(each.grad for each in inputs)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)
    each = linear_cross_entropy(hidden, weight, targets, weights, chunk)
    for book in range(books):
        alone = weight.unflatten(0, (books, -1))[book]
        expected = dense_loss(hidden, alone, targets[:, book : book + 1], weights[:, book : book + 1])
        torch.testing.assert_close(each.by_codebook_K[book], expected, atol=1e-12, rtol=1e-12)


def test_gradcheck() -> None:
    hidden, weight, targets, weights = problem(5, 2, 7)
    inputs = (hidden.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, targets, weights, 2).total, inputs
    )


def test_float32_gradients_are_those_of_the_dense_loss() -> None:
    hidden, weight, targets, weights = problem(64, 2, 501, torch.float32)
    gradients = []
    for loss in (
        lambda h, w: linear_cross_entropy(h, w, targets, weights, 10).total,
        lambda h, w: dense_loss(h, w, targets, weights.float()),
    ):
        inputs = [each.clone().requires_grad_() for each in (hidden, weight)]
        gradients.append(torch.autograd.grad(loss(*inputs), inputs))
    for ours, theirs in zip(*gradients, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-5


@pytest.mark.parametrize("needs", [(False, False), (True, False), (False, True)])
def test_only_wanted_gradients_are_made(needs: tuple[bool, bool]) -> None:
    hidden, weight, targets, weights = problem(6, 1, 9)
    hidden.requires_grad_(needs[0])
    weight.requires_grad_(needs[1])
    losses = linear_cross_entropy(hidden, weight, targets[:, 0], weights[:, 0])
    torch.testing.assert_close(losses.total.detach(), dense_loss(hidden, weight, targets, weights).detach())
    assert losses.total.requires_grad is any(needs) and not losses.by_codebook_K.requires_grad
    if any(needs):
        losses.total.backward()
        assert (hidden.grad is not None, weight.grad is not None) == needs


def test_autocast_multiplies_in_bfloat16_and_sums_in_float32() -> None:
    hidden, weight, targets, weights = problem(40, 1, 33, torch.float32)
    hidden.requires_grad_()
    weight.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total = linear_cross_entropy(hidden, weight, targets, weights, 7).total
    assert total.dtype == torch.float32
    total.backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    rounded = [each.detach().bfloat16() for each in (hidden, weight)]
    logits = (rounded[0] @ rounded[1].T).float()
    each = functional.cross_entropy(logits, targets[:, 0], reduction="none")
    torch.testing.assert_close(total.detach(), (each * weights[:, 0].float()).sum(), rtol=1e-6, atol=0)
    exact = torch.autograd.grad(dense_loss(hidden, weight, targets, weights.float()), weight)[0]
    assert 0 < float((weight.grad - exact).norm() / exact.norm()) < 0.02


@pytest.mark.parametrize("books", [1, 2])
def test_float16_keeps_the_gradients_of_many_small_weights(books: int) -> None:
    """A step of 8 packs, each of 8,000 targets, at a loss scale of 1,024: a chunk's gradient of 1 / 64,000 is lost."""
    generator = torch.Generator().manual_seed(0)
    rows, width, vocabulary = 8_000, 16, 512
    hidden = torch.randn(rows, width, generator=generator).half()
    weight = (0.2 * torch.randn(books * vocabulary, width, generator=generator)).half()
    targets = torch.randint(vocabulary, (rows, books), generator=generator)
    targets[rows // 2 :] = 0  # a frequent one: the sum of its rows leaves the range of float16
    weights = torch.full((rows, books), 1 / (rows * 8), dtype=torch.float64)
    gradients = []
    for dtype, loss in ((torch.float16, linear_cross_entropy), (torch.float64, dense_loss)):
        inputs = [each.to(dtype).requires_grad_() for each in (hidden, weight.abs())]
        value = loss(*inputs, targets, weights)
        total = value if isinstance(value, Tensor) else value.total
        gradients.append(torch.autograd.grad(1024 * total, inputs))
    for ours, theirs in zip(*gradients, strict=True):
        assert ours.dtype == torch.float16
        assert float((ours.double() - theirs).norm() / theirs.norm()) < 0.01


def test_weights_of_nothing_and_no_rows_at_all_are_a_loss_of_zero() -> None:
    for rows in (5, 0):
        hidden, weight, targets, weights = problem(rows, 2, 9)
        inputs = (hidden.requires_grad_(), weight.requires_grad_())
        total = linear_cross_entropy(*inputs, targets, 0 * weights).total
        assert total.item() == 0
        assert not any(bool(grad.any()) for grad in torch.autograd.grad(total, inputs))


def test_shapes_that_do_not_fit_are_named() -> None:
    hidden, weight, targets, weights = problem(6, 2, 9)
    with pytest.raises(ValueError, match=r"\[6, 6\]"):
        linear_cross_entropy(hidden, weight[:-1], targets, weights)


def make_stream(seed: int, text: int, frames: int, text_targets: int = 0) -> TokenStream:
    """A prompt, audio that is all targets, and text that is all targets."""
    generator = torch.Generator().manual_seed(seed)
    length = text + frames + text_targets
    place_S = torch.arange(length)
    is_audio_S = (place_S >= text) & (place_S < text + frames)
    ids_S = torch.randint(CONFIG.vocab_size, (length,), generator=generator)
    codes_SK = torch.randint(CODES, (length, BOOKS), generator=generator) * is_audio_S[:, None]
    return TokenStream(
        ids_S,
        codes_SK,
        torch.where(is_audio_S, int(Kind.AUDIO_OUT), int(Kind.TEXT)),
        torch.where(place_S >= text + frames, ids_S, IGNORE),
        torch.where(is_audio_S[:, None], codes_SK, IGNORE),
    )


@pytest.fixture(scope="module")
def losses() -> TokenLosses:
    torch.manual_seed(0)
    model = DualFFN(CONFIG).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return TokenLosses(model)


@pytest.fixture(scope="module")
def streams() -> list[TokenStream]:
    """Streams of many lengths; some have text targets alone, some audio alone, most both."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(int(torch.randint(2, 9, (1,), generator=generator)), 3 + 4 * n, n % 4) for n in range(9)]
    return [make_stream(n, *shape) for n, shape in enumerate([*shapes, (4, 0, 5), (7, 0, 2)])]


def step(losses: TokenLosses, packs: Sequence[PackedBatch]) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of an optimizer step: micro-batches one by one, over the step's own counts."""
    losses.zero_grad()
    counts = {key: sum(batch.counts[key] for batch in packs) for key in ("text", "audio")}
    weights = {"text": TEXT_WEIGHT, "audio": AUDIO_WEIGHT}
    total = torch.zeros((), dtype=torch.float64)
    for batch in packs:
        values = losses(batch)
        loss = sum((weights[key] * values[key] / counts[key] for key in weights), torch.zeros(()))
        loss.backward()
        total += loss.detach()
    gradients = [parameter.grad.clone() for parameter in losses.parameters() if parameter.grad is not None]
    assert len(gradients) == len(list(losses.parameters()))
    return total, gradients


def one_by_one(losses: TokenLosses, streams: Sequence[TokenStream]) -> tuple[Tensor, list[Tensor]]:
    """The formula of the design, written out: means over sequences of means over frames of means over codebooks."""
    losses.zero_grad()
    sums: dict[str, list[Tensor]] = {"text": [], "audio": []}
    for stream in streams:
        batch = pack([stream])
        hidden_SC = losses.model(batch)[batch.row_of_S][: len(stream) - 1]
        text_S, audio_SK = stream.text_targets_S[1:], stream.audio_targets_SK[1:]
        if bool((text_S != IGNORE).any()):
            sums["text"].append(functional.cross_entropy(losses.model.text_logits(hidden_SC), text_S))
        if bool((audio_SK != IGNORE).any()):
            logits_SKV = losses.model.audio_logits(hidden_SC)
            books = [functional.cross_entropy(logits_SKV[:, k], audio_SK[:, k]) for k in range(BOOKS)]
            sums["audio"].append(torch.stack(books).mean())
    means = {key: torch.stack(values).mean() for key, values in sums.items()}
    total = TEXT_WEIGHT * means["text"] + AUDIO_WEIGHT * means["audio"]
    total.backward()
    return total.detach(), [p.grad.clone() for p in losses.parameters() if p.grad is not None]


def arrangements(streams: list[TokenStream]) -> dict[str, list[PackedBatch]]:
    """The same samples in many packs and orders."""
    lengths = [len(stream) for stream in streams]

    def planned(capacity: int, strategy: str, ranks: int = 1) -> list[list[TokenStream]]:
        hands = plan_step(lengths, capacity, ranks, strategy)
        return [[streams[index] for index in each] for hand in hands for each in hand]

    def made(packs: list[list[TokenStream]], multiple: int = 1) -> list[PackedBatch]:
        return [pack(each, multiple) if each else idle_pack(BOOKS, multiple) for each in packs]

    return {
        "alone": made([[stream] for stream in streams]),
        "whole": made([streams]),
        "backwards": made([streams[::-1]]),
        "first fit": made(planned(60, "packed")),
        "filled up": made(planned(60, "packed"), multiple=16),
        "sorted": made(planned(90, "sorted")),
        "padded": made([pad_streams(each) for each in planned(120, "in_order")]),
        "accumulation of 4": made([streams[start::4] for start in range(4)]),
        "many ranks, idle packs": made(planned(60, "packed", ranks=16)),
        "accumulation of 2, filled up": made([streams[:6], streams[6:]], multiple=8),
    }


def test_a_step_is_the_same_however_it_is_arranged(losses: TokenLosses, streams: list[TokenStream]) -> None:
    expected, expected_gradients = one_by_one(losses, streams)
    assert float(expected) > 1
    for name, packs in arrangements(streams).items():
        total, gradients = step(losses, packs)
        torch.testing.assert_close(total, expected, atol=1e-9, rtol=0, msg=name)
        for ours, theirs in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0, msg=name)


@pytest.mark.parametrize("normalization", ["sequence", "token"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_every_normalization_is_the_same_however_it_is_arranged(
    losses: TokenLosses, streams: list[TokenStream], normalization: str, reduction: str
) -> None:
    results = []
    for groups in ([streams], [streams[:2], streams[2:7], streams[7:]]):
        packs = [pack(each, 1, normalization, reduction) for each in groups]  # type: ignore[arg-type]
        results.append(step(losses, packs))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-9, rtol=0)
    for one, other in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=0)


def test_no_token_sees_another_sample(losses: TokenLosses, streams: list[TokenStream]) -> None:
    """One sample of the pack is replaced by another of the same shape: no other row changes by a single bit."""
    replaced = [*streams[:4], make_stream(99, 3, 19, 0), *streams[5:]]
    at = len(streams[4])
    replaced[4] = make_stream(99, at - 19, 19, 0)
    assert len(replaced[4]) == at and torch.equal(replaced[4].kinds_S, streams[4].kinds_S)
    before, after = pack(streams), pack(replaced)
    rows_of = before.row_of_S.split([len(stream) for stream in streams])
    with torch.no_grad():
        hidden = [losses.model(batch) for batch in (before, after)]
    for number, rows in enumerate(rows_of):
        assert torch.equal(hidden[0][rows], hidden[1][rows]) is (number != 4)


def test_text_and_audio_keep_their_ratio_in_any_mix(losses: TokenLosses) -> None:
    """Nine text samples beside one of audio: each loss stays what it is alone, as the weights' ratio does."""
    speech, chats = make_stream(0, 4, 30), [make_stream(1 + n, 5, 0, 4 + n) for n in range(9)]
    with torch.no_grad():
        mixed, alone, texts = (pack(each) for each in ([speech, *chats], [speech], chats))
        values = {key: [losses(batch)[key] / batch.counts[key] for batch in (mixed, other)]
                  for key, other in (("audio", alone), ("text", texts))}  # fmt: skip
    for mix, single in values.values():
        torch.testing.assert_close(mix, single, atol=1e-12, rtol=1e-12)


def test_longalign_is_a_special_case(losses: TokenLosses) -> None:
    """Text in M packs of N sequences in all: the mean of packs, each a sum of sequence means times M / N.

    LongAlign (arXiv 2401.18058, eq. 2 and 3) scales the loss of pack i by K / (N M) over the weights 1/N_i.
    """
    chats = [make_stream(n, 3 + n, 0, 2 + 3 * n) for n in range(5)]
    groups = [chats[:1], chats[1:]]
    with torch.no_grad():
        packs = [pack(each) for each in groups]
        ours = sum(losses(batch)["text"] for batch in packs) / sum(batch.counts["text"] for batch in packs)
        theirs = []
        for batch in packs:
            logits = losses.model.text_logits(losses.model(batch)[batch.text_target_index])
            each = functional.cross_entropy(logits, batch.text_targets, reduction="none")
            per_target = batch.text_weights  # 1 / (targets of the sequence)
            theirs.append((each * per_target).sum() * len(groups) / len(chats))
    torch.testing.assert_close(ours, torch.stack(theirs).mean(), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", ["text", "audio", "idle"])
def test_every_parameter_has_a_gradient_whatever_the_batch(losses: TokenLosses, kind: str) -> None:
    batches = {
        "text": pack([make_stream(0, 4, 0, 6)]),
        "audio": pack([make_stream(0, 4, 12)]),
        "idle": idle_pack(BOOKS),
    }
    losses.zero_grad()
    values = losses(batches[kind])
    (values["text"] + values["audio"]).backward()
    for name, parameter in losses.named_parameters():
        assert parameter.grad is not None, name
    other = {"text": ["audio"], "audio": ["text"], "idle": ["text", "audio"]}[kind]
    for key in other:
        assert values[key].item() == 0 and batches[kind].counts[key] == 0
        head = losses.get_parameter(f"model.{key}_lm_head.weight")
        assert head.grad is not None and not bool(head.grad.any())


def test_figures_by_codebook_add_up(losses: TokenLosses, streams: list[TokenStream]) -> None:
    values = losses(pack(streams))
    torch.testing.assert_close(values["audio_by_codebook"].sum(), values["audio"].detach())
    assert len(values["audio_by_codebook"]) == BOOKS and not values["audio_by_codebook"].requires_grad
