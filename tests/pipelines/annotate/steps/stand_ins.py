"""Stand-ins of packages that are too large for the tests, with the calls and the results of the real classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

PYANNOTE = '''
"""pyannote.audio 4.0.7: `Pipeline.from_pretrained` (core/pipeline.py), `SpeakerDiarization.apply` and `DiarizeOutput`
(pipelines/speaker_diarization.py); pyannote.core 6.1.0: `Annotation.itertracks`, `Segment`.

This one hears who speaks by the sign of the samples' mean in each 0.1 s: S+ above 0.05, S- below -0.05, both where the
absolute mean is above 0.3. It fails on samples above 0.95.
"""
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml


@dataclass(frozen=True)
class Segment:
    start: float
    end: float


class Annotation:
    def __init__(self, tracks):
        self._tracks = tracks

    def itertracks(self, yield_label=False):
        for number, (segment, label) in enumerate(self._tracks):
            yield (segment, f"T{number}", label) if yield_label else (segment, f"T{number}")


@dataclass
class DiarizeOutput:
    speaker_diarization: Annotation
    exclusive_speaker_diarization: Annotation
    speaker_embeddings: object = None


class Pipeline:
    @classmethod
    def from_pretrained(
        cls, checkpoint, revision=None, hparams_file=None, subfolder=None, token=None, cache_dir=None
    ):
        assert os.environ["PYANNOTE_METRICS_ENABLED"] == "0", "telemetry"
        folder = Path(checkpoint).parent
        params = yaml.safe_load(Path(checkpoint).read_text())["pipeline"]["params"]
        for name in ("segmentation", "embedding"):
            # as core/model.py has it: everything that a file holds is built
            torch.load(folder / params[name].removeprefix("$model/") / "pytorch_model.bin", weights_only=False)
        return cls()

    def to(self, device):
        if not isinstance(device, torch.device):
            raise TypeError("`device` must be an instance of `torch.device`")
        return self

    def __call__(self, file, preload=False, **kwargs):
        return self.apply(file, **kwargs)

    def apply(self, file, num_speakers=None, min_speakers=None, max_speakers=None, hook=None):
        waveform = file["waveform"]
        if waveform.ndim != 2 or waveform.shape[0] > waveform.shape[1]:
            raise ValueError("'waveform' must be provided as a (channel, time) torch Tensor.")
        if waveform.abs().max() > 0.95:
            raise RuntimeError("no speaker is that loud")
        rate, tracks = file["sample_rate"], []
        means = [float(piece.mean()) for piece in waveform[0].split(rate // 10)]
        for label, is_active in (
            ("SPEAKER_00", lambda mean: mean > 0.05 or abs(mean) > 0.3),
            ("SPEAKER_01", lambda mean: mean < -0.05 or abs(mean) > 0.3),
        )[: max_speakers or num_speakers or 2]:
            begin = None
            for place, mean in enumerate([*means, 0.0]):
                if is_active(mean) and begin is None:
                    begin = place
                if not is_active(mean) and begin is not None:
                    # as the real one: the last frame may end after the sound
                    tracks.append((Segment(begin / 10, place / 10 + 0.02), label))
                    begin = None
        annotation = Annotation(tracks)
        return DiarizeOutput(annotation, annotation, None)
'''
PYANNOTE_TASK = '''
"""pyannote.audio 4.0.7, core/task.py: the classes in the checkpoints of its models."""
from dataclasses import dataclass
from enum import Enum
from typing import Optional


class Problem(Enum):
    BINARY_CLASSIFICATION = 0
    MONO_LABEL_CLASSIFICATION = 1
    MULTI_LABEL_CLASSIFICATION = 2
    REPRESENTATION = 3


class Resolution(Enum):
    FRAME = 1
    CHUNK = 2


@dataclass
class Specifications:
    problem: Problem
    resolution: Resolution
    duration: float
    min_duration: Optional[float] = None
'''
SORTFORMER = '''
"""NeMo 3.0.0: `SortformerEncLabelModel.restore_from` (core/classes/modelPT.py) and `.diarize`
(collections/asr/models/sortformer_diar_models.py), which gives lines `begin end speaker` of each recording
(`generate_diarization_output_lines` of parts/utils/speaker_utils.py).

