"""EnCodec, DAC and Mimi behind `Codec`: against their own packages called directly, at tiny random weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from encodec.model import EncodecModel
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from audiollm.codec import Codec, codec_digest
from audiollm.errors import ConfigError
from tokenizer.codecs.dac import DacCodec
from tokenizer.codecs.encodec import EncodecCodec, transformers_key
from tokenizer.codecs.mimi import MAX_SAMPLES, MimiCodec

ENCODEC = transformers.EncodecConfig(
    num_filters=4,
    hidden_size=16,
    upsampling_ratios=(5, 4),
    codebook_size=64,
    target_bandwidths=(14.4, 28.8),  # 1200 frames/s * 6 bits: 2 and 4 codebooks
)
DAC = transformers.DacConfig(
    encoder_hidden_size=4,
    decoder_hidden_size=16,
    downsampling_ratios=[2, 3, 5],  # two odd strides: the decoder comes out short
    n_codebooks=4,
    codebook_size=32,
    codebook_dim=4,
    sampling_rate=24_000,
)
MIMI = transformers.MimiConfig(
    num_filters=4,
    hidden_size=16,
    upsampling_ratios=[5, 4],
    num_quantizers=4,
    codebook_size=32,
    codebook_dim=8,
    vector_quantization_hidden_dimension=8,
    upsample_groups=16,
    num_hidden_layers=1,
    intermediate_size=16,
    num_attention_heads=2,
    num_key_value_heads=2,
    sliding_window=16,
)
CODECS: dict[str, Any] = {"encodec": EncodecCodec, "dac": DacCodec, "mimi": MimiCodec}
CONFIGS = {"encodec": ENCODEC, "dac": DAC, "mimi": MIMI}


def make(name: str, num_codebooks: int | None = None) -> Any:
    torch.manual_seed(0)
    return CODECS[name].from_config(CONFIGS[name], num_codebooks)


TINY = {name: make(name) for name in CODECS}


def noise(samples: int, seed: int = 1) -> Tensor:
    return 0.1 * torch.randn(1, samples, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def peer_encode(codec: Any, samples_CN: Tensor) -> Tensor:
    """The package's own encode; DAC, which drops the last partial frame, gets whole frames."""
    if isinstance(codec, EncodecCodec):
        return codec.model.encode(samples_CN[None])[0][0][0]
    if isinstance(codec, DacCodec):
        samples_CN = pad(samples_CN, (0, -samples_CN.shape[1] % codec.hop_samples))
    return codec.model.encode(samples_CN[None]).audio_codes[0]


@torch.no_grad()
def peer_decode(codec: Any, codes_KT: Tensor) -> Tensor:
    if isinstance(codec, EncodecCodec):
        return codec.model.decode([(codes_KT[None], None)])[0]
    decoded = codec.model.decode(audio_codes=codes_KT[None]).audio_values
    return decoded if isinstance(codec, DacCodec) else decoded[0]


@torch.no_grad()
def peer_latent(codec: Any, codes_KT: Tensor) -> Tensor:
    """Return the input of the package's decoder for these codes, `[D, T]`."""
    if isinstance(codec, EncodecCodec):
        return codec.model.quantizer.decode(codes_KT[:, None])[0]
    if isinstance(codec, DacCodec):
        return codec.model.quantizer.from_codes(codes_KT[None])[0][0]
    return codec.model.quantizer.decode(codes_KT[None])[0]


