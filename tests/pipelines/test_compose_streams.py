"""The stage `compose_streams`: when segments are due, lags, wait-k, speakers, and recordings that are set aside."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from audiollm.audio import load, probe, save
from audiollm.data.chat.template import Template
from audiollm.data.records.aligned_recording import AlignedRecording, SpokenSpan
from audiollm.data.records.manifest import read_samples
from audiollm.data.records.sample import Sample, TextPart
from audiollm.data.text.tokenizer import train_text_tokenizer
from audiollm.errors import BadSample, ConfigError
from audiollm.interpret.aligned_records import StreamShape, segments_due, stream_sample, units_due, wait_k_due
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.hub import save_pretrained
from audiollm.recipe.runner import run_recipe
from audiollm.recipe.stages import load_recipe
from tokenizer import AudioTokenizer
from tokenizer.native.model import TokenizerConfig

SHAPE = StreamShape(chunk_frames=25, frame_rate=25.0)


def recording(**values: Any) -> AlignedRecording:
    made = {"id": "a", "audio": "a.wav"} | values
    return AlignedRecording.model_validate(made)


def segment(start_s: float, end_s: float, target: str, **values: Any) -> dict[str, Any]:
    return {"start_s": start_s, "end_s": end_s, "text": target.lower(), "target": target, **values}


def texts(sample: Any) -> list[str]:
    return [part.text for part in sample.messages[-1].content if isinstance(part, TextPart)]


def test_a_segment_is_due_when_its_source_is_over() -> None:
    """Chunks of 1 s: an end at 1.0 s is over in chunk 0, one at 1.01 s in chunk 1; the end holds the rest."""
    due = segments_due(
        recording(segments=[segment(0, 1.0, "Eins"), segment(1, 1.01, "Zwei"), segment(2, 3.9, "Drei")])
    )
    sample = stream_sample(recording(), due, 100, SHAPE)
    assert texts(sample) == ["Eins", "Zwei", "", "Drei"]
    assert sample.metadata["source_ends"] == [0, 1, 3]
    late = stream_sample(recording(), due, 100, StreamShape(25, 25.0, (2, 2)))
    assert texts(late) == ["", "", "Eins", "Zwei Drei"]
    assert late.metadata["source_ends"] == [0, 3]
    lags = {StreamShape(25, 25.0, (0, 3), seed=1).lag_of(str(number)) for number in range(50)}
    assert lags == {0, 1, 2, 3}


def test_speakers_are_marked_where_they_change() -> None:
    both = recording(
        segments=[
            segment(0, 1, "A", speaker="x"),
            segment(1, 2, "B", speaker="x"),
            segment(1.5, 3, "C", speaker="y"),
        ]
    )
    assert [piece.tagged_text for piece in segments_due(both, speaker_tags=True)] == [
        "[SPEAKER0] A",
        "B",
        "[SPEAKER1] C",
    ]


def test_wait_k_is_k_words_behind() -> None:
    words = [
        {"text": word, "start_s": place, "end_s": place + 1}
        for place, word in enumerate(["one", "two", "three"])
    ]
    due = wait_k_due(recording(words=words, target="eins zwei drei vier"), 2)
    assert [(piece.text, piece.source_end_s) for piece in due] == [
        ("eins", 2),
        ("zwei", 3),
        ("drei", 3),
        ("vier", 3),
    ]


def test_units_wait_for_all_units_before_them() -> None:
    """A target's first word may need the last of the source: what follows it cannot be said earlier."""
    pair = recording(target="我爱 AI", target_audio="b.wav", target_words=[
        {"text": each, "start_s": place, "end_s": place + 1} for place, each in enumerate("abc")])  # fmt: skip
    due = units_due(pair, [0.5, 2.5, 1.5])
    assert [piece.source_end_s for piece in due] == [0.5, 2.5, 2.5]
    sample = stream_sample(pair, due, 100, SHAPE)
    first, _, third, _ = sample.messages[-1].actions()
    assert [part.model_dump(exclude_none=True) for part in first] == [
        {"type": "text", "text": "我"}, {"type": "audio", "path": "b.wav", "start_s": 0.0, "end_s": 1.0},
    ]  # fmt: skip
    # two units of one action are one text and one span
    assert [getattr(part, "text", None) or (part.start_s, part.end_s) for part in third] == [
        "爱 AI",
        (1.0, 3.0),
    ]  # type: ignore[union-attr]
    assert sample.metadata["durations_s"] == [1.0, 0.0, 2.0, 0.0]
    with pytest.raises(BadSample, match="3 units of the translation, 2 times"):
        units_due(pair, [0.5, 2.5])


