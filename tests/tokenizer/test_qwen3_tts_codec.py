"""The codec of Qwen3-TTS against its published class, and its stream against its whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MimiConfig, MimiModel

from audiollm.codec import load_codec
from audiollm.errors import ConfigError
from tests.audiollm.families.talkers.talker_runs import random_codes
from tests.audiollm.families.talkers.tiny_qwen3_tts import ORACLE
from tokenizer.codecs.qwen3_tts import Qwen3TTSCodec
from tokenizer.codecs.qwen3_tts_decoder import Qwen3TTSDecoder

BOOKS, CODES, HOP = 4, 16, 1920
SCRIPT = str(Path(__file__).parents[1] / "oracles" / "published_qwen3_codec.py")
DECODER = {
    "codebook_size": CODES, "codebook_dim": 16, "hidden_size": 32, "latent_dim": 24, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 9, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_quantizers": BOOKS, "decoder_dim": 32, "rope_theta": 10_000, "upsample_rates": [8, 5, 4, 3],
    "upsampling_ratios": [2, 2], "rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": False,
    "layer_scale_initial_scale": 0.01, "max_position_embeddings": 8000, "attention_dropout": 0.0,
}  # fmt: skip


def write_tiny_codec(folder: Path) -> Path:
    """Write a codec of random weights in its published files."""
    torch.manual_seed(0)
    mimi = MimiConfig(
        hidden_size=32, num_filters=4, num_residual_layers=1, upsampling_ratios=[8, 6, 5, 4], codebook_size=CODES,
        codebook_dim=16, num_quantizers=BOOKS + 2, num_semantic_quantizers=1, num_hidden_layers=1, sliding_window=5,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, intermediate_size=32,
        vector_quantization_hidden_dimension=16, upsample_groups=32,
    )  # fmt: skip
    model = MimiModel(mimi)
    for name, buffer in model.named_buffers():
        if name.endswith("embed_sum"):
            buffer.normal_(std=0.1)
    model.save_pretrained(folder / "mimi")
    stored = load_file(folder / "mimi" / "model.safetensors")
    kept = ("encoder.", "encoder_transformer.", "downsample.", "quantizer.")
    weights = {f"encoder.{name}": value for name, value in stored.items() if name.startswith(kept)}
    decoder = Qwen3TTSDecoder(DECODER)
    for name, parameter in decoder.named_parameters():
        if "scale" in name or "gamma" in name or name.endswith("cluster_usage"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif parameter.ndim > 1 or "alpha" in name or "beta" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    weights |= {f"decoder.{name}": value.detach() for name, value in decoder.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "qwen3_tts_tokenizer_12hz", "encoder_config": mimi.to_dict(), "decoder_config": DECODER,
        "encoder_valid_num_quantizers": BOOKS, "input_sample_rate": 24_000, "output_sample_rate": 24_000,
        "decode_upsample_rate": HOP, "encode_downsample_rate": HOP,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_codec(tmp_path_factory.mktemp("codec"))


def codec_of(folder: Path) -> Qwen3TTSCodec:
    codec = load_codec(folder)
    assert isinstance(codec, Qwen3TTSCodec)
    return codec


def noise(samples: int) -> Tensor:
    return 0.1 * torch.randn(1, samples, generator=torch.Generator().manual_seed(1))


def test_sound_is_that_of_the_published_class(folder: Path, tmp_path: Path) -> None:
    if not ORACLE.is_dir():
        pytest.skip(f"no {ORACLE}: `make -C benchmarks oracles` fetches the published package")
    codec, codes_KT = codec_of(folder), random_codes(BOOKS, CODES, 120, 0)
    save_file({"codes": codes_KT.T.contiguous()}, tmp_path / "in.safetensors")
    files = [folder, *(tmp_path / f"{name}.safetensors" for name in ("in", "out"))]
    subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT, *map(str, files)], check=True,
        env={**os.environ, "PYTHONPATH": str(ORACLE)},
    )  # fmt: skip
    theirs = load_file(files[2])["samples"]
    assert float(theirs.std()) > 1e-3
    torch.testing.assert_close(codec.decode(codes_KT)[0], theirs, atol=1e-5, rtol=0)


def test_codes_are_those_of_mimi(folder: Path) -> None:
    """The published encoder is transformers' Mimi, which attended over everything when it was trained."""
    mimi = MimiModel.from_pretrained(folder / "mimi").eval()
    mimi.config.sliding_window = mimi.config.max_position_embeddings
    for module in mimi.modules():
        if hasattr(module, "sliding_window"):
            module.sliding_window = mimi.config.sliding_window
        if hasattr(getattr(module, "config", None), "sliding_window"):
            module.config.sliding_window = mimi.config.sliding_window
    samples_1N = noise(40 * HOP + 100)
    with torch.no_grad():
        codes_KT = mimi.encode(samples_1N[None]).audio_codes[0, :BOOKS]
    torch.testing.assert_close(codec_of(folder).encode(samples_1N), codes_KT)
    assert codes_KT.unique().numel() > 3


@pytest.mark.parametrize("pieces", [(1,) * 33, (5, 1, 27), (33,)])
def test_pieces_are_as_the_whole(folder: Path, pieces: tuple[int, ...]) -> None:
    codec, codes_KT = codec_of(folder), random_codes(BOOKS, CODES, 33, 3)
    stream = codec.code_stream()
    for _ in range(2):  # a flushed stream begins anew
        parts = [stream.push(part) for part in codes_KT.split(list(pieces), dim=1)]
        samples_1N = torch.cat([*parts, stream.flush()], dim=1)
        torch.testing.assert_close(samples_1N, codec.decode(codes_KT), atol=1e-5, rtol=0)


def test_frames_are_rounded_up(folder: Path) -> None:
    codec = codec_of(folder)
    assert [codec.encode(noise(samples)).shape[1] for samples in (100, HOP, HOP + 1)] == [1, 1, 2]
    assert codec.frame_rate == 12.5
    assert codec.decode(random_codes(BOOKS, CODES, 3, 0)).shape == (1, 3 * HOP)
    vectors_KVD = codec.codebook_vectors_KVD
    assert vectors_KVD.shape == (BOOKS, CODES, 16)
    codes_KT = random_codes(BOOKS, CODES, 2, 0)
    summed = sum(vectors_KVD[book, codes_KT[book]] for book in range(BOOKS))
    torch.testing.assert_close(codec.decoder.quantizer(codes_KT[None])[0].T, summed, atol=1e-6, rtol=1e-5)


def test_a_damaged_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.startswith("decoder."))
    save_file({key: value for key, value in weights.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="decoder's weights"):
        load_codec(tmp_path)
