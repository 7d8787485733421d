"""`audiollm push` against a hub on this machine: the right files and card, nothing twice, cuts, and no secrets."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from huggingface_hub import ModelCardData
from huggingface_hub.repocard_data import model_index_to_eval_results
from typer.testing import CliRunner, Result

from audiollm.audio import load
from audiollm.errors import ConfigError
from audiollm.files.atomic import write_json, write_jsonl
from audiollm.generation.speaking.generator import Generator
from audiollm.hub_models.folders import hub_access, hub_folder
from audiollm.publish import push_command
from audiollm.publish.corpus_release import _refusals_table, _stage_settings
from audiollm.publish.upload import without_secrets
from tests.audiollm.models.tiny_audio_llms import save_tiny
from tests.audiollm.publish.push_hub import TOKEN, PushHub, use_push_hub
from tests.audiollm.publish.released_run import write_corpus, write_run, write_stage

NAME = "me/digits"
MODEL_FILES = {
    "README.md", "audio_tokenizer/config.json", "audio_tokenizer/model.safetensors", "chat_template.jinja",
    "config.json", "generation_config.json", "model.safetensors", "preprocessor_config.json",
    "processor_config.json", "speakers.json", "tokenizer.json", "tokenizer_config.json",
}  # fmt: skip
SAMPLES = {f"samples/generate/clip{number}.wav" for number in range(6)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    write_run(folder)
    write_corpus(folder)
    return folder


@pytest.fixture()
def hub(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> Iterator[PushHub]:
    """No log of its pushes has a secret, on whatever level."""
    caplog.set_level("DEBUG", logger="huggingface_hub")
    monkeypatch.chdir(tmp_path)
    with PushHub(tmp_path / "cache") as running:
        use_push_hub(running, monkeypatch)
        yield running
    logs = caplog.text + "".join(capfd.readouterr())
    assert TOKEN not in logs and "Signature=secret" not in logs


def push(*words: object) -> Result:
    """The command; whatever it prints or raises has no secret."""
    app = typer.Typer()
    app.command()(push_command.push)
    result = CliRunner().invoke(app, [*map(str, words)])
    text = result.output + str(result.exception)
    assert TOKEN not in text and "Signature=secret" not in text
    return result


def front_of(card: bytes) -> dict[str, Any]:
    front: dict[str, Any] = yaml.safe_load(card.decode().split("---\n")[1])
    return front


def test_a_model_goes_up_with_its_codec_and_samples_and_not_twice(made: Path, hub: PushHub) -> None:
    stage = made / "runs/digits/train"
    assert push(stage, NAME, "--license", "cc-by-4.0").exit_code == 0
    assert hub.files(NAME).keys() == MODEL_FILES | SAMPLES
    assert NAME in hub.private
    assert hub.files(NAME)["model.safetensors"] == (stage / "model/model.safetensors").read_bytes()
    assert str(made) not in b"".join(hub.files(NAME).values()).decode("latin-1")
    requests = len(hub.writes)
    again = push(stage / "model", NAME, "--license", "cc-by-4.0")
    assert "nothing was sent" in again.output
    assert len(hub.writes) == requests
    assert len(hub.commits[NAME]) == 2  # the empty one, and that of the push


def test_what_stays_is_named_with_the_reason(made: Path, hub: PushHub) -> None:
    output = push(made / "runs/digits/train", NAME, "--license", "mit", "--dry-run").output
    for line in (
        "optimizer.safetensors (tensors that are not the model's weights)",
        "training_args.bin (not on the list of files that go up)",
        "link.json (a link)",
        "of_another (it judges another model)",
    ):
        assert f"left out: {line}" in output
    assert "model.safetensors" in output and "library_name: audiollm" in output
    assert hub.requests == []


def test_the_card_has_scores_with_conditions_and_intervals(made: Path, hub: PushHub) -> None:
    push(made / "runs/digits/train", NAME, "--license", "cc-by-4.0", "--language", "en", "--dataset", "a/b")
    card = hub.files(NAME)["README.md"]
    front = front_of(card)
    assert front["pipeline_tag"] == "text-to-speech" and front["library_name"] == "audiollm"
    assert (front["license"], front["language"], front["datasets"]) == ("cc-by-4.0", ["en"], ["a/b"])
    assert front["base_model"] == ["big/words"]
    name, results = model_index_to_eval_results(front["model-index"])
    assert name == "digits"
    scores = {result.metric_name: result for result in results}
    right = scores["generated, classifier: accuracy (95 % interval 0.430 to 0.930)"]
    assert right.metric_value == 0.75
    assert right.metric_args == {
        "low": 0.43, "high": 0.93, "n": 8, "conditions": "suite tts, judge classifier, seed 3",
    }  # fmt: skip
    assert scores.keys() == {
        right.metric_name,
        "generated: not stopped",
    }  # none of real recordings, none of by_text
    text = card.decode()
    assert "| real, classifier: accuracy | 1.000 |" in text  # which stands beside them in the text
    assert "the recognizer also wrote the texts" in text
    assert f'<audio controls src="{hub.url}/{NAME}/resolve/main/samples/generate/clip0.wav">' in text
    assert f"audiollm serve {NAME} --download" in text
    assert "| Begun from | big/words@aaaaaaaa" in text and "not stated" not in text
    ModelCardData(**{key.replace("-", "_"): value for key, value in front.items()})


def test_the_base_is_found_through_the_stages_before(made: Path, hub: PushHub, tmp_path: Path) -> None:
    shutil.copytree(made / "runs", tmp_path / "runs", symlinks=True)
    run = tmp_path / "runs/digits"
    shutil.copytree(run / "train/model", run / "aligned/model", symlinks=True)
    write_stage(
        run / "aligned", "train_preference", start="runs/digits/train", reference=str(run / "train/model")
    )
    output = push(run / "aligned", NAME, "--license", "mit", "--dry-run").output
    assert "base_model:\n- big/words\n" in output
    assert "left out: evaluate (it judges another model)" in output


def test_a_pushed_model_speaks_from_its_name(made: Path, hub: PushHub) -> None:
    stage = made / "runs/digits/train"
    push(stage, NAME, "--license", "cc-by-4.0")
    with hub_access(download=True):
        folder = hub_folder(NAME)
    assert (folder / "audio_tokenizer/model.safetensors").is_file()
    clips = [
        Generator.from_pretrained(place).speak("one", seed=1, max_duration_s=0.4) for place in (folder, stage)
    ]
    assert clips[0].samples_1N.equal(clips[1].samples_1N)


def test_nothing_goes_up_without_a_licence(made: Path, hub: PushHub, tmp_path: Path) -> None:
    stage = made / "runs/digits/train"
    with pytest.raises(ConfigError, match="without a licence"):
        raise push(stage, NAME).exception or AssertionError
    with pytest.raises(ConfigError, match="no licence that the hub knows"):
        raise push(stage, NAME, "--license", "cc-by-5.0").exception or AssertionError
    assert hub.requests == []
    (tmp_path / "terms.txt").write_text("Licence of the Digits\n\nDo as you like.\n")
    assert push(stage, NAME, "--license", tmp_path / "terms.txt").exit_code == 0
    front = front_of(hub.files(NAME)["README.md"])
    assert (front["license"], front["license_name"]) == ("other", "Licence of the Digits")
    assert hub.files(NAME)["LICENSE"].startswith(b"Licence of the Digits")


def test_a_codec_of_the_hub_is_named_and_not_sent(made: Path, hub: PushHub, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--codec/snapshots" / ("b" * 40)
    shutil.copytree(made / "runs/digits/train_tokenizer/model", snapshot)
    shutil.copytree(made / "runs/digits/train/model", tmp_path / "model", symlinks=True)
    settings = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps({**settings, "audio_tokenizer_id": str(snapshot)}))
    assert push(tmp_path / "model", NAME, "--license", "mit").exit_code == 0
    files = hub.files(NAME)
    assert not any(name.startswith("audio_tokenizer/") for name in files)
    assert json.loads(files["config.json"])["audio_tokenizer_id"] == "org/codec"
    assert f"audiollm serve {NAME} --codec org/codec --download" in files["README.md"].decode()


def test_a_model_that_lacks_a_shard_is_refused(made: Path, hub: PushHub, tmp_path: Path) -> None:
    shutil.copytree(made / "runs/digits/train/model", tmp_path / "model", symlinks=True)
    weights = tmp_path / "model/model.safetensors"
    weights.rename(tmp_path / "model/model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(index))
    refused = push(tmp_path / "model", NAME, "--license", "mit")
    assert "model-00002-of-00002.safetensors is missing" in str(refused.exception)


def test_a_card_of_a_person_stays_and_states_the_licence(made: Path, hub: PushHub, tmp_path: Path) -> None:
    shutil.copytree(made / "runs/digits/train/model", tmp_path / "model", symlinks=True)
    (tmp_path / "model/README.md").write_text(
        "---\nlicense: mit\nlanguage: [fr]\n---\n# Mine\n\nSpoken with care.\n"
    )
    assert push(tmp_path / "model", NAME, "--no-codec").exit_code == 0
    card = hub.files(NAME)["README.md"]
    assert (front_of(card)["license"], front_of(card)["language"]) == ("mit", ["fr"])
    assert front_of(card)["pipeline_tag"] == "text-to-speech" and "Spoken with care." in card.decode()
    assert not any(name.startswith("audio_tokenizer/") for name in hub.files(NAME))


def test_a_cut_upload_says_so_and_goes_on(made: Path, hub: PushHub) -> None:
    stage = made / "runs/digits/train"
    hub.cut_after = (stage / "model/model.safetensors").stat().st_size - 1000  # the small files arrive
    cut = push(stage, NAME, "--license", "cc-by-4.0")
    assert isinstance(cut.exception, ConfigError)
    assert "the upload was cut" in str(cut.exception) and "it goes on" in cut.exception.remedy
    assert hub.files(NAME) == {}  # nothing of half a push is seen
    hub.cut_after = None
    arrived = list(hub.uploads)
    assert arrived
    assert push(stage, NAME, "--license", "cc-by-4.0").exit_code == 0
    assert hub.files(NAME).keys() == MODEL_FILES | SAMPLES
    assert len(set(hub.uploads)) == len(hub.uploads)  # what had arrived was not sent again


def test_a_refused_login_shows_no_token(made: Path, hub: PushHub, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = TOKEN.replace("secret", "secretWrong")
    monkeypatch.setenv("HF_TOKEN", wrong)
    result = push(made / "runs/digits/train", NAME, "--license", "mit")
    assert isinstance(result.exception, ConfigError) and "hf auth login" in result.exception.remedy
    assert wrong not in result.output + str(result.exception)
    assert without_secrets(f"at {hub.url}/x?sig=1 by {wrong}") == f"at {hub.url}/x by ***"


def test_who_may_see_it_never_changes_unasked(made: Path, hub: PushHub) -> None:
    stage = made / "runs/digits/train"
    assert push(stage, NAME, "--license", "mit", "--public").exit_code == 0
    assert NAME not in hub.private
    refused = push(stage, NAME, "--license", "mit")
    assert isinstance(refused.exception, ConfigError) and "exists and is public" in str(refused.exception)


def test_old_weights_are_replaced_and_those_of_others_never(made: Path, hub: PushHub) -> None:
    stage = made / "runs/digits/train"
    push(stage, NAME, "--license", "mit")
    hub.publish(NAME, {**hub.files(NAME), "model-00001-of-00002.safetensors": b"old", "notes.txt": b"mine"})
    assert "1 old files removed" in push(stage, NAME, "--license", "mit").output
    assert hub.files(NAME).keys() == MODEL_FILES | SAMPLES | {"notes.txt"}
    hub.publish("me/other", {"pytorch.safetensors": b"theirs", "README.md": b"# Theirs"})
    hub.private.add("me/other")
    refused = push(stage, "me/other", "--license", "mit")
    assert "holds weights of another model" in str(refused.exception)
    assert hub.files("me/other").keys() == {"pytorch.safetensors", "README.md"}


def test_damaged_weights_and_linked_ones_are_refused(made: Path, hub: PushHub, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(made / "runs/digits/train/model", folder, symlinks=True)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "not whole" in str(push(folder, NAME, "--license", "mit").exception)
    weights.unlink()
    weights.symlink_to(made / "runs/digits/train/model/model.safetensors")
    assert "a link" in str(push(folder, NAME, "--license", "mit").exception)
    assert hub.requests == []


def test_a_reward_model_is_refused(made: Path, hub: PushHub, tmp_path: Path) -> None:
    """Its head is beside the usual weights: without it the rest would look like a model that answers."""
    shutil.copytree(made / "runs/digits/train/model", tmp_path / "model", symlinks=True)
    (tmp_path / "model/reward.json").write_text("{}")
    assert "its head would stay here" in str(push(tmp_path / "model", NAME, "--license", "mit").exception)
    assert hub.requests == []


def test_a_codec_goes_up_alone(made: Path, hub: PushHub) -> None:
    assert push(made / "runs/digits/train_tokenizer", "me/codec", "--license", "mit").exit_code == 0
    assert hub.files("me/codec").keys() == {"README.md", "config.json", "model.safetensors"}
    assert front_of(hub.files("me/codec")["README.md"])["pipeline_tag"] == "feature-extraction"


def test_a_corpus_goes_up_without_recordings(made: Path, hub: PushHub) -> None:
    assert push(made / "corpus", "me/corpus", "--license", "cc0-1.0").exit_code == 0
    files = hub.files("me/corpus")
    assert files.keys() == {"README.md", "segments.jsonl"}
    rows = [json.loads(line) for line in files["segments.jsonl"].splitlines()]
    assert [row["file"] for row in rows] == ["a.wav", "a.wav", "b.wav"]
    assert all("path" not in row and row["text"] == "/a/b or not" for row in rows)
    assert rows[0]["measured"] == {"probe": {"archive": "all.tar"}}
    assert str(made) not in b"".join(files.values()).decode()
    card = files["README.md"].decode()
    assert front_of(files["README.md"])["language"] == ["en", "de"]
    for row in (
        "| Segments | 3 |", "| Recordings | 2 |", "| Speakers | 1 |", "| en | 0.0001 |", "| Licence | cc0-1.0 |",
        "| segments and files | too quiet | 2 |", "| recognized texts | unsure words | 1 |",
        "| files set aside | not audio | 1 |", "| whisper | 3 |",
    ):  # fmt: skip
        assert row in card
    writes = len(hub.writes)
    assert "nothing was sent" in push(made / "corpus", "me/corpus", "--license", "cc0-1.0").output
    assert len(hub.writes) == writes


def test_a_corpus_of_the_command_has_its_preset_and_counts_nothing_twice(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("annotate:\n  preset: emilia\n")
    write_json(tmp_path / "funnel.json", {"reasons": {"sounds bad": 11}})
    aside = [{"kind": "sounds bad", "place": "a.wav"}, {"kind": "not audio", "place": "b.txt"}]
    write_jsonl(tmp_path / "set_aside.jsonl", aside)
    assert _stage_settings(tmp_path) == {"preset": "emilia"}
    table = _refusals_table(tmp_path)
    assert table.count("sounds bad") == 1 and "| files set aside | not audio | 1 |" in table


def test_a_corpus_with_corrections_that_no_annotation_used_is_refused_and_names_of_people_stay(
    made: Path, hub: PushHub, tmp_path: Path
) -> None:
    shutil.copytree(made / "corpus", tmp_path / "corpus")
    segments, corrections = tmp_path / "corpus/segments.jsonl", tmp_path / "corpus/corrections.jsonl"
    rows = [json.loads(line) for line in segments.read_text().splitlines()]
    rows[0]["correction"] = {"by": "Anna Example", "fields": {"text": rows[0]["text"]}}
    segments.write_text("".join(json.dumps(row) + "\n" for row in rows))
    corrections.write_text("")
    os.utime(corrections, ns=(segments.stat().st_mtime_ns + 1,) * 2)
    refused = push(tmp_path / "corpus", "me/corrected", "--license", "cc0-1.0")
    assert "lacks corrections" in str(refused.exception) and "annotate again" in str(refused.exception)
    os.utime(corrections, ns=(segments.stat().st_mtime_ns - 1,) * 2)
    assert push(tmp_path / "corpus", "me/corrected", "--license", "cc0-1.0").exit_code == 0
    pushed = hub.files("me/corrected")["segments.jsonl"].decode()
    assert '"correction": {"fields"' in pushed and "Anna" not in pushed


def test_recordings_go_up_as_segments_where_they_are_asked_for(
    made: Path, hub: PushHub, tmp_path: Path
) -> None:
    words = (made / "corpus", "me/corpus", "--license", "cc0-1.0", "--with-audio")
    assert push(*words).exit_code == 0
    files = hub.files("me/corpus")
    assert files.keys() == {
        "README.md",
        "metadata.jsonl",
        *(f"audio/{name}.flac" for name in ("a_0", "a_1", "b_2")),
    }
    row = json.loads(files["metadata.jsonl"].splitlines()[1])
    assert row["file_name"] == "audio/a_1.flac"
    (tmp_path / "clip.flac").write_bytes(files["audio/a_1.flac"])
    clip, whole = load(tmp_path / "clip.flac"), load(made / "raw/a.wav")
    assert clip.samples_CN.equal(whole.samples_CN[:, 12_000:18_000])
    writes = len(hub.writes)
    push(*words)
    assert len(hub.writes) == writes


def test_folders_and_names_that_cannot_be_pushed(made: Path, hub: PushHub) -> None:
    for words, problem in (
        (("digits",), "is no name on a hub"),
        (("../x/y",), "is no name on a hub"),
        ((NAME, "--with-audio"), "is of annotated corpora"),
        ((NAME, "--scores", made), "no results.json"),
        ((NAME, "--language", "English"), "no code of a language"),
        ((NAME, "--dataset", "https://a.b/c"), "is no name on a hub"),
    ):
        result = push(made / "runs/digits/train", *words, "--license", "mit")
        assert isinstance(result.exception, ConfigError) and problem in str(result.exception)
    result = push(made / "runs/digits", NAME, "--license", "mit")
    assert "the folder of a whole run" in str(result.exception)
    assert hub.requests == []


def test_an_audio_llm_of_transformers_goes_up(hub: PushHub, tmp_path: Path) -> None:
    folder = tmp_path / "listener"
    save_tiny("qwen2_audio", folder)
    (folder / "README.md").write_text("---\nbase_model: /home/me/x\n---\n# x\n\n[More Information Needed]\n")
    assert push(folder, "me/ears", "--license", "apache-2.0", "--base", "Qwen/Qwen2-Audio-7B").exit_code == 0
    files = hub.files("me/ears")
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= files.keys()
    front, card = front_of(files["README.md"]), files["README.md"].decode()
    assert (front["library_name"], front["pipeline_tag"]) == ("transformers", "audio-text-to-text")
    assert front["base_model"] == ["Qwen/Qwen2-Audio-7B"]
    assert "as `Qwen2AudioForConditionalGeneration`" in card and "More Information Needed" not in card
    assert "audiollm serve me/ears --download" in card


def test_scores_of_other_weights_are_left_out_and_folders_of_scores_added(
    made: Path, hub: PushHub, tmp_path: Path
) -> None:
    shutil.copytree(made / "runs", tmp_path / "runs", symlinks=True)
    run = tmp_path / "runs/digits"
    for stage in (
        "generate",
        "evaluate",
    ):  # the settings name the folders of this copy, from a working directory
        path = run / stage / "stage.json"
        path.write_text(path.read_text().replace(f"{made}/", ""))
    words = (run / "train", NAME, "--license", "mit", "--dry-run")
    assert "generated, classifier: accuracy" in push(*words).output
    later = (run / "evaluate/stage.json").stat().st_mtime + 10
    os.utime(run / "train/model/model.safetensors", (later, later))
    outcome = {
        "suite": "asr",
        "recognizer": "/home/me/models/whisper-base",
        "words": {"en": {"rate": 0.125, "n": 40}},
    }
    (tmp_path / "librispeech").mkdir()
    (tmp_path / "librispeech/results.json").write_text(json.dumps(outcome))
    output = push(*words, "--scores", tmp_path / "librispeech").output
    assert "left out: evaluate (it is older than the weights" in output
    assert "generated, classifier: accuracy" not in output
    assert "| words, en: rate | 0.125 | – | 40 |" in output
    assert "Conditions: suite asr, recognizer whisper-base." in output


def test_the_codec_of_another_training_is_refused(made: Path, hub: PushHub, tmp_path: Path) -> None:
    shutil.copytree(made / "runs/digits/train", tmp_path / "train", symlinks=True)
    trained = tmp_path / "train/model/trained.json"
    trained.write_text(json.dumps({"codec_digest": "0" * 16}))
    refused = push(tmp_path / "train", NAME, "--license", "mit")
    assert isinstance(refused.exception, ConfigError) and "another codec than that" in str(refused.exception)
    assert hub.requests == []


def test_a_card_of_a_person_is_not_doubled_when_it_comes_back(
    made: Path, hub: PushHub, tmp_path: Path
) -> None:
    shutil.copytree(made / "runs/digits/train_tokenizer/model", tmp_path / "codec")
    (tmp_path / "codec/README.md").write_text("---\nlicense: mit\n---\n# Mine\n\nWords of mine.\n")
    (tmp_path / "scores").mkdir()
    (tmp_path / "scores/results.json").write_text(json.dumps({"pesq": {"mean": 2.5, "n": 9}}))
    words = (tmp_path / "codec", NAME, "--scores", tmp_path / "scores")
    assert push(*words).exit_code == 0
    card = hub.files(NAME)["README.md"]
    (tmp_path / "codec/README.md").write_bytes(card)
    assert "nothing was sent" in push(*words).output
    assert card.decode().count("## Scores") == 1 and "Words of mine." in card.decode()
