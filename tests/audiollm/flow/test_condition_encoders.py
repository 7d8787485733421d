"""Pretrained encoders of conditions from local folders and by import path; the released structure on top of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from audiollm.audio import load
from audiollm.data.records.manifest import read_samples
from audiollm.errors import ConfigError, StageError
from audiollm.files.atomic import read_jsonl
from audiollm.flow.conditions.pretrained import load_frame_encoder, load_text_encoder
from audiollm.flow.corpus import open_corpus, read_sound, survey_sounds
from audiollm.flow.generator import SoundGenerator
from audiollm.flow.model.packed import Conditions, pack_conditions
from audiollm.flow.model.rows import rows_of
from audiollm.flow.model.sampling import SamplerSettings
from audiollm.flow.model.thinksound import CAPTION_DIM, CAPTION_ROWS, ThinkSound, sync_length
from audiollm.flow.settings import EncodersConfig, GenerateSoundConfig, PicturesConfig, SoundSamplingConfig
from audiollm.flow.sound_model import SoundModel
from audiollm.flow.stages import ENCODE_LATENTS, GENERATE_SOUND, TRAIN_FLOW
from audiollm.flow.training import build_sound_model, sound_model_config
from tests.audiollm.flow.toy import AUTOENCODER, RATE, context_of, encode_config, train_config, write_scenes

SYNC = f"{__name__}:synchronisation"
TEXT = "a low tone over a hum"


class Synchronisation:
    """A stand-in for Synchformer: 8 rows for each segment of 16 pictures, a segment every 8 pictures."""

    digest, width, picture_side, frame_rate = "sync", 12, 16, 25.0

    def encode_pictures(self, pictures: Any, times_s: Sequence[float]) -> tuple[Tensor, Tensor]:
        light_F = torch.tensor([float(np.mean(each)) / 255 for each in pictures])
        rows = []
        for first in range(0, len(light_F) - 15, 8):
            rows.append(light_F[first : first + 16 : 2, None].expand(-1, self.width))
        made_RC = torch.cat(rows)
        return made_RC, torch.linspace(times_s[0], times_s[-1], len(made_RC))


def synchronisation() -> Synchronisation:
    return Synchronisation()


class Unordered(Synchronisation):
    def encode_pictures(self, pictures: Any, times_s: Sequence[float]) -> tuple[Tensor, Tensor]:
        return torch.zeros(3, self.width), torch.tensor([0.1, 0.3, 0.2])


def unordered() -> Unordered:
    return Unordered()


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<pad>", "a", "low", "high", "tone", "over", "hum", "first", "at"]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<pad>",
        model_max_length=77,
    ).save_pretrained(folder)


def save_clip(folder: Path) -> None:
    """Write a CLIP of the released width of captions, with one small layer on each side, and random weights."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    torch.manual_seed(0)
    shared = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    text = {
        "vocab_size": 16,
        "hidden_size": CAPTION_DIM,
        "max_position_embeddings": 77,
        "eos_token_id": 1,
        **shared,
    }
    vision = {"hidden_size": 16, "image_size": 32, "patch_size": 16, **shared}
    config = CLIPConfig(
        text_config={**text, "bos_token_id": 0, "pad_token_id": 1}, vision_config=vision, projection_dim=20
    )
    CLIPModel(config).save_pretrained(folder)
    CLIPImageProcessor(
        size={"shortest_edge": 32}, crop_size=32, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.25]
    ).save_pretrained(folder)
    save_tokenizer(folder)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    save_clip(folder)
    return folder


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import T5Config, T5EncoderModel

    folder = tmp_path_factory.mktemp("t5")
    torch.manual_seed(1)
    T5EncoderModel(
        T5Config(vocab_size=16, d_model=CAPTION_DIM, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    ).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def test_captions_and_pictures_are_those_of_the_whole_clip_model(clip: Path) -> None:
    from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

    whole = CLIPModel.from_pretrained(clip).eval()
    encoder = load_text_encoder(clip)
    made = encoder.encode_text(TEXT)
    assert made.values_RC.shape == (6, CAPTION_DIM) == (6, encoder.width) and made.pooled_C is not None
    batch = AutoTokenizer.from_pretrained(clip)([TEXT, "a"], return_tensors="pt", padding=True)
    with torch.no_grad():
        states = whole.text_model(**{k: batch[k] for k in ("input_ids", "attention_mask")}).last_hidden_state
    torch.testing.assert_close(made.values_RC, states[0, :6], atol=1e-5, rtol=1e-4)
    padded = load_text_encoder(clip, pads=True)
    all_rows = padded.encode_text(TEXT)
    assert all_rows.values_RC.shape == (CAPTION_ROWS, CAPTION_DIM)
    assert all_rows.pooled_C is None and padded.pooled_width == 0, (
        "the released model takes the mean of all rows"
    )
    torch.testing.assert_close(all_rows.values_RC[:6], made.values_RC, atol=1e-5, rtol=1e-4)
    pictures = [np.random.default_rng(n).integers(0, 256, (32, 32, 3), np.uint8) for n in range(2)]
    frames = load_frame_encoder(clip, 8.0)
    values_RC, times_R = frames.encode_pictures(pictures, [0.0625, 0.1875])
    pixels = CLIPImageProcessor.from_pretrained(clip)(pictures, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        wanted = whole.visual_projection(whole.vision_model(pixel_values=pixels).pooler_output)
    torch.testing.assert_close(values_RC, wanted, atol=1e-4, rtol=1e-4)
    assert times_R.tolist() == pytest.approx([0.0625, 0.1875]) and frames.picture_side == 32


def test_pads_do_not_change_the_rows_of_a_thought(t5: Path) -> None:
    """T5 attends to both sides: without its mask the pads would change all rows."""
    alone, padded = load_text_encoder(t5), load_text_encoder(t5, pads=True)
    rows, with_pads = alone.encode_text(TEXT).values_RC, padded.encode_text(TEXT).values_RC
    assert rows.shape == (6, CAPTION_DIM) and with_pads.shape == (77, CAPTION_DIM)
    torch.testing.assert_close(with_pads[:6], rows, atol=1e-5, rtol=1e-4)
    assert alone.digest != padded.digest


def test_other_weights_have_another_digest_and_what_is_no_encoder_is_refused(
    clip: Path, t5: Path, tmp_path: Path
) -> None:
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(2)
    config = T5Config.from_pretrained(t5)
    T5EncoderModel(config).save_pretrained(tmp_path / "other")
    save_tokenizer(tmp_path / "other")
    assert load_text_encoder(tmp_path / "other").digest != load_text_encoder(t5).digest
    with pytest.raises(ConfigError, match="no CLIP-class encoder of pictures"):
        load_frame_encoder(t5, 8.0)
    config.save_pretrained(tmp_path / "pickled")
    torch.save(T5EncoderModel(config).state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    save_tokenizer(tmp_path / "pickled")
    with pytest.raises(ConfigError):
        load_text_encoder(tmp_path / "pickled")
    state = {"shared.weight": torch.zeros(16, CAPTION_DIM)}
    save_file(state, tmp_path / "pickled" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="weights are missing .* such as encoder"):
        load_text_encoder(tmp_path / "pickled")
    with pytest.raises(ConfigError, match="config.json is missing"):
        load_text_encoder(tmp_path)
    with pytest.raises(ConfigError, match="returns no encoder of texts"):
        load_text_encoder(SYNC)
    with pytest.raises(ConfigError, match="returns no encoder of pictures"):
        load_frame_encoder(f"{__name__}:write_scenes_", 8.0)


def test_another_encoder_than_that_of_the_training_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, shards = write_scenes(tmp_path, count=2), tmp_path / "encode" / "shards"
    config = encode_config(samples, encoders=EncodersConfig(sync=SYNC))
    ENCODE_LATENTS.run(config, context_of(tmp_path / "encode"))
    sources, facts = open_corpus([shards])
    made = sound_model_config(train_config(shards), facts, survey_sounds(sources, facts))
    SoundModel(made).save_pretrained(tmp_path / "model")
    SoundGenerator.load(tmp_path / "model", AUTOENCODER)
    monkeypatch.setattr(Synchronisation, "digest", "another")
    with pytest.raises(ConfigError, match="sync: the encoder is not the one that the model was trained with"):
        SoundGenerator.load(tmp_path / "model", AUTOENCODER)


def write_scenes_() -> object:
    return object()


def test_the_released_structure_is_trained_from_its_weights(clip: Path, t5: Path, tmp_path: Path) -> None:
    """Encoded with pads, begun from weights under the released keys, trained, and sampled with guidance."""
    samples = write_scenes(tmp_path, count=4)
    encoders = EncodersConfig(caption=str(clip), cot=str(t5), frames=str(clip), sync=SYNC, pads=True)
    ENCODE_LATENTS.run(encode_config(samples, encoders=encoders), context_of(tmp_path / "encode"))
    mistaken = EncodersConfig(sync=f"{__name__}:unordered")
    with pytest.raises(ConfigError, match="sync: the encoder gives 3 rows and 3 times"):
        ENCODE_LATENTS.run(encode_config(samples, encoders=mistaken), context_of(tmp_path / "unordered"))
    with pytest.raises(ValueError, match="encoders.sync sees no pictures at pictures.sync_rate: 0"):
        encode_config(samples, encoders=encoders, pictures=PicturesConfig(sync_rate=0))
    sources, facts = open_corpus([tmp_path / "encode" / "shards"])
    usable = survey_sounds(sources, facts)
    assert usable.bad == [] and usable.pooled_width == 0
    sound = read_sound(sources[0][0], facts, None)
    rows = {name: len(features.values_RC) for name, features in sound.conditions.items()}
    assert rows == {"frames": 8, "sync": sync_length(1.0), "caption": 77, "cot": 77}
    shape: dict[str, Any] = {"preset": "thinksound", "multi_stream_blocks": 1, "single_stream_blocks": 1}
    config = train_config(tmp_path / "encode" / "shards", **shape, batch_size=2)
    transformer = build_sound_model(config, facts, usable).transformer
    assert isinstance(transformer, ThinkSound)
    with torch.no_grad():
        for number, parameter in enumerate(transformer.parameters()):
            parameter.normal_(std=0.02, generator=torch.Generator().manual_seed(number))
    (tmp_path / "released").mkdir()
    state = {f"diffusion.model.{name}": each.contiguous() for name, each in transformer.state_dict().items()}
    save_file(state, tmp_path / "released" / "model.safetensors")
    begun = config.model_copy(update={"start": tmp_path / "released"})
    start = build_sound_model(begun, facts, usable)
    for name, tensor in transformer.state_dict().items():
        assert torch.equal(start.transformer.state_dict()[name], tensor), name
    figures = TRAIN_FLOW.run(begun, context_of(tmp_path / "train"))
    assert np.isfinite(figures["loss"]) and figures["sounds"] == 3
    trained = SoundModel.from_pretrained(tmp_path / "train")
    assert not trained.config.context_trained and trained.config.preset == "thinksound"
    changed = trained.transformer.final_layer.conv.weight - transformer.final_layer.conv.weight
    assert 0 < float(changed.abs().max()) < 0.1, "trained on from there"
    make = GenerateSoundConfig(
        model=tmp_path / "train", autoencoder=AUTOENCODER, samples=samples, sampling=SoundSamplingConfig(steps=1),
    )  # fmt: skip
    GENERATE_SOUND.run(make, context_of(tmp_path / "made"))
    (row,) = read_jsonl(tmp_path / "made" / "generated.jsonl")
    assert load(tmp_path / "made" / row["audio"]).samples_CN.shape == (1, RATE)
    with pytest.raises(StageError, match="window_s cuts it"):
        build_sound_model(config.model_copy(update={"window_s": 0.5}), facts, usable)
    native = begun.model_copy(update={"preset": "native"})
    with pytest.raises(ConfigError, match="released weights go with preset: thinksound"):
        build_sound_model(native, facts, usable)


def test_a_native_model_hears_the_summary_of_a_caption(clip: Path, tmp_path: Path) -> None:
    """Encoded with CLIP, trained, and sampled: another summary beside the same words gives another velocity."""
    samples = write_scenes(tmp_path, count=4, with_video=False)
    encoders = EncodersConfig(caption=str(clip))
    ENCODE_LATENTS.run(encode_config(samples, encoders=encoders), context_of(tmp_path / "encode"))
    TRAIN_FLOW.run(train_config(tmp_path / "encode" / "shards"), context_of(tmp_path / "train"))
    generator = SoundGenerator.load(tmp_path / "train", AUTOENCODER)
    assert generator.model.config.transformer["caption_pooled_dim"] == 20
    (sample, *_), _ = read_samples(samples)
    given = generator.conditions(sample, 1.0, "here", only=["caption"])
    caption = given["caption"]
    assert caption.pooled_C is not None and caption.pooled_C.shape == (20,)
    other: Conditions = {"caption": caption._replace(pooled_C=-caption.pooled_C)}
    x_LD, t_B, latents = torch.randn(20, 24), torch.tensor([0.3]), rows_of([20], torch.device("cpu"))
    with torch.no_grad():
        velocities = [
            generator.model(x_LD, t_B, pack_conditions([each], torch.device("cpu")), latents)
            for each in (given, other)
        ]
    assert not torch.equal(*velocities)
    made_CN = generator.make(given, 1.0, SamplerSettings(steps=1), "0")
    assert made_CN.shape == (1, RATE) and bool(made_CN.isfinite().all())


def test_the_released_structure_refuses_what_it_does_not_take(encoded: Path) -> None:
    with pytest.raises(
        StageError, match="takes features of pretrained encoders, and caption, cot, frames, sync have none"
    ):
        TRAIN_FLOW.run(
            train_config(encoded / "encode" / "shards", preset="thinksound"), context_of(encoded / "no")
        )
