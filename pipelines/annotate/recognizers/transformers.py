"""Recognizer `transformers`: a CTC model (wav2vec2, HuBERT, Parakeet) or a decoder (Whisper, Moonshine) in a folder.

Shapes: B clips, N samples, T frames, S tokens written, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from audiollm.files.json_files import OFFLINE
from pipelines.annotate.recognizers.value import (
    RecognizerConfig,
    SpokenWord,
    heard,
    mean_confidence,
    missing_folder,
)
from pipelines.annotate.step import Segment
from pipelines.annotate.words.cutting import cut_points
from pipelines.steps.step import Resources, Value

if TYPE_CHECKING:
    from pipelines.annotate.words.ctc import CtcModel, Emissions

_FILES = ("config.json", "preprocessor_config.json")
_EXPECTED_FOLDER = "a speech recognizer of transformers with safetensors weights, saved with its processor"
_PROMPT_TOKENS = 8
"""Most tokens of a decoder's prompt: start, language, task, no timestamps."""
_SPACES = (" ", "▁", "Ġ")


class TransformersConfig(RecognizerConfig):
    """A speech recognizer of transformers in a local folder."""

    kind: Literal["transformers"] = "transformers"
    model: Path
    language: str | None = None
    """Language of the speech, for a multilingual Whisper and the steps that read the text. None: Whisper detects it."""
    batch_size: int = Field(1, ge=1)
    """Segments per batch. More is faster on a GPU; results may then vary in the last digit with the batch."""
    max_tokens: int = Field(224, ge=1)
    """Most tokens per 30 s, for a model that writes token by token."""
    gpus: float = Field(0.0, ge=0)
    """Share of a GPU for each worker; 0: the CPU."""


class TransformersRecognizer:
    """CTC: words with times; a decoder: words without; confidences are means of the tokens' probabilities. Greedy."""

    level: ClassVar[Literal["segment"]] = "segment"
    needs: tuple[str, ...] = ()
    version: ClassVar[int] = 1

    def __init__(self, config: TransformersConfig) -> None:
        self.name = config.name or config.kind
        self.resources = Resources(gpus=config.gpus)
        self.batch_size = config.batch_size
        self._config = config

    def missing(self) -> str | None:
        return missing_folder(f"{self.name}.model", self._config.model, _FILES, _EXPECTED_FOLDER)

    def setup(self) -> None:
        """Raises: ConfigError: no such model, or pickled weights only."""
        config, device = self._config, "cuda" if self._config.gpus else "cpu"
        self._model: _Model
        if _is_ctc(config.model):
            from pipelines.annotate.words.ctc import CtcModel

            self._model = _Ctc(CtcModel(config.model, device), config.language)
        else:
            self._model = _Writer(config, device)

    def process(self, segment: Segment) -> Value:
        return self.process_batch([segment])[0]

    def process_batch(self, items: Sequence[Segment]) -> list[Value]:
        rate = self._model.sample_rate
        return self._model.recognize([segment.samples(rate).copy() for segment in items])


class _Model(Protocol):
    sample_rate: int

    def recognize(self, clips: Sequence[NDArray[np.float32]]) -> list[Value]: ...


def _is_ctc(folder: Path) -> bool:
    """Whether the config names a CTC head. Raises: ConfigError: no config that can be read."""
    from audiollm.files.json_files import read_json_file

    heads = read_json_file(folder / "config.json", dict).get("architectures") or []
    return any(str(head).endswith("CTC") for head in heads)


# --------------------------------------------------------------------------------------------------- CTC


class _Ctc:
    """Greedy CTC decoding: the likeliest token of every frame, without repeats and blanks."""

    def __init__(self, model: CtcModel, language: str | None) -> None:
        self._model, self._language = model, language
        self.sample_rate = model.sample_rate
        vocabulary = model.tokenizer.get_vocab()
        self._tokens = {index: token for token, index in vocabulary.items()}
        silent = set(model.tokenizer.all_special_ids) - {vocabulary.get(model.delimiter)} | {model.blank}
        self._silent = {int(index) for index in silent if index is not None}

    def recognize(self, clips: Sequence[NDArray[np.float32]]) -> list[Value]:
        return [self._read(found) for found in self._model.emissions(clips)]

    def _read(self, found: Emissions) -> Value:
        best_T = found.log_probs_TV.argmax(dim=-1).tolist()
        sure_T = found.log_probs_TV.max(dim=-1).values.exp().tolist()
        tokens: list[SpokenWord] = []
        start = 0
        for frame in range(1, len(best_T) + 1):
            if frame < len(best_T) and best_T[frame] == best_T[start]:
                continue
            if best_T[start] not in self._silent:
                sure = sum(sure_T[start:frame]) / (frame - start)
                span = float(found.times_T[start]), float(found.times_T[frame])
                tokens.append(SpokenWord(self._tokens[best_T[start]], *span, sure))
            start = frame
        words = joined_tokens(tokens, self._model.delimiter)
        return heard(
            " ".join(word.word for word in words), words, self._language, None, mean_confidence(words)
        )


def joined_tokens(tokens: Sequence[SpokenWord], delimiter: str | None) -> list[SpokenWord]:
    """Join tokens to words: cut at `delimiter`, and before tokens that begin with a space (" ", "▁", "Ġ")."""
    groups: list[list[SpokenWord]] = [[]]
    for token in tokens:
        if token.word == delimiter:
            groups.append([])
            continue
        if token.word[:1] in _SPACES:
            groups.append([])
        groups[-1].append(token._replace(word=token.word.lstrip(" ▁Ġ")))
    spelled = [(group, "".join(token.word for token in group).strip()) for group in groups]
    return [
        SpokenWord(word, group[0].start_s, group[-1].end_s, mean_confidence(group))
        for group, word in spelled
        if word
    ]


