"""Semantic teachers: frozen encoders whose features the codes are trained to carry.

`load_teacher(path)` takes any Hugging Face audio encoder, or our own (`tokenizer/teacher_training.py`), trained
on nothing but the recordings at hand. Either way a teacher maps 24 kHz waveforms to 25 features a second,
standardised per dimension, frame t centred on its own 40 ms.

Shapes: B batch, N samples, T frames at 25 Hz, C channels, M mel bands, S hidden states (layers and the embedding
before them), R selections (every state, then their mean), U units a frame, V vocabulary of units, P unit features.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from audiollm.audio import resample
from audiollm.config import ConfigError
from audiollm.files import read_json
from audiollm.models.pretrained import load_model, model_folder, save_model
from tokenizer.layers import LogMel
from tokenizer.quantizer import nearest_codes

MODEL_TYPE = "audiollm_mel_unit_teacher"
SAMPLE_RATE = 24_000
FRAME_RATE = 25
HOP_SAMPLES = SAMPLE_RATE // FRAME_RATE

Layer = int | Literal["mean"]