@pytest.mark.parametrize("name", CODECS)
@given(samples=st.one_of(st.just(1), st.integers(1, 700)))
@settings(max_examples=12)
def test_codes_and_audio_equal_the_package_itself(name: str, samples: int) -> None:
    codec = TINY[name]
    codes = codec.encode(noise(samples, samples))
    frames = -(-samples // codec.hop_samples)
    assert codes.dtype == torch.int64 and codes.shape == (4, frames)
    assert torch.equal(codes, peer_encode(codec, noise(samples, samples)))
    audio, theirs = codec.decode(codes), peer_decode(codec, codes).clamp(-1, 1)
    assert audio.dtype == torch.float32 and audio.shape == (1, frames * codec.hop_samples)
    assert torch.equal(audio[:, : theirs.shape[1]], theirs)
    assert not audio[:, theirs.shape[1] :].any()


@pytest.mark.parametrize("name", CODECS)
def test_it_is_a_codec_whose_codes_carry_something(name: str) -> None:
    codec = TINY[name]
    assert isinstance(codec, Codec)
    assert codec.frame_rate * codec.hop_samples == codec.sample_rate == 24_000
    codes = codec.encode(noise(200 * codec.hop_samples))
    assert all(len(row.unique()) > 8 for row in codes)


def test_dac_fills_only_what_transformers_leaves_out() -> None:
    codes = TINY["dac"].encode(noise(300))
    missing = codes.shape[1] * 30 - peer_decode(TINY["dac"], codes).shape[1]
    assert 0 < missing < 30
    with pytest.raises(RuntimeError):
        TINY["dac"].model.encode(noise(1)[None])


@pytest.mark.parametrize("name", CODECS)
def test_a_prefix_of_the_codebooks_is_a_codec(name: str) -> None:
    """`num_codebooks=2` gives the first two rows, and two rows decode in a codec of four."""
    full, two = TINY[name], make(name, 2)
    codes = full.encode(noise(333))
    assert torch.equal(two.encode(noise(333)), codes[:2])
    assert torch.equal(two.decode(codes[:2]), full.decode(codes[:2]))
    assert not torch.equal(full.decode(codes[:2]), full.decode(codes))
    assert full.decode(codes[:1]).shape == full.decode(codes).shape
    assert torch.equal(two.codebook_vectors_KVD, full.codebook_vectors_KVD[:2])
    for wrong in (0, 5):
        with pytest.raises(ValueError, match="num_codebooks must be 1..4"):
            make(name, wrong)


def test_encodec_prefix_equals_the_packages_bandwidth() -> None:
    codec = make("encodec", 2)
    codec.model.set_target_bandwidth(14.4)
    assert torch.equal(codec.encode(noise(333)), peer_encode(codec, noise(333)))


@pytest.mark.parametrize("name", CODECS)
def test_codebook_vectors_add_up_to_the_decoders_input(name: str) -> None:
    codec = TINY[name]
    vectors_KVD = codec.codebook_vectors_KVD
    assert vectors_KVD.shape[:2] == (4, codec.codebook_size) and not vectors_KVD.requires_grad
    codes = codec.encode(noise(500))
    total_TD = sum(vectors_KVD[level][codes[level]] for level in range(4))
    theirs_DT = peer_latent(codec, codes)
    # DAC adds a bias in each output projection, which belongs to the code vector
    torch.testing.assert_close(total_TD.T, theirs_DT, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CODECS)
def test_the_digest_tells_codecs_apart_and_survives_saving(name: str, tmp_path: Path) -> None:
    codec, other = make(name), CODECS[name].from_config(CONFIGS[name])
    codec.save_pretrained(tmp_path)
    assert codec_digest(CODECS[name].from_pretrained(tmp_path)) == codec_digest(codec) != codec_digest(other)
    assert codec_digest(make(name, 2)) == codec_digest(codec, 2) != codec_digest(codec)


def test_the_digest_is_that_of_the_float32_bytes_of_the_code_vectors() -> None:
    vectors_KVD, digest = TINY["encodec"].codebook_vectors_KVD, hashlib.sha256()
    for vectors_VD in vectors_KVD:
        digest.update(f"{tuple(vectors_VD.shape)}".encode() + vectors_VD.numpy().tobytes())
    assert codec_digest(TINY["encodec"]) == digest.hexdigest()[:16]


def test_the_digest_does_not_depend_on_the_number_of_threads() -> None:
    """At this width the products of one thread and of two differ in their last bits."""
    shape = {"codebook_dim": 256, "codebook_size": 2048, "vector_quantization_hidden_dimension": 256}
    config = transformers.MimiConfig(**{**MIMI.to_dict(), **shape, "hidden_size": 512})
    torch.manual_seed(0)
    quantizer = transformers.models.mimi.modeling_mimi.MimiSplitResidualVectorQuantizer(config)
    for half in (quantizer.semantic_residual_vector_quantizer, quantizer.acoustic_residual_vector_quantizer):
        for layer in half.layers:
            layer.codebook.embed_sum.normal_()
    codec, threads = make("mimi"), torch.get_num_threads()
    codec.model.quantizer = quantizer
    found = set()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            found.add(codec_digest(codec))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("num_codebooks", [None, 2])
def test_saved_and_loaded(name: str, num_codebooks: int | None, tmp_path: Path) -> None:
    """Codes stay, also the choice of codebooks; asking for another number goes before it."""
    codec = make(name, num_codebooks)
    codec.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == name
    loaded = CODECS[name].from_pretrained(tmp_path)
    codes = codec.encode(noise(321))
    assert torch.equal(loaded.encode(noise(321)), codes)
    assert torch.equal(loaded.decode(codes), codec.decode(codes))
    assert CODECS[name].from_pretrained(tmp_path, num_codebooks=3).num_codebooks == 3
    assert make(name).num_codebooks == 4  # the config that was passed in is as before


def test_encodec_folder_loads_in_transformers(tmp_path: Path) -> None:
    codec = TINY["encodec"]
    codec.save_pretrained(tmp_path)
    theirs = transformers.EncodecModel.from_pretrained(tmp_path)
    encoded = theirs.encode(noise(777)[None], bandwidth=28.8)
    codes = codec.encode(noise(777))
    assert torch.equal(encoded.audio_codes[0, 0], codes)
    audio = theirs.decode(encoded.audio_codes, encoded.audio_scales).audio_values[0].detach()
    torch.testing.assert_close(codec.decode(codes), audio, atol=1e-6, rtol=0)


@pytest.mark.parametrize("older_spelling", [False, True])
def test_encodec_folder_of_transformers_loads_here(older_spelling: bool, tmp_path: Path) -> None:
    """Also with the weight-norm names of the published files."""
    torch.manual_seed(0)
    theirs = transformers.EncodecModel(ENCODEC).eval()
    for layer in theirs.quantizer.layers:
        layer.codebook.embed.normal_(std=0.3)
    theirs.save_pretrained(tmp_path)
    if older_spelling:
        weights = load_file(tmp_path / "model.safetensors")
        for new, old in (("parametrizations.weight.original0", "weight_g"), ("original1", "weight_v")):
            weights = {key.replace(new, old): value for key, value in weights.items()}
        weights = {key.replace("parametrizations.weight.", ""): value for key, value in weights.items()}
        assert any(key.endswith("weight_v") for key in weights)
        save_file(weights, tmp_path / "model.safetensors")
    codec = EncodecCodec.from_pretrained(tmp_path)
    codes = theirs.encode(noise(777)[None], bandwidth=28.8).audio_codes
    assert torch.equal(codec.encode(noise(777)), codes[0, 0])
    audio = theirs.decode(codes, [None]).audio_values[0].detach().clamp(-1, 1)
    torch.testing.assert_close(codec.decode(codes[0, 0]), audio, atol=1e-6, rtol=0)


def test_encodec_loads_the_packages_own_file(tmp_path: Path) -> None:
    """The published shape: `encodec_24khz`, here with random weights, as a plain state dict."""
    torch.manual_seed(0)
    theirs = EncodecModel.encodec_model_24khz(pretrained=False)
    for layer in theirs.quantizer.vq.layers:
        layer._codebook.embed.normal_(std=0.05)
    torch.save(theirs.state_dict(), tmp_path / "encodec_24khz-random.th")
    codec = EncodecCodec.from_pretrained(tmp_path / "encodec_24khz-random.th", num_codebooks=8)
    theirs.set_target_bandwidth(6.0)
    with torch.no_grad():
        codes = theirs.encode(noise(2000)[None])[0][0][0]
    assert codes.shape == (8, 7) and torch.equal(codec.encode(noise(2000)), codes)
    assert codec.frame_rate == 75
    assert {transformers_key(key) for key in theirs.state_dict()} == set(
        transformers.EncodecModel(transformers.EncodecConfig()).state_dict()
    )


def test_encodec_refuses_a_file_that_would_run_code(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"encoder": Payload()}, tmp_path / "a.th")
    with pytest.raises(ConfigError, match="not a state dict"):
        EncodecCodec.from_pretrained(tmp_path / "a.th")
    assert not (tmp_path / "ran").exists()


