"""Heard audio as features: its rows, and packs of them without padding, leaks or missing gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from audiollm.data.chat.conditions import corrupt
from audiollm.data.chat.fitting import Fitting, fit_stream
from audiollm.data.chat.template import Kind, Template
from audiollm.data.hearing.features import (
    FeatureRows,
    PackedFeatures,
    mel_features,
)
from audiollm.data.inspection import stream_rows, summarize_stream, target_weights
from audiollm.data.packing import PackedBatch, idle_pack, pack, pad_streams
from audiollm.data.records.sample import AudioPart, Message
from audiollm.families.dual_ffn.losses import token_losses
from audiollm.models.audio_encoder import AudioTower, Projector
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.encoder_flops import encoder_flops
from audiollm.supervised.corpus.batches import StepBatch
from tests.audiollm.supervised.heard_samples import (
    BOOKS,
    CODES,
    ENCODER,
    SHAPE,
    asked,
    heard,
    small_model,
    small_template,
    sound,
    streams,
)


@pytest.fixture(scope="module")
def template() -> Template:
    return small_template()


@pytest.fixture
def model(template: Template) -> DualFFN:
    return small_model(template)


# What a sample becomes


def test_features_take_the_place_of_codes(template: Template) -> None:
    messages, clip = asked(), heard(1.5)
    stream = template.compile(messages, [clip])
    coded = template.compile(messages, [torch.zeros(BOOKS, 4, dtype=torch.long)])
    assert clip.rows == 38 and [window.rows for window in stream.features] == [30, 8]
    is_feature_S = stream.kinds_S == Kind.FEATURE
    assert int(is_feature_S.sum()) == 38  # no rows of delay
    assert set(stream.text_ids_S[is_feature_S].tolist()) == {template.tokenizer.token_to_id("<|AUDIO|>")}
    before = int(is_feature_S.nonzero()[0])
    assert template.tokenizer.id_to_token(int(stream.text_ids_S[before - 1])) == "<|audio_bos|>"
    assert template.tokenizer.id_to_token(int(stream.text_ids_S[before + 38])) == "<|audio_eos|>"
    # all else is as with codes
    for name in ("text_ids_S", "text_targets_S"):
        ours, theirs = getattr(stream, name)[~is_feature_S], getattr(coded, name)[coded.kinds_S == Kind.TEXT]
        assert torch.equal(ours, theirs)
    assert (stream.audio_targets_SK < 0).all() and (stream.codes_SK == 0).all()
    assert template.length(messages, [FeatureRows(38)]) == len(stream)
    prompt = template.text_prompt(messages[:1], [clip])
    assert torch.equal(prompt.text_ids_S, stream.text_ids_S[: len(prompt)])
    assert len(prompt.features) == 2 and len(template.prompt(messages[:1], [clip])) == len(prompt) + 1


def test_what_the_assistant_says_is_never_features(template: Template) -> None:
    messages = [Message(role="assistant", content=[AudioPart(path="a.wav")])]
    with pytest.raises(ValueError, match="never as features"):
        template.compile(messages, [heard(0.1)])
    with pytest.raises(ValueError, match="more audio parts"):
        template.compile(asked(clips=2), [heard(0.1)])


def test_cut_samples_keep_the_windows_of_their_rows(template: Template) -> None:
    long = asked(answer="a dog or a cat " * 9)
    whole = template.compile(long, [heard(1.5)])
    stream, plan = fit_stream(template, long, [heard(1.5)], len(whole) - 7, "cut")
    assert stream is not None and plan.fitting == Fitting.CUT_SHORT and len(stream) == len(whole) - 7
    assert [window.rows for window in stream.features] == [30, 8]
    # an answer before the recording, and a cut within it: the rows that are left are those of the whole
    turned = [long[1], asked()[0]]
    whole = template.compile(turned, [heard(1.5)])
    start = int((whole.kinds_S == Kind.FEATURE).nonzero()[0])
    for rows, expected in ((start + 34, [30, 4]), (start + 30, [30]), (start + 3, [3]), (start, [])):
        stream, _ = fit_stream(template, [turned[0], turned[1], *asked(clips=0)], [heard(1.5)], rows, "cut")
        if stream is not None and len(stream) == rows:
            assert [window.rows for window in stream.features] == expected


def test_inspection_shows_features(template: Template) -> None:
    stream = streams(template)[2]
    rows = stream_rows(template, stream)
    kinds = {row.kind for row in rows}
    assert kinds == {"text", "features", "audio out"}
    assert all(row.codes == () and row.is_target == (False,) for row in rows if row.kind == "features")
    by_kind = {summary.kind: summary for summary in summarize_stream(template, stream)}
    assert by_kind["features"].rows == 5 + 3 and by_kind["features"].targets == 0
    assert by_kind["audio out"].eos_targets == BOOKS
    text_S, audio_SK = target_weights(stream)
    assert float(text_S.sum()) == pytest.approx(1) and float(audio_SK.sum()) == pytest.approx(1)


def test_corruption_leaves_features_alone(template: Template) -> None:
    stream = streams(template)[2]
    other = corrupt(stream, 1.0, CODES, torch.Generator().manual_seed(0))
    assert other.features is stream.features and not torch.equal(other.codes_SK, stream.codes_SK)


# Packs


def losses_and_gradients(model: DualFFN, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    found = token_losses(model, model(batch), batch)
    loss: Tensor = found["text"] + 0.3 * found["audio"]
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("padded", [False, True])
def test_packed_is_padded_is_one_by_one(template: Template, model: DualFFN, padded: bool) -> None:
    """Losses and gradients of every parameter, including the encoder's, agree in float64."""
    shape = replace(SHAPE, padded=padded)
    model.audio_tower.config = replace(ENCODER, padded=padded)
    own = []
    for stream in streams(template):
        clips = [mel_features(sound(window.rows / 25, n), shape) for n, window in enumerate(stream.features)]
        own.append(replace(stream, features=tuple(window for clip in clips for window in clip.windows)))
    together, expected = losses_and_gradients(model, pack(own, 16, encoder=shape))
    alone = [losses_and_gradients(model, pack([stream], encoder=shape)) for stream in own]
    batches = {
        "one by one": (sum(loss for loss, _ in alone), {n: sum(g[n] for _, g in alone) for n in expected}),
        "padded": losses_and_gradients(model, pack(pad_streams(own), encoder=shape)),
        "the other way round": losses_and_gradients(model, pack(own[::-1], encoder=shape)),
    }
    assert all(expected[name].abs().max() > 1e-9 for name in expected if name.startswith("audio_"))
    for name, (loss, gradients) in batches.items():
        torch.testing.assert_close(loss, together, atol=1e-10, rtol=1e-10, msg=name)
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(
                gradient, expected[parameter], atol=1e-9, rtol=1e-7, msg=f"{name} {parameter}"
            )


