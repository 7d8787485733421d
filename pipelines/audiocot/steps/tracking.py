"""Objects in pictures by words (GroundingDINO) and through time (SAM 2), as classes of transformers in local folders.

Nothing is downloaded and only safetensors are opened. Pictures for SAM 2 are scaled here, with its own mean and
deviation: transformers' processor of videos needs torchvision.

Shapes: F pictures, H rows, W columns of pixels, S side of SAM 2's pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audiollm.files.json_files import OFFLINE
from audiollm.files.transformers_folders import fit_inputs, open_model, opening

_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's colours, which SAM 2 was trained with."""
_SAME_OVERLAP = 0.6
"""Two boxes that overlap by more (intersection over union) are one object."""
_BOX_LABELS = (2, 3)
"""SAM's labels of the two corners of a box."""

PictureBox = tuple[float, float, float, float]
"""Left, top, right, bottom in pixels."""


class FoundBox(NamedTuple):
    """An object in one picture."""

    name: str
    box: PictureBox
    score: float


class ObjectFinder:
    """Finds objects in the middle picture of a clip by their names, and follows them to its beginning and end.

    Args:
        detector: folder of a GroundingDINO with its processor.
        tracker: folder of a SAM 2 for videos.

    Raises:
        ConfigError: one of the folders holds no such model, or pickled weights only.
    """

    def __init__(self, detector: Path, tracker: Path, on_gpu: bool = False) -> None:
        from transformers import (
            AutoModelForZeroShotObjectDetection,
            AutoTokenizer,
            GroundingDinoImageProcessorPil,
            GroundingDinoProcessor,
            Sam2VideoModel,
        )

        self._device = "cuda" if on_gpu else "cpu"
        with opening(detector, "GroundingDINO"):
            images = GroundingDinoImageProcessorPil.from_pretrained(str(detector), **OFFLINE)
            words = AutoTokenizer.from_pretrained(str(detector), **OFFLINE)
            self._processor = GroundingDinoProcessor(image_processor=images, tokenizer=words)
            self._detector = open_model(AutoModelForZeroShotObjectDetection, detector, self._device)
        with opening(tracker, "SAM 2"):
            self._tracker = open_model(Sam2VideoModel, tracker, self._device)
        self._side = int(self._tracker.config.image_size)

    def find(
        self,
        pictures: Sequence[NDArray[np.uint8]],
        times_s: Sequence[float],
        names: Sequence[str],
        min_score: float,
        max_objects: int,
    ) -> list[dict[str, Any]]:
        """`[{name, region: [{at_s, x, y, width, height}], score}]`, the surest first.

        Args:
            pictures: `[H, W, 3]` each, in order of time.
        """
        middle = len(pictures) // 2
        detections = self.detect(pictures[middle], names, min_score)[:max_objects]
        if not detections:
            return []
        boxes = self.track(pictures, middle, [detection.box for detection in detections])
        results = []
        for detection, box_by_picture in zip(detections, boxes, strict=True):
            region = [
                {
                    "at_s": round(times_s[number], 4),
                    "x": round(left, 2),
                    "y": round(top, 2),
                    "width": round(right - left, 2),
                    "height": round(bottom - top, 2),
                }
                for number, (left, top, right, bottom) in sorted(box_by_picture.items())
            ]
            if region:
                results.append({"name": detection.name, "region": region, "score": round(detection.score, 4)})
        return results

    @torch.inference_mode()
    def detect(
        self, picture_HWC: NDArray[np.uint8], names: Sequence[str], min_score: float
    ) -> list[FoundBox]:
        """Objects of a picture, the surest first; of several boxes for one object the surest."""
        from PIL import Image

        height, width = picture_HWC.shape[:2]
        detections: list[FoundBox] = []
        for name in names:  # one by one: a phrase of several words keeps its name
            prompt = f"{name.lower().strip('. ')}."
            inputs = self._processor(images=Image.fromarray(picture_HWC), text=prompt, return_tensors="pt")
            outputs = self._detector(**fit_inputs(self._detector, inputs))
            (result,) = self._processor.post_process_grounded_object_detection(
                outputs,
                inputs["input_ids"],
                threshold=min_score,
                text_threshold=0.0,
                target_sizes=[(height, width)],
            )
            for box, score in zip(result["boxes"].tolist(), result["scores"].tolist(), strict=True):
                left, top, right, bottom = (
                    min(max(value, 0.0), limit)
                    for value, limit in zip(box, (width, height, width, height), strict=True)
                )
                if right - left >= 1 and bottom - top >= 1:
                    detections.append(FoundBox(name, (left, top, right, bottom), score))
        return _drop_overlapping(sorted(detections, key=lambda detection: -detection.score))

    @torch.inference_mode()
    def track(
        self, pictures: Sequence[NDArray[np.uint8]], first: int, boxes: Sequence[PictureBox]
    ) -> list[dict[int, PictureBox]]:
        """The box of every object in every picture in which it is seen, by the picture's number.

        Args:
            first: number of the picture that `boxes` are in.
        """
        from transformers.models.sam2_video.modeling_sam2_video import Sam2VideoInferenceSession

        height, width = pictures[0].shape[:2]
        session = Sam2VideoInferenceSession(
            video_height=height,
            video_width=width,
            inference_device=self._device,
            inference_state_device=self._device,
            video_storage_device=self._device,
            dtype=self._tracker.dtype,
        )
        session.processed_frames = ScaledPictures(pictures, self._side, self._tracker.dtype)
        scale = torch.tensor([self._side / width, self._side / height], device=self._device)
        for number, (left, top, right, bottom) in enumerate(boxes):
            corners = torch.tensor([[left, top], [right, bottom]], device=self._device) * scale
            labels = torch.tensor(_BOX_LABELS, dtype=torch.int32, device=self._device)
            place = session.obj_id_to_idx(number)
            point_inputs = {"point_coords": corners[None, None], "point_labels": labels[None, None]}
            session.add_point_inputs(place, first, point_inputs)
            session.remove_mask_inputs(place, first)
        session.obj_with_new_inputs = list(range(len(boxes)))
        boxes_by_picture: list[dict[int, PictureBox]] = [{} for _ in boxes]
        self._note(self._tracker(session, first), first, boxes_by_picture, (height, width))
        for reverse in (False, True):
            for output in self._tracker.propagate_in_video_iterator(session, first, reverse=reverse):
                self._note(output, int(output.frame_idx), boxes_by_picture, (height, width))
        return boxes_by_picture

    def _note(
        self, output: Any, number: int, boxes_by_picture: list[dict[int, PictureBox]], size: tuple[int, int]
    ) -> None:
        for place, mask_1HW in enumerate(output.pred_masks):
            box = box_of_mask(mask_1HW.squeeze(), size)
            if box is not None:
                boxes_by_picture[place][number] = box


