"""The DualFFN decoder against transformers' HiggsAudioV2 on random weights, and against itself in pieces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from audiollm.data.delay import IGNORE
from audiollm.data.packing import PackedBatch, pack
from audiollm.data.template import Kind, TokenStream
from audiollm.models.attention import RopeScaling
from audiollm.models.cache import Cache
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.kernels import RMSNorm, silu_multiply, use_liger
from audiollm.train.losses import token_losses

CONFIG = DualFFNConfig(
    vocab_size=300,
    num_codebooks=3,
    codebook_size=34,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
)
AUDIO_ID = 290


def random_stream(seed: int, text: int = 5, frames: int = 7, after: int = 3) -> TokenStream:
    """Text, then audio rows, then text; every audio row and the text after are targets."""
    generator = torch.Generator().manual_seed(seed)
    length, books = text + frames + after, CONFIG.num_codebooks
    ids = torch.randint(250, (length,), generator=generator)
    codes = torch.zeros(length, books, dtype=torch.long)
    codes[text : text + frames] = torch.randint(34, (frames, books), generator=generator)
    ids[text : text + frames] = AUDIO_ID
    kinds = torch.zeros(length, dtype=torch.long)
    kinds[text : text + frames] = int(Kind.AUDIO_OUT)
    text_targets = torch.where((torch.arange(length) >= text + frames), ids, IGNORE)
    audio_targets = torch.where((kinds == Kind.AUDIO_OUT)[:, None], codes, IGNORE)
    return TokenStream(ids, codes, kinds, text_targets, audio_targets)


def in_order(model: DualFFN, batch: PackedBatch) -> torch.Tensor:
    """Hidden states sequence after sequence."""
    hidden: torch.Tensor = model(batch)[batch.row_of_S]
    return hidden


@pytest.fixture(scope="module")
def model() -> DualFFN:
    torch.manual_seed(0)
    model = DualFFN(CONFIG).eval()
    for parameter in model.parameters():  # far from the symmetric start, norms included
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def copy_of(model: DualFFN, **changes: Any) -> DualFFN:
    """The same weights, those that it still has, in another configuration."""
    other = DualFFN(replace(CONFIG, **changes)).eval()
    other.load_state_dict({key: model.state_dict()[key] for key in other.state_dict()})
    return other


def higgs(model: DualFFN) -> torch.nn.Module:
    """The same weights in transformers' class, by the same key names."""
    transformers = pytest.importorskip("transformers")
    config = transformers.HiggsAudioV2Config(
        vocab_size=CONFIG.vocab_size,
        hidden_size=CONFIG.hidden_size,
        intermediate_size=CONFIG.intermediate_size,
        num_hidden_layers=CONFIG.num_layers,
        num_attention_heads=CONFIG.num_heads,
        num_key_value_heads=CONFIG.num_kv_heads,
        head_dim=CONFIG.head_dim,
        rms_norm_eps=CONFIG.norm_eps,
        num_codebooks=CONFIG.num_codebooks,
        codebook_size=CONFIG.codebook_size,
        audio_token_id=AUDIO_ID,
        audio_delay_token_id=AUDIO_ID + 1,
        audio_bos_token_id=AUDIO_ID + 2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": CONFIG.rope_theta},
        attn_implementation="sdpa",
    )
    peer = transformers.HiggsAudioV2ForConditionalGeneration(config, use_text_head=True)
    missing, unexpected = peer.load_state_dict(model.state_dict(), strict=False)
    assert not missing and not unexpected
    return peer.eval()


@pytest.mark.parametrize("wanted", ["varlen", "flash_attn"])
def test_a_kernel_that_was_asked_for_is_for_training_alone(model: DualFFN, wanted: Any) -> None:
    """Evaluations are in float32, which these kernels do not take."""
    batch, other = pack([random_stream(1), random_stream(2)]), copy_of(model)
    other.attention = wanted
    with torch.no_grad():
        assert torch.equal(other(batch), model(batch))
        with pytest.raises(ValueError, match=f"'{wanted}' cannot run here"):
            other.train()(batch)


