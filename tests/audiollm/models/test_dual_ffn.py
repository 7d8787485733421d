"""The DualFFN decoder against transformers' HiggsAudioV2 on random weights, and against itself in pieces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from audiollm.data.chat.delay import IGNORE
from audiollm.data.chat.template import Kind, TokenStream
from audiollm.data.packing import PackedBatch, pack
from audiollm.families.dual_ffn.losses import token_losses
from audiollm.models.attention import RopeScaling
from audiollm.models.cache import Cache
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.kernels import RMSNorm, silu_multiply, use_liger

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


def random_stream(
    seed: int, text: int = 5, frames: int = 7, after: int = 3, codes: tuple[int, int] = (3, 34)
) -> TokenStream:
    """Text, then audio rows, then text; every audio row and the text after are targets."""
    generator = torch.Generator().manual_seed(seed)
    length, (books, size) = text + frames + after, codes
    ids = torch.randint(250, (length,), generator=generator)
    codes_SK = torch.zeros(length, books, dtype=torch.long)
    codes_SK[text : text + frames] = torch.randint(size, (frames, books), generator=generator)
    ids[text : text + frames] = AUDIO_ID
    kinds = torch.zeros(length, dtype=torch.long)
    kinds[text : text + frames] = int(Kind.AUDIO_OUT)
    text_targets = torch.where((torch.arange(length) >= text + frames), ids, IGNORE)
    audio_targets = torch.where((kinds == Kind.AUDIO_OUT)[:, None], codes_SK, IGNORE)
    return TokenStream(ids, codes_SK, kinds, text_targets, audio_targets)


def in_order(model: DualFFN, batch: PackedBatch) -> torch.Tensor:
    """Hidden states sequence after sequence."""
    hidden: torch.Tensor = model(batch)[batch.row_of_S]
    return hidden


@pytest.fixture(scope="module")
def model() -> DualFFN:
    torch.manual_seed(0)
    return random_weights(DualFFN(CONFIG))


def cut(stream: TokenStream, length: int) -> TokenStream:
    """The first positions alone."""
    names = ("text_ids_S", "codes_SK", "kinds_S", "text_targets_S", "audio_targets_SK")
    return TokenStream(*(getattr(stream, name)[:length] for name in names))


def random_weights(model: DualFFN) -> DualFFN:
    """Far from the symmetric start, norms included."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def copy_of(model: DualFFN, **changes: Any) -> DualFFN:
    """The same weights, those that it still has, in another configuration."""
    other = DualFFN(replace(CONFIG, **changes)).eval()
    other.load_state_dict({key: model.state_dict()[key] for key in other.state_dict()})
    return other


def higgs(model: DualFFN) -> torch.nn.Module:
    """The same weights in transformers' class, by the same key names."""
    transformers = pytest.importorskip("transformers")
    shape = model.config
    config = transformers.HiggsAudioV2Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.norm_eps,
        num_codebooks=shape.num_codebooks,
        codebook_size=shape.codebook_size,
        audio_token_id=AUDIO_ID,
        audio_delay_token_id=AUDIO_ID + 1,
        audio_bos_token_id=AUDIO_ID + 2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        peer = transformers.HiggsAudioV2ForConditionalGeneration(config, use_text_head=True)
    missing, unexpected = peer.load_state_dict(model.state_dict(), strict=False, assign=True)
    assert not missing and not unexpected
    peer.model.rotary_emb = type(peer.model.rotary_emb)(config)  # what no file holds
    peer.model.embed_audio_tokens.audio_tokens_offsets = (
        torch.arange(shape.num_codebooks) * shape.codebook_size
    )
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


def assert_logits_of_transformers(model: DualFFN, stream: TokenStream) -> None:
    """Compare audio logits, and text logits by transformers' text head on its last hidden state."""
    peer, batch = higgs(model), pack([stream])
    codes_FK = stream.codes_SK[stream.kinds_S == Kind.AUDIO_OUT]
    inputs = {
        "input_ids": stream.text_ids_S[None],
        "audio_input_ids": codes_FK[None],
        "audio_input_ids_mask": torch.ones(1, len(codes_FK), dtype=torch.bool),
    }
    with torch.no_grad():
        hidden_SC = in_order(model, batch)
        audio, text = model.audio_logits(hidden_SC).flatten(1), model.text_logits(hidden_SC)
        torch.testing.assert_close(audio, peer(**inputs).logits[0], atol=1e-4, rtol=1e-4)
        theirs = peer.text_lm_head(peer.model(**inputs).last_hidden_state)[0]
        torch.testing.assert_close(text, theirs, atol=1e-4, rtol=1e-4)
    assert audio.std() > 0.1 and text.std() > 0.1


