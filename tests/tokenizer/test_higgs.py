"""The `higgs` preset against transformers: the same codes and waveforms, folders both ways, and its training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from audiollm.codec import Codec, codec_digest
from audiollm.errors import ConfigError
from audiollm.generation.engine.streaming import OverlappingWindows
from tokenizer.higgs import HiggsTokenizer, published_config
from tokenizer.higgs.acoustic import SPAN_STEPS, AcousticDecoder, AcousticEncoder, Snake, squared_sine
from tokenizer.higgs.quantizer import HiggsQuantizer

LENGTHS = (119, 400, 960, 1439, 1440, 9600, 9601, 10_000, 10_559)


def tiny_config(**teacher: Any) -> transformers.HiggsAudioV2TokenizerConfig:
    """The published rates and ratios with few channels."""
    return transformers.HiggsAudioV2TokenizerConfig(
        target_bandwidths=[0.15, 0.45, 0.6],
        codebook_size=64,
        codebook_dim=8,
        acoustic_model_config=transformers.DacConfig(
            encoder_hidden_size=4,
            downsampling_ratios=[8, 5, 4, 2, 3],
            decoder_hidden_size=64,
            upsampling_ratios=[8, 5, 4, 2, 3],
            hidden_size=16,
        ),
        semantic_model_config=transformers.HubertConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            conv_dim=[16] * 7,
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
            **teacher,
        ),
    )


@torch.no_grad()
def enliven(peer: Any, samples_BN: Tensor) -> None:
    """Random weights at which codes mean something: a standardised latent and Gaussian codebooks."""
    for half in (peer.acoustic_encoder, peer.acoustic_decoder):
        for name, weight in half.named_parameters():
            if name.endswith("alpha"):
                weight.uniform_(0.3, 2.0)
            elif weight.ndim == 3:
                weight.normal_(0, 0.6 / (weight.shape[1] * weight.shape[2]) ** 0.5)
    kept: list[Tensor] = []
    hook = peer.fc.register_forward_hook(lambda _module, _inputs, output: kept.append(output))
    peer.encode(samples_BN[:, None])
    hook.remove()
    latent_SD = kept[0].flatten(0, 1)
    mean_D, spread_D = latent_SD.mean(dim=0), latent_SD.std(dim=0) + 1e-9
    peer.fc.weight /= spread_D[:, None]
    peer.fc.bias.sub_(mean_D).div_(spread_D)
    for level in peer.quantizer.quantizers:
        level.project_in.weight.normal_(0, level.project_in.in_features**-0.5)
        level.project_out.weight.normal_(0, 0.3 * level.project_out.in_features**-0.5)
        level.codebook.embed.normal_()


def speech_like(batch: int, length: int, seed: int = 0) -> Tensor:
    """Noise that swells and fades, `[batch, length]`."""
    generator = torch.Generator().manual_seed(seed)
    swell_N = torch.sin(torch.arange(length) / 1500).square()
    return torch.randn(batch, length, generator=generator) * 0.1 * swell_N + 0.001


def make_peer(config: transformers.HiggsAudioV2TokenizerConfig) -> Any:
    torch.manual_seed(0)
    peer = transformers.HiggsAudioV2TokenizerModel(config).eval()
    enliven(peer, speech_like(1, 24_000, seed=9))
    return peer


@pytest.fixture(scope="module")
def peer() -> Any:
    return make_peer(tiny_config())


@pytest.fixture(scope="module")
def folder(peer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that transformers has saved."""
    path = tmp_path_factory.mktemp("higgs")
    peer.save_pretrained(path)
    return path


@pytest.fixture
def ours(folder: Path) -> HiggsTokenizer:
    return HiggsTokenizer.from_pretrained(folder)


def assert_same(peer: Any, ours: HiggsTokenizer, samples_BN: Tensor) -> Tensor:
    """Identical codes, decoded the same; returns the codes."""
    with torch.no_grad():
        theirs = peer.encode(samples_BN[:, None]).audio_codes
        assert torch.equal(ours.encode_batch(samples_BN), theirs)
        decoded = peer.decode(theirs).audio_values[:, 0]
    torch.testing.assert_close(ours.decode_batch(theirs), decoded, atol=1e-4, rtol=0)
    return theirs


@pytest.mark.parametrize("length", LENGTHS)
def test_codes_and_waveform_equal_transformers(peer: Any, ours: HiggsTokenizer, length: int) -> None:
    assert_same(peer, ours, speech_like(1, length))


def test_a_batch_longer_than_a_span_equals_transformers(peer: Any, ours: HiggsTokenizer) -> None:
    samples_BN = speech_like(2, 30_007)
    assert samples_BN.shape[1] > 4 * SPAN_STEPS
    codes_BKF = assert_same(peer, ours, samples_BN)
    assert all(len(codes_BKF[:, k].unique()) > 15 for k in range(codes_BKF.shape[1]))