def test_no_sample_hears_anothers_recording(template: Template, model: DualFFN) -> None:
    own = streams(template)
    batch = pack(own, encoder=SHAPE)
    changed = replace(own[1], features=heard(1.5, 99).windows)
    other = pack([own[0], changed, *own[2:]], encoder=SHAPE)
    with torch.no_grad():
        moved_S = (model(batch) - model(other)).abs().amax(dim=1)[batch.row_of_S]
    first, second = len(own[0]), len(own[0]) + len(own[1])
    heard_from = first + int((own[1].kinds_S == Kind.FEATURE).nonzero()[0])
    assert float(moved_S[:heard_from].max()) == 0 == float(moved_S[second:].max())
    assert float(moved_S[heard_from:second].min()) > 1e-6  # and its own does


def test_features_take_the_branch_of_text(template: Template, model: DualFFN) -> None:
    """Each row is added up with its own embedding; the audio branch is not asked for a row of features."""
    stream = streams(template)[0]
    batch = pack([stream], encoder=SHAPE)
    with torch.no_grad():
        rows = model.embed_rows(batch)[batch.row_of_S][: len(stream)]
        packed = PackedFeatures.of(stream.features)
        assert packed is not None
        is_feature = stream.kinds_S == Kind.FEATURE
        assert torch.equal(rows[is_feature], model.audio_encoder_proj(model.audio_tower(packed)))
        assert torch.equal(rows[~is_feature], model.model.embed_tokens(stream.text_ids_S[~is_feature]))
        before = model(batch)[batch.row_of_S][: len(stream)]
        for name, parameter in model.named_parameters():
            if "audio_mlp" in name or "audio_post" in name or "audio_input" in name:
                parameter.zero_()
        assert torch.equal(model(batch)[batch.row_of_S][: len(stream)], before)


