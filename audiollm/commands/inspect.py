"""The command `inspect`: what is trained on, token by token."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from audiollm.commands.inspect_table import OFF, ON, SampleView, left_out, row_line
from audiollm.errors import ConfigError
from audiollm.hub_models.options import Download, folder_option

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

    from audiollm.commands.inspect_answers import AnswersView
    from audiollm.data.hearing.features import FeatureShape
    from audiollm.data.records.source import LoadedSample, Source
    from audiollm.families.family import ModelFolder

VOCABULARY_SIZE, VOCABULARY_SAMPLES = 1024, 2000
"""Size of the vocabulary that is trained where no tokenizer is given, and number of samples it is trained on."""


def inspect(
    target: Annotated[
        str,
        typer.Argument(
            help="A folder of shards, a .jsonl of samples, or the folder of a run's stage "
            "(compose, tokenize, train, train_preference, train_policy).",
            metavar="TARGET",
            show_default=False,
        ),
    ],
    sample: Annotated[
        str | None,
        typer.Option(
            help="Id of the sample, or its number, counted from 0.",
            show_default="the first; of rollouts, all",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        folder_option(
            "Folder with a tokenizer.json, or of a model whose rows are shown as it reads them.",
            "tokenizer",
            show_default="a train stage's own, else one trained on the samples",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of rows to show, from the first; of rollouts, number of groups.",
            show_default="all; 4 groups",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON line per row, then the summary.")
    ] = False,
    answers: Annotated[
        str | None,
        typer.Option(
            help="Of a sample with answers to choose among: the two to show beside each other, like 0,2.",
            show_default="the best and the worst",
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            help="Of train_policy: show the rollouts of this step; -1 is the last.", show_default="none"
        ),
    ] = None,
    download: Download = False,
) -> None:
    """Show a training sample row by row: kind, token, target or masked, weight.

    The table leaves out the middle of long audio and counts it; --json has every row.
    Weights are those of the sample packed alone: text adds up to 1, and so does audio.
    Of a preference, all answers with their scores, then chosen beside rejected.
    With --step, the policy's own answers of that step of train_policy: prompt,
    recording, rewards by function and advantages, the best and the worst first.

    Examples:

    audiollm inspect runs/quickstart/tokenize

    audiollm inspect runs/quickstart/train --sample eight_anna_0

    audiollm inspect samples.jsonl --sample 17 --tokenizer models/llama --json

    audiollm inspect pairs.jsonl --answers 0,3

    audiollm inspect runs/audio-reasoner-tiny/train_policy --step -1
    """
    if step is not None:
        from audiollm.commands.inspect_rollouts import groups_of_step, print_rollouts, rollout_json_lines

        groups = groups_of_step(target, step, sample)
        for line in rollout_json_lines(groups) if as_json else ():
            print(line)
        if not as_json:
            print_rollouts(groups, limit, Console(highlight=False))
        return
    console = Console(highlight=False, soft_wrap=True)
    view = _open(target, sample or "0", tokenizer, answers)
    if not isinstance(view, SampleView):
        from audiollm.commands.inspect_answers import answer_json_lines, print_answers

        for line in answer_json_lines(view, limit) if as_json else ():
            print(line)
        if not as_json:
            print_answers(view, limit, console)
        return
    for line in _json_lines(view, limit) if as_json else ():
        print(line)
    if not as_json:
        _print_table(view, limit, console)


def _open(
    target: str, sample: str, tokenizer_folder: Path | None, wanted_answers: str | None
) -> SampleView | AnswersView:
    from audiollm.commands.inspect_rollouts import rollouts_in
    from audiollm.data.chat.template import Template
    from audiollm.data.hearing.features import heard_parts, part_audio
    from audiollm.data.inspection import stream_rows, summarize_stream
    from audiollm.data.records.opening import open_source
    from audiollm.data.text.tokenizer import header_style_of
    from audiollm.errors import BadSample

    address, own_tokenizer, encoder = _find(target)
    source = open_source(address)
    number, loaded = _pick(source, sample)
    if wanted_answers is not None and not loaded.sample.answers:
        raise ConfigError(
            f"sample {loaded.sample.id} has no answers to choose among", "--answers", "leave it out"
        )
    notes = [f"set aside: {bad}" for bad in source.bad]
    if (records := rollouts_in(target)) is not None:
        notes.append(f"its rollouts: --step {records.steps[0]} to {records.steps[-1]}")
    heading = (
        f"{loaded.sample.id}: task {loaded.sample.task}, sample {number} of {len(source)} in {source.name}"
    )
    family = _row_layout(tokenizer_folder, own_tokenizer, Path(target))
    if family is not None:
        from audiollm.commands.inspect_family import view_by_family

        return view_by_family(family, loaded, wanted_answers, heading, notes, source.name)
    vocabulary = _find_vocabulary(source, tokenizer_folder or own_tokenizer, notes)
    codec = _codec(source, loaded)
    codes = loaded.encodings[0] if loaded.encodings else []
    has_codes = bool(codes)
    if not codes and not (encoder is not None and all(heard_parts(loaded.sample))):
        codes = _stand_ins(loaded, codec, notes)
    template = Template(
        vocabulary, int(codec["num_codebooks"]), int(codec["codebook_size"]), header_style_of(vocabulary)
    )
    try:
        if loaded.sample.answers:
            from audiollm.commands.inspect_answers import view_answers

            coded = replace(loaded, encodings=[codes] if codes else [])
            return view_answers(template, coded, encoder, wanted_answers, heading, notes, has_codes)
        stream = template.compile(loaded.sample.messages, part_audio(loaded, codes, encoder))
    except (BadSample, ValueError) as error:
        raise ConfigError(f"sample {loaded.sample.id}: {error}", source.name) from None
    return SampleView(
        heading=heading,
        notes=notes,
        books=template.num_codebooks,
        rows=stream_rows(template, stream),
        summary=[asdict(summary) for summary in summarize_stream(template, stream)],
        has_codes=bool(loaded.encodings),
    )


def _row_layout(*folders: Path | None) -> ModelFolder | None:
    """The first of these folders that holds a model, or began from one, that lays out samples in its own way."""
    import yaml

    from audiollm.families.registry import is_packed, open_model_folder

    for folder in filter(None, folders):
        settings: Any = {}
        if (folder / "config.yaml").is_file():
            settings = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")) or {}
        stages = [stage for stage in settings.values() if isinstance(stage, dict)]
        begun_from = [stage.get(key) for stage in stages for key in ("start", "model")]
        for place in (folder, *(Path(path) for path in begun_from if isinstance(path, str))):
            try:
                model = open_model_folder(place)
            except ConfigError:
                continue
            return None if is_packed(place) else model
    return None


# ------------------------------------------------------------------------------------- what is looked at


def _find(target: str) -> tuple[str, Path | None, FeatureShape | None]:
    """Locate the samples of `target`, and for a train stage its vocabulary (even if unfinished) and its features.

    The features are None where heard audio is given as codes.
    """
    import yaml

    folder = Path(target)
    for inner in ("shards", "samples.jsonl"):
        if (folder / inner).exists():
            return str(folder / inner), None, None
    if (folder / "config.yaml").is_file():
        settings = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        for stage in settings.values() if isinstance(settings, dict) else ():
            sources = stage.get("samples") if isinstance(stage, dict) else None
            if isinstance(
                sources, list
            ):  # of several sources the first; others can be given by their own paths
                begun_from = [Path(stage["start"])] if isinstance(stage.get("start"), str) else []
                learned = [folder / "model", folder / "vocabulary", *begun_from]
                with_one = [candidate for candidate in learned if (candidate / "tokenizer.json").exists()]
                vocabulary = with_one[0] if with_one else None
                path = str(sources[0]["path"])
                if "://" not in path and not Path(path).exists():
                    remedy = "go to the folder in which the run was started"
                    raise ConfigError(
                        f"its samples are not there: {path}", str(folder / "config.yaml"), remedy
                    )
                return path, vocabulary, _features(folder, stage)
        raise ConfigError(
            "this stage holds no samples", str(folder), "give that of compose, tokenize or train"
        )
    if stages := sorted(path.parent.name for path in folder.glob("*/stage.json")):
        raise ConfigError(
            "the folder of a whole run", str(folder), f"give that of a stage: {', '.join(stages)}"
        )
    return target, None, None


def _features(folder: Path, stage: dict[str, Any]) -> FeatureShape | None:
    """Feature shape of a train stage's audio encoder: read from its model, from its start, or from its settings."""
    from audiollm.data.hearing.features import FeatureShape
    from audiollm.models.audio_encoder import frozen_features
    from audiollm.models.audio_stem import DEFAULT_STRIDE, FRAMES_PER_POSITION
    from audiollm.models.hub import read_config
    from audiollm.models.layouts import LANGUAGE_MODELS, config_of
    from audiollm.models.pretrained import model_folder

    if stage.get("audio_in") != "features":
        return None
    for candidate in (folder, Path(stage.get("start") or folder)):
        if any((path / "config.json").exists() for path in (candidate, candidate / "model")):
            data = read_config(model_folder(candidate))
            encoder = (
                None
                if data.get("model_type") in LANGUAGE_MODELS
                else config_of(data, str(candidate)).audio_encoder
            )
            if encoder is not None:
                return frozen_features(encoder, model_folder(candidate))
    settings = (stage.get("shape") or {}).get("audio_encoder") or {}
    stem = settings.get("stem", "conv1d")
    stride = settings.get("stride") or DEFAULT_STRIDE[stem]
    return FeatureShape(stride=stride, frames_per_position=FRAMES_PER_POSITION[stem])