This one has two speakers: one for all of the sound, another for its second half.
"""
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import torch


class SortformerEncLabelModel(torch.nn.Module):
    @classmethod
    def restore_from(
        cls, restore_path, override_config_path=None, map_location=None, strict=True, return_config=False
    ):
        with tempfile.TemporaryDirectory() as folder, tarfile.open(restore_path) as archive:
            archive.extractall(folder, filter="data")
            torch.load(Path(folder) / "model_weights.ckpt", map_location=map_location)
        return cls()

    def diarize(
        self, audio, sample_rate=None, batch_size=1, include_tensor_outputs=False, postprocessing_yaml=None,
        num_workers=0, verbose=True, override_config=None,
    ):
        if not isinstance(audio[0], np.ndarray) or sample_rate is None:
            raise ValueError("Sample rate is not set. Numpy audio inputs require sample_rate to be set.")
        ends = [len(samples) / sample_rate for samples in audio]
        return [[f"0.000 {end:.3f} speaker_0", f"{end / 2:.3f} {end + 0.05:.3f} speaker_1"] for end in ends]
'''
PIPELINE = """
dependencies:
  pyannote.audio: 4.0.0
pipeline:
  name: pyannote.audio.pipelines.SpeakerDiarization
  params:
    clustering: VBxClustering
    segmentation: $model/segmentation
    embedding: $model/embedding
    embedding_exclude_overlap: true
    plda: $model/plda
params:
  segmentation:
    min_duration_off: 0.0
