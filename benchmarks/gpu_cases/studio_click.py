"""From an order of the studio, as its Generate gives it, to the decoded sound: the wait of the one who clicks."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_cases.measuring import Scale, rounded, tell, timed

from audiollm.autoencoder import load_autoencoder
from audiollm.data.records.sample import VideoPart
from audiollm.flow.generator import SoundGenerator
from audiollm.flow.model.mmdit import MMDiTConfig
from audiollm.flow.model.sampling import SamplerSettings
from audiollm.flow.service import SoundOrder, SoundService, default_guidance, make_ordered
from audiollm.flow.sound_model import SoundModel, SoundModelConfig, condition_facts
from audiollm.video.writing import write_video
from tokenizer.continuous.model import AudioVAE, VAEConfig

CLICK_S = 9.0
CLICK_COT = (
    "First, at 1.0 seconds, a bell rings, until 2.0 seconds. Then, at 4.0 seconds, rain falls on a roof."
)


def studio_click(scale: Scale) -> None:
    """Words and pictures, 24 steps with guidance in float32, the VAE of `train_vae` on the CPU."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_click_models(folder, scale)
        dice = np.random.default_rng(0)
        pictures = (dice.integers(0, 255, (240, 320, 3)).astype(np.uint8) for _ in range(round(CLICK_S * 25)))
        write_video(folder / "film.mp4", pictures, 25)
        generator = SoundGenerator.load(folder / "flow", folder / "vae")
        service = SoundService(generator)
        settings = SamplerSettings(steps=2 if scale.tiny else 24, guidance=default_guidance(generator))
        film = VideoPart(path=str(folder / "film.mp4"))
        order = SoundOrder("a bell over rain", CLICK_S, CLICK_COT, film, "film")

        def click(number: int) -> Any:
            key = f"{number}/sound"
            return service.submit(
                lambda job: make_ordered(generator, order, job.watched(settings), key)
            ).value()

        began = time.perf_counter()
        samples = click(0).samples_CN.shape[1]
        first_s = time.perf_counter() - began
        assert samples == round(CLICK_S * generator.sample_rate)
        seconds = timed(click, scale.seconds(20), warm=1, min_calls=1 if scale.tiny else 3)
        service.close()
    case = f"studio click {scale.name}, {CLICK_S:g} s of sound in {settings.steps} steps with guidance"
    tell(case, "seconds", seconds, less=True, first_order=rounded(first_s))


def write_click_models(folder: Path, scale: Scale) -> None:
    """A flow model of random weights and its autoencoder, at the published shape or tiny."""
    torch.manual_seed(0)
    shape, vae = MMDiTConfig(), VAEConfig()
    if scale.tiny:
        shape = replace(shape, hidden_size=64, num_heads=4, multi_stream_blocks=2, single_stream_blocks=2)
        vae = replace(vae, hidden_size=64, mel_hidden_size=64, encoder_layers=(1, 1), decoder_layers=(1, 1))
    AudioVAE(vae).save_pretrained(folder / "vae" / "model")
    words = {
        name: condition_facts(kind="words", width=width)
        for name, width in (("caption", shape.caption_dim), ("cot", shape.cot_dim))
    }
    pictures = {
        name: condition_facts(
            kind="pictures",
            made_by=f"pictures of 32 x 32 at {rate:g} per second",
            width=width,
            rate=rate,
            side=32,
        )
        for name, width, rate in (("frames", shape.frames_dim, 8.0), ("sync", shape.sync_dim, 24.0))
    }
    config = SoundModelConfig(
        "native", vars(shape), load_autoencoder(str(folder / "vae")).digest, vae.sample_rate, vae.channels,
        vae.hop_samples, words | pictures, ("�", *sorted(set(CLICK_COT.lower().split()))), 0.1, 0.1, True, CLICK_S,
    )  # fmt: skip
    SoundModel(config).save_pretrained(folder / "flow" / "model")
