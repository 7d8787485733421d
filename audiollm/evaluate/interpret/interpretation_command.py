"""The command `evaluate interpret`: quality and latency of logs of simultaneous interpretation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from audiollm.errors import ConfigError, suggestion
from audiollm.evaluate.options import (
    Endpoint,
    EndpointModel,
    Examples,
    Form,
    KeyVariable,
    Language,
    Limit,
    MaxTokens,
    Out,
    RecognizerOption,
)
from audiollm.evaluate.report.suite import bar, conclude, spread_items, step
from audiollm.hub_models.options import Download, source_option

if TYPE_CHECKING:
    from audiollm.evaluate.interpret.fragment_judge import FragmentJudge, FragmentVerdict
    from audiollm.evaluate.interpret.interpretation_suite import LogOfSystem, Mixer
    from audiollm.evaluate.interpret.logged_outputs import LoggedOutput
    from audiollm.evaluate.judges.judging import Recognizer


def interpret(
    logs: Annotated[
        list[str],
        typer.Argument(help="Logs: instances.log or its folder, each with a name if wished: NAME=PATH."),
    ],
    out: Out = Path("scores/interpret"),
    language: Language = "en",
    unit: Annotated[str, typer.Option(help="What latency counts: word, character, segment or frame.")] = "",
    frame_ms: Annotated[float, typer.Option(min=1, help="Duration of a frame of speech.")] = 40.0,
    text_source: Annotated[
        bool, typer.Option("--text-source", help="Times count words of a written source.")
    ] = False,
    score_empty: Annotated[
        bool, typer.Option("--score-empty", help="Score empty outputs as said at the source's end.")
    ] = False,
    scorer: Annotated[
        list[str] | None,
        typer.Option(
            help="More scores: chrf, bleu, word_accuracy (of sentences), or command:PYTHON SCRIPT (COMET, ...)."
        ),
    ] = None,
    scorer_timeout_s: Annotated[
        float, typer.Option(min=0.1, help="Longest wait for a command's answer.")
    ] = 600.0,
    recognizer: RecognizerOption = None,
    form: Form = "spoken",
    verdicts: Annotated[
        Path | None,
        typer.Option(
            help="Judged fragments for VIP and SVIP: index, fragment, vip, svip; of several logs system."
        ),
    ] = None,
    judge_model: Annotated[
        str | None,
        source_option("An LLM that judges VIP: the folder of one of Hugging Face.", name="--judge"),
    ] = None,
    endpoint: Endpoint = None,
    endpoint_model: EndpointModel = None,
    key_variable: KeyVariable = "OPENAI_API_KEY",
    judge_hears: Annotated[
        bool, typer.Option("--judge-hears", help="The judge hears source and speech, and judges SVIP, too.")
    ] = False,
    max_tokens: MaxTokens = 4096,
    limit: Limit = None,
    examples: Examples = 8,
    download: Download = False,
) -> None:
    """Score simultaneous interpretation: BLEU and chrF, and latency in SimulEval's definitions and newer ones.

    Examples:

    audiollm evaluate interpret ours=runs/live other=simuleval_output --language de --score-empty

    audiollm evaluate interpret runs/live --endpoint http://localhost:8000/v1 --endpoint-model Qwen3-Omni --judge-hears
    """
    console = Console()
    from audiollm.evaluate.interpret.fragment_judge import FragmentJudge, check_systems, read_verdicts
    from audiollm.evaluate.interpret.interpretation_suite import (
        InterpretationBench,
        LogOfSystem,
        evaluate_interpretation,
    )
    from audiollm.evaluate.interpret.latency_scores import LatencyOptions
    from audiollm.evaluate.interpret.logged_outputs import UNITS, counted_unit, read_log
    from audiollm.evaluate.judges.choosing import choose_recognizer
    from audiollm.evaluate.judges.text_scorers import choose_text_scorer
    from audiollm.evaluate.report.store import RowStore
    from audiollm.evaluate.report.text_errors import choose_form
    from audiollm.evaluate.subjects.loading import ListenerSource
    from audiollm.files.atomic import write_jsonl
    from audiollm.files.set_aside import SetAside

    chosen_unit = unit or counted_unit(language)
    if chosen_unit not in UNITS:
        raise ConfigError(f"{unit}: no such unit", "--unit", suggestion(unit, UNITS))
    if sum(judge_option is not None for judge_option in (verdicts, judge_model, endpoint)) > 1:
        options = "--verdicts, --judge, --endpoint"
        raise ConfigError("verdicts come from a file or from one judge", options, f"give one of {options}")
    if judge_hears and judge_model is None and endpoint is None:
        raise ConfigError("there is no judge", "--judge-hears", "name one with --judge or --endpoint")
    given_verdicts = read_verdicts(verdicts) if verdicts else []
    source = ListenerSource(judge_model, None, endpoint, endpoint_model, key_variable, max_tokens)
    has_judge = judge_model is not None or endpoint is not None
    judge = FragmentJudge(*source.chat(), RowStore(out / "kept.jsonl"), judge_hears) if has_judge else None
    scorers = [choose_text_scorer(name, language, scorer_timeout_s) for name in scorer or ()]
    ear = choose_recognizer(recognizer, language)
    systems: list[LogOfSystem] = []
    for log in logs:
        name, path = _parse_log_spec(log)
        if name in {system.name for system in systems}:
            raise ConfigError(f"{name}: two logs of this name", "command line", "name them: NAME=PATH")
        outputs, bad = read_log(path)
        folder = path if path.is_dir() else path.parent
        outputs = spread_items(outputs, limit)
        transcripts = {}
        if ear is not None:
            transcripts = _hear_all(outputs, folder, ear.judge, console)
        systems.append(LogOfSystem(name, folder, outputs, bad, transcripts))
    SetAside(out / "set_aside.jsonl", "evaluate interpret").add(
        bad for system in systems for bad in system.bad
    )
    not_judged: list[tuple[str, str]] = []
    if verdicts is not None:
        check_systems(given_verdicts, [system.name for system in systems], verdicts)
    if judge is not None:
        given_verdicts, not_judged = _judge_all(judge, systems, language, console)
        write_jsonl(out / "verdicts.jsonl", (verdict.model_dump() for verdict in given_verdicts))
    bench = InterpretationBench(
        language,
        LatencyOptions(chosen_unit, frame_ms, text_source, score_empty),
        choose_form(form, language),
        scorers,
        given_verdicts,
        judge.chat.name if judge else str(verdicts),
        not_judged,
    )
    try:
        outcome = evaluate_interpretation(systems, bench, _mixer(out / "audio") if examples else None)
    finally:
        for text_scorer in scorers:
            text_scorer.close()
    conclude(outcome, out, examples, console)


def _parse_log_spec(spec: str) -> tuple[str, Path]:
    name, equals, path = spec.partition("=")
    if equals and not Path(spec).exists():
        return name, Path(path)
    plain = Path(spec)
    return (plain.name if plain.is_dir() else plain.resolve().parent.name), plain


def _hear_all(
    outputs: list[LoggedOutput], folder: Path, recognizer: Recognizer, console: Console
) -> dict[int, Any]:
    from audiollm.evaluate.interpret.quality import hear

    transcripts = {}
    with bar(console, "hearing", len(outputs)) as progress:
        for output in outputs:
            transcripts[output.index] = hear(output, folder, recognizer)
            step(progress, str(output.index))
    return transcripts


def _judge_all(
    judge: FragmentJudge, systems: list[LogOfSystem], language: str, console: Console
) -> tuple[list[FragmentVerdict], list[tuple[str, str]]]:
    """The verdicts on all outputs, and the outputs without any, each with the reason."""
    from audiollm.evaluate.interpret.logged_outputs import counted_unit
    from audiollm.evaluate.judges.ticketed_answers import VerdictError

    verdicts: list[FragmentVerdict] = []
    missing = []
    with bar(console, "judging", sum(len(system.outputs) for system in systems)) as progress:
        for system, output in [(log, output) for log in systems for output in log.outputs]:
            transcript = system.transcripts.get(output.index)
            words = transcript.text if transcript and not transcript.problem else output.text
            try:
                verdicts += judge.judge(system.name, output, words, system.folder, counted_unit(language))
            except VerdictError as error:
                missing.append((f"{system.name} {output.index} VIP", str(error)))
            step(progress, f"{system.name} {output.index}")
    return verdicts, missing


def _mixer(folder: Path) -> Mixer:
    """Return the function that writes source (left) and output as heard (right) into one file."""

    def mix(output: LoggedOutput, system: LogOfSystem) -> Path | None:
        import torch

        from audiollm.audio import AudioError, load, resample, save
        from audiollm.files.atomic import safe_name

        if not isinstance(output.source, str) or not output.source:
            return None
        try:
            source = load(system.folder / output.source, mono=True)
            right_1N = torch.zeros(1, 0)
            if output.is_speech:
                speech = load(system.folder / output.prediction, mono=True)
                offset_ms = output.prediction_offset
                offset_ms = output.delays[0] if offset_ms is None else offset_ms
                lead_1N = torch.zeros(1, round(offset_ms / 1000 * source.sample_rate))
                speech_1N = resample(speech.samples_CN, speech.sample_rate, source.sample_rate)
                right_1N = torch.cat([lead_1N, speech_1N], dim=1)
        except AudioError:
            return None
        samples_2N = torch.zeros(2, max(source.samples_CN.shape[1], right_1N.shape[1]))
        samples_2N[0, : source.samples_CN.shape[1]] = source.samples_CN[0]
        samples_2N[1, : right_1N.shape[1]] = right_1N[0]
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{safe_name(system.name)}-{output.index}.wav"
        save(path, samples_2N, source.sample_rate)
        return path

    return mix
