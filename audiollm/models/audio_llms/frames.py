"""Pictures of videos as patches, as the vision encoders of Qwen2-VL, Qwen-Omni and VideoLLaMA 3 take them, without
torchvision.

Shapes: F pictures, H rows, W columns of pixels, P patches, T tokens of a picture, D numbers of a
patch or token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MEAN = (0.48145466, 0.4578275, 0.40821073)
_DEVIATION = (0.26862954, 0.26130258, 0.27577711)
"""Of CLIP's colours, where a folder has none of its own."""
_MAX_ASPECT = 200
_SAME_DIFFERENCE = 0.1
"""VideoLLaMA 3 leaves out a token whose pixels differ on average by no more, of 255, from those before."""


class FramePatches:
    """Turns videos into patches; stands in for transformers' `Qwen2VLVideoProcessor`, which needs torchvision.

    Pictures are scaled so that both sides are multiples of a merged patch and their product lies between the two
    limits. An odd last picture is repeated: the encoder takes `temporal_patch_size` pictures at once.

    Args:
        settings: of the folder's `video_preprocessor_config.json` or `preprocessor_config.json`.
        shares_pixels: the upper limit is that of all pictures of a video together.
    """

    model_input_names = ("pixel_values_videos", "video_grid_thw")

    def __init__(self, settings: Mapping[str, Any], shares_pixels: bool = False) -> None:
        self._shares_pixels = shares_pixels
        size = settings.get("size") or {}
        self.patch_size = int(settings.get("patch_size", 14))
        self.temporal_patch_size = int(settings.get("temporal_patch_size", 2))
        self.merge_size = int(settings.get("merge_size", 2))
        self.min_pixels = int(size.get("shortest_edge") or settings.get("min_pixels") or 128 * 28 * 28)
        self.max_pixels = int(size.get("longest_edge") or settings.get("max_pixels") or 768 * 28 * 28)
        self._mean = np.array(settings.get("image_mean") or _MEAN, np.float32)
        self._deviation = np.array(settings.get("image_std") or _DEVIATION, np.float32)

    def __call__(self, videos: Any, **_: Any) -> dict[str, Any]:
        """`pixel_values_videos` `[P, D]` of all videos, end to end, and `video_grid_thw` `[videos, 3]`.

        Raises:
            ValueError: a video without pictures, or with a side 200 times the other.
        """
        patches = [self._make_patches(frames_FHWC) for frames_FHWC in _flatten_videos(videos)]
        return {
            "pixel_values_videos": torch.cat([torch.from_numpy(patches_PD) for patches_PD, _ in patches]),
            "video_grid_thw": torch.tensor([grid for _, grid in patches]),
        }

    def _make_patches(
        self, frames_FHWC: NDArray[np.uint8]
    ) -> tuple[NDArray[np.float32], tuple[int, int, int]]:
        from PIL import Image

        if not len(frames_FHWC):
            raise ValueError("a video without pictures")
        sharing = len(frames_FHWC) if self._shares_pixels else 1
        _, rows, columns, _ = frames_FHWC.shape
        height, width = self.size_of(rows, columns, self.max_pixels // sharing)
        scaled = [
            np.asarray(Image.fromarray(np.asarray(frame)).resize((width, height), Image.Resampling.BICUBIC))
            for frame in frames_FHWC
        ]
        scaled += [scaled[-1]] * (-len(scaled) % self.temporal_patch_size)
        values_FHWC = (np.stack(scaled).astype(np.float32) / 255 - self._mean) / self._deviation
        values_FCHW = values_FHWC.transpose(0, 3, 1, 2)
        side, merge, times = self.patch_size, self.merge_size, self.temporal_patch_size
        grid = (len(scaled) // times, height // side, width // side)
        split = values_FCHW.reshape(
            grid[0], times, 3, grid[1] // merge, merge, side, grid[2] // merge, merge, side
        )
        # patches that are merged into one token lie side by side
        ordered = split.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
        return np.ascontiguousarray(ordered.reshape(math.prod(grid), -1), np.float32), grid

    def size_of(self, height: int, width: int, max_pixels: int) -> tuple[int, int]:
        """Height and width that pictures of at most `max_pixels` are scaled to.

        Raises:
            ValueError: one side is more than 200 times the other.
        """
        if max(height, width) > _MAX_ASPECT * min(height, width):
            raise ValueError(f"pictures of {width} x {height}: one side is more than 200 times the other")
        factor = self.patch_size * self.merge_size
        sides = [round(height / factor) * factor, round(width / factor) * factor]
        if sides[0] * sides[1] > max_pixels:
            shrink = math.sqrt(height * width / max_pixels)
            sides = [max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width)]
        elif sides[0] * sides[1] < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            sides = [math.ceil(side * grow / factor) * factor for side in (height, width)]
        return sides[0], sides[1]


class TimedFramePatches:
    """Turns videos into patches; stands in for transformers' `VideoLlama3VideoProcessor`, which needs torchvision.

    Each picture is encoded by itself, and its prompt tells its time. Of tokens that do not change from one picture to
    the next, the first alone is kept.

    Args:
        settings: as those of `FramePatches`.
    """

    model_input_names = (*FramePatches.model_input_names, "video_merge_sizes", "video_compression_mask")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        grey = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        self._patches = FramePatches({"temporal_patch_size": 1, **grey, **settings}, shares_pixels=True)
        self._leaves_out = bool(settings.get("use_token_compression", True))

    def __call__(self, videos: Any, video_metadata: Sequence[Any] = (), **_: Any) -> dict[str, Any]:
        """Patches and grids as `FramePatches` gives them, `video_merge_sizes` `[videos]`, `video_compression_mask`
        `[tokens]`, which is true for the tokens that are kept, and `video_metadata`.

        Raises:
            ValueError: a video without pictures, or with a side 200 times the other.
        """
        from transformers.video_utils import VideoMetadata

        features = self._patches(videos)
        grids, merge = features["video_grid_thw"], self._patches.merge_size
        video_patches = features["pixel_values_videos"].split(grids.prod(dim=1).tolist())
        masks = [
            self._mark_changed_tokens(patches_PD, int(grid[0]))
            for patches_PD, grid in zip(video_patches, grids, strict=True)
        ]
        return {
            **features,
            "video_merge_sizes": torch.full((len(grids),), merge),
            "video_compression_mask": torch.cat(masks),
            "video_metadata": [VideoMetadata(**dict(facts)) for facts in video_metadata],
        }

    def _mark_changed_tokens(self, patches_PD: Tensor, times: int) -> Tensor:
        """Whether each token of a video is kept; of a picture that is the same as the one before, one is."""
        tokens = len(patches_PD) // self._patches.merge_size**2
        kept_FT = torch.ones(times, tokens // times, dtype=torch.bool)
        if self._leaves_out:
            pixels_FTD = patches_PD.view(times, tokens // times, -1)
            changes_FT = (pixels_FTD[1:] - pixels_FTD[:-1]).abs().mean(dim=-1) * 255
            kept_FT[1:] = changes_FT > _SAME_DIFFERENCE
            kept_FT[:, 0] |= ~kept_FT.any(dim=1)
        return kept_FT.flatten()


def _flatten_videos(videos: Any) -> Sequence[NDArray[np.uint8]]:
    """The videos of a batch, each `[F, H, W, 3]`: processors pass one, a list of them, or a list of lists."""
    if isinstance(videos, np.ndarray) and videos.ndim == 4:
        return [videos]
    flat: list[NDArray[np.uint8]] = []
    for video in videos:
        flat += _flatten_videos(video)
    return flat
