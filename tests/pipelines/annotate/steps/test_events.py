"""Sound events: runs and tags by hand, model files made here, a random transformers model, and YAMNet where it is."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from audiollm.audio import Waveform, save
from audiollm.errors import ConfigError
from audiollm.evaluate.judges.taggers import (
    AskedTagger,
    WindowScores,
    listed,
    probabilities,
    read_labels,
)
from pipelines.annotate.step import RecordingMetadata, Segment
from pipelines.annotate.steps.events import (
    GROUPS,
    Events,
    EventsConfig,
    find_events,
    groups_in,
    load_tagger,
    rank_tags,
    window_starts,
)
from pipelines.steps.step import Listener

SHARED = Path(
    os.environ.get("AUDIOLLM_SHARED_DATA") or Path(__file__).resolve().parents[5] / "shared" / "data"
)
RATE = 16000


def heard(labels: Sequence[str], *rows: Sequence[float]) -> WindowScores:
    return WindowScores(list(labels), np.array(rows, np.float32))


def segment(folder: Path, samples_N: np.ndarray, start_s: float = 0.0, end_s: float | None = None) -> Segment:
    path = folder / "sound.wav"
    save(path, torch.from_numpy(samples_N.astype(np.float32))[None], RATE, "FLOAT")
    end_s = len(samples_N) / RATE if end_s is None else end_s
    return Segment(str(path), start_s, end_s, "sound", None, RecordingMetadata(), {}, Listener(str(path)))


# ---- from scores to events and tags


def test_events_by_hand() -> None:
    scores = heard(["Dog", "Silence"], [0.6, 0.9], [0.3, 0.9], [0.2, 0.9], [0.5, 0.9], [0.9, 0.9])
    events = find_events(scores, [0.5, 1.0, 1.5, 2.0, 2.5], 3.0, {}, onset=0.5, offset=0.25)
    assert events == [("Dog", 0.0, 1.25, pytest.approx(0.6)), ("Dog", 1.75, 3.0, pytest.approx(0.9))]


def test_a_group_is_an_event_only_where_nothing_in_it_is_heard() -> None:
    scores = heard(
        ["Animal", "Dog", "Whale vocalization"], [0.9, 0.8, 0], [0.9, 0.8, 0], [0, 0, 0], [0.9, 0, 0]
    )
    events = find_events(scores, [0.5, 1.0, 1.5, 2.0], 2.5, groups_in(scores.labels), 0.5, 0.25)
    assert [(event.label, event.start_s, event.end_s) for event in events] == [
        ("Dog", 0.0, 1.25),
        ("Animal", 1.75, 2.5),
    ]


def test_a_group_is_a_tag_only_where_nothing_in_it_scores_half_as_much() -> None:
    labels = ["Animal", "Dog", "Whale vocalization", "Rain", "Silence"]
    loud = heard(labels, [0.8, 0.4, 0.0, 0.1, 0.9])
    faint = heard(labels, [0.8, 0.39, 0.0, 0.1, 0.9])
    groups = groups_in(labels)
    assert [label for label, _ in rank_tags(loud, groups, 5)] == ["Dog", "Rain"]
    assert [label for label, _ in rank_tags(faint, groups, 5)] == ["Animal", "Dog", "Rain"]
    assert rank_tags(loud, groups, 1) == [("Dog", pytest.approx(0.4))]


def test_tags_are_means_over_the_windows() -> None:
    scores = heard(["Cough", "Hum"], [0.9, 0.4], [0.0, 0.4], [0.0, 0.4])
    assert rank_tags(scores, {}, 2) == [("Hum", pytest.approx(0.4)), ("Cough", pytest.approx(0.3))]


@given(
    st.lists(st.sampled_from([0.0, 0.2, 0.25, 0.4, 0.5, 0.9]), min_size=1, max_size=40), st.floats(0.01, 2.0)
)
def test_events_lie_in_the_segment_apart_and_are_loud(scores: list[float], hop_s: float) -> None:
    middles_s = [hop_s * (place + 0.5) for place in range(len(scores))]
    duration_s = hop_s * len(scores)
    events = find_events(heard(["Dog"], *[[score] for score in scores]), middles_s, duration_s, {}, 0.5, 0.25)
    edges = [edge for event in events for edge in (event.start_s, event.end_s)]
    assert edges == sorted(edges) and all(0 <= edge <= duration_s + 1e-3 for edge in edges)
    loud_s = sum(hop_s for score in scores if score >= 0.5)
    kept_s = sum(hop_s for score in scores if score >= 0.25)
    assert loud_s - 0.1 <= sum(event.end_s - event.start_s for event in events) <= kept_s + 0.1
    assert all(event.score >= 0.5 for event in events)


@given(st.integers(1, 5000), st.integers(1, 400), st.integers(1, 400))
def test_windows_cover_the_sound(num_samples: int, window: int, hop: int) -> None:
    starts = window_starts(num_samples, window, hop)
    assert starts[0] == 0 and starts[-1] + window == max(num_samples, window)
    assert all(0 < after - before <= hop for before, after in pairwise(starts))


@pytest.mark.parametrize("group", GROUPS)
def test_groups_are_those_of_audioset(group: str) -> None:
    """The published list of classes holds every name, and the last of a group comes after the group's own name."""
    path = SHARED / "text_benchmarks" / "audioset_tagging_cnn" / "metadata" / "class_labels_indices.csv"
    if not path.is_file():
        pytest.skip(f"AudioSet's classes are not here: {path}")
    names = read_labels(path)
    assert len(names) == 527 and names.index(group) < names.index(GROUPS[group])


