"""Bad input through the real commands, with a model and a codec in folders: one clear line and exit code 2 with nothing
written, or a fallback that is told in a line on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from audiollm.audio import load, save
from audiollm.codec import codec_digest, load_codec
from audiollm.commands import cli
from audiollm.data.text.tokenizer import SPEAKERS_FILE, TRAINED_FILE, train_text_tokenizer
from audiollm.files.atomic import read_json, write_json
from audiollm.generation.speaking.generator import Generator
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.hub import save_pretrained
from tests.audiollm.supervised.train_samples import write_shards
from tokenizer.native.model import AudioTokenizer, TokenizerConfig

RATE = 24_000
BOOKS, CODES = 4, 32
TEXTS = ["system user assistant Generate audio following instruction Speaker theo one two seven"] * 3


class Seen(NamedTuple):
    """Output of a command as a person sees it."""

    code: int
    out: str
    err: str


Run = Callable[..., Seen]


def write_codec(folder: Path, books: int = BOOKS, seed: int = 0) -> None:
    shape = {"mel_hidden_size": 16, "hidden_size": 16, "encoder_layers": (1, 1), "decoder_layers": (1, 1)}
    torch.manual_seed(seed)
    config = TokenizerConfig(num_codebooks=books, codebook_size=CODES, latent_dim=8, **shape)  # type: ignore[arg-type]
    AudioTokenizer(config).save_pretrained(folder)


def write_model(folder: Path) -> None:
    words = train_text_tokenizer(TEXTS, 300)
    torch.manual_seed(0)
    save_pretrained(
        DualFFN(DualFFNConfig(words.get_vocab_size(), BOOKS, CODES + 2, 32, 2, 2, 2, 16, 64)), folder, words
    )
    write_json(folder / SPEAKERS_FILE, ["anna", "bruno"])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs `audiollm` beside a run's folder `r`, with a voice in me.wav."""
    write_model(tmp_path / "r/train/model")
    write_codec(tmp_path / "r/train_tokenizer/model")
    save(tmp_path / "me.wav", 0.3 * torch.sin(torch.arange(RATE) * 0.05)[None], RATE)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: Any) -> Seen:
        monkeypatch.setattr(sys, "argv", ["audiollm", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        out, err = capsys.readouterr()
        return Seen(code, out, err)

    yield run


def say(run: Run, *arguments: Any) -> Seen:
    return run("generate", "--model", "r/train", "--max-duration-s", 0.6, "-o", "out/a.wav", *arguments)


def refused(seen: Seen, *said: str) -> None:
    """One message, which says all of this, and nothing written."""
    assert seen.code == 2 and seen.out == "", seen
    assert 1 <= len(seen.err.strip().splitlines()) <= 2, seen.err
    for words in said:
        assert words in seen.err
    assert not Path("out").exists()


def told(seen: Seen, *said: str) -> None:
    """It went on, and said so on stderr."""
    assert seen.code == 0, seen
    for words in said:
        assert words in seen.err
    assert load("out/a.wav").duration_s > 0
    rmtree("out")


# The list of cases


@pytest.mark.parametrize("level", [0.0, 1e-5])
def test_a_reference_of_silence(run: Run, level: float) -> None:
    save(Path("quiet.wav"), level * torch.randn(1, 3 * RATE), RATE)
    refused(
        say(run, "--text", "one", "--reference", "quiet.wav"), "quiet.wav", "only silence", "give a recording"
    )


def test_a_reference_of_a_click(run: Run) -> None:
    click_1N = torch.zeros(1, 3 * RATE)
    click_1N[0, RATE : RATE + 200] = 0.5
    save(Path("click.wav"), click_1N, RATE)
    refused(say(run, "--text", "one", "--reference", "click.wav"), "0.0", "too short to be a voice")


def test_a_reference_of_ten_minutes_is_cut_and_asked_about_with_a_note(run: Run) -> None:
    save(Path("long.wav"), 0.3 * torch.sin(torch.arange(600 * 8000) * 0.15)[None], 8000)
    told(
        say(run, "--text", "one", "--reference", "long.wav", "--reference-text", "words"),
        "600 s long",
        "its first 1",
    )
    write_json(Path("r/train/model") / TRAINED_FILE, {"longest_positions": 500})
    save(Path("minute.wav"), 0.3 * torch.sin(torch.arange(60 * 8000) * 0.15)[None], 8000)
    asked = run("ask", "minute.wav", "What?", "--model", "r/train", "--max-tokens", 1)
    assert asked.code == 0 and "trained on has 500: do not rely on the answer" in asked.err
    save(Path("hour.wav"), torch.zeros(1, 601 * 100), 100)
    refused(run("ask", "hour.wav", "What?", "--model", "r/train"), "longer than 600 s")


@pytest.mark.parametrize(("text", "letter"), [("семь", "с"), ("七", "七"), ("one 😀", "😀"), ("सात", "स")])
def test_a_script_that_the_model_never_saw(run: Run, text: str, letter: str) -> None:
    told(say(run, "--text", text), "never saw", letter)


def test_words_that_the_model_was_never_trained_to_say_are_named(run: Run) -> None:
    note = "trained on few words, and these are not among them"
    assert note not in say(run, "--text", "good day").err
    write_json(Path("r/train/model") / TRAINED_FILE, {"words": ["one", "two"]})
    assert note not in say(run, "--text", "One, TWO!").err
    told(say(run, "--text", "one good day"), note, "day, good")
    Path("talk.txt").write_text("Ann: one\nBob: seven\n")
    told(say(run, "--dialogue", "talk.txt"), note, "seven")
    told(say(run, "--text", "seven", "--stream"), note, "seven")
    write_json(Path("r/train/model") / TRAINED_FILE, {"words": None})
    assert note not in say(run, "--text", "one good day").err


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("Ann: one\nBob:\n", "line 2: the turn of Bob is empty"),
        ("[SPEAKER0] one [SPEAKER1]", "line 1: the turn of SPEAKER1 is empty"),
        ("Ann: one\nBob: ?!", "turn 2, of Bob: the text has no word"),
        ('[{"speaker": "Ann"}]', "line 1 has no speaker"),
    ],
)
def test_an_empty_turn(run: Run, script: str, said: str) -> None:
    Path("talk.txt").write_text(script, encoding="utf-8")
    refused(say(run, "--dialogue", "talk.txt"), said)


