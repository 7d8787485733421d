"""The stages `train_tokenizer` and `tokenize`: their plans, and what they make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from audiollm.data.records.sample import PHRASES
from audiollm.recipe.runner import Context
from audiollm.recipe.stages import Stage, StagePlan, planned_fact, required
from tokenizer.rates import FRAME_RATE, HOP_SAMPLES
from tokenizer.training.settings import TokenizeConfig, TrainTokenizerConfig

FLOPS_PER_PARAMETER = 14.0
"""Operations of a training step for each frame and parameter: discriminators and losses of spectra beside the model. As
measured for size tiny."""
SECONDS_PER_AUDIO_SECOND, SECONDS_PER_CLIP = 0.035, 0.012
"""Core-seconds to encode with the codec of size tiny."""
LATENT, MELS, SALIENCE_LAGS, HARMONIC_BANDS = 64, 100, 64, 7
PITCH_PARAMETERS = 256 * (5 * LATENT + 1) + 256 * 257 + 404 * 257
"""Parameters of the network that reads pitch and voicing from five latents."""
HIGGS_PARAMETERS = 200_343_777
"""Parameters of the published structure, 94 M of them the teacher's (a test compares with the model's)."""


def _train_tokenizer(config: TrainTokenizerConfig, context: Context) -> dict[str, Any]:
    from tokenizer.training.run import train_tokenizer

    return train_tokenizer(config, context)


def _tokenize(config: TokenizeConfig, context: Context) -> dict[str, Any]:
    from tokenizer.training.tokenizing import tokenize_samples

    return tokenize_samples(config, context)


def tokenizer_parameters(
    mel_hidden: int,
    hidden: int,
    blocks: tuple[int, int, int, int],
    harmonic_source: bool = True,
    linear_path: bool = True,
) -> int:
    """Trainable parameters of the native structure without a semantic head (a test compares with the model's)."""
    at_mel, at_frame = blocks[0] + blocks[3], blocks[1] + blocks[2]
    features = MELS + (SALIENCE_LAGS if harmonic_source else 0)
    towers = sum(
        n * (6 * width * width + 15 * width) for n, width in ((at_mel, mel_hidden), (at_frame, hidden))
    )
    inputs = 7 * features * mel_hidden + mel_hidden + 7 * LATENT * hidden + hidden
    strided = 8 * mel_hidden * hidden + hidden + 4 * mel_hidden
    outputs = 2 * hidden + LATENT * (hidden + 1) + 2 * mel_hidden + (HOP_SAMPLES + 2) * (mel_hidden + 1)
    source = PITCH_PARAMETERS + HARMONIC_BANDS * (mel_hidden + 1) if harmonic_source else 0
    maps = LATENT * (4 * features + 1) + 4 * (HOP_SAMPLES // 2 + 1) * (LATENT + 1) if linear_path else 0
    return towers + inputs + strided + outputs + source + maps


def _plan_train(config: TrainTokenizerConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    mel_hidden, hidden, blocks = (
        required(config.mel_hidden_size),
        required(config.hidden_size),
        required(config.blocks),
    )
    parameters = tokenizer_parameters(mel_hidden, hidden, blocks, config.harmonic_source, config.linear_path)
    if config.preset == "higgs":
        parameters, mel_hidden, hidden = HIGGS_PARAMETERS, 1024, 2048  # widths: what its activations come to
    frames = required(config.batch_size) * config.crop_frames
    audio_s = max((plan.facts.get("audio_s", 0.0) for plan in plans.values()), default=0.0)
    steps = config.steps_for(audio_s * FRAME_RATE / frames)
    widths = 4 * mel_hidden * (blocks[0] + blocks[3]) + hidden * (blocks[1] + blocks[2])
    return StagePlan(
        parameters=parameters,
        tokens=float((steps or 0) * frames),
        memory_mb=900 + (parameters * 16 + frames * widths * 14 * 4) / 2**20,
        disk_mb=parameters * (3 * 16 + 4) / 2**20,  # three checkpoints while one is replaced, and the model
        flops=FLOPS_PER_PARAMETER * parameters * (steps or 0) * frames,
        gradient_bytes=4.0 * parameters * (steps or 0),
        sound_s=(steps or 0) * frames / FRAME_RATE,
        seconds=config.budget_seconds(),
        note=config.budget_text(),
    )


def _plan_tokenize(config: TokenizeConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    audio_s = max((plan.facts.get("audio_s", 0.0) for plan in plans.values()), default=0.0)
    clips = max((plan.facts.get("clips", 0.0) for plan in plans.values()), default=0.0)
    frames = audio_s * FRAME_RATE * config.encodings
    encoding_s = config.encodings * (SECONDS_PER_AUDIO_SECOND * audio_s + SECONDS_PER_CLIP * clips)
    return StagePlan(
        tokens=frames,
        memory_mb=900,
        disk_mb=(frames * 16 + clips * 3000) / 2**20,
        core_seconds=3 + encoding_s / config.num_workers(int(clips)),
        note=f"{config.encodings} encodings of {audio_s / 60:.0f} minutes",
        facts={
            "frames": audio_s * FRAME_RATE,
            "clips": clips,
            PHRASES: planned_fact(plans, config.samples, PHRASES),
        },
    )


TRAIN_TOKENIZER = Stage(
    kind="train_tokenizer",
    config=TrainTokenizerConfig,
    run=_train_tokenizer,
    artifacts={"checkpoint": "model", "examples": "examples.json"},
    all_ranks=True,
    help="train the 25 Hz codec from scratch",
    plan=_plan_train,
)

TOKENIZE = Stage(
    kind="tokenize",
    config=TokenizeConfig,
    run=_tokenize,
    artifacts={"shards": "shards"},
    help="encode the samples' audio into shards",
    plan=_plan_tokenize,
)
