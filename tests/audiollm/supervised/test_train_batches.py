"""A step of the stage `train`: its number alone decides what it holds; its loss is the same in any packs and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from audiollm.data.chat.conditions import corrupt, hide_conditions
from audiollm.data.chat.template import Kind, Template
from audiollm.data.packing import pack
from audiollm.data.records.loader import Loader
from audiollm.data.records.opening import open_source
from audiollm.data.records.part_codes import save_part_codes
from audiollm.data.records.sample import AudioPart, Message, TextPart, write_samples
from audiollm.data.records.shards import ShardWriter
from audiollm.families.dual_ffn.losses import TokenLosses
from audiollm.files.set_aside import SetAside
from audiollm.supervised.corpus.batches import Batching, BatchMaker, StepBatch, evaluation_packs
from audiollm.supervised.corpus.survey import survey_sources
from audiollm.supervised.sft import SFTTask
from tests.audiollm.supervised.train_samples import SAMPLE, WEIGHTS, model_of, small_template, write_shards


@pytest.fixture(scope="module")
def template() -> Template:
    return small_template()


def test_dropped_conditions_leave_their_turns() -> None:
    def texts(no_text: bool, no_speaker: bool) -> list[str]:
        messages, _ = hide_conditions(SAMPLE.messages, [], no_text, no_speaker)
        assert [m.role for m in messages] == ["system", "user", "assistant"]
        return [part.text for m in messages for part in m.content if isinstance(part, TextPart)]

    assert texts(False, False) == ["Generate audio.\n\nSpeaker: theo", "seven"]
    assert texts(True, False) == ["Generate audio.\n\nSpeaker: theo", ""]
    assert texts(False, True) == ["Generate audio.", "seven"]


def test_a_hidden_speaker_takes_its_reference_along() -> None:
    reference, heard, spoken = (AudioPart(path=name) for name in ("reference.wav", "heard.wav", "spoken.wav"))
    messages = [
        Message(role="system", content=[TextPart(text="SPEAKER0: "), reference]),
        Message(role="user", content=[heard, TextPart(text="Say it again.")]),
        Message(role="assistant", content=[spoken]),
    ]
    for no_text, no_speaker, stay in (
        (False, True, ["heard", "spoken"]),
        (True, False, ["reference", "heard", "spoken"]),
    ):
        kept, audio = hide_conditions(messages, ["reference", "heard", "spoken"], no_text, no_speaker)
        assert audio == stay, "the recordings that stay, in the order of their parts"
        parts = [part for message in kept for part in message.content if isinstance(part, AudioPart)]
        assert [part.path.removesuffix(".wav") for part in parts] == stay
    written = [*messages[:2], Message(role="assistant", content=[TextPart(text="seven")])]
    assert hide_conditions(written, ["reference", "heard"], True, True)[1] == ["reference", "heard"]


def test_corruption_touches_spoken_inputs_alone(template: Template) -> None:
    codes = torch.randint(32, (4, 400))
    stream = template.compile(SAMPLE.messages, [codes])
    changed = corrupt(stream, 0.25, 32, torch.Generator().manual_seed(0))
    differs = changed.codes_SK != stream.codes_SK
    special = stream.codes_SK >= 32
    assert not bool(differs[special].any()) and not bool(differs[stream.kinds_S == Kind.TEXT].any())
    assert 0.2 < float(differs[(stream.kinds_S == Kind.AUDIO_OUT)].float().mean()) < 0.27
    assert torch.equal(changed.audio_targets_SK, stream.audio_targets_SK)


def batching(**changes: Any) -> Batching:
    nothing_hidden = {"text_dropout": 0.0, "speaker_dropout": 0.0, "corrupt_codes": 0.0}
    sizes = {"batch_size": 3, "max_tokens": 256, "max_length": changes.get("max_tokens", 256)}
    return Batching(**{**nothing_hidden, **sizes, **changes})


def maker_of(folder: Path, template: Template, batching: Batching, **ranks: int) -> BatchMaker:
    aside, sources = SetAside(folder / "set_aside.jsonl", "train"), [open_source(folder)]
    found = survey_sources(sources, template, batching.max_length, batching.too_long, aside, lambda: None)
    return BatchMaker(sources, None, found, template, batching, 0, **ranks)


def codes_in(batch: StepBatch) -> list[int]:
    """Which samples are in it."""
    return sorted(
        {
            int(c)
            for p in batch.packs
            for c in p.audio_targets_XK[p.audio_weights_XK[:, 0] > 0][:, 0]
            if c < 32
        }
    )


def test_a_step_depends_on_its_number_alone_and_a_pass_covers_every_sample(
    tmp_path: Path, template: Template
) -> None:
    folder = write_shards(tmp_path, 7)
    config = batching(text_dropout=0.5, speaker_dropout=0.5, corrupt_codes=0.3)
    maker, again = (maker_of(folder, template, config) for _ in range(2))
    backwards = {step: again(step) for step in (3, 2, 1, 0)}
    for step in range(4):
        ours, theirs = maker(step).packs[0], backwards[step].packs[0]
        assert torch.equal(ours.text_ids_X, theirs.text_ids_X) and torch.equal(ours.codes_YK, theirs.codes_YK)
    seen = [codes_in(maker(step)) for step in range(4)]
    assert sorted(seen[0] + seen[1]) == sorted(seen[2] + seen[3]) == list(range(6))  # 6 is held out


def test_workers_make_the_same_batches(tmp_path: Path, template: Template) -> None:
    maker = maker_of(write_shards(tmp_path, 7), template, batching(text_dropout=0.5, max_tokens=60))
    loader = Loader(maker, workers=1)
    for step in (1, 2, 0):
        here, there = maker(step), loader[step]
        assert len(here.packs) == len(there.packs) > 1
        for ours, theirs in zip(here.packs, there.packs, strict=True):
            assert torch.equal(ours.text_ids_X, theirs.text_ids_X) and torch.equal(
                ours.row_of_S, theirs.row_of_S
            )
            assert (
                torch.equal(ours.audio_weights_XK, theirs.audio_weights_XK) and ours.counts == theirs.counts
            )
            assert ours.layout.lengths == theirs.layout.lengths
    loader.close()


def test_a_pinned_step_has_every_tensor_in_pinned_memory(
    tmp_path: Path, template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU nothing can be pinned: a copy takes the place of what is pinned, and is counted."""
    pinned: set[int] = set()

    def pin(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        pinned.add(copy.data_ptr())
        return copy

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    maker = maker_of(write_shards(tmp_path, 7), template, batching(max_tokens=60))
    plain, step = maker(1), Loader(maker, pinned=True)[1]
    assert len(plain.packs) == len(step.packs) > 1
    for before, after in zip(plain.packs, step.packs, strict=True):
        assert after.counts == before.counts and after.layout.lengths == before.layout.lengths
        both = [{**vars(pack), **vars(pack.layout)} for pack in (before, after)]
        names = [name for name, value in both[0].items() if isinstance(value, Tensor)]
        assert len(names) > 12
        for name in names:
            assert torch.equal(both[0][name], both[1][name]) and both[1][name].data_ptr() in pinned, name


def test_ranks_share_a_step_out(tmp_path: Path, template: Template) -> None:
    folder = write_shards(tmp_path, 9)
    alone = maker_of(folder, template, batching(batch_size=4))
    shared = [maker_of(folder, template, batching(batch_size=4), rank=r, world=3) for r in range(3)]
    for step in range(3):
        batches = [maker(step) for maker in shared]
        assert len({len(batch.packs) for batch in batches}) == 1
        assert sorted(c for batch in batches for c in codes_in(batch)) == codes_in(alone(step))
        counts = [
            sum(pack.counts["audio"] for batch in each for pack in batch.packs)
            for each in ([alone(step)], batches)
        ]
        assert counts[0] == counts[1] == 4


def test_the_step_loss_is_the_same_in_any_packs(tmp_path: Path, template: Template) -> None:
    folder = write_shards(tmp_path, 7)
    model = model_of(template).double()
    found = []
    for changes in (
        {},
        {"max_tokens": 60},
        {"packing": "sorted"},
        {"packing": "in_order", "max_tokens": 120},
    ):
        config = batching(batch_size=4, **changes)
        maker = maker_of(folder, template, config)
        task = SFTTask(TokenLosses(model), [], {}, WEIGHTS, SetAside(tmp_path / "a.jsonl", "train"))
        model.zero_grad()
        update = next(task.updates(maker(0), 0, 10))
        losses = list(update.loss)
        torch.stack(losses).sum().backward()
        assert len(losses) == update.losses == len(maker(0).packs)
        gradient = model.model.layers[0].audio_mlp.up_proj.weight.grad
        by_codebook = [float(update.figures[f"audio_loss/{k}"]) for k in range(4)]
        assert sum(by_codebook) / 4 == pytest.approx(float(update.figures["audio_loss"]), abs=1e-9)
        found.append((sum(loss.item() for loss in losses), gradient.clone(), len(losses)))
    assert {packs for _, _, packs in found} >= {1, 4}
    for loss, gradient, _ in found[1:]:
        assert loss == pytest.approx(found[0][0], abs=1e-9)
        torch.testing.assert_close(gradient, found[0][1], atol=1e-9, rtol=0)


def test_the_ranks_add_up_to_one(tmp_path: Path, template: Template) -> None:
    """Loss and gradients of three ranks, each over its own packs and the step's counts, to 1e-9 in float64."""
    folder, model = write_shards(tmp_path, 9), model_of(template).double()
    found = []
    for world in (1, 3):
        makers = [
            maker_of(folder, template, batching(batch_size=5), rank=r, world=world) for r in range(world)
        ]
        batches = [maker(0).packs for maker in makers]
        counts = {kind: sum(p.counts[kind] for packs in batches for p in packs) for kind in WEIGHTS}
        sums = [TokenLosses(model)(p) for packs in batches for p in packs]
        loss = torch.stack(
            [WEIGHTS[kind] * each[kind] / counts[kind] for each in sums for kind in WEIGHTS]
        ).sum()
        model.zero_grad()
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)


