"""The command `interpret`: a model interprets a file or the microphone, live."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from audiollm.errors import ConfigError, StageError
from audiollm.hub_models.options import Download, folder_option

if TYPE_CHECKING:
    from torch import Tensor

    from audiollm.interpret.live.live_session import LiveAction, LiveSession

LOST = "sound of the microphone is lost: the machine was too busy to take it"


def interpret_live(
    model: Annotated[Path, folder_option("A train stage's folder, or a saved model's.", show_default=False)],
    source: Annotated[str, typer.Option("--from", help="A sound file, or microphone.")] = "microphone",
    to: Annotated[
        str | None,
        typer.Option("--to", help="A .wav for the speech, or speaker; without it words alone are shown."),
    ] = None,
    transcript: Annotated[
        Path | None, typer.Option(help="JSON lines: one per chunk, with times, text and lag.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="A folder for SimulEval's instances.log, for `evaluate interpret`.")
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="A text file with the right translation, which the log is scored by.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="The system message; by default that of the training streams.")
    ] = None,
    codec: Annotated[
        Path | None, folder_option("The codec's folder; by default the run's own train_tokenizer.")
    ] = None,
    chunk_s: Annotated[
        float | None, typer.Option(min=0.04, help="Seconds of a chunk; by default that of the training.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest text of an action, in tokens.")] = 64,
    max_speech_s: Annotated[
        float, typer.Option(min=0.04, help="Longest speech of an action, in seconds; more is cut.")
    ] = 10.0,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest actions.")] = 0.0,
    silence_bias: Annotated[
        float, typer.Option(help="Added to the logit of silence: above 0 it waits more.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="Seed of the draws.")] = 0,
    download: Download = False,
) -> None:
    """Interpret speech while it is heard: show what is said with its times, lag and real-time factor.

    Ctrl-C and SIGTERM end it: what was said so far is kept. A machine that is too slow drops no sound, and falls
    behind.

    Example: audiollm interpret --model runs/interpret/stage_2 --from talk.wav --transcript talk.jsonl --log scores
    """
    console = Console(soft_wrap=True)
    from audiollm.codec import FRAME_RATE
    from audiollm.generation.engine.request import Limits
    from audiollm.generation.engine.sampling import SamplingConfig
    from audiollm.interpret.live.live_model import LiveModel
    from audiollm.interpret.live.sound_input import MICROPHONE, file_pieces, microphone_pieces

    if source != MICROPHONE and not Path(source).is_file():
        raise ConfigError(f"{source}: no such file", "--from", "give a sound file, or microphone")
    _check_outputs(source, {"--to": to, "--transcript": transcript})
    translation = _read_reference(reference, log)
    loaded = LiveModel.load(model, codec, chunk_s, prompt)
    options = replace(
        loaded.options(),
        answer="any" if to or loaded.speaks else "text",
        sampling=SamplingConfig(temperature=temperature, top_p=1.0, text_guidance=1.0, speaker_guidance=1.0),
        limits=Limits(max_frames=max(1, round(max_speech_s * FRAME_RATE)), max_text_tokens=max_tokens),
        silence_bias=silence_bias,
        seed=seed,
    )
    session, sample_rate = loaded.session(options), loaded.sample_rate
    output_rate = int(loaded.model.codec.sample_rate) if to else sample_rate
    pieces = (
        microphone_pieces(sample_rate, lambda: console.print(LOST, style="yellow"))
        if source == MICROPHONE
        else file_pieces(Path(source), sample_rate)
    )
    begun = list(itertools.islice(pieces, 1))  # a source that cannot be heard replaces no earlier output
    pieces = itertools.chain(begun, pieces)
    problem: ConfigError | StageError | None = None
    with _Outputs(to, transcript, log, output_rate) as outputs, _Interrupts() as interrupts:
        try:
            try:
                for action in _hear_pieces(session, pieces, interrupts):
                    outputs.take(action)
                    _print_action(console, action, session)
            except (ConfigError, StageError) as error:  # no microphone, damage in a file, no room left
                if not session.chunks:
                    raise
                problem = error
            if interrupts.is_requested:
                console.print("stopped", style="yellow")
            for action in session.finish():
                outputs.take(action)
                _print_action(console, action, session)
        except KeyboardInterrupt:
            console.print("stopped before the end of what was heard", style="yellow")
        except StageError as error:
            problem = problem or error
        if log is not None:  # before the speaker has played what waits: Ctrl-C may end that
            from audiollm.evaluate.interpret.logged_outputs import LOG_NAME, write_log

            speech = str(Path(to).resolve()) if to and to != "speaker" else ""
            source_path = "" if source == MICROPHONE else str(Path(source).resolve())
            write_log(log / LOG_NAME, [session.log(0, source_path, translation, speech)])
    console.print(
        f"{session.chunks} chunks, {len(session.said_pieces)} with words or speech; "
        f"real-time factor {session.real_time_factor:.2f}, {session.behind_s:.1f} s behind at the end",
        style="dim",
        highlight=False,
    )
    if problem is not None:
        raise problem


def _check_outputs(source: str, outputs: dict[str, str | Path | None]) -> None:
    """Check that no output is the file that is heard, and that the speech is to be a .wav.

    Raises:
        ConfigError: one is, or it is not.
    """
    from audiollm.interpret.live.sound_input import SPEAKER

    to = outputs["--to"]
    if to is not None and to != SPEAKER and Path(to).suffix.lower() != ".wav":
        raise ConfigError(f"{to}: speech is written as .wav", "--to", "name a .wav, or speaker")
    for option, path in outputs.items():
        if path is not None and Path(path).exists() and Path(source).exists() and Path(path).samefile(source):
            raise ConfigError(
                f"{path} is what is heard: this would overwrite it", option, "name another file"
            )


def _read_reference(path: Path | None, log: Path | None) -> str:
    """Return the text of a reference; empty without one.

    Raises:
        ConfigError: it cannot be read, or there is no log that it would stand in.
    """
    if path is None:
        return ""
    if log is None:
        raise ConfigError("only a log has a reference", "--reference", "name a folder with --log, too")
    try:
        return " ".join(path.read_text(encoding="utf-8-sig").split())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read: {error}", "--reference", "give a text file in UTF-8"
        ) from None


class _Interrupts:
    """Takes the first Ctrl-C, or SIGTERM, as a wish to end after the present piece, so that no action is cut in two.

    The next one is a KeyboardInterrupt, as ever.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.is_requested = False

    def __enter__(self) -> _Interrupts:
        self._before = [signal.signal(number, self._take) for number in self.SIGNALS]
        return self

    def __exit__(self, *problem: object) -> None:
        for number, handler in zip(self.SIGNALS, self._before, strict=True):
            signal.signal(number, handler)

    def _take(self, number: int, frame: Any) -> None:
        if self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True


