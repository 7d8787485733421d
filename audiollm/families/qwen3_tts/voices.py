"""The stage `add_voices`: names for voices in a Qwen3-TTS, each with a row of its own in the table of codes.

In a Base model a row begins as the mean of the speaker encoder's vectors of the voice's recordings. The model stays a
Base: it keeps its speaker encoder, and clones as before. A CustomVoice model has no such encoder: a row begins as the
mean of the voices that it has. `train` then teaches the voices, and their rows with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from audiollm.errors import BadSample, ConfigError, StageError
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import InputModel, InputPath, Stage, StageConfig, StagePlan

if TYPE_CHECKING:
    from torch import Tensor

    from audiollm.data.records.source import LoadedSample
    from audiollm.families.qwen3_tts.kind import Qwen3TTSKind

    Begin = Callable[[Qwen3TTSKind, LoadedSample], Tensor | None]

TABLE = "talker.model.codec_embedding.weight"
FIRST_FREE = 3000
"""Row from which new voices are put where the table has it, as published models have theirs."""


class AddVoicesConfig(StageConfig):
    """Settings of the stage `add_voices`."""

    start: InputModel
    """The folder of a Base model, or of one with named voices (CustomVoice)."""
    samples: InputPath
    """Spoken samples with speakers' names: a manifest, or shards, for a Base model with their sound (`tokenize` with
    `sound: all`)."""


def run_add_voices(config: AddVoicesConfig, context: Context) -> dict[str, Any]:
    """Write `model`: the start's files with more voices.

    Raises:
        ConfigError: the start has neither a speaker encoder nor named voices.
        StageError: no sample has a speaker (and sound, for a Base), names that differ in case alone, or more voices
            than free rows.
    """
    from audiollm.data.records.opening import open_source
    from audiollm.families.qwen3_tts.kind import Qwen3TTSKind
    from audiollm.families.talkers.published_weights import write_published
    from audiollm.files.atomic import write_json
    from audiollm.models.pretrained import StoredWeights, model_folder

    folder = model_folder(config.start)
    kind = Qwen3TTSKind(folder)
    if not kind.is_base and not kind.speakers:
        raise ConfigError(
            "start: this model has neither a speaker encoder nor named voices, and a new voice begins by them",
            str(folder),
            "give a Base or a CustomVoice model",
        )
    source, table = open_source(str(config.samples)), StoredWeights(folder).read(TABLE)
    begin = _vector_of if kind.is_base else _middle_of_voices(kind, table)
    with context.progress("listening to voices" if kind.is_base else "reading names", len(source)) as bar:
        vectors = _mean_vectors(kind, source, begin, lambda: bar.advance(bar.task_ids[0]))
    rows = free_rows(kind, list(vectors))
    for name, vector_C in vectors.items():
        table[rows[name]] = vector_C.to(table.dtype)
    target = context.folder / "model"
    write_published(folder, target, {TABLE: table})
    talker: dict[str, Any] = dict(kind.talker_config)
    talker["spk_id"] = {**(talker.get("spk_id") or {}), **rows}
    talker["spk_is_dialect"] = {**(talker.get("spk_is_dialect") or {}), **dict.fromkeys(rows, False)}
    write_json(target / "config.json", {**kind.config, "talker_config": talker})
    context.say(f"{len(rows)} voices: {', '.join(sorted(rows))}")
    return {"voices": len(rows), "rows": dict(rows)}


def free_rows(kind: Qwen3TTSKind, names: Sequence[str]) -> dict[str, int]:
    """Choose a row of the table of codes for each name.

    Raises:
        StageError: there are fewer free rows than names, or a name is a voice already.
    """
    taken = set(kind.marks)
    present = [name for name in names if name in kind.speakers]
    if present:
        raise StageError(f"{present[0]} is a voice of the model already", "name the new voice otherwise", 2)
    codes, entries = kind.num_codes, int(kind.talker_config["vocab_size"])
    behind = [row for row in range(min(FIRST_FREE, entries), entries) if row not in taken]
    rows = [*behind, *(row for row in range(codes, min(FIRST_FREE, entries)) if row not in taken)]
    if len(names) > len(rows):
        raise StageError(
            f"{len(names)} voices, and the table has {len(rows)} free rows", "give fewer voices", 2
        )
    return dict(zip(names, rows, strict=False))


def _vector_of(kind: Qwen3TTSKind, loaded: LoadedSample) -> Tensor | None:
    """The speaker encoder's vector of a sample's last recording; None: it has none that can be heard."""
    clips = [clip for clip in loaded.audio[-1:] if clip.content is not None]
    if not clips:
        return None
    try:
        return kind.vector_of(clips[0].load(mono=True))
    except (BadSample, ValueError):
        return None


def _middle_of_voices(kind: Qwen3TTSKind, table: Tensor) -> Begin:
    """The mean of the rows of the named voices, whatever a sample holds."""
    mean_C = table[[int(row) for row in kind.talker_config["spk_id"].values()]].double().mean(dim=0)
    return lambda _, loaded: mean_C


def _mean_vectors(
    kind: Qwen3TTSKind, source: Any, begin: Begin, advance: Callable[[], None]
) -> dict[str, Tensor]:
    """The mean vector of each voice in float32, by its name in lower case."""
    sums: dict[str, Any] = {}
    spellings: dict[str, set[str]] = {}
    for number in range(len(source)):
        advance()
        loaded = source[number]
        name = _spoken_by(loaded)
        vector_C = None if name is None else begin(kind, loaded)
        if name is None or vector_C is None:
            continue
        spellings.setdefault(name.lower(), set()).add(name)
        total, count = sums.get(name.lower(), (0.0, 0))
        sums[name.lower()] = total + vector_C.double(), count + 1
    for written in spellings.values():
        if len(written) > 1:
            both = " and ".join(sorted(written)[:2])
            raise StageError(
                f"{both} differ in case alone, and names are looked up in lower case", "rename one", 2
            )
    if not sums:
        sound = " and sound" if kind.is_base else ""
        raise StageError(
            f"no sample has a speaker's name{sound}",
            f"give samples of the task tts with speakers{', tokenized with `sound: all`' if sound else ''}",
            2,
        )
    return {name: (total / count).float() for name, (total, count) in sorted(sums.items())}


def _spoken_by(loaded: LoadedSample) -> str | None:
    from audiollm.families.talkers.turns import speakers_of

    named: Iterable[str] = speakers_of([loaded.sample])
    parts = [part.speaker for part in loaded.sample.audio("assistant") if part.speaker]
    return next(iter([*named, *parts[-1:]]), None)


def _plan_voices(config: AddVoicesConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    from audiollm.families.model_sizes import planned_parameters

    parameters = planned_parameters(Path(config.start), plans)
    return StagePlan(
        parameters=parameters, disk_mb=2 * parameters / 1e6, memory_mb=700 + 4 * parameters / 1e6
    )


STAGE = Stage(
    kind="add_voices",
    config=AddVoicesConfig,
    run=run_add_voices,
    artifacts={"checkpoint": "model"},
    help="named voices for a Qwen3-TTS, each beginning as the mean vector of its recordings or of all voices",
    plan=_plan_voices,
)
