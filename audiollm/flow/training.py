"""The work of the stage `train_flow`. Called on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from audiollm.autoencoder import load_autoencoder
from audiollm.data.records.shards import Shards
from audiollm.devices import default_device
from audiollm.errors import ConfigError, StageError
from audiollm.files.json_files import read_json_file
from audiollm.files.set_aside import SetAside
from audiollm.flow.conditions.own import Words
from audiollm.flow.corpus import CorpusFacts, UsableSounds, open_corpus, survey_sounds
from audiollm.flow.eval_sounds import EvalSounds, select_sound_prompts
from audiollm.flow.model.context import ContextShares
from audiollm.flow.model.mmdit import MMDiTConfig
from audiollm.flow.model.objective import ConditionDropout, TimeDensity
from audiollm.flow.model.thinksound import CAPTION_DIM, ThinkSound, ThinkSoundConfig
from audiollm.flow.settings import TrainFlowConfig
from audiollm.flow.sound_model import ConditionFacts, SoundModel, SoundModelConfig, check_autoencoder
from audiollm.flow.task import FlowTask, FlowTaskConfig
from audiollm.models.pretrained import model_folder
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import required
from audiollm.train.loop.checkpoint import trained_weights
from audiollm.train.loop.loop import train


def train_flow(config: TrainFlowConfig, context: Context) -> dict[str, Any]:
    """Train on the encoded sounds and save the model to `model`.

    Raises:
        StageError: no sound can be used, sources of different encoders, or settings that do not fit the sounds.
        ConfigError: a model to start from that cannot be loaded.
    """
    device, ranks = default_device(), context.ranks
    sources, facts = open_corpus([latents.path for latents in config.samples])
    usable = survey_sounds(sources, facts)
    _check_usable(usable, config)
    if ranks.first:
        set_aside = SetAside(context.folder / "set_aside.jsonl", "train_flow")
        set_aside.add(usable.bad)
    torch.manual_seed(config.seed)
    model = build_sound_model(config, facts, usable).to(device)
    used_conditions = {
        name: condition for name, condition in facts.conditions.items() if name in model.config.conditions
    }
    if ranks.first and (unused_names := [name for name in usable.present if name not in used_conditions]):
        context.say(f"{', '.join(unused_names)}: not taken by {config.start}, and left out")
    # what held-out samples alone have, or a start does not take, is not read
    facts = replace(facts, conditions=used_conditions)
    latent_weights = [latents.weight for latents in config.samples]
    weights = [
        len(used) if weight is None else weight
        for weight, used in zip(latent_weights, usable.train, strict=True)
    ]
    task_config = FlowTaskConfig(
        seed=config.seed,
        batch_size=required(config.batch_size),
        density=TimeDensity(**config.time.model_dump()),
        dropout=ConditionDropout(
            config.dropout,
            required(config.dropout_video),
            required(config.dropout_words),
            config.dropout_together,
        ),
        context=ContextShares(**config.context.model_dump()) if model.takes_context else None,
        window=_window_latents(config, facts),
        max_eval_samples=config.max_eval_samples,
    )
    listen = _eval_sounds(config, model, sources, facts, usable, context)
    given_weights = None if latent_weights == [None] * len(latent_weights) else weights
    task = FlowTask(model, sources, facts, usable, task_config, given_weights, ranks, listen)
    steps = config.steps_for(sum(len(indices) for indices in usable.train) / required(config.batch_size))
    loop = config.loop_config(steps, evaluations=8, betas=(0.9, 0.95))
    figures = train(task, loop, context.folder, context, device)
    if ranks.first:
        trained = SoundModel(model.config)
        trained.load_state_dict(trained_weights(context.folder, "model"))
        trained.save_pretrained(context.folder / "model")
        figures["set_aside"] = len(usable.bad)
        figures["sounds"] = sum(len(indices) for indices in usable.train)
    ranks.barrier()
    return figures


def build_sound_model(config: TrainFlowConfig, facts: CorpusFacts, usable: UsableSounds) -> SoundModel:
    """The model of a training: its transformer and encoders from the settings and the sounds, or the one to start from.

    Raises:
        ConfigError: a start of another kind, of another autoencoder, or with other conditions.
    """
    if config.start is not None and _is_sound_model(config.start):
        model = SoundModel.from_pretrained(config.start)
        _check_start(model.config, facts, config.start)
        _check_start_shape(model.config, config, config.start)
        model.config = replace(
            model.config,
            dropout_each=max(model.config.dropout_each, config.dropout),
            dropout_together=max(model.config.dropout_together, config.dropout_together),
            longest_s=max(model.config.longest_s, _longest_s(config, facts, usable)),
        )
        return model.train()
    model_config = sound_model_config(config, facts, usable)
    model = SoundModel(model_config)
    if config.start is not None:
        if not isinstance(model.transformer, ThinkSound):
            raise ConfigError(
                "no trained sound model here",
                str(config.start),
                "released weights go with preset: thinksound",
            )
        released = ThinkSound.from_released(config.start, model.transformer.config)
        model.transformer.load_state_dict(released.state_dict())
    return model


def sound_model_config(config: TrainFlowConfig, facts: CorpusFacts, usable: UsableSounds) -> SoundModelConfig:
    """The shape of a new model.

    Raises:
        StageError: the released structure, and conditions that it does not take.
    """
    conditions: dict[str, ConditionFacts] = {}
    for name in usable.present:
        condition = facts.conditions[name]
        width = condition.width if condition.kind == "features" else required(config.encoder_width)
        conditions[name] = ConditionFacts(**{**asdict(condition), "width": width})
    words = (
        Words.of(usable.texts).vocabulary
        if any(condition.kind == "words" for condition in conditions.values())
        else ()
    )
    widths = {
        name: conditions[name].width if name in conditions else 0
        for name in ("frames", "sync", "caption", "cot")
    }
    if config.preset == "native":
        transformer: Mapping[str, Any] = asdict(
            MMDiTConfig(
                latent_dim=facts.latent_dim,
                latent_rate=facts.latent_rate,
                hidden_size=required(config.hidden_size),
                num_heads=required(config.num_heads),
                multi_stream_blocks=required(config.multi_stream_blocks),
                single_stream_blocks=required(config.single_stream_blocks),
                frames_dim=widths["frames"],
                sync_dim=widths["sync"],
                caption_dim=widths["caption"],
                caption_pooled_dim=usable.pooled_width,
                cot_dim=widths["cot"],
                audio_context=config.audio_context,
                gated_fusion=config.gated_fusion,
                estimate_variance=config.estimate_variance,
            )
        )
    else:
        transformer = asdict(_released_shape(config, facts, conditions))
    return SoundModelConfig(
        preset=config.preset,
        transformer=transformer,
        autoencoder=facts.autoencoder,
        sample_rate=facts.sample_rate,
        channels=facts.channels,
        hop_samples=facts.hop_samples,
        conditions={name: asdict(condition) for name, condition in conditions.items()},
        words=words,
        dropout_each=config.dropout,
        dropout_together=config.dropout_together,
        context_trained=config.preset == "native" and config.audio_context,
        longest_s=_longest_s(config, facts, usable),
    )


# Private


def _eval_sounds(
    config: TrainFlowConfig,
    model: SoundModel,
    sources: Sequence[Shards],
    facts: CorpusFacts,
    usable: UsableSounds,
    context: Context,
) -> EvalSounds | None:
    """Build the maker of held-out sounds at evaluations; None: no autoencoder is given, or nothing is held out.

    Raises:
        ConfigError: an autoencoder that cannot be loaded, or another one than that of the latents.
    """
    if config.autoencoder is None or not config.eval_sounds or not usable.test:
        return None
    codec, ranks = load_autoencoder(config.autoencoder), context.ranks
    check_autoencoder(model.config, codec.digest, str(config.autoencoder))
    in_parts = ranks.world > 1 and config.strategy == "fsdp2"
    copy = SoundModel(model.config).to(next(model.parameters()).device) if in_parts and ranks.first else None
    prompts = (
        select_sound_prompts(
            model, sources, facts, usable, _window_latents(config, facts), config.eval_sounds
        )
        if ranks.first
        else []
    )
    if not ranks.of_first(bool(prompts)):
        return None
    folder = context.folder / "listening"
    return EvalSounds(model, copy, codec, prompts, folder, ranks, in_parts=in_parts)


def _longest_s(config: TrainFlowConfig, facts: CorpusFacts, usable: UsableSounds) -> float:
    """Seconds of the longest sound that the model sees: longer ones are trained on windows."""
    window = _window_latents(config, facts)
    return (usable.longest if window is None else min(window, usable.longest)) / facts.latent_rate


def _window_latents(config: TrainFlowConfig, facts: CorpusFacts) -> int | None:
    """Latents of a window; None: sounds are trained whole."""
    return None if config.window_s is None else max(1, round(config.window_s * facts.latent_rate))


def _released_shape(
    config: TrainFlowConfig, facts: CorpusFacts, conditions: Mapping[str, ConditionFacts]
) -> ThinkSoundConfig:
    unencoded_names = sorted(name for name, condition in conditions.items() if condition.kind != "features")
    if unencoded_names:
        raise StageError(
            f"preset thinksound takes features of pretrained encoders, and {', '.join(unencoded_names)} have none",
            "name encoders in `encode_latents`, with pads: true",
            2,
        )
    if config.window_s is not None and "sync" in conditions:
        raise StageError(
            "preset thinksound takes the synchronisation of whole sounds, and window_s cuts it",
            "leave window_s out, and cut longer sounds before `encode_latents`",
            2,
        )
    shape = ThinkSoundConfig()
    widths = {name: condition.width for name, condition in conditions.items()}
    if widths.get("caption", CAPTION_DIM) != CAPTION_DIM or widths.get("cot", CAPTION_DIM) < CAPTION_DIM:
        raise StageError(
            f"preset thinksound takes captions of width {CAPTION_DIM} and a CoT at least as wide, not "
            f"{widths.get('caption', CAPTION_DIM)} and {widths.get('cot', shape.text_dim)}",
            "encode with MetaCLIP H/14 and T5 v1.1 XL, or train preset native",
            2,
        )
    multi, single = required(config.multi_stream_blocks), required(config.single_stream_blocks)
    return ThinkSoundConfig(
        latent_dim=facts.latent_dim,
        frames_dim=widths.get("frames", shape.frames_dim),
        sync_dim=widths.get("sync", shape.sync_dim),
        text_dim=widths.get("cot", shape.text_dim),
        hidden_size=required(config.hidden_size),
        depth=multi + single,
        fused_depth=single,
        num_heads=required(config.num_heads),
        latent_rate=facts.latent_rate,
    )


def _is_sound_model(folder: Path) -> bool:
    try:
        model_type = read_json_file(model_folder(folder) / "config.json", dict).get("model_type")
    except ConfigError:
        return False
    return model_type == "audiollm_flow"


def _check_start(start: SoundModelConfig, facts: CorpusFacts, folder: Path) -> None:
    if start.autoencoder != facts.autoencoder:
        raise ConfigError(
            f"was trained on latents of another autoencoder ({start.autoencoder[:12]}, here {facts.autoencoder[:12]})",
            str(folder),
            "encode the sounds with its autoencoder",
        )
    for name, values in start.conditions.items():
        here = facts.conditions.get(name)
        if here is not None and here.made_by != values["made_by"]:
            raise ConfigError(
                f"was trained on {name} of another encoder", str(folder), "encode them with its encoder"
            )


def _check_start_shape(start: SoundModelConfig, config: TrainFlowConfig, folder: Path) -> None:
    """Refuse settings of a model's shape that are set, and that the start does not have."""
    has = {
        "preset": start.preset,
        "audio_context": start.context_trained,
        "gated_fusion": start.transformer.get("gated_fusion", False),
        "estimate_variance": start.transformer.get("estimate_variance", 0.05),
    }
    for name, value in has.items():
        if name in config.model_fields_set and getattr(config, name) != value:
            raise ConfigError(
                f"{name}: {getattr(config, name)} is set, and the start was trained with {value}",
                str(folder),
                f"leave {name} out, or train anew without start",
            )


def _check_usable(usable: UsableSounds, config: TrainFlowConfig) -> None:
    if not any(usable.train):
        raise StageError(
            "train_flow: no sound to train on",
            f"{len(usable.bad)} cannot be used, {len(usable.test)} are held out; the first reason: "
            + (str(usable.bad[0]) if usable.bad else "there are none"),
            2,
        )
    weighted = [latents.weight for latents in config.samples]
    if not any(weight is None or weight for weight in weighted):
        raise StageError("train_flow.samples: every weight is 0", "give one above 0, or none", 2)
    for number, (weight, used) in enumerate(zip(weighted, usable.train, strict=True)):
        if weight and not used:
            raise StageError(
                f"{config.samples[number].path} has a weight and no sound to train on", "leave it out", 2
            )
