"""What `train` is made of: the rules of size, dropped conditions, corrupted inputs, a start from the codebooks."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from rich.console import Console
from webdataset import TarWriter

from audiollm.audio import load
from audiollm.data.conditions import corrupt, hide_conditions
from audiollm.data.loader import Loader, SetAside
from audiollm.data.packing import pack
from audiollm.data.sample import AudioPart, BadSample, Message, Sample, TextPart
from audiollm.data.shards import ShardWriter
from audiollm.data.source import open_source
from audiollm.data.template import Kind, Template
from audiollm.data.text_tokenizer import train_text_tokenizer
from audiollm.files import read_json, read_jsonl
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.recipe import Recipe
from audiollm.runner import Context, StageError
from audiollm.train.adapt import load_adapter, merge_adapter
from audiollm.train.batches import Batching, BatchMaker, StepBatch, evaluation_packs
from audiollm.train.listening import Listening, prompt_of
from audiollm.train.losses import TokenLosses
from audiollm.train.run import train_model
from audiollm.train.sft import SFTTask
from audiollm.train.stage import SIZES, TrainConfig, model_parameters
from audiollm.train.start import start_from_codebooks
from audiollm.train.survey import load_survey, save_survey, survey

WEIGHTS = {"text": 0.1, "audio": 1.0}
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


def settings_of(values: dict[str, Any]) -> TrainConfig:
    return TrainConfig.model_validate(values, context={"artifacts": {"shards"}, "inputs": []})


def settings(**values: object) -> TrainConfig:
    return settings_of({"shards": "shards", **values})


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
        messages = hide_conditions(SAMPLE.messages, no_text, no_speaker)
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


def write_shards(folder: Path, samples: int, frames: int = 3) -> Path:
    """Sample i is i of every code."""
    writer = ShardWriter(folder, samples_per_shard=5)
    for i in range(samples):
        split = {"split": "test" if i == samples - 1 else "train", "speaker": f"voice{i % 2}"}
        sample = SAMPLE.model_copy(update={"id": f"s{i}", "metadata": split})
        writer.write(i, sample, [[torch.full((4, frames + i), i).numpy()]])
    writer.close({"codec": {"num_codebooks": 4, "codebook_size": 32}})
    return folder


def batching(**changes: Any) -> Batching:
    return Batching(
        **{"batch_size": 3, "max_tokens": 256, "max_length": changes.get("max_tokens", 256), **changes}
    )


def maker_of(folder: Path, template: Template, batching: Batching, **ranks: int) -> BatchMaker:
    aside, sources = SetAside(folder / "set_aside.jsonl"), [open_source(folder)]
    found = survey(sources, template, batching.max_length, batching.too_long, aside, lambda: None)
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
        task = SFTTask(TokenLosses(model), [], {}, WEIGHTS, SetAside(tmp_path / "a.jsonl"))
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


def test_evaluation_is_the_mean_over_the_held_out_samples(tmp_path: Path, template: Template) -> None:
    folder = write_shards(tmp_path, 7)
    model = model_of(template).double().eval()
    aside, source = SetAside(tmp_path / "a.jsonl"), open_source(folder)
    found = survey([source], template, 256, "cut", aside, lambda: None)
    held_out = evaluation_packs([source], found, template, batching(), aside)
    task = SFTTask(TokenLosses(model), [], held_out, WEIGHTS, aside)
    with torch.no_grad():
        figures = task.evaluate(0)
        whole = pack([template.compile(source[6].sample.messages, source[6].encodings[0])])
        sums = TokenLosses(model)(whole)
    assert figures["audio_loss"] == pytest.approx(float(sums["audio"]), abs=1e-9)
    assert figures["text_loss"] == pytest.approx(float(sums["text"]), abs=1e-9)


def test_bad_and_long_samples_are_named_and_the_rest_goes_on(tmp_path: Path, template: Template) -> None:
    folder = write_shards(tmp_path / "shards", 7, frames=20)
    with (folder / "more.jsonl").open("w") as file:
        file.write(SAMPLE.model_copy(update={"id": "uncoded"}).model_dump_json() + "\n{broken\n")
    sources = [open_source(folder), open_source(folder / "more.jsonl")]
    aside = SetAside(tmp_path / "set_aside.jsonl")
    lengths = [template.length(SAMPLE.messages, [20 + i]) for i in range(7)]
    found = survey(sources, template, lengths[4], "refuse", aside, lambda: None)
    assert aside.counts == {"too long": 2, "missing codes": 1, "wrong JSON": 1}
    assert found.counts() == {"whole": 5, "refused": 2, "bad": 2}
    assert found.rows[0].tolist() == [*lengths[:5], 0, 0] and found.used(1, held_out=False).size == 0
    cut = survey(sources, template, lengths[4], "cut", SetAside(tmp_path / "b.jsonl"), lambda: None)
    assert cut.counts()["cut short"] == 2 and cut.rows[0].tolist()[5:] == [lengths[4]] * 2
    save_survey(tmp_path / "survey.safetensors", cut)
    again = load_survey(tmp_path / "survey.safetensors")
    assert again.counts() == cut.counts() and again.speakers == cut.speakers == ("voice0", "voice1")
    with pytest.raises(BadSample, match="longer than"):
        survey(
            sources, template, lengths[4], "refuse", SetAside(tmp_path / "c.jsonl", strict=True), lambda: None
        )


def test_listening_speaks_the_same_prompts_every_time(tmp_path: Path, template: Template) -> None:
    folder, model = write_shards(tmp_path / "shards", 4), model_of(template).eval()
    listening = Listening(
        model, Tones(), template, [open_source(folder)[i] for i in (1, 2)], tmp_path / "out"
    )
    for step in (5, 10):
        listening(step)
    first, second = (sorted((tmp_path / "out").glob(f"step-0000{step}/*")) for step in ("05", "10"))
    assert [path.name for path in first] == ["s1.wav", "s2.wav"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes() and load(one).samples_CN.shape[1] >= 960
    assert list((tmp_path / "out" / "tensorboard").glob("events*"))
    prompt = prompt_of(open_source(folder)[1], 3)
    assert [m.role for m in prompt.messages] == ["system", "user"] and prompt.codes == () and prompt.seed == 3


class Tones:
    """A codec of a level a frame."""

    frame_rate, num_codebooks, codebook_size, sample_rate = 25.0, 4, 32, 24_000
    codebook_vectors_KVD = torch.zeros(4, 32, 1)

    def encode(self, samples_CN: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def decode(self, codes_KT: torch.Tensor) -> torch.Tensor:
        return (codes_KT.sum(dim=0) / 200).repeat_interleave(960)[None].float()


def write_odd_shards(folder: Path, cut: bytes) -> Path:
    """One of each kind of bad sample, as others may have written them."""
    folder.mkdir()
    codes, long = io.BytesIO(), io.BytesIO()
    np.savez(codes, **{"0-0": np.full((4, 5), 99)})  # type: ignore[arg-type]
    np.savez(long, **{"0-0": np.zeros((4, 200), np.int64)})  # type: ignore[arg-type]
    record = SAMPLE.model_dump(mode="json")
    text = json.dumps({**record, "id": "latin", "task": "f\u00fcnf"}, ensure_ascii=False)
    with TarWriter(str(folder / "a.tar")) as tar:
        tar.write({"__key__": "json", "json": b"{broken"})
        tar.write({"__key__": "latin", "json": text.encode("latin-1")})
        impossible = json.dumps({**record, "id": "impossible"}).encode()
        tar.write({"__key__": "impossible", "json": impossible, "codes.npz": codes.getvalue()})
        tar.write({"__key__": "long", "json": json.dumps(record).encode(), "codes.npz": long.getvalue()})
        tar.write({"__key__": "uncoded", "json": json.dumps({**record, "id": "uncoded"}).encode()})
    (folder / "b.tar").write_bytes(cut)
    return folder


@pytest.mark.parametrize("strict", [False, True])
def test_the_stage_names_every_bad_sample(tmp_path: Path, strict: bool) -> None:
    """A cut tar, wrong JSON, missing and impossible codes, another encoding, too long: named, counted, gone around."""
    good = write_shards(tmp_path / "good", 12)
    odd = write_odd_shards(tmp_path / "odd", (good / "shard-000001.tar").read_bytes()[:4000])
    shards: dict[str, Any] = {"shards": [str(good), str(odd)], "model": SMALL, "too_long": "refuse"}
    if strict:
        with pytest.raises(StageError, match="mend or remove it"):
            run_stage(tmp_path / "run", **shards, strict=True)
        return
    figures = run_stage(tmp_path / "run", **shards, max_length=128)
    kinds = {row["kind"] for row in read_jsonl(tmp_path / "run" / "set_aside.jsonl")}
    assert {"wrong JSON", "text encoding", "truncated tar", "too long"} <= kinds
    assert kinds & {"missing codes", "missing audio"} and kinds & {"codes out of range", "does not compile"}
    assert figures["steps"] == 12 and figures["samples_refused"] == 1


def run_stage(folder: Path, shards: Any, **values: Any) -> dict[str, Any]:
    config = settings_of({"shards": shards, "steps": 12, "batch_size": 3, "precision": "fp32", **values})
    folder.mkdir(exist_ok=True)
    recipe = Recipe("test", Path("test.yaml"), "tiny", 0, folder, (), {})
    return train_model(config, Context(folder, recipe, Console(quiet=True), {}))


SMALL = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64}


def test_the_stage_trains_saves_and_mixes_sources(tmp_path: Path) -> None:
    first, second = write_shards(tmp_path / "a", 7), write_shards(tmp_path / "b", 5)
    sources = [{"path": str(first), "weight": 1}, {"path": str(second), "weight": 3}]
    figures = run_stage(tmp_path / "run", sources, model=SMALL, max_tokens=128, workers=1)
    assert figures["sequences"] == 10 and figures["samples_whole"] == 12 and figures["tokens"] > 0
    model = DualFFN.from_pretrained(tmp_path / "run")
    assert model.config.hidden_size == 32
    assert read_json(tmp_path / "run" / "model" / "speakers.json") == ["voice0", "voice1"]
    with pytest.raises(StageError, match="different codecs"):
        ShardWriter(tmp_path / "c", 5).close({"codec": {"num_codebooks": 2, "codebook_size": 32}})
        run_stage(tmp_path / "other", [str(first), str(tmp_path / "c")], model=SMALL)


def test_an_adapter_is_saved_by_itself_and_merged(tmp_path: Path) -> None:
    shards = str(write_shards(tmp_path / "a", 7))
    run_stage(tmp_path / "base", shards, model=SMALL)
    tuned = tmp_path / "tuned"
    run_stage(tuned, shards, start=str(tmp_path / "base"), trained="adapter", learning_rate=0.05, ema_decay=0)
    base, merged = DualFFN.from_pretrained(tmp_path / "base"), DualFFN.from_pretrained(tuned)
    changed = {
        name
        for (name, before), after in zip(base.named_parameters(), merged.parameters(), strict=True)
        if not torch.equal(before, after)
    }
    assert changed and all(name.endswith("_proj.weight") and "self_attn" in name for name in changed)
    adapted = load_adapter(DualFFN.from_pretrained(tmp_path / "base"), tuned / "adapter")
    for (name, expected), found in zip(
        merged.named_parameters(), merge_adapter(adapted).parameters(), strict=True
    ):
        torch.testing.assert_close(found, expected, msg=name)


def test_only_the_audio_path_is_trained_where_asked(tmp_path: Path) -> None:
    shards = str(write_shards(tmp_path / "a", 7))
    run_stage(tmp_path / "base", shards, model=SMALL)
    run_stage(tmp_path / "tuned", shards, start=str(tmp_path / "base"), trained="audio_ffn", ema_decay=0)
    base, tuned = (DualFFN.from_pretrained(tmp_path / name).state_dict() for name in ("base", "tuned"))
    changed = {name for name in base if not torch.equal(base[name], tuned[name])}
    assert changed and all("audio" in name for name in changed)
    assert any("audio_mlp" in name for name in changed) and any("audio_lm_head" in name for name in changed)


def test_codes_that_sound_alike_begin_alike(template: Template) -> None:
    model = model_of(template)
    vectors = torch.randn(4, 32, 8)
    vectors[:, 1] = vectors[:, 0] + 0.01
    start_from_codebooks(model, vectors)
    table = model.model.embed_audio_tokens.embed_audio_tokens.weight.unflatten(0, (4, 34))
    near = (table[:, 0] - table[:, 1]).norm(dim=-1)
    far = (table[:, 0] - table[:, 2]).norm(dim=-1)
    assert near.mean().item() < 0.9 * far.mean().item()


RECIPE = """
name: {name}
stages:
  - train:
      shards: {shards}
      steps: 12
      batch_size: 5
      max_tokens: 128
      precision: fp32
      model: {{hidden_size: 32, num_layers: 2, num_heads: 2, intermediate_size: 64, dropout: 0}}
