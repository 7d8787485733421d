"""An exported folder in transformers' own classes beside our engine: prompts, logits, greedy codes, sound.

Shapes: S positions, K codebooks, V codes of a codebook with BOS and EOS, T frames, F rows of delayed frames, N samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from audiollm.data.chat.template import Kind
from audiollm.data.packing import pack
from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.errors import ConfigError
from audiollm.files.json_files import OFFLINE
from audiollm.files.transformers_folders import open_model, opening
from audiollm.generation.engine.request import Limits, Request
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.generation.speaking.generator import Generator

LOGITS_TOLERANCE = 1e-3
"""Largest difference of logits, as a share of the largest logit, in float32."""
SOUND_TOLERANCE = 1e-4
"""Largest difference of samples in [-1, 1]."""
SYSTEM = "Generate audio following instruction."
TEXTS = ("one", "Good morning.", "What is it? It is a test of the codes.")
NUM_FRAMES = 32
_GREEDY = SamplingConfig(temperature=0, text_guidance=1, speaker_guidance=1)


@dataclass(frozen=True)
class CheckedExport:
    """An export that was compared with our engine: texts, frames, and the largest differences."""

    prompts: int
    frames: int
    """Frames whose greedy codes are equal in every codebook."""
    ties: int
    """Prompts whose codes part at two codes that are equally likely within the tolerance."""
    logits_difference: float
    """Largest difference of logits, as a share of the largest logit."""
    sound_difference: float

    def __str__(self) -> str:
        ties = f" ({self.ties} prompts part at a tie)" if self.ties else ""
        return (
            f"{self.prompts} prompts equal, greedy codes of {self.frames} frames equal{ties}, logits within "
            f"{self.logits_difference:.1e} of the largest, sound within {self.sound_difference:.1e}"
        )


def check_export(generator: Generator, out: Path) -> CheckedExport:
    """Compare a folder in transformers' classes with the model that it was made from.

    Raises:
        ConfigError: transformers does not load it, or a difference is beyond the tolerance.
    """
    import transformers

    with opening(out, "model of transformers", "report it: the export is wrong"):
        processor: Any = transformers.AutoProcessor.from_pretrained(str(out), **OFFLINE)
        peer = open_model(
            transformers.HiggsAudioV2ForConditionalGeneration, out, dtype=torch.float32, use_text_head=True
        )
    codec: Any = processor.audio_tokenizer.float()
    generator.model.float().cpu()
    frames = ties = 0
    logits_difference = sound_difference = 0.0
    for text in TEXTS:
        inputs = _same_prompt(generator, processor, text, out)
        answer = generator.engine([_greedy_request(text)]).run([_greedy_request(text)])[0]
        codes_KT = answer.codes_KT.cpu()
        ours_FKV, theirs_FKV = _both_logits(generator, peer, text, codes_KT)
        scale = float(ours_FKV.abs().max())
        logits_difference = max(logits_difference, float((ours_FKV - theirs_FKV).abs().max()) / scale)
        if logits_difference > LOGITS_TOLERANCE:
            raise _differing(out, f"logits differ by {logits_difference:.1e} of the largest")
        rows_FK = _generated_rows(peer, inputs, generator)
        equal = _equal_frames(codes_KT, answer.stopped, rows_FK, generator.template.codebook_size)
        frames += equal.frames
        if equal.parting is not None:
            if _gap(ours_FKV, equal.parting) > LOGITS_TOLERANCE * scale:
                raise _differing(out, f"greedy codes part at frame {equal.frames} of {text!r}")
            ties += 1
        if codes_KT.shape[1]:
            ours_1N, theirs_1N = generator.codec.decode(codes_KT).cpu(), _decoded(codec, codes_KT)
            sound_difference = max(sound_difference, float((ours_1N - theirs_1N).abs().max()))
    if sound_difference > SOUND_TOLERANCE:
        raise _differing(out, f"decoded sound differs by {sound_difference:.1e}")
    return CheckedExport(len(TEXTS), frames, ties, logits_difference, sound_difference)


@dataclass(frozen=True)
class _Parting:
    """The first code in which two answers differ."""

    row: int
    """Rows of speech before it."""
    codebook: int
    codes: tuple[int, int]


@dataclass(frozen=True)
class _EqualFrames:
    frames: int
    parting: _Parting | None


def _greedy_request(text: str) -> Request:
    return Request(_messages(text), sampling=_GREEDY, limits=Limits(max_frames=NUM_FRAMES))


def _messages(text: str) -> list[Message]:
    return [
        Message(role="system", content=[TextPart(text=SYSTEM)]),
        Message(role="user", content=[TextPart(text=text)]),
    ]


def _same_prompt(generator: Generator, processor: Any, text: str, out: Path) -> Any:
    """The inputs that transformers' processor makes of a chat, which have to be our prompt."""
    chat = [
        {"role": message.role, "content": [{"type": "text", "text": part.text}]}
        for message in _messages(text)
        for part in message.content
        if isinstance(part, TextPart)
    ]
    inputs = processor.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    if inputs["input_ids"][0].tolist() != generator.template.prompt(_messages(text)).text_ids_S.tolist():
        raise _differing(out, f"the prompts of {text!r} differ")
    return inputs


