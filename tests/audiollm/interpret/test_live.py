"""Live interpretation: any way of cutting the input hears and says the same; the command, its files and its errors."""

from __future__ import annotations

import itertools
import json
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from audiollm.audio import save
from audiollm.audio.level import running_level
from audiollm.commands.cli import build_app
from audiollm.data.chat.template import Template
from audiollm.data.text.tokenizer import TRAINED_FILE, train_text_tokenizer
from audiollm.errors import ConfigError, StageError
from audiollm.evaluate.interpret.logged_outputs import read_log, write_log
from audiollm.families.registry import load_interpreter
from audiollm.files.atomic import write_json
from audiollm.generation.engine.engine import Engine
from audiollm.generation.engine.request import Event
from audiollm.generation.speaking.generator import Generator
from audiollm.interpret.live.chunk_hearing import ChunkHearing
from audiollm.interpret.live.interpret_command import _Outputs
from audiollm.interpret.live.live_session import LiveAction, LiveOptions, LiveSession
from audiollm.interpret.live.sound_input import LoudSpeaker, file_pieces
from audiollm.interpret.said import SaidPiece
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.hub import save_pretrained
from tokenizer import AudioTokenizer
from tokenizer.native.model import TokenizerConfig

CHUNK = 6


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a tokenizer and a model of random weights that says something now and then."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    codec = AudioTokenizer(
        TokenizerConfig(
            mel_hidden_size=16, hidden_size=16, encoder_layers=(1, 1), decoder_layers=(1, 1), latent_dim=8,
            num_codebooks=2, codebook_size=16, step_frames=2,
        )
    ).eval()  # fmt: skip
    codec.save_pretrained(folder / "train_tokenizer")
    template = Template(train_text_tokenizer(["one two", "system user assistant"] * 3, 280), 2, 16)
    config = DualFFNConfig(
        vocab_size=template.tokenizer.get_vocab_size(), num_codebooks=2, codebook_size=18, hidden_size=32, num_layers=2,
        num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=48, sliding_window=20,
    )  # fmt: skip
    model = DualFFN(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                torch.nn.init.normal_(weight, std=0.3)
        model.text_lm_head.weight[template.tokenizer.token_to_id("<|eot_id|>")] *= 3
        model.text_lm_head.weight[template.tokenizer.token_to_id("<|audio_out_bos|>")] *= 3
    save_pretrained(model, folder / "train" / "model", template.tokenizer)
    write_json(folder / "train" / "model" / TRAINED_FILE, {"chunk_frames": CHUNK})
    return folder


@pytest.fixture(scope="module")
def codec(run_folder: Path) -> AudioTokenizer:
    return AudioTokenizer.from_pretrained(run_folder / "train_tokenizer")


def noise(seconds: float, seed: int, rate: int = 24000) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return 0.1 * torch.randn(1, round(seconds * rate), generator=draw)


def cut(samples_1N: Tensor, draw: random.Random) -> list[Tensor]:
    pieces, start = [], 0
    while start < samples_1N.shape[1]:
        length = draw.choice([1, 317, 5000, 20000])
        pieces.append(samples_1N[:, start : start + length])
        start += length
    return pieces


def test_what_is_heard_does_not_depend_on_the_cuts(codec: AudioTokenizer) -> None:
    draw = random.Random(0)
    for seed in range(4):
        samples_1N = noise(0.3 + 0.35 * seed, seed)
        hearing = ChunkHearing(codec, CHUNK)
        chunks = [chunk for piece in cut(samples_1N, draw) for chunk in hearing.push(piece)] + hearing.flush()
        assert torch.equal(torch.cat(chunks, 1), codec.encode(running_level(samples_1N, codec.sample_rate)))
        assert all(chunk.shape[1] == CHUNK for chunk in chunks[:-1])
        assert not hearing.flush()


def test_samples_that_are_no_numbers_are_silence(codec: AudioTokenizer) -> None:
    samples_1N = noise(0.5, 1)
    damaged_1N = samples_1N.clone()
    damaged_1N[:, 3000:4000] = torch.nan
    samples_1N[:, 3000:4000] = 0
    heard = [ChunkHearing(codec, CHUNK) for _ in range(2)]
    for hearing, own in zip(heard, (samples_1N, damaged_1N), strict=True):
        hearing.found = torch.cat([*hearing.push(own), *hearing.flush()], 1)  # type: ignore[attr-defined]
    assert torch.equal(heard[0].found, heard[1].found)  # type: ignore[attr-defined]


def session_of(run_folder: Path, ticks: list[float] | None = None) -> LiveSession:
    model, options = load_interpreter(run_folder / "train"), LiveOptions(CHUNK, answer="any")
    if ticks is None:
        return LiveSession(model, options)
    clock = iter(ticks)
    return LiveSession(model, options, lambda: next(clock))


def test_actions_do_not_depend_on_the_cuts_and_memory_not_on_the_length(run_folder: Path) -> None:
    samples_1N = noise(6.0, 3)
    found = []
    for seed in range(3):
        session = session_of(run_folder)
        actions = [each for piece in cut(samples_1N, random.Random(seed)) for each in session.hear(piece)]
        actions += session.finish()
        found.append([(each.text, each.samples_1N.shape[1]) for each in actions])
        assert len(actions) == -(-150 // CHUNK)
    assert found[0] == found[1] == found[2]
    assert any(text or spoken for text, spoken in found[0])


def test_times_count_computation_and_waiting(run_folder: Path) -> None:
    """0.3 s of computation for each chunk of 0.24 s. The codec looks 45 ms ahead, the level goes in steps of 10 ms."""
    session = session_of(run_folder, [0.3 * n for n in range(100)])
    actions = list(session.hear(noise(24 * 0.04 + 0.1, 1)))[:3]
    heard_s = [0.24 + 0.05, 0.48 + 0.05, 0.72 + 0.05]
    assert [each.heard_s for each in actions] == pytest.approx(heard_s)
    assert [each.elapsed_s for each in actions] == pytest.approx([heard_s[0] + n * 0.3 for n in (1, 2, 3)])
    assert session.behind_s > 0.4
    assert session.real_time_factor == pytest.approx(0.3 / 0.24)
    row = actions[0].row()
    assert {"chunk", "heard_s", "elapsed_s", "text", "compute_s", "reason"} <= row.keys()


def test_hearing_counts_in_pieces_that_complete_no_chunk(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of 0.24 s in three pieces, each of which takes 0.1 s to hear: 0.3 s for each chunk."""
    now_s = [0.0]
    session = LiveSession(load_interpreter(run_folder / "train"), LiveOptions(CHUNK), lambda: now_s[0])
    push = ChunkHearing.push

    def slow(hearing: ChunkHearing, samples_1N: Tensor) -> list[Tensor]:
        now_s[0] += 0.1
        return push(hearing, samples_1N)

    monkeypatch.setattr(ChunkHearing, "push", slow)
    pieces = noise(12 * 0.08, 1).split(1920, dim=1)
    actions = [action for piece_1N in pieces for action in session.hear(piece_1N)]
    assert len(actions) == 3
    assert session.real_time_factor == pytest.approx(10 * 0.1 / 0.72)  # two more pieces are of the next chunk
    assert sum(action.compute_s for action in actions) == pytest.approx(session.real_time_factor * 0.72)
    # the sound of a chunk lasts less than hearing it takes: the model is busy from the first one on
    passed_s = [after.elapsed_s - before.elapsed_s for before, after in itertools.pairwise(actions)]
    assert passed_s == pytest.approx([0.3, 0.3])


@pytest.mark.parametrize("rate", [24000, 8000])
def test_the_command_writes_transcript_speech_and_log(run_folder: Path, tmp_path: Path, rate: int) -> None:
    save(tmp_path / "talk.wav", noise(2.1, 5, rate), rate)
    command = ["interpret", "--model", str(run_folder / "train"), "--from", str(tmp_path / "talk.wav")]
    (tmp_path / "right.txt").write_text("eins zwei\ndrei\n")
    files = ["--transcript", str(tmp_path / "t.jsonl"), "--log", str(tmp_path / "log")]
    options = ["--reference", str(tmp_path / "right.txt"), "--max-speech-s", "0.8"]
    result = CliRunner().invoke(build_app(), [*command, *files, *options, "--to", str(tmp_path / "said.wav")])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert [row["chunk"] for row in rows] == list(
        range(-(-53 // CHUNK))
    )  # 2.1 s are 52.5 frames: the last one is short
    assert rows[-1]["heard_s"] == pytest.approx(53 / 25)
    (output,), bad = read_log(tmp_path / "log")
    assert not bad
    assert output.source_length == pytest.approx(1000 * 53 / 25)
    assert output.is_speech == bool(sum(row["speech_samples"] for row in rows))
    assert max(row["speech_samples"] for row in rows) == 0.8 * 24000  # the model ends no speech by itself
    assert output.reference == "eins zwei drei"
    assert "real-time factor" in result.output
    written = CliRunner().invoke(
        build_app(), [*command, "--log", str(tmp_path / "text"), "--silence-bias", "10000"]
    )
    assert written.exit_code == 0, written.output
    assert read_log(tmp_path / "text")[0][0].delays == []


def test_the_log_tells_where_the_sound_of_the_output_begins(run_folder: Path) -> None:
    """The file has the silence before its first piece; its length is that of the pieces."""
    session = session_of(run_folder)
    session.said_pieces += [SaidPiece("one", 1.0, 1.2, 0.5), SaidPiece("two", 2.0, 2.1, 0.0)]
    output = session.log(0, prediction="said.wav")
    assert output.is_speech and output.delays == [1000] and output.prediction_offset == 0
    assert output.prediction_length == 0.5
    assert session.log(0).prediction_offset is None


def test_speech_of_nothing_has_no_words(run_folder: Path, tmp_path: Path) -> None:
    """The path of the sound is no text of the output."""
    write_log(tmp_path / "instances.log", [session_of(run_folder).log(0, prediction="said.wav")])
    (output,), bad = read_log(tmp_path)
    assert not bad
    assert output.prediction == "said.wav" and output.text == "" and not output.delays


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_within_an_action_loses_nothing_that_was_heard(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Ctrl-C, and what `kill` and schedulers send."""
    save(tmp_path / "talk.wav", noise(3.0, 5), 24000)
    command = ["interpret", "--model", str(run_folder / "train"), "--from", str(tmp_path / "talk.wav")]
    whole, stopped = tmp_path / "whole.jsonl", tmp_path / "stopped.jsonl"
    assert CliRunner().invoke(build_app(), [*command, "--transcript", str(whole)]).exit_code == 0
    texts = [json.loads(line)["text"] for line in whole.read_text().splitlines()]
    step, steps = Engine.step, iter(range(10_000))

    def interrupted(engine: Engine) -> list[Event]:
        if next(steps) == 3:
            signal.raise_signal(number)
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    before = signal.signal(number, signal.default_int_handler)  # a shell's background jobs ignore SIGINT
    try:
        result = CliRunner().invoke(
            build_app(), [*command, "--transcript", str(stopped), "--log", str(tmp_path)]
        )
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert result.exit_code == 0, result.exception
    assert "stopped" in result.output
    rows = [json.loads(line) for line in stopped.read_text().splitlines()]
    assert [row["chunk"] for row in rows] == list(range(len(rows))) and 0 < len(rows) < len(texts)
    assert [row["text"] for row in rows[:-1]] == texts[: len(rows) - 1]  # the last chunk is shorter
    assert read_log(tmp_path)[0][0].source_length == pytest.approx(1000 * rows[-1]["heard_s"])


def test_what_is_heard_is_not_overwritten(run_folder: Path, tmp_path: Path) -> None:
    talk = tmp_path / "talk.wav"
    save(talk, noise(0.5, 5), 24000)
    content = talk.read_bytes()
    (tmp_path / "link.wav").symlink_to(talk)
    command = ["interpret", "--model", str(run_folder / "train"), "--from", str(talk)]
    for files in (["--to", str(talk)], ["--to", str(tmp_path / "link.wav")], ["--transcript", str(talk)]):
        result = CliRunner().invoke(build_app(), [*command, *files])
        assert isinstance(result.exception, ConfigError), result.output
        assert "overwrite" in str(result.exception) and files[0] in str(result.exception)
        assert talk.read_bytes() == content


def test_the_system_message_is_that_of_the_training(run_folder: Path, tmp_path: Path) -> None:
    save(tmp_path / "talk.wav", noise(2.0, 5), 24000)
    trained = tmp_path / "train"
    (tmp_path / "train_tokenizer").symlink_to(run_folder / "train_tokenizer")
    (trained / "model").mkdir(parents=True)
    for path in (run_folder / "train" / "model").iterdir():
        if path.name != TRAINED_FILE:
            (trained / "model" / path.name).symlink_to(path)
    write_json(trained / "model" / TRAINED_FILE, {"chunk_frames": CHUNK, "stream_prompt": "one two one two"})

    def texts(*prompt: str) -> list[str]:
        files = ["--from", str(tmp_path / "talk.wav"), "--transcript", str(tmp_path / "t.jsonl")]
        result = CliRunner().invoke(build_app(), ["interpret", "--model", str(trained), *files, *prompt])
        assert result.exit_code == 0, result.output
        return [json.loads(line)["text"] for line in (tmp_path / "t.jsonl").read_text().splitlines()]

    assert texts() == texts("--prompt", "one two one two") != texts("--prompt", "")


def test_what_cannot_be_interpreted_is_named(run_folder: Path, tmp_path: Path) -> None:
    save(tmp_path / "talk.wav", noise(0.5, 5), 24000)

    def error(*command: str) -> str:
        result = CliRunner().invoke(build_app(), ["interpret", *command])
        assert isinstance(result.exception, ConfigError), result.output
        return str(result.exception)

    model = str(run_folder / "train")
    assert "no such file" in error("--model", model, "--from", str(tmp_path / "none.wav"))
    assert "multiple of 0.04" in error(
        "--model", model, "--from", str(tmp_path / "talk.wav"), "--chunk-s", "0.5"
    )
    assert "sounddevice" in error("--model", model) or "PortAudio" in error("--model", model)
    (tmp_path / "broken.wav").write_bytes(b"no sound")
    assert "broken.wav" in error("--model", model, "--from", str(tmp_path / "broken.wav"))
    plain = tmp_path / "plain" / "train"
    plain.parent.mkdir()
    (plain.parent / "train_tokenizer").symlink_to(run_folder / "train_tokenizer")
    (plain / "model").mkdir(parents=True)
    for path in (run_folder / "train" / "model").iterdir():
        if path.name != TRAINED_FILE:
            (plain / "model" / path.name).symlink_to(path)
    assert "not trained on streams" in error("--model", str(plain), "--from", str(tmp_path / "talk.wav"))

    class Offline:
        """A codec that encodes whole recordings alone."""

        num_codebooks = 2

    with pytest.raises(ConfigError, match="cannot encode piece by piece"):
        ChunkHearing(Offline(), 4)  # type: ignore[arg-type]


def test_outputs_that_cannot_be_written_are_named_before_anything_is_heard(
    run_folder: Path, tmp_path: Path
) -> None:
    """A session of hours does not end without its log; and a start that fails replaces no earlier output."""
    save(tmp_path / "talk.wav", noise(0.5, 5), 24000)
    (tmp_path / "broken.wav").write_bytes(b"no sound")
    earlier = tmp_path / "t.jsonl"
    earlier.write_text("earlier\n")

    def error(source: str, *files: str) -> str:
        command = ["interpret", "--model", str(run_folder / "train"), "--from", str(tmp_path / source)]
        result = CliRunner().invoke(build_app(), [*command, *files])
        assert isinstance(result.exception, ConfigError), result.exception
        return str(result.exception)

    both = ["--transcript", str(earlier), "--log", str(tmp_path / "talk.wav")]
    assert "--log" in error("talk.wav", *both)
    assert "--transcript" in error("talk.wav", "--transcript", str(tmp_path))
    (tmp_path / "folder.wav").mkdir()
    assert "--to" in error("talk.wav", "--to", str(tmp_path / "folder.wav"))
    assert ".wav" in error("talk.wav", "--to", str(tmp_path / "said.mp3"))
    assert "--log" in error("talk.wav", "--reference", str(earlier))
    assert "broken.wav" in error("broken.wav", "--transcript", str(earlier))
    assert earlier.read_text() == "earlier\n"


class SoundDevices:
    """Stands in for the module sounddevice: a microphone of one second that loses sound once, and a speaker that fails
    after two writes.
    """

    def __init__(self) -> None:
        self.played: list[int] = []
        played = self.played

        class InputStream:
            def __init__(self, callback: Callable[..., None], blocksize: int, **options: object) -> None:
                self._callback, self._size = callback, blocksize

            def __enter__(self) -> None:
                for seed in range(24000 // self._size):
                    status = SimpleNamespace(input_overflow=seed == 3)
                    self._callback(noise(self._size / 24000, seed).T.numpy(), self._size, None, status)

            def __exit__(self, *problem: object) -> None:
                pass

        class OutputStream:
            def __init__(self, **options: object) -> None:
                self.start = self.stop = self.close = lambda: None

            def write(self, block_N1: object) -> None:
                if len(played) == 2:
                    raise OSError("device unavailable")
                played.append(len(block_N1))  # type: ignore[arg-type]

        self.InputStream, self.OutputStream = InputStream, OutputStream


def test_devices_that_vanish_end_the_session_with_all_that_was_said(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = SoundDevices()
    monkeypatch.setitem(sys.modules, "sounddevice", devices)  # type: ignore[arg-type]
    monkeypatch.setattr("audiollm.interpret.live.sound_input.MAX_PAUSE_S", 0.05)
    transcript = tmp_path / "t.jsonl"
    files = ["--transcript", str(transcript), "--log", str(tmp_path / "log")]
    command = ["interpret", "--model", str(run_folder / "train")]
    result = CliRunner().invoke(build_app(), [*command, *files])
    assert isinstance(result.exception, StageError), result.output
    assert "microphone gives no sound" in str(result.exception)
    assert result.output.count("sound of the microphone is lost") == 1
    rows = [json.loads(line) for line in transcript.read_text().splitlines()]
    assert len(rows) == -(-24 // CHUNK)  # 12 blocks of 0.08 s, the rest of the last chunk included
    (output,), _ = read_log(tmp_path / "log")
    assert output.source_length == pytest.approx(960) and output.source == ""
    speaker = LoudSpeaker(24000)
    for _ in range(3):
        speaker.play(torch.zeros(1, 5))
    speaker._player.join(0.2)  # it plays meanwhile
    with pytest.raises(StageError, match="device unavailable"):
        speaker.play(torch.zeros(1, 5))
    speaker.play(torch.zeros(1, 5))
    speaker.close()
    assert devices.played == [5, 5]


def test_a_microphone_that_does_not_start_is_named(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = SoundDevices()

    def enter(stream: object) -> None:
        raise OSError("Device unavailable")

    monkeypatch.setattr(devices.InputStream, "__enter__", enter)
    monkeypatch.setitem(sys.modules, "sounddevice", devices)  # type: ignore[arg-type]
    result = CliRunner().invoke(build_app(), ["interpret", "--model", str(run_folder / "train")])
    assert isinstance(result.exception, ConfigError), result.exception
    assert "no microphone: Device unavailable" in str(result.exception)


def test_ctrl_c_while_the_speaker_plays_the_rest_loses_no_log(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", SoundDevices())  # type: ignore[arg-type]

    def interrupted(speaker: LoudSpeaker) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LoudSpeaker, "close", interrupted)
    save(tmp_path / "talk.wav", noise(0.5, 5), 24000)
    command = ["interpret", "--model", str(run_folder / "train"), "--from", str(tmp_path / "talk.wav")]
    files = ["--to", "speaker", "--max-speech-s", "0.1", "--log", str(tmp_path / "log")]
    assert CliRunner().invoke(build_app(), [*command, *files]).exit_code != 0
    (output,), _ = read_log(tmp_path / "log")
    assert output.source_length == pytest.approx(520)


def test_samples_that_are_not_finite_cost_themselves_alone(run_folder: Path, tmp_path: Path) -> None:
    """They are heard as silence, with a word; a file of silence is a recording like any other."""
    import soundfile

    samples_N = noise(12.0, 2)[0].numpy()
    samples_N[24000 * 5 : 24000 * 5 + 100] = float("nan")
    samples_N[24000 * 8] = float("-inf")
    soundfile.write(tmp_path / "nan.wav", samples_N, 24000, subtype="FLOAT")
    soundfile.write(tmp_path / "two.wav", np.stack([samples_N, samples_N], 1), 24000, subtype="FLOAT")
    samples_N[~np.isfinite(samples_N)] = 0.0
    for name in ("nan.wav", "two.wav"):
        pieces: list[Tensor] = []
        with pytest.raises(ConfigError, match="101 samples are NaN or infinite, and were heard as silence"):
            pieces.extend(file_pieces(tmp_path / name, 24000))
        torch.testing.assert_close(torch.cat(pieces, 1)[0], torch.from_numpy(samples_N))
    transcript, log = tmp_path / "t.jsonl", tmp_path / "log"
    command = ["interpret", "--model", str(run_folder / "train"), "--transcript", str(transcript)]
    result = CliRunner().invoke(
        build_app(), [*command, "--from", str(tmp_path / "nan.wav"), "--log", str(log)]
    )
    assert isinstance(result.exception, ConfigError), result.output
    assert len(transcript.read_text().splitlines()) == -(-12 * 25 // CHUNK)
    assert read_log(log)[0][0].source_length == pytest.approx(12_000)
    save(tmp_path / "silent.wav", torch.zeros(1, 24000), 24000)
    result = CliRunner().invoke(build_app(), [*command, "--from", str(tmp_path / "silent.wav")])
    assert result.exit_code == 0, result.output
    assert len(transcript.read_text().splitlines()) == -(-25 // CHUNK)


@pytest.mark.parametrize("ending", ["wav", "flac", "mp3", "ogg"])
def test_a_file_that_is_cut_off_is_heard_to_the_cut_and_told(tmp_path: Path, ending: str) -> None:
    import soundfile

    path = tmp_path / f"talk.{ending}"
    soundfile.write(path, noise(6.0, 2)[0].numpy(), 24000)
    assert sum(piece.shape[1] for piece in file_pieces(path, 16000)) == 6 * 16000
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 6 // 10])
    pieces: list[Tensor] = []
    with pytest.raises(ConfigError, match=r"cut off(.|\n)*what was heard is kept"):
        pieces.extend(file_pieces(path, 16000))
    assert 3.0 < sum(piece.shape[1] for piece in pieces) / 16000 < 4.0


def test_a_transcript_is_on_the_disk_while_the_session_goes_on(tmp_path: Path) -> None:
    actions = [
        LiveAction(number, 0.24, 0.3, f"w{number}", torch.zeros(1, 0), 0.01, "end") for number in range(3)
    ]
    with _Outputs(None, tmp_path / "t.jsonl", None, 24000) as outputs:
        for number, action in enumerate(actions):
            outputs.take(action)
            rows = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
            assert [row["text"] for row in rows] == [f"w{place}" for place in range(number + 1)]


def test_a_stream_that_a_model_without_a_window_cannot_keep_ends_with_all_that_was_said(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = Generator.from_pretrained(run_folder / "train")
    keeps = DualFFN(replace(generator.model.config, sliding_window=None))
    keeps.load_state_dict(generator.model.state_dict())
    save_pretrained(keeps, tmp_path / "train" / "model", generator.template.tokenizer)
    write_json(tmp_path / "train" / "model" / TRAINED_FILE, {"chunk_frames": CHUNK})
    (tmp_path / "train_tokenizer").symlink_to(run_folder / "train_tokenizer")
    monkeypatch.setattr("audiollm.interpret.live.live_session.MAX_UNFORGETTING_S", 1.0)
    save(tmp_path / "talk.wav", noise(6.0, 5), 24000)
    files = ["--transcript", str(tmp_path / "t.jsonl"), "--log", str(tmp_path / "log")]
    command = ["interpret", "--model", str(tmp_path / "train"), "--from", str(tmp_path / "talk.wav"), *files]
    result = CliRunner().invoke(build_app(), command)
    assert isinstance(result.exception, StageError), result.output
    assert "slot" in str(result.exception) and "sliding_window" in str(result.exception)
    rows = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert 3 < len(rows) < 6 * 25 / CHUNK
    (output,), _ = read_log(tmp_path / "log")
    assert output.source_length == pytest.approx(1000 * rows[-1]["heard_s"])


def test_a_file_comes_in_small_pieces(tmp_path: Path) -> None:
    save(tmp_path / "talk.wav", noise(1.0, 5, 8000), 8000)
    pieces = list(file_pieces(tmp_path / "talk.wav", 24000))
    assert sum(piece.shape[1] for piece in pieces) == 24000
    assert max(piece.shape[1] for piece in pieces) <= 1920