"""
"""As in pyannote/speaker-diarization-community-1."""


def write_packages(folder: Path) -> None:
    """Write the stand-ins of pyannote.audio and NeMo as packages of a folder for PYTHONPATH."""
    for name, source in (
        ("pyannote/audio/__init__.py", PYANNOTE),
        ("pyannote/audio/core/__init__.py", ""),
        ("pyannote/audio/core/task.py", PYANNOTE_TASK),
        ("nemo/__init__.py", ""),
        (
            "nemo/utils/__init__.py",
            "import logging as _logging\nlogging = _logging.getLogger('nemo')\nlogging.ERROR = 40\n",
        ),
        ("nemo/collections/__init__.py", ""),
        ("nemo/collections/asr/__init__.py", ""),
        ("nemo/collections/asr/models.py", SORTFORMER),
        (
            "nemo_toolkit-3.0.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: nemo_toolkit\nVersion: 3.0.0\n",
        ),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source)


def pyannote_folder(folder: Path, more: object = None) -> Path:
    """The folder of a pipeline whose checkpoints hold what those of pyannote hold, and `more`.

    The package pyannote.audio, or its stand-in, can be imported.
    """
    from pyannote.audio.core.task import Problem, Resolution, Specifications

    specifications = Specifications(Problem.MONO_LABEL_CLASSIFICATION, Resolution.FRAME, 10.0)
    for name in ("segmentation", "embedding", "plda"):
        (folder / name).mkdir(parents=True)
        checkpoint = {
            "state_dict": {"weight": torch.zeros(2)},
            "pyannote.audio": {
                "versions": {"torch": torch.torch_version.TorchVersion("2.8.0"), "pyannote.audio": "4.0.0"},
                "architecture": {"module": f"pyannote.audio.models.{name}", "class": "Net"},
                "specifications": specifications,
            },
            "more": more,
        }
        torch.save(checkpoint, folder / name / "pytorch_model.bin")
    (folder / "plda" / "pytorch_model.bin").unlink()
    (folder / "config.yaml").write_text(PIPELINE)
    return folder


def wespeaker_file(path: Path, dimension: int = 6, mels: int = 80) -> Path:
    """A model with the inputs and outputs of WeSpeaker's exports: the mean over time of weighted energies."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weights = np.random.default_rng(0).normal(size=(mels, dimension)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["feats", "weights"], ["product"]),
        helper.make_node("Abs", ["product"], ["absolute"]),
        helper.make_node("ReduceMean", ["absolute"], ["embs"], axes=[1], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "speaker",
        [helper.make_tensor_value_info("feats", TensorProto.FLOAT, ["B", "T", mels])],
        [helper.make_tensor_value_info("embs", TensorProto.FLOAT, ["B", dimension])],
        [numpy_helper.from_array(weights, "weights")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    onnx.save(model, str(path))
    return path


def language_folder(folder: Path, shares: dict[str, float]) -> Path:
    """A `Wav2Vec2ForSequenceClassification`, as MMS-LID is one, that gives these probabilities whatever it hears."""
    from transformers import Wav2Vec2Config, Wav2Vec2FeatureExtractor, Wav2Vec2ForSequenceClassification

    config = Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=(8, 8),
        conv_kernel=(10, 8), conv_stride=(5, 4), num_feat_extract_layers=2, feat_extract_norm="layer",
        do_stable_layer_norm=True, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, classifier_proj_size=8,
        id2label=dict(enumerate(shares)), label2id={label: index for index, label in enumerate(shares)},
    )  # fmt: skip
    model = Wav2Vec2ForSequenceClassification(config)
    torch.nn.init.zeros_(model.classifier.weight)
    model.classifier.bias.data = torch.tensor(list(shares.values())).log()
    model.save_pretrained(folder)
    Wav2Vec2FeatureExtractor(return_attention_mask=True).save_pretrained(folder)
    return folder


HOP, WINDOW = 320, 400
"""Samples at 16 kHz from one frame of `tone_ctc_folder` to the next, and in one."""


def tone_ctc_folder(folder: Path, hertz: dict[str, int]) -> Path:
    """A `Wav2Vec2ForCTC` that writes a letter wherever its tone sounds, and a blank over digital silence.

    Its convolution holds a sine and a cosine of each tone in four phases, its transformer no layer, its head their sum.

    Args:
        hertz: letter -> its tone, a multiple of 50 Hz; `|` stands between words.
    """
    import json

    from transformers import Wav2Vec2Config, Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor, Wav2Vec2ForCTC

    folder.mkdir(parents=True)
    vocabulary = ["<pad>", "<s>", "</s>", "<unk>", *hertz]
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(vocabulary)}))
    Wav2Vec2CTCTokenizer(str(folder / "vocab.json")).save_pretrained(folder)
    Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True).save_pretrained(folder)
    size = 4 * len(hertz)
    config = Wav2Vec2Config(
        vocab_size=len(vocabulary), hidden_size=size, num_hidden_layers=0, num_attention_heads=1, intermediate_size=8,
        conv_dim=(size,), conv_kernel=(WINDOW,), conv_stride=(HOP,), num_feat_extract_layers=1, pad_token_id=0,
        feat_extract_norm="layer", num_conv_pos_embeddings=2, num_conv_pos_embedding_groups=1,
        do_stable_layer_norm=True,
    )  # fmt: skip
    model = Wav2Vec2ForCTC(config)
    weights = {name: torch.zeros_like(weight) for name, weight in model.state_dict().items()}
    time_N = torch.arange(WINDOW) / 16_000
    for row, tone in enumerate(hertz.values()):
        angle_N = 2 * torch.pi * tone * time_N
        phases = torch.stack([angle_N.cos(), angle_N.sin(), -angle_N.cos(), -angle_N.sin()])
        weights["wav2vec2.feature_extractor.conv_layers.0.conv.weight"][4 * row : 4 * row + 4, 0] = phases
        weights["lm_head.weight"][4 + row, 4 * row : 4 * row + 4] = 8.0
    for name in weights:
        if name.endswith("layer_norm.weight"):
            weights[name] += 1.0
        if name.endswith("parametrizations.weight.original1"):
            weights[name] += 1.0  # the direction of a weight of the length 0
    weights["wav2vec2.feature_projection.projection.weight"] = torch.eye(size)
    weights["lm_head.bias"][0], weights["lm_head.bias"][1:4] = 4.0, -100.0
    model.load_state_dict(weights)
    model.save_pretrained(folder)
    return folder