def test_what_is_not_recorded_is_said_by_speaker() -> None:
    """Each run of one speaker in an action is said at once, without its tag, in that speaker's voice."""
    both = recording(
        segments=[
            segment(0, 1, "A", speaker="x"), segment(0.2, 1, "B", speaker="x"), segment(0.5, 1, "C", speaker="y"),
            segment(1, 3, "D", speaker="y", due_s=2.5),
        ]
    )  # fmt: skip
    asked = []

    def speak(text: str, speaker: str | None, number: int) -> SpokenSpan:
        asked.append((text, speaker, number))
        return SpokenSpan(path=f"{number}.wav", end_s=0.5)

    sample = stream_sample(both, segments_due(both, speaker_tags=True), 75, SHAPE, speak)
    assert asked == [("A B", "x", 0), ("C", "y", 1), ("D", "y", 2)]
    actions = [
        [getattr(part, "text", "") or getattr(part, "path", "") for part in each]
        for each in sample.messages[-1].actions()
    ]
    assert actions == [["[SPEAKER0] A B [SPEAKER1] C", "0.wav", "1.wav"], [""], ["D", "2.wav"]]
    assert sample.metadata["source_durations_s"] == [2.3, 0.0, 0.0]


def compose(
    folder: Path, name: str, rows: list[dict[str, Any]], **settings: Any
) -> tuple[list[Sample], dict[str, str]]:
    """Run the stage: streams, and kinds of what was set aside by id."""
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "name": "any",
        "stages": [{"compose_streams": {"recordings": str(folder / f"{name}.jsonl"), **settings}}],
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    run_recipe(load_recipe(folder / f"{name}.yaml", name=name, runs=folder), Console(quiet=True))
    out = folder / name / "compose_streams"
    samples, bad = read_samples(out / "streams.jsonl")
    assert not bad
    aside = out / "set_aside.jsonl"
    rows = list(map(json.loads, aside.read_text().splitlines())) if aside.exists() else []
    return samples, {row["id"]: row["kind"] for row in rows}


def test_pairs_are_aligned_and_what_is_not_is_named(tmp_path: Path) -> None:
    save(tmp_path / "a.wav", torch.zeros(1, 8000 * 2), 8000)
    (tmp_path / "align.py").write_text(
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    if line.strip():\n"
        "        asked = json.loads(line)\n"
        "        if asked['text'] == 'dies': sys.exit(1)\n"
        "        print(json.dumps([0.9 * (n + 1) for n in range(len(asked['units']))]), flush=True)\n"
    )
    rows: list[dict[str, Any]] = [
        {"id": "good", "audio": "a.wav", "target": "eins zwei"},
        {"id": "dies", "audio": "a.wav", "target": "eins zwei", "text": "dies"},
        {"id": "again", "audio": "a.wav", "target": "eins"},
        {"id": "plain", "audio": "a.wav"},
        {"id": "good", "audio": "a.wav", "target": "eins"},
        {"id": "speech", "audio": "a.wav", "target": "eins", "target_audio": "a.wav", "target_words": [
            {"text": "eins", "start_s": 0.5, "end_s": 3.0}]},
        {"id": "span", "audio": "a.wav", "segments": [
            segment(0, 1, "Eins", said={"path": "a.wav", "start_s": 1.5, "end_s": 2.5})]},
    ]  # fmt: skip
    command = f"{sys.executable} {tmp_path / 'align.py'}"
    streams, aside = compose(tmp_path, "pairs", rows, align={"command": command, "timeout_s": 30})
    assert [(each.id, texts(each)) for each in streams] == [
        ("good", ["eins", "zwei", ""]), ("again", ["eins", "", ""]),
    ]  # fmt: skip
    assert aside == {
        "dies": "cannot be aligned", "plain": "cannot be aligned", "good": "doubled id",
        "speech": "longer than its recording", "span": "longer than its recording",
    }  # fmt: skip
    both = {"wait_k": 2, "align": {"command": "x"}}
    with pytest.raises(ConfigError, match="leave one out"):
        compose(tmp_path, "both", rows, **both)
    with pytest.raises(ConfigError, match="either a command or a model"):
        compose(tmp_path, "none", rows, align={})
    with pytest.raises(ConfigError, match=r"align\.min_logprob is of align\.model"):
        compose(tmp_path, "unread", rows, align={"command": "x", "min_logprob": -3.0})
    with pytest.raises(ConfigError, match=r"align\.timeout_s is of align\.command"):
        compose(tmp_path, "unread", rows, align={"model": str(tmp_path), "timeout_s": 5})
    with pytest.raises(ConfigError, match="speaker_tags mark segments"):
        compose(tmp_path, "unread", rows, wait_k=2, speaker_tags=True)