def test_logits_equal_those_of_transformers(model: DualFFN) -> None:
    stream = random_stream(1)
    batch = pack([stream])
    with torch.no_grad():
        hidden = in_order(model, batch)
        peer = higgs(model)
        audio = stream.codes_SK[stream.kinds_S == Kind.AUDIO_OUT]
        theirs = peer(
            input_ids=stream.text_ids_S[None],
            audio_input_ids=audio[None],
            audio_input_ids_mask=torch.ones(1, len(audio), dtype=torch.bool),
            output_hidden_states=True,
        )
        their_text = peer.text_lm_head(
            peer.model(
                input_ids=stream.text_ids_S[None],
                audio_input_ids=audio[None],
                audio_input_ids_mask=torch.ones(1, len(audio), dtype=torch.bool),
            ).last_hidden_state
        )
    ours = model.audio_logits(hidden).flatten(1)
    torch.testing.assert_close(ours, theirs.logits[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.text_logits(hidden), their_text[0], atol=1e-4, rtol=1e-4)
    assert ours.std() > 0.1


@pytest.mark.parametrize("sequences", [1, 3])
def test_loss_equals_that_of_transformers(model: DualFFN, sequences: int) -> None:
    """Theirs is a mean over text targets plus the sum over codebooks of means over frames: `token` and `sum`."""
    streams = [random_stream(seed) for seed in range(sequences)]
    batch = pack(streams, normalization="token", audio_reduction="sum")
    audio_rows = streams[0].kinds_S == Kind.AUDIO_OUT
    with torch.no_grad():
        ours = token_losses(model, model(batch), batch)
        theirs = higgs(model)(
            input_ids=torch.stack([stream.text_ids_S for stream in streams]),
            audio_input_ids=torch.stack([stream.codes_SK[audio_rows] for stream in streams]),
            audio_input_ids_mask=torch.ones(sequences, int(audio_rows.sum()), dtype=torch.bool),
            labels=torch.stack([stream.text_targets_S for stream in streams]),
            audio_labels=torch.stack([stream.audio_targets_SK[audio_rows] for stream in streams]),
        )
    expected = ours["text"] / batch.counts["text"] + ours["audio"] / batch.counts["audio"]
    torch.testing.assert_close(theirs.loss, expected, atol=1e-4, rtol=1e-5)


def test_no_sequence_sees_another(model: DualFFN) -> None:
    streams = [random_stream(seed, text=3 + seed, frames=4 + 2 * seed) for seed in range(4)]
    with torch.no_grad():
        together = in_order(model, pack(streams)).split([len(s) for s in streams])
        for stream, rows in zip(streams, together, strict=True):
            torch.testing.assert_close(rows, in_order(model, pack([stream])), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_cache_gives_the_same_hidden_states(model: DualFFN, window: int | None) -> None:
    """Prompts of unequal length, padded in the prefill, then row by row; with a sliding window as well."""
    model = copy_of(model, sliding_window=window)
    streams = [random_stream(seed, text=3 + 2 * seed, frames=8, after=0) for seed in range(3)]
    prompts = [3 + 2 * seed for seed in range(3)]
    with torch.no_grad():
        wanted = [in_order(model, pack([stream])) for stream in streams]
        cache = Cache.empty(CONFIG, 3, 40, torch.device("cpu"))
        longest = max(prompts)
        ids = torch.zeros(3, longest, dtype=torch.long)
        for row, (stream, length) in enumerate(zip(streams, prompts, strict=True)):
            ids[row, :length] = stream.text_ids_S[:length]
        none = torch.zeros(3, longest, CONFIG.num_codebooks, dtype=torch.long)
        hidden = model.extend(
            ids, none, torch.zeros_like(ids, dtype=torch.bool), torch.tensor(prompts), cache
        )
        for row, length in enumerate(prompts):
            torch.testing.assert_close(hidden[row, :length], wanted[row][:length], atol=1e-5, rtol=1e-5)
        for step in range(8):
            codes = torch.stack([s.codes_SK[p + step] for s, p in zip(streams, prompts, strict=True)])[
                :, None
            ]
            one = torch.ones(3, 1, dtype=torch.long)
            hidden = model.extend(one, codes, one.bool(), one[:, 0], cache)
            for row, length in enumerate(prompts):
                torch.testing.assert_close(hidden[row, 0], wanted[row][length + step], atol=1e-5, rtol=1e-5)


def test_a_sliding_window_reaches_as_far_as_it_says(model: DualFFN) -> None:
    """Through two layers of window 3 the last position sees 5 back, itself included, and no further."""
    model = copy_of(model, sliding_window=3)
    stream = random_stream(4, text=12, frames=0, after=0)
    with torch.no_grad():
        before = in_order(model, pack([stream]))[11]
        for place in range(12):
            ids_S = stream.text_ids_S.clone()
            ids_S[place] = 260
            after = in_order(model, pack([replace(stream, text_ids_S=ids_S)]))[11]
            assert torch.equal(before, after) is (place < 12 - 5)


def test_activation_checkpointing_gives_the_same_gradients(model: DualFFN) -> None:
    gradients = []
    for again in (False, True):
        other = copy_of(model, dropout=0.2).train()
        other.activation_checkpointing = again
        calls: list[int] = []
        other.model.layers[0].register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        batch = pack([random_stream(1), random_stream(2)])
        torch.manual_seed(3)  # the dropout of both
        losses = token_losses(other, other(batch), batch)
        (losses["text"] + losses["audio"]).backward()
        assert len(calls) == 1 + again
        gradients.append([parameter.grad for parameter in other.parameters()])
    for one, two in zip(*gradients, strict=True):
        assert one is not None and two is not None and torch.equal(one, two)


@pytest.mark.parametrize("layers", [(), (1,)])
def test_layers_without_an_audio_feed_forward_take_that_of_text(
    model: DualFFN, layers: tuple[int, ...]
) -> None:
    fewer, both = copy_of(model, audio_ffn_layers=layers), copy_of(model)
    with torch.no_grad():
        for index, layer in enumerate(both.model.layers):
            if index not in layers:
                layer.audio_mlp = layer.mlp
                layer.audio_input_layernorm = layer.input_layernorm
                layer.audio_post_attention_layernorm = layer.post_attention_layernorm
        assert sum("audio_mlp" in key for key in fewer.state_dict()) == 3 * len(layers)
        batch = pack([random_stream(1), random_stream(2)])
        torch.testing.assert_close(fewer(batch), both(batch))
    with pytest.raises(ValueError, match="no layer \\[2\\]"):
        replace(CONFIG, audio_ffn_layers=(2,))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_fused_kernels_compute_the_same() -> None:
    """Liger's against PyTorch's, values and gradients, in float32."""
    pytest.importorskip("liger_kernel")
    norm = RMSNorm(96, 1e-5)
    torch.nn.init.normal_(norm.weight)
    x, gate, up = torch.randn(3, 50, 96)
    results = []
    for device in ("cpu", "cuda"):
        there = norm.to(device)
        there.zero_grad()
        inputs = [each.detach().to(device).requires_grad_() for each in (x, gate, up)]
        assert use_liger(inputs[0]) is (device == "cuda")
        out = there(inputs[0]) + silu_multiply(inputs[1], inputs[2])
        (out * torch.linspace(-1, 1, out.numel(), device=device).view_as(out)).sum().backward()
        assert there.weight.grad is not None
        gradients = [each.grad.cpu() for each in inputs if each.grad is not None]
        results.append([out.detach().cpu(), there.weight.grad.cpu().clone(), *gradients])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_compiled_layers_give_the_same(model: DualFFN) -> None:
    other = copy_of(model)
    for layer in other.model.layers:
        layer.compile()
    for seed in range(3):  # several shapes
        batch = pack([random_stream(seed, frames=9 + seed), random_stream(seed + 9)], multiple=16)
        torch.testing.assert_close(other(batch), model(batch), atol=1e-4, rtol=1e-4)


def test_text_and_audio_take_their_own_feed_forward(model: DualFFN) -> None:
    stream = random_stream(3)
    changed = copy_of(model)
    with torch.no_grad():
        for layer in changed.model.layers:
            layer.audio_mlp.down_proj.weight.add_(1.0)
        before, after = in_order(model, pack([stream])), in_order(changed, pack([stream]))
    text = stream.kinds_S == Kind.TEXT
    first_audio = int((~text).nonzero()[0])
    torch.testing.assert_close(before[:first_audio], after[:first_audio])
    assert (before[~text] - after[~text]).abs().max() > 0.1


def test_save_and_load(model: DualFFN, tmp_path: Path) -> None:
    model = copy_of(
        model, rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192), sliding_window=7, audio_ffn_layers=(1,)
    )
    model.save_pretrained(tmp_path / "model")
    again = DualFFN.from_pretrained(tmp_path)
    assert again.config == model.config
    for key, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[key])
