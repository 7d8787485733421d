"""What `train` is made of: the rules of size, dropped conditions, corrupted inputs, a start from the codebooks."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from audiollm.data.sample import AudioPart, Message, Sample, TextPart
from audiollm.data.shards import CodedSample
from audiollm.data.template import Kind, Template
from audiollm.data.text_tokenizer import train_text_tokenizer
from audiollm.models.dual_ffn import DualFFN, DualFFNConfig
from audiollm.train.run import start_from_codebooks
from audiollm.train.sft import SFTConfig, SFTTask, corrupt, drop_conditions
from audiollm.train.stage import SIZES, TrainConfig, model_parameters

SAMPLE = Sample(
    id="a",
    messages=[
        Message(role="system", content=[TextPart(text="Generate audio.\n\nSpeaker: theo")]),
        Message(role="user", content=[TextPart(text="seven")]),
        Message(role="assistant", content=[AudioPart(path="a.wav")]),
    ],
    task="tts",
    metadata={"split": "train"},
)


@pytest.fixture(scope="module")
def template() -> Template:
    return Template(train_text_tokenizer(["system user assistant Speaker: theo seven"] * 3, 300), 4, 32)


def settings(**values: object) -> TrainConfig:
    known = {"artifacts": {"shards"}, "inputs": []}
    return TrainConfig.model_validate({"shards": "shards", **values}, context=known)


def model_of(template: Template) -> DualFFN:
    config = DualFFNConfig(
        template.tokenizer.get_vocab_size(), num_codebooks=4, codebook_size=34, hidden_size=32, num_layers=1,
        num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=64,
    )  # fmt: skip
    return DualFFN(config)


def test_size_fills_what_is_not_set() -> None:
    config = settings(size="small", model={"num_layers": 3})
    assert config.steps == SIZES["small"].steps and config.model.hidden_size == SIZES["small"].hidden_size
    assert config.model.num_layers == 3
    assert settings(minutes=2).steps is None
    tiny = settings(batch_size=10)
    assert tiny.steps is None and tiny.steps_for(100 / 10) == 10 * (SIZES["tiny"].passes or 0)
    for wrong in ({"steps": 20, "minutes": 1}, {"model": {"hidden_size": 50, "num_heads": 4}}):
        with pytest.raises(ValidationError):
            settings(**wrong)


@pytest.mark.parametrize("size", ["tiny", "small"])
def test_planned_parameters_are_the_real_ones(size: str) -> None:
    config = settings(size=size)
    with torch.device("meta"):
        shape = config.model
        model = DualFFN(
            DualFFNConfig(
                SIZES[size].vocab_size,
                hidden_size=shape.hidden_size or 0,
                num_layers=shape.num_layers or 0,
                num_heads=shape.num_heads or 0,
                num_kv_heads=shape.num_heads or 0,
                head_dim=64,
                intermediate_size=shape.intermediate_size or 0,
            )
        )
    assert model_parameters(config) == sum(p.numel() for p in model.parameters())


def test_dropped_conditions_leave_their_turns() -> None:
    def texts(no_text: bool, no_speaker: bool) -> list[str]:
        messages = drop_conditions(SAMPLE, no_text, no_speaker)
        assert [m.role for m in messages] == ["system", "user", "assistant"]
        return [part.text for m in messages for part in m.content if isinstance(part, TextPart)]

    assert texts(False, False) == ["Generate audio.\n\nSpeaker: theo", "seven"]
    assert texts(True, False) == ["Generate audio.\n\nSpeaker: theo", ""]
    assert texts(False, True) == ["Generate audio.", "seven"]


def test_corruption_touches_spoken_inputs_alone(template: Template) -> None:
    codes = torch.randint(32, (4, 400))
    stream = template.compile(SAMPLE.messages, [codes])
    changed = corrupt(stream, 0.25, 32, torch.Generator().manual_seed(0))
    differs = changed.codes_SK != stream.codes_SK
    special = stream.codes_SK >= 32
    assert not bool(differs[special].any()) and not bool(differs[stream.kinds_S == Kind.TEXT].any())
    assert 0.2 < float(differs[(stream.kinds_S == Kind.AUDIO_OUT)].float().mean()) < 0.27
    assert torch.equal(changed.audio_targets_SK, stream.audio_targets_SK)


def test_batches_depend_on_step_and_seed_alone_and_cover_every_sample(template: Template) -> None:
    coded = [
        CodedSample(SAMPLE.model_copy(update={"id": str(i)}), [[torch.full((4, 3 + i), i)]]) for i in range(6)
    ]
    config = SFTConfig(
        3, text_dropout=0.5, speaker_dropout=0.5, corrupt_codes=0.0, text_weight=1, audio_weight=1
    )
    tasks = [SFTTask(model_of(template), template, coded, coded, config) for _ in range(2)]
    seen = []
    for step in (0, 1, 2, 3):
        first, again = (task.batch(step, torch.Generator().manual_seed(step)) for task in tasks)
        assert torch.equal(first.text_ids_X, again.text_ids_X) and torch.equal(first.codes_YK, again.codes_YK)
        targets = first.audio_targets_XK[first.audio_weights_XK[:, 0] > 0][:, 0]
        seen.append({int(code) for code in targets if code < 6})
    assert seen[0] | seen[1] == seen[2] | seen[3] == set(range(6))
    backwards = tasks[1].batch(0, torch.Generator().manual_seed(0))
    assert torch.equal(backwards.codes_YK, tasks[0].batch(0, torch.Generator().manual_seed(0)).codes_YK)


def test_codes_that_sound_alike_begin_alike(template: Template) -> None:
    model = model_of(template)
    vectors = torch.randn(4, 32, 8)
    vectors[:, 1] = vectors[:, 0] + 0.01
    start_from_codebooks(model, vectors)
    table = model.model.embed_audio_tokens.embed_audio_tokens.weight.unflatten(0, (4, 34))
    near = (table[:, 0] - table[:, 1]).norm(dim=-1)
    far = (table[:, 0] - table[:, 2]).norm(dim=-1)
    assert near.mean().item() < 0.9 * far.mean().item()