# ---- models in files


def write_onnx(path: Path, num_samples: int | None, metadata: dict[str, str]) -> None:
    """A model of three classes: the window's mean, its largest value, and 1 less the mean."""
    import onnx
    from onnx import TensorProto, helper

    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], keepdims=1),
        helper.make_node("ReduceMax", ["x"], ["max"], keepdims=1),
        helper.make_node("Sub", ["one", "mean"], ["rest"]),
        helper.make_node("Concat", ["mean", "max", "rest"], ["scores"], axis=1),
    ]
    one = helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])
    graph = helper.make_graph(
        nodes,
        "energy",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, num_samples or "n"])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [1, 3])],
        [one],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    for key, value in metadata.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value
    onnx.save(model, str(path))


@pytest.fixture()
def half_on() -> np.ndarray:
    """2 s: a second of nothing, and a second of 0.8."""
    return np.concatenate([np.zeros(RATE), np.full(RATE, 0.8)])


@pytest.mark.parametrize("fixed", [8000, None])
def test_an_onnx_file(tmp_path: Path, half_on: np.ndarray, fixed: int | None) -> None:
    pytest.importorskip("onnx", reason="model files are made with the package onnx")
    write_onnx(tmp_path / "m.onnx", fixed, {"labels": json.dumps(["loud", "peak", "calm"])})
    step = Events(EventsConfig(model=tmp_path / "m.onnx", window_s=None if fixed else 0.5, hop_s=0.5))
    assert step.missing() is None
    step.setup()
    value = step.process(segment(tmp_path, half_on))
    assert value["tags"] == [
        {"label": "calm", "score": 0.6},
        {"label": "loud", "score": 0.4},
        {"label": "peak", "score": 0.4},
    ]
    assert value["events"] == [
        {"label": "calm", "start_s": 0.0, "end_s": 1.0, "score": 1.0},
        {"label": "loud", "start_s": 1.0, "end_s": 2.0, "score": 0.8},
        {"label": "peak", "start_s": 1.0, "end_s": 2.0, "score": 0.8},
    ]
    later = step.process(segment(tmp_path, half_on, 1.0, 2.0))
    assert later["events"][0] == {"label": "loud", "start_s": 0.0, "end_s": 1.0, "score": 0.8}
    assert json.loads(json.dumps(value, allow_nan=False)) == value