def test_what_is_cut_stays_within_its_plan_when_text_is_hidden(tmp_path: Path, template: Template) -> None:
    """Without its long texts, more of a conversation's turns would fit than the step was planned with."""
    asked = SAMPLE.messages[1].model_copy(update={"content": [TextPart(text="seven " * 30)]})
    turn = [asked, SAMPLE.messages[2]]
    writer = ShardWriter(tmp_path, 5)
    for i in range(4):
        sample = SAMPLE.model_copy(update={"id": f"s{i}", "messages": turn * 3})
        writer.write(i, sample, [[torch.full((4, 10), i).numpy()] * 3])
    writer.close({"codec": {"num_codebooks": 4, "codebook_size": 32}})
    longest = template.length(turn, [10]) + 10
    maker = maker_of(tmp_path, template, batching(max_tokens=longest, text_dropout=0.99))
    packs = [pack for step in range(4) for pack in maker(step).packs]
    assert packs and all(pack.counts["audio"] == 1 for pack in packs)
    assert max(pack.layout.lengths[0] for pack in packs) <= longest


@pytest.mark.parametrize("frames, code", [(40, 1), (5, 99)])
def test_codes_that_were_changed_since_the_survey_are_set_aside(
    tmp_path: Path, template: Template, frames: int, code: int
) -> None:
    """Longer than they were, or of another codec: the training goes on without them."""
    samples = []
    for name, split in (("a", "train"), ("b", "train"), ("c", "test"), ("d", "test")):
        save_part_codes(tmp_path / f"{name}.safetensors", torch.ones(4, 5, dtype=torch.long))
        part = AudioPart(path=f"{name}.wav", codes=f"{name}.safetensors")
        messages = [*SAMPLE.messages[:2], Message(role="assistant", content=[part])]
        update = {"id": name, "messages": messages, "metadata": {"split": split}}
        samples.append(SAMPLE.model_copy(update=update))
    write_samples(tmp_path / "s.jsonl", samples)
    source, aside = open_source(tmp_path / "s.jsonl"), SetAside(tmp_path / "set_aside.jsonl", "train")
    length = template.length(SAMPLE.messages, [5])
    config = batching(batch_size=2, max_length=length, too_long="refuse")
    found = survey_sources([source], template, length, "refuse", aside, lambda: None)
    maker = BatchMaker([source], None, found, template, config, 0)
    for name in "ac":
        save_part_codes(tmp_path / f"{name}.safetensors", torch.full((4, frames), code))
    step = maker(0)
    assert [bad.id for bad in step.bad] == ["a"] and sum(pack.counts["audio"] for pack in step.packs) == 1
    packs = evaluation_packs([source], found, template, config, aside)["tts"]
    assert sum(pack.counts["audio"] for pack in packs) == 1
    assert [(row["id"], row["kind"]) for row in aside.rows] == [("c", "changed sample")]


def test_evaluation_is_the_mean_over_the_held_out_samples(tmp_path: Path, template: Template) -> None:
    folder = write_shards(tmp_path, 7)
    model = model_of(template).double().eval()
    aside, source = SetAside(tmp_path / "a.jsonl", "train"), open_source(folder)
    found = survey_sources([source], template, 256, "cut", aside, lambda: None)
    held_out = evaluation_packs([source], found, template, batching(), aside)
    task = SFTTask(TokenLosses(model), [], held_out, WEIGHTS, aside)
    with torch.no_grad():
        figures = task.evaluate(0)
        whole = pack([template.compile(source[6].sample.messages, source[6].encodings[0])])
        sums = TokenLosses(model)(whole)
    assert figures["audio_loss"] == pytest.approx(float(sums["audio"]), abs=1e-9)
    assert figures["text_loss"] == pytest.approx(float(sums["text"]), abs=1e-9)