def test_a_model_aligns_and_speaks_in_the_voice_of_the_source(tmp_path: Path) -> None:
    """Random weights: their times mean nothing, but lie inside; their speech is a file that the stream names."""
    torch.manual_seed(0)
    codec = AudioTokenizer(
        TokenizerConfig(
            mel_hidden_size=16, hidden_size=16, encoder_layers=(1, 1), decoder_layers=(1, 1), latent_dim=8,
            num_codebooks=2, codebook_size=16, step_frames=2,
        )
    ).eval()  # fmt: skip
    codec.save_pretrained(tmp_path / "run" / "train_tokenizer")
    template = Template(train_text_tokenizer(["eins zwei", "system user assistant"] * 3, 280), 2, 16)
    model = DualFFN(
        DualFFNConfig(
            vocab_size=template.tokenizer.get_vocab_size(), num_codebooks=2, codebook_size=18, hidden_size=32,
            num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=48,
        )
    )  # fmt: skip
    with torch.no_grad():  # its speech ends soon
        model.audio_lm_head.weight.view(2, 18, 32)[0, 17] = 0.1 * model.model.norm.weight
    save_pretrained(model, tmp_path / "run" / "train" / "model", template.tokenizer)
    folder = str(tmp_path / "run" / "train")
    voice = 0.1 * torch.randn(1, 24000 * 2, generator=torch.Generator().manual_seed(1))
    save(tmp_path / "a.wav", voice, 24000)
    save(tmp_path / "silent.wav", torch.zeros(1, 24000), 24000)
    rows = [
        {"id": "a", "audio": "a.wav", "target": "eins zwei"}, {"id": "b/c", "audio": "silent.wav", "target": "eins"},
    ]  # fmt: skip
    streams, aside = compose(tmp_path, "made", rows, align={"model": folder}, speak={"model": folder})
    (stream,) = streams
    assert " ".join(texts(stream)).split() == ["eins", "zwei"]
    spoken = stream.audio("assistant")
    assert spoken
    assert all(load(part.path).duration_s == pytest.approx(part.end_s) for part in spoken)
    assert sum(stream.metadata["durations_s"]) == pytest.approx(
        sum(part.end_s or 0 for part in spoken), abs=1e-3
    )
    assert aside == {"b/c": "cannot be spoken"}  # whose voice is silence


def test_the_stage_writes_streams_and_names_what_it_sets_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a.wav", torch.zeros(1, 8000 * 3 + 1), 8000)
    save(tmp_path / "live.wav", torch.zeros(1, 8000), 8000)

    def probed(path: Path) -> Any:  # as of a broadcast, whose header was written before its length was known
        return replace(probe(path), num_samples=None) if path.name == "live.wav" else probe(path)

    monkeypatch.setattr("audiollm.audio.probe", probed)
    live, word = (
        {"path": "live.wav", "start_s": 0, "end_s": 0.5},
        {"start_s": 0, "end_s": 0.5, "text": "Eins"},
    )
    rows: list[dict[str, Any]] = [
        {"id": "good", "audio": "a.wav", "segments": [segment(0.1, 0.9, "Eins"), segment(1, 2.5, "Zwei")]},
        {"id": "order", "audio": "a.wav", "segments": [segment(1, 2, "Eins"), segment(0, 1, "Zwei")]},
        {"id": "long", "audio": "a.wav", "segments": [segment(1, 5, "Eins")]},
        {"id": "plain", "audio": "a.wav"},
        {"id": "gone", "audio": "none.wav", "segments": [segment(0, 1, "Eins")]},
        {"id": "wrong", "audio": "a.wav", "segments": [{"text": "x"}]},
        {"id": "live", "audio": "live.wav", "segments": [segment(0, 0.5, "Eins")]},
        {"id": "live said", "audio": "a.wav", "segments": [segment(0, 1, "Eins", said=live)]},
        {"id": "live target", "audio": "a.wav", "target_audio": "live.wav", "target_words": [word],
         "segments": [segment(0, 1, "Eins")]},
    ]  # fmt: skip
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "name": "any",
        "stages": [{"compose_streams": {"recordings": str(tmp_path / "talks.jsonl"), "lag": [1, 1]}}],
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    run_recipe(load_recipe(tmp_path / "recipe.yaml", name="r", runs=tmp_path), Console(quiet=True))
    out = tmp_path / "r" / "compose_streams"
    (sample,), bad = read_samples(out / "streams.jsonl")
    assert not bad
    assert texts(sample) == ["", "Eins", "", "Zwei"]
    assert sample.messages[-1].chunk_frames == 24
    kinds = {
        row["id"]: row["kind"] for row in map(json.loads, (out / "set_aside.jsonl").read_text().splitlines())
    }
    assert kinds == {
        "order": "times out of order", "long": "longer than its recording", "plain": "cannot be aligned",
        "gone": "cannot be read", "wrong": "no aligned recording",
        **dict.fromkeys(("live", "live said", "live target"), "unknown length"),
    }  # fmt: skip
    # 3 s and a sample at 8 kHz are 76 frames of codes: the template takes the stream as it is
    template = Template(train_text_tokenizer(["eins zwei"] * 3, 280), 2, 16)
    assert template.compile(sample.messages, [torch.zeros(2, 76, dtype=torch.long)]).pinned_rows > 0
    recipe["stages"][0]["compose_streams"]["chunk_s"] = 0.5  # type: ignore[index]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(ConfigError, match="multiple of 0.04"):
        load_recipe(tmp_path / "recipe.yaml", name="s", runs=tmp_path)
