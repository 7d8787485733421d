"""A model for our own engine with its linear layers in int8 or int4, and what that changes.

Shapes: S positions, K codebooks, V codes of a codebook, T frames.
"""

from __future__ import annotations

import shutil
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from audiollm.data.chat.template import Kind
from audiollm.data.packing import pack
from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.errors import ConfigError
from audiollm.files.atomic import write_json
from audiollm.hub_models.needed_files import CODEC_FOLDER
from audiollm.models.frozen.formats import SmallFormat
from audiollm.models.pretrained import model_folder
from audiollm.publish.incomplete import codec_place, incomplete_folder
from audiollm.publish.release_files import select_model_files

if TYPE_CHECKING:
    from audiollm.generation.engine.request import Answer, Request
    from audiollm.generation.speaking.generator import Generator

TEXTS = ("one", "Good morning.", "What is it? It is a test of the codes.")
MAX_FRAMES = 50
TIMED_RUNS = 3
RECORD_FILE = "stored_weights.json"


@dataclass(frozen=True)
class StoredComparison:
    """An exported model beside the one that it was made of, for three texts."""

    format: str
    weights_mb: float
    weights_mb_in_fp32: float
    changed_codes: float
    """Share of the codes along an answer of the first model of which another one is the most likely now."""
    frames: int
    cpu_seconds_per_frame: float
    cpu_seconds_per_frame_in_fp32: float

    def __str__(self) -> str:
        return (
            f"{self.weights_mb:,.1f} MB of weights in place of {self.weights_mb_in_fp32:,.1f}; another code is the "
            f"most likely in {self.changed_codes:.1%} of those of {self.frames} frames; a frame of one stream takes "
            f"{self.cpu_seconds_per_frame / self.cpu_seconds_per_frame_in_fp32:.2f} of the CPU time here"
        )


def export_stored(
    folder: Path, out: Path, format: SmallFormat, codec: Path | None = None
) -> StoredComparison:
    """Write a model that `generate`, `serve` and `Generator` open, with its codec, and compare it.

    Args:
        folder: of a train stage or of a saved model.
        out: a folder that is absent or empty, or an earlier export that was cut short.
        codec: its folder; None: the one beside the model or of its run.

    Raises:
        ConfigError: a model of another family, no codec, layers that the format cannot hold, or a folder that is not
            empty.
    """
    from audiollm.families.registry import open_model_folder
    from audiollm.generation.speaking.generator import Generator
    from audiollm.models.frozen.shrink import shrink_frozen
    from audiollm.models.frozen.stored_folder import has_stored_weights, save_stored

    folder = model_folder(folder)
    if has_stored_weights(folder):
        raise ConfigError(
            "its weights are in fewer bytes already", str(folder), "give the folder that it was exported from"
        )
    place = codec_place(folder, codec)
    generator = open_model_folder(folder).generator(place)
    if not isinstance(generator, Generator):
        raise ConfigError(f"models of this family are held in float32 alone: no {format}", str(folder))
    with incomplete_folder(out):
        answers = [_greedy_answer(generator, text) for text in TEXTS]
        before = [
            _likeliest_codes(generator, text, answer) for text, answer in zip(TEXTS, answers, strict=True)
        ]
        seconds = _cpu_seconds_per_frame(generator)
        sizes = shrink_frozen(generator.model.requires_grad_(False), format)
        after = [
            _likeliest_codes(generator, text, answer) for text, answer in zip(TEXTS, answers, strict=True)
        ]
        changed = torch.cat([(old != new).flatten() for old, new in zip(before, after, strict=True)])
        comparison = StoredComparison(
            format,
            round(sizes.after / 2**20, 1),
            round(sizes.before / 2**20, 1),
            float(changed.float().mean()),
            sum(answer.codes_KT.shape[1] for answer in answers),
            _cpu_seconds_per_frame(generator),
            seconds,
        )
        _copy_files(folder, out)
        (out / CODEC_FOLDER).mkdir()
        _copy_files(place, out / CODEC_FOLDER, with_weights=True)
        save_stored(generator.model, format, out)
        write_json(out / RECORD_FILE, asdict(comparison))
        _check_opens(generator, out)
    return comparison


def _copy_files(folder: Path, out: Path, with_weights: bool = False) -> None:
    for file in select_model_files(folder).files:
        if file.name.endswith((".safetensors", ".safetensors.index.json")) and not with_weights:
            continue
        if isinstance(file.source, bytes):
            (out / file.name).write_bytes(file.source)
        else:
            shutil.copyfile(file.source, out / file.name)


def _check_opens(generator: Generator, out: Path) -> None:
    """See that the folder opens, and answers as the model in memory does.

    Raises:
        ConfigError: it does not.
    """
    from audiollm.generation.speaking.generator import Generator

    opened = Generator.from_pretrained(out)
    if not torch.equal(
        _greedy_answer(opened, TEXTS[0]).codes_KT, _greedy_answer(generator, TEXTS[0]).codes_KT
    ):
        raise ConfigError("the exported folder does not answer as the model does", str(out), "report it")


def _messages(text: str) -> list[Message]:
    return [Message(role="user", content=[TextPart(text=text)])]


def _greedy_request(text: str) -> Request:
    from audiollm.generation.engine.request import Limits, Request
    from audiollm.generation.engine.sampling import SamplingConfig

    sampling = SamplingConfig(temperature=0, text_guidance=1, speaker_guidance=1)
    return Request(_messages(text), sampling=sampling, limits=Limits(max_frames=MAX_FRAMES))


def _greedy_answer(generator: Generator, text: str) -> Answer:
    return generator.engine([_greedy_request(text)]).run([_greedy_request(text)])[0]


def _cpu_seconds_per_frame(generator: Generator) -> float:
    """CPU-seconds, the median over runs of the longest text."""
    seconds = []
    for _ in range(TIMED_RUNS + 1):  # the first one lays out weights
        began = time.process_time()
        frames = max(1, _greedy_answer(generator, TEXTS[-1]).codes_KT.shape[1])
        seconds.append((time.process_time() - began) / frames)
    return statistics.median(seconds[1:])


@torch.inference_mode()
def _likeliest_codes(generator: Generator, text: str, answer: Answer) -> Tensor:
    """The most likely code at every position along an answer, `[S, K]`."""
    codes_KT = answer.codes_KT.cpu()
    codes_KT = codes_KT if codes_KT.shape[1] else torch.zeros(len(codes_KT), 1, dtype=torch.long)
    spoken = Message(role="assistant", content=[AudioPart(path="answer.wav")])
    stream = generator.template.compile([*_messages(text), spoken], [codes_KT])
    model, batch = generator.model, pack([stream])
    hidden_SC = model(batch)[batch.row_of_S][: len(stream)]
    rows = stream.kinds_S == Kind.AUDIO_OUT
    first = int(rows.nonzero()[0])
    likeliest_SK: Tensor = model.audio_logits(hidden_SC)[first:].argmax(dim=-1)
    return likeliest_SK