def test_more_speakers_than_references(run: Run) -> None:
    Path("talk.txt").write_text("[SPEAKER0] one\n[SPEAKER1] two", encoding="utf-8")
    talk = ["--dialogue", "talk.txt", "--reference", "SPEAKER0=me.wav"]
    told(say(run, *talk, "--max-duration-s", 4), "no reference for SPEAKER1: the model chooses the voice")
    told(say(run, *talk, "--together"), "no reference for SPEAKER0, SPEAKER1", "that of SPEAKER0 is not used")


def test_references_for_nobody(run: Run) -> None:
    Path("talk.txt").write_text("[SPEAKER0] one\n[SPEAKER1] two", encoding="utf-8")
    refused(say(run, "--dialogue", "talk.txt", *["--reference", "me.wav"] * 3), "3 references for 2 speakers")
    refused(say(run, "--dialogue", "talk.txt", "--reference", "SPEAKER7=me.wav"), "SPEAKER7: no such speaker")
    refused(say(run, "--text", "one", "--speaker", "anna", "--reference", "me.wav"), "mutually exclusive")


def test_a_checkpoint_with_missing_and_surplus_keys(run: Run) -> None:
    path = Path("r/train/model/model.safetensors")
    weights = load_file(path)
    del weights["model.norm.weight"]
    save_file({**weights, "model.gate.weight": torch.zeros(2)}, path)
    said = ("1 missing (model.norm.weight), 1 surplus (model.gate.weight)", "must be of one model")
    refused(say(run, "--text", "one"), *said)
    refused(run("ask", "me.wav", "What?", "--model", "r/train"), *said)
    shards = write_shards(Path("shards"), 7)
    stage = {"train": {"samples": str(shards), "start": "r/train", "steps": 10}}
    Path("recipe.yaml").write_text(
        json.dumps({"name": "x", "size": "tiny", "stages": [stage]}), encoding="utf-8"
    )
    begun = run("run", "recipe.yaml")
    assert begun.code == 2 and all(words in begun.err for words in said)
    assert not Path("runs/x/train/model").exists()


# Others of their kind