def _hear_pieces(
    session: LiveSession, pieces: Iterator[Tensor], interrupts: _Interrupts
) -> Iterator[LiveAction]:
    for piece_1N in pieces:
        yield from session.hear(piece_1N)
        if interrupts.is_requested:
            return


def _print_action(console: Console, action: LiveAction, session: LiveSession) -> None:
    """Print an action that says something; and every ten chunks that the session is behind."""
    if action.speaks:
        lag = action.elapsed_s - action.heard_s
        console.print(
            f"{action.heard_s:8.2f} s  +{lag:.2f} s  {action.text.strip() or '(speech)'}",
            highlight=False,
            markup=False,
        )
    elif session.behind_s > 1.0 and action.chunk % 10 == 0:
        console.print(f"{session.behind_s:.1f} s behind", style="yellow", highlight=False)


class _Outputs:
    """Writes the speech, in time, and the transcript, line by line; makes the folder of the log.

    Raises:
        ConfigError: an output cannot be written, or there is no speaker.
    """

    def __init__(self, to: str | None, transcript: Path | None, log: Path | None, sample_rate: int) -> None:
        from audiollm.interpret.live.sound_input import SPEAKER, LoudSpeaker
        from audiollm.interpret.said import SpeechFile

        self._speaker = LoudSpeaker(sample_rate) if to == SPEAKER else None
        option = "--log"
        try:
            if log is not None:
                log.mkdir(parents=True, exist_ok=True)
            option = "--transcript"
            if transcript is not None:
                transcript.parent.mkdir(parents=True, exist_ok=True)
            self._lines = None if transcript is None else transcript.open("w", encoding="utf-8")
            option = "--to"
            self._file = SpeechFile(Path(to), sample_rate) if to and to != SPEAKER else None
        except OSError as error:
            raise ConfigError(
                f"{error.filename}: cannot be written: {error.strerror}", option, "name another place"
            ) from None

    def __enter__(self) -> _Outputs:
        return self

    def __exit__(self, *problem: object) -> None:
        if self._file is not None:
            self._file.close()
        if self._speaker is not None:
            self._speaker.close()
        if self._lines is not None:
            self._lines.close()

    def take(self, action: LiveAction) -> None:
        """Write an action's line and play its speech; in a file it stands where it is heard, after silence."""
        if self._lines is not None:
            self._lines.write(json.dumps(action.row(), ensure_ascii=False) + "\n")
            self._lines.flush()
        if not action.samples_1N.shape[1]:
            return
        if self._speaker is not None:
            self._speaker.play(action.samples_1N)
        if self._file is not None:
            self._file.write(action.samples_1N, action.heard_s)