def test_encodec_random_has_the_asked_rate() -> None:
    codec = EncodecCodec.random(ratios=(8, 5, 4, 3, 2), bandwidth_kbps=2, num_filters=2)
    assert (codec.frame_rate, codec.num_codebooks, codec.codebook_size) == (25.0, 8, 1024)
    assert codec.decode(codec.encode(noise(961))).shape == (1, 1920)
    assert EncodecCodec.random(bandwidth_kbps=2.25, num_filters=2).num_codebooks == 3


def test_encodec_refuses_what_codes_cannot_carry() -> None:
    with pytest.raises(ValueError, match="mono"):
        EncodecCodec(transformers.EncodecConfig(audio_channels=2, normalize=True, chunk_length_s=1.0))


def test_mimi_follows_to_another_dtype_after_use() -> None:
    """transformers caches code vectors outside the module's state; they must not be left behind."""
    codec = make("mimi")
    codec.encode(noise(100))
    codec.double()
    assert codec.codebook_vectors_KVD.dtype == torch.float64


def test_mimi_refuses_what_transformers_would_miscount() -> None:
    with pytest.raises(ValueError, match="at most"):
        TINY["mimi"].encode(torch.zeros(1, MAX_SAMPLES + 1))


@pytest.mark.parametrize("name", CODECS)
def test_input_that_cannot_be_used_is_named(name: str, tmp_path: Path) -> None:
    codec = TINY[name]
    for samples in (torch.zeros(2, 100), torch.zeros(100), torch.zeros(1, 0)):
        with pytest.raises(ValueError, match="mono waveform"):
            codec.encode(samples)
    with pytest.raises(ValueError, match="not finite"):
        codec.encode(torch.tensor([[0.0, torch.nan]]))
    codes = torch.zeros(4, 3, dtype=torch.int64)
    for wrong in (codes[:, :0], codes[:0], codes[0], torch.cat([codes, codes])):
        with pytest.raises(ValueError, match="decode takes codes"):
            codec.decode(wrong)
    for value in (-1, codec.codebook_size):
        with pytest.raises(ValueError, match="codes must be"):
            codec.decode(codes + value)
    with pytest.raises(ConfigError, match="config.json is missing"):
        CODECS[name].from_pretrained(tmp_path)
    other = TINY["dac" if name != "dac" else "mimi"]
    other.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="model_type"):
        CODECS[name].from_pretrained(tmp_path)


@pytest.mark.parametrize("name", CODECS)
def test_missing_weights_are_not_drawn_at_random(name: str, tmp_path: Path) -> None:
    TINY[name].save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = next(key for key in sorted(weights) if key.endswith("bias"))
    save_file({key: value for key, value in weights.items() if key != lost}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"missing"):
        CODECS[name].from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors is missing"):
        CODECS[name].from_pretrained(tmp_path)