def test_names_beside_a_file_and_errors_that_say_what_to_do(tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="model files are made with the package onnx")
    model = tmp_path / "m.onnx"
    write_onnx(model, 8000, {})
    with pytest.raises(ConfigError, match="no class names"):
        load_tagger(EventsConfig(model=model))
    (tmp_path / "m_class_map.csv").write_text('index,mid,display_name\n0,/m/1,"a, b"\n1,/m/2,c\n2,/m/3,d\n')
    assert load_tagger(EventsConfig(model=model)).labels == ["a, b", "c", "d"]
    (tmp_path / "two.txt").write_text("a\nb\n")
    with pytest.raises(ConfigError, match="2 class names, and outputs of 3"):
        load_tagger(EventsConfig(model=model, labels=tmp_path / "two.txt"))
    with pytest.raises(ConfigError, match=r"window_s: 2\.0, and the model takes 0\.5 s"):
        load_tagger(EventsConfig(model=model, window_s=2.0))
    for kind in (".onnx", ".tflite"):
        (tmp_path / f"bad{kind}").write_bytes(b"no model")
        with pytest.raises(ConfigError, match="no audio classifier loads"):
            load_tagger(EventsConfig(model=tmp_path / f"bad{kind}"))


def test_what_is_missing_is_told_without_loading(tmp_path: Path) -> None:
    assert "not set" in str(Events(EventsConfig()).missing())
    assert "no model at" in str(Events(EventsConfig(model=tmp_path / "gone.tflite")).missing())
    assert "no model at" in str(Events(EventsConfig(model=tmp_path)).missing())
    (tmp_path / "m.pt").touch()
    assert "neither" in str(Events(EventsConfig(model=tmp_path / "m.pt")).missing())
    (tmp_path / "m.onnx").touch()
    lacking = EventsConfig(model=tmp_path / "m.onnx", labels=tmp_path / "gone.txt")
    assert "gone.txt does not exist" in str(Events(lacking).missing())


@pytest.mark.parametrize(
    "settings",
    [
        {"onset": 0.2, "offset": 0.3},
        {"model": "folder", "labels": "names.txt"},
        {"model": "m.onnx", "codec": "c"},
    ],
)
def test_settings_that_would_do_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        EventsConfig(**settings)


# ---- transformers, and our own


@pytest.fixture(scope="module")
def tiny_ast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import ASTConfig, ASTFeatureExtractor, ASTForAudioClassification

    folder = tmp_path_factory.mktemp("ast")
    torch.manual_seed(0)
    config = ASTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_mel_bins=32,
        max_length=100,
        id2label=dict(enumerate(["Dog", "Rain", "Speech", "Hum"])),
        label2id={name: index for index, name in enumerate(["Dog", "Rain", "Speech", "Hum"])},
    )
    ASTForAudioClassification(config).save_pretrained(folder)
    ASTFeatureExtractor(num_mel_bins=32, max_length=100).save_pretrained(folder)
    return folder


def test_a_transformers_folder_gives_what_its_pipeline_gives(tiny_ast: Path, tmp_path: Path) -> None:
    from transformers import pipeline

    noise = np.random.default_rng(0).normal(0, 0.1, 3 * RATE).astype(np.float32)
    step = Events(EventsConfig(model=tiny_ast, hop_s=1.0))
    assert step.missing() is None
    step.setup()
    value = step.process(segment(tmp_path, noise))
    judge = pipeline("audio-classification", model=str(tiny_ast))
    windows = [
        judge({"raw": noise[start : start + RATE].copy(), "sampling_rate": RATE}, function_to_apply="sigmoid")
        for start in range(0, 3 * RATE, RATE)
    ]
    expected = {
        name: float(
            np.mean([next(one["score"] for one in window if one["label"] == name) for window in windows])
        )
        for name in ("Dog", "Rain", "Speech", "Hum")
    }
    found = {tag["label"]: tag["score"] for tag in value["tags"]}
    assert found == pytest.approx(expected, abs=1e-4)
    assert value == step.process(segment(tmp_path, noise))
    with pytest.raises(ConfigError, match="hears 1 s at once"):
        load_tagger(EventsConfig(model=tiny_ast, window_s=2.0))
    with pytest.raises(ConfigError, match="codec"):
        load_tagger(EventsConfig(model=tiny_ast, codec=tmp_path))


def test_probabilities() -> None:
    logits_BK = np.array([[0.0, np.log(3.0)], [1000.0, -1000.0]])
    assert probabilities(logits_BK, False) == pytest.approx(np.array([[0.5, 0.75], [1.0, 0.0]]))
    assert probabilities(logits_BK, True) == pytest.approx(np.array([[0.25, 0.75], [1.0, 0.0]]))