@torch.inference_mode()
def _both_logits(generator: Generator, peer: Any, text: str, codes_KT: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of codes `[F, K, V]` along the rows of an answer, ours and theirs."""
    spoken = Message(role="assistant", content=[AudioPart(path="answer.wav")])
    codes_KT = codes_KT if codes_KT.shape[1] else torch.zeros(len(codes_KT), 1, dtype=torch.long)
    stream = generator.template.compile([*_messages(text), spoken], [codes_KT])
    model, batch = generator.model, pack([stream])
    hidden_SC = model(batch)[batch.row_of_S][: len(stream)]
    codes_FK = stream.codes_SK[stream.kinds_S == Kind.AUDIO_OUT]
    inputs = {
        "input_ids": stream.text_ids_S[None],
        "audio_input_ids": codes_FK[None],
        "audio_input_ids_mask": torch.ones(1, len(codes_FK), dtype=torch.bool),
    }
    theirs_FKV = peer(**inputs).logits[0].unflatten(-1, (len(codes_KT), -1))
    first = int((stream.kinds_S == Kind.AUDIO_OUT).nonzero()[0])
    return model.audio_logits(hidden_SC)[first:], theirs_FKV[first:]


@torch.inference_mode()
def _generated_rows(peer: Any, inputs: Any, generator: Generator) -> Tensor:
    """The rows of speech `[F, K]` that transformers' `generate` makes greedily, behind the row of BOS."""
    num_rows = NUM_FRAMES + generator.template.num_codebooks + 1
    rows_FK: Tensor = peer.generate(
        **inputs, max_new_tokens=num_rows, do_sample=False, ras_win_len=None, ras_win_max_num_repeat=None
    )[0]
    begin = generator.template.codebook_size
    return rows_FK[int((rows_FK == begin).all(-1).nonzero()[-1]) + 1 :]


def _undelayed(rows_FK: Tensor, end: int) -> Tensor:
    """Frames `[K, T]` of delayed rows, as far as they are whole, up to the EOS of the first codebook."""
    num_codebooks = rows_FK.shape[1]
    ends = (rows_FK[:, 0] == end).nonzero()
    num_frames = int(ends[0]) + 1 if len(ends) else len(rows_FK) - num_codebooks + 1
    padded_FK = torch.cat([rows_FK, rows_FK.new_full((num_codebooks, num_codebooks), end)])
    return torch.stack([padded_FK[k : k + num_frames, k] for k in range(num_codebooks)])


def _valid_rows(rows_FK: Tensor, begin: int) -> int:
    """Rows before the first that our engine never draws, or that follows from one.

    Rows begin with the BOS of the delay. Before the end no code is BOS or EOS; behind the EOS of the first codebook
    each row has one EOS more. transformers forces them a row late: where the model draws another code there, that row
    is the last whose other codes can be compared.
    """
    end, end_row = begin + 1, len(rows_FK)
    for row, codes_K in enumerate(rows_FK.tolist()):
        if codes_K[0] == end and end_row > row:
            end_row = row
        ended = max(0, row - end_row + 1)
        if any(code >= begin for code in codes_K[ended : row + 1]):
            return row
        if any(code != end for code in codes_K[:ended]):
            return row + 1
    return len(rows_FK) + (rows_FK.shape[1] if end_row < len(rows_FK) else 0)


def _equal_frames(codes_KT: Tensor, stopped: bool, rows_FK: Tensor, begin: int) -> _EqualFrames:
    """Compare our codes with transformers' rows; of the frame that ends an answer, the first codebook alone.

    Where a limit ended ours, its last rows were made beside a forced EOS: only codes of rows before it are compared.
    All that comes behind the first row that differs may differ: the parting is that of the first row, and not of the
    first frame, whose later codebooks are drawn in later rows.
    """
    end, num_codebooks = begin + 1, len(codes_KT)
    peer_codes_KT = _undelayed(rows_FK, end)
    ours_KT = (
        torch.cat([codes_KT, codes_KT.new_full((num_codebooks, 1), end)], dim=1) if stopped else codes_KT
    )
    num_rows = min(_valid_rows(rows_FK, begin), codes_KT.shape[1] + (num_codebooks if stopped else 0))
    num_frames = min(ours_KT.shape[1], peer_codes_KT.shape[1])
    partings = []
    for frame in range(num_frames):
        is_end = end in (int(ours_KT[0, frame]), int(peer_codes_KT[0, frame]))
        for codebook in range(min(1 if is_end else num_codebooks, max(0, num_rows - frame))):
            codes = int(ours_KT[codebook, frame]), int(peer_codes_KT[codebook, frame])
            if codes[0] != codes[1]:
                partings.append(_Parting(frame + codebook, codebook, codes))
    if partings:
        first_frame = min(parting.row - parting.codebook for parting in partings)
        return _EqualFrames(first_frame, min(partings, key=lambda parting: parting.row))
    return _EqualFrames(max(0, min(num_frames, num_rows - num_codebooks + 1, codes_KT.shape[1])), None)


def _gap(logits_FKV: Tensor, parting: _Parting) -> float:
    """How much likelier our code was than theirs, as a difference of our logits."""
    logits_V = logits_FKV[parting.row, parting.codebook]
    return float((logits_V[parting.codes[0]] - logits_V[parting.codes[1]]).abs())


@torch.inference_mode()
def _decoded(codec: Any, codes_KT: Tensor) -> Tensor:
    samples_1N: Tensor = codec.decode(codes_KT[None]).audio_values[0]
    return samples_1N


def _differing(out: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"transformers does not answer as the model does: {reason}",
        str(out),
        "the export was removed; report it",
    )
