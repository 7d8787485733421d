"""`audiollm export --to transformers`: what transformers' own classes load, and what they cannot hold."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from audiollm.data.text.tokenizer import train_text_tokenizer
from audiollm.errors import ConfigError
from audiollm.files.atomic import write_json
from audiollm.generation.speaking.generator import Generator
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.hub import save_pretrained
from audiollm.publish import export_command, transformers_check
from audiollm.publish.incomplete import INCOMPLETE
from recipes.finetune_higgs.random_weights import BOOKS, CODES, write_tokenizer
from tests.audiollm.publish.push_hub import PushHub, use_push_hub
from tests.audiollm.publish.test_push import front_of, push

SHAPE = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16}


def write_model(folder: Path, **variant: Any) -> None:
    """A model of random weights that is sure of its codes, and that ends after some frames."""
    torch.manual_seed(0)
    words = train_text_tokenizer(
        ["system user assistant Generate audio following instruction one two"] * 3, 320
    )
    shape = {**SHAPE, "codebook_size": CODES + 2, "num_codebooks": BOOKS, "intermediate_size": 48, **variant}
    model = DualFFN(DualFFNConfig(words.get_vocab_size(), **shape))  # type: ignore[arg-type]
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    save_pretrained(model, folder, words, codec=folder.parents[1] / "train_tokenizer" / "model")
    write_json(folder / "speakers.json", ["anna"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "higgs"
    torch.manual_seed(0)
    write_tokenizer(folder / "train_tokenizer" / "model")
    write_model(folder / "train" / "model")
    return folder


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exports") / "out"
    result = export(run / "train", out)
    assert result.exit_code == 0, result.exception
    assert "3 prompts equal, greedy codes of " in result.output
    return out


def export(folder: Path, out: Path, *words: object) -> Result:
    app = typer.Typer()
    app.command()(export_command.export)
    return CliRunner().invoke(app, [str(folder), "--to", "transformers", "-o", str(out), *map(str, words)])


def test_transformers_speaks_our_codes_from_the_exported_folder(run: Path, exported: Path) -> None:
    processor: Any = transformers.AutoProcessor.from_pretrained(exported)
    model = transformers.HiggsAudioV2ForConditionalGeneration.from_pretrained(exported).eval()
    generator = Generator.from_pretrained(run / "train")
    chat = [
        {"role": "system", "content": [{"type": "text", "text": "Generate audio following instruction."}]},
        {"role": "user", "content": [{"type": "text", "text": "two one"}]},
    ]
    inputs = processor.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    rows_FK = model.generate(**inputs, max_new_tokens=30, do_sample=False)[0]
    start = int((rows_FK == CODES).all(-1).nonzero()[-1]) + 1
    request = replace(transformers_check._greedy_request("two one"))
    codes_KT = generator.engine([request]).run([request])[0].codes_KT
    theirs_KT = torch.stack([rows_FK[start + k : start + k + 12, k] for k in range(BOOKS)])
    assert torch.equal(theirs_KT, codes_KT[:, :12])
    ours = generator.codec.decode(codes_KT)
    assert torch.allclose(ours, processor.audio_tokenizer.decode(codes_KT[None]).audio_values[0], atol=1e-4)


def test_the_exported_folder_is_whole(run: Path, exported: Path) -> None:
    assert not (exported / INCOMPLETE).exists()
    config = json.loads((exported / "config.json").read_text())
    assert config["audio_tokenizer_subdir"] == "audio_tokenizer" and "audio_tokenizer_id" not in config
    again = Generator.from_pretrained(exported)  # our engine finds the codec beside the model
    assert again.speakers == ("anna",) or list(again.speakers) == ["anna"]
    assert (exported / "model.safetensors").stat().st_size == (
        run / "train/model/model.safetensors"
    ).stat().st_size


def test_a_pushed_export_loads_in_transformers_as_its_card_says(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PushHub(tmp_path / "cache") as hub:
        use_push_hub(hub, monkeypatch)
        result = push(exported, "me/voice", "--license", "mit")
        assert result.exit_code == 0, result.exception
        card = hub.files("me/voice")["README.md"]
        assert "INCOMPLETE" not in result.output
        code = card.decode().partition("```python\n")[2].partition("```")[0]
        assert 'from_pretrained("me/voice"' in code
        names: dict[str, Any] = {}
        exec(code, names)
        assert names["processor"].audio_tokenizer is names["codec"]
        assert front_of(card)["pipeline_tag"] == "text-to-speech"


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        ({"qk_norm": True}, "no normalised heads"),
        ({"audio_ffn_layers": (1,)}, "no audio feed-forwards in some layers alone"),
        ({"sliding_window": 8}, "no a sliding window"),
    ],
)
def test_variants_that_transformers_lacks_are_refused(
    run: Path, tmp_path: Path, variant: dict[str, Any], reason: str
) -> None:
    write_model(tmp_path / "r" / "train" / "model", **variant)
    error = export(tmp_path / "r" / "train", tmp_path / "out", "--codec", run / "train_tokenizer").exception
    assert isinstance(error, ConfigError)
    assert reason.removeprefix("no ") in error.message and "audiollm serve" in error.remedy
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("trained", "reason"), [({"phrase_words": 4}, "phrases"), ({"chunk_frames": 12}, "while it listens")]
)
def test_orders_that_transformers_generate_lacks_are_refused(
    run: Path, tmp_path: Path, trained: dict[str, int], reason: str
) -> None:
    shutil.copytree(run / "train", tmp_path / "train")
    write_json(tmp_path / "train/model/trained.json", trained)
    error = export(tmp_path / "train", tmp_path / "out", "--codec", run / "train_tokenizer").exception
    assert isinstance(error, ConfigError) and reason in error.message and "audiollm" in error.remedy


def test_a_native_codec_is_refused_with_the_way_that_works(run: Path, tmp_path: Path) -> None:
    from tests.audiollm.publish.released_run import write_codec

    write_codec(tmp_path / "codec")
    error = export(run / "train", tmp_path / "out", "--codec", tmp_path / "codec").exception
    assert isinstance(error, ConfigError) and "audiollm_tokenizer" in error.message
    assert "audiollm serve" in error.remedy and "preset: higgs" in error.remedy


def test_an_export_that_answers_otherwise_is_removed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One weight differs in the exported folder, as a faulty writer would leave it."""
    from audiollm.publish import transformers_export

    write = transformers_export.write_transformers_folder

    def write_wrongly(source: transformers_export.ExportSource, out: Path) -> None:
        write(source, out)
        weights = load_file(out / "model.safetensors")
        weights["model.layers.0.mlp.up_proj.weight"][0] += 1
        weights["model.layers.0.audio_mlp.up_proj.weight"][0] += 1
        save_file(weights, out / "model.safetensors", {"format": "pt"})

    monkeypatch.setattr(transformers_export, "write_transformers_folder", write_wrongly)
    error = export(run / "train", tmp_path / "out").exception
    assert isinstance(error, ConfigError) and "logits differ" in error.message
    assert not (tmp_path / "out").exists()


