"""Sample rates, frame rates and codebooks of the tokenizer and the VAE, each stated once. Loads no torch."""

from __future__ import annotations

SAMPLE_RATE = 24_000
"""Samples per second of the tokenizer's waveform."""
FRAME_RATE = 25
"""Frames of codes per second, and of the teacher's features."""
HOP_SAMPLES = SAMPLE_RATE // FRAME_RATE
NUM_CODEBOOKS = 8
CODEBOOK_SIZE = 1024

VAE_SAMPLE_RATE = 44_100
"""Samples per second and channel of the VAE's waveform."""
VAE_HOP_SAMPLES = 2048
VAE_LATENT_RATE = VAE_SAMPLE_RATE / VAE_HOP_SAMPLES
"""Latent frames per second."""
