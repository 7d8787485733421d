"""The delay pattern: inverse, and against a second way of writing it down."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from audiollm.data.chat.delay import IGNORE, delay, delay_targets, delayed_length

shapes = st.tuples(st.integers(1, 9), st.integers(0, 30), st.integers(0, 2**31))


def undelay(delayed_FK: Tensor) -> Tensor:
    """The inverse of `delay`, codes `[K, T]`; BOS and EOS rows are dropped by their place, not their value."""
    rows, num_codebooks = delayed_FK.shape
    frames = rows - 1 - num_codebooks
    if frames < 0:
        raise ValueError(f"{rows} rows are too few for {num_codebooks} codebooks")
    return torch.stack([delayed_FK[1 + k : 1 + k + frames, k] for k in range(num_codebooks)])


def codes_of(books: int, frames: int, seed: int) -> torch.Tensor:
    return torch.randint(100, (books, frames), generator=torch.Generator().manual_seed(seed))


@given(shapes)
@settings(max_examples=60)
def test_undelay_is_the_inverse(shape: tuple[int, int, int]) -> None:
    codes = codes_of(*shape)
    delayed = delay(codes, bos=100, eos=101)
    assert delayed.shape == (delayed_length(shape[1], shape[0]), shape[0])
    assert torch.equal(undelay(delayed), codes)


@given(shapes)
@settings(max_examples=60)
def test_every_code_and_one_eos_are_targets_and_bos_never(shape: tuple[int, int, int]) -> None:
    codes = codes_of(*shape)
    delayed, targets = delay(codes, 100, 101), delay_targets(codes, 101)
    for book, row in enumerate(codes):
        column = targets[:, book]
        assert column[column != IGNORE].tolist() == [*row.tolist(), 101]
    chosen = targets != IGNORE
    assert torch.equal(delayed[chosen], targets[chosen])
    assert not bool((targets == 100).any())


def test_against_the_layout_written_out() -> None:
    codes = torch.tensor([[1, 2], [3, 4], [5, 6]])
    b, e = 8, 9
    rows = [[b, b, b], [1, b, b], [2, 3, b], [e, 4, 5], [e, e, 6], [e, e, e]]
    assert delay(codes, b, e).tolist() == rows


def test_too_few_rows() -> None:
    with pytest.raises(ValueError, match="too few"):
        undelay(torch.zeros(3, 8, dtype=torch.long))
