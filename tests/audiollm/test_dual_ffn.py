"""The DualFFN decoder against transformers' HiggsAudioV2 on random weights, and against itself in pieces."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from audiollm.data.delay import IGNORE
from audiollm.data.packing import PackedBatch, pack
from audiollm.data.template import Kind, TokenStream
from audiollm.models.dual_ffn import Cache, DualFFN, DualFFNConfig
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


def test_loss_equals_that_of_transformers(model: DualFFN) -> None:
    """One sequence: their sum over codebooks of mean cross entropies is ours (a mean over codebooks) times K."""
    stream = random_stream(2)
    audio_rows = stream.kinds_S == Kind.AUDIO_OUT
    with torch.no_grad():
        batch = pack([stream])
        ours = token_losses(model, model(batch), batch)
        theirs = higgs(model)(
            input_ids=stream.text_ids_S[None],
            audio_input_ids=stream.codes_SK[audio_rows][None],
            audio_input_ids_mask=torch.ones(1, int(audio_rows.sum()), dtype=torch.bool),
            labels=stream.text_targets_S[None],
            audio_labels=stream.audio_targets_SK[audio_rows][None],
        )
    expected = ours["text"] + CONFIG.num_codebooks * ours["audio"]
    torch.testing.assert_close(theirs.loss, expected, atol=1e-4, rtol=1e-4)


def test_no_sequence_sees_another(model: DualFFN) -> None:
    streams = [random_stream(seed, text=3 + seed, frames=4 + 2 * seed) for seed in range(4)]
    with torch.no_grad():
        together = in_order(model, pack(streams)).split([len(s) for s in streams])
        for stream, rows in zip(streams, together, strict=True):
            torch.testing.assert_close(rows, in_order(model, pack([stream])), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("multiple", [1, 16, 64])
def test_objective_does_not_depend_on_the_packing(model: DualFFN, multiple: int) -> None:
    double = DualFFN(CONFIG).double().eval()
    double.load_state_dict(model.state_dict())
    streams = [random_stream(seed, frames=3 + 4 * seed) for seed in range(3)]
    with torch.no_grad():
        whole = pack(streams, multiple=multiple)
        together = token_losses(double, double(whole), whole)
        assert len(whole.text_ids_X) % multiple == len(whole.audio_targets_XK) % multiple == 0
        alone = [token_losses(double, double(one), one) for one in (pack([s]) for s in streams)]
    for key in ("text", "audio"):
        mean = torch.stack([loss[key] for loss in alone]).mean()
        torch.testing.assert_close(together[key], mean, atol=1e-6, rtol=1e-6)


def test_cache_gives_the_same_hidden_states(model: DualFFN) -> None:
    """Prompts of unequal length, padded in the prefill, then row by row."""
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


def test_text_and_audio_take_their_own_feed_forward(model: DualFFN) -> None:
    stream = random_stream(3)
    changed = DualFFN(replace(CONFIG)).eval()
    changed.load_state_dict(model.state_dict())
    with torch.no_grad():
        for layer in changed.model.layers:
            layer.audio_mlp.down_proj.weight.add_(1.0)
        before, after = in_order(model, pack([stream])), in_order(changed, pack([stream]))
    text = stream.kinds_S == Kind.TEXT
    first_audio = int((~text).nonzero()[0])
    torch.testing.assert_close(before[:first_audio], after[:first_audio])
    assert (before[~text] - after[~text]).abs().max() > 0.1


def test_save_and_load(model: DualFFN, tmp_path) -> None:  # type: ignore[no-untyped-def]
    model.save_pretrained(tmp_path / "model")
    again = DualFFN.from_pretrained(tmp_path)
    assert again.config == CONFIG
    for key, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[key])