# ----------------------------------------------------------------------------------------------- decoder


class _Writer:
    """An autoregressive decoder, which takes at most 30 s at a time."""

    def __init__(self, config: TransformersConfig, device: str) -> None:
        from transformers import AutoModelForSpeechSeq2Seq, AutoProcessor

        from audiollm.errors import ConfigError

        try:
            self._processor = AutoProcessor.from_pretrained(str(config.model), **OFFLINE)
            model = AutoModelForSpeechSeq2Seq.from_pretrained(
                str(config.model), **OFFLINE, use_safetensors=True
            )
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(
                f"no speech recognizer loads from {config.model}: {said}",
                "transformers.model",
                f"give {_EXPECTED_FOLDER}",
            ) from error
        self._model: Any = model.eval().to(device)
        self._tokenizer = self._processor.tokenizer
        self._extractor = self._processor.feature_extractor
        self.sample_rate = int(self._extractor.sampling_rate)
        self._longest_s = float(getattr(self._extractor, "chunk_length", None) or 30.0)
        self._language = config.language
        places = (
            getattr(self._model.config, "max_target_positions", None) or config.max_tokens + _PROMPT_TOKENS
        )
        self._max_tokens = min(config.max_tokens, places - _PROMPT_TOKENS)
        self._languages: dict[str, int] = getattr(self._model.generation_config, "lang_to_id", None) or {}
        self._told: dict[str, Any] = {"task": "transcribe"} if self._languages else {}
        if f"<|{config.language}|>" in self._languages:
            self._told["language"] = config.language

    def recognize(self, clips: Sequence[NDArray[np.float32]]) -> list[Value]:
        import torch

        cuts = [cut_points(clip_N, self.sample_rate, self._longest_s) for clip_N in clips]
        pieces = [clip_N[a:b] for clip_N, at in zip(clips, cuts, strict=True) for a, b in pairwise(at)]
        with torch.inference_mode():
            written = iter(self._write(pieces))
        return [_value([next(written) for _ in at[1:]]) for at in cuts]

    def _write(self, pieces: Sequence[NDArray[np.float32]]) -> list[_Piece]:
        inputs = self._extractor(
            list(pieces), sampling_rate=self.sample_rate, return_tensors="pt", return_attention_mask=True
        ).to(self._model.device)
        told = dict(self._told)
        spoken: list[tuple[str | None, float | None]] = [(self._language, None)] * len(pieces)
        if self._languages and "language" not in told:
            spoken = self._spoken(inputs)
            told["language"] = [language for language, _ in spoken]
        made = self._model.generate(
            **inputs,
            **told,
            max_new_tokens=self._max_tokens,
            do_sample=False,
            num_beams=1,
            return_dict_in_generate=True,
            output_scores=True,
        )
        scores_BS = self._model.compute_transition_scores(made.sequences, made.scores, normalize_logits=True)
        tokens_BS = made.sequences[:, -scores_BS.shape[1] :]
        rows = zip(tokens_BS.tolist(), scores_BS.exp().tolist(), spoken, strict=True)
        return [_Piece(*self._text(tokens_S, sure_S), *language) for tokens_S, sure_S, language in rows]

    def _text(self, tokens_S: Sequence[int], sure_S: Sequence[float]) -> tuple[str, list[SpokenWord]]:
        """The text, and its words: cut before tokens that begin with a space."""
        special = set(self._tokenizer.all_special_ids)
        kept = [(token, sure) for token, sure in zip(tokens_S, sure_S, strict=True) if token not in special]
        groups: list[list[tuple[int, float]]] = []
        for (token, sure), piece in zip(
            kept, self._tokenizer.convert_ids_to_tokens([token for token, _ in kept]), strict=True
        ):
            if not groups or piece[:1] in _SPACES:
                groups.append([])
            groups[-1].append((token, sure))
        words = [
            SpokenWord(spelled, None, None, sum(sure for _, sure in group) / len(group))
            for group in groups
            if (spelled := self._tokenizer.decode([token for token, _ in group]).strip())
        ]
        return self._tokenizer.decode([token for token, _ in kept]), words

    def _spoken(self, inputs: Any) -> list[tuple[str | None, float | None]]:
        """Return each piece's likeliest language, and its probability among all languages."""
        import torch

        names = sorted(self._languages)
        start = self._model.generation_config.decoder_start_token_id
        features = inputs["input_features"]
        first_B1 = torch.full((len(features), 1), start, device=features.device)
        logits_BV = self._model(input_features=features, decoder_input_ids=first_B1).logits[:, -1].float()
        sure_BL = logits_BV[:, [self._languages[name] for name in names]].softmax(dim=-1)
        return [(names[int(sure_L.argmax())].strip("<|>"), float(sure_L.max())) for sure_L in sure_BL]


class _Piece(NamedTuple):
    text: str
    words: list[SpokenWord]
    language: str | None
    language_probability: float | None


def _value(pieces: Sequence[_Piece]) -> Value:
    """Join the pieces of one segment to its value; the language is that of the first piece."""
    words = [word for piece in pieces for word in piece.words]
    text = " ".join(piece.text for piece in pieces)
    first = pieces[0]
    return heard(text, words, first.language, first.language_probability, mean_confidence(words))