def damage(name: str, content: bytes | str | dict[str, Any]) -> None:
    path = Path(name)
    if isinstance(content, dict):
        write_json(path, {**(read_json(path) if path.exists() else {}), **content})
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("train/model/config.json", "{", ("config.json", "not JSON")),
        ("train/model/config.json", "[1]", ("config.json", "no mapping")),
        ("train/model/config.json", b"\xff\xfe", ("config.json", "not JSON")),
        ("train/model/config.json", {"hidden_size": "wide"}, ("hidden_size: 'wide' is no positive whole",)),
        ("train/model/config.json", {"num_attention_heads": -3}, ("num_attention_heads: -3 is no",)),
        ("train/model/config.json", {"num_hidden_layers": 0}, ("num_hidden_layers: 0 is no",)),
        ("train/model/config.json", {"model_type": "bert"}, ("answers in words alone",)),
        ("train/model/config.json", {"rope_parameters": {"rope_type": "llama3"}}, ("'factor' is missing",)),
        ("train/model/tokenizer.json", "{", ("tokenizer.json", "not a vocabulary")),
        ("train/model/speakers.json", '["anna"', ("speakers.json", "not JSON")),
        ("train/model/trained.json", "{", ("trained.json", "not JSON")),
        ("train/model/trained.json", {"longest_positions": "many"}, ("longest_positions: 'many'",)),
        ("train/model/trained.json", {"text_dropout": 1.5}, ("text_dropout: 1.5",)),
        ("train/model/trained.json", {"codec_digest": 7}, ("codec_digest: 7 is not a string",)),
        ("train/model/generation_config.json", "{", ("generation_config.json", "not JSON")),
        ("train/model/generation_config.json", {"top_p": 2}, ("top_p: 2 is not a valid",)),
        ("train/model/model.safetensors", b"\x10", ("model.safetensors", "not whole")),
        ("train_tokenizer/model/config.json", "{", ("train_tokenizer/model/config.json", "not JSON")),
        (
            "train_tokenizer/model/config.json",
            {"hidden_size": "wide"},
            ("these files do not form a valid model",),
        ),
        (
            "train_tokenizer/model/config.json",
            {"hidden_size": 24},
            ("these files do not form a valid model", "size mismatch"),
        ),
        ("train_tokenizer/model/model.safetensors", b"\x10", ("model.safetensors", "not whole")),
    ],
)
def test_damaged_folders(run: Run, name: str, content: Any, said: tuple[str, ...]) -> None:
    damage(f"r/{name}", content)
    refused(say(run, "--text", "one"), *said)


def test_a_codec_of_the_same_shape_that_is_another(run: Run) -> None:
    """The run's own is known by its digest; before there was one, nothing is known and all goes on."""
    write_codec(Path("other"), seed=1)
    say(run, "--text", "one", "--codec", "other")
    rmtree("out")
    write_json(
        Path("r/train/model") / TRAINED_FILE,
        {"codec_digest": codec_digest(load_codec(Path("r/train_tokenizer/model")))},
    )
    assert say(run, "--text", "one").code == 0
    rmtree("out")
    said = "other  another codec than that of the model r/train/model", "give the folder of the codec"
    refused(say(run, "--text", "one", "--codec", "other"), *said)
    refused(run("ask", "me.wav", "What?", "--model", "r/train", "--codec", "other"), *said)
    rmtree("r/train_tokenizer")
    write_codec(Path("r/train_tokenizer/model"), seed=1)
    refused(say(run, "--text", "one"), "r/train_tokenizer/model  another codec")


def test_weights_of_a_training_that_diverged(run: Run) -> None:
    path = Path("r/train/model/model.safetensors")
    weights = load_file(path)
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, path)
    refused(say(run, "--text", "one"), "model.norm.weight holds values that are no numbers", "diverged")


def test_a_vocabulary_of_another_model(run: Run) -> None:
    words = train_text_tokenizer(TEXTS, 300)
    words.add_tokens(["zebra"])
    words.save("r/train/model/tokenizer.json")
    size = words.get_vocab_size()
    refused(say(run, "--text", "one"), f"a vocabulary of {size} words, and the model has {size - 1}")


def test_an_index_that_is_none(run: Run) -> None:
    Path("r/train/model/model.safetensors").unlink()
    damage("r/train/model/model.safetensors.index.json", {"metadata": {}})
    refused(say(run, "--text", "one"), "index.json", "weight_map")