def test_rows_are_compared_until_transformers_ends_an_answer_in_another_way() -> None:
    """Three codebooks, BOS 8, EOS 9. The codes of the frames are 1, those behind the end what the model draws."""
    rows = [[1, 8, 8], [1, 1, 8], [1, 1, 1], [9, 1, 1], [9, 9, 1], [9, 9, 9]]

    def valid_rows(**changed: list[int]) -> int:
        changes = {int(row[3:]): codes for row, codes in changed.items()}
        rows_FK = torch.tensor([changes.get(row, codes) for row, codes in enumerate(rows)])
        return transformers_check._valid_rows(rows_FK, 8)

    assert valid_rows() == len(rows) + 3
    assert valid_rows(row4=[9, 1, 1]) == 5  # the second codebook goes on for a row
    assert valid_rows(row5=[9, 9, 1]) == 6
    assert valid_rows(row2=[1, 9, 1]) == valid_rows(row2=[1, 1, 8]) == 2  # our engine draws none of these
    assert valid_rows(row3=[9, 9, 1]) == 3
    assert valid_rows(row4=[9, 9, 9]) == 4


def test_a_folder_that_holds_something_stays(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    error = export(run / "train", tmp_path / "out").exception
    assert isinstance(error, ConfigError) and "not empty" in error.message
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"