"""


def test_the_stage_on_two_ranks_is_the_stage_on_one(tmp_path: Path) -> None:
    """The command as people start it; every rank sees its own packs of the same samples."""
    shards = write_shards(tmp_path / "shards", 11)
    for name, options in (("one", []), ("two", ["--launch", "2"])):
        recipe = tmp_path / f"{name}.yaml"
        recipe.write_text(RECIPE.format(name=name, shards=shards))
        command = [
            sys.executable,
            "-m",
            "audiollm.cli",
            "run",
            str(recipe),
            "--runs",
            str(tmp_path),
            *options,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr + done.stdout
    one, two = (DualFFN.from_pretrained(tmp_path / name / "train").state_dict() for name in ("one", "two"))
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, atol=1e-4, rtol=0, msg=key)
    logs = [read_jsonl(tmp_path / name / "train" / "metrics.jsonl") for name in ("one", "two")]
    first, second = ([row for row in log if "loss" in row] for log in logs)
    for key in ("loss", "text_loss", "audio_loss", "audio_loss/3"):
        assert second[0][key] == pytest.approx(first[0][key], rel=1e-4), key
    tokens = [
        read_json(tmp_path / name / "train" / "checkpoint" / "state.json")["tokens"]
        for name in ("one", "two")
    ]
    assert tokens[0] > 0 and tokens[1] > 0
