"""CTC models of transformers in a folder: log probabilities by frame, and their greedy decoding.

Shapes: B clips, N samples, T frames, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audiollm.files.json_files import OFFLINE
from audiollm.files.transformers_folders import fit_inputs, open_model, opening
from audiollm.models.recognition.cutting import cut_points
from audiollm.models.recognition.transcript import RecognizedSpeech, SpokenWord, mean_confidence

LONGEST_S = 30.0
"""Longest sound per forward pass; a longer one is cut at quiet places (attention's memory grows with the square)."""
SPACES = (" ", "▁", "Ġ")
"""First characters of tokens that begin a word."""


class Emissions(NamedTuple):
    """Output of a CTC model for a clip."""

    log_probs_TV: Tensor
    """float32, on the CPU."""
    times_T: NDArray[np.float64]
    """Seconds at which each frame begins, and the end of the last: one value more than frames."""


class CtcModel:
    """
    Args:
        folder: a model with a CTC head, its feature extractor and its tokenizer.

    Raises:
        ConfigError: the folder holds none, or pickled weights only.
    """

    def __init__(self, folder: Path, device: str) -> None:
        from transformers import AutoFeatureExtractor, AutoModelForCTC, AutoTokenizer

        remedy = "give a folder with config.json, preprocessor_config.json, a tokenizer and model.safetensors"
        with opening(folder, "CTC model", remedy):
            self._extractor = AutoFeatureExtractor.from_pretrained(str(folder), **OFFLINE)
            self.tokenizer = AutoTokenizer.from_pretrained(str(folder), **OFFLINE)
            self._model: Any = open_model(AutoModelForCTC, folder, device)
        self.sample_rate = int(self._extractor.sampling_rate)
        self.blank = int(self._model.config.pad_token_id)
        self._pads = bool(getattr(self._extractor, "return_attention_mask", False))

    @property
    def delimiter(self) -> str | None:
        """The token between words, where there is one ("|")."""
        delimiter: str | None = getattr(self.tokenizer, "word_delimiter_token", None)
        return delimiter if delimiter in self.tokenizer.get_vocab() else None

    def emissions(self, clips: Sequence[NDArray[np.float32]]) -> list[Emissions]:
        """Compute each clip's emissions (mono `[N]` at `sample_rate`); batched where the model can mask padding."""
        cuts = [cut_points(clip_N, self.sample_rate, LONGEST_S) for clip_N in clips]
        pieces = [clip_N[a:b] for clip_N, at in zip(clips, cuts, strict=True) for a, b in pairwise(at)]
        if self._pads:
            believed = iter(self._forward(pieces))
        else:
            believed = iter([piece_TV for piece in pieces for piece_TV in self._forward([piece])])
        return [self._joined([next(believed) for _ in at[1:]], at) for at in cuts]

    @torch.inference_mode()
    def _forward(self, pieces: Sequence[NDArray[np.float32]]) -> list[Tensor]:
        shortest = self.sample_rate // 10  # sound shorter than the convolutions' span is an error
        sizes = [max(len(piece_N), shortest) for piece_N in pieces]
        padded = [
            np.pad(piece_N, (0, size - len(piece_N))) for piece_N, size in zip(pieces, sizes, strict=True)
        ]
        inputs = self._extractor(
            padded,
            sampling_rate=self.sample_rate,
            return_tensors="pt",
            padding=True,
            return_attention_mask=self._pads,
        )
        logits_BTV = self._model(**fit_inputs(self._model, inputs)).logits.float()
        log_probs_BTV = logits_BTV.log_softmax(dim=-1).cpu()
        longest = max(sizes)
        frames = [max(round(log_probs_BTV.shape[1] * size / longest), 1) for size in sizes]
        return [log_probs_TV[:count] for log_probs_TV, count in zip(log_probs_BTV, frames, strict=True)]

    def _joined(self, pieces: Sequence[Tensor], cuts: Sequence[int]) -> Emissions:
        seconds = [cut / self.sample_rate for cut in cuts]
        times = [
            np.linspace(start_s, end_s, len(piece_TV), endpoint=False)
            for piece_TV, (start_s, end_s) in zip(pieces, pairwise(seconds), strict=True)
        ]
        return Emissions(torch.cat(list(pieces)), np.concatenate([*times, seconds[-1:]]))


class CtcRecognizer:
    """Greedy CTC decoding: the likeliest token of every frame, without repeats and blanks; words have times.

    Args:
        language: of the speech, which the model does not tell.
    """

    def __init__(self, model: CtcModel, language: str | None) -> None:
        self._model, self._language = model, language
        self.sample_rate = model.sample_rate
        vocabulary = model.tokenizer.get_vocab()
        self._tokens = {index: token for token, index in vocabulary.items()}
        silent = set(model.tokenizer.all_special_ids) - {vocabulary.get(model.delimiter)} | {model.blank}
        self._silent = {int(index) for index in silent if index is not None}

    def transcribe(self, clips: Sequence[NDArray[np.float32]]) -> list[RecognizedSpeech]:
        """Recognize mono clips at `sample_rate`."""
        return [self._decode(emissions) for emissions in self._model.emissions(clips)]

    def _decode(self, emissions: Emissions) -> RecognizedSpeech:
        best_T = emissions.log_probs_TV.argmax(dim=-1).tolist()
        likelihoods_T = emissions.log_probs_TV.max(dim=-1).values.exp().tolist()
        tokens: list[SpokenWord] = []
        start = 0
        for frame in range(1, len(best_T) + 1):
            if frame < len(best_T) and best_T[frame] == best_T[start]:
                continue
            if best_T[start] not in self._silent:
                likelihood = sum(likelihoods_T[start:frame]) / (frame - start)
                span = float(emissions.times_T[start]), float(emissions.times_T[frame])
                tokens.append(SpokenWord(self._tokens[best_T[start]], *span, likelihood))
            start = frame
        words = tuple(joined_tokens(tokens, self._model.delimiter))
        return RecognizedSpeech(" ".join(word.word for word in words), words, self._language)


def joined_tokens(tokens: Sequence[SpokenWord], delimiter: str | None) -> list[SpokenWord]:
    """Join tokens to words: cut at `delimiter`, and before tokens that begin with a space (" ", "▁", "Ġ")."""
    groups: list[list[SpokenWord]] = [[]]
    for token in tokens:
        if token.word == delimiter:
            groups.append([])
            continue
        if token.word[:1] in SPACES:
            groups.append([])
        groups[-1].append(token._replace(word=token.word.lstrip(" ▁Ġ")))
    spelled = [(group, "".join(token.word for token in group).strip()) for group in groups]
    return [
        SpokenWord(word, group[0].start_s, group[-1].end_s, mean_confidence(group))
        for group, word in spelled
        if word
    ]