def test_a_list_in_words() -> None:
    assert listed("Dog, rain; a car  horn and Dog.\n- siren") == ["Dog", "rain", "a car horn", "siren"]
    assert listed("") == [] and listed("x" * 100) == [] and listed("sand, candy") == ["sand", "candy"]


def test_our_own_model_is_asked_window_by_window(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, half_on: np.ndarray
) -> None:
    from audiollm.families import registry

    class Loud:
        """Stands for a trained model: hears whether a window is loud."""

        def chat_request(self, messages: Any, audio: Waveform, max_tokens: int) -> Any:
            assert messages[-1].role == "user"
            return audio

        def answer_all(self, requests: Sequence[Waveform]) -> list[Any]:
            words = ["hum, tone" if float(wave.samples_CN.mean()) > 0.5 else "" for wave in requests]
            return [type("Said", (), {"text": text}) for text in words]

    monkeypatch.setattr(registry, "load_speech_generator", lambda model, codec: Loud())
    step = Events(EventsConfig(model=tmp_path, window_s=0.5, hop_s=0.5))
    step._tagger = AskedTagger(tmp_path, None, 0.5)
    value = step.process(segment(tmp_path, half_on))
    assert value["events"] == [
        {"label": name, "start_s": 1.0, "end_s": 2.0, "score": 1.0} for name in ("hum", "tone")
    ]
    assert value["tags"] == [{"label": "hum", "score": 0.5}, {"label": "tone", "score": 0.5}]
    silent = step.process(segment(tmp_path, np.zeros(RATE)))
    assert silent == {"events": [], "tags": []}


# ---- YAMNet


@pytest.fixture(scope="module")
def yamnet() -> Events:
    pytest.importorskip("ai_edge_litert", reason="pip install 'audiollm[events]'")
    found = next((SHARED / "judge_models").rglob("yamnet*.tflite"), None)
    if found is None:
        pytest.skip(f"no YAMNet under {SHARED / 'judge_models'}")
    step = Events(EventsConfig(model=found))
    assert step.missing() is None
    step.setup()
    return step


def test_yamnet_hears_what_its_makers_show(yamnet: Events) -> None:
    """The label list inside the file is the one beside it, and the clip that goes with the model is speech."""
    model = yamnet.config.model
    assert model is not None and zipfile.is_zipfile(model)
    beside = next((SHARED / "judge_models").rglob("yamnet_521_labels.txt"))
    assert yamnet._tagger.labels == beside.read_text().splitlines()
    path = model.parent / "speech.wav"
    value = yamnet.process(
        Segment(str(path), 0.0, 0.975, "speech", None, RecordingMetadata(), {}, Listener(str(path)))
    )
    assert value["tags"][0]["label"] == "Speech" and value["events"][0]["label"] == "Speech"


def test_yamnet_tells_where_the_sneeze_is(yamnet: Events, tmp_path: Path) -> None:
    clip = SHARED / "esc10" / "006 - Person sneeze" / "2-130979-A.ogg"
    if not clip.is_file():
        pytest.skip(f"no ESC-10: {clip}")
    from audiollm.audio import load

    sound_N = load(clip).mono().resample(RATE).samples_CN[0].numpy()
    loudest_s = float(np.convolve(sound_N**2, np.ones(RATE // 4), "same").argmax()) / RATE
    value = yamnet.process(segment(tmp_path, sound_N))
    sneeze = next(event for event in value["events"] if event["label"] == "Sneeze")
    assert sneeze["start_s"] - 0.3 <= loudest_s <= sneeze["end_s"] + 0.3
    moved = yamnet.process(segment(tmp_path, np.concatenate([np.zeros(2 * RATE), sound_N])))
    later = next(event for event in moved["events"] if event["label"] == "Sneeze")
    assert later["start_s"] == pytest.approx(sneeze["start_s"] + 2.0, abs=0.5)


def test_yamnet_takes_what_is_shorter_than_a_window(yamnet: Events, tmp_path: Path) -> None:
    value = yamnet.process(segment(tmp_path, np.zeros(800)))
    assert value["events"] == [] and all(0 <= tag["score"] <= 1 for tag in value["tags"])
