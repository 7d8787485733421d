"""DualFFN over padded inputs, as a transformers model: against transformers' Higgs Audio V2 and against DualFFN."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from audiollm.data.chat.template import Kind, TokenStream
from audiollm.data.hearing.features import FeatureShape, mel_features
from audiollm.data.packing import pack
from audiollm.models.audio_encoder import AudioEncoderConfig
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.hub import save_pretrained

transformers = pytest.importorskip("transformers")
huggingface = pytest.importorskip("audiollm.models.huggingface")

CONFIG = DualFFNConfig(
    vocab_size=300, num_codebooks=3, codebook_size=34, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, intermediate_size=48,
)  # fmt: skip
IDS = {"audio_token_id": 290, "audio_delay_token_id": 291, "audio_in_token_id": 292, "pad_token_id": 0}
ENCODER = AudioEncoderConfig(16, 1, 2, 32, num_mel_bins=80, max_source_positions=100)


def random_weights(model: Any) -> Any:
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def ours(config: DualFFNConfig = CONFIG, **ids: int) -> Any:
    fields = huggingface.DualFFNPreTrainedConfig.of(config, **{**IDS, **ids})
    return random_weights(huggingface.DualFFNForConditionalGeneration(fields))


def padded_inputs(left: bool = False) -> dict[str, Tensor]:
    """Three sequences of unequal length, with codes and labels of text and audio."""
    generator = torch.Generator().manual_seed(1)
    texts, frames, books = (4, 7, 2), (5, 3, 8), CONFIG.num_codebooks
    length, longest = max(t + f + 2 for t, f in zip(texts, frames, strict=True)), max(frames)
    inputs = {
        "input_ids": torch.zeros(3, length, dtype=torch.long),
        "attention_mask": torch.zeros(3, length, dtype=torch.long),
        "audio_input_ids": torch.zeros(3, longest, books, dtype=torch.long),
        "audio_input_ids_mask": torch.zeros(3, longest, dtype=torch.bool),
        "labels": torch.full((3, length), -100),
        "audio_labels": torch.full((3, longest, books), -100),
    }
    for row, (text, spoken) in enumerate(zip(texts, frames, strict=True)):
        real = text + spoken + 2
        place = slice(length - real, length) if left else slice(0, real)
        ids = torch.randint(1, 280, (real,), generator=generator)
        ids[text : text + spoken] = 290
        ids[text + spoken - 1] = 291  # transformers' placeholder of the last, delayed rows
        inputs["input_ids"][row, place] = ids
        inputs["attention_mask"][row, place] = 1
        inputs["labels"][row, place] = torch.where(torch.arange(real) < text + spoken, -100, ids)
        codes = torch.randint(34, (spoken, books), generator=generator)
        inputs["audio_input_ids"][row, :spoken] = codes
        inputs["audio_input_ids_mask"][row, :spoken] = True
        inputs["audio_labels"][row, :spoken] = codes
        inputs["audio_labels"][row, : row + 1, row] = -100  # codebooks with unequal numbers of targets
    return inputs


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The same weights, here and there."""
    model = ours()
    config = transformers.HiggsAudioV2Config(
        **{**model.config.to_dict(), "model_type": "higgs_audio_v2"}, attn_implementation="sdpa"
    )
    peer = transformers.HiggsAudioV2ForConditionalGeneration(config, use_text_head=True)
    peer.load_state_dict(model.state_dict())
    return model, peer.eval()


@pytest.mark.parametrize("left", [False, True])
def test_logits_and_loss_are_those_of_transformers(pair: tuple[Any, Any], left: bool) -> None:
    model, peer = pair
    inputs = padded_inputs(left)
    with torch.no_grad():
        found, wanted = model(**inputs), peer(**inputs)
        fed = {key: value for key, value in inputs.items() if "labels" not in key}
        text = peer.text_lm_head(peer.model(**fed).last_hidden_state)
    real = inputs["attention_mask"] == 1
    torch.testing.assert_close(found.logits[real], wanted.logits[real], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.text_logits[real], text[real], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.loss, wanted.loss, atol=1e-4, rtol=1e-5)
    assert found.logits[real].std() > 0.1 and not found.logits[~real].any()


@pytest.mark.parametrize("absent", ["labels", "audio_labels"])
def test_one_kind_of_labels_alone(pair: tuple[Any, Any], absent: str) -> None:
    model, peer = pair
    inputs = padded_inputs()
    del inputs[absent]
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).loss, peer(**inputs).loss, atol=1e-4, rtol=1e-5)


def test_text_alone_needs_no_audio_inputs(pair: tuple[Any, Any]) -> None:
    model, peer = pair
    ids = torch.randint(1, 280, (2, 6))
    with torch.no_grad():
        found = model(input_ids=ids)
        text = peer.text_lm_head(peer.model(input_ids=ids).last_hidden_state)
    torch.testing.assert_close(found.text_logits, text, atol=1e-4, rtol=1e-4)
    assert found.loss is None


