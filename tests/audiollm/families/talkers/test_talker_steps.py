"""Steps of generation by packed layers: the numbers of the stacks themselves, and never those of earlier weights."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from audiollm.families.csm.kind import CsmKind
from audiollm.families.qwen3_tts.kind import Qwen3TTSKind
from audiollm.families.talkers.kind import TalkerKind
from audiollm.families.talkers.packed_steps import PackedStack, TalkerSteps
from audiollm.families.talkers.policy import load_talker
from audiollm.families.talkers.talker import Talker
from tests.audiollm.families.talkers.tiny_csm import write_tiny_csm
from tests.audiollm.families.talkers.tiny_qwen3_tts import write_tiny_qwen3_tts


@pytest.fixture(scope="module", params=["csm", "qwen3_tts"])
def talker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Talker:
    folder: Path = tmp_path_factory.mktemp(request.param) / "model"
    kind: TalkerKind
    if request.param == "csm":
        kind = CsmKind(write_tiny_csm(folder))
    else:
        kind = Qwen3TTSKind(write_tiny_qwen3_tts(folder))
    return load_talker(kind).eval()


@torch.no_grad()
def test_packed_steps_are_those_of_the_stacks(talker: Talker) -> None:
    steps = TalkerSteps(talker)
    assert isinstance(steps._backbone, PackedStack) and isinstance(steps._depth, PackedStack)
    generator = torch.Generator().manual_seed(0)
    caches = [talker.backbone.new_cache(3, 8) for _ in range(2)]
    for cache in caches:
        cache.lengths[:3] = [2, 0, 1]  # rows of different lengths
    for _ in range(4):
        x_RC = torch.randn(3, talker.backbone.shape.hidden_size, generator=generator)
        expected_RC = talker.backbone.extend(x_RC, caches[0])
        torch.testing.assert_close(steps.extend_backbone(x_RC, caches[1]), expected_RC, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_passes_of_a_frame_begin_anew_with_any_number_of_answers(talker: Talker) -> None:
    generator = torch.Generator().manual_seed(0)
    passes = TalkerSteps(talker).depth_passes(talker.depth.new_cache(4, talker.num_codebooks))
    for rows in (4, 4, 2, 3):
        cache = talker.depth.new_cache(rows, talker.num_codebooks)
        for place in range(talker.num_codebooks):
            x_RC = torch.randn(rows, talker.depth.shape.hidden_size, generator=generator)
            expected_RC = talker.depth.extend(x_RC, cache)
            torch.testing.assert_close(passes.extend(x_RC, place), expected_RC, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_steps_tell_that_weights_have_changed(talker: Talker) -> None:
    steps = TalkerSteps(talker)
    assert steps.is_current()
    next(iter(talker.depth.parameters())).add_(0.5)
    assert not steps.is_current()
    assert TalkerSteps(talker).is_current()


@torch.no_grad()
def test_half_precision_computes_its_steps_itself(talker: Talker) -> None:
    half = copy.deepcopy(talker).bfloat16()
    steps = TalkerSteps(half)
    assert not isinstance(steps._depth, PackedStack)
    caches = [half.depth.new_cache(2, half.num_codebooks) for _ in range(2)]
    x_RC = torch.randn(2, half.depth.shape.hidden_size).bfloat16()
    passes = steps.depth_passes(caches[0])
    torch.testing.assert_close(passes.extend(x_RC, 0), half.depth.extend(x_RC, caches[1]))