@pytest.mark.parametrize("teacher", [{"do_stable_layer_norm": True, "feat_extract_norm": "layer"}])
def test_the_other_kind_of_teacher_equals_transformers(tmp_path: Path, teacher: dict[str, Any]) -> None:
    peer = make_peer(tiny_config(**teacher))
    peer.save_pretrained(tmp_path)
    assert_same(peer, HiggsTokenizer.from_pretrained(tmp_path), speech_like(1, 9_600))


def test_bandwidths_equal_transformers(peer: Any, ours: HiggsTokenizer) -> None:
    samples_BN = speech_like(1, 4_800)
    for bandwidth in peer.config.target_bandwidths:
        theirs = peer.encode(samples_BN[:, None], bandwidth).audio_codes[0]
        assert torch.equal(ours.encode(samples_BN, ours.codebooks_for(bandwidth)), theirs)
        decoded = peer.decode(theirs[None]).audio_values[0]
        torch.testing.assert_close(ours.decode(theirs), decoded, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="choose one of"):
        ours.codebooks_for(3.0)


def test_transformers_loads_what_we_save(peer: Any, ours: HiggsTokenizer, tmp_path: Path) -> None:
    ours.save_pretrained(tmp_path)
    again, info = transformers.HiggsAudioV2TokenizerModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    theirs = peer.state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in again.state_dict().items())
    assert_same(again.eval(), HiggsTokenizer.from_pretrained(tmp_path), speech_like(1, 2_400))


def test_shards_and_weight_norm_load(peer: Any, ours: HiggsTokenizer, tmp_path: Path) -> None:
    normed = make_peer(tiny_config())
    normed.apply_weight_norm()
    normed.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = HiggsTokenizer.from_pretrained(tmp_path).state_dict()
    for key, value in ours.state_dict().items():
        torch.testing.assert_close(loaded[key], value, atol=1e-6, rtol=1e-6)


def test_its_digest_survives_saving_and_follows_the_codebooks(ours: HiggsTokenizer, tmp_path: Path) -> None:
    digest = codec_digest(ours)
    ours.save_pretrained(tmp_path)
    assert codec_digest(HiggsTokenizer.from_pretrained(tmp_path)) == digest
    for changed in (ours.quantizer.levels()[-1].project_out.bias, ours.quantizer.levels()[0].codebook.embed):
        changed.data[0] += 1
        assert codec_digest(ours) != digest
        digest = codec_digest(ours)


def test_a_wrong_folder_is_named(ours: HiggsTokenizer, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model here"):
        HiggsTokenizer.from_pretrained(tmp_path)
    text = (folder / "config.json").read_text()
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="model.safetensors is missing"):
        HiggsTokenizer.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(text.replace('"codebook_size": 64', '"codebook_size": 32'))
    with pytest.raises(ConfigError, match="cluster_size is"):
        HiggsTokenizer.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mimi"}')
    with pytest.raises(ConfigError, match="'mimi'"):
        HiggsTokenizer.from_pretrained(tmp_path)