def _pick(source: Source, sample_key: str) -> tuple[int, LoadedSample]:
    from audiollm.errors import BadSample

    if not len(source):
        raise ConfigError(
            "the source has no usable sample", source.name, "; ".join(str(bad) for bad in source.bad)
        )
    try:
        if sample_key.isdecimal() and int(sample_key) < len(source):
            return int(sample_key), source[int(sample_key)]
    except BadSample as error:
        raise ConfigError(str(error), "", "give another --sample") from None
    for number, loaded in _iterate_readable(source):
        if loaded.sample.id == sample_key:
            return number, loaded
    raise ConfigError(
        f"--sample {sample_key}: no such id, and no such number",
        source.name,
        f"numbers are 0 to {len(source) - 1}; the first id is {next(iter(_iterate_readable(source)))[1].sample.id}",
    )


def _iterate_readable(source: Source) -> Iterator[tuple[int, LoadedSample]]:
    from audiollm.errors import BadSample

    for number in range(len(source)):
        try:
            yield number, source[number]
        except BadSample:
            continue


def _find_vocabulary(source: Source, folder: Path | None, notes: list[str]) -> Tokenizer:
    from audiollm.data.records.sample import TextPart
    from audiollm.data.text.tokenizer import load_text_tokenizer, train_text_tokenizer

    if folder is not None:
        inner = folder / "model"
        return load_text_tokenizer(inner if (inner / "tokenizer.json").exists() else folder)
    texts: list[str] = []
    for number, loaded in _iterate_readable(source):
        if number >= VOCABULARY_SAMPLES:
            break
        for message in loaded.sample.messages:
            texts += [
                message.role,
                *(
                    content_part.text
                    for content_part in message.content
                    if isinstance(content_part, TextPart)
                ),
            ]
        for answer in loaded.sample.answers:
            texts += [
                "assistant",
                *(content_part.text for content_part in answer.content if isinstance(content_part, TextPart)),
            ]
    notes.append(
        "no --tokenizer is given: the text is shown in a vocabulary that was trained on these samples"
    )
    return train_text_tokenizer(texts, VOCABULARY_SIZE)


