"""The work of the stage `train_tokenizer`, called on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from audiollm.audio import save
from audiollm.devices import default_device
from audiollm.errors import StageError
from audiollm.files.atomic import write_json
from audiollm.files.set_aside import SetAside
from audiollm.recipe.ranks import ALONE
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import required
from audiollm.train.loop.loop import train
from audiollm.train.loop.monitor import Monitor
from audiollm.train.settings import LoopConfig
from tokenizer.clips import ClipStore, find_training_clips
from tokenizer.higgs import HiggsTokenizer, new_higgs
from tokenizer.native.model import AudioTokenizer, TokenizerConfig
from tokenizer.quantizers.codebooks import copy_from_rank_0
from tokenizer.rates import FRAME_RATE, SAMPLE_RATE
from tokenizer.teacher.model import SemanticTeacher, load_teacher
from tokenizer.teacher.training import TeacherTrainingConfig, fit_statistics, train_teacher
from tokenizer.training.discriminators import TINY, DiscriminatorConfig
from tokenizer.training.linear_path import LINEAR_PATH_RULES
from tokenizer.training.losses import ReconstructionLoss
from tokenizer.training.settings import TrainTokenizerConfig
from tokenizer.training.task import TokenizerTask, TokenizerTaskConfig, evaluate_tokenizer
from tokenizer.training.voicing import voicing_figures, warn_of_whispers

EVALUATED = ("mel", "stft", "perplexity_first", "perplexity_mean")
"""The figures of an evaluation; see `evaluate_tokenizer`."""


def train_tokenizer(config: TrainTokenizerConfig, context: Context) -> dict[str, Any]:
    """Train, save to `model`, and write before/after examples of held-out clips.

    Every rank trains; the first one does the rest, and it alone writes.
    """
    device, ranks = default_device(), context.ranks
    clips = find_training_clips(config.audio)
    stores = {"train": ClipStore(clips.train, SAMPLE_RATE), "test": ClipStore(clips.test, SAMPLE_RATE)}
    step_s = required(config.batch_size) * config.crop_frames / FRAME_RATE
    steps = config.steps_for(stores["train"].duration_s / step_s)
    start = _load_start(config)
    teacher = _teacher(config, context, stores, steps, device) if config.preset == "native" else None
    torch.manual_seed(config.seed)
    model = (start or _new(config, teacher)).to(device)
    if isinstance(start, AudioTokenizer):
        _check_taught(start, teacher, config)
    task = TokenizerTask(
        model, stores["train"], stores["test"], _make_tokenizer_task_config(config, model), teacher, ranks
    )
    # the quantizer joins after the plain autoencoder
    linear_path = isinstance(model, AudioTokenizer) and model.config.linear_path
    loop = config.loop_config(
        steps,
        ema_decay=0.99,
        evaluations=5,
        unused_parameters=True,
        rules=LINEAR_PATH_RULES if linear_path else (),
    )
    fitted: dict[str, Any] = {}
    if config.starts_in_closed_form:
        context.say("fitting the linear path in closed form")
        fitted = task.fit_linear_path()
    figures = fitted | train(task, loop, context.folder, context, device)
    task.refit_codebooks()
    found_bad = [bad for rank_bad in ranks.gather(stores["train"].bad) for bad in rank_bad]
    if ranks.first:
        figures |= _finish_tokenizer(model, stores["test"], context)
        _report_last(figures, loop, context)
        warn_of_whispers(figures, context)
        set_aside = SetAside(context.folder / "set_aside.jsonl", "train_tokenizer")
        set_aside.add([*clips.bad, *stores["train"].bad, *stores["test"].bad, *found_bad])
        figures["set_aside"] = len(set_aside.rows)
    ranks.barrier()
    return figures


def _finish_tokenizer(
    model: AudioTokenizer | HiggsTokenizer, held_out: ClipStore, context: Context
) -> dict[str, Any]:
    """Save, evaluate on the CPU and write the examples. Returns the figures."""
    folder = context.folder
    model.cpu().save_pretrained(folder / "model")
    figures: dict[str, Any] = dict(evaluate_tokenizer(model, held_out, ReconstructionLoss(model.sample_rate)))
    figures["bitrate_bps"] = model.frame_rate * model.num_codebooks * np.log2(model.codebook_size)
    context.say("tracking the pitch of held-out clips before and after")
    figures |= voicing_figures(lambda samples_CN: model.decode(model.encode(samples_CN)), held_out)
    _write_examples(model, held_out, folder)
    return figures


def _report_last(figures: Mapping[str, Any], loop: LoopConfig, context: Context) -> None:
    """Draw the tokenizer that is saved as the last evaluation: its codebooks were fitted after the last step."""
    steps = int(figures["steps"])
    monitor = Monitor(context.folder, steps, loop.report_to, context.say)
    monitor.write(steps, {f"evaluation/{key}": figures[key] for key in EVALUATED})
    monitor.close()


def _teacher(
    config: TrainTokenizerConfig,
    context: Context,
    stores: Mapping[str, ClipStore],
    steps: int | None,
    device: torch.device,
) -> SemanticTeacher | None:
    """The teacher by path, or one that is first trained on the same files (once: a resumed run finds it).

    The first rank trains it alone, while the others wait.
    """
    if config.teacher == "none":
        return None
    if config.teacher != "own":
        teacher = load_teacher(required(config.teacher))
        if not teacher.is_fitted:
            context.say("measuring the teacher's features")
            fit_statistics(teacher.to(device), stores["train"], config.seed)
            copy_from_rank_0(teacher.buffers())
        return teacher.to(device)
    folder, ranks = context.folder / "teacher", context.ranks
    if ranks.first and not (folder / "model" / "config.json").exists():
        context.say("no teacher given: training one on the same files first")
        share = config.teacher_share
        budget = TeacherTrainingConfig(
            seed=config.seed,
            steps=None if steps is None else max(20, round(share * steps)),
            minutes=None if config.minutes is None else share * config.minutes,
            cpu_minutes=None if config.cpu_minutes is None else share * config.cpu_minutes,
        )
        alone = replace(context, folder=folder, ranks=ALONE)
        train_teacher(stores["train"], stores["test"], budget, folder, alone, device)
    ranks.barrier()
    return load_teacher(folder / "model").to(device)


def _load_start(config: TrainTokenizerConfig) -> AudioTokenizer | HiggsTokenizer | None:
    """The tokenizer to go on from, if any. One that had no teacher is refused before one is trained for it."""
    if config.start is None:
        return None
    if config.preset == "higgs":
        return HiggsTokenizer.from_pretrained(config.start)
    model = AudioTokenizer.from_pretrained(config.start)
    if not model.config.semantic_dim and config.teacher != "none":
        raise StageError(
            f"the tokenizer in {config.start} was taught 0 features a frame: it had no teacher",
            "give `teacher: none`",
            2,
        )
    return model


def _check_taught(
    model: AudioTokenizer, teacher: SemanticTeacher | None, config: TrainTokenizerConfig
) -> None:
    teacher_dim, has = (teacher.feature_dim if teacher else 0), model.config.semantic_dim
    if has != teacher_dim:
        raise StageError(
            f"the tokenizer in {config.start} was taught {has} features a frame, this teacher has {teacher_dim}",
            "give the teacher that it was trained with",
            2,
        )


def _new(config: TrainTokenizerConfig, teacher: SemanticTeacher | None) -> AudioTokenizer | HiggsTokenizer:
    if config.preset == "higgs":
        return new_higgs(Path(str(config.teacher)))
    return AudioTokenizer(_make_tokenizer_config(config, teacher))


def _make_tokenizer_config(config: TrainTokenizerConfig, teacher: SemanticTeacher | None) -> TokenizerConfig:
    blocks = required(config.blocks)
    return TokenizerConfig(
        quantizer=config.quantizer,
        mel_hidden_size=required(config.mel_hidden_size),
        hidden_size=required(config.hidden_size),
        encoder_layers=blocks[:2],
        decoder_layers=blocks[2:],
        semantic_dim=teacher.feature_dim if teacher else 0,
        harmonic_source=config.harmonic_source,
        linear_path=config.linear_path,
    )


def _make_tokenizer_task_config(
    config: TrainTokenizerConfig, model: AudioTokenizer | HiggsTokenizer
) -> TokenizerTaskConfig:
    has_source = isinstance(model, AudioTokenizer) and model.config.harmonic_source
    return TokenizerTaskConfig(
        seed=config.seed,
        batch_size=required(config.batch_size),
        crop_frames=config.crop_frames,
        trained_codebooks=config.start is not None,
        commitment_weight=config.commitment_weight,
        semantic_weight=config.semantic_weight,
        pitch_weight=config.pitch_weight if has_source else 0.0,
        adversary_share=required(config.adversary_share),
        quantizer_dropout=config.quantizer_dropout,
        discriminators=TINY if config.size == "tiny" else DiscriminatorConfig(),
    )


def _write_examples(
    model: AudioTokenizer | HiggsTokenizer, clips: ClipStore, folder: Path, count: int = 4
) -> None:
    """Held-out clips before and after, with all codebooks and with the first alone, for the report."""
    rows = []
    for number, (clip, samples_N) in enumerate(clips.picked(count)):
        samples_1N = samples_N[None, : 10 * model.sample_rate]
        codes_KT = model.encode(samples_1N)
        row: dict[str, Any] = {"source": str(clip.path)}
        for name, books in (("original", 0), ("first_codebook", 1), ("decoded", model.num_codebooks)):
            audio_1N = samples_1N if not books else model.decode(codes_KT[:books])[:, : samples_1N.shape[1]]
            row[name] = f"examples/{number}_{name}.wav"
            save(folder / row[name], audio_1N, model.sample_rate)
        rows.append(row)
    write_json(folder / "examples.json", rows)