@pytest.mark.parametrize("changes", [{"qk_norm": True, "audio_ffn_layers": (1,)}, {"qkv_bias": True}])
def test_the_auto_classes_load_what_is_saved(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = replace(CONFIG, **changes)
    network = random_weights(DualFFN(config))
    save_pretrained(network, tmp_path / "saved", max_shard_size="20KB")
    for auto in (transformers.AutoModel, transformers.AutoModelForTextToWaveform):
        model, info = auto.from_pretrained(tmp_path / "saved", output_loading_info=True)
        assert isinstance(model, huggingface.DualFFNForConditionalGeneration)
        assert not any(info.values()), info
        assert model.config.dual_ffn == config
    half = transformers.AutoModel.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert half.text_lm_head.weight.dtype == torch.bfloat16
    model.config.update(IDS)
    inputs = padded_inputs()
    found = model(**inputs)
    model.save_pretrained(tmp_path / "again")
    for again in (DualFFN.from_pretrained(tmp_path / "again"), DualFFN.from_pretrained(tmp_path / "saved")):
        for key, value in network.state_dict().items():
            assert torch.equal(again.state_dict()[key], value), key
    twice = huggingface.DualFFNForConditionalGeneration.from_pretrained(tmp_path / "again")
    assert twice.config.audio_token_id == 290
    torch.testing.assert_close(twice(**inputs).logits, found.logits)


def test_it_computes_with_dual_ffn_whatever_stands_in_for_its_parts() -> None:
    model = ours()
    inputs = padded_inputs()
    before = model(**inputs)
    tuned = transformers.AutoModel.from_config(model.config).eval()
    tuned.load_state_dict(model.state_dict())
    torch.testing.assert_close(tuned(**inputs).logits, before.logits)
    tuned.text_lm_head = torch.nn.Linear(32, 300, bias=False)
    tuned.model.layers[0].self_attn.q_proj = torch.nn.Identity()
    after = tuned(**inputs)
    assert (after.logits - before.logits).abs().max() > 0.01
    assert (after.text_logits - before.text_logits).abs().max() > 0.01


@pytest.mark.parametrize("again", [False, True])
def test_every_parameter_is_trained(again: bool) -> None:
    model = ours(replace(CONFIG, dropout=0.1)).train()
    if again:
        model.gradient_checkpointing_enable()
    calls: list[int] = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    model(**padded_inputs()).loss.backward()
    assert len(calls) == 1 + again
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    assert model.training and not model.eval()._dual_ffn().training


def test_a_wrong_number_of_frames_is_named(pair: tuple[Any, Any]) -> None:
    model, _ = pair
    inputs = padded_inputs()
    inputs["audio_input_ids_mask"][1, 2] = False
    with pytest.raises(ValueError, match="sequence 1 has 3 audio positions and 2 frames"):
        model(**inputs)
    with pytest.raises(ValueError, match="sequence 0 has 5 audio positions and 0 frames"):
        model(input_ids=inputs["input_ids"])
    with pytest.raises(ValueError, match="no audio encoder"):
        model(input_ids=torch.ones(1, 3, dtype=torch.long), input_features=torch.zeros(1, 80, 8))


@pytest.mark.parametrize(
    "changes", [{}, {"padded": True}, {"stem": "conv2d", "stem_channels": 8, "max_source_positions": 24}]
)
def test_features_are_heard_as_in_a_pack(changes: dict[str, Any]) -> None:
    encoder = replace(ENCODER, **changes)
    model = ours(replace(CONFIG, audio_encoder=encoder))
    shape: FeatureShape = encoder.features
    generator = torch.Generator().manual_seed(2)
    clips = [
        mel_features(torch.randn(1, n, generator=generator), shape) for n in (16_000, 40_000)
    ]  # the second: two
    streams, ids = [], torch.ones(2, 80, dtype=torch.long)
    for row, clip in enumerate(clips):
        ids[row, 2 : 2 + clip.rows] = 292
        length = clip.rows + 5
        kinds = torch.where(ids[row, :length] == 292, int(Kind.FEATURE), int(Kind.TEXT))
        none = torch.zeros(length, 3, dtype=torch.long)
        streams.append(
            TokenStream(ids[row, :length], none, kinds, none[:, 0] - 100, none - 100, clip.windows)
        )
    batch = pack(streams, encoder=shape)
    windows = [window for clip in clips for window in clip.windows]
    longest = max(window.mel_MF.shape[1] for window in windows)
    mel, mask = torch.zeros(len(windows), 80, longest), torch.zeros(len(windows), longest)
    for place, window in enumerate(windows):
        frames = window.mel_MF.shape[1]
        mel[place, :, :frames] = window.mel_MF
        mel[place, :, frames:] = window.mel_MF[:, -1:]  # silence
        mask[place, : shape.frames_per_row * window.rows] = 1
    real = torch.arange(80) < torch.tensor([len(stream) for stream in streams])[:, None]
    with torch.no_grad():
        found = model(
            input_ids=ids, attention_mask=real.long(), input_features=mel, feature_attention_mask=mask
        )
        hidden = model._dual_ffn()(batch)[batch.row_of_S][: int(real.sum())]
    torch.testing.assert_close(found.logits[real], model.audio_lm_head(hidden), atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="positions of features and windows"):
        model(
            input_ids=ids, attention_mask=real.long(), input_features=mel[:2], feature_attention_mask=mask[:2]
        )