def test_it_is_a_codec_and_names_bad_input(ours: HiggsTokenizer) -> None:
    assert (
        isinstance(ours, Codec) and ours.frame_rate == 25 and ours.codebook_vectors_KVD.shape[:2] == (4, 64)
    )
    codes_KF = ours.encode(speech_like(1, 2_880))
    assert codes_KF.shape == (4, 3) and codes_KF.dtype == torch.int64
    assert ours.decode(codes_KF).shape == (1, 2_880)
    for samples, message in (
        (torch.zeros(2, 960), "mono"),
        (torch.zeros(960), "mono"),
        (torch.zeros(1, 0), "samples >= 1"),
        (torch.full((1, 960), torch.nan), "finite"),
        (torch.zeros(1, 118), "give 119 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            ours.encode(samples)
    with pytest.raises(ValueError, match="has 1..4"):
        ours.encode(torch.zeros(1, 960), 5)
    for codes, message in (
        (torch.zeros(5, 2, dtype=torch.int64), "1..4 codebooks"),
        (torch.zeros(4, 0, dtype=torch.int64), "1 frame or more"),
        (torch.full((4, 2), 64), "0..63"),
    ):
        with pytest.raises(ValueError, match=message):
            ours.decode(codes)


def test_pieces_decoded_within_its_reach_are_those_of_the_whole(ours: HiggsTokenizer) -> None:
    codes_KT = torch.randint(0, 16, (ours.num_codebooks, 60), generator=torch.Generator().manual_seed(0))
    codes_KT %= ours.codebook_size
    whole_1N = ours.decode(codes_KT)
    errors = {}
    for reach in (ours.decoder_reach, 2):
        stream = OverlappingWindows(ours, past=reach, future=reach, max_window=32)
        parts = [stream.push(frame_K1) for frame_K1 in codes_KT.split(1, dim=1)]
        errors[reach] = float((torch.cat([*parts, stream.flush()], dim=1) - whole_1N).abs().max())
    assert errors[ours.decoder_reach] < 1e-5 * float(whole_1N.abs().max()) < errors[2]


@pytest.mark.parametrize("length", [1, 7, 40, SPAN_STEPS // 8 + 3])
def test_spans_compute_the_plain_forward(length: int) -> None:
    """Also at lengths that are no multiple of a span, in both halves."""
    torch.manual_seed(0)
    encoder, decoder = AcousticEncoder(2, 6, [4, 3]), AcousticDecoder(8, 6, [3, 5])
    for module in (*encoder.modules(), *decoder.modules()):
        if isinstance(module, Snake):
            module.alpha.data.uniform_(0.3, 2)
    samples_11N, latent_1CT = torch.randn(1, 1, length * 12 + 5), torch.randn(1, 6, length)
    encoded, decoded = encoder(samples_11N), decoder(latent_1CT)
    with torch.no_grad():
        torch.testing.assert_close(encoder.infer(samples_11N), encoded, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(decoder.infer(latent_1CT), decoded, atol=1e-5, rtol=1e-5)


def test_squared_sine_is_as_exact_as_torch() -> None:
    alpha, x = torch.rand(1, 16, 1) * 4, torch.randn(1, 16, 4_000)
    exact = torch.sin(alpha.double() * x.double()).square()
    theirs = (torch.sin(alpha * x).square() - exact).abs().max()
    assert (squared_sine(alpha, x) - exact).abs().max() < 2 * theirs


def test_every_parameter_is_trained_and_the_teacher_is_not(ours: HiggsTokenizer) -> None:
    ours.train()
    samples_BN = speech_like(2, 9_600)
    before = {key: value.clone() for key, value in ours.semantic_model.state_dict().items()}
    trained = [weight for weight in ours.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-3)
    output = ours(samples_BN)
    assert output.samples_BN.shape == samples_BN.shape
    loss = (output.samples_BN - samples_BN).abs().mean() + output.commitment + output.semantic
    loss.backward()
    names = [name for name, weight in ours.named_parameters() if not name.startswith("semantic_model.")]
    assert len(names) == len(trained)
    still = [
        n for n, w in ours.named_parameters() if w.requires_grad and (w.grad is None or not w.grad.any())
    ]
    assert still == []
    optimizer.step()
    after = ours.semantic_model.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    assert torch.equal(ours.latent(samples_BN[:1]), ours.latent(samples_BN[:1]))


def test_codebooks_start_follow_and_revive() -> None:
    torch.manual_seed(0)
    latent_SD = torch.randn(400, 12)
    quantizer = HiggsQuantizer(3, 12, 16, 4).train()
    book = quantizer.levels()[0].codebook
    assert book.inited == 0
    quantizer.initialize(latent_SD, torch.Generator().manual_seed(0))
    assert book.inited == 1
    # one step of the mean at decay 0.99, worked out by hand
    started_VE, x_SE = book.embed.clone(), quantizer.levels()[0].project_in(latent_SD).detach()
    codes_S = torch.cdist(x_SE, started_VE).argmin(dim=1)
    member_VS = torch.nn.functional.one_hot(codes_S, 16).T.float()
    sizes_V = 0.99 + 0.01 * member_VS.sum(dim=1)
    assert (
        torch.equal(quantizer(latent_SD[None]).codes_BKT[0, 0], codes_S) and (member_VS.sum(dim=1) > 0).all()
    )
    torch.testing.assert_close(book.cluster_size, sizes_V)
    torch.testing.assert_close(book.embed_avg, 0.99 * started_VE + 0.01 * member_VS @ x_SE)
    torch.testing.assert_close(book.embed, book.embed_avg / sizes_V[:, None], atol=1e-4, rtol=1e-4)
    # a dead code comes back where the data is, and stays through the next step
    for tensor in (book.embed[3], book.embed_avg[3]):
        tensor.fill_(1e3)
    book.cluster_size[3] = 0
    assert quantizer.revive(latent_SD[None], torch.Generator().manual_seed(1)) >= 1
    quantizer(latent_SD[None])
    assert book.embed[3].abs().max() < 10
    book.cluster_size[3] = 0
    with torch.autocast("cpu", torch.bfloat16):  # as training in bf16 calls it
        assert quantizer.revive(latent_SD[None].bfloat16(), torch.Generator().manual_seed(1)) >= 1


@pytest.mark.slow
def test_the_published_shape_equals_transformers(tmp_path: Path) -> None:
    peer = make_peer(published_config())
    peer.save_pretrained(tmp_path)
    ours = HiggsTokenizer.from_pretrained(tmp_path)
    assert sum(weight.numel() for weight in ours.parameters()) == sum(w.numel() for w in peer.parameters())
    codes_BKF = assert_same(peer, ours, speech_like(1, 24_000))
    assert codes_BKF.shape == (1, 8, 25) and ours.num_codebooks == 8 and ours.codebook_size == 1024
    ours.save_pretrained(tmp_path / "ours")
    _, info = transformers.HiggsAudioV2TokenizerModel.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
