"""Objects by words and through time: real classes of transformers with random weights, and the arithmetic of boxes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from audiollm.errors import ConfigError
from pipelines.audiocot.steps.objects import Objects, ObjectsConfig
from pipelines.audiocot.steps.tracking import ObjectFinder, ScaledPictures, box_of_mask, overlap

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "red", "bell", "dog", "?"]
SIDE = 128


def detector(folder: Path) -> Path:
    torch.manual_seed(0)
    (folder / "words").mkdir(parents=True)
    (folder / "words" / "vocab.txt").write_text("\n".join(WORDS))
    config = transformers.GroundingDinoConfig(
        backbone_config=transformers.SwinConfig(
            window_size=7, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 1, 1], image_size=64,
            out_indices=[2, 3, 4],
        ),
        text_config=transformers.BertConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=len(WORDS),
            max_position_embeddings=32,
        ),
        d_model=32, encoder_layers=1, decoder_layers=2, encoder_ffn_dim=8, decoder_ffn_dim=8, num_queries=4,
        encoder_attention_heads=2, decoder_attention_heads=2, disable_custom_kernels=True, max_text_len=16,
    )  # fmt: skip
    transformers.GroundingDinoForObjectDetection(config).save_pretrained(folder)
    transformers.BertTokenizerFast(str(folder / "words" / "vocab.txt")).save_pretrained(folder)
    size = {"shortest_edge": 160, "longest_edge": 240}  # the coarsest of four levels has 4 places and more
    transformers.GroundingDinoImageProcessorPil(size=size).save_pretrained(folder)
    return folder


def tracker(folder: Path) -> Path:
    torch.manual_seed(0)
    backbone = transformers.Sam2HieraDetConfig(
        hidden_size=12, image_size=[SIDE, SIDE], blocks_per_stage=[1, 1, 1, 1], embed_dim_per_stage=[12, 24, 48, 96],
        num_attention_heads_per_stage=[1, 2, 2, 2],
    )  # fmt: skip
    vision = transformers.Sam2VisionConfig(
        backbone_config=backbone, backbone_channel_list=[96, 48, 24, 12], fpn_hidden_size=128,
        backbone_feature_sizes=[[32, 32], [16, 16], [8, 8]],
    )  # fmt: skip
    config = transformers.Sam2VideoConfig(
        vision_config=vision,
        prompt_encoder_config={"hidden_size": 128, "image_size": SIDE, "mask_input_channels": 8},
        mask_decoder_config={"hidden_size": 128, "mlp_dim": 16, "iou_head_hidden_dim": 16, "num_attention_heads": 2},
        image_size=SIDE, memory_attention_hidden_size=128, memory_attention_num_layers=1,
        memory_attention_feed_forward_hidden_size=16, memory_attention_rope_feat_sizes=[8, 8],
        memory_encoder_hidden_size=128, memory_encoder_output_channels=64, mask_downsampler_embed_dim=128,
        memory_fuser_num_layers=1, memory_fuser_embed_dim=128, memory_fuser_intermediate_dim=16,
    )  # fmt: skip
    transformers.Sam2VideoModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return detector(folder / "detector"), tracker(folder / "tracker")


def test_objects_are_found_and_followed_within_the_pictures(folders: tuple[Path, Path]) -> None:
    finder = ObjectFinder(*folders)
    pictures = list(np.random.default_rng(0).integers(0, 255, (4, 48, 64, 3)).astype(np.uint8))
    times = [10.125, 10.375, 10.625, 10.875]
    found = finder.find(pictures, times, ["red bell", "dog"], 0.0, 3)
    assert 1 <= len(found) <= 3
    assert [each["score"] for each in found] == sorted((each["score"] for each in found), reverse=True)
    for each in found:
        assert each["name"] in ("red bell", "dog") and {box["at_s"] for box in each["region"]} <= set(times)
        for box in each["region"]:
            assert box["width"] > 0 and box["height"] > 0 and box["x"] >= 0 and box["y"] >= 0
            assert box["x"] + box["width"] <= 64.01 and box["y"] + box["height"] <= 48.01
    assert finder.find(pictures, times, ["dog"], 1.0, 3) == []


def test_a_picture_is_scaled_as_the_tracker_was_trained() -> None:
    scaled_CSS = ScaledPictures([np.full((20, 30, 3), 128, np.uint8)], SIDE)[0]
    expected = (128 / 255 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    assert scaled_CSS.shape == (3, SIDE, SIDE)
    torch.testing.assert_close(scaled_CSS, expected[:, None, None].expand(3, SIDE, SIDE))


def test_boxes_of_masks_and_their_overlap() -> None:
    mask_HW = torch.full((8, 8), -1.0)
    assert box_of_mask(mask_HW, (16, 32)) is None
    mask_HW[2:4, 3:7] = 1.0
    assert box_of_mask(mask_HW, (16, 32)) == (12.0, 4.0, 28.0, 8.0)
    assert (
        overlap((0, 0, 2, 2), (1, 0, 3, 2)) == pytest.approx(1 / 3)
        and overlap((0, 0, 1, 1), (2, 2, 3, 3)) == 0
    )


def test_folders_without_models_are_refused(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="no GroundingDINO loads"):
        ObjectFinder(tmp_path, folders[1])
    with pytest.raises(ConfigError, match="no SAM 2 loads"):
        ObjectFinder(folders[0], tmp_path)
    step = Objects(ObjectsConfig(by="transformers", detector=tmp_path, tracker=folders[1]))
    assert "objects.detector: no model in" in str(step.missing())