def test_codecs_that_are_not_the_models(run: Run) -> None:
    write_codec(Path("other"), books=2)
    here = say(run, "--text", "one", "--codec", "other")
    refused(here, f"the codec has 2 codebooks of {CODES} codes", f"{BOOKS} of {CODES}")
    refused(say(run, "--text", "one", "--codec", "nowhere"), "no codec at nowhere")
    refused(say(run, "--text", "one", "--codec", "r/train"), "no such codec: 'higgs_audio_v2'")
    Path("r/train_tokenizer").rename("r/moved")
    refused(say(run, "--text", "one"), "no codec at r/train_tokenizer", "trained with")
    refused(run("ask", "me.wav", "What?", "--model", "r/train"), "no codec at r/train_tokenizer")


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "is empty"), (b"RIFF\0\0\0\0WAVE", "cannot be read as audio"), (None, "is a folder")],
)
def test_recordings_that_are_none(run: Run, content: bytes | None, said: str) -> None:
    path = Path("it.wav")
    path.mkdir() if content is None else path.write_bytes(content)
    refused(say(run, "--text", "one", "--reference", "it.wav"), "it.wav", said)
    refused(run("ask", "it.wav", "What?", "--model", "r/train"), "it.wav", said)


def test_recordings_that_are_not_there(run: Run) -> None:
    refused(say(run, "--text", "one", "--reference", "gone.wav"), "gone.wav: no such file")
    refused(run("ask", "gone.wav", "What?", "--model", "r/train"), "gone.wav: no such file")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("   ", "there is no text"),
        ("😀🎉", "the text has no word: 😀🎉"),
        ("...!?", "the text has no word"),
        ("\u200b\u200c", "the text has no word"),
        ("one\0two", "U+0000 at place 3"),
        ("one\udcff", "not UTF-8"),
        ("one <|AUDIO_OUT|>", "control token <|AUDIO_OUT|>"),
    ],
)
def test_texts_that_cannot_be_said(run: Run, text: str, said: str) -> None:
    refused(say(run, "--text", text), said)


@pytest.mark.parametrize("content", [b"\xff\xfeone", None])
def test_files_that_are_no_text(run: Run, content: bytes | None) -> None:
    path = Path("it.txt")
    path.mkdir() if content is None else path.write_bytes(content)
    refused(say(run, "--text-file", "it.txt"), "it.txt", "give a text file")


@pytest.mark.parametrize("text", ["NaN", "null", "one " * 5000, "x" * 20_000])
def test_texts_that_are_said_though_odd(run: Run, text: str) -> None:
    told(say(run, "--text", text), *(["parts of the text are left out"] if len(text) > 10 else []))


def test_the_parts_of_a_long_text_go_through_the_engine_a_few_at_a_time(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    generator = Generator.from_pretrained("r/train")
    generator.longest_positions = 90  # parts of a second
    answer_all = Generator.answer_all

    def count(self: Generator, requests: list[Any], *rest: Any) -> Any:
        sizes.append(len(requests))
        return answer_all(self, requests, *rest)

    monkeypatch.setattr(Generator, "answer_all", count)
    heard: list[float] = []
    text = " ".join(["One, two one."] * 20)
    speech = generator.speak(text, speaker="anna", on_seconds=heard.append)
    assert len(sizes) > 1 and max(sizes) <= 16 and speech.text == text
    assert heard == sorted(heard)


@pytest.mark.parametrize(
    ("out", "said"),
    [
        (".", "is a folder"),
        ("a.txt", "cannot write"),
        ("me.wav/a.wav", "Not a directory"),
        ("/proc/none/a.wav", "cannot write in /proc"),
        ("-", "only a stream"),
    ],
)
def test_files_that_cannot_be_written(run: Run, out: str, said: str) -> None:
    refused(
        run("generate", "--model", "nothing", "--text", "one", "-o", out), said
    )  # before a model is looked for


def test_a_speaker_where_nothing_is_known_of_speakers(run: Run) -> None:
    refused(say(run, "--text", "one", "--speaker", "ana"), "did you mean 'anna'?")
    (Path("r/train/model") / SPEAKERS_FILE).unlink()
    told(say(run, "--text", "one", "--speaker", "ana"), "whether it knows ana is not known")