def test_no_parameter_is_without_a_gradient(template: Template, model: DualFFN) -> None:
    text_alone = pack([template.compile(asked(clips=0), [])], 8, encoder=SHAPE)
    filled = replace(SHAPE, padded=True)
    for batch, shape in (
        (text_alone, SHAPE),
        (idle_pack(BOOKS, 8, SHAPE), SHAPE),
        (idle_pack(BOOKS, 1, filled), filled),
    ):
        model.audio_tower.config = replace(ENCODER, padded=shape.padded)
        _, gradients = losses_and_gradients(model, batch)
        assert set(gradients) == {name for name, _ in model.named_parameters()}
        heard_by = [gradient for name, gradient in gradients.items() if name.startswith("audio_tower")]
        assert all(not gradient.any() for gradient in heard_by)
    for multiple in (1, 8, 64):
        batch = pack(streams(template), multiple, encoder=SHAPE)
        assert batch.features is not None
        sizes = (batch.num_text, sum(batch.features.rows), len(batch.codes_YK))
        assert not any(size % multiple for size in sizes)
    padded = pack(streams(template), 64, encoder=filled)
    assert (
        padded.features is not None and len(padded.features.rows) == 5
    )  # no window for the sake of a multiple


def test_packs_go_between_processes(template: Template) -> None:
    batch = pack(streams(template), encoder=SHAPE)
    restore, arrays = StepBatch([batch]).__reduce__()  # what a worker sends
    found = restore(*arrays).packs[0]
    assert torch.equal(found.features.mel_MX, batch.features.mel_MX)
    assert (found.features.frames, found.features.rows) == (batch.features.frames, batch.features.rows)


def test_a_model_without_an_encoder_refuses_features(template: Template, model: DualFFN) -> None:
    without = DualFFN(replace(model.config, audio_encoder=None))
    with pytest.raises(ValueError, match="no audio encoder"):
        without(pack(streams(template)))


def test_a_saved_model_hears_the_same(tmp_path: Path, template: Template, model: DualFFN) -> None:
    model = model.float().eval()
    model.save_pretrained(tmp_path)
    loaded = DualFFN.from_pretrained(tmp_path)
    assert loaded.config.audio_encoder == ENCODER
    batch = pack(streams(template), encoder=SHAPE)
    with torch.no_grad():
        torch.testing.assert_close(loaded(batch), model(batch), atol=0, rtol=0)


def test_operations_are_those_that_torch_counts() -> None:
    config = replace(ENCODER, projector_size=24)
    tower = AudioTower(config)
    features = PackedFeatures.of(mel_features(sound(2.4), SHAPE).windows)
    assert features is not None
    projector = Projector(config, 32)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        projector(tower(features)).sum().backward()
    ours = encoder_flops(config, 32, features, trained=True)
    # torch counts the gaps between windows (0.3 %), and knows that the sound takes no gradient
    of_sound = 2 * sum(features.frames) * 3 * config.d_model * config.num_mel_bins
    assert ours == pytest.approx(counter.get_total_flops() + of_sound, rel=0.005)