def _codec(source: Source, loaded: LoadedSample) -> dict[str, Any]:
    """The codec's shape: recorded in the shards, else read off the codes, else that of the default codec."""
    from audiollm.codec import CODEBOOK_SIZE, FRAME_RATE, NUM_CODEBOOKS

    facts = getattr(source, "facts", {}).get("codec") or {}
    books = [codes_KT.shape[0] for row in loaded.encodings for codes_KT in row]
    codec_shape = {"num_codebooks": books[0] if books else NUM_CODEBOOKS}
    return {"codebook_size": CODEBOOK_SIZE, "frame_rate": float(FRAME_RATE), **codec_shape, **facts}


def _stand_ins(loaded: LoadedSample, codec: dict[str, Any], notes: list[str]) -> list[Tensor]:
    """Codes of the length that the audio will have."""
    import torch

    from audiollm.errors import BadSample

    codes = []
    for clip in loaded.audio:
        try:
            duration_s = clip.load().duration_s if clip.end_s is None else clip.end_s - clip.start_s
        except BadSample as error:
            raise ConfigError(str(error), "", "give a sample whose audio is there") from None
        frames = max(1, math.ceil(duration_s * codec["frame_rate"] - 1e-6))
        codes.append(torch.zeros(codec["num_codebooks"], frames, dtype=torch.long))
    if codes:
        rate, books = codec["frame_rate"], codec["num_codebooks"]
        notes.append(f"no codes yet: audio is counted at {rate:g} frames per second of {books} codebooks")
    return codes


# ----------------------------------------------------------------------------------------------- output


def _json_lines(view: SampleView, limit: int | None) -> Iterable[str]:
    for row in view.rows[:limit]:
        record = asdict(row)
        if row.codes and not view.has_codes:
            record["codes"] = None
        yield json.dumps(record, ensure_ascii=False)
    yield json.dumps(
        {"sample": view.heading, "notes": view.notes, "summary": view.summary}, ensure_ascii=False
    )


def _print_table(view: SampleView, limit: int | None, console: Console) -> None:
    from audiollm.data.inspection import elide

    books = view.books
    width = max(24, 5 * books - 1)
    console.print(Text(view.heading, style="bold"))
    for note in view.notes:
        console.print(Text(note, style="yellow"))
    console.print(
        Text(
            f"{'row':>6}  {'kind':<9}  {'token or codes':<{width}}  {'target':<{max(books, 6)}}  weight",
            "bold",
        )
    )
    # both ends of a span are the triangles of the delay pattern, K rows each; without codes they say nothing
    ends = books + 1 if view.has_codes else 0
    num_printed = 0
    for item in elide(view.rows, ends):
        if limit is not None and num_printed >= limit:
            console.print(Text(f"{'':>6}  {len(view.rows) - num_printed} more rows (--limit)", style="dim"))
            break
        if isinstance(item, list):
            console.print(left_out(item, width, books, view.has_codes))
            num_printed += len(item)
        else:
            console.print(row_line(item, width, books))
            num_printed += 1
    console.print(Text(f"\n{ON} target   {OFF} masked", style="dim"))
    for summary in view.summary:
        console.print(_total(summary))


def _total(summary: dict[str, Any]) -> Text:
    ends = f", {summary['eos_targets']} of them EOS" if summary["eos_targets"] else ""
    return Text(
        f"{summary['kind']:<9}  {summary['rows']} rows, {summary['targets']} targets{ends}, "
        f"weight {summary['weight']:.4f}"
    )
