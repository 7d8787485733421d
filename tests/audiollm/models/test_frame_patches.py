"""Patches of videos without torchvision: equal to transformers' patches of pictures, and taken by a thinker."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from audiollm.audio import Waveform
from audiollm.models.audio_llms.frames import FramePatches, TimedFramePatches
from audiollm.models.audio_llms.inputs import InputsError, Pictures, processor_inputs
from audiollm.models.audio_llms.loading import PatchProduct, load_audio_llm
from tests.audiollm.models.tiny_audio_llms import qwen2_5_omni_thinker, save_processor

LIMITS = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 12}


@pytest.mark.parametrize("size", [(40, 60), (28, 28), (200, 30), (300, 500)])
def test_a_still_video_is_the_picture(size: tuple[int, int]) -> None:
    """Of transformers' processor of pictures, which repeats one picture for the encoder's two."""
    picture = np.random.default_rng(0).integers(0, 255, (*size, 3)).astype(np.uint8)
    theirs = transformers.Qwen2VLImageProcessorPil(**LIMITS)(picture, return_tensors="pt")
    ours = FramePatches(LIMITS)([[np.stack([picture, picture])]])
    assert ours["video_grid_thw"].tolist() == theirs["image_grid_thw"].tolist()
    torch.testing.assert_close(ours["pixel_values_videos"], theirs["pixel_values"], atol=2e-6, rtol=0)


def test_pictures_go_into_pairs_and_an_odd_one_is_repeated() -> None:
    frames = np.random.default_rng(0).integers(0, 255, (3, 56, 56, 3)).astype(np.uint8)
    odd = FramePatches(LIMITS)(frames)
    even = FramePatches(LIMITS)(np.concatenate([frames, frames[-1:]]))
    assert odd["video_grid_thw"].tolist() == [[2, 4, 4]]
    assert torch.equal(odd["pixel_values_videos"], even["pixel_values_videos"])
    first = FramePatches(LIMITS)(frames[:2])["pixel_values_videos"]
    assert torch.equal(odd["pixel_values_videos"][:16], first)
    with pytest.raises(ValueError, match="200 times"):
        FramePatches(LIMITS).size_of(1, 500, 9_000)


def test_pictures_of_a_timed_video_are_pictures_that_share_a_limit() -> None:
    """Each is patched as transformers' processor of VideoLLaMA 3 patches a picture."""
    frames = np.random.default_rng(0).integers(0, 255, (3, 100, 150, 3)).astype(np.uint8)
    ours = TimedFramePatches(LIMITS)([[frames]])
    limits = {"min_pixels": LIMITS["min_pixels"], "max_pixels": LIMITS["max_pixels"] // 3}
    theirs = transformers.VideoLlama3ImageProcessorPil(**limits, merge_size=2)(
        list(frames), return_tensors="pt"
    )
    assert ours["video_grid_thw"].tolist() == [[3, *theirs["image_grid_thw"][0].tolist()[1:]]]
    torch.testing.assert_close(ours["pixel_values_videos"], theirs["pixel_values"], atol=2e-6, rtol=0)
    assert ours["video_merge_sizes"].tolist() == [2] and ours["video_compression_mask"].all()


def test_tokens_that_do_not_change_are_left_out_and_each_picture_keeps_one() -> None:
    still = np.random.default_rng(0).integers(0, 255, (56, 56, 3)).astype(np.uint8)
    moved = still.copy()
    moved[:28, 28:] = 255 - moved[:28, 28:]
    video = np.stack([still, still, moved])
    kept = TimedFramePatches(LIMITS)(video)["video_compression_mask"].view(3, 4)
    assert kept.tolist() == [[True] * 4, [True, False, False, False], [False, True, False, False]]
    assert TimedFramePatches({**LIMITS, "use_token_compression": False})(video)[
        "video_compression_mask"
    ].all()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("thinker")
    model, processor = qwen2_5_omni_thinker()
    shown = "{% elif c['type'] == 'video' %}<|vision_bos|><|VIDEO|><|vision_eos|>"
    said = "{% else %}{{ c['text'] }}"
    processor.chat_template = processor.chat_template.replace(said, shown + said)
    model.save_pretrained(path)
    save_processor(processor, path)
    written = path / "processor_config.json"
    config = json.loads(written.read_text())
    config["video_processor"]["size"] = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 12}
    written.write_text(json.dumps(config))
    return path


def test_video_and_sound_of_one_clip_change_the_answer(folder: Path) -> None:
    """Another video, another sound, or another order of pictures gives other logits."""
    model, processor = load_audio_llm(folder, torch.float32)
    draw = np.random.default_rng(0)

    def last_logits(frames_FHWC: np.ndarray, hertz: float) -> torch.Tensor:
        time = torch.arange(8000) / 16000
        sound = Waveform(torch.sin(2 * torch.pi * hertz * time)[None], 16000)
        pictures = Pictures(tuple(frames_FHWC), tuple(0.25 + 0.5 * n for n in range(len(frames_FHWC))))
        inputs = processor_inputs(processor, [("user", [pictures, sound, "what?"])], generation_prompt=True)
        assert {"pixel_values_videos", "video_grid_thw", "video_second_per_grid"} <= set(inputs)
        assert inputs["video_second_per_grid"].tolist() == [1.0]  # two pictures of half a second
        with torch.inference_mode():
            return model(**inputs).logits[0, -1]

    frames = draw.integers(0, 255, (4, 56, 56, 3)).astype(np.uint8)
    plain = last_logits(frames, 400.0)
    assert torch.equal(plain, last_logits(frames, 400.0))
    for other in (
        last_logits(draw.integers(0, 255, (4, 56, 56, 3)).astype(np.uint8), 400.0),
        last_logits(frames[::-1].copy(), 400.0),
        last_logits(frames, 900.0),
    ):
        assert not torch.allclose(plain, other, atol=1e-6)


def test_patches_are_multiplied_and_give_what_transformers_gives(folder: Path) -> None:
    """Logits and gradients of the model as transformers loads it; the same names in the checkpoint."""
    ours, processor = load_audio_llm(folder, torch.float32)
    theirs = type(ours).from_pretrained(folder, dtype=torch.float32).eval()
    assert type(ours.model.visual.patch_embed.proj) is PatchProduct
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    frames = np.random.default_rng(0).integers(0, 255, (4, 56, 56, 3)).astype(np.uint8)
    pictures = Pictures(tuple(frames), (0.25, 0.75, 1.25, 1.75))
    inputs = processor_inputs(processor, [("user", [pictures, "what?"])], generation_prompt=True)
    found = []
    for model in (ours, theirs):
        logits = model(**inputs).logits
        logits.square().mean().backward()
        found.append((logits.detach(), model.model.visual.patch_embed.proj.weight.grad))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)


def test_what_is_larger_than_the_kernel_is_convolved() -> None:
    convolution = torch.nn.Conv3d(3, 4, (2, 3, 3), (2, 3, 3))
    product = PatchProduct(3, 4, (2, 3, 3), (2, 3, 3))
    product.load_state_dict(convolution.state_dict())
    for size in ((2, 3, 3), (4, 6, 9)):
        patches = torch.randn(5, 3, *size)
        torch.testing.assert_close(product(patches), convolution(patches))


def test_a_model_without_pictures_says_so(folder: Path) -> None:
    _, processor = load_audio_llm(folder, torch.float32)
    processor.video_processor = None
    pictures = Pictures((np.zeros((28, 28, 3), np.uint8),), (0.0,))
    with pytest.raises(InputsError, match="takes no pictures"):
        processor_inputs(processor, [("user", [pictures, "what?"])], generation_prompt=True)
