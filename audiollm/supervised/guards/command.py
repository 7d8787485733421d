"""The command `audiollm guard`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from audiollm.terminal import print_table

if TYPE_CHECKING:
    from rich.console import Console

    from audiollm.families.policy import Policy
    from audiollm.supervised.guards.leak import CodebookLeak
    from audiollm.supervised.guards.offsets import OffsetTable
    from audiollm.supervised.guards.stop import StopTest
    from audiollm.supervised.guards.trials import TrialSettings

MOST_SAMPLES = 64
"""Samples of `--data` that the table of offsets is made of."""
BATCH_ROWS = 4096


def guard(
    model: Annotated[Path, typer.Argument(help="folder of a model that speaks", metavar="FOLDER")],
    data: Annotated[
        Path | None,
        typer.Option(help="spoken samples with codes, for the table of offsets", metavar="SHARDS"),
    ] = None,
    steps: Annotated[
        int, typer.Option(help="steps of each small training; 0: the table of offsets alone", min=0)
    ] = 300,
    learning_rate: Annotated[float, typer.Option(help="rate of the small trainings", min=0.0)] = 3e-3,
    lora_rank: Annotated[
        int, typer.Option(help="train adapters of this rank in place of all weights; 0: all weights", min=0)
    ] = 0,
    seed: Annotated[int, typer.Option(help="of the random codes")] = 0,
) -> None:
    """Test the objective by which a model that speaks is trained, and what its weights have learned.

    Three tests. The leak test trains on random codes: their cross entropy cannot fall below their entropy, unless a
    prediction reads its own target. The stop test learns five clips by heart: the likeliest speech must be every code,
    and the end behind the last. With --data, the table of offsets compares each head with the labels of frames and
    codebooks beside its own: a model that was trained with shifted labels predicts those better.

    The small trainings change nothing on the disk. With published weights take --lora-rank 16 --learning-rate 1e-3.

    Example: is a model trained rightly here, and were its weights?

        audiollm guard runs/csm/train/model --data runs/csm/tokenize

    Exit code 1: a test failed.
    """
    from rich.console import Console

    from audiollm.supervised.guards.trials import TrialSettings

    console = Console()
    failures = []
    if steps:
        leaks, stop = _run_trials(console, model, TrialSettings(steps, learning_rate, seed), lora_rank)
        _print_leaks(console, leaks)
        _print_stops(console, stop)
        if any(leak.leaks for leak in leaks):
            failures.append("leak test: a prediction reads its own target")
        if not all(clip.is_whole for clip in stop.clips):
            failures.append(
                f"stop test: clips by heart (loss {stop.loss:.3f}) do not come out whole"
                + (
                    ""
                    if stop.loss < 0.1
                    else "; the loss is not small: give more --steps or another --learning-rate"
                )
            )
    if data is not None:
        table = _offsets_of(model, data)
        _print_offsets(console, table)
        if table.shifted:
            failures.append(f"table of offsets: {table.sentence()}")
    for failure in failures:
        console.print(failure, style="red", highlight=False)
    if failures:
        raise typer.Exit(1)
    console.print("no test failed", highlight=False)


def _run_trials(
    console: Console, model: Path, settings: TrialSettings, lora_rank: int
) -> tuple[list[CodebookLeak], StopTest]:
    from audiollm.errors import ConfigError
    from audiollm.progress import progress_bar
    from audiollm.supervised.guards.leak import test_leak
    from audiollm.supervised.guards.stop import test_stop

    policy = _load_guarded(model, lora_rank)
    if not policy.num_codebooks:
        raise ConfigError(
            "this model does not speak, and has no codes to guard", str(model), "give one that speaks"
        )
    with progress_bar(console, "leak test", settings.steps) as bar:
        leaks = test_leak(policy, settings, lambda: bar.advance(bar.task_ids[0]))
    policy = _load_guarded(model, lora_rank)
    with progress_bar(console, "stop test", settings.steps) as bar:
        return leaks, test_stop(policy, settings, advance=lambda: bar.advance(bar.task_ids[0]))


def _load_guarded(model: Path, lora_rank: int) -> Policy[Any, Any, Any]:
    from audiollm.devices import default_device
    from audiollm.families.policies import load_policy
    from audiollm.train.settings import LoRASettings

    lora = LoRASettings(rank=lora_rank, alpha=2 * lora_rank) if lora_rank else None
    policy = load_policy(model, "adapter" if lora else "all", lora)
    policy.root.to(default_device())
    return policy


def _offsets_of(model: Path, data: Path) -> OffsetTable:
    from audiollm.data.records.opening import open_source
    from audiollm.errors import BadSample, ConfigError
    from audiollm.families.prompts import with_last_message_as_answer
    from audiollm.supervised.guards.offsets import GivesOffsets, offset_table

    policy = _load_guarded(model, 0)
    if not isinstance(policy, GivesOffsets):
        raise ConfigError(
            "the table of offsets is made of talkers (CSM, Qwen3-TTS, Higgs v3), and this model is none",
            str(model),
            "leave --data out",
        )
    source, encoded = open_source(str(data)), []
    for number in range(min(len(source), MOST_SAMPLES)):
        try:
            encoded += policy.encode(policy.take(with_last_message_as_answer(source[number]), [0]))
        except BadSample:
            continue
    if not encoded:
        raise ConfigError(
            "no sample that the model can say", str(data), "tokenize with the codec in the model's folder"
        )
    plans = policy.plan([[answer] for answer in encoded], BATCH_ROWS)
    device = next(policy.root.parameters()).device
    batches = (policy.batch([encoded[place] for place in plan]).to(device) for plan in plans)
    return offset_table(policy, policy.root, batches)


def _print_leaks(console: Console, leaks: list[CodebookLeak]) -> None:
    rows = [
        [
            str(leak.codebook),
            f"{leak.cross_entropy:.3f} ± {2 * leak.error:.3f}",
            f"{leak.entropy:.3f}",
            "leaks" if leak.leaks else "",
        ]
        for leak in leaks
    ]
    print_table(console, ["codebook", "cross entropy", "entropy", ""], rows, "leak test, nats")


def _print_stops(console: Console, stop: StopTest) -> None:
    rows = [
        [str(clip.frames), str(clip.spoken_frames), "yes" if clip.has_ended else "no", f"{clip.right:.0%}"]
        for clip in stop.clips
    ]
    headings = ["frames", "said", "ended", "codes right"]
    print_table(console, headings, rows, f"stop test, loss {stop.loss:.3f}")


def _print_offsets(console: Console, offsets: OffsetTable) -> None:
    from audiollm.supervised.guards.offsets import PLACES

    names = [
        f"frame {frame:+d}" if frame else f"codebook {book:+d}" if book else "its own"
        for frame, book in PLACES
    ]
    rows = [
        [str(head), *("" if loss is None else f"{loss:.3f}" for loss in losses)]
        for head, losses in enumerate(offsets.loss_KP)
    ]
    print_table(console, ["head", *names], rows, "table of offsets, nats")