class ScaledPictures(Mapping[int, Tensor]):
    """Pictures `[3, S, S]` as SAM 2 takes them, by number; scaled when they are read (12 MB each at a side of 1024)."""

    def __init__(
        self, pictures: Sequence[NDArray[np.uint8]], side: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self._pictures, self._side, self._dtype = pictures, side, dtype

    def __getitem__(self, number: int) -> Tensor:
        picture_1CHW = torch.from_numpy(np.array(self._pictures[number])).permute(2, 0, 1)[None].float() / 255
        size = (self._side, self._side)
        scaled = torch.nn.functional.interpolate(picture_1CHW, size, mode="bilinear", antialias=True)[0]
        normalized = (scaled - torch.tensor(_MEAN)[:, None, None]) / torch.tensor(_DEVIATION)[:, None, None]
        return normalized.to(self._dtype)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._pictures)))

    def __len__(self) -> int:
        return len(self._pictures)


def box_of_mask(mask_HW: Tensor, size: tuple[int, int]) -> PictureBox | None:
    """The box around the positive part of a mask, in pixels of a picture of `size` (height, width)."""
    rows, columns = torch.nonzero(mask_HW > 0, as_tuple=True)
    if not len(rows):
        return None
    down, across = size[0] / mask_HW.shape[0], size[1] / mask_HW.shape[1]
    return (
        float(columns.min()) * across,
        float(rows.min()) * down,
        float(columns.max() + 1) * across,
        float(rows.max() + 1) * down,
    )


def overlap(first: PictureBox, second: PictureBox) -> float:
    """Intersection over union of two boxes."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    shared = max(0.0, width) * max(0.0, height)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (first, second)]
    return shared / max(sum(areas) - shared, 1e-9)


# Private


def _drop_overlapping(detections: Sequence[FoundBox]) -> list[FoundBox]:
    distinct: list[FoundBox] = []
    for detection in detections:
        if all(overlap(detection.box, earlier.box) <= _SAME_OVERLAP for earlier in distinct):
            distinct.append(detection)
    return distinct
