"""Bad and long samples in the stage `train`: each is named and counted, and the rest goes on; `strict` stops."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from webdataset import TarWriter

from audiollm.data.chat.template import Template
from audiollm.data.records.opening import open_source
from audiollm.data.records.sample import Sample, write_samples
from audiollm.errors import BadSample, StageError
from audiollm.files.atomic import read_jsonl
from audiollm.files.set_aside import SetAside
from audiollm.supervised.corpus import survey
from audiollm.supervised.corpus.survey import load_survey, save_survey, survey_sources
from tests.audiollm.supervised.train_samples import SAMPLE, SMALL, run_stage, small_template, write_shards


@pytest.fixture(scope="module")
def template() -> Template:
    return small_template()


def test_bad_and_long_samples_are_named_and_the_rest_goes_on(
    tmp_path: Path, template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_shards(tmp_path / "shards", 7, frames=20)
    with (folder / "more.jsonl").open("w") as file:
        file.write(SAMPLE.model_copy(update={"id": "uncoded"}).model_dump_json() + "\n{broken\n")
    sources = [open_source(folder), open_source(folder / "more.jsonl")]
    aside = SetAside(tmp_path / "set_aside.jsonl", "train")
    lengths = [template.length(SAMPLE.messages, [20 + i]) for i in range(7)]
    found = survey_sources(sources, template, lengths[4], "refuse", aside, lambda: None)
    assert aside.counts == {"too long": 2, "missing codes": 1, "wrong JSON": 1}
    assert found.counts() == {"whole": 5, "refused": 2, "bad": 2}
    assert found.rows[0].tolist() == [*lengths[:5], 0, 0] and found.used(1, held_out=False).size == 0
    cut = survey_sources(
        sources, template, lengths[4], "cut", SetAside(tmp_path / "b.jsonl", "train"), lambda: None
    )
    assert cut.counts()["cut short"] == 2 and cut.rows[0].tolist()[5:] == [lengths[4]] * 2
    save_survey(tmp_path / "survey.safetensors", cut)
    again = load_survey(tmp_path / "survey.safetensors")
    assert again.words == cut.words == ("audio", "generate", "seven", "speaker", "theo")
    monkeypatch.setattr(survey, "MAX_WORDS", 4)
    quiet = SetAside(tmp_path / "d.jsonl", "train")
    assert survey_sources(sources, template, lengths[4], "cut", quiet, lambda: None).words is None
    assert again.counts() == cut.counts() and again.speakers == cut.speakers == ("voice0", "voice1")
    with pytest.raises(BadSample, match="longer than"):
        survey_sources(
            sources,
            template,
            lengths[4],
            "refuse",
            SetAside(tmp_path / "c.jsonl", "train", strict=True),
            lambda: None,
        )


def test_samples_without_an_answer_and_held_out_splits(tmp_path: Path, template: Template) -> None:
    """Nothing is learned from a conversation without the assistant; `validation`, `dev` and their like are held out."""
    said = SAMPLE.messages[1]
    answered = [said, said.model_copy(update={"role": "assistant"})]
    splits = ["train", "validation", "dev-clean", "test", "development", None]
    samples = [
        Sample(id=f"s{n}", task="chat", messages=answered, metadata={} if split is None else {"split": split})
        for n, split in enumerate(splits)
    ]
    unanswered = Sample(id="asked", task="chat", messages=[said])
    write_samples(tmp_path / "samples.jsonl", [*samples, unanswered])
    aside = SetAside(tmp_path / "set_aside.jsonl", "train")
    source = open_source(tmp_path / "samples.jsonl")
    found = survey_sources([source], template, 200, "cut", aside, lambda: None)
    assert found.used(0, held_out=False).tolist() == [0, 5]
    assert found.used(0, held_out=True).tolist() == [1, 2, 3, 4]
    assert [(row["id"], row["kind"]) for row in aside.rows] == [("asked", "no answer")]


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
    shards: dict[str, Any] = {"samples": [str(good), str(odd)], "shape": SMALL, "too_long": "refuse"}
    if strict:
        with pytest.raises(StageError, match="mend or remove it"):
            run_stage(tmp_path / "run", **shards, strict=True)
        return
    figures = run_stage(tmp_path / "run", **shards, max_length=128)
    kinds = {row["kind"] for row in read_jsonl(tmp_path / "run" / "set_aside.jsonl")}
    assert {"wrong JSON", "text encoding", "truncated tar", "too long"} <= kinds
    assert kinds & {"missing codes", "missing audio"} and kinds & {"codes out of range", "does not compile"}
    assert figures["steps"] == 12 and figures["samples_refused"] == 1