def test_logits_equal_those_of_transformers(model: DualFFN) -> None:
    assert_logits_of_transformers(model, random_stream(1))


@pytest.mark.parametrize("vocab_size", [300, pytest.param(128_256, marks=pytest.mark.slow)])
def test_logits_of_a_layer_at_the_published_width(vocab_size: int) -> None:
    """The test takes a single layer of the 3B model; the published text vocabulary would take 3 GB."""
    config = DualFFNConfig(
        vocab_size=vocab_size, hidden_size=3072, num_layers=1, num_heads=24, num_kv_heads=8, head_dim=128,
        intermediate_size=8192,
    )  # fmt: skip
    torch.manual_seed(0)
    assert_logits_of_transformers(DualFFN(config).eval(), random_stream(1, frames=9, codes=(8, 1026)))


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


CACHED: list[dict[str, Any]] = [
    {},
    {"sliding_window": 1},
    {"sliding_window": 4},
    {"sliding_window": 100},
    {"sliding_window": 3, "sliding_window_layers": (0,)},
    {"qkv_bias": True, "rope_scaling": RopeScaling(32.0, 1.0, 4.0, 8)},
    {"qk_norm": True, "audio_ffn_layers": (1,)},
]


@pytest.mark.parametrize("changes", CACHED)
def test_cache_gives_the_same_hidden_states(changes: dict[str, Any]) -> None:
    """Prompts of unequal length in one pack, then row by row, text and audio in turns."""
    model = random_weights(DualFFN(replace(CONFIG, **changes)))
    streams = [random_stream(seed, text=3 + 2 * seed, frames=8, after=3 + seed) for seed in range(3)]
    prompts = [3 + 2 * seed for seed in range(3)]
    with torch.no_grad():
        wanted = [in_order(model, pack([stream])) for stream in streams]
        cache = Cache.empty(model.config, 3, 40, torch.device("cpu"))
        begun = [cut(stream, length) for stream, length in zip(streams, prompts, strict=True)]
        model.prefill(pack(begun), cache, [0, 1, 2], prompts)
        for step in range(9):
            places = [length + step for length in prompts]
            rows = [row for row in range(3) if places[row] < len(streams[row])]
            written = [row for row in rows if streams[row].kinds_S[places[row]] == Kind.TEXT]
            order = written + [row for row in rows if row not in written]
            ids_X = torch.tensor(
                [int(streams[row].text_ids_S[places[row]]) for row in written], dtype=torch.long
            )
            codes_YK = torch.stack([streams[row].codes_SK[places[row]] for row in order])[len(written) :]
            hidden_RC = model.extend(ids_X, codes_YK, cache, torch.tensor(order))
            for row, hidden_C in zip(order, hidden_RC, strict=True):
                torch.testing.assert_close(hidden_C, wanted[row][places[row]], atol=1e-5, rtol=1e-5)


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


def test_a_window_of_some_layers_is_theirs_alone(model: DualFFN) -> None:
    """With a window in the last layer a position sees three outputs of the first, each of which sees all before."""
    stream = random_stream(4, text=12, frames=0, after=0)
    changed = replace(stream, text_ids_S=stream.text_ids_S.clone())
    changed.text_ids_S[0] = 260
    for layers, sees in (((0,), True), ((1,), True), ((0, 1), False)):
        windowed = copy_of(model, sliding_window=3, sliding_window_layers=layers)
        with torch.no_grad():
            first, second = (in_order(windowed, pack([each]))[11] for each in (stream, changed))
        assert torch.equal(first, second) is not sees
    with pytest.raises(ValueError, match="no layer \\[2\\] among 2"):
        copy_of(model, sliding_window=3, sliding_window_layers=(2,))


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


def test_a_norm_of_bf16_is_computed_in_float32_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    norm = RMSNorm(96, 1e-5)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 96).bfloat16()
    found = norm(x)
    assert not recwarn.list, "torch warns once a process of what it takes unfused kernels for"
    wide = x.double()
    wanted = wide / (wide.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    assert found.dtype == x.dtype
    torch.testing.assert_close(found.double(), wanted, atol=0, rtol=2**-8)


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
